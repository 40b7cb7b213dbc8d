"""Frames between ranks: a decoded plan is the plan that was encoded, and anything else is a RankFrameError."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config import Config
from octavo.core.plan import EncodeJob, NewSequence, StepPlan, StepResult
from octavo.core.request import SamplingParams
from octavo.errors import CapacityError
from octavo.executors.protocol import ExecutorSpec
from octavo.executors.ranks import frames
from octavo.grammar.matcher import Masks
from tests.core.harness import Run
from tests.core.random_driver import Driver

int32 = st.integers(-(2**31), 2**31 - 1)
column = st.lists(int32, max_size=30).map(lambda values: array("i", values))
params = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(1, 2**31 - 1),
    temperature=st.floats(0, 100),
    logit_bias=st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-100, 100)), max_size=3).map(tuple),
    bad_words_ids=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple), max_size=2).map(tuple),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    grammar=st.text(max_size=9),
)
sequences = st.builds(
    NewSequence,
    slot=st.integers(0, 2**31 - 1),
    request_id=st.text(max_size=20),
    choice=st.integers(0, 9),
    num_prompt=st.integers(0, 2**31 - 1),
    token_ids=st.none() | column,
    params=params,
    eos_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
    adapter_id=st.integers(0, 9),
)
COLUMNS = (
    "slots", "starts", "counts", "flags", "num_drafts", "draft_token_ids", "edits", "copies", "swap_outs", "host_loads",
    "freed_slots", "id_edits",
)  # fmt: skip
names = st.lists(st.text(max_size=9), max_size=3).map(tuple)
jobs = st.builds(
    EncodeJob, st.integers(0, 99), st.integers(0, 9), st.binary(max_size=16), st.integers(0, 999)
)  # fmt: skip
plans = st.builds(
    StepPlan,
    step=st.integers(0, 2**62),
    now=st.floats(allow_nan=False),
    **dict.fromkeys(COLUMNS, column),
    encode_jobs=st.lists(jobs, max_size=2).map(tuple),
    encoder_frees=st.lists(st.binary(max_size=16), max_size=2).map(tuple),
    shared_prefixes=st.lists(
        st.tuples(st.integers(0, 99), st.lists(st.integers(0, 99), max_size=3).map(tuple)), max_size=2
    ).map(tuple),
    num_common_blocks=st.integers(0, 2**31 - 1),
    new_sequences=st.lists(sequences, max_size=3).map(tuple),
    finished_ids=names,
    preempted_ids=names,
    num_query_tokens=st.integers(0, 2**31 - 1),
    num_kv_read=st.integers(0, 2**31 - 1),
    is_fast_path=st.booleans(),
)


def executed(plan: StepPlan) -> StepPlan:
    """The plan without what only observers read."""
    return replace(plan, events=(), waits=(), wake_at=None)


def check(plan: StepPlan, sampled: Sequence[int] = ()) -> None:
    decoded, found = frames.decode_plan(frames.encode_plan(plan, sampled))
    assert decoded == executed(plan) and list(found) == list(sampled)
    assert decoded.digest() == plan.digest()


@given(plan=plans, sampled=st.lists(int32, max_size=9))
@settings(max_examples=80, deadline=None)
def test_any_plan_arrives_as_it_was_sent(plan: StepPlan, sampled: list[int]) -> None:
    check(plan, sampled)


class EncodedRun(Run):
    """Sends each plan of the scheduler through a frame."""

    def submit(self, plan: StepPlan) -> None:
        check(plan)
        super().submit(plan)


class EncodedDriver(Driver):
    run_type = EncodedRun


@pytest.mark.parametrize("seed", range(12))
def test_a_schedulers_plans_arrive_as_they_were_sent(seed: int) -> None:
    EncodedDriver(seed).drive(60)


def test_a_plan_of_256_rows_is_small() -> None:
    rows = 256
    plan = StepPlan(
        step=1,
        now=0.0,
        slots=array("i", range(rows)),
        starts=array("i", [1000] * rows),
        counts=array("i", [1] * rows),
        flags=array("i", [3] * rows),
        edits=array("i", [1, 0, 2, 3] * 16),
    )
    assert len(frames.encode_plan(plan)) <= 4_500


@given(plan=plans, cut=st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_a_frame_that_is_cut_is_refused(plan: StepPlan, cut: int) -> None:
    body = frames.encode_plan(plan)
    with pytest.raises(frames.RankFrameError, match="a plan of"):
        frames.decode_plan(body[: max(0, len(body) - cut)])


@given(st.binary(max_size=400))
@settings(max_examples=200, deadline=None)
def test_foreign_bytes_are_refused(body: bytes) -> None:
    for read in (frames.decode_plan, frames.decode_masks, frames.Done.unpack):
        try:
            read(body)
        except frames.RankFrameError:
            continue
        assert read is frames.decode_masks, "only masks may be any bytes of the right number"


def test_masks_arrive_as_they_were_sent() -> None:
    bits = np.arange(12, dtype=np.int32).reshape(3, 4) - 5
    found = frames.decode_masks(frames.encode_masks(Masks(np.array([0, 2, 9]), bits)))
    assert found.positions.tolist() == [0, 2, 9] and np.array_equal(found.bits_MW, bits)


def test_messages_arrive_as_they_were_sent() -> None:
    begin = frames.Begin(3, 2, Config(), ExecutorSpec(8, 64), "127.0.0.1", 9999)
    assert frames.unpack(frames.Begin, frames.pack(begin)) == begin
    refusal = frames.unpack(frames.RankRefusal, frames.pack(frames.RankRefusal.of(CapacityError("no room"))))
    error = refusal.error("rank 3")
    assert isinstance(error, CapacityError) and str(error) == "rank 3: no room"
    done = frames.Done(7, 0.25, b"d" * frames.DIGEST_BYTES)
    assert frames.Done.unpack(done.pack()) == done
    with pytest.raises(frames.RankFrameError, match="malformed Begin"):
        frames.unpack(frames.Begin, b"\x93")


@pytest.mark.parametrize("change", [{"token_ids": array("i", [1, 3])}, {"num_token_ids": array("i", [2, 0])}])
def test_the_digest_of_a_result_is_that_of_its_ids(change: dict[str, Any]) -> None:
    result = StepResult(array("i", [1, 2]), num_token_ids=array("i", [1, 1]))
    assert frames.result_digest(b"p", result) != frames.result_digest(b"p", replace(result, **change))
    assert frames.result_digest(b"p", result) != frames.result_digest(b"q", result)
