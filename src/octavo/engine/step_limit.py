"""How large a step may be since the executor ran out of memory.

Owns: the limit, halved by each such failure and doubled again when steps went well for a while. Does not: say who is
at fault (suspects), or plan (the scheduler takes the limit).
Invariants: the limit is never below MIN_TOKENS, where smaller steps would not help; it is lifted in the end, and
tried less and less often where each try fails.
"""

from __future__ import annotations

from collections.abc import Callable

MIN_TOKENS = 8
FIRST_PAUSE = 32  # steps that must go well before the limit is doubled; each failure doubles that
MAX_PAUSE = 4096


class StepLimit:
    """Tokens in one step at most; None = as configured. `apply` is told each change."""

    def __init__(self, apply: Callable[[int | None], object]) -> None:
        self.tokens: int | None = None
        self._apply = apply
        self._pause = FIRST_PAUSE
        self._most = 0  # tokens of the largest step that failed
        self._num_free = MAX_PAUSE  # steps without a limit since the last failure
        self._left = 0  # steps until the limit is doubled

    def shrink(self, num_tokens: int) -> bool:
        """A step of so many tokens ran out of memory. False when it was too small for a smaller one to help."""
        if num_tokens <= MIN_TOKENS:
            return False
        self._pause = FIRST_PAUSE if self._num_free >= MAX_PAUSE else min(2 * self._pause, MAX_PAUSE)
        self._num_free = 0
        self._most = max(self._most, num_tokens)
        self._set(max(MIN_TOKENS, num_tokens // 2))
        return True

    def stepped(self) -> None:
        """A step went well."""
        if self.tokens is None:
            self._num_free += 1
            return
        self._left -= 1
        if self._left <= 0:
            self._set(2 * self.tokens if 2 * self.tokens <= self._most else None)

    def _set(self, tokens: int | None) -> None:
        self.tokens, self._left = tokens, self._pause
        self._most = self._most if tokens else 0
        self._apply(tokens)
