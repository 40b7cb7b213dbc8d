"""Places of ranks, the tree, and the collectives over gloo."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.nn.parallel import VIRTUAL_RANKS, LocalCollective, Parallel, ShardSpec, tree_sum
from tests.nn.rank_group import RankGroup

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)


def test_ranks_are_numbered_from_the_last_stage() -> None:
    shards = [ShardSpec.of(rank, 2, 3) for rank in range(6)]
    assert [(shard.stage, shard.tensor_rank) for shard in shards] == [(2, 0), (2, 1), (1, 0), (1, 1), (0, 0), (0, 1)]
    assert [shard.rank for shard in shards] == list(range(6))
    assert [shard.is_last_stage for shard in shards] == [True, True, False, False, False, False]
    assert [shard.is_first_stage for shard in shards] == [False, False, False, False, True, True]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_virtual_ranks_are_divided_evenly(size: int) -> None:
    owned = [ShardSpec.of(rank, size).virtual_ranks() for rank in range(size)]
    assert [virtual for ranks in owned for virtual in ranks] == list(range(VIRTUAL_RANKS))


@pytest.mark.parametrize("size", [0, 3, 5, 6, 7, 16])
def test_other_sizes_are_refused_with_those_that_work(size: int) -> None:
    with pytest.raises(ConfigError, match=f"tensor_parallel_size is {size}; give 1, 2, 4 or 8"):
        ShardSpec.of(0, size)


def test_the_tree_is_the_same_for_any_number_of_ranks() -> None:
    for missing in [(), (0,), (1, 2), (4, 5, 6, 7), (0, 1, 2, 3, 5), tuple(range(VIRTUAL_RANKS))]:
        whole = tree_sum(parts(missing))
        for size in (2, 4, 8):
            own = [ShardSpec.of(rank, size).virtual_ranks() for rank in range(size)]
            roots = [tree_sum([parts(missing)[virtual] for virtual in ranks]) for ranks in own]
            total = tree_sum(roots)
            assert (total is None) == (whole is None)
            assert total is None or (whole is not None and torch.equal(total, whole))


def test_the_tree_is_not_a_plain_sum() -> None:
    whole, plain = tree_sum(parts(())), torch.zeros(64)
    for part in parts(()):
        assert part is not None
        plain = plain + part
    assert whole is not None and not torch.equal(whole, plain)
    torch.testing.assert_close(whole, plain)


def test_a_missing_part_keeps_a_negative_zero() -> None:
    total = tree_sum([None, torch.tensor([-0.0]), None, None])
    assert total is not None and bool(torch.signbit(total)[0])


def parts(missing: tuple[int, ...]) -> list[Tensor | None]:
    made: list[Tensor | None] = list(torch.randn(VIRTUAL_RANKS, 64, generator=torch.Generator().manual_seed(3)))
    return [None if virtual in missing else part for virtual, part in enumerate(made)]


def test_one_rank_needs_no_group() -> None:
    parallel = Parallel()
    x = torch.ones(3)
    assert isinstance(parallel.collective, LocalCollective) and parallel.collective.all_gather(x).shape == (1, 3)
    parallel.collective.close()


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroup]:
    with RankGroup(tmp_path_factory.mktemp("ranks"), 2, 2) as made:
        yield made


def own_tensor(shard: ShardSpec, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    values = torch.arange(int(torch.tensor(shape).prod())).view(shape)
    return (values + 100 * shard.tensor_rank + 1000 * shard.stage).to(dtype)


def gathered(parallel: Parallel, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return parallel.collective.all_gather(own_tensor(parallel.shard, dtype, shape)).clone()


@pytest.mark.parametrize("shape", [(1,), (7, 5), (64, 33), (0, 4)])
def test_all_gather_returns_the_tensors_of_the_own_stage(group: RankGroup, shape: tuple[int, ...]) -> None:
    for dtype in DTYPES:
        for shard, found in zip(group.shards, group.call(gathered, dtype, shape), strict=True):
            expected = [own_tensor(ShardSpec(rank, 2, shard.stage, 2), dtype, shape) for rank in range(2)]
            assert torch.equal(found, torch.stack(expected))


def passed_on(parallel: Parallel, dtype: torch.dtype) -> Tensor:
    shard, hidden_TE = parallel.shard, own_tensor(parallel.shard, dtype, (7, 16))
    if not shard.is_first_stage:
        hidden_TE = parallel.collective.receive(torch.empty(7, 16, dtype=dtype))
    if not shard.is_last_stage:
        parallel.collective.send(hidden_TE)
    return hidden_TE.clone()


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_hidden_states_reach_the_same_rank_of_the_next_stage(group: RankGroup, dtype: torch.dtype) -> None:
    for shard, found in zip(group.shards, group.call(passed_on, dtype), strict=True):
        assert torch.equal(found, own_tensor(ShardSpec(shard.tensor_rank, 2, 0, 2), dtype, (7, 16)))
