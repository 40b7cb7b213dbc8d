"""Pick one token per row from edited logits: temperature, top-k, top-p, min-p, typical-p, then an inverse-CDF draw.

Owns: the three ways of drawing, each a function of its own row alone. Does not: process logits or make draws.
Order of candidates is (logit descending, id ascending), so ties go to the lowest id on every device.
Rows with top-k or top-p draw from their sorted candidates; the others walk the vocabulary in id order,
which needs no sort: block sums find the block, one block is accumulated in float64.
(Measured, ms for 32 x 49152 float32 on 2 busy cores: greedy 0.5, temperature 1.5, top-k 50 2.5, top-p 0.9 over a
peaked distribution 2.7, over a flat one (no language model's) 90. A Gumbel race would need 49152 draws a row.)
Shapes: R rows, V vocabulary, K candidates, B blocks of the vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo.sampling.columns import Floats, Ints
from octavo.sampling.upload import upload

BLOCK = 256
WIDTHS = (64, 512, 4096)  # candidates looked at, in turn, before a full sort


def sorted_candidates(scores_RV: Tensor, num_needed: int) -> tuple[Tensor, Tensor]:
    """Give at least the `num_needed` best scores and ids of each row, in candidate order, exact at ties.

    On a CPU a top-k widens until the last needed score lies strictly above the last found, so no tie is cut; on
    other devices, where looking would wait for the device, one stable sort does it.
    """
    size = scores_RV.shape[1]
    if scores_RV.device.type == "cpu":
        for width in WIDTHS:
            if num_needed < width < size // 2:
                values_RK, ids_RK = _best(scores_RV, width)
                if bool((values_RK[:, num_needed - 1] > values_RK[:, -1]).all()):
                    return values_RK, ids_RK
    return _best(scores_RV, size)


def _best(scores_RV: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Give the best `width` scores and ids in candidate order; which of the last score's ties are in is open."""
    if width == scores_RV.shape[1]:
        values_RV, ids_RV = torch.sort(scores_RV, dim=1, descending=True, stable=True)
        return values_RV, ids_RV
    values_RK, ids_RK = torch.topk(scores_RV, width, dim=1, sorted=False)
    ids_RK, order_RK = ids_RK.sort(dim=1)
    values_RK, order_RK = values_RK.gather(1, order_RK).sort(dim=1, descending=True, stable=True)
    return values_RK, ids_RK.gather(1, order_RK)


def draw_in_id_order(probs_RV: Tensor, min_p: Floats, uniform: Floats) -> Tensor:
    """Give the first id whose cumulative probability exceeds uniform * total; `probs_RV` may be overwritten."""
    device, size = probs_RV.device, probs_RV.shape[1]
    uniform_R1 = upload(device, uniform)[0][:, None]
    if min_p.any():
        floor_R1 = upload(device, min_p.astype(np.float32))[0][:, None] * probs_RV.amax(dim=1, keepdim=True)
        probs_RV.masked_fill_(probs_RV < floor_R1, 0.0)
    whole = size - size % BLOCK
    sums = [probs_RV[:, :whole].reshape(len(probs_RV), -1, BLOCK).sum(dim=2)] if whole else []
    if whole < size:
        sums.append(probs_RV[:, whole:].sum(dim=1, keepdim=True))
    block_R1, rest_R1, sum_R1 = _first_above(torch.cat(sums, dim=1).double(), uniform_R1)
    ids_RB = block_R1 * BLOCK + torch.arange(BLOCK, device=device)
    inside_RB = probs_RV.gather(1, ids_RB.clamp(max=size - 1)).double().masked_fill_(ids_RB >= size, 0.0)
    at_R1, _, _ = _first_above(inside_RB, (rest_R1 / sum_R1).clamp_(min=0.0))
    return ids_RB.gather(1, at_R1)[:, 0].clamp_(max=size - 1)


