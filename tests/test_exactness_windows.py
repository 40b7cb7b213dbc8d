"""Models with sliding windows, through the whole scheduler: transformers' greedy ids, far past the window.

Tiny gemma3 (windows of 16 and full layers) and mistral (windows only), heads of 32 so that the C++ kernel reads
them. Prompts of up to 7 windows and outputs of 2. CI runs the scenarios that differ most; `make test-all` runs all
of them with every attention backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.core.limits import GroupKind, Limits
from octavo.core.plan import DROP_BLOCK, StepPlan
from octavo.core.request import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.executors import torch_executor
from octavo.executors.protocol import Capacity, Executor
from tests.exactness import limits_of, requests_of, serve
from tests.executors.driver import GREEDY, SPEC, Dense, make_prompt
from tests.executors.test_torch_executor import make
from tests.tiny_models import EOS_ID, make_tiny_model

WINDOW, NUM_TOKENS = 16, 36


@dataclass(frozen=True)
class Family:
    """Changes to a family's configuration, a seed whose greedy texts vary, and pools that are too small for all.

    `few` are blocks of each group, for requests with one choice and with three; a request alone fits. Where nothing
    but windows is kept, and one pool's size decides little, several are tried.
    """

    changes: dict[str, Any]
    seed: int
    few: dict[int, tuple[int, ...]]


FAMILIES = {
    "gemma3": Family({"num_hidden_layers": 3}, 5, {1: (40,), 3: (66,)}),
    "mistral_window": Family({"head_dim": 32, "num_hidden_layers": 2}, 3, {1: (18,), 3: (46, 50, 54)}),
}
PREFIX = make_prompt(40, seed=1)
PROMPTS = [
    *(make_prompt(n, seed=n) for n in (3, 6, 4, 7, 5, 2)),  # these grow into the window and past it
    *(PREFIX + make_prompt(n, seed=n) for n in (5, 72, 2, 17)),
]


@dataclass(frozen=True)
class Scenario:
    """Changes to the limits, and how often, how deep, how many choices, and whether in too few blocks."""

    changes: dict[str, Any] = field(default_factory=dict)
    rounds: int = 1
    depth: int = 1
    n: int = 1

    @property
    def is_tight(self) -> bool:
        return "preemption" in self.changes

    def limits(self, capacity: Capacity, family: Family) -> list[Limits]:
        """One, or one for each small pool to try."""
        changes = dict(self.changes)
        if changes.pop("host", False):
            changes |= {"host_blocks": capacity.host_blocks, "host_load_min_tokens": capacity.block_size}
        if not self.is_tight:
            return [limits_of(capacity, **changes)]
        sizes = [(blocks,) * len(capacity.groups) for blocks in family.few[self.n]]
        return [limits_of(capacity, **changes, num_blocks=size, headroom=0.0) for size in sizes]


RECOMPUTE: dict[str, Any] = {"preemption": "recompute", "max_batch_tokens": 40}
SWAP = RECOMPUTE | {"preemption": "swap", "host": True}
SCENARIOS = {
    "plain": Scenario(),
    "chunks of 1": Scenario({"long_prefill_threshold": 1}),
    "chunks of 7": Scenario({"long_prefill_threshold": 7}),
    "chunks of 16": Scenario({"long_prefill_threshold": 16}),
    "steps of 24 tokens": Scenario({"max_batch_tokens": 24}, depth=2),
    "preempted": Scenario(RECOMPUTE),
    "swapped": Scenario(SWAP),
    "prefix hits": Scenario(rounds=2),
    "prefix hits, chunks of 7, depth 2": Scenario({"long_prefill_threshold": 7}, rounds=2, depth=2),
    "host hits, depth 3": Scenario(SWAP | {"preemption": "recompute"}, rounds=2, depth=3),
    "depth 2": Scenario(depth=2),
    "depth 3": Scenario(depth=3),
    "preempted, depth 3": Scenario(RECOMPUTE, depth=3),
    "swapped, depth 3": Scenario(SWAP, depth=3),
    "three choices": Scenario(n=3),
    "three choices, depth 3": Scenario(n=3, depth=3),
    "three choices preempted": Scenario(RECOMPUTE, n=3, depth=2),
    "three choices swapped": Scenario(SWAP, n=3, depth=3),
    "prefills and decodes apart": Scenario({"composition": "separate", "max_batch_tokens": 40}, depth=2),
    "fair": Scenario(SWAP | {"policy": "fair"}, rounds=2, depth=3),
}
FEW = ("chunks of 7", "swapped, depth 3")
SOME = (
    "chunks of 1",
    "preempted, depth 3",
    "three choices, depth 3",
    "prefix hits, chunks of 7, depth 2",
    "three choices swapped",
    *FEW,
)
Windowed = tuple[Path, list[list[int]], Family]
Opened = tuple[Executor, Capacity, list[list[int]], Family]


def greedy_by_transformers(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Ids that transformers' own generation gives, with its windowed cache; checked a little without cache."""
    dense, outputs = Dense(folder), []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = dense._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=[-1],
            pad_token_id=EOS_ID,
        )  # fmt: skip
        outputs.append(out[0, len(prompt) :].tolist())
    assert outputs[-1][:4] == dense.greedy(prompts[-1], 4)
    return outputs


