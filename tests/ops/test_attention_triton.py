"""Triton's attention, interpreted on CPU tensors, against the reference and against itself, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.ops.attention_rig import Rig, Row, whole
from tests.ops.test_attention import Rig as DenseRig
from tests.quick import one_in

from octavo.ops.attention import AttentionBatch, DeviceRows, HostTables, KVPool, PoolShape
from octavo.ops.attention_triton import AttentionWork, Tiles, TritonAttention, WorkPlanner, WorkRoom, fits_kernels
from octavo.ops.triton import available

if not available.is_available():
    pytest.skip("triton is not installed", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("patched_once")
INT8, E4M3 = torch.int8, torch.float8_e4m3fn
NEAR = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2, torch.float16: 2e-3, INT8: 4e-6, E4M3: 4e-6}
# a context over several splits, at the ends of tiles and splits; rows of drafts, a chunk and a prompt
ROWS = ((1, 1), (31, 1), (64, 1), (65, 1), (150, 1), (140, 3), (90, 40), (30, 30))
CUT = Tiles(split=64, tile=32, short=16, tall=32)  # small, so that short rows have many splits


def interpreted(rig: Rig, tiles: Tiles = CUT, window: int | None = None, **how: Any) -> TritonAttention:
    return TritonAttention(rig.pool, rig.layers(window, **how), tiles)


HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.2},
    "soft cap": {"soft_cap": 0.8},
    "window": {"window": 70},
    "all": {"window": 33, "soft_cap": 2.0, "sinks_H": torch.linspace(-2, 6, 6), "slopes_H": 2.0 ** -torch.arange(1, 7)},
}


@pytest.mark.parametrize(("how", "dtype"), [*((how, torch.float32) for how in HOW), ("all", torch.bfloat16),
                                            ("plain", torch.float16), ("all", INT8), ("all", E4M3)])  # fmt: skip
def test_equals_the_reference(how: str, dtype: torch.dtype) -> None:
    rig = Rig(dtype, rows=ROWS)
    got = rig.attend(interpreted(rig, **HOW[how]), whole(rig.rows))
    torch.testing.assert_close(got, rig.reference(**HOW[how]), atol=NEAR[dtype], rtol=0)


@pytest.mark.parametrize(("heads", "head_dim", "value_dim", "block"), [
    ((9, 3), 40, 40, 16), ((5, 1), 16, 72, 8), ((20, 1), 8, 8, 12), ((4, 4), 96, 24, 32), ((71, 1), 16, 16, 16),
])  # fmt: skip
def test_heads_of_any_number_and_size(heads: tuple[int, int], head_dim: int, value_dim: int, block: int) -> None:
    rig = Rig(torch.float32, heads, head_dim, block, ((40, 1), (50, 3), (60, 20)), value_dim=value_dim)
    got = rig.attend(interpreted(rig, Tiles(64, 32, 16, 64)), whole(rig.rows))
    torch.testing.assert_close(got, rig.reference(), atol=2e-6, rtol=0)


def test_queries_of_another_type_than_the_pool() -> None:
    rig = Rig(E4M3, rows=((40, 1), (50, 20)))
    want = rig.reference()
    rig.query = [query.bfloat16() for query in rig.query]
    got = rig.attend(interpreted(rig), whole(rig.rows))
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), want, atol=3e-2, rtol=0)


def test_spans_whose_tokens_see_each_other() -> None:
    rig = Rig(torch.float32, rows=((70, 3), (100, 40)))
    batch = rig.batch(whole(rig.rows))
    batch.seen_T = np.concatenate((np.full(3, 70), np.repeat([80, 90, 100], [20, 10, 10])))
    rig.batch = lambda rows: batch
    for window in (None, 25):
        got = rig.attend(interpreted(rig, window=window), whole(rig.rows))
        torch.testing.assert_close(got, rig.reference(window), atol=2e-6, rtol=0)


@pytest.mark.parametrize("drop", ["nan", "null", "others"])
@pytest.mark.parametrize("window", [5, 33])
def test_K07_blocks_that_left_the_window_are_not_read(drop: str, window: int) -> None:
    rig = DenseRig([41, 44, 97, 64, 140], [1, 1, 1, 9, 40])
    rig.drop = drop
    for layer, output in enumerate(rig.run(TritonAttention, window)):
        torch.testing.assert_close(output.double(), rig.dense(layer, window), atol=2e-6, rtol=1e-5)


def test_what_a_block_holds_after_a_context_is_not_read() -> None:
    rig = Rig(torch.float32, rows=((37, 1), (70, 20)))
    for planes in (rig.pool.keys, rig.pool.values):
        for row, (context, _) in enumerate(rig.rows):
            planes[0][rig.table[row, context // 16], context % 16 :] = float("nan")
    assert rig.attend(interpreted(rig), whole(rig.rows)).isfinite().all()


@pytest.fixture
def independent_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products whose rows do not depend on the matrix's height, as on a device; numpy's may."""

    def product(a: np.ndarray, b: np.ndarray, dtype: Any = None) -> np.ndarray:
        rows = [np.einsum("k,kn->n", row.astype(np.float64), b.astype(np.float64)) for row in a]
        return np.stack(rows).astype(dtype or a.dtype)

    monkeypatch.setattr("triton.runtime.interpreter.np.matmul", product)


