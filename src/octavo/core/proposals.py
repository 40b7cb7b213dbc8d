"""The interface between the scheduler and a source of drafts outside the core, such as a draft model.

Owns: what a source sees of a row, and the protocol. Does not: choose rows or verify drafts (drafts).
"""

from __future__ import annotations

from array import array
from typing import NamedTuple, Protocol

from octavo.core.request import Request


class DraftRow(NamedTuple):
    """A row that may have up to `most` drafts. `token_ids` are all ids that the host knows (empty
    if it knows only lengths): neither change nor keep them.

    `num_left` bounds how many more tokens the sequence can get.
    """

    request: Request
    slot: int
    choice: int
    token_ids: array[int]
    most: int
    num_left: int


class DraftSource(Protocol):
    """Proposes drafts. Proposals are inputs of the scheduler, as results are, so they may depend on anything."""

    beside_ngrams: bool  # prompt lookup proposes drafts too
    knows_lengths: bool  # it also proposes for requests of which only lengths are known

    def propose(self, rows: list[DraftRow]) -> list[array[int]]:
        """Return up to `most` ids for each row, possibly none."""
        ...
