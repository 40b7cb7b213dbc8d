"""Prompt lookup: an index of the pairs of ids in a sequence, and what followed the best match of its end.

Owns: the index of one sequence, and how good its drafts were. Does not: decide when to draft (see drafts), or
store the ids.
Invariants: each id costs one entry; a draft looks at MAX_LOOKS places at most; a pair is found only
once an id follows it, so a sequence never matches its own end.
Source: Saxena, "Prompt Lookup Decoding", 2023. Equal pairs are chained, newest first, as in DEFLATE (RFC 1951, 4).
"""

from __future__ import annotations

from array import array

MAX_MATCH = 4  # ids compared; a longer match predicts no better
MAX_LOOKS = 32
FIRST_RATE = 0.5  # assumed share of accepted drafts of a new sequence
PROBE_RATE = 0.3  # the same after a pause
WORTH = 0.2  # below this share of accepted drafts they cost more than they save
LEARNING = 0.3  # weight of the latest result
PAUSES = (16, 512)  # tokens without drafts, the first time and at most; each failed probe doubles them


class NgramIndex:
    """Pairs of one sequence's ids by their last position, newest first."""

    __slots__ = ("_before", "_newest")

    def __init__(self) -> None:
        self._newest: dict[int, int] = {}
        self._before = array("i")  # per position, where the pair that ends there ended before; negative: nowhere

    def add(self, ids: array[int], most: int) -> bool:
        """Index at most `most` further ids; return True once only the last id is left out."""
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

    def draft(self, ids: array[int], count: int) -> array[int]:
        """Return `count` ids that followed the longest match of the end, the newest of those as long; or none.

        At least two ids must match. A match that overlaps the end repeats its own draft, like a period.
        """
        at = self._find(ids)
        if at is None:
            return array("i")
        draft = ids[at + 1 : at + 1 + count]
        period = len(draft)
        for position in range(period, count):
            draft.append(draft[position - period])
        return draft

    def _find(self, ids: array[int]) -> int | None:
        """Return the last position of the best match."""
        last = len(ids) - 1
        if last < 1:
            return None
        at = self._newest.get(ids[last - 1] << 32 | ids[last], -1)
        found, longest = None, 1
        for _ in range(MAX_LOOKS):
            if at < 0:
                break
            match = 2
            while match < MAX_MATCH and match <= at and ids[at - match] == ids[last - match]:
                match += 1
            if match > longest:
                found, longest = at, match
                if match == MAX_MATCH:
                    break
            at = self._before[at]
        return found


class DraftHistory:
    """One sequence's drafts: the index, the share accepted lately, and until when there are none."""

    __slots__ = ("index", "num_accepted", "num_drafted", "pause", "rate", "resume_at")

    def __init__(self) -> None:
        self.index = NgramIndex()
        self.rate = FIRST_RATE
        self.pause = PAUSES[0]
        self.resume_at = 0  # known tokens from which on it is drafted for
        self.num_drafted = 0
        self.num_accepted = 0

    def num_wanted(self, most: int) -> int:
        """Return the number of drafts to make: more if more of the last ones were accepted."""
        return min(most, 1 + int(self.rate * most))

    def learn(self, num_drafted: int, num_accepted: int, num_known: int) -> None:
        """Note a result; after too many rejections there are no drafts for a while."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self.rate += (num_accepted / num_drafted - self.rate) * LEARNING
        if self.rate < WORTH:
            self.resume_at = num_known + self.pause
            self.pause = min(2 * self.pause, PAUSES[1])
            self.rate = PROBE_RATE
        elif self.rate > FIRST_RATE:
            self.pause = PAUSES[0]
