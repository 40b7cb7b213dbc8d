"""K07: layers with full attention and layers with windows in one model, each kind with blocks of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.core.limits import GroupKind
from octavo.core.plan import ROW_CARRY, ROW_SAMPLE, StepPlan
from octavo.core.request import SamplingParams
from octavo.executors.cache import CacheLayout
from octavo.ops.attention import LayerAttention
from tests.exactness import Run, limits_of, run
from tests.executors.driver import BLOCK, GREEDY, SPEC, Dense, Driver, assert_logprobs, make_prompt
from tests.executors.effects_conformance import assert_same, sampled
from tests.executors.emulated_device import outside
from tests.executors.test_torch_executor import make, make_any
from tests.tiny_models import make_tiny_model

WINDOW = 10
# Of each family: changes to its configuration, and the cache groups it must have.
MODELS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "gemma3": ({}, [(GroupKind.FULL, 0, (2, 5)), (GroupKind.SLIDING, WINDOW, (0, 1, 3, 4))]),
    "mistral": ({"head_dim": 32}, [(GroupKind.SLIDING, WINDOW, (0, 1))]),
}
BACKENDS = ("auto", "batched", "reference", "emulated")
Windowed = tuple[Path, Dense, list[Any]]


@pytest.fixture(scope="module", params=list(MODELS))
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Windowed:
    """A tiny model whose layers look back WINDOW tokens, transformers' view of it, and its groups."""
    changes, groups = MODELS[request.param]
    folder = tmp_path_factory.mktemp("windowed") / request.param
    make_tiny_model(request.param, folder, sliding_window=WINDOW, **changes)
    return folder, Dense(folder), groups


@pytest.fixture(params=BACKENDS)
def driver(request: pytest.FixtureRequest, windowed: Windowed) -> Iterator[Driver]:
    executor = make_any(windowed[0], request.param)
    yield Driver(executor, executor.open(replace(SPEC, num_blocks=200, host_bytes=1 << 20)))
    executor.close()


@pytest.fixture
def dense(windowed: Windowed) -> Dense:
    return windowed[1]


def test_K07_groups_are_the_kinds_of_layers(driver: Driver, windowed: Windowed) -> None:
    capacity = driver.capacity
    kinds = [(group.kind, group.window, group.layers) for group in capacity.groups]
    assert kinds == windowed[2] and len(capacity.notes) == len(kinds) - 1
    assert capacity.groups[-1].block_bytes == len(kinds[-1][2]) * capacity.groups[0].block_bytes // len(kinds[0][2])
    assert capacity.num_blocks[0] == 200 and len(capacity.num_blocks) == len(capacity.host_blocks) == len(kinds)
    pools = driver.executor._cache.pools  # type: ignore[attr-defined]
    assert [pool.shape.num_layers for pool in pools] == [len(group.layers) for group in capacity.groups]
    assert capacity.kv_bytes_per_token * BLOCK == sum(group.block_bytes for group in capacity.groups)


def layout_of(*layers: LayerAttention, own_layers: range | None = None) -> CacheLayout:
    return CacheLayout.of(layers, 64, 4, torch.float32, own_layers)


def layer(window: int | None = None, num_kv_heads: int = 2, head_dim: int = 8, value_dim: int = 8) -> LayerAttention:
    return LayerAttention(4, num_kv_heads, head_dim, value_dim, 1.0, window)


def test_K07_groups_are_ordered_full_first_and_the_widest_window_next() -> None:
    layout = layout_of(layer(8), layer(), layer(48), layer(8), layer(64))
    assert [(group.window, group.layers) for group in layout.groups] == [(0, (1, 4)), (48, (2,)), (8, (0, 3))]
    block = 2 * 4 * 2 * 8 * 4
    assert [group.block_bytes for group in layout.groups] == [2 * block, block, 2 * block]
    assert [[one.window for one in layers] for layers in layout.attention] == [[None, None], [48], [8, 8]]


