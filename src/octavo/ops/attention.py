"""The interface between a model's layers and paged attention, and a slow reference backend.

Owns: how a layer attends, the KV memory (allocation, null block, copies, clearing), a backend's two methods and its
inputs per step, and ReferenceAttention. Does not: optimise for speed, or know which sequences hold a block (core does).
Shapes: T tokens of the step, N rows, M table width, H query heads, K KV heads, D size of keys, V size of values,
L layers, B blocks, S block size, C context of one row, X bytes.
Invariants: rows of one token are first, before longer rows; for backends that read unwritten positions, they are in
ascending order of context length. A row's tokens are adjacent. A token's query sees exactly the positions up to its own
(and inside the window). Block `null_block` is all zero and is never written. A position not written since its block was
cleared is zero, so masked values are finite and add exactly zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops import kv_codes

HostColumn = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class LayerAttention:
    """How one layer attends.

    A score is `scale` times the product of query and key; `soft_cap` c makes it c * tanh(score / c); then a slope (of
    ALiBi) adds slope * (key's position - query's position). A sink is one more score of its head, whose weight is
    dropped after the softmax (GPT-OSS). `window` counts the positions that a query sees, its own included.
    Queries and keys have `head_dim` numbers, values and the output's heads `value_dim`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks_H: Tensor | None = None
    slopes_H: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """True if the weights are the softmax of scaled products."""
        return self.soft_cap is None and self.sinks_H is None and self.slopes_H is None

    def weights(self, scores: Tensor, distance: Tensor, hidden: Tensor) -> Tensor:
        """Return the attention weights [H, ..., C] of products of queries and keys; float32.

        `distance` is key's minus query's position, and `hidden` is True where a query does not see a key.
        """
        per_head = (-1, *(1 for _ in scores.shape[1:]))
        scores = scores * self.scale
        if self.soft_cap is not None:
            scores = (scores / self.soft_cap).tanh() * self.soft_cap
        if self.slopes_H is not None:
            scores = scores + self.slopes_H.to(scores).view(per_head) * distance
        scores = scores.masked_fill(hidden, float("-inf"))
        if self.sinks_H is None:
            return scores.softmax(dim=-1)
        sinks = self.sinks_H.to(scores).view(per_head).expand(*scores.shape[:-1], 1)
        return torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Sizes of the pool; `num_blocks` does not count the null block."""

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, keys and values of all layers."""
        sizes = sum(prod(self.row_shape(size)) for size in (self.head_dim, self.value_dim))
        return self.num_layers * self.block_size * sizes * self.dtype.itemsize

    def row_shape(self, size: int) -> tuple[int, ...]:
        """Return the shape of one position's keys or values, whose heads have `size` numbers."""
        return kv_codes.row_shape(self.dtype, self.num_kv_heads, size)


