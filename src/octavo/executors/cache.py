"""The KV cache of an executor: one pool and one attention backend per group of layers, and the host tier.

Owns: the assignment of layers to groups, block copies, the host tier's memory, and populating pages of memory before
a step needs them. Does not: choose blocks or hold block tables.
Invariants: groups with full attention, if there are any, are first; sliding groups follow, the widest window first.
A group's pool holds only that group's layers and has its own block numbers. Copies run on the device's current stream,
and the host does not wait for them. Populating changes no byte, so it may run while steps write. It pauses while steps
run, for up to MAX_PAUSE_S, keeps no pool alive, and stops when less than an eighth of the machine's memory is free.
Shapes: N blocks, X bytes of a block.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import sys
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from octavo import machine
from octavo.core.limits import GroupKind, GroupSpec
from octavo.core.plan import StepPlan
from octavo.errors import EngineError
from octavo.executors.slots import from_packed
from octavo.ops.attention import (
    AttentionBackend,
    AttentionBatch,
    GroupedAttention,
    KVPool,
    LayerAttention,
    PoolShape,
)
from octavo.ops.attention_triton import WorkPlanner
from octavo.sampling.columns import Ints, upload


@runtime_checkable
class PlannedAttention(Protocol):
    """An AttentionBackend whose work is listed on the host, apart from `begin` (ops.attention_triton)."""

    planner: WorkPlanner


MakeAttention = Callable[[KVPool, Sequence[LayerAttention]], AttentionBackend]  # arguments: a pool, its layers

# Memory is allocated in slabs of this size: torch rounds a pinned tensor up to a power of two, which could double it.
SLAB_BYTES = 64 << 20
STAGING_BYTES = 64 << 20  # device memory that a copy between the tiers uses at most, besides the pool

AT_ONCE_BYTES = 16 << 20  # some 15 ms; larger pools are populated by a thread
STRIPE_BYTES = 2 << 20  # of each layer's keys and values per call; a call locks the process's memory map
FREE_SHARE = 8
TOUCH_S = 0.25  # time limit if the kernel cannot populate while others write
QUIET_S = 0.1  # without a step, before populating continues
AHEAD_TOKENS = 8192  # beyond the blocks in use, populated also while steps run

_MADV_POPULATE_WRITE = 23  # Linux 5.14


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """How a model's layers are cached: the groups, and of each group the shape of its pool and its layers' attention.

    A rank that has only `own_layers` (None: all) has the same groups, since block tables are common to all ranks; its
    pools hold its own layers, and its `block_bytes` count these only. A pool without layers has some layer's shape.
    """

    groups: tuple[GroupSpec, ...]
    shapes: tuple[PoolShape, ...]  # of pools without blocks
    attention: tuple[tuple[LayerAttention, ...], ...]
    own_layers: range | None = None

    @classmethod
    def of(
        cls,
        attention: Sequence[LayerAttention],
        max_model_len: int,
        block_size: int,
        dtype: torch.dtype,
        own_layers: range | None = None,
    ) -> CacheLayout:
        """Group the model's layers by window and heads. A window of `max_model_len` or more is full attention."""
        attention = [
            replace(one, window=None) if one.window is not None and one.window >= max_model_len else one
            for one in attention
        ]
        by_kind: dict[tuple[int, int, int, int, int], list[int]] = {}
        for layer, one in enumerate(attention):
            kind = (one.window or 0, one.num_heads, one.num_kv_heads, one.head_dim, one.value_dim)
            by_kind.setdefault(kind, []).append(layer)
        groups, shapes, of_groups = [], [], []
        for kind in sorted(by_kind, key=lambda kind: (kind[0] > 0, -kind[0])):
            window, _, num_kv_heads, head_dim, value_dim = kind
            own = layers_here(by_kind[kind], own_layers)
            shape = PoolShape(len(own), 0, block_size, num_kv_heads, head_dim, value_dim, dtype)
            group_kind = GroupKind.SLIDING if window else GroupKind.FULL
            groups.append(GroupSpec(group_kind, window, shape.block_bytes, tuple(by_kind[kind])))
            shapes.append(shape)
            of_groups.append(tuple(attention[layer] for layer in own or by_kind[kind]))
        return cls(tuple(groups), tuple(shapes), tuple(of_groups), own_layers)

    def allocate(self, num_blocks: Sequence[int], device: torch.device) -> list[KVPool]:
        """Allocate the pool of each group."""
        shapes = zip(self.shapes, num_blocks, strict=True)
        return [KVPool(replace(shape, num_blocks=count), device) for shape, count in shapes]


