"""The index of pairs: the longest of the latest matches, incrementally, at a bounded cost."""

from __future__ import annotations

import random
from array import array

from octavo.core.ngrams import MAX_MATCH, NgramIndex


def draft(ids: list[int], count: int) -> list[int]:
    index, packed = NgramIndex(), array("i", ids)
    assert index.add(packed, len(ids))
    return list(index.draft(packed, count).ids)


def slow(ids: list[int], count: int) -> list[int]:
    """The same by looking everywhere."""
    for size in range(MAX_MATCH, 1, -1):
        for end in range(len(ids) - 1, size - 1, -1):
            if len(ids) >= size and ids[end - size : end] == ids[-size:]:
                known = ids[:]
                for position in range(end, end + count):
                    known.append(known[position])
                return known[len(ids) :]
    return []


def test_what_followed_the_same_pair_is_drafted() -> None:
    assert draft([1, 2, 3, 4, 5, 1, 2], 3) == [3, 4, 5]
    assert draft([1, 2, 3, 4, 1, 2], 9) == [3, 4, 1, 2, 3, 4, 1, 2, 3], "a match at the end goes on as a period"
    assert draft([7, 7, 7], 3) == [7, 7, 7]


def test_a_longer_match_wins_and_then_the_newer() -> None:
    assert draft([9, 1, 2, 50, 0, 1, 2, 60, 9, 1, 2], 1) == [50]
    assert draft([9, 1, 2, 50, 9, 1, 2, 60, 9, 1, 2], 1) == [60]


def test_there_may_be_none() -> None:
    assert draft([], 3) == draft([1], 3) == draft([1, 2], 3) == draft([1, 2, 3, 2], 3) == []


def test_it_equals_a_search_everywhere() -> None:
    rng = random.Random(5)
    for _ in range(300):
        ids = [rng.randrange(4) for _ in range(rng.randrange(40))]
        assert draft(ids, 5) == slow(ids, 5), ids


def test_taking_in_a_few_at_a_time_gives_the_same() -> None:
    rng = random.Random(6)
    ids = array("i", [rng.randrange(5) for _ in range(120)])
    index = NgramIndex()
    for size in range(1, len(ids) + 1):
        assert index.add(ids[:size], 1), "one id a step keeps up"
        assert list(index.draft(ids[:size], 4).ids) == draft(list(ids[:size]), 4)
    late = NgramIndex()
    assert not late.add(ids, 50) and not late.add(ids, 50) and late.add(ids, 50)
    assert late.draft(ids, 4) == index.draft(ids, 4)


def test_the_ids_that_matched_are_counted() -> None:
    for size, ids in ((0, [1, 2, 3]), (2, [1, 2, 9, 1, 2]), (3, [8, 1, 2, 9, 8, 1, 2]), (8, [*range(20), *range(20)])):
        index, packed = NgramIndex(), array("i", ids)
        assert index.add(packed, len(ids))
        assert index.draft(packed, 3).num_matched == size