def test_layers_of_other_heads_or_sizes_have_blocks_of_their_own() -> None:
    layers = layer(8, value_dim=16), layer(), layer(num_kv_heads=1), layer(value_dim=16), layer(), layer(8)
    layout = layout_of(*layers)
    assert [group.layers for group in layout.groups] == [(1, 4), (2,), (3,), (0,), (5,)]
    assert [group.kind for group in layout.groups] == [GroupKind.FULL] * 3 + [GroupKind.SLIDING] * 2
    shapes = [(shape.num_layers, shape.num_kv_heads, shape.value_dim) for shape in layout.shapes]
    assert shapes == [(2, 2, 8), (1, 1, 8), (1, 2, 16), (1, 2, 16), (1, 2, 8)]
    assert [group.block_bytes for group in layout.groups] == [shape.block_bytes for shape in layout.shapes]
    assert layout.shapes[2].block_bytes == 4 * 2 * (8 + 16) * 4
    stage = layout_of(*layers, own_layers=range(2))
    assert [group.layers for group in stage.groups] == [group.layers for group in layout.groups]
    assert [shape.num_layers for shape in stage.shapes] == [1, 0, 0, 1, 0]
    assert [group.block_bytes > 0 for group in stage.groups] == [True, False, False, True, False]


@pytest.mark.parametrize("chunk", [None, pytest.param(1, marks=pytest.mark.slow), 7, 16])
def test_K07_far_past_the_window_a_chunked_prompt_equals_the_dense_forward(
    driver: Driver, dense: Dense, chunk: int | None
) -> None:
    prompt = make_prompt(71, seed=40)
    driver.add(0, prompt)
    result = driver.prefill(0, 71, chunk)
    assert result.logprobs is not None and not result.errors
    assert_logprobs(result.logprobs[0], dense.log_probs(prompt)[-1])
    tokens = [*(result.token_ids or ()), *driver.decode([0], [72], 14)[0]]
    assert tokens == dense.greedy(prompt, 15)
    sliding = driver.group_tables[-1][0]
    assert sliding.count(-1) >= 17 and len(set(sliding) - {-1}) <= WINDOW // BLOCK + 2


