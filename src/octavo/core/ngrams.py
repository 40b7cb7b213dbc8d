"""Prompt lookup: indexes the pairs of ids in a sequence, and drafts what followed the best match of the last ids.

Owns: the index of one sequence, and the share of its drafts that was accepted. Does not: decide when to draft (see
drafts), or store the ids.
Invariants: each id costs one entry. A draft looks at MAX_LOOKS positions at most. A pair is found only after an id
follows it, so the last pair of a sequence never matches itself.
Source: Saxena, "Prompt Lookup Decoding", 2023. Equal pairs are chained, newest first, as in DEFLATE (RFC 1951, 4).
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

MIN_MATCH = 2  # least ids that must match
MAX_MATCH = 4  # most ids compared to choose a match
MAX_COUNTED = 8  # most ids of the chosen match that are counted; longer ones are no likelier to continue
MAX_LOOKS = 32
FIRST_RATE = 0.5  # assumed share of accepted drafts for a new sequence
PROBE_RATE = 0.3  # assumed share of accepted drafts after a pause
WORTH = 0.2  # below this share of accepted drafts, drafts cost more than they save
LEARNING = 0.3  # weight of the latest result
PAUSES = (16, 512)  # tokens without drafts, the first time and at most; each failed probe doubles them


class Lookup(NamedTuple):
    """Ids that followed a match of the last ids, and how many ids matched (at most MAX_COUNTED)."""

    ids: array[int]
    num_matched: int


NO_LOOKUP = Lookup(array("i"), 0)


class NgramIndex:
    """Index of the pairs of adjacent ids in one sequence. Equal pairs are linked, newest first."""

    __slots__ = ("_before", "_newest")

    def __init__(self) -> None:
        self._newest: dict[int, int] = {}
        self._before = array("i")  # per position, the earlier position where the same pair ended; negative: none

    def add(self, ids: array[int], most: int) -> bool:
        """Index at most `most` further ids; return True once every id but the last is indexed."""
        newest, before = self._newest, self._before
        begin = len(before)
        end = min(len(ids) - 1, begin + most)
        if begin == 0 < end:
            before.append(-1)
            begin = 1
        for position in range(begin, end):
            pair = ids[position - 1] << 32 | ids[position]
            before.append(newest.get(pair, -1))
            newest[pair] = position
        return len(before) >= len(ids) - 1

    def draft(self, ids: array[int], count: int, least: int = MIN_MATCH) -> Lookup:
        """Return `count` ids that followed the longest earlier match of the last ids; of equal matches, the newest.

        Return no ids if fewer than `least` match. If the match overlaps the end, the draft repeats itself periodically.
        """
        at = self._find(ids, least)
        if at is None:
            return NO_LOOKUP
        draft = ids[at + 1 : at + 1 + count]
        period = len(draft)
        for position in range(period, count):
            draft.append(draft[position - period])
        last, match = len(ids) - 1, MIN_MATCH
        while match < MAX_COUNTED and match <= at and ids[at - match] == ids[last - match]:
            match += 1
        return Lookup(draft, match)

    def _find(self, ids: array[int], least: int) -> int | None:
        """Return the last position of the best match of at least `least` ids."""
        last = len(ids) - 1
        if last < 1:
            return None
        at = self._newest.get(ids[last - 1] << 32 | ids[last], -1)
        found, longest = None, least - 1
        for _ in range(MAX_LOOKS):
            if at < 0:
                break
            match = MIN_MATCH
            while match < MAX_MATCH and match <= at and ids[at - match] == ids[last - match]:
                match += 1
            if match > longest:
                found, longest = at, match
                if match == MAX_MATCH:
                    break
            at = self._before[at]
        return found


class DraftHistory:
    """One sequence's draft index, its recent share of accepted drafts, and the end of its pause from drafts."""

    __slots__ = ("index", "num_accepted", "num_drafted", "pause", "rate", "resume_at", "wait_at")

    def __init__(self) -> None:
        self.index = NgramIndex()
        self.rate = FIRST_RATE
        self.pause = PAUSES[0]
        self.resume_at = 0  # known tokens at which drafting starts or resumes
        self.wait_at = 0  # known tokens from which a row waits for a commit to get drafts
        self.num_drafted = 0
        self.num_accepted = 0

    def num_wanted(self, most: int) -> int:
        """Return the number of drafts to make, which grows with the share of recently accepted drafts."""
        return min(most, 1 + int(self.rate * most))

    def learn(self, num_drafted: int, num_accepted: int, num_known: int, may_pause: bool = True) -> None:
        """Record how many drafts were accepted; after too many rejections, pause drafting for this sequence."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self.rate += (num_accepted / num_drafted - self.rate) * LEARNING
        if self.rate < WORTH and may_pause:
            self.resume_at = num_known + self.pause
            self.pause = min(2 * self.pause, PAUSES[1])
            self.rate = PROBE_RATE
        elif self.rate > FIRST_RATE:
            self.pause = PAUSES[0]
