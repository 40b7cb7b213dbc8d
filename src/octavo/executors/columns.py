"""Convert packed int32 columns of a plan to numpy arrays and back.

Owns: the conversion. Does not: keep a view: core could not append while one exists.
"""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray


def from_packed(column: array[int]) -> NDArray[np.int64]:
    """Copy a packed column as int64."""
    if not column:
        return np.zeros(0, dtype=np.int64)
    return np.frombuffer(column, dtype=np.int32).astype(np.int64)


def to_packed(values: NDArray[np.int64]) -> array[int]:
    """Copy values into a packed column."""
    packed = array("i")
    packed.frombytes(values.astype(np.int32).tobytes())
    return packed
