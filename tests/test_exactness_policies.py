"""Greedy output stays transformers', token for token, under every policy, way of preemption, host tier and depth.

CI runs the whole product on tiny models (against transformers' forward) and three mixtures on the default model
(against the golden ids); `make test-all` runs every policy over all 32 golden prompts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import resolve_model
from octavo.config import ExecutionConfig, ModelConfig
from octavo.core.policy import POLICIES as REGISTERED
from octavo.core.request import Request, SamplingParams
from octavo.executors.protocol import Capacity, Executor, ExecutorSpec
from octavo.executors.torch_executor import TorchExecutor
from tests.exactness import Run, assert_equal, limits_of, requests_of, serve
from tests.executors.driver import GREEDY, SPEC, Dense, make_prompt
from tests.executors.test_torch_executor import make
from tests.tiny_models import make_tiny_model

# Other tests register policies of their own.
POLICIES = [name for name, policy in REGISTERED.items() if policy.__module__.startswith("octavo.")]

GOLDEN = json.loads((Path(__file__).parent / "data" / "golden_smollm2.json").read_text())
Opened = tuple[Executor, Capacity]
# What the policies look at: two tenants, three priorities, objectives against the order of arrival, and late comers.
TRAITS: list[dict[str, object]] = [
    {"tenant": "a", "priority": 2, "ttft_objective": 9.0, "tpot_objective": 3.0},
    {"tenant": "a", "priority": 1, "ttft_objective": 5.0},
    {"tenant": "b", "priority": 0, "ttft_objective": 7.0, "tpot_objective": 0.01},
    {"tenant": "a", "priority": 2, "ttft_objective": 1.0},
    {"tenant": "b", "priority": 1, "arrival": 3.0, "ttft_objective": 0.5},
]
ORDER = [31, 10, 8, 0, 16, 18, 29]  # golden prompts of 64, 7, 12, 37, 21, 11 and 1 tokens
TINY_LENGTHS = (45, 3, 12, 5, 21, 33, 9, 50)
PREEMPTION = ("recompute", "swap")
Tiny = tuple[Opened, list[Request], list[list[int]]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    """A tiny llama with a host tier, eight requests, and transformers' greedy ids for them."""
    folder = make_tiny_model("llama3", tmp_path_factory.mktemp("policies") / "llama3")
    executor, dense = make(folder, "auto"), Dense(folder)
    capacity = executor.open(replace(SPEC, num_blocks=200, host_bytes=1 << 20))
    prompts = [make_prompt(length, seed=length) for length in TINY_LENGTHS]
    params = [replace(GREEDY, max_tokens=14, ignore_eos=True)] * len(prompts)
    yield (executor, capacity), requests_of(prompts, params, TRAITS), [dense.greedy(prompt, 14) for prompt in prompts]
    executor.close()


@pytest.fixture(scope="module")
def model() -> Iterator[Opened]:
    """The default model in float32 with a host tier."""
    files = resolve_model(None)
    executor = TorchExecutor(files, read_model_spec(files), ExecutionConfig(threads=1), ModelConfig(dtype="float32"))
    spec = ExecutorSpec(32, 1024, num_blocks=400, max_model_len=2048, host_bytes=128 << 20)
    yield executor, executor.open(spec)
    executor.close()