class KVPool:
    """Paged keys and values: `keys` and `values` have each layer's [B + 1, S, *row_shape].

    On a CPU the kernel provides zeroed memory, page by page on first use.
    """

    def __init__(self, shape: PoolShape, device: torch.device) -> None:
        self.shape = shape
        self.null_block = shape.num_blocks
        self._planes = tuple(self._allocate(size, device) for size in (shape.head_dim, shape.value_dim))
        self.keys: tuple[Tensor, ...] = self._planes[0].unbind(0)
        self.values: tuple[Tensor, ...] = self._planes[1].unbind(0)

    def _allocate(self, head_size: int, device: torch.device) -> Tensor:
        shape, dtype = self.shape, kv_codes.stored_dtype(self.shape.dtype)
        size = (shape.num_layers, shape.num_blocks + 1, shape.block_size, *shape.row_shape(head_size))
        if device.type == "cpu" and shape.num_layers:  # a rank may have no layer of a cache group
            # numpy's zeros is calloc, which touches no page; torch.zeros would write every page
            raw = np.zeros(prod(size) * dtype.itemsize, dtype=np.uint8)
            return torch.from_numpy(raw).view(dtype).view(size)
        return torch.zeros(size, dtype=dtype, device=device)

    @property
    def device(self) -> torch.device:
        """The pool's device."""
        return self._planes[0].device

    def write(self, layer: int, slots_T: Tensor, k_TKD: Tensor, v_TKV: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values of tokens at flat positions, block * block_size + offset; return them as rounded."""
        k_TR, v_TR = (kv_codes.encode(x_TKX, self.shape.dtype) for x_TKX in (k_TKD, v_TKV))
        self.keys[layer].flatten(0, 1).index_copy_(0, slots_T, k_TR)
        self.values[layer].flatten(0, 1).index_copy_(0, slots_T, v_TR)
        return self.read(k_TR, v_TR)

    def read(self, k_rows: Tensor, v_rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows [..., *row_shape] as numbers [..., K, D] and [..., K, V]: float32 if the pool has 8 bits."""
        shape = self.shape
        decode = partial(kv_codes.decode, dtype=shape.dtype, num_heads=shape.num_kv_heads)
        return decode(k_rows, size=shape.head_dim), decode(v_rows, size=shape.value_dim)

    def read_blocks(self, blocks: Tensor) -> Tensor:
        """Return a copy of blocks of every layer, bytes [len(blocks), block_bytes]: all keys, then all values."""
        content_NX = torch.empty((len(blocks), self.shape.block_bytes), dtype=torch.uint8, device=self.device)
        for plane, part_LNX in self._parts(content_NX):
            part_LNX.copy_(plane.index_select(1, blocks))
        return content_NX

    def write_blocks(self, blocks: Tensor, content_NX: Tensor) -> None:
        """Overwrite blocks in every layer with bytes that `read_blocks` returned; no block may occur twice."""
        for plane, part_LNX in self._parts(content_NX):
            plane.index_copy_(1, blocks, part_LNX)

    def _parts(self, content_NX: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return each plane with its part of the blocks' bytes, as a view of the plane's type and order."""
        parts, first = [], 0
        for plane in self._planes if self.shape.num_layers else ():
            size = (plane.shape[0], *plane.shape[2:])
            end = first + prod(size) * plane.itemsize
            part_NX = content_NX[:, first:end].view(plane.dtype)
            parts.append((plane, part_NX.view(-1, *size).transpose(0, 1)))
            first = end
        return parts

    def copy_blocks(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy blocks in every layer; all sources are read before a destination is written."""
        for plane in self._planes:
            plane.index_copy_(1, destinations, plane.index_select(1, sources))

    def clear_blocks(self, blocks: Tensor) -> None:
        """Zero blocks in every layer."""
        for plane in self._planes:
            plane.index_fill_(1, blocks, 0)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceRows:
    """What kernels read of a step's rows: int32 tensors on the device, so that a captured graph fits any step.

    Row n has tokens [first_token_N1[n], first_token_N1[n + 1]) and row slots_N[n] of the group's whole block table. A
    row of context 0 pads the step: its result is zero. The work lists are those of ops.attention_triton.AttentionWork;
    `num_work_3` says how much of each is used. `num_parts` is how many partial results there is room for.
    """

    first_token_N1: Tensor
    contexts_N: Tensor
    slots_N: Tensor
    table_SM: Tensor
    shared_N2: Tensor
    items_I4: Tensor
    joins_J4: Tensor
    tiles_P4: Tensor
    num_work_3: Tensor
    num_parts: int
    seen_T: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class HostTables:
    """A group's block tables on the host: row n of a step has row slots_N[n] of `table_SM`."""

    table_SM: HostColumn
    slots_N: HostColumn
    block_size: int


@dataclass(slots=True)
class AttentionBatch:
    """Attention's inputs of one step: device tensors with host copies, so that reading a size needs no sync.

    `slot_mapping_T` is block * block_size + offset, the flat pool position of each token's KV.
    `block_table_NM` holds block numbers. Entries after a row's last block are the pool's null block; entries before a
    window may be any block of the pool, with any content. Index tensors are int64.
    `counts` and `contexts` are host copies per row; rows [0, num_decodes) have one token each. `seen_T`, on the host,
    is how many positions each token sees if some tokens see positions after their own, which are in this step; it
    ascends within a row. None: a token sees the positions up to its own. `device` is what kernels of CUDA devices
    read; their backend builds it from the rest where it is None. These do not write the KV of a slot of -1.
    `host_tables` are the block tables on the host if rows that share blocks shall be attended together.
    """

    num_tokens: int
    num_rows: int
    num_decodes: int
    positions_T: Tensor
    slot_mapping_T: Tensor
    block_table_NM: Tensor
    counts: HostColumn
    contexts: HostColumn
    seen_T: HostColumn | None = None
    device: DeviceRows | None = None
    host_tables: HostTables | None = None


class AttentionBackend(Protocol):
    """Paged attention over one pool. Call `begin` once per step, then `attend` once per layer, in order.

    `reads_unwritten`: the backend reads (and masks) positions after a context, so a block must be cleared before its
    first use.
    """

    reads_unwritten: bool

    def begin(self, batch: AttentionBatch) -> None:
        """Prepare what all layers share: indices, masks, buckets."""
        ...

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKV: Tensor) -> Tensor:
        """Write the step's K and V of `layer` into the pool, attend causally, and return o_THV.

        The result may be a buffer that the next call overwrites.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class KVPlace:
    """Where a step's keys and values of one layer are written: a pool's planes, its type, and flat positions.

    A token whose position is -1 is not written.
    """

    keys: Tensor
    values: Tensor
    dtype: torch.dtype
    slots_T: Tensor


@runtime_checkable
class PlacedAttention(AttentionBackend, Protocol):
    """A backend for which another kernel, such as the rotation, can write keys and values."""

    def place(self, layer: int) -> KVPlace | None:
        """Return where this step's keys and values belong; None: give them to `attend`."""
        ...

    def attend_placed(self, layer: int, q_THD: Tensor) -> Tensor:
        """Attend as `attend` does, after the step's keys and values were written at `place(layer)`."""
        ...


class GroupedAttention:
    """An AttentionBackend over several cache groups. `places` has each layer's backend and the layer's index there.

    A rank that has only some of a model's layers has places for these.
    """

    reads_unwritten = True  # CacheGroups asks each group's own backend

    def __init__(self, places: Mapping[int, tuple[AttentionBackend, int]]) -> None:
        self.places = dict(places)
        self._placed = {
            layer: (backend, local)
            for layer, (backend, local) in self.places.items()
            if isinstance(backend, PlacedAttention)
        }

    def begin(self, batch: AttentionBatch) -> None:
        """Raise AssertionError, because each group has its own batch."""
        raise AssertionError("each cache group's attention begins by itself")

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKV: Tensor) -> Tensor:
        """Attend in the layer's group."""
        backend, local = self.places[layer]
        return backend.attend(local, q_THD, k_TKD, v_TKV)

    def place(self, layer: int) -> KVPlace | None:
        """Return the place in the layer's group, None if its backend writes by itself."""
        placed = self._placed.get(layer)
        return None if placed is None else placed[0].place(placed[1])

    def attend_placed(self, layer: int, q_THD: Tensor) -> Tensor:
        """Attend in the layer's group."""
        backend, local = self._placed[layer]
        return backend.attend_placed(local, q_THD)


