"""The C++ decode kernel: against the reference, and against itself on every instruction set and in any company."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.ops import cpu
from octavo.ops.attention import AttentionBatch
from octavo.ops.attention_decode import HEAD_DIMS, PART, PagedDecode, has_kernel
from octavo.ops.attention_pool import KVPool, PoolShape
from octavo.ops.attention_reference import ReferenceAttention

pytestmark = pytest.mark.skipif(not cpu.status().is_loaded, reason=f"no C++ kernels: {cpu.status().reason}")

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
CONTEXTS = [1, 2, 15, 16, 17, 100, 255, 256, 257, 511, 700]


class Rig:
    """Decode rows over a pool whose keys and values are random everywhere."""

    def __init__(self, dtype: torch.dtype, heads: int = 6, kv_heads: int = 2, head_dim: int = 64, block: int = 16):
        generator = torch.Generator().manual_seed(head_dim)
        widths = [-(-context // block) for context in CONTEXTS]
        self.pool = KVPool(PoolShape(1, sum(widths), block, kv_heads, head_dim, dtype), torch.device("cpu"))
        for tensor in (self.pool.keys[0], self.pool.values[0]):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        numbers = np.random.default_rng(0).permutation(sum(widths)).tolist()
        self.table = np.full((len(CONTEXTS), max(widths)), self.pool.null_block)
        for row, width in enumerate(widths):
            self.table[row, :width] = [numbers.pop() for _ in range(width)]
        # as in a model: queries are a slice of a wider tensor
        self.query = torch.randn(len(CONTEXTS), heads + 3, head_dim, generator=generator).to(dtype)[:, :heads]
        self.heads = heads

    def batch(self, rows: list[int]) -> AttentionBatch:
        contexts, count = np.array(CONTEXTS)[rows], len(rows)
        positions = torch.from_numpy(contexts - 1)
        block = self.pool.shape.block_size
        slots = self.table[rows, (contexts - 1) // block] * block + (contexts - 1) % block
        return AttentionBatch(
            count, count, count, positions, torch.from_numpy(slots), torch.arange(count + 1),
            torch.from_numpy(contexts), torch.from_numpy(self.table[rows]), np.ones(count, dtype=np.int64), contexts,
        )  # fmt: skip

    def kernel(self, rows: list[int], window: int | None = None) -> torch.Tensor:
        decode = PagedDecode(self.pool, self.heads, window)
        decode.begin(self.batch(rows))
        return decode.attend(0, self.query[rows] if rows != list(range(len(CONTEXTS))) else self.query)

    def reference(self, window: int | None = None) -> torch.Tensor:
        twin = ReferenceAttention(self.pool, self.heads, window)
        batch = self.batch(list(range(len(CONTEXTS))))
        twin.begin(batch)
        keys, values = (pool[0].flatten(0, 1)[batch.slot_mapping_T] for pool in (self.pool.keys, self.pool.values))
        return twin.attend(0, self.query, keys, values)


ALL = list(range(len(CONTEXTS)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (9, 3), (8, 1), (14, 2)])
def test_equals_the_reference(dtype: torch.dtype, head_dim: int, heads: int, kv_heads: int) -> None:
    rig = Rig(dtype, heads, kv_heads, head_dim)
    torch.testing.assert_close(rig.kernel(ALL), rig.reference(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("window", [1, 7, 256, 300, 5000])
@pytest.mark.parametrize("block", [3, 16, 64])
def test_windows_and_block_sizes(window: int, block: int) -> None:
    rig = Rig(torch.float32, block=block)
    torch.testing.assert_close(rig.kernel(ALL, window), rig.reference(window), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_instruction_set_gives_the_same_bits(dtype: torch.dtype) -> None:
    rig = Rig(dtype)
    try:
        results = []
        for name in cpu.ISA_NAMES:
            if cpu.use_isa(name) == name:
                results.append(rig.kernel(ALL))
        assert all(torch.equal(result, results[0]) for result in results)
    finally:
        cpu.use_isa(cpu.ISA_NAMES[-1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_and_on_any_number_of_threads(dtype: torch.dtype) -> None:
    rig = Rig(dtype)
    together = rig.kernel(ALL)
    for row in ALL:
        assert torch.equal(rig.kernel([row])[0], together[row])
    decode = PagedDecode(rig.pool, rig.heads, None)
    decode.begin(rig.batch(ALL))
    if cpu.status().is_parallel:
        decode._num_threads = 3
        assert torch.equal(decode.attend(0, rig.query), together)


def test_what_is_not_finite_stays_in_its_row() -> None:
    rig = Rig(torch.float32)
    clean = rig.kernel(ALL)
    rig.pool.keys[0][rig.table[3, 0], 0] = float("nan")
    rig.pool.values[0][rig.table[5, 2], 1] = float("inf")
    broken = rig.kernel(ALL)
    for row in ALL:
        assert broken[row].isfinite().all() == (row not in (3, 5))
        assert row in (3, 5) or torch.equal(broken[row], clean[row])


def test_scores_of_any_size_keep_the_weights_a_distribution() -> None:
    rig = Rig(torch.float32)
    rig.query *= 1e4
    output = rig.kernel(ALL)
    torch.testing.assert_close(output, rig.reference(), atol=1e-4, rtol=1e-4)
    rig.pool.values[0].fill_(1.0)
    torch.testing.assert_close(rig.kernel(ALL), torch.ones_like(output))


def test_pools_that_the_kernel_cannot_read() -> None:
    for head_dim, dtype in ((16, torch.float32), (64, torch.float16), (80, torch.bfloat16)):
        assert not has_kernel(KVPool(PoolShape(1, 1, 4, 1, head_dim, dtype), torch.device("cpu")), 4)
    assert not has_kernel(Rig(torch.float32).pool, 129)
    assert cpu._load()[0].octavo_paged_decode_part() == PART
