"""The C++ attention kernel: against the reference, and against itself by bits in any company, chunk and block size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.ops.attention_rig import ROWS, WHOLE, Rig, check_close, has_pairs
from tests.ops.instruction_sets import isa

from octavo.ops import cpu
from octavo.ops.attention import KVPool, LayerAttention, PoolShape
from octavo.ops.attention_kernel import _kernels, has_kernel
from octavo.ops.attention_plan import PART

__all__ = ["isa"]
pytestmark = pytest.mark.skipif(_kernels() is None, reason=f"no C++ kernels: {cpu.status().reason}")

KINDS = [torch.float32, torch.bfloat16, torch.float16]


def shapes() -> Iterator[Any]:
    """Yield heads and head sizes: all pairs. Quick tests have each of both, and three sizes with most heads."""
    for heads in ((2, 2), (9, 3), (4, 1), (7, 1), (8, 1), (128, 1)):
        for head_dim in (8, 16, 24, 64, 80, 96, 128, 256):
            is_quick = heads == (9, 3) or head_dim in (24, 64) or (head_dim == 128 and heads != (128, 1))
            yield pytest.param(heads, head_dim, marks=() if is_quick else pytest.mark.slow)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch):
    """Pretend that so many threads are there, and worth it for any size."""

    def pretend(count: int) -> None:
        monkeypatch.setattr(torch, "get_num_threads", lambda: count)
        monkeypatch.setattr(cpu, "num_threads", lambda elements: count if cpu.status().is_parallel else 1)

    return pretend


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "head_dim"), list(shapes()))
def test_equals_the_reference(kind: torch.dtype, head_dim: int, heads: tuple[int, int]) -> None:
    rig = Rig(kind, heads, head_dim)
    check_close(rig.run(WHOLE), rig.reference(), has_pairs(kind))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("window", [1, 7, 128, 300, 5000])
@pytest.mark.parametrize("block", [3, 16, 64, 200])
def test_windows_and_block_sizes(window: int, block: int) -> None:
    rig = Rig(torch.float32, block=block)
    torch.testing.assert_close(rig.run(WHOLE, window), rig.reference(window), atol=4e-6, rtol=4e-6)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("soft_cap", [0.3, 5.0, 50.0])
def test_a_soft_cap_bends_the_scores(soft_cap: float) -> None:
    rig = Rig(torch.float32, (4, 2), rows=((300, 300),))
    at = torch.from_numpy(rig.table[0])[torch.arange(300) // 16] * 16 + torch.arange(300) % 16
    keys, values = (
        pool[0].flatten(0, 1)[at].repeat_interleave(2, 1).double() for pool in (rig.pool.keys, rig.pool.values)
    )
    scores = torch.einsum("thd,shd->hts", rig.query[0].double(), keys) * 64**-0.5
    scores = (soft_cap * torch.tanh(scores / soft_cap)).masked_fill(torch.ones(300, 300).triu(1).bool(), -torch.inf)
    expected = torch.einsum("hts,shd->thd", scores.softmax(-1), values).float()
    torch.testing.assert_close(rig.run([(0, 0, 300)], soft_cap=soft_cap), expected, atol=4e-6, rtol=4e-6)


SINKS = torch.tensor([-30.0, -1.0, 0.0, 2.0, 7.0, 90.0])  # some below and some above the greatest score
SLOPES = 2.0 ** -torch.arange(1.0, 7.0)
WAYS = {"sinks": {"sinks_H": SINKS}, "slopes": {"slopes_H": SLOPES}}
WAYS["all"] = {**WAYS["sinks"], **WAYS["slopes"], "scale": 0.4, "soft_cap": 9.0}


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 0), (24, 16)])
@pytest.mark.parametrize("window", [None, 60])
def test_sinks_and_slopes_have_the_same_bits_in_any_chunk_and_thread(
    way: str, head_dim: int, value_dim: int, window: int | None, threads
) -> None:
    rig = Rig(torch.bfloat16, (6, 2), head_dim, value_dim=value_dim)
    together = rig.run(WHOLE, window, **WAYS[way])
    check_close(together, rig.reference(window, **WAYS[way]), has_pairs(torch.bfloat16))
    for row, output in enumerate(rig.split(together)):
        context, count = ROWS[row]
        chunks = [(start, min(start + 33, context)) for start in range(context - count, context, 33)]
        assert torch.equal(torch.cat([rig.run([(row, *chunk)], window, **WAYS[way]) for chunk in chunks]), output)
    threads(3)
    assert torch.equal(rig.run(WHOLE, window, **WAYS[way]), together)
    few = [(6, 126, 127), (9, 699, 700)]  # parts of these are joined
    assert torch.equal(rig.run(few, window, **WAYS[way]), torch.cat([rig.split(together)[row] for row in (6, 9)]))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (64, 128), (24, 80), (96, 8), (256, 64)])
@pytest.mark.parametrize("heads", [(9, 3), (8, 1)])
def test_values_have_a_size_of_their_own(
    kind: torch.dtype, head_dim: int, value_dim: int, heads: tuple[int, int], threads
) -> None:
    rig = Rig(kind, heads, head_dim, value_dim=value_dim)
    together = rig.run(WHOLE)
    assert together.shape[1:] == (heads[0], value_dim)
    check_close(together, rig.reference(), has_pairs(kind))
    threads(3)
    assert torch.equal(rig.run(WHOLE), together)
    assert torch.equal(rig.run([WHOLE[3]]), rig.split(together)[3])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "head_dim"), [((6, 2), 64), ((3, 3), 24), ((8, 1), 128)])
@pytest.mark.parametrize("window", [None, 17, 129, 250])
def test_a_token_has_the_same_bits_alone_and_in_any_chunk(
    kind: torch.dtype, heads: tuple[int, int], head_dim: int, window: int | None
) -> None:
    rig = Rig(kind, heads, head_dim)
    together = rig.split(rig.run(WHOLE, window))
    for row, (context, count) in enumerate(ROWS):
        for chunk in {1, 7, 33, count}:
            starts = range(context - count, context, chunk)
            parts = [rig.run([(row, start, min(start + chunk, context))], window) for start in starts]
            assert torch.equal(torch.cat(parts), together[row]), (row, chunk)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("block", [1, 5, 16, 128, 333])
def test_the_block_size_changes_no_bit(block: int) -> None:
    whole = Rig(torch.bfloat16, block=32)
    other = Rig(torch.bfloat16, block=block)
    assert torch.equal(other.run(WHOLE), whole.run(WHOLE))
    assert torch.equal(other.run(WHOLE, 140), whole.run(WHOLE, 140))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("count", [2, 3, 5, 64])
@pytest.mark.parametrize("window", [None, 200])
def test_the_number_of_threads_changes_no_bit(count: int, window: int | None, threads) -> None:
    rig = Rig(torch.bfloat16, (8, 4))
    threads(1)
    alone = rig.run(WHOLE, window)
    threads(count)
    assert torch.equal(rig.run(WHOLE, window), alone)
    for row, start, end in WHOLE:
        at = sum(other for _, other in ROWS[:row])
        assert torch.equal(rig.run([(row, start, end)], window), alone[at : at + end - start])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (8, 1)])
@pytest.mark.parametrize("contexts", [(1,), (100,), (200,), (129, 640), (5, 128, 130), (300, 301, 302, 900)])
@pytest.mark.parametrize("window", [None, 150])
def test_a_few_decodes_are_dealt_out_by_positions_with_the_same_bits(
    heads: tuple[int, int], contexts: tuple[int, ...], window: int | None, threads
) -> None:
    rig = Rig(torch.bfloat16, heads, rows=tuple((context, 1) for context in contexts))
    rows = [(row, context - 1, context) for row, context in enumerate(contexts)]
    threads(1)
    alone = rig.run(rows, window)
    for count in (2, 3, 7):
        threads(count)
        assert torch.equal(rig.run(rows, window), alone)


def test_a_few_decodes_give_each_thread_about_as_many_positions(threads) -> None:
    rig = Rig(torch.bfloat16, (9, 3), rows=((130, 1), (640, 1)))
    threads(2)
    backend = rig.kernel()
    rig.attend(backend, [(0, 129, 130), (1, 639, 640)])
    _, contexts, items, _, costs, _, _ = backend.plan._columns
    loads = [0, 0]
    for (row, _, first, end, low, high), cost in zip(items.tolist(), costs.tolist(), strict=False):
        positions = min(end * PART, int(contexts[row])) - first * PART
        loads[int(cost >= costs[-1] // 2)] += positions * (high - low)
    assert sum(loads) == 3 * 770
    assert abs(loads[0] - loads[1]) <= PART


SHARED = ((100, 1), (200, 1), (400, 1), (401, 1), (500, 1), (520, 1), (520, 9), (600, 80))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [(6, 2), (30, 1), pytest.param((100, 1), marks=pytest.mark.slow)])
@pytest.mark.parametrize(("shared", "parts"), [(384, 3), (127, 0), (10**6, 3)])
def test_rows_that_share_blocks_attend_them_once_with_the_same_bits(
    kind: torch.dtype, heads: tuple[int, int], shared: int, parts: int, threads
) -> None:
    rig = Rig(kind, heads, rows=SHARED, shared=shared)
    rows = [(row, context - count, context) for row, (context, count) in enumerate(SHARED)]
    for count in (1, 2):
        threads(count)
        backend = rig.kernel()
        together = rig.split(rig.attend(backend, rows))
        assert (backend.plan.shared_parts > 0) == (parts > 0)
        for row, output in zip(rows, together, strict=True):
            assert torch.equal(rig.run([row]), output)
    check_close(torch.cat(together), rig.reference(), has_pairs(kind))


def test_what_is_shared_by_some_rows_only_is_planned_in_levels() -> None:
    rig = Rig(torch.float32, rows=((500, 1),) * 6)
    rig.table[:4, :8] = rig.table[0, :8]  # a part by four rows, two more by two of them, one more by the others
    rig.table[1, :24] = rig.table[0, :24]
    rig.table[3, :17] = rig.table[2, :17]
    backend = rig.kernel()
    rows = [(row, 499, 500) for row in range(6)]
    together = rig.attend(backend, rows)
    assert backend.plan.shared_parts == 1 + 2 + 1
    for row in range(6):
        assert torch.equal(rig.run([rows[row]])[0], together[row])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("window", [1, 17, 127, 128, 129, 600])
def test_K07_what_lies_before_the_window_is_not_read(window: int) -> None:
    rig = Rig(torch.bfloat16)
    clean = rig.run(WHOLE, window)
    size, null = rig.pool.shape.block_size, rig.pool.null_block
    for row, (context, count) in enumerate(ROWS):  # the blocks before the window are gone; these numbers are nobody's
        rig.table[row, : max(0, context - count - window + 1) // size] = 2**40
    rig.pool.keys[0][null] = rig.pool.values[0][null] = float("nan")
    assert torch.equal(rig.run(WHOLE, window), clean)


def test_K07_parts_before_the_window_are_no_work() -> None:
    rig = Rig(torch.float32)
    for window, parts in ((None, 6), (1, 1), (60, 1), (61, 2), (188, 2), (189, 3), (700, 6), (999, 6)):
        backend = rig.kernel(window)
        backend.begin(rig.batch([(9, 699, 700)]))
        assert backend.plan.num_parts == parts, window


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_stays_in_its_row(kind: torch.dtype) -> None:
    rig = Rig(kind)
    clean = rig.split(rig.run(WHOLE))
    rig.pool.keys[0][rig.table[3, 0], 0] = float("nan")
    rig.pool.values[0][rig.table[5, 2], 1] = float("inf")
    for row, broken in enumerate(rig.split(rig.run(WHOLE))):
        assert broken.isfinite().all() == (row not in (3, 5))
        assert row in (3, 5) or torch.equal(broken, clean[row])


@pytest.mark.usefixtures("isa")
def test_what_lies_behind_a_context_is_not_read() -> None:
    rig = Rig(torch.float32)
    clean = rig.run(WHOLE)
    size = rig.pool.shape.block_size
    for row, (context, _) in enumerate(ROWS):
        if context % size:
            for pool in (rig.pool.keys[0], rig.pool.values[0]):
                pool[rig.table[row, context // size], context % size :] = float("nan")
    assert torch.equal(rig.run(WHOLE), clean)


@pytest.mark.usefixtures("isa")
def test_scores_of_any_size_keep_the_weights_a_distribution() -> None:
    rig = Rig(torch.float32)
    rig.query = [query * 1e4 for query in rig.query]
    # floats are 4e-3 apart where these scores are
    torch.testing.assert_close(rig.run(WHOLE), rig.reference(), atol=2e-2, rtol=2e-2)
    rig.pool.values[0].fill_(1.0)
    output = rig.run(WHOLE)
    torch.testing.assert_close(output, torch.ones_like(output))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kind", KINDS)
def test_keys_and_values_are_rounded_as_torch_rounds(kind: torch.dtype) -> None:
    bits = torch.from_numpy(np.random.default_rng(0).integers(0, 2**32, 64 * 16, dtype=np.uint32).view(np.float32))
    small = torch.randn(64 * 16) * 10.0 ** torch.randint(-9, 6, (64 * 16,))
    edges = torch.tensor([0.0, -0.0, 65504.0, 65519.9, 65520.0, 2.0**-25, 2.0**-24 * 1.5, 2.0**-14, 1 / 3, 3e38] * 103)
    k_TKD, v_TKD = torch.cat((bits, small)).view(64, 2, 16), torch.cat((edges[:1024], -small)).view(64, 2, 16)
    pool = KVPool(PoolShape(1, 8, 8, 2, 16, 16, kind), torch.device("cpu"))
    rig = Rig(torch.float32, (2, 2), rows=((64, 64),), block=8, head_dim=16)
    rig.pool = pool
    backend, batch = rig.kernel(), rig.batch([(0, 0, 64)])
    backend.begin(batch)
    backend.attend(0, torch.zeros(64, 2, 16), k_TKD, v_TKD)
    for written, given in ((pool.keys[0], k_TKD), (pool.values[0], v_TKD)):
        expected = given.to(kind)
        found = written.flatten(0, 1)[batch.slot_mapping_T]
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_models_in_bfloat16_get_their_dtype_back() -> None:
    rig = Rig(torch.bfloat16)
    exact = rig.run(WHOLE)
    rig.query = [query.bfloat16() for query in rig.query]
    output = rig.run(WHOLE)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), exact, atol=4e-2, rtol=4e-2)


def test_pools_that_the_kernel_cannot_read() -> None:
    for size, kind in ((20, torch.float32), (264, torch.float32), (64, torch.float64)):
        pool = KVPool(PoolShape(1, 1, 4, 1, size, size, kind), torch.device("cpu"))
        assert not has_kernel(pool, [LayerAttention(4, 1, size, size, 1.0)])
    pool = KVPool(PoolShape(1, 1, 4, 3, 64, 64, torch.float32), torch.device("cpu"))
    assert not has_kernel(pool, [LayerAttention(4, 3, 64, 64, 1.0)])


def test_the_plan_is_that_of_the_library() -> None:
    from octavo.ops import attention_plan

    library = cpu._load()[0]
    assert library.octavo_attention_part() == PART and library.octavo_attention_max_rows() == attention_plan.MAX_ROWS
