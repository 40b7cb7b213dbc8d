"""The interface between the scheduler and a source of drafts outside the core, such as a draft model.

Owns: what a source sees of a row, the protocol, and which requests' drafts may be verified by rejection sampling.
Does not: choose rows or verify drafts (drafts).
"""

from __future__ import annotations

from array import array
from typing import NamedTuple, Protocol

from octavo.core.ngrams import MAX_MATCH, MIN_MATCH, NO_LOOKUP, Lookup
from octavo.core.request import Request, SamplingParams

ANY_LOOKUP = MIN_MATCH  # ids that must match for a row to have a lookup, of a source with nothing better
LONG_LOOKUP = MAX_MATCH  # and of one that has


class DraftRow(NamedTuple):
    """A row that may have up to `most` drafts. `token_ids` are all ids that the host knows (empty
    if it knows only lengths): neither change nor keep them.

    `num_left` bounds how many more tokens the sequence can get. `lookup` has up to `most` ids that prompt lookup found.
    """

    request: Request
    slot: int
    choice: int
    token_ids: array[int]
    most: int
    num_left: int
    lookup: Lookup = NO_LOOKUP


class DraftSource(Protocol):
    """Proposes drafts. Proposals are inputs of the scheduler, as results are, so they may depend on anything."""

    min_match: int  # ids that must match for a row to have a lookup; 0 = rows have none
    knows_lengths: bool  # it also proposes for requests of which only lengths are known

    def propose(self, rows: list[DraftRow], num_rows: int) -> list[array[int]]:
        """Return up to `most` ids for each row, possibly none, for a plan of `num_rows` rows, maybe none of these.

        Called for each plan that may have drafts.
        """


def may_reject(params: SamplingParams) -> bool:
    """Return True if a request's drafts may be verified by rejection sampling, where that is configured.

    A greedy request has nothing to gain. After the death of an engine a request with several sequences begins at its
    first token, so its ids must be a function of its seed.
    """
    return params.temperature > 0 and params.num_sequences == 1
