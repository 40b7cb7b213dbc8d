"""Attention by Triton's kernels, which read the pool in place through block tables on the device.

Owns: the list of a step's work, the order of a layer's launches. Does not: own the pool, or compute.
Shapes: T tokens, N rows, H query heads, K KV heads, D size of keys, V size of values, I items, J joins, P tiles.
Invariants: a token's result depends on its row alone, bit for bit: not on other rows, the cut of the prompt, or which
list its row is in. After `begin` with `batch.device`, no layer reads the host's columns, so launches can be captured.

A row of up to SHORT_TOKENS tokens is a tile of queries or a few, cut over its context: each split is an item, and a
join adds the splits. Longer rows are many tiles, each over its whole context. Rows that share a prefix are separate
items, whose bits would be the same in one tile: items are in order of their split, so rows that share blocks read them
from the device's cache at the same time, which needs no lists of a tile's rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops.attention import AttentionBatch, DeviceRows, HostColumn, KVPlace, KVPool, LayerAttention, PoolShape
from octavo.ops.triton import available

Int32s = NDArray[np.int32]

SPLIT = 256  # positions: 64 rows of 1,024 over 8 KV heads are 2,048 programs, and parts add 2 % to the KV traffic
SHORT_TOKENS = 8  # a row of decode and its drafts
# By the bytes of the pool's numbers: each height of a tile, in queries, with the largest head whose program does not
# spill registers on any device. Triton 3.6 spills, on sm_80 alone, 8 bytes of {4: 32} and 96 of {1: 32}.
HEIGHTS = {4: {16: 128, 32: 64}, 2: {16: 512, 32: 256, 64: 64}, 1: {16: 512, 32: 256}}
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

        The products of all tiles are the same instruction: sm_90 and sm_100 take another one from 64 queries on.
        """
        has_groups = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)
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
    `num_work_3` the numbers of items, joins and tiles; what follows these pads the lists.
    """

    items_I4: Int32s
    joins_J4: Int32s
    tiles_P4: Int32s
    num_work_3: Int32s
    num_parts: int


@dataclass(frozen=True, slots=True)
class WorkPlanner:
    """Lists a step's work. Rows are cut into tiles of tokens, and contexts of short rows into at most `max_parts`."""

    short_tokens: int
    tall_tokens: int
    max_parts: int
    window: int | None = None
    split: int = SPLIT

    def work(
        self, counts: HostColumn, contexts: HostColumn, room: WorkRoom | None = None, sees_ahead: bool = False
    ) -> AttentionWork:
        """List the work of rows of `counts` tokens at the end of `contexts` positions; a context may be 0.

        With `sees_ahead` a token may see any position of its row. Every row must be short where the room is fixed.
        """
        is_short = counts <= SHORT_TOKENS
        rows = np.arange(len(counts))
        items, joins, num_parts = self._short(rows[is_short], counts, contexts, room, sees_ahead)
        tiles = _tiles(rows[~is_short], counts, self.tall_tokens)
        ends = contexts[tiles[:, 0]] - counts[tiles[:, 0]] + tiles[:, 1]
        tiles = tiles[np.argsort(-ends, kind="stable")]  # the longest first, so that no device waits for it at the end
        num_work = np.array([len(items), len(joins), len(tiles)], dtype=np.int32)
        if room is not None:
            assert not len(tiles), "a fixed room is for rows of few tokens"
            items, joins, num_parts = _pad(items, room.num_items), _pad(joins, room.num_joins), room.num_parts
        return AttentionWork(items, joins, tiles, num_work, num_parts)

    def _short(
        self, rows: HostColumn, counts: HostColumn, contexts: HostColumn, room: WorkRoom | None, sees_ahead: bool
    ) -> tuple[Int32s, Int32s, int]:
        """Return items, joins and the number of parts of short rows. Without room for its parts, a tile is one item."""
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
        splits_Y, tokens_Y, parts_Y = splits_X[cut], tokens_X[cut], parts_X[cut]
        base_Y = np.cumsum(parts_Y) - parts_Y
        of_I = np.repeat(np.arange(len(cut)), splits_Y)
        nth_I = np.arange(len(of_I)) - np.repeat(np.cumsum(splits_Y) - splits_Y, splits_Y)
        items = np.empty((len(of_I), 4), dtype=np.int32)
        items[:, :2] = tiles[cut[of_I], :2]
        items[:, 2], items[:, 3] = low_X[cut[of_I]] + nth_I, base_Y[of_I] + nth_I * tokens_Y[of_I]
        items = items[np.argsort(items[:, 2], kind="stable")]
        joins = np.empty((len(cut), 4), dtype=np.int32)
        joins[:, :2], joins[:, 2], joins[:, 3] = tiles[cut, :2], base_Y, splits_Y
        return np.concatenate((tiles[parts_X == 0], items)), joins, int(parts_X.sum())

    def room(self, num_rows: int, longest: int) -> WorkRoom:
        """Return the sizes of the lists of `num_rows` rows of one token and contexts of up to `longest` positions."""
        splits = -(-longest // self.split)
        if self.window:
            splits = min(splits, -(-self.window // self.split) + 1)
        num_parts = min(num_rows * splits, self.max_parts)
        return WorkRoom(num_parts + num_rows, num_rows, num_parts)


def _tiles(rows: HostColumn, counts: HostColumn, tokens: int) -> Int32s:
    """Return items of whole contexts for each `tokens` tokens of these rows."""
    num_tiles = -(-counts[rows] // tokens)
    tiles = np.zeros((int(num_tiles.sum()), 4), dtype=np.int32)
    tiles[:, 0] = np.repeat(rows, num_tiles)
    tiles[:, 1] = (np.arange(len(tiles)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)) * tokens
    tiles[:, 3] = -1
    return tiles


def _pad(entries_I4: Int32s, length: int) -> Int32s:
    padded_I4 = np.zeros((length, 4), dtype=np.int32)
    padded_I4[: len(entries_I4)] = entries_I4
    return padded_I4


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
        self.planner = WorkPlanner(tokens[0], tokens[1], max_parts, self._window, tiles.split)
        self._batch: AttentionBatch | None = None
        self._rows: DeviceRows | None = None

    def begin(self, batch: AttentionBatch) -> None:
        """Keep the step's rows; build them from the host's columns if they are not on the device."""
        self._batch = batch
        self._rows = batch.device or self._upload(batch)

    def _upload(self, batch: AttentionBatch) -> DeviceRows:
        work = self.planner.work(batch.counts, batch.contexts, sees_ahead=batch.seen_T is not None)

        def put(numbers: HostColumn | Int32s) -> Tensor:
            return torch.from_numpy(numbers.astype(np.int32)).to(self._pool.device)

        return DeviceRows(
            first_token_N1=put(np.concatenate(([0], np.cumsum(batch.counts)))),
            contexts_N=put(batch.contexts),
            slots_N=put(np.arange(batch.num_rows)),
            table_SM=batch.block_table_NM.to(torch.int32),
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
                    items, rows.num_work_3, partials, states, out_THV,
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