def test_K07_rows_of_many_lengths_share_a_step(driver: Driver, dense: Dense) -> None:
    prompts = [make_prompt(n, seed=n) for n in (3, 60, WINDOW, WINDOW + 1, 33, 100)]
    tokens: list[list[int]] = [[] for _ in prompts]
    for slot, prompt in enumerate(prompts):
        driver.add(slot, prompt)
        driver.row(slot, 0, len(prompt) // 2, 0)
        driver.run()
    for slot, prompt in enumerate(prompts):
        driver.row(slot, len(prompt) // 2, len(prompt) - len(prompt) // 2)
    for slot, token in enumerate(driver.run().token_ids or ()):
        tokens[slot].append(token)
    lengths = [len(prompt) + 1 for prompt in prompts]
    for slot, more in enumerate(driver.decode(range(len(prompts)), lengths, 5)):
        tokens[slot] += more
    assert tokens == [dense.greedy(prompt, 6) for prompt in prompts]


def test_K07_a_prefix_hit_needs_only_the_windows_blocks(driver: Driver, dense: Dense) -> None:
    """A second sequence takes over all full blocks and the last sliding ones; lower entries are never set."""
    prefix = make_prompt(10 * BLOCK, seed=41)
    first, second = prefix + make_prompt(3, seed=42), prefix + make_prompt(9, seed=43)
    driver.add(0, first)
    driver.row(0, 0, len(prefix), 0)
    driver.run()
    driver.add(1, second)
    for group, spec in enumerate(driver.capacity.groups):
        table = driver.group_tables[group][0]
        lowest = spec.first_block(len(prefix), BLOCK)
        for index in range(10):
            driver.append(1, table[index] if index >= lowest else -1, group)
    driver.row(1, len(prefix), 9)
    driver.row(0, len(prefix), 3)
    assert list(driver.run().token_ids or ()) == dense.greedy(second, 1) + dense.greedy(first, 1)


def test_K07_what_left_the_window_may_be_overwritten_by_garbage(driver: Driver, dense: Dense) -> None:
    prompt = make_prompt(50, seed=44)
    driver.add(0, prompt)
    driver.prefill(0, 50)
    driver.row(0, 50, 1, ROW_SAMPLE | ROW_CARRY)
    driver.run()
    pool = driver.executor._cache.pools[-1]  # type: ignore[attr-defined]
    free = [block for block in range(pool.shape.num_blocks) if block not in driver.group_tables[-1][0]]
    with outside(driver.executor):
        blocks = torch.tensor(free).to(pool.device)
        for plane in (*pool.keys, *pool.values):
            plane.index_fill_(0, blocks, float("nan"))
    assert driver.decode([0], [52], 4)[0] == dense.greedy(prompt, 6)[2:]


def test_K06_S09_forks_and_swaps_in_every_group(driver: Driver) -> None:
    params = SamplingParams(temperature=1.1, seed=5, n=2, logprobs=1)
    prompt = make_prompt(4 * WINDOW + 1, seed=45)
    expected = []
    for choice in (0, 1):
        driver.add(10 + choice, prompt, params, choice=choice)
        one = sampled(driver.prefill(10 + choice, len(prompt), 9))
        for step in range(8):
            driver.row(10 + choice, len(prompt) + step, 1, ROW_SAMPLE | ROW_CARRY)
            one += sampled(driver.run())
        expected.append(one)
        driver.free_slot(10 + choice)
    driver.add(0, prompt, params)
    driver.row(0, 0, 30, 0)
    driver.run()
    driver.row(0, 30, len(prompt) - 30)
    driver.fork(0, 1, prompt, params, 1)
    got = [[entry] for entry in sampled(driver.run())]
    flags = [ROW_SAMPLE | ROW_CARRY] * 2
    for step in range(8):
        position = len(prompt) + step
        if step == 4:  # out to the host and back, over blocks that another one wrote to meanwhile
            hosts = driver.swap_out(1)
            driver.add(7, make_prompt(40, seed=46))
            driver.row(7, 0, 40, 0)
            driver.run()
            driver.add(1, prompt + [token for token, _ in got[1]], params, num_prompt=len(prompt), choice=1)
            driver.load(1, hosts)
            flags[1] = ROW_SAMPLE
        for slot in (0, 1):
            driver.own_tail(slot, position)
            driver.row(slot, position, 1, flags[slot])
        flags[1] = ROW_SAMPLE | ROW_CARRY
        for slot, entry in enumerate(sampled(driver.run())):
            got[slot].append(entry)
    for one, other in zip(got, expected, strict=True):
        assert_same(one, other)


def test_a_row_behind_its_table_is_refused_in_each_group(driver: Driver) -> None:
    driver.add(0, make_prompt(20))
    driver.row(0, 0, 20, 0)
    driver.run()
    group = len(driver.capacity.groups) - 1
    driver.replace(0, 3, -1, group)  # inside the window of what follows, but only read
    driver.row(0, 19, 1)
    driver.run()
    driver.replace(0, 4, -1, group)  # where the row writes
    driver.row(0, 19, 1)
    with pytest.raises(AssertionError, match="writes past its block table"):
        driver.run()


@pytest.mark.parametrize(("changes", "rounds"), [({}, 1), ({"long_prefill_threshold": 7}, 2)])
def test_K07_scheduled_whole_chunked_or_cached_it_is_the_dense_text(
    windowed: Windowed, changes: dict[str, object], rounds: int
) -> None:
    prefix = make_prompt(24, seed=47)
    prompts = [prefix + make_prompt(n, seed=n) for n in (5, 17, 30, 2)]
    got = serve(windowed, prompts, changes, rounds)
    assert rounds == 1 or got.hit_tokens > 0


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_K07_S09_preempted_again_and_again_it_is_the_dense_text(windowed: Windowed, preemption: str) -> None:
    prompts = [make_prompt(3 + n, seed=50 + n) for n in range(9)]
    tight = {"num_blocks": 12, "headroom": 0.0, "preemption": preemption, "max_batch_tokens": 12}
    moved = {"swap_outs": 0, "host_loads": 0}
    assert serve(windowed, prompts, tight, moved=moved).num_preemptions > 0
    assert all(count > 0 for count in moved.values()) == (preemption == "swap"), moved


def serve(
    windowed: Windowed,
    prompts: list[list[int]],
    changes: dict[str, object],
    rounds: int = 1,
    moved: dict[str, int] | None = None,
) -> Run:
    """Run the scheduler on the executor, and compare with the dense forward; `moved` counts columns of the plans."""
    executor = make(windowed[0], "auto")
    submit = executor.submit

    def counted(plan: StepPlan) -> object:
        for column in moved or ():
            moved[column] += len(getattr(plan, column))
        return submit(plan)

    executor.submit = counted  # type: ignore[method-assign]
    capacity = executor.open(replace(SPEC, num_blocks=200, host_bytes=1 << 20))
    if "num_blocks" in changes:
        changes = {**changes, "num_blocks": (changes["num_blocks"],) * len(capacity.groups)}
    limits = limits_of(capacity, host_blocks=capacity.host_blocks, **changes)
    got = run(executor, limits, prompts, replace(GREEDY, max_tokens=16, ignore_eos=True), rounds)
    executor.close()
    assert got.token_ids == [windowed[1].greedy(prompt, 16) for prompt in prompts]
    return got
