"""Draft models: ids are the same with and without one, whatever it proposes, and its lanes follow their sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import resolve_model
from octavo.config import ExecutionConfig, ModelConfig
from octavo.core.plan import StepPlan, StepResult
from octavo.core.proposals import LONG_LOOKUP, DraftRow
from octavo.core.request import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.snapshots import Statistics
from octavo.executors.draft_model import DraftModel
from octavo.executors.protocol import Capacity, ExecutorSpec, Ticket
from octavo.executors.torch_executor import TorchExecutor
from tests.exactness import Run, assert_equal, limits_of, requests_of, serve
from tests.tiny_models import VOCAB_SIZE, make_tiny_model

PROMPTS = [[3 + (7 * index * at + at * at) % 290 for at in range(5 + 6 * index)] for index in range(5)]


class Steady:
    """A pace that always wants as many drafts."""

    def __init__(self, length: int = 4) -> None:
        self.wanted = length
        self.passes: list[int] = []  # tokens of each

    def length(self, rows: Sequence[DraftRow], count_behind: Callable[[], int]) -> int:
        return self.wanted

    def choose(self, rows: Sequence[DraftRow], num_rows: int) -> list[int]:
        return [len(row.lookup.ids) for row in rows]

    def drafted(self, num_rows: int, passes: list[tuple[int, float]]) -> None:
        self.passes += [tokens for tokens, _ in passes]

    def stepped(self, plan: StepPlan, result: StepResult, slots: frozenset[int]) -> None:
        pass

    def report(self) -> dict[str, object]:
        return {}


def open_tiny(folder: Path, **sizes: int) -> tuple[TorchExecutor, Capacity]:
    files = resolve_model(str(folder))
    execution = ExecutionConfig(threads=1)
    executor = TorchExecutor(files, read_model_spec(files), execution, ModelConfig(dtype="float32"))
    spec = {"max_sequences": 8, "max_batch_tokens": 64, "block_size": 8, "num_blocks": 200, "max_model_len": 160}
    return executor, executor.open(ExecutorSpec(**{**spec, **sizes}))


@dataclass
class Models:
    """An opened target, and how to make draft models beside it."""

    executor: TorchExecutor
    capacity: Capacity
    folder: Path
    paces: list[Steady] = field(default_factory=list)

    def draft_model(self, seed: int, length: int = 4, chunk: int = 64, **sizes: int) -> DraftModel:
        folder = make_tiny_model("smollm2", self.folder / f"draft-{seed}", seed=seed)
        self.paces.append(Steady(length))
        return DraftModel(*open_tiny(folder, **sizes), self.paces[-1], VOCAB_SIZE, chunk)

    def run(
        self,
        model: DraftModel | None,
        params: SamplingParams | Sequence[SamplingParams],
        prompts: Sequence[Sequence[int]] = PROMPTS,
        *,
        depth: int = 1,
        rounds: int = 1,
        **limits: Any,
    ) -> tuple[Run, Statistics]:
        """Serve the prompts together, with drafts if there is a model."""
        drafting = {"max_draft_tokens": 6, "max_draft_rows": 8, "has_draft_model": True} if model else {}
        made = limits_of(self.capacity, **drafting, **limits)
        requests = requests_of(prompts, [params] * len(prompts) if isinstance(params, SamplingParams) else params)
        schedulers: list[Scheduler] = []

        def watch(scheduler: Scheduler, plan: StepPlan) -> None:
            schedulers.append(scheduler)

        run = serve(self.executor, made, requests, rounds, depth, watch, drafts=model)
        return run, schedulers[-1].statistics()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    make_tiny_model("smollm2", folder / "target", seed=1)
    return Models(*open_tiny(folder / "target"), folder)


GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=5, max_tokens=40, ignore_eos=True)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("seed", [1, 2], ids=["same weights", "other weights"])
def test_P07_a_draft_model_changes_no_id(models: Models, seed: int, params: SamplingParams) -> None:
    plain, _ = models.run(None, params)
    drafted, totals = models.run(models.draft_model(seed), params)
    assert_equal(plain.token_ids, drafted)
    assert totals.num_drafted_tokens > 0
    if seed == 1:  # the draws agree too, since they depend on seed and position alone
        assert totals.num_accepted_tokens >= 0.98 * totals.num_drafted_tokens
        assert drafted.num_steps < plain.num_steps / 2.5
    else:
        assert totals.num_accepted_tokens < 0.9 * totals.num_drafted_tokens


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("more", [{"num_blocks": (24,)}, {"max_batch_tokens": 9}, {"max_kv_read": 120}])
def test_P07_drafts_of_a_model_beside_preemption_and_chunks(models: Models, depth: int, more: dict[str, Any]) -> None:
    plain, _ = models.run(None, SEEDED)
    drafted, totals = models.run(models.draft_model(1), SEEDED, depth=depth, **more)
    assert_equal(plain.token_ids, drafted)
    assert totals.num_accepted_tokens >= 0.9 * totals.num_drafted_tokens > 0
    if "num_blocks" in more:
        assert drafted.num_preemptions > 0


def test_P07_choices_rounds_and_prefix_hits(models: Models) -> None:
    params = SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=24, ignore_eos=True)
    prompts = [PROMPTS[4], [*PROMPTS[4][:24], 9, 9], PROMPTS[2]]
    plain, _ = models.run(None, params, prompts, rounds=2)
    model = models.draft_model(1)
    drafted, totals = models.run(model, params, prompts, rounds=2)
    assert drafted.choices == plain.choices and drafted.hit_tokens > 0
    assert totals.num_accepted_tokens >= 0.95 * totals.num_drafted_tokens


def test_P07_a_new_sequence_takes_the_lane_with_its_prefix(models: Models) -> None:
    model = models.draft_model(1)
    models.run(model, GREEDY, [PROMPTS[4]])
    computed = sum(models.paces[-1].passes)
    models.run(model, GREEDY, [[*PROMPTS[4][:25], 7, 8]])
    assert sum(models.paces[-1].passes) - computed < computed - 20


def test_P07_few_lanes_and_blocks_only_cost_drafts(models: Models) -> None:
    plain, _ = models.run(None, GREEDY)
    for sizes in ({"num_blocks": 9}, {"max_model_len": 40}, {"max_sequences": 5}):
        drafted, totals = models.run(models.draft_model(1, chunk=16, **sizes), GREEDY)
        assert_equal(plain.token_ids, drafted)
        assert totals.num_accepted_tokens >= 0.9 * totals.num_drafted_tokens > 0


def test_P07_a_prompt_is_computed_in_chunks_beside_plain_steps(models: Models) -> None:
    prompts = [[3 + at * at % 290 for at in range(90)]]
    plain, _ = models.run(None, GREEDY, prompts)
    drafted, totals = models.run(models.draft_model(1, chunk=16), GREEDY, prompts)
    assert_equal(plain.token_ids, drafted)
    assert max(models.paces[-1].passes) <= 16 and totals.num_accepted_tokens > 0


def test_P07_earlier_text_and_a_model_together(models: Models) -> None:
    prompts = [[5, 6, 7, 8] * 6, PROMPTS[1]]
    plain, _ = models.run(None, GREEDY, prompts)
    model = models.draft_model(2)
    model.min_match = LONG_LOOKUP
    both, totals = models.run(model, GREEDY, prompts)
    assert_equal(plain.token_ids, both)
    assert totals.num_drafted_tokens > 0


@pytest.mark.parametrize("seed", [1, 2], ids=["same weights", "other weights"])
def test_P07_answers_with_rejection_sampling_have_the_distribution_of_plain_ones(models: Models, seed: int) -> None:
    """Three ids after the first, of four each: a chi-square test of two samples. Both have seeds of their own."""
    count, few = 1200, (20, 21, 22, 23)
    params = SamplingParams(temperature=1.5, allowed_token_ids=few, max_tokens=4, ignore_eos=True)
    prompts = [PROMPTS[0]] * count
    plain, _ = models.run(None, [replace(params, seed=number) for number in range(count)], prompts)
    model = models.draft_model(seed, length=3)
    model.draw_for_rejection()
    models.executor.verify_by_rejection(model.distribution)
    try:
        drafted, totals = models.run(model, [replace(params, seed=count + number) for number in range(count)], prompts)
    finally:
        models.executor._sampler.rejection = None
    assert totals.num_accepted_tokens > (0.98 if seed == 1 else 0.5) * totals.num_drafted_tokens > 1000
    ours, theirs = (Counter(tuple(ids[1:]) for ids in run.token_ids) for run in (drafted, plain))
    cells = ours.keys() | theirs.keys()
    statistic = sum((ours[cell] - theirs[cell]) ** 2 / (ours[cell] + theirs[cell]) for cell in cells)
    assert torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2), torch.tensor(statistic / 2)) > 1e-3


def test_a_draft_model_that_fails_is_switched_off(models: Models) -> None:
    model = models.draft_model(1)
    executor = model._executor
    left = [3]

    def submit(plan: StepPlan, inner: Callable[[StepPlan], Ticket] = executor.submit) -> Ticket:
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError("no memory for drafts")
        return inner(plan)

    executor.submit = submit  # type: ignore[method-assign]
    plain, _ = models.run(None, GREEDY)
    drafted, _ = models.run(model, GREEDY)
    assert_equal(plain.token_ids, drafted)
    assert model.report()["failure"] == "MemoryError: no memory for drafts"
