"""The torch executor: conformance with each attention backend, and what is its own."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo import machine
from octavo.config import ExecutionConfig, ModelConfig
from octavo.core.plan import ROW_CARRY, ROW_SAMPLE, EncodeJob, StepPlan
from octavo.errors import CapacityError, ConfigError, EngineError
from octavo.executors import cache
from octavo.executors.protocol import Executor, ExecutorSpec
from octavo.executors.torch_executor import TorchExecutor
from octavo.grammar.matcher import Masks
from tests.executors.conformance import SPEC, Conformance, Dense, Driver, make_prompt, open_files
from tests.executors.effects_conformance import BLOCK_BYTES
from tests.executors.emulated_device import OnEmulated
from tests.tiny_models import make_tiny_model


def make(folder: Path, attention: str = "batched", device: str = "cpu", dtype: str = "float32") -> TorchExecutor:
    files, spec = open_files(folder)
    execution = ExecutionConfig(device=device, threads=1, attention=attention)
    return TorchExecutor(files, spec, execution, ModelConfig(dtype=dtype))


def make_any(folder: Path, attention: str) -> Executor:
    """Return an executor with this attention backend, or with torch's on an "emulated" accelerator."""
    return OnEmulated(lambda: make(folder, "batched")) if attention == "emulated" else make(folder, attention)


class TestKernelAttention(Conformance):
    """Decode rows by the C++ kernel where it was built."""

    def make_executor(self, folder: Path) -> Executor:
        return make(folder, "auto")


class TestBatchedAttention(Conformance):
    def make_executor(self, folder: Path) -> Executor:
        return make(folder, "batched")


class TestReferenceAttention(Conformance):
    def make_executor(self, folder: Path) -> Executor:
        return make(folder, "reference")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestCUDA(Conformance):
    def make_executor(self, folder: Path) -> Executor:
        return make(folder, "auto", "cuda")


@pytest.fixture
def driver(tiny_folder: Path):
    executor = make(tiny_folder)
    yield Driver(executor, executor.open(SPEC))
    executor.close()


def test_non_finite_logits_end_their_row_only(driver: Driver, dense: Dense) -> None:
    prompts = [make_prompt(6, seed=1), make_prompt(9, seed=2)]
    driver.add(0, prompts[0])
    driver.row(0, 0, 6, 0)
    driver.run()
    driver.executor._cache.pools[0].values[0][driver.tables[0][0]] = float("nan")
    driver.add(1, prompts[1])
    driver.row(0, 5, 1)
    driver.row(1, 0, 9)
    result = driver.run()
    assert [row for row, _ in result.errors] == [0] and "finite" in result.errors[0][1]
    assert list(result.token_ids or ())[1:] == dense.greedy(prompts[1], 1)


def test_row_18_a_chunk_that_samples_nothing_tells_too_that_it_is_not_finite(driver: Driver) -> None:
    """Else its blocks would be found by others before anybody looked at logits."""
    for slot in (0, 1):
        driver.add(slot, make_prompt(12, seed=slot))
        driver.row(slot, 0, 5, 0)
    assert driver.run().errors == ()
    driver.executor._cache.pools[0].values[0][driver.tables[0][0]] = float("nan")
    for slot in (0, 1):
        driver.row(slot, 5, 4, 0)
    ((row, reason),) = driver.run().errors
    assert row == 0 and "hidden state is not finite" in reason


def test_what_a_broken_row_left_in_a_block_does_not_reach_the_next_owner(driver: Driver, dense: Dense) -> None:
    pool = driver.executor._cache.pools[0]
    for layer in range(pool.shape.num_layers):
        pool.keys[layer][: pool.null_block] = float("nan")
        pool.values[layer][: pool.null_block] = float("nan")
    prompts = [make_prompt(6, seed=1), make_prompt(33, seed=2)]
    for slot, prompt in enumerate(prompts):
        driver.add(slot, prompt)
    driver.row(0, 0, 5, 0)
    driver.row(1, 0, 30, 0)
    driver.run()
    driver.row(0, 5, 1)
    driver.row(1, 30, 3)
    tokens = [[token] for token in driver.run().token_ids or ()]
    for more, last in zip(driver.decode([0, 1], [7, 34], 6), tokens, strict=True):
        last.extend(more)
    assert tokens == [dense.greedy(prompt, 7) for prompt in prompts]


def test_a_step_that_raises_leaves_the_executor_usable(driver: Driver, dense: Dense, monkeypatch) -> None:
    prompt = make_prompt(9, seed=3)
    driver.add(0, prompt)
    driver.row(0, 0, 9)
    plan = driver.plan()
    decoder = driver.executor._decoder
    with monkeypatch.context() as patch:
        patch.setattr(driver.executor, "keeps_logits", True)
        patch.setattr(decoder, "logits", lambda hidden: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            driver.executor.collect(driver.executor.submit(plan))
    result = driver.executor.collect(driver.executor.submit(plan))
    assert list(result.token_ids or ()) == dense.greedy(prompt, 1)


def test_timings_have_three_parts(driver: Driver) -> None:
    driver.add(0, make_prompt(9))
    timings = driver.prefill(0, 9).timings
    assert min(timings.prepare_s, timings.forward_s, timings.sample_s) > 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_blocks": 0}, "--num-gpu-blocks-override 0 holds no KV block"),
        ({"num_blocks": None, "pool_bytes": 10}, "holds no KV block"),
        ({"num_blocks": None, "pool_tokens": 3}, "--kv-cache-tokens 3 holds no KV block of 4 tokens"),
        ({"num_blocks": 10**9}, "would hold"),
        ({"num_blocks": 5, "pool_tokens": 30}, "give one of"),
    ],
)
def test_K11_a_pool_that_holds_nothing_says_what_would_fit(tiny_folder: Path, change: dict, words: str) -> None:
    with pytest.raises(CapacityError, match=words):
        make(tiny_folder).open(replace(SPEC, **change))


