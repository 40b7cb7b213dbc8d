"""The C++ sampler: one id per row of float32 logits, all rows in one call.

Owns: the call, and the addresses of the columns that the kernel reads. Does not: edit logits, support typical-p, or run
on other devices. sampling/selection.py defines a draw and has the torch twin; kernel and twin give the same ids.
Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops import cpu

Ints = NDArray[np.int64]
MAX_VOCAB_SIZE = 1 << 19  # with at most this many ids, sums of weights are exact


@dataclass(frozen=True, slots=True)
class SampleColumns:
    """The parameters of each slot. inverse_temperature 0: the best id. top_k 0: all ids. The arrays must not move."""

    inverse_temperature: NDArray[np.float32]
    floor: NDArray[np.float32]
    top_p: NDArray[np.float64]
    top_k: Ints
    seed: NDArray[np.uint64]
    choice: Ints


class SampleKernel:
    """Samples rows with the parameters of their slots."""

    def __init__(self, columns: SampleColumns) -> None:
        function = _kernel()
        assert function is not None, "no kernel; see has_kernel"
        self._function = function
        self._columns = columns  # kept alive: the kernel gets their addresses
        addresses = [getattr(columns, field.name).ctypes.data for field in fields(columns)]
        self._addresses = np.asarray(addresses, dtype=np.int64)
        self._address = self._addresses.ctypes.data

    def sample(self, logits_RV: Tensor, slots: Ints, positions: Ints) -> tuple[Ints, NDArray[np.float32]]:
        """Return each row's id (drawn, or the first of the best) and its best logit. `fits` must hold for the logits.

        `positions` are the indices that the ids will have in their sequences.
        """
        num_rows, size = logits_RV.shape
        assert len(slots) == len(positions) == num_rows, "a row of logits for each that samples"
        slots, positions = np.ascontiguousarray(slots), np.ascontiguousarray(positions)
        ids_R, best_R = np.empty(num_rows, dtype=np.int64), np.empty(num_rows, dtype=np.float32)
        self._function(
            self._address, _address(slots), _address(positions), logits_RV.data_ptr(), logits_RV.stride(0),
            num_rows, size, _address(ids_R), _address(best_R), cpu.num_threads(num_rows * size),
        )  # fmt: skip
        return ids_R, best_R


def _address(column: NDArray[Any]) -> int:
    address: int = column.__array_interface__["data"][0]  # a tenth of the cost of column.ctypes.data
    return address


def has_kernel() -> bool:
    """Return True if the library with the kernel is loaded."""
    return _kernel() is not None


def fits(logits_RV: Tensor) -> bool:
    """Return True if the kernel can read these logits; those of another device, if its kernels can."""
    is_plain = logits_RV.dtype is torch.float32 and logits_RV.stride(1) == 1
    return is_plain and 0 < logits_RV.shape[1] <= MAX_VOCAB_SIZE


@cache
def _kernel() -> Callable[..., None] | None:
    rows = (c_void_p, c_void_p, c_void_p)
    return cpu.function("octavo_sample", *rows, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_int32)
