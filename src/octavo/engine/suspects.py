"""After failed steps: find the request that makes steps fail, or make steps smaller if memory ran out.

Suspects finds the request by a retry and then by bisection: a group of requests runs alone until each has made progress
(a committed token, or its end) or a step fails again. A request is failed when it has failed alone twice in a row, so
that a transient fault fails no request; for lack of memory, MEMORY_TRIES times in a row with the smallest steps.
StepLimit halves the tokens of a step after one ran out of memory, and doubles them again when steps succeed.
Does not: plan, cancel or call an executor.
Invariants: a request with progress leaves the search. A group only gets smaller, so a search ends. The limit is never
below MIN_TOKENS. If larger steps keep failing, they are tried less and less often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from octavo.core.plan import ROW_BEAM, Event, EventKind, StepPlan

MAX_FAILURES = 128  # failed steps in a row, of any requests, after which all requests of the failing plan are ended
MEMORY_TRIES = 8
MAX_CULPRITS = 32  # requests failed in a row without a committed token, after which the executor is at fault
MIN_TOKENS = 8
FIRST_PAUSE = 32  # steps that must succeed before the limit is doubled; each failure doubles this number
MAX_PAUSE = 4096


class StepLimit:
    """The maximum number of tokens in one step; None = as configured. `apply` is called with each new limit."""

    def __init__(self, apply: Callable[[int | None], object]) -> None:
        self.tokens: int | None = None
        self._apply = apply
        self._pause = FIRST_PAUSE
        self._most = 0  # tokens of the largest step that failed
        self._num_free = MAX_PAUSE  # steps without a limit since the last failure
        self._left = 0  # steps until the limit is doubled

    def shrink(self, num_tokens: int) -> bool:
        """Halve the limit after a step of `num_tokens` ran out of memory; return False if it was too small to halve."""
        if num_tokens <= MIN_TOKENS:
            return False
        self._pause = FIRST_PAUSE if self._num_free >= MAX_PAUSE else min(2 * self._pause, MAX_PAUSE)
        self._num_free = 0
        self._most = max(self._most, num_tokens)
        self._set(max(MIN_TOKENS, num_tokens // 2))
        return True

    def stepped(self) -> None:
        """Record a successful step; double the limit after enough successful steps."""
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


class Suspects:
    """The search for a failing request. `only` has the requests that the next plan may contain; None means no search.

    `limit_step` is called with the maximum number of tokens of a step whenever that changes.
    """

    def __init__(self, limit_step: Callable[[int | None], object] = lambda _: None) -> None:
        self.step_limit = StepLimit(limit_step)
        self._groups: list[list[str]] = []  # the last one runs alone
        self._failed_alone: str | None = None  # the request that ran alone in the last failed step
        self._num_alone = 0  # failed steps in a row in which that request ran alone
        self._num_failures = 0
        self._num_culprits = 0

    @property
    def only(self) -> frozenset[str] | None:
        """Ids of the group that runs alone, or None."""
        return frozenset(self._groups[-1]) if self._groups else None

    @property
    def is_executor_broken(self) -> bool:
        """True if so many steps failed without a token in between that the requests cannot be the cause."""
        return self._num_culprits >= MAX_CULPRITS or self._num_failures > 2 * MAX_FAILURES

    def failed(self, ids: Iterable[str], memory_tokens: int = 0) -> tuple[str, ...]:
        """Record a failed step with rows of `ids`; return the requests to fail (usually none, or one).

        `memory_tokens`: the tokens of a step that ran out of memory, else 0.
        """
        if self.step_limit.shrink(memory_tokens):
            return ()
        group = list(dict.fromkeys(ids))
        self._num_failures += 1
        if self._num_failures > MAX_FAILURES:
            self._groups.clear()
            return self._blame(group)
        is_first = not self._groups
        if not is_first:
            self._groups.pop()
        alone = group[0] if len(group) == 1 else None
        self._num_alone = self._num_alone + 1 if alone == self._failed_alone and not is_first else 1
        self._failed_alone = alone
        if alone is not None and self._num_alone >= (MEMORY_TRIES if memory_tokens else 2):
            return self._blame(group)
        if is_first or alone is not None:  # the same requests, or the single one, try again
            self._groups += [group] if group else []
        else:
            middle = (len(group) + 1) // 2
            self._groups += [half for half in (group[middle:], group[:middle]) if half]
        return ()

    def stepped(self, plan: StepPlan, owners: Mapping[int, str], ids: Iterable[str] = ()) -> None:
        """Record a successful step with tokens for `ids`. For a beam search a row is progress: its tokens come last."""
        self.step_limit.stepped()
        if self._groups or self._num_failures or self._num_culprits:
            beams = [owners[slot] for slot, flags in zip(plan.slots, plan.flags, strict=True) if flags & ROW_BEAM]
            if progressed := [*ids, *beams]:
                self.progressed(progressed)

    def progressed(self, ids: Iterable[str]) -> None:
        """Clear requests that committed a token."""
        self._num_failures = 0
        self._num_culprits = 0
        self.clear(ids)

    def ended(self, decisions: Iterable[Event]) -> None:
        """Remove the requests that ended from the search."""
        if self._groups:
            self.clear(event.request_id for event in decisions if event.kind == EventKind.FINISHED)

    def clear(self, ids: Iterable[str]) -> None:
        """Remove requests from the search."""
        if self._groups:
            cleared = set(ids)
            groups = ([name for name in group if name not in cleared] for group in self._groups)
            self._groups = [group for group in groups if group]

    def set_aside(self, only: frozenset[str]) -> None:
        """Drop the group that runs alone, because its plan was empty. A later failure starts a new search."""
        if self._groups and frozenset(self._groups[-1]) == only:
            self._groups.pop()

    def _blame(self, group: list[str]) -> tuple[str, ...]:
        self._num_culprits += len(group)
        return tuple(group)
