"""How models are divided among ranks: every part belongs to one rank, the division does not depend on the number of
ranks, and refusals name the sizes that work."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from octavo.artifacts.families import linear_shape
from octavo.artifacts.model_spec import ModelSpec
from octavo.errors import ConfigError
from octavo.models.shards import ModelShard
from octavo.nn.parallel import TENSOR_SIZES, ShardSpec

SPEC = ModelSpec("llama", 49152, 576, 30, 9, 3, 64, 1536, 1e-5, 1e4, 2048)  # the default model
HEADS = [(9, 3), (32, 8), (8, 8), (14, 2), (28, 4), (4, 1), (12, 12), (10, 5), (3, 1), (71, 71), (64, 8), (40, 10)]


def shards(spec: ModelSpec, size: int, num_stages: int = 1) -> list[ModelShard]:
    return [ModelShard(spec, ShardSpec.of(rank, size, num_stages)) for rank in range(size * num_stages)]


@pytest.mark.parametrize("size", TENSOR_SIZES)
@pytest.mark.parametrize("heads", HEADS)
def test_each_head_is_in_one_rank_with_its_kv_head(heads: tuple[int, int], size: int) -> None:
    spec = replace(SPEC, num_heads=heads[0], num_kv_heads=heads[1])
    group = heads[0] // heads[1]
    parts = shards(spec, size)
    assert [head for part in parts for head in part.query_heads] == list(range(heads[0]))
    for part in parts:
        assert set(part.kv_heads) == {head // group for head in part.query_heads}
        if part.kv_heads:  # the attention backends need groups of one size, which begin with a KV head
            local = len(part.query_heads) // len(part.kv_heads)
            assert [head // group - part.kv_heads.start for head in part.query_heads] == [
                index // local for index in range(len(part.query_heads))
            ]


@pytest.mark.parametrize("heads", HEADS)
def test_kv_heads_are_copied_only_where_there_are_fewer_than_ranks(heads: tuple[int, int]) -> None:
    spec = replace(SPEC, num_heads=heads[0], num_kv_heads=heads[1])
    for size in TENSOR_SIZES:
        held = sum(len(part.kv_heads) for part in shards(spec, size))
        assert held == heads[1] or (heads[1] < size and held <= size)


@pytest.mark.parametrize("linear", ["qkv", "output", "gate_up", "down"])
@pytest.mark.parametrize("heads", HEADS)
def test_segments_are_the_same_for_any_number_of_ranks(linear: str, heads: tuple[int, int]) -> None:
    spec = replace(SPEC, num_heads=heads[0], num_kv_heads=heads[1])

    def windows(size: int) -> set[str]:
        parts = shards(spec, size)
        if linear in ("qkv", "gate_up"):
            return {window.key for part in parts for window in part.output_windows(linear, 0)}
        return {window.key for part in parts for window in part.input_windows(linear, 0) if window is not None}

    assert windows(1) == windows(2) == windows(4) == windows(8)


def test_segments_cover_each_tensor_once() -> None:
    (whole,) = shards(SPEC, 1)
    rows = [window.rows for window in whole.output_windows("qkv", 3)]
    assert sum(map(len, rows)) == linear_shape(SPEC, "qkv")[0]
    columns = [window.columns for window in whole.input_windows("down", 3) if window is not None]
    assert all(
        before is not None and after is not None and before.stop == after.start for before, after in pairwise(columns)
    )
    assert all(part is not None and len(part) == 192 for part in columns)
    assert sum(len(window.rows) for window in whole.table_windows("lm_head.weight")) == SPEC.vocab_size


def test_columns_stay_in_groups_of_quantisation() -> None:
    for size in (1536, 4864, 8960, 11008, 18944):
        (whole,) = shards(replace(SPEC, intermediate_size=size), 1)
        assert all(bound % 32 == 0 for bound in whole.column_bounds)
        widths = [after - before for before, after in pairwise(whole.column_bounds)]
        assert max(widths) - min(widths) <= 32


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 7, 30])
def test_stages_have_consecutive_layers_and_the_last_the_fewest(num_stages: int) -> None:
    parts = shards(SPEC, 1, num_stages)[::-1]
    assert [layer for part in parts for layer in part.layers] == list(range(30))
    sizes = [len(part.layers) for part in parts]
    assert max(sizes) - min(sizes) <= 1 and sizes[-1] == min(sizes)
    assert all(part.is_foreign("model.layers.0.mlp.up_proj.weight") == (0 not in part.layers) for part in parts)
    assert not any(part.is_foreign("model.norm.weight") for part in parts)


def test_refusals_name_the_sizes_that_work() -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 31; the model has 30 layers: give 1 to 30"):
        shards(SPEC, 1, 31)
    with pytest.raises(ConfigError, match=r"model's MLP columns \(3\) can be divided among 1 or 2 ranks"):
        shards(replace(SPEC, intermediate_size=3), 4)
    with pytest.raises(ConfigError, match="tensor_parallel_size is 3; give 1, 2, 4 or 8"):
        shards(SPEC, 3)
