"""The work lists of a step's attention, which the C++ kernels read (csrc/attention.h).

Owns: splitting the step's tokens into items, the items' costs, the memory of both, and ctypes twins of the structures.
Does not: compute attention, or write keys and values.
Shapes: T tokens, N rows, I tiles or items, H query heads, K KV heads.
Invariants: the plan changes only the speed, no bit of a token's result (csrc/attention_tile.h). A tile is a run of
tokens of one row. It is one item, or is split by heads and parts until all threads have work. Decode rows whose tables
agree in whole parts attend those parts as one item, which reads the keys and values once. For a few decodes, positions
are divided evenly among threads, with as many heads of a part in one item as possible: their data is adjacent.
"""

from __future__ import annotations

from ctypes import Structure, c_double, c_int64, c_void_p

import numpy as np
from numpy.typing import NDArray

from octavo.ops.attention import AttentionBatch

PART = 128  # kPart of csrc/attention.h
MAX_ROWS = 96  # kMaxRows of csrc/attention.h
TAIL = 8  # kTail of csrc/attention.h
DIRECT = np.iinfo(np.int64).min  # kDirect of csrc/attention.h
ITEMS_PER_THREAD = 4  # how evenly work is divided; each further item costs about a microsecond
MIN_PARTS = 4  # per item: joining the parts of a split token needs another barrier
FEW = 4  # kPrivateRows of csrc/decoder_step.cpp: up to this many tokens are joined without a barrier
MAX_ITEMS = 1 << 40  # per thread: the costs of a few decodes are thread * MAX_ITEMS + item
TURNING = 8  # the cost of loading a part, in units of query rows
Ints = NDArray[np.int64]


class AttentionLayer(Structure):
    """Twin of struct AttentionLayer."""

    _fields_ = [
        ("keys", c_void_p), ("values", c_void_p), ("kv_kind", c_int64), ("block_size", c_int64),
        ("num_heads", c_int64), ("num_kv_heads", c_int64), ("head_dim", c_int64), ("value_dim", c_int64),
        ("window", c_int64), ("scale", c_double), ("soft_cap", c_double), ("sinks", c_void_p), ("slopes", c_void_p),
    ]  # fmt: skip


class AttentionStep(Structure):
    """Twin of struct AttentionStep."""

    _fields_ = [
        ("num_tokens", c_int64), ("num_rows", c_int64), ("table_stride", c_int64), ("table", c_void_p),
        ("rows", c_void_p), ("contexts", c_void_p), ("seen", c_void_p), ("num_items", c_int64), ("items", c_void_p),
        ("members", c_void_p), ("costs", c_void_p), ("first_slots", c_void_p), ("num_joins", c_int64),
        ("joins", c_void_p), ("partial", c_void_p),
    ]  # fmt: skip


