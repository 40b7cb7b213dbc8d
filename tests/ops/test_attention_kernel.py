"""The C++ attention kernel: against the reference, and against itself on every instruction set and in any company."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.ops import cpu
from octavo.ops.attention import AttentionBatch
from octavo.ops.attention_kernel import HEAD_DIMS, MAX_HEADS, PART, KernelAttention, has_kernel
from octavo.ops.attention_pool import KVPool, PoolShape
from octavo.ops.attention_reference import ReferenceAttention

pytestmark = pytest.mark.skipif(not cpu.status().is_loaded, reason=f"no C++ kernels: {cpu.status().reason}")

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
# context and count of each row: decodes first
ROWS = [(1, 1), (2, 1), (15, 1), (16, 1), (17, 1), (100, 1), (255, 1), (256, 1), (257, 1), (700, 1)]
ROWS += [(9, 9), (30, 7), (260, 8), (300, 40)]
Row = tuple[int, int, int]  # index in ROWS, and its positions [start, end)
WHOLE: list[Row] = [(index, context - count, context) for index, (context, count) in enumerate(ROWS)]


class Rig:
    """Rows over a pool whose keys and values are random everywhere; the step writes what is there already."""

    def __init__(self, dtype: torch.dtype, heads: int = 6, kv_heads: int = 2, head_dim: int = 64, block: int = 16):
        generator = torch.Generator().manual_seed(head_dim)
        widths = [-(-context // block) for context, _ in ROWS]
        self.pool = KVPool(PoolShape(1, sum(widths), block, kv_heads, head_dim, dtype), torch.device("cpu"))
        for tensor in (self.pool.keys[0], self.pool.values[0]):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        numbers = np.random.default_rng(0).permutation(sum(widths)).tolist()
        self.table = np.full((len(ROWS), max(widths)), self.pool.null_block)
        for row, width in enumerate(widths):
            self.table[row, :width] = [numbers.pop() for _ in range(width)]
        # as in a model: queries are a slice of a wider tensor
        self.query = [
            torch.randn(context, heads + 3, head_dim, generator=generator).to(dtype)[:, :heads] for context, _ in ROWS
        ]
        self.heads = heads

    def batch(self, rows: list[Row]) -> AttentionBatch:
        index = np.array([row for row, _, _ in rows])
        contexts = np.array([end for _, _, end in rows])
        counts = contexts - np.array([start for _, start, _ in rows])
        positions = np.concatenate([np.arange(start, end) for _, start, end in rows])
        of, size = np.repeat(index, counts), self.pool.shape.block_size
        slots = self.table[of, positions // size] * size + positions % size
        return AttentionBatch(
            num_tokens=len(positions),
            num_rows=len(rows),
            num_decodes=int((counts == 1).sum()),
            positions_T=torch.from_numpy(positions),
            slot_mapping_T=torch.from_numpy(slots),
            row_start_N1=torch.from_numpy(np.concatenate(([0], np.cumsum(counts)))),
            context_len_N=torch.from_numpy(contexts),
            block_table_NM=torch.from_numpy(self.table[index]),
            counts=counts,
            contexts=contexts,
        )

    def run(self, rows: list[Row], window: int | None = None, backend_class: type = KernelAttention) -> torch.Tensor:
        backend, batch = backend_class(self.pool, self.heads, window), self.batch(rows)
        backend.begin(batch)
        queries = torch.cat([self.query[row][start:end] for row, start, end in rows])
        keys, values = (pool[0].flatten(0, 1)[batch.slot_mapping_T] for pool in (self.pool.keys, self.pool.values))
        return backend.attend(0, queries, keys, values)

    def reference(self, window: int | None = None) -> torch.Tensor:
        return self.run(WHOLE, window, ReferenceAttention)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (9, 3), (8, 1), (14, 2)])
def test_equals_the_reference(dtype: torch.dtype, head_dim: int, heads: int, kv_heads: int) -> None:
    rig = Rig(dtype, heads, kv_heads, head_dim)
    torch.testing.assert_close(rig.run(WHOLE), rig.reference(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("window", [1, 7, 256, 300, 5000])
@pytest.mark.parametrize("block", [3, 16, 64])
def test_windows_and_block_sizes(window: int, block: int) -> None:
    rig = Rig(torch.float32, block=block)
    torch.testing.assert_close(rig.run(WHOLE, window), rig.reference(window), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("window", [1, 17, 255, 256, 257, 600])
def test_K07_windowed_tokens_have_the_same_bits_in_any_chunk_and_whatever_lies_before(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(torch.bfloat16)
    together = rig.run(WHOLE, window).split([count for _, count in ROWS])
    for row, (context, count) in enumerate(ROWS):
        for chunk in {7, count}:
            starts = range(context - count, context, chunk)
            parts = [rig.run([(row, start, min(start + chunk, context))], window) for start in starts]
            assert torch.equal(torch.cat(parts), together[row])
    monkeypatch.setattr("octavo.ops.attention_kernel.MAX_PARTS", 3)
    size, null = rig.pool.shape.block_size, rig.pool.null_block
    for row, (context, count) in enumerate(ROWS):  # the blocks before the window are gone, and the null block is poison
        rig.table[row, : max(0, context - count - window + 1) // size] = null
    rig.pool.keys[0][null] = rig.pool.values[0][null] = float("nan")
    assert torch.equal(rig.run(WHOLE, window), torch.cat(together))


def test_K07_parts_before_the_window_are_no_work() -> None:
    rig = Rig(torch.float32)
    for window, parts in ((None, 3), (1, 1), (188, 1), (189, 2), (444, 2), (445, 3), (700, 3), (999, 3)):
        backend = KernelAttention(rig.pool, rig.heads, window)
        backend.begin(rig.batch([(9, 699, 700)]))
        assert sum(call.num_parts for call in backend._calls) == parts, window


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_instruction_set_gives_the_same_bits(dtype: torch.dtype) -> None:
    rig = Rig(dtype)
    try:
        results = [rig.run(WHOLE) for name in cpu.ISA_NAMES if cpu.use_isa(name) == name]
        assert all(torch.equal(result, results[0]) for result in results)
    finally:
        cpu.use_isa(cpu.ISA_NAMES[-1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bits_alone_in_any_chunk_and_in_any_call(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(dtype)
    together = rig.run(WHOLE).split([count for _, count in ROWS])
    for row, (context, count) in enumerate(ROWS):
        for chunk in {1, 7, count}:
            if count // chunk < 20:
                starts = range(context - count, context, chunk)
                parts = [rig.run([(row, start, min(start + chunk, context))]) for start in starts]
                assert torch.equal(torch.cat(parts), together[row])
    monkeypatch.setattr("octavo.ops.attention_kernel.MAX_PARTS", 3)
    assert torch.equal(rig.run(WHOLE), torch.cat(together))


@pytest.mark.skipif(not cpu.status().is_parallel, reason="the kernels run on one thread here")
@pytest.mark.parametrize("threads", [2, 3, 5])
def test_the_number_of_threads_changes_nothing(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(torch.bfloat16)
    alone = rig.run(WHOLE)
    monkeypatch.setattr(cpu, "num_threads", lambda elements: threads)
    assert torch.equal(rig.run(WHOLE), alone)


def test_what_is_not_finite_stays_in_its_row() -> None:
    rig = Rig(torch.float32)
    clean = rig.run(WHOLE).split([count for _, count in ROWS])
    rig.pool.keys[0][rig.table[3, 0], 0] = float("nan")
    rig.pool.values[0][rig.table[5, 2], 1] = float("inf")
    for row, broken in enumerate(rig.run(WHOLE).split([count for _, count in ROWS])):
        assert broken.isfinite().all() == (row not in (3, 5))
        assert row in (3, 5) or torch.equal(broken, clean[row])


def test_scores_of_any_size_keep_the_weights_a_distribution() -> None:
    rig = Rig(torch.float32)
    rig.query = [query * 1e4 for query in rig.query]
    torch.testing.assert_close(rig.run(WHOLE), rig.reference(), atol=1e-4, rtol=1e-4)
    rig.pool.values[0].fill_(1.0)
    output = rig.run(WHOLE)
    torch.testing.assert_close(output, torch.ones_like(output))


def test_pools_that_the_kernel_cannot_read() -> None:
    for head_dim, dtype in ((16, torch.float32), (64, torch.float16), (80, torch.bfloat16)):
        assert not has_kernel(KVPool(PoolShape(1, 1, 4, 1, head_dim, dtype), torch.device("cpu")), 4)
    assert not has_kernel(Rig(torch.float32).pool, MAX_HEADS + 1)


def test_the_parts_are_those_of_the_library() -> None:
    assert cpu._load()[0].octavo_paged_attention_part() == PART