class ReferenceAttention:
    """An AttentionBackend that loops over rows in Python; softmax and products are in float32."""

    reads_unwritten = True

    def __init__(self, pool: KVPool, layers: Sequence[LayerAttention]) -> None:
        self._pool = pool
        self._layers = tuple(layers)
        self._batch: AttentionBatch | None = None

    def begin(self, batch: AttentionBatch) -> None:
        """Keep the step's batch."""
        self._batch = batch

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKV: Tensor) -> Tensor:
        """Write this step's keys and values, then attend each row by itself."""
        batch, own = self._batch, self._layers[layer]
        assert batch is not None, "attend before begin"
        self._pool.write(layer, batch.slot_mapping_T, k_TKD, v_TKV)
        keys, values = self._pool.keys[layer].flatten(0, 1), self._pool.values[layer].flatten(0, 1)
        output_THV = q_THD.new_empty((q_THD.shape[0], own.num_heads, own.value_dim))
        group, start = own.num_heads // own.num_kv_heads, 0
        for row, (count, context) in enumerate(zip(batch.counts.tolist(), batch.contexts.tolist(), strict=True)):
            end = start + count
            # positions before the first query's window are not read: other sequences may hold their blocks
            first = 0 if own.window is None else max(0, context - count - own.window + 1)
            where_C = torch.arange(first, context, device=keys.device)
            size = self._pool.shape.block_size
            slots_C = batch.block_table_NM[row][where_C // size] * size + where_C % size
            k_CKD, v_CKV = self._pool.read(keys[slots_C], values[slots_C])
            k_HCD = k_CKD.float().transpose(0, 1).repeat_interleave(group, dim=0)
            v_HCV = v_CKV.float().transpose(0, 1).repeat_interleave(group, dim=0)
            scores_HTC = q_THD[start:end].float().transpose(0, 1) @ k_HCD.transpose(1, 2)
            distance_TC = where_C - batch.positions_T[start:end, None]
            hidden_TC = distance_TC > 0
            if batch.seen_T is not None:
                hidden_TC = where_C >= torch.from_numpy(batch.seen_T[start:end, None]).to(keys.device)
            if own.window is not None:
                hidden_TC |= distance_TC <= -own.window
            weights_HTC = own.weights(scores_HTC, distance_TC, hidden_TC)
            output_THV[start:end] = (weights_HTC @ v_HCV).transpose(0, 1).to(q_THD.dtype)
            start = end
        return output_THV
