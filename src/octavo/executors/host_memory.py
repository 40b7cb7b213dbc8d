"""Populate the memory of a CPU executor's KV pools, so that its pages exist before a step needs them.

Owns: populating the pools. Does not: allocate them (ops.attention_pool does).
Invariants: populating changes no byte, so it may run beside steps that write, though it yields to them for up to
MAX_PAUSE_S; it keeps no pool alive, and stops when less than an eighth of the machine's memory is free.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cache

from octavo import machine
from octavo.ops.attention_pool import KVPool

AT_ONCE_BYTES = 16 << 20  # some 15 ms; larger pools are populated by a thread
STRIPE_BYTES = 2 << 20  # of each layer's keys and values per call, in which the kernel locks the process's memory map
FREE_SHARE = 8
TOUCH_S = 0.25  # time limit if the kernel cannot populate beside other writers
QUIET_S = 0.1  # without a step, before populating continues
MAX_PAUSE_S = 5.0  # total wait for steps: a standby resumes 32 requests in 1 s, or in 2 s while populating

_MADV_POPULATE_WRITE = 23  # Linux 5.14


class Steps:
    """Flag that an executor runs steps. Written by the executor's thread, read by the one that populates."""

    def __init__(self) -> None:
        self._until = -math.inf

    def begin(self) -> None:
        """Record that a step begins."""
        self._until = math.inf

    def end(self) -> None:
        """Record that it ended."""
        self._until = time.monotonic() + QUIET_S

    @property
    def are_running(self) -> bool:
        """True if a step runs, or ended less than QUIET_S ago."""
        return time.monotonic() < self._until


def make_resident(pools: Sequence[KVPool], steps: Steps | None = None) -> threading.Thread | None:
    """Populate the pools' pages, lowest blocks first; return the thread that does it, None if it is done already.

    The thread waits while `steps` are running, for at most MAX_PAUSE_S.

    Otherwise the first step that uses a block would wait for its pages, which can be a huge page for the keys and one
    for the values of each layer. Call it before the pools are used: without MADV_POPULATE_WRITE this call touches the
    pages instead, for at most TOUCH_S seconds.
    """
    pools = [pool for pool in pools if pool.device.type == "cpu"]
    populate = _populate()
    if populate is None:
        _touch(pools)
        return None
    if sum(pool.shape.block_bytes * pool.shape.num_blocks for pool in pools) <= AT_ONCE_BYTES:
        _populate_all(populate, [weakref.ref(pool) for pool in pools], Steps())
        return None
    arguments = (populate, [weakref.ref(pool) for pool in pools], steps or Steps())
    thread = threading.Thread(target=_populate_all, args=arguments, name="octavo-kv-pages", daemon=True)
    thread.start()
    return thread


@cache
def _populate() -> Callable[[int, int], bool] | None:
    """Return a function of an address and a size in bytes that populates, or None if the kernel does not support it."""
    if sys.platform != "linux":
        return None
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def populate(address: int, size: int) -> bool:
        begin = address // mmap.PAGESIZE * mmap.PAGESIZE
        return bool(madvise(begin, address + size - begin, _MADV_POPULATE_WRITE) == 0)

    page = mmap.mmap(-1, mmap.PAGESIZE)
    return populate if populate(ctypes.addressof(ctypes.c_char.from_buffer(page)), mmap.PAGESIZE) else None


def _populate_all(populate: Callable[[int, int], bool], refs: Sequence[weakref.ref[KVPool]], steps: Steps) -> None:
    begin, is_more, pauses = 0, True, int(MAX_PAUSE_S / QUIET_S)
    while is_more:
        is_more = False
        for ref in refs:
            while steps.are_running and pauses > 0:
                pauses -= 1
                time.sleep(QUIET_S)
            pool = ref()
            total, free = machine.usable_memory()
            if pool is None or free < total // FREE_SHARE:
                return
            for plane in (*pool.keys, *pool.values):
                size = min(STRIPE_BYTES, plane.nbytes - begin)
                if size > 0 and not populate(plane.data_ptr() + begin, size):
                    return
                is_more = is_more or begin + STRIPE_BYTES < plane.nbytes
            del pool  # it may be dropped meanwhile
        begin += STRIPE_BYTES


def _touch(pools: Sequence[KVPool]) -> None:
    """Zero the pools, which nothing else may write to yet, for at most TOUCH_S seconds."""
    end = time.monotonic() + TOUCH_S
    for pool in pools:
        blocks = max(1, STRIPE_BYTES * pool.shape.num_layers // pool.shape.block_bytes)
        for begin in range(0, pool.shape.num_blocks, blocks):
            if time.monotonic() > end:
                return
            for plane in (*pool.keys, *pool.values):
                plane[begin : begin + blocks].zero_()