def random_rig(rng: np.random.Generator, dtype: torch.dtype) -> tuple[Rig, dict[str, Any]]:
    heads = [(4, 2), (9, 3), (3, 1), (2, 2), (6, 1)][rng.integers(5)]
    lengths = rng.integers(20, 75, 4).tolist()
    size, value_dim = int(rng.choice([16, 24])), int(rng.choice([16, 40]))
    rig = Rig(dtype, heads, size, int(rng.choice([4, 16])), [(n, n) for n in lengths], value_dim=value_dim)
    how: dict[str, Any] = {"window": int(rng.integers(1, 90)) if rng.random() < 0.4 else None}
    if rng.random() < 0.4:
        how["soft_cap"] = 1.5
    if rng.random() < 0.4:
        how["sinks_H"] = torch.linspace(-1, 2, heads[0])
    if rng.random() < 0.4:
        how["slopes_H"] = torch.linspace(0.01, 0.2, heads[0])
    return rig, how


def random_chunks(rng: np.random.Generator, rig: Rig, count: int) -> list[Row]:
    chunks = []
    for _ in range(count):
        row = int(rng.integers(len(rig.rows)))
        length = rig.rows[row][0]
        size = min(length, int(rng.choice([1, 1, 2, 5, 8, 9, 40])))
        start = int(rng.integers(length - size + 1))
        chunks.append((row, start, start + size))
    return sorted(chunks, key=lambda chunk: chunk[2] - chunk[1] > 1)


