"""The kernel of steps that only decode gives the inputs that the arithmetic of any step gives."""

from array import array

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.plan import ROW_CARRY, ROW_SAMPLE, StepPlan
from octavo.executors.slots import Slots
from octavo.executors.step_inputs import any_inputs, build_inputs, decode_inputs
from octavo.ops import cpu

SLOTS, LENGTH, SIZE, NULLS = 7, 50, 4, (90, 91)
pytestmark = pytest.mark.skipif(not cpu.status().is_loaded, reason="the kernels are not built")


def make_slots(num_groups: int) -> Slots:
    slots = Slots(SLOTS, LENGTH, SIZE, NULLS[:num_groups], 100, torch.device("cpu"))
    random = np.random.default_rng(num_groups)
    slots.ids_SW.copy_(torch.from_numpy(random.integers(0, 100, tuple(slots.ids_SW.shape))))
    for table_SM in slots.tables:
        table_SM[:] = random.integers(0, 90, table_SM.shape)
    return slots


def make_plan(rows: dict[int, int]) -> StepPlan:
    flags = array("i", [ROW_SAMPLE if slot % 2 else ROW_SAMPLE | ROW_CARRY for slot in rows])
    ones = array("i", [1] * len(rows))
    return StepPlan(1, 0.0, array("i", rows), array("i", rows.values()), ones, flags, is_fast_path=True)


@given(st.dictionaries(st.integers(0, SLOTS - 1), st.integers(0, LENGTH - 1), min_size=1), st.integers(1, 2))
@settings(deadline=None)
def test_kernel_and_arithmetic_agree_row_by_row(rows: dict[int, int], num_groups: int) -> None:
    slots, plan = make_slots(num_groups), make_plan(rows)
    fast, slow = decode_inputs(plan, slots), any_inputs(plan, slots, SIZE, wants_partial=False)
    assert fast is not None and slow.sample_last_R is not None
    order_N = slow.first_token_N  # where the arithmetic puts the plan's rows
    assert torch.equal(fast.token_ids_T, slow.token_ids_T[order_N])
    for ours, theirs in zip(fast.attention, slow.attention, strict=True):
        assert torch.equal(ours.positions_T, theirs.positions_T[order_N])
        assert torch.equal(ours.slot_mapping_T, theirs.slot_mapping_T[order_N])
        for own, table_M, context in zip(
            ours.block_table_NM, theirs.block_table_NM[order_N], ours.contexts, strict=True
        ):
            assert torch.equal(own[: -(-context // SIZE)], table_M[: -(-context // SIZE)])
        assert np.array_equal(ours.contexts, theirs.contexts[order_N])
        assert np.array_equal(ours.counts, theirs.counts)
        sizes = (ours.num_tokens, ours.num_rows, ours.num_decodes)
        assert sizes == (theirs.num_tokens, theirs.num_rows, theirs.num_decodes) == (len(rows),) * 3
    assert torch.equal(fast.sample_target_R, slow.sample_target_R)
    assert slow.sample_last_R.tolist() == order_N.tolist()
    for name in ("slots_N", "starts_N", "counts_N", "sample_rows", "silent_rows", "beams", "score_rows", "pool_rows"):
        assert np.array_equal(getattr(fast, name), getattr(slow, name)), name
    assert np.array_equal(fast.sampling.slots, slow.sampling.slots)
    assert np.array_equal(fast.sampling.positions, slow.sampling.positions)


def test_a_row_past_its_table_is_refused() -> None:
    slots = make_slots(2)
    slots.tables[1][3, 2] = NULLS[1]
    with pytest.raises(AssertionError, match="past its block table"):
        build_inputs(make_plan({1: 4, 3: 2 * SIZE}), slots, SIZE, wants_partial=False)


def test_only_plain_decodes_for_kernels_keep_the_plans_order() -> None:
    slots, plan = make_slots(1), make_plan({1: 30, 2: 5})
    assert build_inputs(plan, slots, SIZE, wants_partial=False).attention[0].contexts.tolist() == [31, 6]
    assert build_inputs(plan, slots, SIZE).attention[0].contexts.tolist() == [6, 31]
    plan.num_drafts, plan.counts, plan.draft_token_ids = array("i", [0, 1]), array("i", [1, 2]), array("i", [9])
    plan.is_fast_path = False
    assert build_inputs(plan, slots, SIZE, wants_partial=False).attention[0].contexts.tolist() == [31, 7]


def test_memory_is_used_again_by_steps_of_as_many_rows_only() -> None:
    slots = make_slots(2)
    plans = [make_plan({1: 30, 2: 5}), make_plan({4: 7, 0: 11, 3: 2})]
    steps = [decode_inputs(plan, slots) for plan in plans]  # both in flight
    slots.free_inputs += steps
    again = decode_inputs(plans[0], slots)
    assert again is not None and all(again is not step for step in steps) and not slots.free_inputs
    assert again.attention[0].contexts.tolist() == [31, 6]
    slots.free_inputs.append(again)
    assert decode_inputs(make_plan({6: 1, 5: 3}), slots) is again
    assert again.attention[1].contexts.tolist() == [2, 4] and again.slots_N.tolist() == [6, 5]
