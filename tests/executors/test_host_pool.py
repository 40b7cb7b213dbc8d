"""Blocks on the host: what is written is read back, and neighbours are one copy (fault 17 of the path to CUDA)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.executors import cache
from octavo.executors.cache import HostPool
from octavo.ops.attention import KVPool, PoolShape
from tests.executors.emulated_device import NAME, Emulator, register, running

NUM_BLOCKS = 50


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> KVPool:
    """A pool of distinct blocks, with slabs of 7 blocks and copies of at most 12."""
    shape = PoolShape(2, NUM_BLOCKS, 4, 2, 8, 8, torch.float32)
    monkeypatch.setattr(cache, "SLAB_BYTES", 7 * shape.block_bytes)
    monkeypatch.setattr(cache, "STAGING_BYTES", 12 * shape.block_bytes)
    made = KVPool(shape, torch.device("cpu"))
    for number, plane in enumerate((*made.keys, *made.values)):
        plane.copy_(torch.arange(plane.numel()).view(plane.shape) + number / 8)
    return made


@pytest.mark.parametrize("seed", range(6))
def test_blocks_come_back_from_any_places(pool: KVPool, seed: int) -> None:
    random = np.random.default_rng(seed)
    host = HostPool(pool, 40)
    count = int(random.integers(1, 38))
    first = int(random.integers(0, 40 - count))
    hosts = random.permutation(40)[:count] if seed % 2 else np.arange(first, first + count)
    blocks = random.permutation(NUM_BLOCKS)[:count]
    want = pool.read_blocks(torch.from_numpy(blocks))
    host.put(blocks, hosts)
    pool.clear_blocks(torch.arange(NUM_BLOCKS))
    order = random.permutation(count)
    targets = random.permutation(NUM_BLOCKS)[:count]
    host.get(hosts[order], targets)
    assert torch.equal(pool.read_blocks(torch.from_numpy(targets)), want[torch.from_numpy(order)])


def test_neighbours_are_one_copy(pool: KVPool) -> None:
    host = HostPool(pool, 40)
    places = [(len(memory), where) for memory, where in host._runs(np.array([3, 4, 5, 6, 7, 8, 20, 22, 23, 2]))]
    assert places == [
        (4, slice(0, 4)), (2, slice(4, 6)), (1, slice(6, 7)), (2, slice(7, 9)), (1, slice(9, 10)),
    ]  # fmt: skip
    with pytest.raises(AssertionError, match="of 40"):
        list(host._runs(np.array([39, 40])))


def test_on_a_device_a_swap_of_neighbours_takes_few_launches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    register()
    emulator = Emulator()
    with running(emulator, "swap"):
        shape = PoolShape(2, NUM_BLOCKS, 4, 2, 8, 8, torch.float32)
        host = HostPool(KVPool(shape, torch.device(NAME)), 40)
        emulator.clear()
        host.put(np.arange(30), np.arange(5, 35))
        copies = emulator.phases["swap"].launches["copy to the host"]
        assert copies == 1, "a copy for 30 blocks"