@pytest.mark.parametrize("seed", one_in(4, range(10)))
@pytest.mark.usefixtures("independent_rows")
def test_bits_depend_on_the_row_alone(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk of a prompt, in any company, list, tile and grid, gets the bits of the whole prompt."""
    rng = np.random.default_rng(seed)
    rig, how = random_rig(rng, [torch.float32, torch.bfloat16, torch.float16, INT8, E4M3][seed % 5])
    prompts = rig.split(rig.attend(interpreted(rig, Tiles(32, 16, 16, 64), **how), whole(rig.rows)))
    chunks = random_chunks(rng, rig, 20)
    monkeypatch.setattr("octavo.ops.triton.attention.MAX_PROGRAMS", int(rng.integers(1, 100)))
    short, tall = rng.choice([16, 32, 64], 2).tolist()
    backend = interpreted(rig, Tiles(32, 16, short, tall), **how)
    if seed % 3 == 0:  # some rows of few tokens are not cut
        backend.planner = replace(backend.planner, max_parts=6)
    outputs = rig.attend(backend, chunks).split([end - start for _, start, end in chunks])
    for (row, start, end), output in zip(chunks, outputs, strict=True):
        assert torch.equal(output, prompts[row][start:end])
        assert torch.equal(output.signbit(), prompts[row][start:end].signbit())


def on_device(batch: AttentionBatch, work: AttentionWork) -> DeviceRows:
    numbers = (np.concatenate(([0], np.cumsum(batch.counts))), batch.contexts, np.arange(batch.num_rows))
    tensors = [
        torch.from_numpy(column.astype(np.int32)) for column in (*numbers, batch.block_table_NM.numpy(), *work.lists)
    ]
    return DeviceRows(*tensors, num_parts=work.num_parts)


def padded(rig: Rig, rows: list[Row], num_rows: int) -> AttentionBatch:
    """A step of rows of one token whose last ones have no context."""
    batch, more = rig.batch(rows), num_rows - len(rows)
    batch.num_tokens = batch.num_rows = batch.num_decodes = num_rows
    batch.counts, batch.contexts = np.ones(num_rows, dtype=np.int64), np.pad(batch.contexts, (0, more))
    batch.slot_mapping_T = torch.cat((batch.slot_mapping_T, torch.full((more,), -1)))
    batch.block_table_NM = torch.cat((batch.block_table_NM, torch.full((more, rig.table.shape[1]), 10**9)))
    return batch


def test_one_captured_call_runs_steps_of_any_contexts() -> None:
    """The same tensors, shapes and launches; a row of context 0 gives zeros and writes nothing."""
    rig = Rig(torch.float32, rows=((200, 200), (90, 90), (20, 20)))
    backend, num_rows = interpreted(rig), 4
    room = backend.planner.room(num_rows, 200)
    before = [plane[0].clone() for plane in (rig.pool.keys, rig.pool.values)]
    held: DeviceRows | None = None
    for rows in ([(0, 199, 200), (1, 0, 1)], [(2, 19, 20)], [(0, 63, 64), (1, 64, 65), (2, 0, 1), (1, 89, 90)]):
        batch = padded(rig, rows, num_rows)
        rows_now = on_device(batch, backend.planner.work(batch.counts, batch.contexts, room))
        held = held or rows_now
        for name in (name for name in DeviceRows.__slots__ if name not in ("num_parts", "seen_T")):
            getattr(held, name).copy_(getattr(rows_now, name))  # what a replayed graph finds at its addresses
        assert rows_now.num_parts == held.num_parts
        batch.device = held
        backend.begin(batch)
        queries = torch.ones(num_rows, *rig.query[0].shape[1:])
        queries[: len(rows)] = torch.cat([rig.query[row][start:end] for row, start, end in rows])
        new = [torch.cat([part[row][i][s:e] for row, s, e in rows]) for part in (rig.content,) for i in (0, 1)]
        output = backend.attend(
            0, queries, *(torch.cat((x, torch.ones(num_rows - len(rows), *x.shape[1:]))) for x in new)
        )
        assert torch.equal(output[: len(rows)], rig.attend(interpreted(rig), rows))
        assert not output[len(rows) :].any()
    for plane, old in zip((rig.pool.keys, rig.pool.values), before, strict=True):
        assert torch.equal(plane[0], old)


def test_a_pool_of_more_than_2_to_the_31_numbers() -> None:
    rig = Rig(E4M3, (4, 2), 64, rows=((50, 1), (40, 20)))
    want, small = rig.attend(interpreted(rig), whole(rig.rows)), rig.pool
    shape = small.shape
    first = 2**31 // (16 * 2 * 64) + 10
    rig.pool = KVPool(replace(shape, num_blocks=first + shape.num_blocks), torch.device("cpu"))  # pages never touched
    assert rig.pool.keys[0].numel() > 2**31
    for planes, of_small in ((rig.pool.keys, small.keys), (rig.pool.values, small.values)):
        planes[0][first : first + shape.num_blocks] = of_small[0][: shape.num_blocks]
    rig.table = rig.table + first
    assert torch.equal(rig.attend(interpreted(rig), whole(rig.rows)), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, INT8, E4M3])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")  # numpy's, of what a device does silently
def test_keys_and_values_are_written_as_the_pool_encodes_them(dtype: torch.dtype, index: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    k_TKD = torch.randn(40, 3, 24, generator=generator) * torch.logspace(-44, 4, 40)[:, None, None]
    v_TKV = torch.randn(40, 5, 9, generator=generator)[:, 1:4]  # a slice of a wider tensor
    k_TKD[3, 1], k_TKD[5, 0, 7], k_TKD[6, 2, 0], v_TKV[8, 1, 1] = 0.0, float("nan"), float("inf"), 1e30
    slots_T = torch.randperm(64, generator=generator)[:40]
    pools = [KVPool(PoolShape(1, 4, 16, 3, 24, 9, dtype), torch.device("cpu")) for _ in range(2)]
    is_written = torch.arange(40) % 7 != 2
    pools[0].write(0, slots_T[is_written], k_TKD[is_written], v_TKV[is_written])
    slots_T[~is_written] = -1
    planes = pools[1].keys[0], pools[1].values[0]
    torch.ops.octavo.write_kv(k_TKD, v_TKV.contiguous(), slots_T.to(index), *planes, dtype)
    want, got = (pool.read(pool.keys[0], pool.values[0]) for pool in pools)
    for one, other in zip(want, got, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(0.0), other.nan_to_num(0.0))


def covered(planner: WorkPlanner, work: AttentionWork, counts: np.ndarray, contexts: np.ndarray) -> list[tuple]:
    """Each (row, token, split) that the work computes; a token's parts are where its join expects them."""
    num_items, num_joins, num_tiles = work.num_work_3.tolist()
    found, parts = [], {}
    for items, tokens in ((work.items_I4[:num_items], planner.short_tokens), (work.tiles_P4, planner.tall_tokens)):
        for row, offset, split, part in items.tolist():
            if part == -2:
                assert 1 <= offset <= planner.short_tokens
                for of_row, first in work.shared_N2[row : row + offset].tolist():
                    assert counts[of_row] == 1 and parts.setdefault(first + split, (of_row, 0, split)) is not None
                    found.append((of_row, 0, split))
                continue
            size = min(tokens, int(counts[row]) - offset)
            for token in range(offset, offset + size):
                position = int(contexts[row] - counts[row]) + token
                low = 0 if planner.window is None else max(0, position - planner.window + 1) // planner.split
                if part < 0:
                    found += [(row, token, one) for one in range(low, position // planner.split + 1)]
                else:
                    found += [(row, token, split)] if low <= split <= position // planner.split else []
                    assert parts.setdefault(part + token - offset, (row, token, split)) == (row, token, split)
    assert num_tiles == len(work.tiles_P4) and len(parts) <= work.num_parts
    for row, offset, first, splits in work.joins_J4[:num_joins].tolist():
        size = min(planner.short_tokens, int(counts[row]) - offset)
        joined = [[parts.pop(first + one * size + token) for one in range(splits)] for token in range(size)]
        for token, of_token in enumerate(joined):
            assert [part[:2] for part in of_token] == [(row, offset + token)] * splits
            assert np.diff([part[2] for part in of_token]).tolist() == [1] * (splits - 1)
    assert not parts
    return sorted(found)


def random_tables(rng: np.random.Generator, contexts: np.ndarray) -> HostTables | None:
    """Tables in which rows begin with blocks of a few other rows, as far as some position."""
    if rng.random() < 0.2:
        return None
    size = int(rng.choice([8, 12, 16, 48]))
    width = -(-int(contexts.max(initial=1)) // size) + 2
    table_SM = rng.permutation(2 * len(contexts) * width)[: len(contexts) * width].reshape(-1, width)
    for row in range(1, len(contexts)):
        if rng.random() < 0.7:
            same = int(rng.integers(width))
            table_SM[row, :same] = table_SM[rng.integers(row), :same]
    slots_N = rng.permutation(len(contexts))
    return HostTables(table_SM, slots_N, size)


def test_work_covers_every_split_of_every_token_once() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        window = int(rng.integers(1, 700)) if rng.random() < 0.5 else None
        sizes = rng.choice([1, 2, 3, 5, 16], 2).tolist()
        planner = WorkPlanner(*sizes, max_parts=int(rng.choice([0, 7, 40, 10**6])), window=window, split=64)
        counts = rng.choice([1, 1, 1, 2, 4, 8, 9, 70], int(rng.integers(1, 9)))
        contexts = counts + rng.integers(0, 600, len(counts))
        contexts[counts == 1] -= rng.random((counts == 1).sum()) < 0.2  # some are 0: rows that pad the step
        room = planner.room(len(counts), 700) if (counts == 1).all() else None
        work = planner.work(counts, contexts, room, random_tables(rng, contexts))
        assert work.num_parts <= planner.max_parts
        if room is not None:
            lengths = WorkRoom(len(work.items_I4), len(work.joins_J4), work.num_parts)
            assert lengths == room
        expected = []
        for row, (count, context) in enumerate(zip(counts.tolist(), contexts.tolist(), strict=True)):
            for token in range(count):
                position = context - count + token
                low = 0 if window is None else max(0, position - window + 1) // 64
                expected += [(row, token, split) for split in range(low, position // 64 + 1)]
        assert covered(planner, work, counts, contexts) == expected


def shares(work: AttentionWork) -> list[list[int]]:
    """The rows of each tile that several rows share, by split."""
    return [
        [split, *sorted(work.shared_N2[row : row + count, 0].tolist())]
        for row, count, split, part in work.items_I4[: work.num_work_3[0]].tolist()
        if part == -2
    ]


def test_K08_rows_of_one_prefix_are_tiles_of_their_own() -> None:
    """What all rows share, and what only some share after that: each split is a tile of up to four rows."""
    planner = WorkPlanner(4, 8, 10**6, split=32)
    contexts = np.array([130, 97, 128, 64, 200, 96])
    table_SM = np.arange(6 * 30).reshape(6, 30)
    table_SM[:4, :4] = table_SM[0, :4]  # 64 positions of rows 0 to 3
    table_SM[:3, 4:6] = table_SM[0, 4:6]  # and 32 more of rows 0 to 2
    table_SM[5, :3] = table_SM[4, :3]  # 48 of rows 4 and 5: one whole split
    ones, tables = np.ones(6, dtype=np.int64), HostTables(table_SM, np.arange(6), 16)
    work = planner.work(ones, contexts, tables=tables)
    assert sorted(shares(work)) == [[0, 0, 1, 2, 3], [0, 4, 5], [1, 0, 1, 2, 3], [2, 0, 1, 2]]
    assert len(work.items_I4) == len(planner.work(ones, contexts).items_I4) - 3 - 3 - 2 - 1
    assert not shares(replace(planner, window=50).work(ones, contexts, tables=tables))
    assert not shares(planner.work(ones, contexts, tables=tables, sees_ahead=True))
    assert not shares(replace(planner, short_tokens=1).work(ones, contexts, tables=tables))


@pytest.mark.parametrize("seed", one_in(3, range(5)))
@pytest.mark.usefixtures("independent_rows")
def test_K08_a_shared_prefix_changes_no_bit(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    dtype = [torch.float32, torch.bfloat16, torch.float16, INT8, E4M3][seed]
    heads = [(4, 2), (9, 3), (3, 1), (2, 2), (6, 1)][seed]
    contexts = sorted(rng.integers(40, 100, 5).tolist())
    block = int(rng.choice([4, 12, 16]))
    rig = Rig(dtype, heads, 16, block, [*((n, 1) for n in contexts), (50, 10)], int(rng.integers(48, 80)), 24)
    how: dict[str, Any] = {"sinks_H": torch.linspace(-1, 2, heads[0])} if seed % 2 else {"soft_cap": 1.5}
    backend, rows = interpreted(rig, Tiles(32, 16, 16, 32), **how), whole(rig.rows)
    alone = rig.attend(backend, rows)
    make, made = rig.batch, []
    rig.batch = lambda rows: made.append(make(rows)) or made[-1]  # type: ignore[func-returns-value]
    for room in (False, True):  # a list of its own size, and one with room, as a captured step's

        def begin(batch: AttentionBatch, room: bool = room) -> None:
            batch.host_tables = HostTables(rig.table, np.arange(len(batch.counts)), block)
            if room:
                size = backend.planner.room(len(batch.counts), 100)
                work = backend.planner.work(batch.counts, batch.contexts, size, batch.host_tables)
                batch.device = on_device(batch, work)
            work = backend.planner.work(batch.counts, batch.contexts, tables=batch.host_tables)
            assert any(len(tile) > 2 for tile in shares(work))
            TritonAttention.begin(backend, batch)

        backend.begin = begin  # type: ignore[method-assign]
        steps = rows[:-1] if room else rows
        together = rig.attend(backend, steps)
        assert torch.equal(together, alone[: len(together)])
        assert torch.equal(together.signbit(), alone[: len(together)].signbit())


def test_heights_of_tiles_fit_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = PoolShape(1, 1, 16, 2, 128, 128, torch.bfloat16)
    cpu = torch.device("cpu")
    assert Tiles.of(shape, 4, cpu) == Tiles(256, 256, 16, 32)  # one tile is a split: the interpreter counts by tiles
    assert Tiles.of(replace(shape, head_dim=64, value_dim=64), 71, cpu) == Tiles(256, 256, 64, 64)
    assert Tiles.of(replace(shape, head_dim=192), 71, cpu) == Tiles(256, 256, 32, 32)
    assert Tiles.of(replace(shape, dtype=INT8), 20, cpu) == Tiles(256, 256, 32, 32)
    assert Tiles.of(replace(shape, dtype=torch.float32), 3, cpu) == Tiles(256, 256, 16, 16)
    narrow, cuda = replace(shape, head_dim=64, value_dim=64), torch.device("cuda")
    for capability, tall in (((8, 6), 64), ((9, 0), 32), ((10, 3), 32), ((11, 0), 32), ((12, 0), 64)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, capability=capability: capability)
        assert Tiles.of(narrow, 4, cuda) == Tiles(256, 64, 16, tall)
    assert fits_kernels(replace(shape, value_dim=512)) and not fits_kernels(replace(shape, value_dim=513))
    assert not fits_kernels(replace(shape, value_dim=129, dtype=torch.float32))
