"""The fake executor itself, on hand-written plans: right plans give the oracle's text, wrong ones are noticed."""

from array import array

import pytest
from tests.fake_model import FakeExecutor, FakeModelError, oracle

from octavo.core.plan import ROW_CARRY, ROW_SAMPLE, NewSequence, StepPlan
from octavo.core.request import SamplingParams

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]


def new(slot: int, name: str = "a", ids: list[int] = PROMPT) -> NewSequence:
    return NewSequence(slot, name, 0, len(ids), array("i", ids), SamplingParams(temperature=0.0))


def plan(rows: list[tuple[int, int, int, int]], edits: tuple[int, ...] = (), **fields: object) -> StepPlan:
    columns = zip(*rows, strict=True) if rows else [()] * 4
    slots, starts, counts, flags = (array("i", column) for column in columns)
    return StepPlan(0, 0.0, slots, starts, counts, flags, edits=array("i", edits), **fields)


def executor(**options: object) -> FakeExecutor:
    made = FakeExecutor(vocab_size=50, **options)
    made.make_pool(4, (8,))
    return made


def run(made: FakeExecutor, *plans: StepPlan) -> list[int]:
    tickets = [made.submit(each) for each in plans]
    results = [made.collect(ticket) for ticket in tickets]
    return [token for result in results for token in result.token_ids or ()]


ENTER = plan([(0, 0, 8, ROW_SAMPLE)], (0, 0, 0, 3, 0, 0, 1, 5), new_sequences=(new(0),))


@pytest.mark.parametrize("lazy", [False, True])
def test_decoding_through_the_table_gives_the_oracles_text(lazy: bool) -> None:
    decode = [plan([(0, 8, 1, ROW_SAMPLE | ROW_CARRY)], (0, 0, 2, 1)), plan([(0, 9, 1, ROW_SAMPLE | ROW_CARRY)])]
    assert run(executor(lazy=lazy), ENTER, *decode) == oracle(PROMPT, 3, 50)


def test_chunks_give_the_oracles_text() -> None:
    first = plan([(0, 0, 3, 0)], (0, 0, 0, 3), new_sequences=(new(0),))
    second = plan([(0, 3, 5, ROW_SAMPLE)], (0, 0, 1, 5))
    assert run(executor(), first, second) == oracle(PROMPT, 1, 50)


def test_a_prefix_hit_in_the_same_plan_works_in_either_order() -> None:
    for rows in ([(0, 0, 8, 1), (1, 4, 5, 1)], [(1, 4, 5, 1), (0, 0, 8, 1)]):
        both = plan(
            rows,
            (0, 0, 0, 3, 0, 0, 1, 5, 1, 0, 0, 3, 1, 0, 1, 6, 1, 0, 2, 7),
            new_sequences=(new(0), new(1, "b", [*PROMPT[:4], 9, 9, 9, 9, 9])),
        )
        assert sorted(run(executor(), both)) == sorted(
            oracle(PROMPT, 1, 50) + oracle([*PROMPT[:4], 9, 9, 9, 9, 9], 1, 50)
        )


def test_a_full_hit_needs_a_copy_of_the_last_block() -> None:
    made = executor()
    run(made, ENTER)
    copied = plan([(1, 7, 1, 1)], (1, 0, 0, 3, 1, 0, 1, 6), copies=array("i", (0, 5, 6)), new_sequences=(new(1, "b"),))
    assert run(made, copied) == oracle(PROMPT, 1, 50)
    shared = plan([(2, 7, 1, 1)], (2, 0, 0, 3, 2, 0, 1, 5), new_sequences=(new(2, "c"),))
    with pytest.raises(FakeModelError, match="position 7 of block 5, group 0, again"):
        run(made, shared)


def test_stale_content_gives_wrong_text_without_strict_and_is_reported_with_it() -> None:
    other = [40, *PROMPT[1:]]
    stale = plan([(1, 4, 4, 1)], (1, 0, 0, 3, 1, 0, 1, 6), new_sequences=(new(1, "b", other),))
    lenient = executor(strict=False)
    run(lenient, ENTER)
    assert run(lenient, stale) != oracle(other, 1, 50)
    strict = executor()
    run(strict, ENTER)
    with pytest.raises(FakeModelError, match="foreign content"):
        run(strict, stale)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (plan([(0, 8, 1, ROW_SAMPLE)]), "table of 2 blocks"),
        (plan([(0, 9, 1, ROW_SAMPLE)], (0, 0, 2, 1)), "no such ids"),
        (plan([(0, 7, 1, ROW_SAMPLE)]), "follows 8"),
        (plan([(0, 8, 1, ROW_SAMPLE)], (0, 0, 2, 3)), "while a live table holds it"),
        (plan([(0, 8, 1, ROW_SAMPLE)], (0, 0, 3, 1)), "edit"),
        (plan([(0, 8, 1, ROW_SAMPLE)], (0, 0, 2, -1)), "does not exist"),
        (plan([(0, 8, 1, ROW_SAMPLE)], (0, 0, 2, 8)), "edit"),
        (plan([(0, 8, 1, ROW_SAMPLE)], (0, 0, 0, -1, 0, 0, 2, 1)), "hole"),
        (plan([(0, 8, 1, ROW_SAMPLE)], (0, 0, 0, 6, 0, 0, 2, 1)), "something else"),
        (plan([(0, 8, 1, ROW_SAMPLE), (0, 9, 1, ROW_SAMPLE)], (0, 0, 2, 1)), "two rows"),
        (plan([(1, 8, 1, ROW_SAMPLE)]), "which is empty"),
        (plan([(1, 0, 8, 1)], (1, 0, 0, 1, 1, 0, 1, 2), new_sequences=(new(1), new(0))), "still holds"),
        (plan([(0, 8, 1, 1)], (0, 0, 2, 1), copies=array("i", (0, 3, 5))), "which a live table holds"),
        (plan([(0, 8, 1, 1)], (0, 0, 2, 1), copies=array("i", (0, 3, 6, 0, 5, 6))), "one destination"),
        (plan([(1, 4, 4, 1)], (1, 0, 0, 1, 1, 0, 1, 2), new_sequences=(new(1, "b"),)), "nobody wrote"),
    ],
)
def test_a_wrong_plan_is_noticed(bad: StepPlan, message: str) -> None:
    made = executor()
    run(made, ENTER)
    with pytest.raises(FakeModelError, match=message):
        run(made, bad)
