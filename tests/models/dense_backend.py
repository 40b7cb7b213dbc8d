"""Dense causal attention for tests of models: no paging, one growing K and V per row and layer.

Owns: an AttentionBackend that is plainly right. Does not: share a line with the real backends.
Shapes: T tokens of the step, C context of one row, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.artifacts.model_spec import ModelSpec
from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import ModelFiles, resolve_model
from octavo.models.decoder import Decoder
from octavo.models.loader import Loader
from octavo.nn.weights import ReadOptions, open_weights
from octavo.ops.attention import AttentionBatch, LayerAttention


class DenseBackend:
    """Rows keep their order from step to step; `counts` gives each row's new tokens before a step.

    `attention` has one entry per layer, of which scale, window and soft cap are followed.
    """

    def __init__(self, attention: Sequence[LayerAttention]) -> None:
        self._attention = attention
        self.counts: list[int] = []
        self._kv: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def begin(self, batch: AttentionBatch) -> None:
        self.counts = [int(count) for count in batch.counts]

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        out, start = [], 0
        for row, count in enumerate(self.counts):
            step = slice(start, start + count)
            k_CKD, v_CKD = k_TKD[step], v_TKD[step]
            if (layer, row) in self._kv:
                before_k, before_v = self._kv[layer, row]
                k_CKD, v_CKD = torch.cat((before_k, k_CKD)), torch.cat((before_v, v_CKD))
            self._kv[layer, row] = k_CKD, v_CKD
            out.append(_attend_row(q_THD[step], k_CKD, v_CKD, self._attention[layer]))
            start += count
        return torch.cat(out)


def _attend_row(q_LHD: Tensor, k_CKD: Tensor, v_CKD: Tensor, how: LayerAttention) -> Tensor:
    length, heads, _ = q_LHD.shape
    group = heads // k_CKD.shape[1]
    k_CHD, v_CHD = k_CKD.repeat_interleave(group, 1).float(), v_CKD.repeat_interleave(group, 1).float()
    scores_HLC = torch.einsum("lhd,chd->hlc", q_LHD.float(), k_CHD) * how.scale
    if how.soft_cap is not None:
        scores_HLC = how.soft_cap * (scores_HLC / how.soft_cap).tanh()
    ones = torch.ones(length, k_CKD.shape[0], dtype=torch.bool)
    hidden = ones.triu(k_CKD.shape[0] - length + 1)  # the future
    if how.window is not None:
        hidden |= ones.tril(k_CKD.shape[0] - length - how.window)
    weights_HLC = scores_HLC.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hlc,chd->lhd", weights_HLC, v_CHD).to(q_LHD.dtype)


@torch.inference_mode()
def all_logits(decoder: Decoder, rows: list[list[int]]) -> list[Tensor]:
    """Logits of every position of each row, all rows in one step."""
    backend = DenseBackend(decoder.attention)
    backend.counts = [len(row) for row in rows]
    ids = torch.tensor([token for row in rows for token in row])
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    logits = decoder.logits(decoder.forward(ids, positions, backend))
    return list(logits.split(backend.counts))


def load_decoder(name: object, dtype: torch.dtype = torch.float32) -> Decoder:
    """Load by path or alias onto the CPU."""
    files = resolve_model(str(name))
    return load_model(files, read_model_spec(files), dtype)


def load_model(files: ModelFiles, spec: ModelSpec, dtype: torch.dtype, options: ReadOptions | None = None) -> Decoder:
    """Load onto the CPU."""
    return Decoder(Loader(spec, dtype, torch.device("cpu"), open_weights(files, spec, options)))
