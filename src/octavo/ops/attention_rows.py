"""Attention within the rows of one step, in both directions: that of encoders, which keep no keys and values.

Owns: the mask of a window, and the bias of each head by the distance of two tokens.
Does not: read or write a pool. Invariant: a row's result depends on that row alone, since each row is one call.
Shapes: T tokens of the step, C tokens of one row, H query heads, K KV heads, D head size, B buckets.

Source of the buckets: Raffel et al., "T5", 2020, as MPNet (Song et al., 2020) has them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from octavo.ops.attention import AttentionBatch, LayerAttention

MAX_DISTANCE = 128  # tokens farther away share the last bucket


class RowAttention:
    """An attention backend over the rows of one step. Call `begin_rows` once per step, then `attend` per layer.

    A layer's window is how many positions a token sees, half of them on each side of its own; if `is_causal`, it ends
    with its own. `bias_BH` is the bias of each head by bucket, for all layers.
    """

    reads_unwritten = False

    def __init__(
        self, layers: Sequence[LayerAttention], bias_BH: Tensor | None = None, is_causal: bool = False
    ) -> None:
        assert not any(layer.soft_cap or layer.sinks_H is not None for layer in layers), "no encoder has these"
        self._layers = tuple(layers)
        self._is_causal = is_causal
        self._bias_BH = bias_BH
        self._rows: list[slice] = []
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}

    def begin(self, batch: AttentionBatch) -> None:
        """Raise AssertionError, because there is no pool."""
        raise AssertionError("an encoder's rows begin without a pool")

    def begin_rows(self, counts: Sequence[int]) -> None:
        """Start a step whose rows have these numbers of tokens, one after the other."""
        ends = torch.tensor([0, *counts]).cumsum(0).tolist()
        self._rows = [slice(first, end) for first, end in pairwise(ends)]
        self._masks.clear()

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Return o_THD; a token sees all tokens of its row that are inside its window."""
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        has_groups = q_THD.shape[1] != k_TKD.shape[1]
        for row in self._rows:
            q_HCD, k_KCD, v_KCD = (x[None, row].transpose(1, 2) for x in (q_THD, k_TKD, v_TKD))
            mask = self._mask(row.stop - row.start, self._layers[layer].window, q_THD)
            o_HCD = functional.scaled_dot_product_attention(
                q_HCD, k_KCD, v_KCD, attn_mask=mask, scale=self._layers[layer].scale, enable_gqa=has_groups
            )
            out_THD[row] = o_HCD[0].transpose(0, 1)
        return out_THD

    def _mask(self, size: int, window: int | None, like: Tensor) -> Tensor | None:
        """Return what is added to the scores of a row of this size, [1, H or 1, C, C], or None."""
        if window is not None and (window if self._is_causal else window // 2 + 1) >= size:
            window = None
        if window is None and self._bias_BH is None and not self._is_causal:
            return None
        key = size, window
        if key not in self._masks:
            places_C = torch.arange(size, device=like.device)
            distance_CC = places_C[None, :] - places_C[:, None]
            mask = torch.zeros(1, 1, size, size, device=like.device, dtype=like.dtype)
            if self._bias_BH is not None:
                buckets_CC = _buckets(distance_CC, self._bias_BH.shape[0])
                mask = mask + self._bias_BH[buckets_CC].permute(2, 0, 1)[None].to(like.dtype)
            if self._is_causal:
                hidden_CC = (distance_CC > 0) | (distance_CC <= -(window or size))
            else:
                hidden_CC = distance_CC.abs() > (size if window is None else window // 2)
            self._masks[key] = mask.masked_fill(hidden_CC, float("-inf")).contiguous()
        return self._masks[key]


def _buckets(distance_CC: Tensor, num_buckets: int) -> Tensor:
    """Return the bucket of each distance: half of them for each direction, exact near, logarithmic farther away."""
    half = num_buckets // 2
    exact = half // 2
    size_CC = distance_CC.abs()
    ratio_CC = torch.log(size_CC.float().clamp(min=1) / exact) / math.log(MAX_DISTANCE / exact)
    far_CC = (exact + (ratio_CC * (half - exact)).long()).clamp(max=half - 1)
    return torch.where(size_CC < exact, size_CC, far_CC) + (distance_CC > 0).long() * half
