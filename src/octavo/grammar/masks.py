"""Which ids the rows of one step may sample.

Owns: the layout in which masks cross from grammars to an executor. Does not: compute or apply them.
Shapes: M masked positions, each with ceil(V / 32) words of a vocabulary of V; bit i % 32 of word i // 32 is id i.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Masks:
    """`places` index the positions of a step that sample, in row order (a row with d drafts has 1 + d), ascending.

    `bits_MW` is int32 (see above). Positions without an entry may sample anything.
    """

    places: NDArray[np.int64]
    bits_MW: NDArray[np.int32]
