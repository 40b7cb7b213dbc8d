"""The state of one output in its grammar, and the masks of the ids that a step's rows may sample.

Owns: the layout of masks, the state, the committed ids that are not consumed yet, and the failure that ended the state.
Does not: choose ids, or know other outputs.
Invariants: the state is a function of grammar and ids alone. It is never rolled back: after a rollback llguidance
allows more than before (it may split a forced text in another way), so a fork consumes drafts.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octavo.errors import EngineError, OctavoError, TooComplexError
from octavo.grammar.limits import grammar_error, parser_limits
from octavo.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

NO_FURTHER = "the grammar cannot be followed any further"
Bits = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Masks:
    """Masks of one step, for an executor. Sampled positions without an entry may sample any id.

    `positions` index the step's sampled positions, ascending (a row with d drafts has 1 + d). `bits_MW` has
    ceil(V / 32) int32 words per position: bit i % 32 of word i // 32 is id i.
    """

    positions: NDArray[np.int64]
    bits_MW: NDArray[np.int32]


class Matcher:
    """The grammar's state for one output. `pending` ids are consumed when the next mask is made, off the step loop."""

    __slots__ = ("_inner", "failure", "num_ids", "pending")

    def __init__(self, inner: LLMatcher, num_ids: int = 0) -> None:
        self._inner = inner
        self.num_ids = num_ids  # including pending ids
        self.pending: array[int] = array("i")
        self.failure: OctavoError | None = None

    @classmethod
    def of(cls, grammar: str, vocabulary: Vocabulary, eos_token_ids: tuple[int, ...]) -> Matcher:
        """Build a matcher at the start of its output. Raises InvalidRequestError with llguidance's reason."""
        from llguidance import LLMatcher

        inner = LLMatcher(vocabulary.reader(eos_token_ids), grammar, log_level=0, limits=parser_limits())
        if inner.is_error():
            raise grammar_error("the grammar cannot be followed", inner.get_error(), "grammar")
        return cls(inner)

    def fork(self) -> Matcher:
        """Return an independent copy in the same state."""
        self._consume_pending()
        child = Matcher(self._inner.deep_copy(), self.num_ids)
        child.failure = self.failure
        return child

    def commit(self, position: int, token: int) -> None:
        """Record the output id at a position. An id that is already recorded changes nothing."""
        if position == self.num_ids:
            self.pending.append(token)
            self.num_ids += 1

    def replay(self, ids: Sequence[int]) -> None:
        """Consume all ids of an output, except those that were consumed before."""
        for position in range(self.num_ids, len(ids)):
            self.commit(position, ids[position])
        self._consume_pending()

    def fill(self, lines: Bits, drafts: Sequence[int] = ()) -> None:
        """Write the mask of allowed next ids into the first line, and the mask after each draft into the later lines.

        A line has one bit per id. Lines after a draft that is not allowed stay unchanged; if `failure` is set, all
        lines do.
        """
        self._consume_pending()
        if self.failure is not None or not self._fill_line(lines[0]) or not len(drafts):
            return
        ahead = Matcher(self._inner.deep_copy())
        for line, draft in zip(lines[1:], drafts, strict=True):
            if not (ahead._inner.consume_token(draft) and ahead._fill_line(line)):
                return

    def _fill_line(self, line: Bits) -> bool:
        kept = line.copy()
        self._inner.unsafe_compute_mask_ptr(line.ctypes.data, line.nbytes)
        if self._inner.is_error():
            line[:] = kept
            self.failure = grammar_error(NO_FURTHER, self._inner.get_error(), "grammar")
        return self.failure is None

    def _consume_pending(self) -> None:
        """Consume the pending ids."""
        ids, self.pending = self.pending, array("i")
        if ids and self.failure is None and not self._inner.consume_tokens(ids.tolist()):
            error = grammar_error(NO_FURTHER, self._inner.get_error(), "grammar")
            is_at_limit = isinstance(error, TooComplexError)
            self.failure = error if is_at_limit else EngineError(f"the output does not obey its grammar: {error}")
