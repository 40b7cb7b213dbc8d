"""The search for the request that makes steps fail."""

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.suspects import (
    FIRST_PAUSE,
    MAX_CULPRITS,
    MAX_FAILURES,
    MAX_PAUSE,
    MEMORY_TRIES,
    MIN_TOKENS,
    StepLimit,
    Suspects,
)


def search(names: list[str], culprits: set[str], max_rows: int) -> tuple[list[str], int]:
    """Steps of at most max_rows rows; each good row commits a token and ends its request."""
    suspects, live, ended, steps = Suspects(), list(names), [], 0
    while live:
        steps += 1
        only = suspects.only
        rows = [name for name in live if only is None or name in only][:max_rows]
        if culprits & set(rows):
            for name in suspects.failed(rows):
                live.remove(name)
                ended.append(name)
                suspects.clear([name])
        else:
            suspects.progressed(rows)
            live = [name for name in live if name not in rows]
    return ended, steps


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 40), st.sets(st.integers(0, 39), max_size=6), st.integers(1, 40))
def test_L05_exactly_the_culprits_are_ended(count: int, guilty: set[int], max_rows: int) -> None:
    names = [f"r{i}" for i in range(count)]
    culprits = {f"r{i}" for i in guilty if i < count}
    ended, steps = search(names, culprits, max_rows)
    assert sorted(ended) == sorted(culprits)
    assert steps <= count + 16 * (len(culprits) + 1)


def test_a_group_that_cannot_run_is_set_aside() -> None:
    suspects = Suspects()
    suspects.failed(["a", "b"])
    assert suspects.only == {"a", "b"}
    suspects.set_aside(frozenset({"other"}))
    assert suspects.only == {"a", "b"}
    suspects.set_aside(frozenset({"a", "b"}))
    assert suspects.only is None


def test_failures_without_end_mean_a_broken_executor() -> None:
    suspects = Suspects()
    for _ in range(2 * MAX_FAILURES + 1):
        suspects.failed([])
    assert suspects.is_executor_broken
    suspects = Suspects()
    for index in range(MAX_CULPRITS):
        assert suspects.failed([f"r{index}"]) == ()
        assert suspects.failed([f"r{index}"]) == (f"r{index}",)
    assert suspects.is_executor_broken


def test_requests_that_fail_only_together_are_not_ended() -> None:
    suspects = Suspects()
    for _ in range(5):
        assert suspects.failed(["a", "b"]) == ()
        assert suspects.failed(["a", "b"]) == ()
        for name in ("a", "b"):
            assert suspects.only == {name}
            suspects.progressed([name])
        assert suspects.only is None


def test_row_19_steps_without_memory_are_made_smaller_before_anybody_is_suspected() -> None:
    told: list[int | None] = []
    suspects = Suspects(told.append)
    for num_tokens in (512, 256, 100, 50, 25, 12):
        assert suspects.failed(["a", "b"], num_tokens) == () and suspects.only is None
    assert told == [256, 128, 50, 25, 12, 8]
    for _ in range(2):
        assert suspects.failed(["a", "b"], MIN_TOKENS) == () and suspects.only is not None
    assert suspects.only == {"a"}


def test_row_19_a_lone_request_is_ended_for_want_of_memory_after_several_tries_only() -> None:
    suspects = Suspects()
    assert [suspects.failed(["a"], 1) for _ in range(MEMORY_TRIES)] == [()] * (MEMORY_TRIES - 1) + [("a",)]


def test_row_19_the_limit_is_doubled_after_a_while_and_lifted_and_tried_less_often_where_that_fails() -> None:
    told: list[int | None] = []
    limit = StepLimit(told.append)

    def steps_until_lifted() -> int:
        count = 0
        while limit.tokens is not None:
            limit.stepped()
            count += 1
        return count

    assert limit.shrink(100)
    assert steps_until_lifted() == 2 * FIRST_PAUSE and told == [50, 100, None]
    counts = []
    for _ in range(8):
        assert limit.shrink(100)
        counts.append(steps_until_lifted())
    assert counts == sorted(counts) and counts[0] == 4 * FIRST_PAUSE and counts[-1] == 2 * MAX_PAUSE
    for _ in range(MAX_PAUSE):
        limit.stepped()
    assert limit.shrink(100) and steps_until_lifted() == 2 * FIRST_PAUSE
