"""Packed int32 columns of a plan as numpy arrays.

Owns: the conversion, in both directions. Does not: keep a view: a live view would forbid core to append.
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
