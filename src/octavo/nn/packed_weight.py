"""A weight in the form that the C++ multiplication reads.

Owns: the buffer (fresh memory or a piece of a mapped file), the bias, the descriptor.
Does not: know the layout inside the buffer (csrc/linear.h), quantise, or read files.
Invariants: the buffer starts at a multiple of 64 bytes, is contiguous and never changes once packed.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch


class WeightKind(IntEnum):
    """csrc/linear.h's enum of the same name."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT4 = 3


class WeightDescriptor(ctypes.Structure):
    """csrc/linear.h's struct Weight."""

    _fields_ = (
        ("kind", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("packed", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


class PackedWeight:
    """y_TF = x_TE W_FE^T + b_F with W packed. Keeps its memory alive; so must whoever uses the descriptor."""

    kind: WeightKind
    outputs: int
    inputs: int
    group: int
    buffer: npt.NDArray[np.uint8]
    bias: npt.NDArray[np.float32] | None

    @property
    def nbytes(self) -> int:
        """Bytes of the packed buffer."""
        raise NotImplementedError

    def descriptor(self) -> WeightDescriptor:
        """Return the struct that the kernels take; it holds addresses into this object's memory."""
        raise NotImplementedError

    def dequantize(self) -> torch.Tensor:
        """Return the float32 weight [F, E] as a new tensor."""
        raise NotImplementedError