def golden(indices: list[int], num_tokens: int) -> tuple[list[Request], list[list[int]]]:
    """Requests of golden prompts, and transformers' ids."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=2)
    entries = [GOLDEN[index] for index in indices]
    requests = requests_of([entry["prompt"] for entry in entries], [params] * len(entries), TRAITS)
    return requests, [entry["output"][:num_tokens] for entry in entries]


def tight(capacity: Capacity, num_blocks: int, preemption: str, **changes: object) -> dict[str, object]:
    """A pool so small that requests are preempted, and a host tier."""
    host = {"host_blocks": capacity.host_blocks, "host_load_min_tokens": capacity.block_size}
    return {"num_blocks": (num_blocks,), "headroom": 0.0, "preemption": preemption, **host, **changes}


def assert_mixed(got: Run, preemption: str, depth: int) -> None:
    """What a scenario is named after did happen."""
    assert got.num_preemptions > 0
    assert (got.num_swaps > 0 and got.swapped_in_tokens > 0) == (preemption == "swap"), got.num_swaps
    assert got.max_in_flight == depth and (got.num_carried > 0) == (depth > 1)


def _assert_product(tiny: Tiny, policy: str, combinations: Iterable[tuple[str, int]]) -> None:
    (executor, capacity), requests, expected = tiny
    for preemption, depth in combinations:
        changes = tight(capacity, 22, preemption, policy=policy, max_batch_tokens=24)
        got = serve(executor, limits_of(capacity, **changes), requests, 2, depth)
        assert_equal(expected, got)
        assert_mixed(got, preemption, depth)


@pytest.mark.parametrize("policy", POLICIES)
def test_S06_S09_S17_every_policy_swapped_or_recomputed_gives_transformers_ids(tiny: Tiny, policy: str) -> None:
    _assert_product(tiny, policy, [("swap", 3), ("recompute", 2)])


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_S06_S09_S17_the_whole_product_gives_transformers_ids(tiny: Tiny, policy: str) -> None:
    _assert_product(tiny, policy, product(("auto", *PREEMPTION), (1, 2, 3)))


def test_S06_these_requests_tell_the_policies_apart(tiny: Tiny) -> None:
    (executor, capacity), requests, _ = tiny
    by: dict[str, tuple[str, ...]] = {}
    for policy in POLICIES:
        limits = limits_of(capacity, **tight(capacity, 22, "swap", policy=policy))
        by[policy] = tuple(serve(executor, limits, requests, 2).order)
    assert [name for name in POLICIES if name != "fcfs" and by[name] == by["fcfs"]] == []
    assert len(set(by.values())) >= len(POLICIES) - 1  # fifo and prefill_first take in alike


@pytest.mark.parametrize("depth", [1, 3])
def test_K10_prefixes_loaded_back_from_the_host_give_transformers_ids(tiny: Tiny, depth: int) -> None:
    (executor, capacity), requests, expected = tiny
    got = serve(executor, limits_of(capacity, **tight(capacity, 24, "recompute")), requests, 2, depth)
    assert_equal(expected, got)
    assert got.host_hit_tokens > 0


@pytest.mark.parametrize(
    ("policy", "preemption", "depth", "num_blocks"), [("fair", "swap", 3, 7), ("deadline", "recompute", 2, 6)]
)
def test_X04_seven_prompts_equal_transformers(
    model: Opened, policy: str, preemption: str, depth: int, num_blocks: int
) -> None:
    executor, capacity = model
    requests, expected = golden(ORDER, 10)
    changes = tight(capacity, num_blocks, preemption, policy=policy, max_batch_tokens=64)
    rounds = 2 if preemption == "swap" else 1
    got = serve(executor, limits_of(capacity, **changes), requests, rounds, depth)
    assert_equal(expected, got)
    assert_mixed(got, preemption, depth)
    assert got.host_hit_tokens > 0 or rounds == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("preemption", "depth"), [("recompute", 2), ("swap", 3)])
@pytest.mark.parametrize("policy", POLICIES)
def test_X04_all_prompts_equal_transformers_under_every_policy(
    model: Opened, policy: str, preemption: str, depth: int
) -> None:
    executor, capacity = model
    requests, expected = golden(list(range(len(GOLDEN))), 64)
    # 900 + 64 tokens need 61 blocks; 70 leave room for hardly anybody beside them.
    got = serve(executor, limits_of(capacity, **tight(capacity, 70, preemption, policy=policy)), requests, 1, depth)
    assert_equal(expected, got)
    assert_mixed(got, preemption, depth)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_K10_X04_all_prompts_equal_transformers_from_the_host(model: Opened, depth: int) -> None:
    executor, capacity = model
    requests, expected = golden(list(range(len(GOLDEN))), 16)
    got = serve(executor, limits_of(capacity, **tight(capacity, 70, "auto")), requests, 2, depth)
    assert_equal(expected, got)
    assert got.host_hit_tokens > 200  # of the prompt of 900 tokens, whichever came back
    assert (got.num_carried > 0) == (depth > 1)
