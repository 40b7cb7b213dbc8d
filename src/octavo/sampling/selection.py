"""Pick one token per row from edited logits: temperature, top-n-sigma, top-k, top-p, min-p, typical-p, XTC, a draw.

Owns: the parameters of selection, the random numbers, the definition of a draw, its distribution, and the torch twin of
the kernels (ops/sample_kernel.py in C++, ops/triton/sample.py), which give the same ids. Does not: edit logits. A draw
depends on (seed, choice, position) and the row's logits alone, on every device, so a resumed row draws the same id.
Definition, with R rows, V vocabulary, K candidates: scaled = (logit - best) * inverse temperature, in float32. weight =
e^scaled by `_exponential`, rounded to a multiple of 2^-34 (a unit), so sums over up to 2^19 ids are exact in any order.
Candidates are sorted by (logit descending, id ascending). top_k keeps the first k; top_p keeps those preceded by less
than its share of the kept weights; min_p keeps those whose scaled logit is at least log(min_p). A row with top_k, top_p
or a rare parameter draws in sorted order, any other in id order. Rare parameters are computed without a sort, by
elementwise operations and by sums and histograms of integers (`kept_units`): with the same bits on every device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.request import SamplingParams
from octavo.ops import sample_kernel
from octavo.ops.triton.available import uses_kernels
from octavo.sampling.columns import Floats, Ints, upload

MIN_TOP_P = 1e-9  # keeps the most likely token, as a top_p of 0 should
WIDTHS = (64, 512, 4096)  # numbers of candidates tried, in turn, before a full sort
_MIN_EXPONENT = -30.0  # weights are already 0 here
UNITS = 34  # a weight is an integer number of 2^-34
_ROUND = 1.5 * 2.0**18  # a float64 of this size has a last place of 2^-34
_STEPS = 1 << 20  # of the logits' range, for their deviation: sums of 2^19 squares fit 64 bits
_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_XTC = np.uint64(0xD6E8FEB86659FD93)  # makes a seed's second sequence of numbers
_ACCEPT = np.uint64(0x2545F4914F6CDD1D)  # its third, for rejection.py
_MAX_INT32 = 2**31 - 1
_BITS = 48  # bits of a draw: u <= 1 - 2**-48, so that u * total stays below total in float64


@dataclass(frozen=True, slots=True)
class SelectionColumns:
    """The parameters of selection, one entry per slot in each column. The arrays never move: the kernel reads them.

    `inverse_temperature` 0: take the best id. `floor` bounds scaled logits: log(min_p). `top_k` 0: keep all ids.
    `is_rare`: the draw has a parameter that the C++ kernel does not have. 0 is neutral for sigma and XTC's probability.
    """

    inverse_temperature: NDArray[np.float32]
    floor: NDArray[np.float32]
    top_k: Ints
    top_p: Floats
    typical_p: Floats
    top_n_sigma: Floats
    xtc_probability: Floats
    xtc_threshold: Floats
    is_rare: NDArray[np.bool_]
    seed: NDArray[np.uint64]
    choice: Ints

    @classmethod
    def of_size(cls, num_slots: int) -> SelectionColumns:
        """Return the columns of slots that take the best id."""
        return cls(
            np.zeros(num_slots, dtype=np.float32),
            np.full(num_slots, -np.inf, dtype=np.float32),
            np.zeros(num_slots, dtype=np.int64),
            np.ones(num_slots),
            np.ones(num_slots),
            np.zeros(num_slots),
            np.zeros(num_slots),
            np.zeros(num_slots),
            np.zeros(num_slots, dtype=np.bool_),
            np.zeros(num_slots, dtype=np.uint64),
            np.zeros(num_slots, dtype=np.int64),
        )

    def put(self, slot: int, params: SamplingParams, choice: int) -> None:
        """Set a slot's entries. A `params.seed` of None counts as 0; the front end draws seeds."""
        # a temperature that rounds to 0 in float32 would divide by 0
        divisor = np.maximum(np.float32(params.temperature), np.finfo(np.float32).tiny)
        self.inverse_temperature[slot] = np.float32(1) / divisor if params.temperature > 0 else 0
        self.floor[slot] = math.log(params.min_p) if params.min_p > 0 else -math.inf
        self.top_k[slot] = max(0, params.top_k)
        self.top_p[slot] = max(params.top_p, MIN_TOP_P)
        self.typical_p[slot] = params.typical_p
        self.top_n_sigma[slot] = max(0.0, params.top_n_sigma)
        self.xtc_probability[slot], self.xtc_threshold[slot] = params.xtc_probability, params.xtc_threshold
        self.is_rare[slot] = is_rare(params)
        self.seed[slot] = np.uint64((params.seed or 0) & (2**64 - 1))
        self.choice[slot] = choice

    def draws(self, slots: Ints, positions: Ints) -> Draws:
        """Return the draws for these slots at these positions, one per row."""
        return Draws(
            self.inverse_temperature[slots],
            self.floor[slots],
            self.top_k[slots],
            self.top_p[slots],
            self.typical_p[slots],
            self.top_n_sigma[slots],
            self.xtc_threshold[slots],
            uniforms(self.seed[slots] ^ _XTC, self.choice[slots], positions) < self.xtc_probability[slots],
            uniforms(self.seed[slots], self.choice[slots], positions),
        )

    def acceptances(self, slots: Ints, positions: Ints) -> Floats:
        """Return the uniform numbers with which drafts at these positions are accepted or not (rejection.py)."""
        return uniforms(self.seed[slots] ^ _ACCEPT, self.choice[slots], positions)


