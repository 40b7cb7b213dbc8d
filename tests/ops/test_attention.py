"""Paged attention backends against plain dense attention, and against each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from octavo.ops import cpu
from octavo.ops.attention import AttentionBatch, KVPool, LayerAttention, PoolShape, ReferenceAttention
from octavo.ops.attention_batched import BatchedAttention, decode_buckets, padded_levels
from octavo.ops.attention_kernel import KernelAttention, has_kernel

HEADS, KV_HEADS, HEAD, BLOCK, LAYERS = 6, 2, 32, 4, 2
BACKENDS = [BatchedAttention, ReferenceAttention]
if cpu.status().is_loaded:
    BACKENDS.append(KernelAttention)


class Rig:
    """Rows with random keys and values for their whole context; the part before the step is already in the pool.

    With `drop` a row's blocks that left the window of its first query are gone: their table entries are a block of
    NaNs, another row's blocks, or the null block.
    """

    drop: str | None = None

    def __init__(
        self,
        contexts: list[int],
        counts: list[int],
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        value_dim: int = HEAD,
    ):
        generator = torch.Generator().manual_seed(seed)

        def rand(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        self.contexts, self.counts = contexts, counts
        self.keys = [[rand(n, KV_HEADS, HEAD) for n in contexts] for _ in range(LAYERS)]
        self.values = [[rand(n, KV_HEADS, value_dim) for n in contexts] for _ in range(LAYERS)]
        self.queries = [rand(sum(counts), HEADS, HEAD) for _ in range(LAYERS)]
        widths = [-(-n // BLOCK) for n in contexts]
        numbers = torch.randperm(sum(widths), generator=generator).tolist()
        self.shape = PoolShape(LAYERS, sum(widths) + 3, BLOCK, KV_HEADS, HEAD, value_dim, dtype)
        self.table = np.full((len(contexts), max(widths)), self.shape.num_blocks)
        for row, width in enumerate(widths):
            self.table[row, :width] = [numbers.pop() for _ in range(width)]

    def batch(self) -> AttentionBatch:
        counts, contexts = np.array(self.counts), np.array(self.contexts)
        row = np.repeat(np.arange(len(counts)), counts)
        starts = np.concatenate(([0], np.cumsum(counts)))
        positions = np.arange(starts[-1]) - starts[row] + (contexts - counts)[row]
        slots = self.table[row, positions // BLOCK] * BLOCK + positions % BLOCK
        return AttentionBatch(
            num_tokens=int(starts[-1]),
            num_rows=len(counts),
            num_decodes=int((counts == 1).sum()),
            positions_T=torch.from_numpy(positions),
            slot_mapping_T=torch.from_numpy(slots),
            block_table_NM=torch.from_numpy(self.table),
            counts=counts,
            contexts=contexts,
        )

    def run(self, backend_class: Callable, window: int | None = None, **how: Any) -> list[torch.Tensor]:
        pool = KVPool(self.shape, torch.device("cpu"))
        for layer in range(LAYERS):
            for row, (context, count) in enumerate(zip(self.contexts, self.counts, strict=True)):
                for position in range(self.kept(row, window), context - count):
                    block = self.table[row, position // BLOCK]
                    pool.keys[layer][block, position % BLOCK] = self.keys[layer][row][position]
                    pool.values[layer][block, position % BLOCK] = self.values[layer][row][position]
        if self.drop:
            self.drop_blocks(pool, window)
        layer = LayerAttention(HEADS, KV_HEADS, HEAD, self.shape.value_dim, HEAD**-0.5, window)
        backend = backend_class(pool, [layer, replace(layer, **how)])
        outputs = []
        for _ in range(2):  # the second time finds the step's keys and values in the pool already, and must not care
            backend.begin(self.batch())
            outputs = [
                backend.attend(
                    layer, self.queries[layer], self.new(self.keys[layer]), self.new(self.values[layer])
                ).clone()
                for layer in range(LAYERS)
            ]
        assert not pool.keys[0][pool.null_block].any(), "the null block was written"
        return outputs

    def kept(self, row: int, window: int | None) -> int:
        """The first position of the first block that the row still holds."""
        if not self.drop or window is None:
            return 0
        return max(0, self.contexts[row] - self.counts[row] - window + 1) // BLOCK * BLOCK

    def drop_blocks(self, pool: KVPool, window: int | None) -> None:
        poison = pool.shape.num_blocks - 1  # which no row holds
        for layer in range(LAYERS):
            pool.keys[layer][poison] = pool.values[layer][poison] = float("nan")
        dropped = [self.kept(row, window) // BLOCK for row in range(len(self.contexts))]
        others = self.table[-1, dropped[-1]]
        for row, count in enumerate(dropped):
            self.table[row, :count] = {"nan": poison, "null": pool.null_block, "others": others}[self.drop]

    def new(self, whole: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([part[len(part) - count :] for part, count in zip(whole, self.counts, strict=True)])

    def dense(
        self,
        layer: int,
        window: int | None = None,
        scale: float = HEAD**-0.5,
        soft_cap: float | None = None,
        sinks_H: torch.Tensor | None = None,
        slopes_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        outputs, first = [], 0
        for row, (context, count) in enumerate(zip(self.contexts, self.counts, strict=True)):
            q = self.queries[layer][first : first + count].double().transpose(0, 1)
            k = self.keys[layer][row].double().transpose(0, 1).repeat_interleave(HEADS // KV_HEADS, 0)
            v = self.values[layer][row].double().transpose(0, 1).repeat_interleave(HEADS // KV_HEADS, 0)
            at, where = torch.arange(context - count, context)[:, None], torch.arange(context)
            seen = (where <= at) & (where > at - (window or 10**9))
            scores = q @ k.transpose(1, 2) * scale
            scores = scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)
            scores += 0 if slopes_H is None else slopes_H.double()[:, None, None] * (where - at)
            exponentials = scores.exp() * seen
            total = exponentials.sum(-1, keepdim=True)
            total += 0 if sinks_H is None else sinks_H.double().exp()[:, None, None]
            outputs.append((exponentials / total @ v).transpose(0, 1))
            first += count
        return torch.cat(outputs)


SHAPES = {
    "one token": ([1], [1]),
    "one row": ([70], [1]),
    "decodes": ([1, 2, 3, 4, 5, 31, 32, 33, 64, 65, 200, 400], [1] * 12),
    "whole prompt": ([37], [37]),
    "chunk": ([37], [7]),
    "chunks": ([8, 20, 130], [8, 4, 65]),
    "mixed": ([1, 9, 40, 41, 6, 25, 80], [1, 1, 1, 1, 6, 5, 64]),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("window", [None, 6, 64])
def test_equals_dense_attention(name: str, backend: Callable, window: int | None) -> None:
    rig = Rig(*SHAPES[name])
    for layer, output in enumerate(rig.run(backend, window)):
        torch.testing.assert_close(output.double(), rig.dense(layer, window), atol=2e-6, rtol=1e-5)


SINKS = torch.tensor([-2.0, 0.0, 0.5, 1.0, 3.0, 6.0])
SLOPES = 2.0 ** -torch.arange(1.0, HEADS + 1)
KINDS: dict[str, dict[str, Any]] = {
    "scale": {"scale": 0.31},
    "soft cap": {"soft_cap": 0.8},
    "sinks": {"sinks_H": SINKS},
    "slopes": {"slopes_H": SLOPES},
    "all": {"scale": 0.4, "soft_cap": 1.5, "sinks_H": SINKS, "slopes_H": SLOPES},
}


def backends_for(**how: Any) -> list[Callable]:
    layer = replace(LayerAttention(HEADS, KV_HEADS, HEAD, HEAD, 1.0), **how)
    shape = PoolShape(1, 1, BLOCK, KV_HEADS, HEAD, layer.value_dim, torch.float32)
    kernels = has_kernel(KVPool(shape, torch.device("cpu")), [layer])
    return [backend for backend in BACKENDS if backend is not KernelAttention or kernels]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("window", [None, 6])
def test_each_layer_attends_in_its_own_way(name: str, kind: str, window: int | None) -> None:
    for backend in backends_for(**KINDS[kind]):
        rig = Rig(*SHAPES[name])
        plain, other = rig.run(backend, window, **KINDS[kind])
        torch.testing.assert_close(plain.double(), rig.dense(0, window), atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(other.double(), rig.dense(1, window, **KINDS[kind]), atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", [{}, *KINDS.values()])
@pytest.mark.parametrize("value_dim", [16, 40])
def test_values_have_a_size_of_their_own(value_dim: int, kind: dict[str, Any]) -> None:
    for backend in backends_for(**kind, value_dim=value_dim):
        rig = Rig(*SHAPES["mixed"], value_dim=value_dim)
        output = rig.run(backend, **kind)[1]
        assert output.shape == (sum(rig.counts), HEADS, value_dim)
        torch.testing.assert_close(output.double(), rig.dense(1, **kind), atol=3e-6, rtol=1e-5)


def test_bug_7_a_window_keeps_the_newest_token_in_a_prompt_longer_than_it() -> None:
    rig = Rig([23, 24], [23, 24])
    alone = Rig([1], [1])
    for backend in BACKENDS:
        output = rig.run(backend, window=1)[0]
        newest = rig.new(rig.values[0]).repeat_interleave(HEADS // KV_HEADS, 1)
        torch.testing.assert_close(output, newest)  # a window of one token sees just itself
        assert alone.run(backend, window=1)[0].isfinite().all()


FAR = ([5, 40, 41, 42, 43, 44, 97, 300, 30, 64, 200, 333], [1] * 8 + [30, 9, 200, 70])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("drop", ["nan", "null", "others"])
@pytest.mark.parametrize("window", [1, 2, 4, 5, 8, 9, 33, 64, 299])
def test_K07_blocks_that_left_the_window_are_not_read(backend: Callable, drop: str, window: int) -> None:
    """Decodes, whole prompts and chunks far longer than the window; every offset of a context in its block."""
    rig = Rig(*FAR)
    rig.drop = drop
    for layer, output in enumerate(rig.run(backend, window)):
        torch.testing.assert_close(output.double(), rig.dense(layer, window), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_K07_a_window_as_long_as_the_context_is_full_attention(backend: Callable) -> None:
    rig = Rig(*FAR)
    for slid, full in zip(rig.run(backend, 333), rig.run(backend), strict=True):
        torch.testing.assert_close(slid, full, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_K07_a_windowed_row_does_not_depend_on_the_rows_beside_it(dtype: torch.dtype) -> None:
    contexts = [7, 40, 61, 90, 133, 401]
    together = Rig(contexts, [1] * 6, dtype).run(BatchedAttention, 21)[0]
    for row, context in enumerate(contexts):
        alone = Rig(contexts, [1] * 6, dtype)
        alone.contexts, alone.counts, alone.table = [context], [1], alone.table[row : row + 1]
        alone.queries = [q[row : row + 1] for q in alone.queries]
        alone.keys, alone.values = [k[row : row + 1] for k in alone.keys], [v[row : row + 1] for v in alone.values]
        assert torch.equal(alone.run(BatchedAttention, 21)[0][0], together[row])


@pytest.mark.parametrize("name", SHAPES)
def test_bfloat16_stays_near_the_reference(name: str) -> None:
    rig = Rig(*SHAPES[name], dtype=torch.bfloat16)
    for fast, slow in zip(rig.run(BatchedAttention), rig.run(ReferenceAttention), strict=True):
        torch.testing.assert_close(fast.float(), slow.float(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_does_not_change_a_row(dtype: torch.dtype) -> None:
    """The row of context 40 alone is padded to 64; beside longer ones it is padded further."""
    rig = Rig([40, 60, 65, 90], [1, 1, 1, 1], dtype)
    together = rig.run(BatchedAttention)[0][0]
    alone = Rig([40, 60, 65, 90], [1, 1, 1, 1], dtype)
    alone.contexts, alone.counts, alone.table = [40], [1], alone.table[:1]
    alone.queries = [q[:1] for q in alone.queries]
    alone.keys, alone.values = [k[:1] for k in alone.keys], [v[:1] for v in alone.values]
    assert torch.equal(alone.run(BatchedAttention)[0][0], together)


def test_the_pool_in_another_dtype_than_the_model() -> None:
    rig = Rig([20, 9, 30], [1, 9, 4])
    exact = rig.run(ReferenceAttention)
    rig.shape = PoolShape(LAYERS, rig.shape.num_blocks, BLOCK, KV_HEADS, HEAD, HEAD, torch.bfloat16)
    for output, expected in zip(rig.run(BatchedAttention), exact, strict=True):
        assert output.dtype == torch.float32
        torch.testing.assert_close(output, expected, atol=4e-2, rtol=4e-2)


def test_levels_and_buckets_cover_every_row_without_waste() -> None:
    levels = padded_levels(5000, 16)
    assert (levels % 32 == 0).all() and (np.diff(levels) <= np.maximum(32, levels[:-1] / 3)).all()
    contexts = np.sort(np.random.default_rng(0).integers(1, 5000, 64))
    buckets = decode_buckets(contexts, levels)
    assert [row for first, end, _ in buckets for row in range(first, end)] == list(range(64))
    for first, end, padded in buckets:
        assert contexts[first:end].max() <= padded and (end - first) * padded <= 16384 + padded
    spent = sum((end - first) * padded for first, end, padded in buckets)
    assert spent < 1.5 * contexts.sum() + 512 * len(buckets)
    assert decode_buckets(contexts[:0], levels) == []


def test_the_pool_copies_and_clears_in_every_layer() -> None:
    pool = KVPool(PoolShape(LAYERS, 6, BLOCK, KV_HEADS, HEAD, HEAD, torch.bfloat16), torch.device("cpu"))
    for layer in range(LAYERS):
        for block in range(6):
            pool.keys[layer][block] = block + 1
            pool.values[layer][block] = -block - 1
    pool.copy_blocks(torch.tensor([0, 1]), torch.tensor([1, 5]))
    pool.clear_blocks(torch.tensor([2]))
    for layer in range(LAYERS):
        assert pool.keys[layer][:6, 0, 0, 0].tolist() == [1, 1, 0, 4, 5, 2]
        assert pool.values[layer][:6, 0, 0, 0].tolist() == [-1, -1, 0, -4, -5, -2]
    assert pool.shape.block_bytes == 2 * LAYERS * BLOCK * KV_HEADS * HEAD * 2


def test_blocks_with_values_of_another_size_are_read_and_written_as_bytes() -> None:
    shape = PoolShape(LAYERS, 6, BLOCK, KV_HEADS, HEAD, 3 * HEAD, torch.bfloat16)
    pool = KVPool(shape, torch.device("cpu"))
    for plane in (*pool.keys, *pool.values):
        plane.normal_()
    content = pool.read_blocks(torch.tensor([4, 2]))
    assert content.shape == (2, shape.block_bytes) and shape.block_bytes == LAYERS * BLOCK * KV_HEADS * 4 * HEAD * 2
    pool.write_blocks(torch.tensor([0, 5]), content)
    for plane in (*pool.keys, *pool.values):
        assert torch.equal(plane[[0, 5]], plane[[4, 2]]) and not torch.equal(plane[0], plane[2])
    empty = KVPool(replace(shape, num_layers=0), torch.device("cpu"))  # a rank may have no layer of a group
    empty.write_blocks(torch.tensor([0]), empty.read_blocks(torch.tensor([1])))
