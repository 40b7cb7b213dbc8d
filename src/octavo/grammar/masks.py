"""Masks of the ids that the rows of one step may sample.

Owns: the layout in which grammars pass masks to an executor. Does not: compute or apply them.
Shapes: M masked positions, each with ceil(V / 32) words of a vocabulary of V; bit i % 32 of word i // 32 is id i.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Masks:
    """Masks of one step. `places` index the step's sampling positions, ascending (a row with d drafts has 1 + d).

    `bits_MW` is int32 (see above). Positions without an entry may sample anything.
    """

    places: NDArray[np.int64]
    bits_MW: NDArray[np.int32]