def is_rare(params: SamplingParams) -> bool:
    """Return True if a draw with these parameters is made without the C++ kernel."""
    return (
        params.typical_p < 1 or params.top_n_sigma > 0 or params.xtc_probability > 0 or params.mirostat > 0
    ) and params.temperature > 0


@dataclass(frozen=True, slots=True)
class Draws:
    """The parameters of draws, one entry per row in each column (see SelectionColumns), and their uniform numbers.

    `has_xtc`: XTC applies to this draw, which a second uniform number of the same position decided.
    """

    inverse_temperature: NDArray[np.float32]
    floor: NDArray[np.float32]
    top_k: Ints
    top_p: Floats
    typical_p: Floats
    top_n_sigma: Floats
    xtc_threshold: Floats
    has_xtc: NDArray[np.bool_]
    uniform: Floats

    def pack(self) -> NDArray[np.int32]:
        """Return the rows' parameters as octavo::sample reads them: int32 [7, R], where a column of zeros is greedy.

        A float64 takes two words, the lower first. Rare parameters are left out.
        """
        halves = (column.view(np.int32).reshape(-1, 2).T for column in (self.top_p, self.uniform))
        limit = np.minimum(self.top_k, _MAX_INT32).astype(np.int32)
        words = np.vstack([self.inverse_temperature.view(np.int32), self.floor.view(np.int32), limit, *halves])
        return np.ascontiguousarray(words)  # vstack keeps the order of `halves`

    @property
    def is_rare(self) -> NDArray[np.bool_]:
        """Which rows need all candidates, sorted."""
        return (self.typical_p < 1) | (self.top_n_sigma > 0) | self.has_xtc

    def take(self, rows: Ints) -> Draws:
        """Return the columns of some rows."""
        return Draws(*(getattr(self, field.name)[rows] for field in fields(self)))