def layers_here(layers: Sequence[int], own_layers: range | None) -> list[int]:
    """Return those of a group's layers that this rank has (None: all)."""
    return [layer for layer in layers if own_layers is None or layer in own_layers]


class CacheGroups:
    """The pools, host pools and attention backends of all groups. Pass `attention` to the decoder's `forward`."""

    def __init__(
        self, layout: CacheLayout, pools: Sequence[KVPool], host_blocks: Sequence[int], make_attention: MakeAttention
    ) -> None:
        self.groups = layout.groups
        self.pools = tuple(pools)
        self._hosts = tuple(HostPool(pool, count) for pool, count in zip(pools, host_blocks, strict=False))
        backends = [make_attention(pool, layers) for pool, layers in zip(pools, layout.attention, strict=True)]
        self._backends = backends
        self.reads_unwritten = any(backend.reads_unwritten for backend in backends)
        # a single group has all layers: use the backend itself, at no cost per layer
        is_single = len(backends) == 1 and layout.own_layers is None
        self.attention = backends[0] if is_single else _by_layer(layout, backends)

    @property
    def planners(self) -> list[WorkPlanner | None]:
        """What lists the work of each group's kernels; None for a backend that finds its work in `begin`."""
        return [backend.planner if isinstance(backend, PlannedAttention) else None for backend in self._backends]

    def begin(self, batches: Sequence[AttentionBatch]) -> None:
        """Start a step in each group's attention backend."""
        for backend, batch in zip(self._backends, batches, strict=True):
            backend.begin(batch)

    def clear(self, blocks_by_group: Sequence[Ints]) -> None:
        """Zero these blocks of each group; needed if an attention backend `reads_unwritten` positions."""
        for pool, blocks in zip(self.pools, blocks_by_group, strict=True):
            if len(blocks):
                pool.clear_blocks(upload(pool.device, blocks)[0])

    def move_blocks(self, plan: StepPlan) -> None:
        """Apply the plan's swap-outs, host loads and copies, in this order. Raises EngineError without a host tier."""
        if plan.swap_outs or plan.host_loads:
            if not self._hosts:
                raise EngineError("this executor has no host tier; it cannot swap blocks or load them back")
            for group, (sources, destinations) in self._pairs(plan.swap_outs):
                self._hosts[group].put(sources, destinations)
            for group, (sources, destinations) in self._pairs(plan.host_loads):
                self._hosts[group].get(sources, destinations)
        for group, (sources, destinations) in self._pairs(plan.copies):
            pool = self.pools[group]
            pool.copy_blocks(*upload(pool.device, sources, destinations))

    def _pairs(self, column: array[int]) -> list[tuple[int, tuple[Ints, Ints]]]:
        """Split a flat column of (group, source, destination); return (group, (sources, destinations)) pairs."""
        if not column:
            return []
        entries = from_packed(column).reshape(-1, 3)
        assert 0 <= entries[:, 0].min() <= entries[:, 0].max() < len(self.pools), "an effect names an unknown group"
        parts = [(group, entries[entries[:, 0] == group]) for group in range(len(self.pools))]
        return [(group, (part[:, 1], part[:, 2])) for group, part in parts if len(part)]


def _by_layer(layout: CacheLayout, backends: Sequence[AttentionBackend]) -> GroupedAttention:
    """Map each of this rank's layers to its group's backend and to the layer's index in the group's pool."""
    return GroupedAttention(
        {
            layer: (backend, local)
            for group, backend in zip(layout.groups, backends, strict=True)
            for local, layer in enumerate(layers_here(group.layers, layout.own_layers))
        }
    )


