"""Attention by Triton's kernels, which read the pool in place through block tables on the device.

Owns: the list of a step's work, the order of a layer's launches. Does not: own the pool, or compute.
Shapes: T tokens, N rows, H query heads, K KV heads, D size of keys, V size of values, I items, J joins, P tiles.
Invariants: a token's result depends on its row alone, bit for bit: not on other rows, the cut of the prompt, or which
list its row is in. After `begin` with `batch.device`, no layer reads the host's columns, so launches can be captured.

A row of up to SHORT_TOKENS tokens is a tile of queries or a few, cut over its context: each split is an item, and a
join adds the splits. Rows of one token whose blocks of a split are the same are tiles of their own there: as many rows
as fit a tile read the split once. Items are in order of their split, so the next tile finds the blocks in the device's
cache. Longer rows are many tiles, each over its whole context.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops.attention import (
    AttentionBatch,
    DeviceRows,
    HostColumn,
    HostTables,
    KVPlace,
    KVPool,
    LayerAttention,
    PoolShape,
)
from octavo.ops.triton import available

Int32s = NDArray[np.int32]

SPLIT = 256  # positions: 64 rows of 1,024 over 8 KV heads are 2,048 programs, and parts add 2 % to the KV traffic
SHORT_TOKENS = 8  # a row of decode and its drafts
# By the bytes of the pool's numbers: each height of a tile, in queries, with the largest head whose program does not
# spill registers on any device. Triton 3.6 spills, on sm_80 alone, 8 bytes of {4: 32} and 96 of {1: 32}.
HEIGHTS = {4: {16: 128, 32: 64}, 2: {16: 512, 32: 256, 64: 64}, 1: {16: 512, 32: 256}}
SHARED_HEAD = 256  # the largest head of rows in one tile: with codes of 512 numbers, every device spills registers
NUM_LISTS = 5  # of AttentionWork.lists
MAX_PART_BYTES = 64 << 20  # parts of a step: a million positions of 32 heads of 128


@dataclass(frozen=True, slots=True)
class Tiles:
    """How attention is cut: positions of a split and of a KV tile, queries of the tiles of short and longer rows.

    A result's bits depend on `split` and `tile` alone.
    """

    split: int
    tile: int
    short: int
    tall: int

    @classmethod
    def of(cls, shape: PoolShape, group: int, device: torch.device) -> Tiles:
        """Return what compiles for every device without local memory, for `group` query heads of a KV head.

        The products of all tiles are the same instruction: sm_90, sm_100 and sm_110 take another from 64 queries on.
        """
        has_groups = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] not in (8, 12)
        heights = [height for height in _heights(shape) if height < 64 or not has_groups]
        short = next((height for height in heights if height >= group), heights[-1])
        tile = tile_positions(max(shape.head_dim, shape.value_dim), shape.dtype.itemsize)
        return cls(SPLIT, tile if device.type == "cuda" else SPLIT, short, heights[-1])


def tile_positions(head_size: int, itemsize: int) -> int:
    """Return the positions of a KV tile; codes and float32 need more registers than 16-bit numbers."""
    return (64 if head_size <= 128 else 32) // (1 if itemsize == 2 else 2)


def _heights(shape: PoolShape) -> list[int]:
    """Return the heights of tiles that fit a device, ascending; none if heads are too large."""
    widest = max(shape.head_dim, shape.value_dim)
    return [height for height, largest in HEIGHTS[shape.dtype.itemsize].items() if widest <= largest]


def fits_kernels(shape: PoolShape) -> bool:
    """Return True if Triton's kernels are available and compile well for a pool's heads."""
    return available.is_available() and bool(_heights(shape))


@dataclass(frozen=True, slots=True)
class WorkRoom:
    """The sizes of a step's lists, if these are fixed."""

    num_items: int
    num_joins: int
    num_parts: int


