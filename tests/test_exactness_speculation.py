"""Speculation changes the number of steps and nothing else: the default model's ids with and without drafts.

CI runs four prompts and two repetitive texts; `make test-all` runs all 32 prompts in full.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import resolve_model
from octavo.config import ExecutionConfig, ModelConfig
from octavo.core.plan import StepPlan
from octavo.core.request import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.snapshots import Statistics
from octavo.executors.protocol import Capacity, Executor, ExecutorSpec
from octavo.executors.torch_executor import TorchExecutor
from tests.exactness import Run, assert_equal, limits_of, requests_of, serve

GOLDEN = json.loads((Path(__file__).parent / "data" / "golden_smollm2.json").read_text())
FEW = [0, 8, 10, 16]  # a chat, prose, code, Russian
REPETITIVE = [[504, 2644, 6354, 16438, 30] * 12, GOLDEN[10]["prompt"] + GOLDEN[10]["output"]]


@pytest.fixture(scope="module")
def model() -> Iterator[tuple[Executor, Capacity]]:
    """The default model in float32, opened once."""
    files = resolve_model(None)
    executor = TorchExecutor(files, read_model_spec(files), ExecutionConfig(threads=1), ModelConfig(dtype="float32"))
    capacity = executor.open(ExecutorSpec(max_sequences=32, max_batch_tokens=1024, num_blocks=400, max_model_len=2048))
    yield executor, capacity
    executor.close()


@dataclass
class Seen:
    """What one run gave, and its scheduler's totals."""

    run: Run
    totals: Statistics


def both(
    model: tuple[Executor, Capacity], prompts: Sequence[Sequence[int]], params: SamplingParams, depth: int = 1
) -> tuple[Seen, Seen]:
    """The same requests without drafts and with up to 7 in each row."""
    executor, capacity = model
    seen = []
    for drafts in (0, 7):
        limits = limits_of(capacity, max_draft_tokens=drafts, max_draft_rows=len(prompts) * params.num_sequences)
        schedulers: list[Scheduler] = []

        def note(scheduler: Scheduler, plan: StepPlan, into: list[Scheduler] = schedulers) -> None:
            into.append(scheduler)

        requests = requests_of(prompts, [replace(params, seed=index) for index in range(len(prompts))])
        run = serve(executor, limits, requests, depth=depth, watch=note)
        seen.append(Seen(run, schedulers[-1].statistics()))
    return seen[0], seen[1]


def check(plain: Seen, drafted: Seen) -> None:
    """Equal ids, counted right."""
    assert_equal(plain.run.token_ids, drafted.run)
    assert drafted.run.choices == plain.run.choices
    assert plain.totals.num_drafted_tokens == 0 < drafted.totals.num_drafted_tokens
    assert drafted.totals.num_accepted_tokens <= drafted.totals.num_drafted_tokens
    assert drafted.totals.num_output_tokens == plain.totals.num_output_tokens
    assert drafted.run.num_steps < plain.run.num_steps


@pytest.mark.parametrize(("temperature", "depth"), [(0.0, 1), (0.8, 1), (0.8, 2)])
def test_P07_drafts_change_no_id(model: tuple[Executor, Capacity], temperature: float, depth: int) -> None:
    prompts = [GOLDEN[index]["prompt"] for index in FEW] + REPETITIVE
    params = SamplingParams(temperature=temperature, top_p=0.9, max_tokens=20, ignore_eos=True)
    plain, drafted = both(model, prompts, params, depth)
    assert_equal(plain.run.token_ids, drafted.run)
    assert drafted.run.choices == plain.run.choices
    assert drafted.totals.num_output_tokens == plain.totals.num_output_tokens
    assert 0 < drafted.totals.num_accepted_tokens <= drafted.totals.num_drafted_tokens


def test_P07_repetitive_text_takes_far_fewer_steps(model: tuple[Executor, Capacity]) -> None:
    plain, drafted = both(model, REPETITIVE[:1], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    check(plain, drafted)
    assert drafted.run.num_steps < plain.run.num_steps / 2
    assert drafted.totals.num_accepted_tokens > 0.8 * drafted.totals.num_drafted_tokens


def test_P07_log_probabilities_come_with_accepted_drafts(model: tuple[Executor, Capacity]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
    plain, drafted = both(model, REPETITIVE, params)
    check(plain, drafted)
    for want, got in zip(plain.run.logprobs, drafted.run.logprobs, strict=True):
        for one, other in zip(want, got, strict=True):
            assert one is not None and other is not None
            assert (one.token_id, one.rank, one.top_ids) == (other.token_id, other.rank, other.top_ids)
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_P07_choices_of_one_prompt_are_drafted_for_too(model: tuple[Executor, Capacity]) -> None:
    params = SamplingParams(temperature=0.7, max_tokens=24, ignore_eos=True, n=3)
    check(*both(model, REPETITIVE[:1], params))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_P07_drafts_change_no_id_of_all_prompts(model: tuple[Executor, Capacity], temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=50, max_tokens=64)
    plain, drafted = both(model, [entry["prompt"] for entry in GOLDEN], params)
    check(plain, drafted)
    if temperature == 0.0:
        assert_equal([entry["output"] for entry in GOLDEN], drafted.run)
