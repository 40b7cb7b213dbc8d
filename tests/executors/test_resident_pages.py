"""A pool's pages are there before steps use them."""

import ctypes
import gc
import mmap
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from octavo import machine
from octavo.core.plan import StepPlan
from octavo.executors import cache
from octavo.ops.attention import KVPool, PoolShape
from tests.executors.conformance import SPEC
from tests.executors.test_torch_executor import make

can_populate = pytest.mark.skipif(cache._populate() is None, reason="the kernel has no MADV_POPULATE_WRITE")

FRESH_BYTES = 48 << 20  # malloc maps what is above 32 MiB; less may be memory that was used before


def pool_of(size_bytes):
    """A pool whose pages are not there: memory that earlier tests freed may be given again, resident."""
    shape = PoolShape(4, 0, 16, 2, 64, 64, torch.float32)
    pool = KVPool(replace(shape, num_blocks=size_bytes // shape.block_bytes), torch.device("cpu"))
    for plane in (*pool.keys, *pool.values):
        begin = -(-plane.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (plane.data_ptr() + plane.nbytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
        assert ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_DONTNEED) == 0
    return pool


def resident_share(pool):
    """The share of the pool's pages that are in memory, as the kernel says (mincore)."""
    present = total = 0
    for plane in (*pool.keys, *pool.values):
        begin = plane.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        size = plane.data_ptr() + plane.nbytes - begin
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(size), pages) == 0
        present += sum(page & 1 for page in pages)
        total += len(pages)
    return present / total


@can_populate
@pytest.mark.parametrize("size_bytes", [1 << 20, cache.AT_ONCE_BYTES])
def test_a_small_pool_is_resident_at_once(size_bytes):
    pool = pool_of(size_bytes)
    assert cache.make_resident([pool]) is None
    assert resident_share(pool) == 1


@can_populate
def test_a_large_pool_becomes_resident_and_keeps_what_is_written_meanwhile():
    pool = pool_of(2 * FRESH_BYTES)
    assert resident_share(pool) < 0.1
    thread = cache.make_resident([pool])
    assert thread is not None
    values = torch.arange(len(pool.keys[0]), dtype=torch.float32)
    for plane in (*pool.values, *pool.keys):
        plane += values[:, None, None, None]
    thread.join()
    assert resident_share(pool) == 1
    for plane in (*pool.values, *pool.keys):
        assert torch.equal(plane, values[:, None, None, None].expand_as(plane))


@can_populate
def test_the_executor_opens_with_a_resident_pool(tiny_folder):
    executor = make(tiny_folder)
    executor.open(SPEC)
    assert [resident_share(pool) for pool in executor._cache.pools] == [1]
    executor.close()


@can_populate
def test_little_free_memory_is_left_to_others(monkeypatch):
    monkeypatch.setattr(machine, "usable_memory", lambda: (1 << 34, 1 << 30))
    pool = pool_of(FRESH_BYTES)
    thread = cache.make_resident([pool])
    assert thread is not None
    thread.join()
    assert resident_share(pool) < 0.1


@can_populate
def test_while_steps_run_only_blocks_that_they_soon_use_become_resident(monkeypatch):
    monkeypatch.setattr(cache, "STRIPE_BYTES", 1 << 20)
    pool = pool_of(2 * FRESH_BYTES)
    num_blocks, block_size = pool.shape.num_blocks, pool.shape.block_size
    monkeypatch.setattr(cache, "AHEAD_TOKENS", num_blocks // 8 * block_size)
    steps = cache.Steps()
    steps.begin([num_blocks // 4 - 1, 3])
    thread = cache.make_resident([pool], steps)
    assert thread is not None
    settled = -1.0
    while resident_share(pool) != settled:
        settled = resident_share(pool)
        time.sleep(0.5)
    assert 3 / 8 <= settled < 3 / 4 and thread.is_alive()  # huge pages may reach beyond the last stripe of a layer
    steps.begin([3 * num_blocks // 4])
    while resident_share(pool) < 7 / 8:
        time.sleep(0.01)
    assert thread.is_alive()
    steps.end()
    thread.join()
    assert resident_share(pool) == 1


@can_populate
def test_a_thread_that_waits_for_steps_ends_with_its_pool(monkeypatch):
    monkeypatch.setattr(cache, "AHEAD_TOKENS", 0)
    pool, steps = pool_of(FRESH_BYTES), cache.Steps()
    steps.begin()
    thread = cache.make_resident([pool], steps)
    assert thread is not None
    del pool
    gc.collect()
    thread.join(timeout=60)
    assert not thread.is_alive()


@can_populate
def test_the_executor_says_which_blocks_its_steps_use(tiny_folder):
    executor = make(tiny_folder)
    executor.open(SPEC)
    plan = StepPlan(0, 0.0)
    plan.edits.extend((0, 0, 0, 5, 1, 0, 0, 2))
    executor.submit(plan)
    assert executor._steps.num_blocks == 6
    executor.close()


@can_populate
def test_a_pool_that_is_dropped_is_not_held_by_its_thread(monkeypatch):
    monkeypatch.setattr(machine, "usable_memory", lambda: (time.sleep(0.02), (1 << 34, 1 << 34))[1])
    pool = pool_of(200 << 20)
    thread = cache.make_resident([pool])
    del pool
    gc.collect()
    thread.join(timeout=60)
    assert not thread.is_alive()


@can_populate
@pytest.mark.parametrize("step", ["", "steps.begin([0])"])
def test_a_process_that_ends_waits_for_the_thread_and_not_for_its_work(step):
    """Before, the interpreter ended the thread while it freed the pool's tensors: 2 runs of 64 aborted."""
    code = f"""
import atexit, ctypes, mmap, threading, time
import torch
from octavo.executors import cache
from octavo.ops.attention import KVPool, PoolShape

# 6.5 GB that nothing touches: over a minute of calls.
pool = KVPool(PoolShape(4, 100_000, 16, 2, 64, 64, torch.float32), torch.device("cpu"))
steps, calls = cache.Steps(), []
{step}
cache.AHEAD_TOKENS = 0
cache._populate = lambda: lambda address, size: (calls.append(size), time.sleep(0.02))[0] is None
thread = cache.make_resident([pool], steps)
while not calls:
    time.sleep(0.001)
atexit.register(lambda: print(thread.is_alive(), len(calls) < 1000))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout.split()) == (0, ["False", "True"]), run.stderr


def test_without_the_kernels_help_pages_are_touched_before_the_pool_is_used(monkeypatch):
    monkeypatch.setattr(cache, "_populate", lambda: None)
    monkeypatch.setattr(cache, "TOUCH_S", 60)
    pool = pool_of(FRESH_BYTES)
    assert cache.make_resident([pool]) is None
    assert resident_share(pool) > 0.99  # all but the null block's page
    monkeypatch.setattr(cache, "TOUCH_S", 0)
    other = pool_of(FRESH_BYTES)
    cache.make_resident([other])
    assert resident_share(other) < 0.5
