"""The interface between a model's layers and paged attention: AttentionBatch and AttentionBackend.

Owns: a backend's inputs per step, and its two methods.
Does not: compute, or own the KV memory (see attention_pool).
Shapes: T tokens of the step, N rows, M table width, H query heads, K KV heads, D head size.
Invariants: rows of one token are first, in ascending context length, then longer ones; token t of
row n is at row_start[n] + t; its query sees exactly the positions <= its own (and inside the window).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

HostColumn = NDArray[np.int64]


@dataclass(slots=True)
class AttentionBatch:
    """Attention's inputs of one step; device tensors with host copies, so that no size needs a sync.

    `slot_mapping_T` is block * block_size + offset, the flat pool position of each token's KV.
    `context_len_N` counts KV positions including this step's. `block_table_NM` holds block numbers;
    entries after a row's last block are the pool's null block, those before a window may be any block of the pool,
    with any content. Index tensors are int64.
    `counts` and `contexts` are host copies per row; rows [0, num_decodes) have one token each.
    """

    num_tokens: int
    num_rows: int
    num_decodes: int
    positions_T: Tensor
    slot_mapping_T: Tensor
    row_start_N1: Tensor
    context_len_N: Tensor
    block_table_NM: Tensor
    counts: HostColumn
    contexts: HostColumn

    @property
    def max_count(self) -> int:
        """Tokens of the longest row."""
        return int(self.counts.max(initial=0))

    @property
    def max_context(self) -> int:
        """KV positions of the longest context."""
        return int(self.contexts.max(initial=0))


class AttentionBackend(Protocol):
    """Paged attention over one pool. Call `begin` once per step, then `attend` once per layer, in order.

    `reads_unwritten`: positions after a context are read (and masked), so that a newly begun block must be cleared.
    """

    reads_unwritten: bool

    def begin(self, batch: AttentionBatch) -> None:
        """Prepare what all layers share: indices, masks, buckets."""
        ...

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Write the step's K and V of `layer` into the pool, attend causally, return o_THD.

        The scale is D ** -0.5. The result may be a buffer that the next call overwrites.
        """
        ...


class GroupedAttention:
    """An AttentionBackend over several cache groups: `places` has each model layer's backend and its index there."""

    reads_unwritten = True  # CacheGroups asks each group's own backend

    def __init__(self, places: Sequence[tuple[AttentionBackend, int]]) -> None:
        self.places = list(places)

    def begin(self, batch: AttentionBatch) -> None:
        """Raise AssertionError: each group has its own batch."""
        raise AssertionError("each cache group's attention begins by itself")

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Attend in the layer's group."""
        backend, local = self.places[layer]
        return backend.attend(local, q_THD, k_TKD, v_TKD)