def splitmix64(states: NDArray[np.uint64], indices: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return output `indices` of the generators with `states`, elementwise, modulo 2**64.

    Output i of the generator with state s is mix(s + (i + 1) * GAMMA). Choice c of a seed has its own generator, whose
    state is output c of the seed's generator. The draw at position p is output p of the choice's generator. Source:
    Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    z: NDArray[np.uint64] = states + (indices + np.uint64(1)) * _GAMMA
    z = (z ^ (z >> np.uint64(30))) * _FIRST
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    return z ^ (z >> np.uint64(31))


def uniforms(
    seeds: NDArray[np.uint64], choices: NDArray[np.int64], positions: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return one number in [0, 1) per row, from the top 48 bits; `positions` count from the prompt's first token."""
    states = splitmix64(seeds, choices.astype(np.uint64))
    drawn = splitmix64(states, positions.astype(np.uint64))
    return (drawn >> np.uint64(64 - _BITS)).astype(np.float64) * 2.0**-_BITS


def scale(logits_RV: Tensor, draws: Draws) -> Tensor:
    """Return the scaled logits. A row whose best logit is not finite contains NaN."""
    inverse_R1 = upload(logits_RV.device, draws.inverse_temperature[:, None])[0]
    scaled_RV = logits_RV - logits_RV.amax(dim=1, keepdim=True)
    return scaled_RV.mul_(inverse_R1)


def weigh(scaled_RV: Tensor) -> Tensor:
    """Return the weights, float64, equal to the kernels' bit for bit."""
    return _exponential(scaled_RV).double().add_(_ROUND).sub_(_ROUND)


def _exponential(x: Tensor) -> Tensor:
    """Return e^x of x <= 0 in float32, with the same operations as csrc/sampling_passes.h (Moshier, Cephes, 1989)."""
    x = x.clamp(min=_MIN_EXPONENT)
    whole = (x * 1.44269504088896341).round_()
    r = (x - whole * 0.693359375) + whole * 2.12194440e-4
    y = r * _POLYNOMIAL[0]
    for coefficient in _POLYNOMIAL[1:]:
        y = y.add_(coefficient).mul_(r) if coefficient != _POLYNOMIAL[-1] else y.add_(coefficient)
    y = (y * (r * r)).add_(r).add_(1.0)
    power = (whole.int() + 127).bitwise_left_shift_(23).view(torch.float32)  # 2^whole
    return y.mul_(power)


def draw(logits_RV: Tensor, draws: Draws) -> Tensor:
    """Draw one id per row. The id is arbitrary for a row whose best logit is not finite."""
    ids_R = torch.zeros(len(logits_RV), dtype=torch.int64, device=logits_RV.device)
    is_rare = draws.is_rare
    is_cut = ((draws.top_k > 0) | (draws.top_p < 1)) & ~is_rare
    methods = (is_rare, draw_from_all), (is_cut, draw_from_best), (~is_rare & ~is_cut, draw_in_id_order)
    for is_in, draw_rows in methods:
        part = np.flatnonzero(is_in)
        if len(part) == len(logits_RV):
            return draw_rows(logits_RV, draws)
        if len(part):
            at = upload(logits_RV.device, part)[0]
            ids_R.index_copy_(0, at, draw_rows(logits_RV.index_select(0, at), draws.take(part)))
    return ids_R


def draw_in_id_order(logits_RV: Tensor, draws: Draws) -> Tensor:
    """Return the first id whose cumulative weight exceeds uniform * total."""
    scaled_RV = scale(logits_RV, draws)
    weights_RV = weigh(scaled_RV)
    floor_R1, uniform_R1 = _column(logits_RV, draws.floor), _column(logits_RV, draws.uniform)
    return first_above(weights_RV.masked_fill_(scaled_RV < floor_R1, 0.0), uniform_R1)[:, 0]


def draw_from_best(logits_RV: Tensor, draws: Draws) -> Tensor:
    """Draw among the candidates that top-k, top-p and min-p keep.

    On a CPU the best 64 candidates suffice for most rows; only the other rows are repeated with more candidates.
    """
    if not logits_RV.is_cpu:
        return draw_from_all(logits_RV, draws)
    size = logits_RV.shape[1]
    scaled_RV = scale(logits_RV, draws)
    weights_RV = weigh(scaled_RV)
    ids_R = torch.zeros(len(logits_RV), dtype=torch.int64)
    left = np.arange(len(logits_RV))
    for width in [*(w for w in WIDTHS if w < size // 2), size]:
        rows = torch.from_numpy(left)
        tensors = [tensor[rows] for tensor in (logits_RV, scaled_RV, weights_RV)]
        drawn_R, is_settled_R = _draw_from(_best(tensors[0], width), tensors[1], tensors[2], draws.take(left))
        ids_R[rows] = drawn_R
        left = left[~is_settled_R.numpy()]
        if not len(left):
            break
    return ids_R


def draw_from_all(logits_RV: Tensor, draws: Draws) -> Tensor:
    """Draw among the candidates that remain after top-n-sigma, the cuts, typical-p and XTC, in this order."""
    keys_RV, units_RV = kept_units(logits_RV, draws)
    return draw_ranked(keys_RV, units_RV, _column(logits_RV, draws.uniform))


def draw_ranked(keys_RV: Tensor, units_RV: Tensor, uniform_R1: Tensor) -> Tensor:
    """Return the first id, by (key, id), whose cumulative units exceed uniform * total."""
    target_R1 = (uniform_R1 * units_RV.sum(dim=1, keepdim=True).double()).long()
    return _reach(keys_RV, units_RV, target_R1)[1][:, 0]


def kept_units(logits_RV: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """Return each id's key, by which candidates are sorted, and the weight with which it is drawn, in units; int64."""
    size, scaled_RV = logits_RV.shape[1], scale(logits_RV, draws)
    keys_RV, units_RV = rank_keys(logits_RV), weigh_units(scaled_RV)
    if (draws.top_n_sigma > 0).any():
        units_RV.masked_fill_(~_is_within_sigma(logits_RV, _column(logits_RV, draws.top_n_sigma)), 0)
    if (draws.top_k > 0).any():
        limit_R1 = _column(logits_RV, np.where(draws.top_k > 0, np.minimum(draws.top_k, size), size))
        units_RV.masked_fill_(~_is_up_to(keys_RV, torch.ones_like(units_RV), limit_R1), 0)
    if (draws.top_p < 1).any():
        mass_R1 = _share(units_RV, draws.top_p)
        units_RV.masked_fill_(~_is_up_to(keys_RV, units_RV, mass_R1), 0)
    units_RV.masked_fill_(scaled_RV < _column(logits_RV, draws.floor), 0)
    if (draws.typical_p < 1).any():
        units_RV.masked_fill_(~_is_typical(scaled_RV, units_RV, draws.typical_p), 0)
    if draws.has_xtc.any():
        units_RV.masked_fill_(_is_top_choice(keys_RV, units_RV, draws), 0)
    return keys_RV, units_RV


def rank_keys(logits_RV: Tensor) -> Tensor:
    """Return integers of 32 bits, int64, that are lower for a better logit. -0 counts as 0, a NaN is the best."""
    bits_RV = (logits_RV + 0.0).view(torch.int32)
    ascending_RV = (bits_RV ^ ((bits_RV >> 31) & _MAX_INT32)).masked_fill_(logits_RV.isnan(), _MAX_INT32)
    return _MAX_INT32 - ascending_RV.long()


def weigh_units(scaled_RV: Tensor) -> Tensor:
    """Return the weights in units, int64."""
    return weigh(scaled_RV).mul_(2.0**UNITS).long()


def _share(units_RV: Tensor, share: Floats) -> Tensor:
    """Return the least number of units that is at least this share of each row's."""
    return (_column(units_RV, share) * units_RV.sum(dim=1, keepdim=True).double()).ceil_().long()


def _is_up_to(keys_RV: Tensor, units_RV: Tensor, mass_R1: Tensor) -> Tensor:
    """Return the candidates up to the first with which the units reach the mass."""
    bound_R1, last_R1 = _reach(keys_RV, units_RV, mass_R1 - 1)
    ids_V = torch.arange(keys_RV.shape[1], device=keys_RV.device)
    return (keys_RV < bound_R1) | ((keys_RV == bound_R1) & (ids_V <= last_R1))


def _reach(keys_RV: Tensor, units_RV: Tensor, target_R1: Tensor) -> tuple[Tensor, Tensor]:
    """Find the first candidate, by (key, id), with which the units exceed the target; return its key and id.

    Histograms of the key's bytes, the highest first, narrow the key.
    """
    num_rows, size = keys_RV.shape
    bound_R1, left_R1 = torch.zeros_like(target_R1), target_R1.clone()
    for shift in (24, 16, 8, 0):
        counted_RV = units_RV if shift == 24 else units_RV.masked_fill(keys_RV >> (shift + 8) != bound_R1, 0)
        sums_RD = torch.zeros((num_rows, 256), dtype=torch.int64, device=keys_RV.device)
        sums_RD.scatter_add_(1, (keys_RV >> shift) & 255, counted_RV)
        reached_RD = sums_RD.cumsum(dim=1)
        digit_R1 = (reached_RD <= left_R1).sum(dim=1, keepdim=True).clamp_(max=255)
        left_R1 -= (reached_RD - sums_RD).gather(1, digit_R1)
        bound_R1 = (bound_R1 << 8) + digit_R1
    tied_RV = units_RV.masked_fill(keys_RV != bound_R1, 0).cumsum(dim=1)
    return bound_R1, (tied_RV <= left_R1).sum(dim=1, keepdim=True).clamp_(max=size - 1)


def distribution(logits_RV: Tensor, draws: Draws) -> Tensor:
    """Return the probability with which `draw` draws each id, float64 [R, V]; NaN if the best logit is not finite."""
    if uses_kernels(logits_RV) and sample_kernel.fits(logits_RV) and not draws.is_rare.any():
        probs_RV: Tensor = torch.ops.octavo.kept_probs(logits_RV, upload(logits_RV.device, draws.pack())[0])
        return probs_RV
    if not logits_RV.is_cpu or draws.is_rare.any():
        units_RV = kept_units(logits_RV, draws)[1].double()
        units_RV.masked_fill_(~logits_RV.amax(dim=1, keepdim=True).isfinite(), float("nan"))
        return units_RV / units_RV.sum(dim=1, keepdim=True)
    size, scaled_RV = logits_RV.shape[1], scale(logits_RV, draws)
    weights_RV = weigh(scaled_RV)
    kept_RV = weights_RV.masked_fill(scaled_RV < _column(logits_RV, draws.floor), 0.0)
    left = np.flatnonzero((draws.top_k > 0) | (draws.top_p < 1))
    for width in [*(w for w in WIDTHS if w < size // 2), size]:
        if len(left):
            rows = torch.from_numpy(left)
            values_RK, ids_RK = _best(logits_RV[rows], width)
            part_RK, is_settled_R = _keep((values_RK, ids_RK), scaled_RV[rows], weights_RV[rows], draws.take(left))
            kept_RV[rows] = torch.zeros_like(kept_RV[rows]).scatter_(1, ids_RK, part_RK)
            left = left[~is_settled_R.numpy()] if width < size else left[:0]
    return kept_RV / kept_RV.sum(dim=1, keepdim=True)


def _is_within_sigma(logits_RV: Tensor, sigma_R1: Tensor) -> Tensor:
    """Return which logits are within sigma standard deviations of the best; banned ids do not count. 0 keeps all.

    Temperature does not change the result. Source: Tang et al., "Top-nsigma: Not All Logits Are You Need", 2024.
    """
    is_finite_RV = logits_RV.isfinite()
    best_R1 = logits_RV.amax(dim=1, keepdim=True).double()
    below_RV = (best_R1 - logits_RV.double()).masked_fill_(~is_finite_RV, 0.0)
    span_R1 = below_RV.amax(dim=1, keepdim=True)
    span_R1.masked_fill_(span_R1 <= 0, 1.0)
    steps_RV = (below_RV / span_R1 * _STEPS).round_().long()
    count_R1 = is_finite_RV.sum(dim=1, keepdim=True)
    mean_R1 = steps_RV.sum(dim=1, keepdim=True).double() / count_R1
    mean_square_R1 = (steps_RV * steps_RV).sum(dim=1, keepdim=True).double() / count_R1
    deviation_R1 = (mean_square_R1 - mean_R1 * mean_R1).clamp_(min=0.0).sqrt_() * (span_R1 / _STEPS)
    return (logits_RV.double() >= best_R1 - sigma_R1 * deviation_R1) | (sigma_R1 <= 0)


def sorted_candidates(scores_RV: Tensor, num_needed: int) -> tuple[Tensor, Tensor]:
    """Return at least the `num_needed` best scores and ids of each row, by (score descending, id ascending).

    Ties are never cut: on a CPU a top-k widens until the last needed score is strictly above the last found. On other
    devices that test would wait for the device, so a score and its id become one integer, and integers have no ties.
    """
    size = scores_RV.shape[1]
    if scores_RV.device.type != "cpu":
        return best_by_key(scores_RV, min(num_needed, size))
    for width in WIDTHS:
        if num_needed < width < size // 2:
            values_RK, ids_RK = _best(scores_RV, width)
            if bool((values_RK[:, num_needed - 1] > values_RK[:, -1]).all()):
                return values_RK, ids_RK
    return _best(scores_RV, size)


def best_by_key(scores_RV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` best scores (float32) and ids, by (score descending, id ascending), without a sort of all."""
    last = scores_RV.shape[1] - 1
    keys_RV = ((_MAX_INT32 - rank_keys(scores_RV)) << 32) + torch.arange(last, -1, -1, device=scores_RV.device)
    keys_RK = torch.topk(keys_RV, count, dim=1).values
    ids_RK = last - (keys_RK & 0xFFFFFFFF)
    return scores_RV.gather(1, ids_RK), ids_RK


def _best(scores_RV: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the `width` best scores and ids, by (score descending, id ascending); ties of the last may be cut."""
    if width == scores_RV.shape[1]:
        values_RV, ids_RV = torch.sort(scores_RV, dim=1, descending=True, stable=True)
        return values_RV, ids_RV
    values_RK, ids_RK = torch.topk(scores_RV, width, dim=1, sorted=False)
    ids_RK, order_RK = ids_RK.sort(dim=1)
    values_RK, order_RK = values_RK.gather(1, order_RK).sort(dim=1, descending=True, stable=True)
    return values_RK, ids_RK.gather(1, order_RK)


def _column(like: Tensor, values: NDArray[np.float32] | Floats | Ints) -> Tensor:
    return upload(like.device, values[:, None])[0]


def first_above(weights_RK: Tensor, uniform_R1: Tensor) -> Tensor:
    """Return the first entry whose cumulative weight exceeds uniform * total; uniform is below 1."""
    cumulative_RK = weights_RK.cumsum(dim=1)
    index_R1 = torch.searchsorted(cumulative_RK, uniform_R1 * cumulative_RK[:, -1:], right=True)
    return index_R1.clamp_(max=weights_RK.shape[1] - 1)  # a row of NaN finds none


def _draw_from(
    candidates: tuple[Tensor, Tensor], scaled_RV: Tensor, weights_RV: Tensor, draws: Draws
) -> tuple[Tensor, Tensor]:
    """Draw from the best candidates; also return which rows are settled (see _keep)."""
    kept_RK, is_settled_R = _keep(candidates, scaled_RV, weights_RV, draws)
    index_R1 = first_above(kept_RK, _column(kept_RK, draws.uniform))
    return candidates[1].gather(1, index_R1)[:, 0], is_settled_R


def _keep(
    candidates: tuple[Tensor, Tensor], scaled_RV: Tensor, weights_RV: Tensor, draws: Draws
) -> tuple[Tensor, Tensor]:
    """Return the candidates' weights, 0 for those cut off, and which rows' candidates include every id to be drawn.

    The rows have no rare parameter.
    """
    values_RK, ids_RK = candidates
    size, width = weights_RV.shape[1], ids_RK.shape[1]
    limit_R1 = _column(ids_RK, np.where(draws.top_k > 0, np.minimum(draws.top_k, size), size))
    is_whole_R1 = _column(ids_RK, draws.top_k) <= 0
    is_in_RK = torch.arange(width, device=ids_RK.device) < limit_R1
    weights_RK = weights_RV.gather(1, ids_RK).masked_fill_(~is_in_RK, 0.0)
    cumulative_RK = weights_RK.cumsum(dim=1)
    total_R1 = torch.where(is_whole_R1, weights_RV.sum(dim=1, keepdim=True), cumulative_RK[:, -1:])
    mass_R1 = _column(ids_RK, draws.top_p) * total_R1
    is_above_floor_RK = scaled_RV.gather(1, ids_RK) >= _column(ids_RK, draws.floor)
    is_kept_RK = is_in_RK & (cumulative_RK - weights_RK < mass_R1) & is_above_floor_RK
    kept_RK = weights_RK.masked_fill(~is_kept_RK, 0.0)
    if width == size:
        return kept_RK, torch.ones(len(ids_RK), dtype=torch.bool, device=ids_RK.device)
    # settled: the cut is among candidates strictly above the last candidate, so no tie is missed
    is_above_RK = values_RK > values_RK[:, -1:]
    has_mass_R = ((cumulative_RK >= mass_R1) & is_above_RK).any(dim=1) & is_whole_R1[:, 0]
    has_count_R = is_above_RK.sum(dim=1) >= limit_R1[:, 0]
    return kept_RK, has_mass_R | has_count_R


def _is_typical(scaled_RV: Tensor, units_RV: Tensor, share: Floats) -> Tensor:
    """Return which candidates are typical: those with information nearest to the entropy that together reach the share.

    Candidates as near as the last of these are included. The information is a constant less the scaled logit, and the
    entropy the same constant less their mean, so the distance needs no logarithm.
    Source: Meister, Pimentel, Wiher, Cotterell, "Locally Typical Sampling", 2022.
    """
    wide_RV = scaled_RV.double().masked_fill_(units_RV == 0, 0.0)
    total_R1 = units_RV.sum(dim=1, keepdim=True)
    mean_R1 = (units_RV.double() * wide_RV).round_().long().sum(dim=1, keepdim=True).double() / total_R1
    keys_RV = (wide_RV - mean_R1).abs_().float().view(torch.int32).long()  # bits of a float that is not negative
    return keys_RV <= _reach(keys_RV, units_RV, _share(units_RV, share) - 1)[0]


def _is_top_choice(keys_RV: Tensor, units_RV: Tensor, draws: Draws) -> Tensor:
    """Return which candidates XTC leaves out: all that reach the threshold, except the least likely of these.

    Source: p-e-w, "Exclude Top Choices (XTC)", text-generation-webui, 2024.
    """
    threshold_R1 = _column(keys_RV, np.where(draws.has_xtc, draws.xtc_threshold, np.inf))
    is_above_RV = (units_RV > 0) & (units_RV >= threshold_R1 * units_RV.sum(dim=1, keepdim=True))
    places_RV = keys_RV * keys_RV.shape[1] + torch.arange(keys_RV.shape[1], device=keys_RV.device)
    last_R1 = places_RV.masked_fill(~is_above_RV, -1).amax(dim=1, keepdim=True)
    return is_above_RV & (places_RV != last_R1)