def _first_above(weights_RB: Tensor, uniform_R1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find the first entry whose cumulative weight exceeds uniform * total: its index, the rest, its weight.

    Rounding may push the target onto the total; then the last entry with any weight is meant.
    """
    cumulative_RB = weights_RB.cumsum(dim=1)
    total_R1 = cumulative_RB[:, -1:]
    target_R1 = uniform_R1 * total_R1
    last_R1 = (cumulative_RB < total_R1).sum(dim=1, keepdim=True).clamp_(max=weights_RB.shape[1] - 1)
    index_R1 = torch.minimum(torch.searchsorted(cumulative_RB, target_R1, right=True), last_R1)
    weight_R1 = weights_RB.gather(1, index_R1)
    return index_R1, target_R1 - (cumulative_RB.gather(1, index_R1) - weight_R1), weight_R1


def draw_from_best(scaled_RV: Tensor, top_k: Ints, top_p: Floats, min_p: Floats, uniform: Floats) -> Tensor:
    """Draw from the best candidates: top_k first (0 = all), top_p of what that leaves, then min_p.

    On a CPU most rows are settled by their best 64; only the others are looked at again, more widely.
    """
    size = scaled_RV.shape[1]
    probs_RV = torch.softmax(scaled_RV, dim=1)
    limits = np.where(top_k > 0, np.minimum(top_k, size), size)
    asked = np.stack([limits, np.where(top_k > 0, 0, 1), top_p, min_p, uniform])
    if scaled_RV.device.type != "cpu":
        best = torch.sort(scaled_RV, dim=1, descending=True, stable=True)
        return _draw_from(best[0], best[1], probs_RV, asked)[0]
    ids_R = torch.zeros(len(top_k), dtype=torch.int64)
    left = np.arange(len(top_k))
    for width in [*(w for w in WIDTHS if w < size // 2), size]:
        rows = torch.from_numpy(left)
        every = len(left) == len(top_k)
        some_RV, some_probs_RV = (scaled_RV, probs_RV) if every else (scaled_RV[rows], probs_RV[rows])
        drawn_R, is_settled_R = _draw_from(*_best(some_RV, width), some_probs_RV, asked[:, left])
        ids_R[rows] = drawn_R
        left = left[~is_settled_R.numpy()]
        if not len(left):
            break
    return ids_R


def draw_typical(
    scaled_RV: Tensor, top_k: Ints, top_p: Floats, min_p: Floats, typical_p: Floats, uniform: Floats
) -> Tensor:
    """Draw from what top_k, top_p and min_p leave, cut to what is locally typical. Sorts the vocabulary twice."""
    size = scaled_RV.shape[1]
    limits = np.where(top_k > 0, np.minimum(top_k, size), size)
    asked = np.stack([limits, np.where(top_k > 0, 0, 1), top_p, min_p, uniform])
    return _draw_from(*_best(scaled_RV, size), torch.softmax(scaled_RV, dim=1), asked, typical_p)[0]


def _is_typical(probs_RK: Tensor, mass_R1: Tensor) -> Tensor:
    """Whether a candidate is among those whose information is nearest the entropy and that together reach the mass.

    Candidates as near as the last of them are in too. Weights need not sum to 1; those of 0 are not candidates.
    Source: Meister, Pimentel, Wiher, Cotterell, "Locally Typical Sampling", 2022.
    """
    # running sums: a plain sum over one long row may be split among threads, and then differs by company
    probs_RK = probs_RK / probs_RK.cumsum(dim=1)[:, -1:]
    information_RK = -probs_RK.log()
    entropy_R1 = (probs_RK * information_RK).nan_to_num_(nan=0.0).cumsum(dim=1)[:, -1:]
    distance_RK = (information_RK - entropy_R1).abs_()
    sorted_RK, order_RK = distance_RK.sort(dim=1, stable=True)
    reached_RK = probs_RK.gather(1, order_RK).cumsum(dim=1)
    last_R1 = (reached_RK < mass_R1).sum(dim=1, keepdim=True).clamp_(max=probs_RK.shape[1] - 1)
    return distance_RK <= sorted_RK.gather(1, last_R1)


def _draw_from(
    values_RK: Tensor, ids_RK: Tensor, probs_RV: Tensor, asked: Floats, typical_p: Floats | None = None
) -> tuple[Tensor, Tensor]:
    """Draw from candidates; also say for which rows these held everything that may be drawn.

    With `typical_p` the candidates must be the whole vocabulary.
    """
    device, width = ids_RK.device, ids_RK.shape[1]
    columns = upload(device, asked[:, :, None])[0].unbind()
    limit_R1, is_whole_R1, top_p_R1, min_p_R1, uniform_R1 = columns
    is_in_RK = torch.arange(width, device=device) < limit_R1
    probs_RK = probs_RV.gather(1, ids_RK).double().masked_fill_(~is_in_RK, 0.0)
    cumulative_RK = probs_RK.cumsum(dim=1)
    # rows with top_k normalise by what they keep; the others' probabilities sum to 1 already
    mass_R1 = top_p_R1 * torch.where(is_whole_R1 > 0, 1.0, cumulative_RK[:, -1:])
    is_kept_RK = is_in_RK & (cumulative_RK - probs_RK < mass_R1) & (probs_RK >= min_p_R1 * probs_RK[:, :1])
    if typical_p is not None:
        is_kept_RK &= _is_typical(probs_RK.masked_fill(~is_kept_RK, 0.0), upload(device, typical_p)[0][:, None])
    index_R1, _, _ = _first_above(probs_RK.masked_fill(~is_kept_RK, 0.0), uniform_R1)
    if width == probs_RV.shape[1]:
        return ids_RK.gather(1, index_R1)[:, 0], torch.ones(len(ids_RK), dtype=torch.bool, device=device)
    # settled: the cut lies among candidates strictly above the last, so that no tie is missed
    is_above_RK = values_RK > values_RK[:, -1:]
    has_mass_R = ((cumulative_RK >= mass_R1) & is_above_RK).any(dim=1) & (is_whole_R1[:, 0] > 0)
    has_count_R = is_above_RK.sum(dim=1) >= limit_R1[:, 0]
    return ids_RK.gather(1, index_R1)[:, 0], has_mass_R | has_count_R
