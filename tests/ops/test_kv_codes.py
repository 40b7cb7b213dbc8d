"""Keys and values of 8 bits: rounding, the kernels against the torch twin by bits, and attention over such pools."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.ops.attention_rig import ROWS, WHOLE, Rig
from tests.ops.instruction_sets import isa

from octavo.ops import cpu, kv_codes
from octavo.ops.attention import KVPool, LayerAttention, PoolShape, ReferenceAttention
from octavo.ops.attention_batched import BatchedAttention
from octavo.ops.attention_kernel import _kernels

__all__ = ["isa"]
KINDS = [torch.int8, torch.float8_e4m3fn]
needs_kernels = pytest.mark.skipif(_kernels() is None, reason="needs the kernels")


def numbers(seed: int, *shape: int) -> torch.Tensor:
    """Heads of every magnitude; the last ones are all bits, zeros, ties and what is not finite."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= 10.0 ** torch.randint(-41, 38, (*shape[:-1], 1), generator=generator)
    x[1] = torch.randint(-(2**31), 2**31, shape[1:], generator=generator, dtype=torch.int64).int().view(torch.float32)
    x[2], x[3], x[4] = 0.0, torch.arange(x[3].numel()).view(shape[1:]) / 2, -x[3]
    x[5] = torch.randn(shape[1:], generator=generator) * 2.0 ** torch.randint(-12, 10, shape[1:], generator=generator)
    x[6, 0, 0], x[7, 0, 1], x[8, 1, 2] = float("nan"), float("inf"), -float("inf")
    return x


@pytest.mark.parametrize("dtype", KINDS)
def test_numbers_are_rounded_to_the_nearest_code(dtype: torch.dtype) -> None:
    x = numbers(0, 40, 3, 16)[9:].flatten(0, 1)[:, None]
    x = x[x.abs().amax((1, 2)) > 1e-30]
    read = kv_codes.decode(kv_codes.encode(x, dtype), dtype, 1, 16)
    if dtype == torch.int8:
        largest = x.abs().amax(-1, keepdim=True)
        assert ((read - x).abs() <= largest / 127 * 1.009 / 2).all()  # a scale is up to 1/128 larger than it could be
    else:
        expected = x.clamp(-448, 448).to(dtype).float()
        assert torch.equal(read, expected)


@pytest.mark.parametrize("dtype", KINDS)
def test_what_is_not_finite_is_read_so(dtype: torch.dtype) -> None:
    x = numbers(0, 10, 3, 16)
    read = kv_codes.decode(kv_codes.encode(x, dtype), dtype, 3, 16)
    assert torch.equal(read.isfinite().all(-1), x.isfinite().all(-1))
    assert read[2].eq(0).all()


@needs_kernels
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(("size", "value_size"), [(16, 16), (24, 64)])
def test_the_kernels_write_the_same_bytes(dtype: torch.dtype, size: int, value_size: int) -> None:
    rig = Rig(torch.float32, (3, 3), size, block=8, rows=((64, 64),), value_dim=value_size)
    k, v = numbers(1, 64, 3, size), numbers(2, 64, 3, value_size)
    batch = rig.batch([(0, 0, 64)])
    twin, rig.pool = (KVPool(PoolShape(1, 8, 8, 3, size, value_size, dtype), torch.device("cpu")) for _ in range(2))
    twin.write(0, batch.slot_mapping_T, k, v)
    backend = rig.kernel()
    backend.begin(batch)
    backend.attend(0, torch.zeros(64, 3, size), k, v)
    written, expected = (pool.read(pool.keys[0], pool.values[0]) for pool in (rig.pool, twin))
    for a, b in zip(written, expected, strict=True):
        assert torch.equal(a.isnan(), b.isnan())
        finite = ~a.isnan()
        assert torch.equal(a[finite], b[finite]) and torch.equal(a[finite].signbit(), b[finite].signbit())


@needs_kernels
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(
    "heads", [(6, 2), *(pytest.param(heads, marks=pytest.mark.slow) for heads in ((4, 4), (30, 1)))]
)
@pytest.mark.parametrize(("size", "value_size"), [(64, 64), (24, 24), (128, 128), (192, 128), (8, 80), (256, 256)])
def test_attention_over_codes_equals_the_reference(
    dtype: torch.dtype, heads: tuple[int, int], size: int, value_size: int
) -> None:
    rig = Rig(dtype, heads, size, value_dim=value_size)
    torch.testing.assert_close(rig.run(WHOLE), rig.reference(), atol=6e-6, rtol=6e-6)
    torch.testing.assert_close(rig.run(WHOLE, 130), rig.reference(130), atol=6e-6, rtol=6e-6)


