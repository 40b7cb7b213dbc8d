"""Non-negative least squares with confidence intervals.

Owns: the solver, the weights, the resampling. Does not: know the meaning of the columns (fitted does).
Solver: Bro and De Jong, "A fast non-negativity-constrained least squares algorithm", J. Chemometrics 11 (1997), which
is Lawson and Hanson's active sets on normal equations. Intervals: a bootstrap of blocks of neighbouring rows (Kuensch,
"The jackknife and the bootstrap for general stationary observations", Ann. Statist. 17, 1989), because neighbouring
rows are correlated. Outliers get less weight (Huber, "Robust estimation of a location parameter", 1964).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
BLOCK = 32  # neighbouring rows that are drawn together
NUM_DRAWS = 100
NUM_PASSES = 4
TUNING = 1.345  # Huber's constant: 95 % of least squares' efficiency under normal noise
LEAST_OFF = 0.005  # smaller relative errors always have full weight
LEVEL_CUT = 8.0  # the final level factor counts a row as at most this many times its prediction


@dataclass(frozen=True, slots=True)
class Solution:
    """Coefficients with 95 % bootstrap intervals."""

    values: Array
    low: Array
    high: Array


def solve(columns: Array, wanted: Array, num_draws: int = NUM_DRAWS) -> Solution:
    """Fit wanted ~ columns @ values with values >= 0, by relative squared errors.

    `columns` is [rows, columns]; `wanted` is [rows], all above 0. The first pass divides each row by its measured time,
    so that slow outliers have little weight. Later passes divide by the previous prediction, so that short and long
    steps count alike, and give outliers less weight (Huber). A last factor makes the predictions sum to the measured
    total, because outliers occur in all kinds of steps.
    """
    relative = columns / wanted[:, None]
    values = non_negative(relative.T @ relative, relative.sum(0))
    for _ in range(NUM_PASSES):
        expected = np.maximum(columns @ values, max(float(np.median(wanted)) * 0.05, 1e-9))
        target = wanted / expected
        off = np.abs(target - 1.0)
        near = max(TUNING * 1.4826 * float(np.median(off)), LEAST_OFF)
        weights = np.sqrt(np.minimum(1.0, near / np.maximum(off, 1e-12)))
        weighted, target = columns * (weights / expected)[:, None], target * weights
        values = non_negative(weighted.T @ weighted, weighted.T @ target)
    level = np.minimum(wanted, LEVEL_CUT * expected)
    num_blocks = -(-len(wanted) // BLOCK)
    blocks, targets = _blocks(weighted), _blocks(target[:, None])
    grams, moments = blocks.transpose(0, 2, 1) @ blocks, (blocks.transpose(0, 2, 1) @ targets)[:, :, 0]
    sums, totals = _blocks(columns).sum(1), _blocks(level[:, None]).sum((1, 2))
    draws = [_levelled(grams.sum(0), moments.sum(0), sums.sum(0), float(totals.sum()))]
    random = np.random.default_rng(0)
    for _ in range(num_draws):
        times = np.bincount(random.integers(0, num_blocks, num_blocks), minlength=num_blocks).astype(float)
        gram = (times @ grams.reshape(num_blocks, -1)).reshape(grams.shape[1:])
        draws.append(_levelled(gram, times @ moments, times @ sums, float(times @ totals)))
    low, high = np.percentile(np.array(draws), [2.5, 97.5], axis=0)
    return Solution(draws[0], low, high)


def _blocks(rows: Array) -> Array:
    """Return rows as [blocks, rows, columns]; the last block is filled up with zeros."""
    filled = np.zeros((-(-len(rows) // BLOCK) * BLOCK, rows.shape[1]))
    filled[: len(rows)] = rows
    return filled.reshape(-1, BLOCK, rows.shape[1])


def _levelled(gram: Array, moment: Array, sums: Array, total: float) -> Array:
    values = non_negative(gram, moment)
    predicted = float(sums @ values)
    return values * (total / predicted) if predicted > 0 else values


def non_negative(gram: Array, moment: Array) -> Array:
    """Minimise x' gram x - 2 moment' x over x >= 0, to a relative error of 1e-10. Columns of zeros get 0."""
    size = len(moment)
    scale = np.sqrt(np.maximum(np.diag(gram), 1e-300))
    gram, moment = gram / np.outer(scale, scale), moment / scale
    values, is_free = np.zeros(size), np.zeros(size, dtype=bool)
    tolerance = 1e-10 * max(1.0, float(np.abs(moment).max(initial=0.0)))
    for _ in range(10 * size):
        slope = moment - gram @ values
        slope[is_free] = -np.inf
        best = int(np.argmax(slope))
        if slope[best] <= tolerance:
            break
        is_free[best] = True
        values = _inner(gram, moment, values, is_free)
    return values / scale


def _inner(gram: Array, moment: Array, values: Array, is_free: npt.NDArray[np.bool_]) -> Array:
    """Solve for the free columns. A column whose value would be negative is removed from the free set."""
    while True:
        trial = np.zeros_like(values)
        trial[is_free] = np.linalg.lstsq(gram[np.ix_(is_free, is_free)], moment[is_free], rcond=1e-12)[0]
        low = is_free & (trial <= 0)
        if not low.any():
            return trial
        step = np.min(values[low] / (values[low] - trial[low] + 1e-300))
        values = values + step * (trial - values)
        is_free &= values > 1e-14
        values[~is_free] = 0.0
