"""The fake executor on hand-written plans with forks, beams, windows, the host tier and media items."""

from __future__ import annotations

import random
from array import array

import pytest
from tests.beam_reference import beam_reference
from tests.fake_model import FakeExecutor, FakeModelError, Faults, oracle

from octavo.core.limits import GroupKind, GroupSpec
from octavo.core.plan import (
    ROW_BEAM,
    ROW_CARRY,
    ROW_FORK,
    ROW_SAMPLE,
    EncodeJob,
    NewSequence,
    StepPlan,
    StepResult,
)
from octavo.core.request import SamplingParams, Span

PROMPT = [5, 6, 7, 8, 9, 10]
VOCAB = 50
CARRY = ROW_SAMPLE | ROW_CARRY
FORK = ROW_SAMPLE | ROW_FORK
BOTH = (GroupSpec(), GroupSpec(GroupKind.SLIDING, 5))


def new(slot: int, ids: list[int] = PROMPT, choice: int = 0, num_prompt: int = 0, **params: object) -> NewSequence:
    asked = SamplingParams(temperature=0.0, **params)
    return NewSequence(slot, "a", choice, num_prompt or len(ids), array("i", ids), asked)


def plan(rows: list[tuple[int, int, int, int]], edits: tuple[int, ...] = (), **fields: object) -> StepPlan:
    columns = zip(*rows, strict=True) if rows else [()] * 4
    slots, starts, counts, flags = (array("i", column) for column in columns)
    for name in ("copies", "swap_outs", "host_loads", "id_edits", "freed_slots"):
        if name in fields:
            fields[name] = array("i", fields[name])
    return StepPlan(0, 0.0, slots, starts, counts, flags, edits=array("i", edits), **fields)


def executor(groups: tuple[GroupSpec, ...] = (GroupSpec(),), **options: object) -> FakeExecutor:
    made = FakeExecutor(groups, vocab_size=VOCAB, **options)
    made.make_pool(4, (8,) * len(groups), (4,) * len(groups))
    return made


def run(made: FakeExecutor, *plans: StepPlan) -> list[StepResult]:
    return [made.collect(made.submit(each)) for each in plans]


def ids_of(results: list[StepResult]) -> list[int]:
    return [token for result in results for token in result.token_ids or ()]


def choices(count: int, num_outputs: int) -> list[list[int]]:
    return [oracle(PROMPT, num_outputs, VOCAB, choice=choice) for choice in range(count)]


# -- forks

FORKED = plan(
    [(0, 0, 6, ROW_SAMPLE), (1, 6, 0, FORK)],
    (0, 0, 0, 3, 0, 0, 1, 5, 1, 0, 0, 3, 1, 0, 1, 5),
    new_sequences=(new(0), new(1, choice=1)),
)


def test_forked_choices_share_the_prompt_and_copy_the_tail_on_write() -> None:
    decode = plan([(0, 6, 1, CARRY), (1, 6, 1, CARRY)], (1, 0, 1, 6), copies=(0, 5, 6))
    got = ids_of(run(executor(), FORKED, decode))
    first, second = choices(2, 2)
    assert got == [first[0], second[0], first[1], second[1]]


def test_a_shared_tail_is_not_written() -> None:
    made = executor()
    run(made, FORKED)
    with pytest.raises(FakeModelError, match="choice 1 shares from 6 on"):
        run(made, plan([(0, 6, 1, CARRY)]))


def test_a_shared_tail_may_be_written_by_the_one_that_is_left() -> None:
    made = executor()
    run(made, FORKED)
    assert ids_of(run(made, plan([(1, 6, 1, CARRY)], freed_slots=(0,)))) == [choices(2, 2)[1][1]]


def test_a_fork_needs_the_logits_of_its_own_request() -> None:
    other = NewSequence(0, "b", 0, 6, array("i", PROMPT), SamplingParams(temperature=0.0))
    stranger = plan(
        [(0, 0, 6, ROW_SAMPLE), (1, 6, 0, FORK)],
        (0, 0, 0, 3, 0, 0, 1, 5, 1, 0, 0, 3, 1, 0, 1, 5),
        new_sequences=(other, new(1, choice=1)),
    )
    with pytest.raises(FakeModelError, match="is forked from the logits of 'b'"):
        run(executor(), stranger)
    with pytest.raises(FakeModelError, match="no row before it"):
        run(executor(), plan([(1, 6, 0, FORK)], (1, 0, 0, 3, 1, 0, 1, 5), new_sequences=(new(1),)))


# -- beams