@pytest.fixture(scope="module", params=FAMILIES)
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Windowed:
    """A tiny model's folder, and transformers' greedy ids for PROMPTS."""
    family, folder = FAMILIES[request.param], tmp_path_factory.mktemp("windows")
    make_tiny_model(request.param, folder / "right", seed=family.seed, sliding_window=WINDOW, **family.changes)
    make_tiny_model(request.param, folder / "wrong", seed=family.seed, sliding_window=WINDOW + 1, **family.changes)
    expected = greedy_by_transformers(folder / "right", PROMPTS)
    wrong = greedy_by_transformers(folder / "wrong", PROMPTS[5:7])
    assert all(wanted != other for wanted, other in zip(expected[5:7], wrong, strict=True)), "the window does not show"
    return folder / "right", expected, family


@pytest.fixture(scope="module", params=["auto", "batched", "reference"])
def opened(request: pytest.FixtureRequest, windowed: Windowed) -> Iterator[Opened]:
    """The model opened; with "auto" the C++ kernel computes where it was built, on any machine."""
    folder, expected, family = windowed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_executor, "is_faster", lambda: True)
        executor = make(folder, request.param)
        capacity = executor.open(replace(SPEC, num_blocks=400, host_bytes=2 << 20))
    yield executor, capacity, expected, family
    executor.close()


def assert_scenario(opened: Opened, name: str) -> None:
    """Serve PROMPTS; every choice is transformers' greedy text, and the scenario is what its name says."""
    executor, capacity, expected, family = opened
    scenario = SCENARIOS[name]
    params = replace(GREEDY, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=None, n=scenario.n)
    requests = requests_of(PROMPTS, [params] * len(PROMPTS), [{"tenant": "a"}, {"tenant": "b"}])
    num_preemptions = num_swaps = host_hit_tokens = 0
    for limits in scenario.limits(capacity, family):
        got = serve(executor, limits, requests, scenario.rounds, scenario.depth)
        assert got.choices == [[ids] * scenario.n for ids in expected]
        assert (got.num_carried > 0) == (scenario.depth > 1) and got.max_in_flight == scenario.depth
        assert got.hit_tokens > 0 or scenario.rounds == 1
        assert (got.num_forks > 0) == (scenario.n > 1)
        num_preemptions += got.num_preemptions
        num_swaps += got.num_swaps
        host_hit_tokens += got.host_hit_tokens
    assert (num_preemptions > 0) == scenario.is_tight
    assert (num_swaps > 0) == (scenario.changes.get("preemption") == "swap")
    assert host_hit_tokens > 0 or not name.startswith("host hits")


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("opened", ["auto"], indirect=True)
def test_K07_far_past_the_window_it_is_transformers_text(opened: Opened, name: str) -> None:
    assert_scenario(opened, name)


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("opened", ["batched", "reference"], indirect=True)
def test_K07_with_the_slow_twins_of_attention_too(opened: Opened, name: str) -> None:
    assert_scenario(opened, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_K07_in_every_scenario_it_is_transformers_text(opened: Opened, name: str) -> None:
    assert_scenario(opened, name)


@pytest.mark.parametrize("opened", ["auto"], indirect=True)
def test_K07_blocks_that_left_the_window_are_given_back(opened: Opened) -> None:
    """However long the text, a window's group holds the window, what a step adds, and no more."""
    executor, capacity, expected, _ = opened
    sliding = [at for at, group in enumerate(capacity.groups) if group.kind == GroupKind.SLIDING]
    dropped = held = most = 0

    def watch(scheduler: Scheduler, plan: StepPlan) -> None:
        nonlocal dropped, held, most
        for group, block in zip(plan.edits[1::4], plan.edits[3::4], strict=True):
            if group in sliding:
                dropped += block == DROP_BLOCK
        pool = scheduler._state.cache.pools[sliding[0]]
        held = pool.num_blocks - pool.num_free
        most = max(most, held)

    params = replace(GREEDY, max_tokens=NUM_TOKENS, ignore_eos=True)
    limits = limits_of(capacity, max_batch_tokens=16, prefix_caching=False)
    got = serve(executor, limits, requests_of(PROMPTS[7:8], [params]), watch=watch)
    assert got.token_ids == expected[7:8]
    positions = len(PROMPTS[7]) + NUM_TOKENS
    assert dropped >= (positions - 2 * WINDOW) // capacity.block_size
    assert most <= (2 * WINDOW) // capacity.block_size + 2 < positions // capacity.block_size


@pytest.mark.slow
@pytest.mark.parametrize("opened", ["auto", "batched"], indirect=True)
def test_P02_K07_sampled_choices_over_windows_do_not_depend_on_the_schedule(opened: Opened) -> None:
    executor, capacity, _, family = opened
    params = [
        SamplingParams(temperature=0.9, seed=index, n=3, max_tokens=24, ignore_eos=True)
        for index in range(len(PROMPTS))
    ]
    requests = requests_of(PROMPTS, params)
    alone = [serve(executor, limits_of(capacity), [request]).choices[0] for request in requests]
    for name in ("three choices, depth 3", "three choices preempted", "three choices swapped"):
        for limits in SCENARIOS[name].limits(capacity, family):
            assert serve(executor, limits, requests, 1, SCENARIOS[name].depth).choices == alone, name
