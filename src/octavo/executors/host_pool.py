"""The host tier of one cache group: blocks of keys and values in the host's memory.

Owns: the memory (pinned beside a CUDA device) and the copies in both directions.
Does not: know which sequences hold a block (core does).
Shapes: L layers, N blocks, S block size, K KV heads, D head size.
Invariants: copies run on the device's current stream, so later work there may overwrite a block once the call returns;
nothing waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.attention_pool import KVPool
from octavo.sampling.columns import Ints, upload

# Memory is allocated in slabs of this size: torch rounds a pinned tensor up to a power of two, which could double it.
SLAB_BYTES = 64 << 20
STAGING_BYTES = 64 << 20  # maximum that a copy holds on the device beside the pool


class HostPool:
    """`num_blocks` host blocks of the shape of a device pool's blocks, written by `put` and read by `get`."""

    def __init__(self, pool: KVPool, num_blocks: int) -> None:
        shape = pool.shape
        self._pool = pool
        self._num_blocks = num_blocks
        self._per_slab = max(1, SLAB_BYTES // shape.block_bytes)
        self._staged = max(1, STAGING_BYTES // shape.block_bytes)
        block = (2, shape.num_layers, shape.block_size, shape.num_kv_heads, shape.head_dim)
        is_pinned = pool.device.type == "cuda"
        self._slabs = [
            torch.empty((min(self._per_slab, num_blocks - first), *block), dtype=shape.dtype, pin_memory=is_pinned)
            for first in range(0, num_blocks, self._per_slab)
        ]

    def put(self, device_blocks: Ints, host_blocks: Ints) -> None:
        """Copy device blocks to host blocks."""
        for first in range(0, len(device_blocks), self._staged):
            part = slice(first, first + self._staged)
            content_N2LSKD = self._pool.read_blocks(upload(self._pool.device, device_blocks[part])[0])
            content_N2LSKD = content_N2LSKD.movedim(2, 0).contiguous()
            for block, content in zip(host_blocks[part].tolist(), content_N2LSKD, strict=True):
                self._block(block).copy_(content, non_blocking=True)

    def get(self, host_blocks: Ints, device_blocks: Ints) -> None:
        """Copy host blocks to device blocks; no device block may occur twice."""
        for first in range(0, len(host_blocks), self._staged):
            part = slice(first, first + self._staged)
            hosts = host_blocks[part].tolist()
            content_N2LSKD = torch.empty(
                (len(hosts), *self._slabs[0].shape[1:]), dtype=self._pool.shape.dtype, device=self._pool.device
            )
            for content, block in zip(content_N2LSKD, hosts, strict=True):
                content.copy_(self._block(block), non_blocking=True)
            blocks = upload(self._pool.device, device_blocks[part])[0]
            self._pool.write_blocks(blocks, content_N2LSKD.movedim(0, 2))

    def _block(self, number: int) -> Tensor:
        assert 0 <= number < self._num_blocks, f"host block {number} of {self._num_blocks}"
        return self._slabs[number // self._per_slab][number % self._per_slab]
