"""Random numbers as a function of (seed, choice, position), equal on every device and in every batch.

Owns: the function, vectorised, on the host, where all three arguments are known before a step.
Does not: hold state; nothing is consumed, so a preempted, resumed or recomputed row draws the same.
Source: SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
Output i of the generator with state s is mix(s + (i + 1) * GAMMA). Choice c of a seed has the generator
whose state is output c of the seed's own; the draw at position p is output p of that.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_BITS = 48  # of a draw: u <= 1 - 2**-48, so that u * total stays below total in float64


def splitmix64(states: NDArray[np.uint64], indices: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return output `indices` of the generators with `states`, elementwise, modulo 2**64."""
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