@needs_kernels
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(("heads", "size"), [((6, 2), 64), ((3, 3), 24), ((40, 1), 128)])
@pytest.mark.parametrize("window", [None, 17, 250])
def test_a_token_has_the_same_bits_alone_in_any_chunk_block_and_thread(
    dtype: torch.dtype, heads: tuple[int, int], size: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(dtype, heads, size)
    whole = rig.run(WHOLE, window)
    for row, (context, count) in enumerate(ROWS):
        for chunk in {7, count}:
            chunks = [(start, min(start + chunk, context)) for start in range(context - count, context, chunk)]
            parts = [rig.run([(row, *one)], window) for one in chunks]
            assert torch.equal(torch.cat(parts), rig.split(whole)[row]), (row, chunk)
    assert torch.equal(Rig(dtype, heads, size, block=5).run(WHOLE, window), whole)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(cpu, "num_threads", lambda elements: 3 if cpu.status().is_parallel else 1)
    assert torch.equal(rig.run(WHOLE, window), whole)
    assert torch.equal(rig.run([WHOLE[6], WHOLE[9]], window), torch.cat([rig.split(whole)[row] for row in (6, 9)]))


@needs_kernels
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", KINDS)
def test_rows_that_share_blocks_attend_them_once_with_the_same_bits(dtype: torch.dtype) -> None:
    rows = ((300, 1), (400, 1), (401, 1), (500, 1), (520, 9))
    rig = Rig(dtype, rows=rows, shared=384)
    backend = rig.kernel()
    each = [(row, context - count, context) for row, (context, count) in enumerate(rows)]
    together = rig.split(rig.attend(backend, each))
    assert backend.plan.shared_parts == 3
    for row, output in zip(each, together, strict=True):
        assert torch.equal(rig.run([row]), output)


@needs_kernels
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", KINDS)
def test_what_is_not_finite_stays_in_its_row_and_after_a_context_nothing_is_read(dtype: torch.dtype) -> None:
    rig = Rig(dtype)
    clean = rig.split(rig.run(WHOLE))
    size = rig.pool.shape.block_size
    for row, (context, _) in enumerate(ROWS):
        for plane in (rig.pool.keys[0], rig.pool.values[0]):
            plane[rig.table[row, (context - 1) // size], (context - 1) % size + 1 :] = 0x7F  # scales and numbers of NaN
    for plane, row, index, offset in ((rig.pool.keys[0], 3, 0, 0), (rig.pool.values[0], 5, 2, 1)):
        plane[rig.table[row, index], offset] = 0xFF
    for row, broken in enumerate(rig.split(rig.run(WHOLE))):
        assert broken.isfinite().all() == (row not in (3, 5))
        assert row in (3, 5) or torch.equal(broken, clean[row])


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("backend", [BatchedAttention, ReferenceAttention])
def test_torch_reads_what_it_wrote(backend: Callable, dtype: torch.dtype, window: int | None) -> None:
    rig = Rig(dtype)
    expected = Rig(torch.float32)
    for name in ("keys", "values"):  # the same numbers, rounded
        rows = getattr(rig.pool, name)[0]
        getattr(expected.pool, name)[0].copy_(kv_codes.decode(rows, dtype, 2, 64))
    expected.table, expected.query = rig.table, rig.query
    found = rig.attend(backend(rig.pool, rig.layers(window)), WHOLE)
    torch.testing.assert_close(found, expected.reference(window), atol=4e-6, rtol=4e-6)
    slopes = {"slopes_H": 2.0 ** -torch.arange(1.0, 7.0)}
    found = rig.attend(backend(rig.pool, rig.layers(window, **slopes)), WHOLE)
    torch.testing.assert_close(found, expected.reference(window, **slopes), atol=4e-6, rtol=4e-6)


def test_a_pool_of_8_bits_has_half_the_bytes_and_copies_whole_blocks() -> None:
    bytes_of = {}
    for dtype in (torch.bfloat16, *KINDS):
        shape = PoolShape(2, 6, 4, 3, 64, 64, dtype)
        pool = KVPool(shape, torch.device("cpu"))
        bytes_of[dtype] = shape.block_bytes
        assert sum(plane[0].nbytes for plane in (*pool.keys, *pool.values)) == shape.block_bytes
        slots = torch.arange(4 * 4)
        for layer in range(2):
            pool.write(layer, slots, torch.randn(16, 3, 64), torch.randn(16, 3, 64))
        content = pool.read_blocks(torch.tensor([2]))
        pool.write_blocks(torch.tensor([5]), content)
        pool.copy_blocks(torch.tensor([5, 1]), torch.tensor([0, 4]))
        pool.clear_blocks(torch.tensor([3]))
        for plane in (*pool.keys, *pool.values):
            assert torch.equal(plane[0], plane[2]) and torch.equal(plane[4], plane[1]) and not plane[3].any()
        empty_k, _ = pool.read(pool.keys[0][3], pool.values[0][3])
        assert empty_k.eq(0).all()
    assert bytes_of[torch.float8_e4m3fn] * 2 == bytes_of[torch.bfloat16]
    assert bytes_of[torch.int8] / bytes_of[torch.bfloat16] == (64 + 2) / 128
    layer = LayerAttention(3, 3, 64, 64, 0.125)
    assert BatchedAttention(pool, [layer, layer]).reads_unwritten