@dataclass(frozen=True, slots=True, eq=False)
class AttentionWork:
    """What the kernels do in a step.

    An item is (row, first token in the row, split, part), and part -1 means all splits; see the kernel attend_tiles. A
    join is (row, first token in the row, first part, number of splits). `tiles_P4` are items of longer rows, and
    `num_work_3` the numbers of items, joins and tiles; what follows these pads the lists. `shared_N2` has (row, first
    part) of the rows that share blocks, in an order in which those that share a split are adjacent.
    """

    shared_N2: Int32s
    items_I4: Int32s
    joins_J4: Int32s
    tiles_P4: Int32s
    num_work_3: Int32s
    num_parts: int

    @property
    def lists(self) -> tuple[Int32s, ...]:
        """What is sent to the device, in the order of DeviceRows."""
        return self.shared_N2, self.items_I4, self.joins_J4, self.tiles_P4, self.num_work_3


@dataclass(frozen=True, slots=True)
class WorkPlanner:
    """Lists a step's work. Rows are cut into tiles of tokens, and contexts of short rows into at most `max_parts`.

    If it `shares`, and there is no window, rows of one token attend the splits together whose blocks are the same.
    """

    short_tokens: int
    tall_tokens: int
    max_parts: int
    window: int | None = None
    split: int = SPLIT
    shares: bool = True

    def work(
        self,
        counts: HostColumn,
        contexts: HostColumn,
        room: WorkRoom | None = None,
        tables: HostTables | None = None,
        sees_ahead: bool = False,
    ) -> AttentionWork:
        """List the work of rows of `counts` tokens at the end of `contexts` positions; a context may be 0.

        With `sees_ahead` a token may see any position of its row. Every row must be short where the room is fixed.
        `tables` show which rows share blocks.
        """
        is_short = counts <= SHORT_TOKENS
        rows = np.arange(len(counts))
        if not self.shares or self.window or sees_ahead or self.short_tokens == 1:
            tables = None
        parts = self._parts(rows[is_short], counts, contexts, room, sees_ahead)
        shared = Shared.of(parts, counts, contexts, tables, self.split)
        items = np.concatenate((parts.whole, parts.items(shared, self.short_tokens)))
        joins = parts.joins
        tiles = _tiles(rows[~is_short], counts, self.tall_tokens)
        ends = contexts[tiles[:, 0]] - counts[tiles[:, 0]] + tiles[:, 1]
        tiles = tiles[np.argsort(-ends, kind="stable")]  # the longest first, so that no device waits for it at the end
        num_work = np.array([len(items), len(joins), len(tiles)], dtype=np.int32)
        members, num_parts = shared.members(parts), parts.num_parts
        if room is not None:
            assert not len(tiles), "a fixed room is for rows of few tokens"
            items, joins = _pad(items, room.num_items), _pad(joins, room.num_joins)
            members, num_parts = _pad(members, len(counts)), room.num_parts
        return AttentionWork(members, items, joins, tiles, num_work, num_parts)

    def _parts(
        self, rows: HostColumn, counts: HostColumn, contexts: HostColumn, room: WorkRoom | None, sees_ahead: bool
    ) -> CutTiles:
        """Cut short rows over their contexts. Without room for its parts, a tile is one item."""
        tiles = _tiles(rows, counts, self.short_tokens)
        row_X, offset_X = tiles[:, 0].astype(np.int64), tiles[:, 1].astype(np.int64)
        tokens_X = np.minimum(counts[row_X] - offset_X, self.short_tokens)
        first_X = contexts[row_X] - counts[row_X] + offset_X
        ends_X = contexts[row_X] if sees_ahead else first_X + tokens_X
        low_X = np.maximum(first_X - (self.window - 1), 0) // self.split if self.window else np.zeros_like(row_X)
        splits_X = np.maximum(-(-ends_X // self.split) - low_X, 1)
        parts_X = np.where(splits_X > 1, splits_X * tokens_X, 0)
        limit = self.max_parts if room is None else min(room.num_parts, self.max_parts)
        if parts_X.sum() > limit:  # the tiles of most splits stay cut: they would take the longest
            order = np.argsort(-splits_X, kind="stable")
            parts_X[order[np.cumsum(parts_X[order]) > limit]] = 0
        cut = np.flatnonzero(parts_X)
        parts_Y = parts_X[cut]
        base_Y = np.cumsum(parts_Y) - parts_Y
        return CutTiles(
            tiles[parts_X == 0], tiles[cut], tokens_X[cut], low_X[cut], splits_X[cut], base_Y, int(parts_Y.sum())
        )

    def room(self, num_rows: int, longest: int) -> WorkRoom:
        """Return the sizes of the lists of `num_rows` rows of one token and contexts of up to `longest` positions."""
        splits = -(-longest // self.split)
        if self.window:
            splits = min(splits, -(-self.window // self.split) + 1)
        num_parts = min(num_rows * splits, self.max_parts)
        return WorkRoom(num_parts + num_rows, num_rows, num_parts)


@dataclass(frozen=True, slots=True, eq=False)
class CutTiles:
    """Tiles of short rows: those that are one item each, and Y that are cut, with the splits and parts of each."""

    whole: Int32s
    tiles_Y4: Int32s
    tokens_Y: HostColumn
    low_Y: HostColumn
    splits_Y: HostColumn
    base_Y: HostColumn
    num_parts: int

    @property
    def joins(self) -> Int32s:
        """The joins of the tiles that are cut."""
        joins = np.empty((len(self.base_Y), 4), dtype=np.int32)
        joins[:, :2], joins[:, 2], joins[:, 3] = self.tiles_Y4[:, :2], self.base_Y, self.splits_Y
        return joins

    def items(self, shared: Shared, tile_rows: int) -> Int32s:
        """Return an item for each split of each tile, but one for up to `tile_rows` rows that share the split."""
        alone_Y = self.splits_Y - shared.depth_Y
        of_I = np.repeat(np.arange(len(alone_Y)), alone_Y)
        nth_I = np.arange(len(of_I)) - np.repeat(np.cumsum(alone_Y) - self.splits_Y, alone_Y)
        items = np.empty((len(of_I), 4), dtype=np.int32)
        items[:, :2] = self.tiles_Y4[of_I, :2]
        items[:, 2], items[:, 3] = self.low_Y[of_I] + nth_I, self.base_Y[of_I] + nth_I * self.tokens_Y[of_I]
        items = np.concatenate((shared.items(tile_rows), items))
        return items[np.argsort(items[:, 2], kind="stable")]


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """The tiles of one token whose rows begin with equal blocks: `order_M`, and how many splits neighbours share.

    `depth_Y` is how many splits each cut tile shares with some other; the order is that of the tables, so all tiles
    that share a split are adjacent.
    """

    order_M: HostColumn
    common_M: HostColumn  # splits that a tile shares with the next one; 0 at the end
    depth_Y: HostColumn

    @classmethod
    def of(
        cls, parts: CutTiles, counts: HostColumn, contexts: HostColumn, tables: HostTables | None, split: int
    ) -> Shared:
        """Compare the tables of cut tiles."""
        depth_Y, none = np.zeros(len(parts.base_Y), dtype=np.int64), np.zeros(0, dtype=np.int64)
        if tables is None or len(depth_Y) < 2:
            return cls(none, none, depth_Y)
        rows_Y = parts.tiles_Y4[:, 0]
        firsts_Y = np.where(counts[rows_Y] == 1, tables.table_SM[tables.slots_N[rows_Y], 0], -1)
        _, kind_Y, sizes = np.unique(firsts_Y, return_inverse=True, return_counts=True)
        order = np.flatnonzero((sizes[kind_Y] > 1) & (firsts_Y >= 0))
        if not len(order):
            return cls(none, none, depth_Y)
        rows_M = rows_Y[order]
        full_M, size = contexts[rows_M] // split, tables.block_size
        width = -(-int(full_M.max()) * split // size)
        blocks_MB = tables.table_SM[tables.slots_N[rows_M], :width].astype(">i4")
        blocks_MB[np.arange(width) >= -(-full_M * split // size)[:, None]] = -1
        sorted_M = np.argsort(np.ascontiguousarray(blocks_MB).view(f"V{4 * width}")[:, 0], kind="stable")
        blocks_MB, full_M, order = blocks_MB[sorted_M], full_M[sorted_M], order[sorted_M]
        is_other = blocks_MB[1:] != blocks_MB[:-1]
        agreed = np.where(is_other.any(axis=1), np.argmax(is_other, axis=1), width)
        common = np.minimum(agreed * size // split, np.minimum(full_M[1:], full_M[:-1]))
        common_M = np.append(common, 0)
        depth_Y[order] = np.maximum(common_M, np.append(0, common))
        return cls(order, common_M, depth_Y)

    def items(self, tile_rows: int) -> Int32s:
        """Return an item for each split of up to `tile_rows` tiles that share it."""
        if not len(self.order_M):
            return np.zeros((0, 4), dtype=np.int32)
        is_shared_SM = self.common_M > np.arange(int(self.common_M.max()))[:, None]
        steps_SM = np.diff(np.pad(is_shared_SM, ((0, 0), (1, 0))).astype(np.int8), axis=1)
        split_G, first_G = np.nonzero(steps_SM == 1)
        size_G = np.nonzero(steps_SM == -1)[1] - first_G + 1
        tiles_G = -(-size_G // tile_rows)
        of_I = np.repeat(np.arange(len(size_G)), tiles_G)
        begin_I = (np.arange(len(of_I)) - np.repeat(np.cumsum(tiles_G) - tiles_G, tiles_G)) * tile_rows
        columns = first_G[of_I] + begin_I, np.minimum(size_G[of_I] - begin_I, tile_rows), split_G[of_I]
        return np.stack((*columns, np.full(len(of_I), -2)), axis=1).astype(np.int32)

    def members(self, parts: CutTiles) -> Int32s:
        """Return the row and the first part of each tile, in order."""
        return np.stack((parts.tiles_Y4[self.order_M, 0], parts.base_Y[self.order_M]), axis=1).astype(np.int32)


def _tiles(rows: HostColumn, counts: HostColumn, tokens: int) -> Int32s:
    """Return items of whole contexts for each `tokens` tokens of these rows."""
    num_tiles = -(-counts[rows] // tokens)
    tiles = np.zeros((int(num_tiles.sum()), 4), dtype=np.int32)
    tiles[:, 0] = np.repeat(rows, num_tiles)
    tiles[:, 1] = (np.arange(len(tiles)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)) * tokens
    tiles[:, 3] = -1
    return tiles


def _pad(entries: Int32s, length: int) -> Int32s:
    padded = np.zeros((length, entries.shape[1]), dtype=np.int32)
    padded[: len(entries)] = entries
    return padded


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """One layer's numbers as the kernels read them: in units of log2."""

    scale: float
    soft_cap: float
    sinks_H: Tensor | None
    slopes_H: Tensor | None

    @classmethod
    def of(cls, own: LayerAttention, device: torch.device) -> _Layer:
        """Return the layer's numbers on the device."""
        log2e, cap = 1 / math.log(2), own.soft_cap
        sinks_H, slopes_H = (
            None if numbers_H is None else (numbers_H.detach().to(device).float() * log2e).contiguous()
            for numbers_H in (own.sinks_H, own.slopes_H)
        )
        return cls(own.scale / cap if cap else own.scale * log2e, cap * log2e if cap else 0.0, sinks_H, slopes_H)


class TritonAttention:
    """The AttentionBackend for CUDA devices with Triton. All layers have as many heads, and the same window."""

    reads_unwritten = False

    def __init__(self, pool: KVPool, layers: Sequence[LayerAttention], tiles: Tiles | None = None) -> None:
        shape = pool.shape
        assert fits_kernels(shape), "no kernel for this pool; see fits_kernels"
        self._pool = pool
        ((num_heads, self._window),) = {(layer.num_heads, layer.window) for layer in layers}
        group = num_heads // shape.num_kv_heads
        assert group * shape.num_kv_heads == num_heads, "query heads are a multiple of KV heads"
        self.tiles = tiles = tiles or Tiles.of(shape, group, pool.device)
        self._layers = [_Layer.of(layer, pool.device) for layer in layers]
        self._part_size = num_heads * shape.value_dim
        tokens = [height // min(group, height) for height in (tiles.short, tiles.tall)]
        max_parts = MAX_PART_BYTES // (4 * self._part_size)
        shares = max(shape.head_dim, shape.value_dim) <= SHARED_HEAD
        self.planner = WorkPlanner(tokens[0], tokens[1], max_parts, self._window, tiles.split, shares)
        self._batch: AttentionBatch | None = None
        self._rows: DeviceRows | None = None

    def begin(self, batch: AttentionBatch) -> None:
        """Keep the step's rows; build them from the host's columns if they are not on the device."""
        self._batch = batch
        self._rows = batch.device or self._upload(batch)

    def _upload(self, batch: AttentionBatch) -> DeviceRows:
        sees_ahead = batch.seen_T is not None
        work = self.planner.work(batch.counts, batch.contexts, None, batch.host_tables, sees_ahead)

        def put(numbers: HostColumn | Int32s) -> Tensor:
            return torch.from_numpy(numbers.astype(np.int32)).to(self._pool.device)

        return DeviceRows(
            first_token_N1=put(np.concatenate(([0], np.cumsum(batch.counts)))),
            contexts_N=put(batch.contexts),
            slots_N=put(np.arange(batch.num_rows)),
            table_SM=batch.block_table_NM.to(torch.int32),
            shared_N2=put(work.shared_N2),
            items_I4=put(work.items_I4),
            joins_J4=put(work.joins_J4),
            tiles_P4=put(work.tiles_P4),
            num_work_3=put(work.num_work_3),
            num_parts=work.num_parts,
            seen_T=None if batch.seen_T is None else put(batch.seen_T),
        )

    def place(self, layer: int) -> KVPlace | None:
        """Return where the step's keys and values of the layer belong."""
        assert self._batch is not None, "place before begin"
        pool = self._pool
        return KVPlace(pool.keys[layer], pool.values[layer], pool.shape.dtype, self._batch.slot_mapping_T)

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKV: Tensor) -> Tensor:
        """Write the step's keys and values into the pool, then attend every token. Returns a new tensor."""
        assert self._batch is not None, "attend before begin"
        keys, values, dtype = self._pool.keys[layer], self._pool.values[layer], self._pool.shape.dtype
        torch.ops.octavo.write_kv(_rows(k_TKD), _rows(v_TKV), self._batch.slot_mapping_T, keys, values, dtype)
        return self.attend_placed(layer, q_THD)

    def attend_placed(self, layer: int, q_THD: Tensor) -> Tensor:
        """Attend every token, after the step's keys and values were written. Returns a new tensor."""
        rows, own, pool, tiles = self._rows, self._layers[layer], self._pool, self.tiles
        assert rows is not None, "attend before begin"
        num_tokens, num_heads, _ = q_THD.shape
        q_THD = _rows(q_THD)
        out_THV = q_THD.new_empty((num_tokens, num_heads, pool.shape.value_dim))
        partials = torch.empty((rows.num_parts, self._part_size), dtype=torch.float32, device=q_THD.device)
        states = torch.empty((rows.num_parts, num_heads, 2), dtype=torch.float32, device=q_THD.device)
        for index, items, height in ((0, rows.items_I4, tiles.short), (2, rows.tiles_P4, tiles.tall)):
            if items.shape[0]:
                torch.ops.octavo.paged_attention(
                    q_THD, pool.keys[layer], pool.values[layer], own.sinks_H, own.slopes_H,
                    rows.first_token_N1, rows.contexts_N, rows.slots_N, rows.table_SM, rows.seen_T,
                    rows.shared_N2, items, rows.num_work_3, partials, states, out_THV,
                    own.scale, own.soft_cap, self._window or 0, pool.shape.num_kv_heads, pool.shape.dtype, height,
                    tiles.tile, tiles.split, index,
                )  # fmt: skip
        if rows.joins_J4.shape[0]:
            torch.ops.octavo.join_attention(
                partials, states, own.sinks_H, rows.first_token_N1, rows.joins_J4, rows.num_work_3, out_THV,
                self.planner.short_tokens,
            )  # fmt: skip
        return out_THV


def _rows(x_THD: Tensor) -> Tensor:
    """Return a tensor whose rows are dense; the stride between rows may have any value."""
    is_dense = x_THD.stride(2) == 1 and x_THD.stride(1) == x_THD.shape[2]
    return x_THD if is_dense else x_THD.contiguous()