def test_K11_sizes_in_bytes_and_tokens_and_by_default(tiny_folder: Path) -> None:
    base = ExecutorSpec(max_sequences=4, max_batch_tokens=64, block_size=8)
    block_bytes = 2 * 2 * 8 * 2 * 32 * 4  # K and V, layers, tokens, KV heads, head size, float32
    opened = [
        make(tiny_folder).open(replace(base, **change)).num_blocks[0]
        for change in ({}, {"pool_tokens": 100}, {"pool_bytes": 10 * block_bytes + 5})
    ]
    assert opened == [4 * 256 // 8, 12, 10]


def test_K10_host_blocks_lie_in_slabs_and_move_in_parts(tiny_folder: Path, monkeypatch) -> None:
    executor = make(tiny_folder)
    monkeypatch.setattr(cache, "SLAB_BYTES", 3 * BLOCK_BYTES)
    monkeypatch.setattr(cache, "STAGING_BYTES", 2 * BLOCK_BYTES)
    capacity = executor.open(replace(SPEC, host_bytes=11 * BLOCK_BYTES + 5))
    assert capacity.host_blocks == (11,)
    assert [len(slab) for slab in executor._cache._hosts[0]._slabs] == [3, 3, 3, 2]
    driver = Driver(executor, capacity)
    prompt = make_prompt(30, seed=4)
    for slot in (0, 1):
        driver.add(slot, prompt)
        first = driver.prefill(slot, 30)
    straight = driver.decode([0], [31], 4)
    hosts = driver.swap_out(1)
    driver.add(2, make_prompt(30, seed=5))
    driver.row(2, 0, 30, 0)
    driver.run()
    driver.add(3, [*prompt, *(first.token_ids or ())], num_prompt=30)
    driver.load(3, hosts)
    driver.row(3, 30, 1)
    back = list(driver.run().token_ids or ())
    for position in (31, 32, 33):
        driver.row(3, position, 1, ROW_SAMPLE | ROW_CARRY)
        back += driver.run().token_ids or ()
    assert [back] == straight
    executor.close()


def test_K11_K10_the_host_tier_comes_out_of_the_same_memory_on_a_cpu(tiny_folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(machine, "usable_memory", lambda: (10**9, 100 * BLOCK_BYTES))
    spec = replace(SPEC, num_blocks=None, memory_fraction=1.0, max_model_len=64)
    assert make(tiny_folder).open(spec).num_blocks == (100,)
    executor = make(tiny_folder)
    capacity = executor.open(replace(spec, host_bytes=30 * BLOCK_BYTES))
    assert (capacity.num_blocks, capacity.host_blocks) == ((70,), (30,))
    with pytest.raises(CapacityError, match="exceeds the 409600 bytes of free host memory"):
        make(tiny_folder).open(replace(spec, host_bytes=101 * BLOCK_BYTES))


def test_dtype_auto_and_wrong_names(tiny_folder: Path) -> None:
    assert make(tiny_folder, dtype="auto")._dtype in (torch.float32, torch.bfloat16)
    with pytest.raises(ConfigError, match="dtype is 'int3'"):
        make(tiny_folder, dtype="int3")
    with pytest.raises(ConfigError, match="device is 'tpu'"):
        make(tiny_folder, device="tpu")
    with pytest.raises(ConfigError, match="attention is 'flash'"):
        make(tiny_folder, attention="flash").open(SPEC)


def test_what_it_cannot_do_raises(driver: Driver) -> None:
    with pytest.raises(EngineError, match="host tier"):
        driver.executor.submit(StepPlan(0, 0.0, swap_outs=array("i", [0, 1, 2])))
    with pytest.raises(EngineError, match="encodes no media"):
        driver.executor.submit(StepPlan(0, 0.0, encode_jobs=(EncodeJob(0, 0, b"key", 4),)))
    with pytest.raises(EngineError, match="encodes no media"):
        driver.executor.submit(StepPlan(0, 0.0, encoder_frees=(b"key",)))
    none = Masks(np.zeros(0, dtype=np.int64), np.zeros((0, 1), dtype=np.int32))
    with pytest.raises(EngineError, match="needs none"):
        driver.executor.supply(driver.executor.submit(StepPlan(0, 0.0)), none)
    driver.executor.close()
    driver.executor.close()
    with pytest.raises(EngineError, match="not open"):
        driver.executor.submit(StepPlan(0, 0.0))


@pytest.mark.parametrize("family", ["llama2", "smollm2", "mistral", "qwen2", "qwen3"])
def test_X04_greedy_equals_transformers_for_every_family(family: str, tmp_path: Path) -> None:
    folder = make_tiny_model(family, tmp_path / family)
    oracle = Dense(folder)
    for attention in ("auto", "batched", "reference"):
        executor = make(folder, attention)
        driver = Driver(executor, executor.open(SPEC))
        prompts = [make_prompt(n, seed=n) for n in (4, 29)]
        tokens = []
        for slot, prompt in enumerate(prompts):
            driver.add(slot, prompt)
            tokens.append(list(driver.prefill(slot, len(prompt), 11).token_ids or ()))
        for last, more in zip(tokens, driver.decode([0, 1], [5, 30], 7), strict=True):
            last.extend(more)
        assert tokens == [oracle.greedy(prompt, 8) for prompt in prompts]
        executor.close()