class AttentionPlan:
    """Planner of one cache group's steps. `step` is the structure that C reads; it is valid until the next begin."""

    def __init__(self, num_heads: int, num_kv_heads: int, value_dim: int, block_size: int, window: int | None) -> None:
        self.step = AttentionStep()
        self.shared_parts = 0  # in the step: parts that several rows attend together
        self.num_parts = 0  # in the step: the sum over tiles and groups of the parts of their context
        self._num_kv_heads = num_kv_heads
        self._group = num_heads // num_kv_heads
        self._slot_floats = num_heads * (value_dim + TAIL)
        self._block_size = block_size
        self._window = window
        self._partial = np.empty(0, dtype=np.float32)
        self._columns: tuple[Ints, ...] = ()
        self._seen: Ints | None = None
        self._table: object = None  # kept alive, because the structure has its address
        self._contexts: Ints | None = None  # as well
        self._decodes: tuple[int, bytes] | None = None  # key of the last plan, if it can be reused
        self._grow(64)

    def begin(self, batch: AttentionBatch, num_threads: int) -> None:
        """Plan a step whose tensors are on the CPU, for `num_threads` threads."""
        if batch.seen_T is not None:
            self.shared_parts, self._decodes = 0, None
            self._begin(batch, num_threads, [])
            return
        shared = self._shared(batch) if batch.num_decodes > 1 and self._window is None else []
        self.shared_parts = sum(end - first for _, first, end in shared)
        decodes = None
        if not shared and self._window is None and batch.num_decodes == batch.num_rows:
            grain = PART if batch.num_rows > FEW else PART // 8  # a few decodes are divided by positions
            decodes = num_threads, ((batch.contexts + (grain - 1)) // grain).tobytes()
            if decodes == self._decodes:  # equal numbers of parts as in the previous step give equal items
                if self._table is not batch.block_table_NM or self._contexts is not batch.contexts:
                    self._move(batch)
                return
        self._decodes = None
        if shared or not (self._begin_alike(batch, num_threads) or self._begin_few(batch, num_threads)):
            self._begin(batch, num_threads, shared)
        self._decodes = decodes

    def _grow(self, capacity: int) -> None:
        """Make columns for up to `capacity` decodes of one item each; each such step uses their first rows."""
        self._order = np.arange(capacity)
        self._direct = np.full(capacity, DIRECT)
        self._alike = np.zeros((capacity, 6), dtype=np.int64)
        self._alike[:, 0], self._alike[:, 1], self._alike[:, 5] = self._order, 1, self._num_kv_heads

    def _begin_alike(self, batch: AttentionBatch, num_threads: int) -> bool:
        """Plan decodes as one item each; return False if that would not divide the work evenly."""
        num_rows, contexts_N = batch.num_rows, batch.contexts
        if batch.num_decodes < num_rows or self._group * self._num_kv_heads > MAX_ROWS:
            return False
        ends_N = (contexts_N + (PART - 1)) // PART
        parts_N, lows_N = ends_N, None
        if self._window is not None:
            lows_N = np.maximum(contexts_N - self._window, 0) // PART
            parts_N = ends_N - lows_N
        costs = np.zeros(num_rows + 1, dtype=np.int64)
        parts_N.cumsum(out=costs[1:])
        self.num_parts = int(costs[-1])
        if num_threads > 1 and int(parts_N.max()) * ITEMS_PER_THREAD * num_threads > self.num_parts:
            return False
        if len(self._order) < num_rows:
            self._grow(2 * num_rows)
        items = self._alike[:num_rows].copy()
        items[:, 3] = ends_N
        if lows_N is not None:
            items[:, 2] = lows_N
        columns = (self._order, contexts_N, items, self._order, costs, self._direct, self._order)
        self._describe(batch, num_rows, 0, columns)
        return True

    def _begin_few(self, batch: AttentionBatch, num_threads: int) -> bool:
        """Plan a few decodes, each thread with a run of positions; return False if the step is not of this kind."""
        num_rows, heads = batch.num_rows, self._num_kv_heads
        if num_rows > FEW or batch.num_decodes < num_rows or num_threads == 1 or self._group * heads > MAX_ROWS:
            return False
        lows_N = np.maximum(batch.contexts - (self._window or MAX_ITEMS), 0)
        first_N, end_N = lows_N // PART, (batch.contexts + (PART - 1)) // PART
        counts_N = end_N - first_N
        row_P = np.repeat(np.arange(num_rows), counts_N)
        part_P = np.arange(len(row_P)) - (np.cumsum(counts_N) - counts_N - first_N)[row_P]
        sizes_P = np.minimum(part_P * PART + PART, batch.contexts[row_P]) - np.maximum(part_P * PART, lows_N[row_P])
        sizes_U = np.repeat(sizes_P, heads)  # units: the heads of each part
        ends_U = np.cumsum(sizes_U)
        owner_U = np.minimum((2 * ends_U - sizes_U) * num_threads // (2 * int(ends_U[-1])), num_threads - 1)
        units = zip(owner_U.tolist(), np.repeat(row_P, heads).tolist(), np.repeat(part_P, heads).tolist(), strict=True)
        items, owners = _rectangles(list(units), heads)
        whole_I = (items[:, 2] == first_N[items[:, 0]]) & (items[:, 3] == end_N[items[:, 0]])
        joins = np.unique(items[~whole_I, 0])
        slots = np.full(num_rows, DIRECT)
        slots[joins] = np.cumsum(counts_N[joins]) - counts_N[joins] - first_N[joins]
        self.num_parts = len(part_P)
        self._need_slots(int(counts_N[joins].sum()))
        costs = np.append(owners * MAX_ITEMS + np.arange(len(items)), num_threads * MAX_ITEMS)
        order = np.arange(num_rows)
        self._describe(batch, len(items), len(joins), (order, batch.contexts, items, order, costs, slots, joins))
        return True

    def _need_slots(self, count: int) -> None:
        if self._partial.size < count * self._slot_floats:
            self._partial = np.empty(count * self._slot_floats * 5 // 4, dtype=np.float32)

    def _describe(self, batch: AttentionBatch, num_items: int, num_joins: int, columns: tuple[Ints, ...]) -> None:
        """Fill the structure; keep the columns alive, because the structure has their addresses."""
        table_NM = batch.block_table_NM
        self._columns, self._table, self._contexts = columns, table_NM, None
        rows, contexts, items, members, costs, slots, joins = [
            column.__array_interface__["data"][0] for column in columns
        ]
        self._seen = batch.seen_T
        seen = contexts if self._seen is None else self._seen.__array_interface__["data"][0]
        self.step.__init__(  # type: ignore[misc]
            batch.num_tokens, batch.num_rows, table_NM.stride(0), table_NM.data_ptr(), rows, contexts, seen, num_items,
            items, members, costs, slots, num_joins, joins, self._partial.__array_interface__["data"][0],
        )  # fmt: skip

    def _move(self, batch: AttentionBatch) -> None:
        """Describe the previous step's items for other contexts and tables."""
        step, table_NM = self.step, batch.block_table_NM
        self._table, self._contexts = table_NM, batch.contexts
        step.table, step.table_stride = table_NM.data_ptr(), table_NM.stride(0)
        step.contexts = step.seen = batch.contexts.__array_interface__["data"][0]

    def _begin(self, batch: AttentionBatch, num_threads: int, shared: list[tuple[Ints, int, int]]) -> None:
        """Plan any step."""
        num_tokens = batch.num_tokens
        contexts_T, rows_T = batch.contexts, np.arange(batch.num_rows)
        if batch.num_rows < num_tokens:
            rows_T = np.repeat(rows_T, batch.counts)
            ends_N = np.cumsum(batch.counts)
            contexts_T = (batch.contexts - ends_N)[rows_T] + np.arange(1, num_tokens + 1)
        firsts_I, sizes_I = self._tiles(batch)
        seen_T = contexts_T if batch.seen_T is None else batch.seen_T
        tokens = contexts_T, seen_T
        items, first_slots_T, joins, num_slots = self._items(firsts_I, sizes_I, tokens, num_threads, shared)
        members = np.arange(num_tokens)
        if shared:
            members = np.concatenate((members, *(rows for rows, _, _ in shared)))
        costs = np.zeros(len(items) + 1, dtype=np.int64)
        self.num_parts = int((items[:, 3] - items[:, 2]) @ (items[:, 5] - items[:, 4])) // self._num_kv_heads
        rows_I = items[:, 1] * self._group + TURNING
        np.cumsum(rows_I * (items[:, 3] - items[:, 2]) * (items[:, 5] - items[:, 4]), out=costs[1:])
        self._need_slots(num_slots)
        columns = (rows_T, contexts_T, items, members, costs, first_slots_T, joins)
        self._describe(batch, len(items), len(joins), columns)

    def _tiles(self, batch: AttentionBatch) -> tuple[Ints, Ints]:
        """Return the first token and number of tokens of each tile, in order."""
        num_decodes = batch.num_decodes
        if num_decodes == batch.num_rows:
            return np.arange(num_decodes), np.ones(num_decodes, dtype=np.int64)
        max_tokens = max(1, MAX_ROWS // self._group)
        counts = batch.counts
        tiles_N = -(-counts // max_tokens)
        row_I = np.repeat(np.arange(batch.num_rows), tiles_N)
        index_I = np.arange(len(row_I)) - (np.cumsum(tiles_N) - tiles_N)[row_I]
        row_first_I = (np.cumsum(counts) - counts)[row_I]
        first_I = row_first_I + counts[row_I] * index_I // tiles_N[row_I]
        end_I = row_first_I + counts[row_I] * (index_I + 1) // tiles_N[row_I]
        return first_I, end_I - first_I

    def _items(
        self, firsts_I: Ints, sizes_I: Ints, tokens: tuple[Ints, Ints], num_threads: int,
        shared: list[tuple[Ints, int, int]],
    ) -> tuple[Ints, Ints, Ints, int]:  # fmt: skip
        """Return items [., 6], the first slot of each token, the tokens to join, and the number of slots."""
        heads, rows_I = self._num_kv_heads, sizes_I * self._group
        contexts_T, seen_T = tokens
        lows_I, ends_I = np.zeros_like(firsts_I), (seen_T[firsts_I + sizes_I - 1] + (PART - 1)) // PART
        if self._window is not None:
            lows_I = np.maximum(contexts_T[firsts_I] - self._window, 0) // PART
        private_I = lows_I
        if shared:
            private_I = lows_I.copy()  # decode rows are the first tiles; a shared part is always before private parts
            for members, _, end in shared:
                private_I[members] = np.maximum(private_I[members], end)
        parts_I = ends_I - private_I
        runs_I = np.minimum(np.maximum(MAX_ROWS // rows_I, 1), heads)  # KV heads of an item
        cut_I = parts_I  # parts of an item
        if num_threads > 1:
            loads_I = rows_I + TURNING
            share = max(1, int((loads_I * parts_I).sum()) * heads // (ITEMS_PER_THREAD * num_threads))
            runs_I = np.minimum(runs_I, np.maximum(share // loads_I, 1))
            cut_I = np.minimum(parts_I, np.maximum(share // (loads_I * runs_I), MIN_PARTS))
        is_cut_I = (cut_I < parts_I) | (private_I > lows_I)
        if not is_cut_I.any() and runs_I.min(initial=heads) == heads:
            zeros_I = np.zeros_like(firsts_I)
            items = np.stack((firsts_I, sizes_I, lows_I, ends_I, zeros_I, zeros_I + heads), axis=1)
            return items, np.full(len(contexts_T), DIRECT), firsts_I[:0], 0
        items = _cut(firsts_I, sizes_I, (private_I, ends_I, cut_I), heads, runs_I)
        return self._with_slots(items, (firsts_I, sizes_I, lows_I, ends_I), is_cut_I, len(contexts_T), shared)

    def _with_slots(
        self,
        items: Ints,
        tiles: tuple[Ints, Ints, Ints, Ints],
        is_cut_I: NDArray[np.bool_],
        num_tokens: int,
        shared: list[tuple[Ints, int, int]],
    ) -> tuple[Ints, Ints, Ints, int]:
        """Assign slots to the tokens of split tiles, and put the items of shared parts before all others."""
        firsts_I, sizes_I, lows_I, ends_I = tiles
        tile_T = np.repeat(np.arange(len(firsts_I)), sizes_I)
        joins = np.flatnonzero(is_cut_I[tile_T])
        tile_J = tile_T[joins]
        counts_J = (ends_I - lows_I)[tile_J]
        after_J = np.cumsum(counts_J)
        first_slots_T = np.full(num_tokens, DIRECT)
        first_slots_T[joins] = after_J - counts_J - lows_I[tile_J]
        if shared:
            at, together = num_tokens, []
            for rows, first, end in shared:
                max_tokens = max(1, MAX_ROWS // self._group)
                for start in range(0, len(rows), max_tokens):
                    count = min(max_tokens, len(rows) - start)
                    together += [
                        (at + start, count, part, part + 1, head, head + 1)
                        for part in range(first, end)
                        for head in range(self._num_kv_heads)
                    ]
                at += len(rows)
            items = np.concatenate((np.array(together, dtype=np.int64), items))
        return items, first_slots_T, joins, int(after_J[-1]) if len(after_J) else 0

    def _shared(self, batch: AttentionBatch) -> list[tuple[Ints, int, int]]:
        """Return groups of decode rows with equal blocks in parts [first, end): (rows, first, end), subgroups last."""
        contexts_N, table_NM = batch.contexts[: batch.num_decodes], batch.block_table_NM.numpy()
        starts = table_NM[: batch.num_decodes, 0].tolist()
        if len(set(starts)) == len(starts):
            return []
        full_N = contexts_N // PART
        rows = np.flatnonzero(full_N)
        shared: list[tuple[Ints, int, int]] = []
        waiting = [(rows, 0)]
        while waiting:
            rows, part = waiting.pop()
            rows = rows[full_N[rows] > part]
            by_blocks: dict[bytes, list[int]] = {}
            columns = slice(part * PART // self._block_size, -(-(part + 1) * PART // self._block_size))
            for row, blocks in zip(rows.tolist(), np.ascontiguousarray(table_NM[rows, columns]), strict=True):
                by_blocks.setdefault(blocks.tobytes(), []).append(row)
            for same in by_blocks.values():
                if len(same) > 1:
                    group = np.array(same)
                    agreed_M = (table_NM[group] == table_NM[group[0]]).all(axis=0)
                    num_agreed = int(np.argmin(agreed_M)) if not agreed_M.all() else len(agreed_M)
                    end = min(num_agreed * self._block_size // PART, int(full_N[group].min()))
                    shared.append((group, part, max(end, part + 1)))
                    waiting.append((group, max(end, part + 1)))
        return shared


def _rectangles(units: list[tuple[int, int, int]], heads: int) -> tuple[Ints, Ints]:
    """Return items [., 6] and their threads. `units` is (thread, row, part) for each head of each part, in order."""
    items: list[list[int]] = []
    owners: list[int] = []
    for index, (owner, row, part) in enumerate(units):
        head = index % heads
        last = items[-1] if items and owners[-1] == owner and items[-1][0] == row else None
        if last is not None and last[3] == part + 1:
            last[5] = head + 1
        else:
            items.append([row, 1, part, part + 1, head, head + 1])
            owners.append(owner)
        if head == heads - 1 and len(items) > 1 and owners[-2] == owner and items[-2][0] == row:
            before, whole = items[-2], items[-1]
            if before[4:] == whole[4:] == [0, heads]:  # extend the previous item, which has all heads
                before[3] = part + 1
                items.pop()
                owners.pop()
    return np.array(items, dtype=np.int64), np.array(owners, dtype=np.int64)


def _cut(firsts_I: Ints, sizes_I: Ints, parts: tuple[Ints, Ints, Ints], heads: int, runs_I: Ints) -> Ints:
    """Split tiles into items [., 6] of up to `cut` parts and `runs_I` KV heads. `parts` is (low, end, cut) per tile."""
    lows_I, ends_I, cut_I = parts
    turns_I = -(-heads // runs_I)
    cuts_I = np.where(ends_I > lows_I, -(-(ends_I - lows_I) // np.maximum(cut_I, 1)), 0)
    tile = np.repeat(np.arange(len(firsts_I)), turns_I * cuts_I)
    index = np.arange(len(tile)) - (np.cumsum(turns_I * cuts_I) - turns_I * cuts_I)[tile]
    cut, turn = index // turns_I[tile], index % turns_I[tile]
    low = lows_I[tile] + cut * cut_I[tile]
    first_head = turn * runs_I[tile]
    return np.stack(
        (
            firsts_I[tile], sizes_I[tile], low, np.minimum(low + cut_I[tile], ends_I[tile]),
            first_head, np.minimum(first_head + runs_I[tile], heads),
        ),
        axis=1,
    )  # fmt: skip