def test_beams_by_hand_give_the_beam_references_text() -> None:
    asked = {"beam_width": 2, "n": 2, "max_tokens": 2}
    beam = ROW_SAMPLE | ROW_BEAM
    made = executor()
    first = run(made, plan([(0, 0, 6, beam)], (0, 0, 0, 3, 0, 0, 1, 5), new_sequences=(new(0, **asked),)))[0]
    assert first.logprobs is not None and first.logprobs[0] is not None and len(made.slots[0].ids) == 6
    (a, b, *_), (log_a, log_b, *_) = first.logprobs[0].top_ids, first.logprobs[0].top_logprobs
    assert len(first.logprobs[0].top_ids) == 4 and log_a > log_b
    moved = new(1, [*PROMPT, b], 1, 6, **asked)
    step = plan(
        [(0, 6, 1, beam), (1, 6, 1, beam)],
        (1, 0, 0, 3, 1, 0, 1, 6),
        id_edits=(0, 6, a),
        copies=(0, 5, 6),
        new_sequences=(moved,),
    )
    last = run(made, step)[0]
    assert last.logprobs is not None and last.logprobs[0] is not None and last.logprobs[1] is not None
    ended = [
        (total + logprob, [start, token])
        for start, total, entry in ((a, log_a, last.logprobs[0]), (b, log_b, last.logprobs[1]))
        for token, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
    ]
    best = [ids for _, ids in sorted(ended, reverse=True)[:2]]
    assert best == beam_reference(PROMPT, 2, VOCAB, (), SamplingParams(**asked))


def test_an_id_edit_follows_the_last_id() -> None:
    made = executor()
    run(made, FORKED)
    with pytest.raises(FakeModelError, match="at 9: it has 7 ids"):
        run(made, plan([], id_edits=(0, 9, 3)))


# -- windows


def test_windows_drop_blocks_and_give_the_oracles_text() -> None:
    ids = [*PROMPT, 11, 12, 13]  # window 5: position 9 reads 5 to 8
    entered = plan(
        [(0, 0, 9, ROW_SAMPLE)],
        (0, 0, 0, 3, 0, 0, 1, 5, 0, 0, 2, 6, 0, 1, 0, 1, 0, 1, 1, 2, 0, 1, 2, 3),
        new_sequences=(new(0, ids),),
    )
    decode = plan([(0, 9, 1, CARRY)], (0, 1, 0, -1))
    assert ids_of(run(executor(BOTH), entered, decode)) == oracle(ids, 2, VOCAB, windows=(0, 5))
    assert oracle(ids, 2, VOCAB, windows=(0, 5)) != oracle(ids, 2, VOCAB)
    too_early = plan([(0, 9, 1, CARRY)], (0, 1, 1, -1))
    made = executor(BOTH)
    run(made, entered)
    with pytest.raises(FakeModelError, match="reads a hole at 4 of group 1"):
        run(made, too_early)


def test_a_prefix_hit_sets_only_what_the_window_needs() -> None:
    ids = [*PROMPT, 11, 12, 13]
    made = executor(BOTH)
    edits = (0, 0, 0, 3, 0, 0, 1, 5, 0, 0, 2, 6, 0, 1, 0, 1, 0, 1, 1, 2, 0, 1, 2, 3)
    run(made, plan([(0, 0, 9, ROW_SAMPLE)], edits, new_sequences=(new(0, ids),)))
    hit = plan(
        [(1, 8, 1, ROW_SAMPLE)],
        (1, 0, 0, 3, 1, 0, 1, 5, 1, 0, 2, 7, 1, 1, 1, 2, 1, 1, 2, 4),
        new_sequences=(new(1, ids, 1),),
    )
    assert ids_of(run(made, hit)) == oracle(ids, 1, VOCAB, windows=(0, 5), choice=1)


@pytest.mark.parametrize("group", [0, 1])
def test_a_block_lost_in_any_group_changes_the_text(group: int) -> None:
    ids = [*PROMPT, 11, 12, 13]
    made = executor(BOTH, strict=False)
    edits = (0, 0, 0, 3, 0, 0, 1, 5, 0, 0, 2, 6, 0, 1, 0, 1, 0, 1, 1, 2, 0, 1, 2, 3)
    run(made, plan([(0, 0, 9, ROW_SAMPLE)], edits, new_sequences=(new(0, ids),)))
    block = made.slots[0].tables[group][2]
    made.pool.cells[group][block] = [1, 2, 3, 4]
    assert ids_of(run(made, plan([(0, 9, 1, CARRY)]))) != oracle(ids, 2, VOCAB, windows=(0, 5))[1:]


# -- the host tier

ENTER = plan([(0, 0, 6, ROW_SAMPLE)], (0, 0, 0, 3, 0, 0, 1, 5), new_sequences=(new(0),))
OUT = plan([], freed_slots=(0,), swap_outs=(0, 3, 2, 0, 5, 0))


def back(loads: tuple[int, ...], **fields: object) -> StepPlan:
    ids = [*PROMPT, *oracle(PROMPT, 1, VOCAB)]
    edits = (2, 0, 0, 6, 2, 0, 1, 7)
    return plan([(2, 6, 1, ROW_SAMPLE)], edits, host_loads=loads, new_sequences=(new(2, ids, num_prompt=6),), **fields)


def test_a_swapped_sequence_goes_on_where_it_left_off() -> None:
    other = NewSequence(1, "b", 0, 5, array("i", [30, 31, 32, 33, 34]), SamplingParams(temperature=0.0))
    taken = plan([(1, 0, 5, ROW_SAMPLE)], (1, 0, 0, 3, 1, 0, 1, 5), new_sequences=(other,))
    made = executor()
    run(made, ENTER, OUT, taken)
    assert ids_of(run(made, back((0, 2, 6, 0, 0, 7)))) == oracle(PROMPT, 2, VOCAB)[1:]