class HostPool:
    """Host memory for `num_blocks` blocks, each of the bytes of a device block; `put` writes it and `get` reads it.

    On CUDA the copies run on a stream of their own, in order: steps do not wait for `put`, and `get` is awaited on the
    device. Blocks that are neighbours on both sides are one copy.
    """

    def __init__(self, pool: KVPool, num_blocks: int) -> None:
        shape = pool.shape
        self._pool = pool
        self._num_blocks = num_blocks
        block_bytes = max(1, shape.block_bytes)  # a rank may have no layer of a group
        self._per_slab = max(1, SLAB_BYTES // block_bytes)
        self._staged = max(1, STAGING_BYTES // block_bytes)
        is_cuda = pool.device.type == "cuda"
        make_stream: Any = torch.cuda.Stream  # it has no types
        self._stream = make_stream(pool.device) if is_cuda else None
        self._slabs = [
            torch.empty(
                (min(self._per_slab, num_blocks - first), shape.block_bytes), dtype=torch.uint8, pin_memory=is_cuda
            )
            for first in range(0, num_blocks, self._per_slab)
        ]

    def put(self, device_blocks: Ints, host_blocks: Ints) -> None:
        """Copy device blocks to host blocks."""
        for first in range(0, len(device_blocks), self._staged):
            part = slice(first, first + self._staged)
            content_NX = self._pool.read_blocks(upload(self._pool.device, device_blocks[part])[0])
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.current_stream())
                content_NX.record_stream(self._stream)
            with torch.cuda.stream(self._stream):
                for host_NX, where in self._runs(host_blocks[part]):
                    host_NX.copy_(content_NX[where], non_blocking=True)

    def get(self, host_blocks: Ints, device_blocks: Ints) -> None:
        """Copy host blocks to device blocks; no device block may occur twice."""
        for first in range(0, len(host_blocks), self._staged):
            hosts = host_blocks[first : first + self._staged]
            with torch.cuda.stream(self._stream):
                size = len(hosts), self._pool.shape.block_bytes
                content_NX = torch.empty(size, dtype=torch.uint8, device=self._pool.device)
                for host_NX, where in self._runs(hosts):
                    content_NX[where].copy_(host_NX, non_blocking=True)
            if self._stream is not None:
                torch.cuda.current_stream().wait_stream(self._stream)
                content_NX.record_stream(torch.cuda.current_stream())
            blocks = upload(self._pool.device, device_blocks[first : first + self._staged])[0]
            self._pool.write_blocks(blocks, content_NX)

    def _runs(self, blocks: Ints) -> Iterator[tuple[Tensor, slice]]:
        """Yield the memory of each run of ascending neighbours of one slab, and the run's place among `blocks`."""
        assert 0 <= blocks.min() <= blocks.max() < self._num_blocks, f"host blocks {blocks} of {self._num_blocks}"
        breaks = np.flatnonzero((np.diff(blocks) != 1) | (blocks[1:] % self._per_slab == 0)) + 1
        for begin, end in pairwise([0, *breaks.tolist(), len(blocks)]):
            slab, row = divmod(int(blocks[begin]), self._per_slab)
            yield self._slabs[slab][row : row + end - begin], slice(begin, end)


class Steps:
    """Whether an executor runs steps, and the blocks that they use: the pool names unused blocks in ascending order.

    The executor's thread writes it; the thread that populates pages reads it.
    """

    def __init__(self) -> None:
        self._until = -math.inf
        self.num_blocks = 0  # all blocks that were used are below

    def begin(self, blocks: Iterable[int] = ()) -> None:
        """Record that a step begins, which appends `blocks` to its sequences."""
        self._until = math.inf
        self.num_blocks = max(self.num_blocks, max(blocks, default=-1) + 1)

    def end(self) -> None:
        """Record that the step ended."""
        self._until = time.monotonic() + QUIET_S

    @property
    def are_running(self) -> bool:
        """True if a step runs, or ended less than QUIET_S ago."""
        return time.monotonic() < self._until


def make_resident(pools: Sequence[KVPool], steps: Steps | None = None) -> threading.Thread | None:
    """Populate the pools' pages, lowest blocks first; return the thread that does it, or None if none was started.

    While `steps` are running, the thread populates only the blocks that they use and those of the next AHEAD_TOKENS.

    Without this, the first step that uses a block waits for the block's pages, which can be one huge page for the keys
    and one for the values of each layer. Call it before the pools are used: if the kernel lacks MADV_POPULATE_WRITE,
    the call zeroes the pages instead, for at most TOUCH_S seconds.
    """
    pools = [pool for pool in pools if pool.device.type == "cpu"]
    populate = _populate()
    if populate is None:
        _touch(pools)
        return None
    if sum(pool.shape.block_bytes * pool.shape.num_blocks for pool in pools) <= AT_ONCE_BYTES:
        _populate_all(populate, [weakref.ref(pool) for pool in pools], Steps())
        return None
    arguments = (populate, [weakref.ref(pool) for pool in pools], steps or Steps(), True)
    # No daemon: the thread may free a pool's tensors, and the process aborts if the interpreter ends a thread in that.
    thread = threading.Thread(target=_populate_all, args=arguments, name="octavo-kv-pages")
    thread.start()
    return thread


@cache
def _populate() -> Callable[[int, int], bool] | None:
    """Return a function of (address, size in bytes) that populates, or None if the kernel does not support it."""
    if sys.platform != "linux":
        return None
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def populate(address: int, size: int) -> bool:
        begin = address // mmap.PAGESIZE * mmap.PAGESIZE
        return bool(madvise(begin, address + size - begin, _MADV_POPULATE_WRITE) == 0)

    page = mmap.mmap(-1, mmap.PAGESIZE)
    return populate if populate(ctypes.addressof(ctypes.c_char.from_buffer(page)), mmap.PAGESIZE) else None


def _populate_all(
    populate: Callable[[int, int], bool], refs: Sequence[weakref.ref[KVPool]], steps: Steps, is_idle_work: bool = False
) -> None:
    if is_idle_work:  # what this thread takes of a core, a step's thread would lack, and the other threads wait for it
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # of this thread alone, on Linux
    begin, is_more, main = 0, True, threading.main_thread()  # when that ends, the interpreter waits for this thread
    while is_more:
        is_more = False
        for ref in refs:
            while steps.are_running and main.is_alive() and _is_far(ref(), begin, steps.num_blocks):
                time.sleep(QUIET_S)
            pool = ref()
            total, free = machine.usable_memory()
            if pool is None or free < total // FREE_SHARE:
                return
            for plane in (*pool.keys, *pool.values):
                size = min(STRIPE_BYTES, plane.nbytes - begin)
                if size > 0 and not (main.is_alive() and populate(plane.data_ptr() + begin, size)):
                    return
                is_more = is_more or begin + STRIPE_BYTES < plane.nbytes
            del pool  # keep no reference during the next pause, so that the pool can be freed
        begin += STRIPE_BYTES


def _is_far(pool: KVPool | None, begin: int, num_blocks: int) -> bool:
    """Return True if a byte offset of each layer's keys is over AHEAD_TOKENS beyond the first `num_blocks` blocks."""
    if pool is None:
        return False
    block_bytes = pool.keys[0].nbytes // pool.shape.num_blocks
    return (begin // block_bytes - num_blocks) * pool.shape.block_size > AHEAD_TOKENS


def _touch(pools: Sequence[KVPool]) -> None:
    """Zero the pools for at most TOUCH_S seconds. Nothing else may write to the pools yet."""
    end = time.monotonic() + TOUCH_S
    for pool in pools:
        blocks = max(1, STRIPE_BYTES * pool.shape.num_layers // max(1, pool.shape.block_bytes))
        for begin in range(0, pool.shape.num_blocks, blocks):
            if time.monotonic() > end:
                return
            for plane in (*pool.keys, *pool.values):
                plane[begin : begin + blocks].zero_()
