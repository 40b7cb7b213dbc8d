"""The KV memory: one tensor for all layers' keys and values, divided into blocks.

Owns: the allocation, its null block, copies of blocks and the clearing of newly begun ones.
Does not: know which sequences hold a block (core does).
Shapes: L layers, B blocks, S block size, K KV heads, D head size.
Invariants: block `null_block` is all zero and is never written; a position that was not written
since its block was begun is zero, so masked values are finite and add exactly zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Sizes of the pool; `num_blocks` does not count the null block."""

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, keys and values of all layers."""
        return 2 * self.num_layers * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KVPool:
    """Paged keys and values. On a CPU the kernel provides zeroed memory, page by page on first use."""

    def __init__(self, shape: PoolShape, device: torch.device) -> None:
        self.shape = shape
        self.null_block = shape.num_blocks
        size = (2, shape.num_layers, shape.num_blocks + 1, shape.block_size, shape.num_kv_heads, shape.head_dim)
        if device.type == "cpu":
            # numpy's zeros is calloc, which touches no page; torch.zeros would write them all
            raw = np.zeros(int(np.prod(size)) * shape.dtype.itemsize, dtype=np.uint8)
            self._both_2LBSKD = torch.from_numpy(raw).view(shape.dtype).view(size)
        else:
            self._both_2LBSKD = torch.zeros(size, dtype=shape.dtype, device=device)
        self.keys: tuple[Tensor, ...] = self._both_2LBSKD[0].unbind(0)
        self.values: tuple[Tensor, ...] = self._both_2LBSKD[1].unbind(0)

    @property
    def device(self) -> torch.device:
        """The pool's device."""
        return self._both_2LBSKD.device

    def read_blocks(self, blocks: Tensor) -> Tensor:
        """Return a copy of blocks of every layer, [2, L, len(blocks), S, K, D]."""
        return self._both_2LBSKD.index_select(2, blocks)

    def write_blocks(self, blocks: Tensor, content: Tensor) -> None:
        """Overwrite blocks in every layer; no block may occur twice."""
        self._both_2LBSKD.index_copy_(2, blocks, content)

    def copy_blocks(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy blocks in every layer; all sources are read before a destination is written."""
        self.write_blocks(destinations, self.read_blocks(sources))

    def clear_blocks(self, blocks: Tensor) -> None:
        """Zero blocks in every layer."""
        self._both_2LBSKD.index_fill_(2, blocks, 0)