def test_what_leaves_and_what_arrives_must_be_right() -> None:
    for loads, message in (
        ((0, 0, 6, 0, 2, 7), "nobody wrote"),
        ((0, 2, 6, 0, 3, 7), "nothing was put there"),
        ((0, 2, 6, 0, 0, 6), "one destination"),
        ((0, 2, 6), "nobody wrote"),
    ):
        made = executor()
        run(made, ENTER, OUT)
        with pytest.raises(FakeModelError, match=message):
            run(made, back(loads))
    made = executor()
    run(made, ENTER, OUT)
    with pytest.raises(FakeModelError, match="both"):
        run(made, back((0, 2, 6, 0, 0, 7), swap_outs=(0, 3, 1)))
    with pytest.raises(FakeModelError, match="swapped out twice"):
        run(executor(), ENTER, plan([], freed_slots=(0,), swap_outs=(0, 3, 2, 0, 3, 1)))
    with pytest.raises(FakeModelError, match="nobody wrote it"):
        run(executor(), ENTER, plan([], freed_slots=(0,), swap_outs=(0, 4, 2)))


def test_what_a_row_wrote_without_its_token_may_leave_but_is_never_read() -> None:
    """The first row's result is withheld, so the second stands on no token; its block leaves, and comes back."""
    ids = [*PROMPT, 11, 12]
    first = plan([(0, 0, 8, ROW_SAMPLE)], (0, 0, 0, 3, 0, 0, 1, 5), new_sequences=(new(0, ids),))
    second = plan([(0, 8, 1, CARRY)], (0, 0, 2, 6))
    out = plan([], freed_slots=(0,), swap_outs=(0, 3, 0, 0, 5, 1, 0, 6, 2))
    made = executor(faults=Faults(random.Random(0), zero_tokens=1.0))
    run(made, first, second, out)
    edits, loads = (1, 0, 0, 0, 1, 0, 1, 1, 1, 0, 2, 2), (0, 0, 0, 0, 1, 1, 0, 2, 2)
    entered = (new(1, [*ids, 13, 14], num_prompt=8),)
    with pytest.raises(FakeModelError, match="foreign content in block 2"):
        run(made, plan([(1, 9, 1, ROW_SAMPLE)], edits, host_loads=loads, new_sequences=entered))


# -- media

ITEM = Span(2, 3, b"picture")


def with_item() -> FakeExecutor:
    made = executor()
    made.encoder.spans["a"] = (ITEM,)
    made.encoder.budget = made.encoder.room = 8
    return made


def encoded(key: bytes = ITEM.key, **fields: object) -> StepPlan:
    edits = (0, 0, 0, 3, 0, 0, 1, 5)
    job = EncodeJob(0, 0, key, 3)
    return plan([(0, 0, 6, ROW_SAMPLE)], edits, new_sequences=(new(0),), encode_jobs=(job,), **fields)


def test_an_item_enters_the_text_once_it_is_encoded() -> None:
    made = with_item()
    got = ids_of(run(made, encoded(), plan([(0, 6, 1, CARRY)], encoder_frees=(ITEM.key,))))
    assert got == oracle(PROMPT, 2, VOCAB, spans=(ITEM,)) != oracle(PROMPT, 2, VOCAB)
    assert not made.encoder.outputs


def test_a_missing_or_freed_output_is_noticed() -> None:
    with pytest.raises(FakeModelError, match="no encoder output for the item at 2"):
        run(with_item(), ENTER)
    with pytest.raises(FakeModelError, match="is freed, but is not there"):
        run(with_item(), encoded(encoder_frees=(b"another",)))
    with pytest.raises(FakeModelError, match="is not an item"):
        run(with_item(), encoded(b"another"))
    made = with_item()
    made.encoder.budget = 2
    with pytest.raises(FakeModelError, match="the budget is 2"):
        run(made, encoded())
    made = with_item()
    made.encoder.room = 2
    with pytest.raises(FakeModelError, match="room for 2"):
        run(made, encoded())


# -- prefixes


def test_common_blocks_are_checked_against_the_tables() -> None:
    decode = [(0, 6, 1, CARRY), (1, 6, 1, CARRY)]
    fields = {"copies": (0, 5, 6), "num_common_blocks": 1, "shared_prefixes": ((1, (0, 1)),)}
    run(executor(), FORKED, plan(decode, (1, 0, 1, 6), **fields))
    for wrong in ({"num_common_blocks": 2}, {"shared_prefixes": ((2, (0, 1)),)}):
        with pytest.raises(FakeModelError, match="are said to"):
            run(executor(), FORKED, plan(decode, (1, 0, 1, 6), **{**fields, **wrong}))


def test_an_adapter_changes_every_position() -> None:
    assert oracle(PROMPT, 3, VOCAB, adapter_id=1) != oracle(PROMPT, 3, VOCAB, adapter_id=2) != oracle(PROMPT, 3, VOCAB)
