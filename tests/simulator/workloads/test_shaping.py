"""Windows, scaled rates, limits and lengths: nothing is left out or changed in silence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from octavo.simulator.arrival import Arrival
from octavo.simulator.workloads import Shaping, open_workload, shape_arrivals
from octavo.simulator.workloads.spec import Notes


def run(arrivals: list[Arrival], notes: Notes | None = None, **shaping: Any) -> list[Arrival]:
    """Shape a list."""
    return list(shape_arrivals(iter(arrivals), Shaping(**shaping), notes or Notes()))


def at(*times: float) -> list[Arrival]:
    """Requests of ten and five tokens."""
    return [Arrival(time, 10, 5) for time in times]


def test_a_window_starts_at_zero_and_a_scale_shortens_it() -> None:
    notes = Notes()
    left = run(at(1, 5, 6, 8, 9), notes, start=5, end=9, rate_scale=2)
    assert [one.time for one in left] == [0, 0.5, 1.5]
    assert notes.counts == {"before the window, left out": 1}


def test_a_limit_reads_no_more_than_it_needs() -> None:
    def endless() -> Iterator[Arrival]:
        yield from at(1, 2, 3)
        raise AssertionError("nobody asked for the fourth")

    assert len(list(shape_arrivals(endless(), Shaping(limit=2), Notes()))) == 2


def test_a_window_over_an_endless_workload_ends() -> None:
    def endless() -> Iterator[Arrival]:
        yield from at(*range(1000))
        raise AssertionError("behind the window nothing is asked for")

    assert len(list(shape_arrivals(endless(), Shaping(end=10), Notes(), has_followers=False))) == 10


def test_who_follows_somebody_left_out_is_left_out_and_the_others_keep_their_leader() -> None:
    arrivals = [*at(0, 1), Arrival(2, 10, 5, follows=0), Arrival(2, 10, 5, follows=1), Arrival(3, 10, 5, follows=3)]
    notes = Notes()
    left = run(arrivals, notes, start=1, rate_scale=4)
    assert [(one.time, one.follows) for one in left] == [(0, None), (2, 0), (3, 1)]  # pauses keep their length
    assert notes.counts["turns left out because an earlier turn of their conversation was left out"] == 1


@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        (60, 40, (60, 40)),
        (90, 20, (80, 20)),
        (10, 200, (10, 90)),
        (500, 500, (50, 50)),
        (99, 1, (99, 1)),
        (100, 1, (99, 1)),
    ],
)
def test_a_request_is_clipped_to_the_length(prompt: int, output: int, expected: tuple[int, int]) -> None:
    keys = tuple(range(prompt // 16))
    notes = Notes()
    [one] = run([Arrival(0, prompt, output, keys=keys, key_tokens=16)], notes, max_len=100, too_long="clip")
    assert (one.prompt_tokens, one.output_tokens) == expected
    assert one.keys == keys[: expected[0] // 16]
    cut = notes.counts.get("prompt tokens cut", 0), notes.counts.get("output tokens cut", 0)
    assert cut == (prompt - expected[0], output - expected[1])


def test_too_long_ones_are_dropped_or_left_to_the_engine_and_counted() -> None:
    notes = Notes()
    assert run([Arrival(0, 90, 20)], notes, max_len=100, too_long="drop") == []
    assert run([Arrival(0, 90, 20)], notes, max_len=100) == [Arrival(0, 90, 20)]
    assert sorted(notes.counts) == [
        "longer than 100 tokens, left out",
        "longer than 100 tokens, left to the engine, which refuses such prompts and ends such answers",
    ]


def test_notes_are_of_the_last_reading_alone() -> None:
    workload = open_workload("poisson:rate=1,prompt=90,output=20,requests=5", Shaping(max_len=100, too_long="drop"))
    for _ in range(2):
        assert list(workload) == []
        assert workload.notes.counts == {"longer than 100 tokens, left out": 5}
