"""TorchExecutor as one of several ranks: paged caches of the rank's own heads and layers, the same results as one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import resolve_model
from octavo.config import ExecutionConfig, ModelConfig, ParallelConfig
from octavo.core.plan import ROW_CARRY, ROW_SAMPLE
from octavo.core.request import SamplingParams
from octavo.errors import ConfigError
from octavo.executors.memory import plan_memory
from octavo.executors.protocol import Executor, ExecutorSpec, PoolBlocks
from octavo.executors.torch_executor import TorchExecutor
from octavo.nn.parallel import Parallel, ShardSpec
from octavo.ops import cpu
from tests.executors.conformance import Conformance
from tests.executors.driver import Driver, make_prompt
from tests.nn.rank_group import RankGroup
from tests.tiny_models import make_tiny_model

SPEC = ExecutorSpec(max_sequences=80, max_batch_tokens=512, block_size=4, num_blocks=900, host_bytes=1 << 20)
NINE_HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144}
needs_kernels = pytest.mark.skipif(not cpu.status().is_loaded, reason="needs the kernels")


def make_executor(folder: Path | str, parallel: Parallel | None, **model: Any) -> TorchExecutor:
    files = resolve_model(str(folder))
    execution = ExecutionConfig(device="cpu", threads=1)
    return TorchExecutor(files, read_model_spec(files), execution, ModelConfig(**model), parallel)


class TestOneRank(Conformance):
    """One rank with the arithmetic of several does what every executor does."""

    def make_executor(self, folder: Path) -> Executor:
        return make_executor(folder, Parallel(), dtype="float32")


class Watched(Driver):
    """A driver that keeps the logits of every step."""

    def __init__(self, executor: TorchExecutor, spec: ExecutorSpec = SPEC) -> None:
        super().__init__(executor, executor.open(spec))
        self.logits: list[torch.Tensor] = []
        decoder = executor._decoder
        assert decoder is not None
        compute = decoder.logits

        def watched(hidden_NE: torch.Tensor) -> torch.Tensor:
            self.logits.append(compute(hidden_NE).clone())
            return self.logits[-1].clone()

        decoder.logits = watched  # type: ignore[method-assign]


def run_steps(parallel: Parallel, folder: str, dtype: str, chooses: bool) -> tuple[list[torch.Tensor], list[int]]:
    """Compute prompts, decode 1, 7 and 64 rows, and swap; return logits and sampled ids, none in other stages.

    If `chooses`, the host sends each id; otherwise the rows continue with the ids that were sampled.
    """
    executor = make_executor(folder, parallel, dtype=dtype)
    driver = Watched(executor)
    tokens: list[int] = []
    for slot in range(64):
        params = SamplingParams(temperature=0.8, seed=slot, top_p=0.9) if slot % 2 else SamplingParams(temperature=0)
        driver.add(slot, make_prompt(12 + slot % 9, seed=slot), params)
        driver.row(slot, 0, 12 + slot % 9, ROW_SAMPLE)
        if slot % 8 == 7:
            tokens += driver.run().token_ids or ()
    lengths = [13 + slot % 9 for slot in range(64)]
    for rows in (1, 7, 64):
        for _ in range(2):
            for slot in range(rows):
                if chooses:
                    driver.choose(slot, lengths[slot] - 1, 5 + slot)
                driver.row(slot, lengths[slot] - 1, 1, ROW_SAMPLE | ROW_CARRY)
                lengths[slot] += 1
            tokens += driver.run().token_ids or ()
    hosts = driver.swap_out(3)
    driver.run()
    driver.add(70, make_prompt(lengths[3], seed=3), SamplingParams(temperature=0))
    driver.load(70, hosts)
    driver.row(70, lengths[3] - 1, 1, ROW_SAMPLE)
    tokens += driver.run().token_ids or ()
    executor.close()
    return driver.logits, tokens


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("llama3", {}),
    "nine_heads": ("smollm2", NINE_HEADS),
    "mistral_window": ("mistral_window", {}),
    "gemma3": ("gemma3", {"num_hidden_layers": 4, "sliding_window_pattern": 4}),  # full attention in the last layer
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {name: str(make_tiny_model(family, root / name, **sizes)) for name, (family, sizes) in CASES.items()}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroup]:
    with RankGroup(tmp_path_factory.mktemp("pair"), 2) as group:
        yield group


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroup]:
    with RankGroup(tmp_path_factory.mktemp("stages"), 1, 2) as group:
        yield group


def check_equal(found: tuple[list[torch.Tensor], list[int]], one: tuple[list[torch.Tensor], list[int]]) -> None:
    assert found[1] == one[1] and len(one[1]) > 64
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found[0], one[0], strict=True))


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_X08_two_ranks_compute_and_sample_as_one(
    name: str, dtype: str, folders: dict[str, str], pair: RankGroup
) -> None:
    """No id is exchanged: each rank draws its own from the gathered logits."""
    one = run_steps(Parallel(), folders[name], dtype, False)
    for found in pair.call(run_steps, folders[name], dtype, False):
        check_equal(found, one)


@needs_kernels
@pytest.mark.parametrize("name", CASES)
def test_X08_two_stages_compute_as_one(name: str, folders: dict[str, str], stages: RankGroup) -> None:
    """Also where a stage has no layer of a cache group, or only layers with windows."""
    last, first = stages.call(run_steps, folders[name], "bfloat16", True)
    check_equal(last, run_steps(Parallel(), folders[name], "bfloat16", True))
    assert first == ([], [])


def opened(folder: str, shard: ShardSpec, spec: ExecutorSpec = SPEC, blocks: PoolBlocks | None = None) -> Any:
    executor = make_executor(folder, Parallel(shard), dtype="float32")
    offered = executor.load(spec)
    capacity = executor.allocate(offered if blocks is None else blocks)
    pools = [pool.shape for pool in executor._cache.pools]
    executor.close()
    return offered, capacity, pools


def test_a_rank_has_the_cache_of_its_own_heads(folders: dict[str, str]) -> None:
    ranks = [opened(folders["nine_heads"], ShardSpec.of(rank, 2)) for rank in range(2)]
    assert [pools[0].num_kv_heads for _, _, pools in ranks] == [1, 2]
    low, high = (capacity for _, capacity, _ in ranks)
    assert 2 * low.groups[0].block_bytes == high.groups[0].block_bytes
    assert 2 * low.kv_bytes_per_token == high.kv_bytes_per_token
    whole = opened(folders["nine_heads"], ShardSpec())[1]
    assert low.groups[0].layers == high.groups[0].layers == whole.groups[0].layers
    assert low.weight_bytes < high.weight_bytes < 0.6 * whole.weight_bytes


def test_ranks_agree_on_the_least_number_of_blocks(folders: dict[str, str]) -> None:
    spec = ExecutorSpec(max_sequences=4, max_batch_tokens=64, block_size=4, pool_bytes=1 << 20)
    ranks = [opened(folders["nine_heads"], ShardSpec.of(rank, 2), spec)[0] for rank in range(2)]
    least = ranks[0].least(ranks[1])
    assert ranks[0].device[0] // 2 == ranks[1].device[0] == least.device[0]
    for rank in range(2):
        _, capacity, pools = opened(folders["nine_heads"], ShardSpec.of(rank, 2), spec, least)
        assert capacity.num_blocks == least.device and pools[0].num_blocks == least.device[0]


@pytest.mark.parametrize(
    ("name", "tensor_size", "num_stages"), [("nine_heads", 2, 1), ("nine_heads", 4, 2), ("gemma3", 1, 2)]
)
def test_a_memory_plan_has_the_blocks_of_the_ranks(
    name: str, tensor_size: int, num_stages: int, folders: dict[str, str]
) -> None:
    spec = ExecutorSpec(max_sequences=4, max_batch_tokens=64, block_size=4, pool_bytes=1 << 20)
    sizes = ParallelConfig(tensor_parallel_size=tensor_size, pipeline_parallel_size=num_stages)
    files, model = resolve_model(folders[name]), ModelConfig(dtype="float32")
    plan = plan_memory(files, ExecutionConfig(device="cpu"), model, spec, sizes)
    shards = [ShardSpec.of(rank, tensor_size, num_stages) for rank in range(tensor_size * num_stages)]
    ranks = [opened(folders[name], shard, spec)[:2] for shard in shards]
    assert plan.num_blocks == reduce(PoolBlocks.least, (offered for offered, _ in ranks)).device
    whole = sum(capacity.weight_bytes for _, capacity in ranks)
    assert 0.7 * whole < plan.weight_bytes * len(ranks) < 1.5 * whole  # the plan counts an embedding that is not tied
    per_token = [sum(group.block_bytes for group in capacity.groups) for _, capacity in ranks]
    assert plan.kv_bytes_per_token == max(per_token) // 4


def test_stages_describe_the_groups_of_the_whole_model(folders: dict[str, str]) -> None:
    """Block tables are common to all stages. The first stage of gemma3 has layers with windows only."""
    spec = ExecutorSpec(max_sequences=4, max_batch_tokens=64, block_size=4, pool_bytes=1 << 20)
    stages = [opened(folders["gemma3"], ShardSpec.of(rank, 1, 2), spec) for rank in range(2)]
    whole = opened(folders["gemma3"], ShardSpec(), spec)[1]
    for _, capacity, pools in stages:
        described = [(group.kind, group.window, group.layers) for group in capacity.groups]
        assert described == [(group.kind, group.window, group.layers) for group in whole.groups]
        assert sum(pool.num_layers for pool in pools) == 2
    for index, group in enumerate(whole.groups):
        assert sum(capacity.groups[index].block_bytes for _, capacity, _ in stages) == group.block_bytes
    assert 0 in [pool.num_layers for _, _, pools in stages for pool in pools]
    least = stages[0][0].least(stages[1][0])
    assert all(0 < count < 1 << 20 for count in least.device)


def test_a_closed_rank_keeps_no_weights(folders: dict[str, str]) -> None:
    executor = make_executor(folders["llama3"], Parallel())
    executor.open(SPEC)
    executor.close()
    assert not hasattr(executor, "_loaded") and executor._decoder is None


def test_a_number_of_ranks_that_cannot_be_is_refused_before_loading(folders: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="the model has 2 layers: give 1 to 2"):
        make_executor(folders["llama3"], Parallel(ShardSpec.of(0, 1, 3)))
