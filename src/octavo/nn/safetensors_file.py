"""Safetensors files, memory-mapped.

Owns: the header, the mapping, and the conversion of each type of numbers to float32.
Does not: know what a tensor means, or join the files of a model.
Invariants: the safetensors library has checked a header before its offsets are used. Views are read-only, and valid as
long as the file or a view of it exists.
"""

from __future__ import annotations

import errno
import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from octavo.errors import ModelFileError

Values = npt.NDArray[np.float32]
Array = npt.NDArray[Any]

FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
# Of types that NumPy lacks, the bits.
_NUMPY_TYPES: Mapping[str, str] = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?", "F8_E4M3": "u1", "F8_E5M2": "u1",
    "F8_E8M0": "u1",
}  # fmt: skip
_COPIED = 1 << 20  # values that are converted at once


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file: its name, the type as the file names it, and a view of its numbers (or of their bits)."""

    path: Path
    name: str
    type: str
    array: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return self.array.shape

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns. Raises ModelFileError if the tensor is no matrix."""
        match self.shape:
            case (rows, columns):
                return rows, columns
        raise self.error(f"has shape {list(self.shape)}, which is no matrix")

    def error(self, reason: str) -> ModelFileError:
        """Return an error that names the file and the tensor."""
        return ModelFileError(self.path, reason, self.name)

    def check(self, types: tuple[str, ...], *shapes: tuple[int, ...]) -> None:
        """Raise ModelFileError if the tensor has another type, or none of the shapes (any shape if none is given)."""
        if self.type not in types:
            raise self.error(f"has type {self.type}, not {' or '.join(types)}")
        if shapes and self.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise self.error(f"has shape {list(self.shape)}, its matrix needs {wanted}")

    def floats(self, *window: slice) -> Values:
        """Return a window of the tensor as float32, as a new array."""
        return _floats(np.asarray(self.array[window]), self.type)

    def copy_into(self, out: Tensor, first_row: int, first_column: int) -> None:
        """Convert the window of this shape that begins there."""
        window = self.array[first_row : first_row + len(out)]
        if out.dim() > 1:
            window = window[:, first_column : first_column + out.shape[1]]
        step = max(1, _COPIED // max(1, prod(out.shape[1:])))
        for start in range(0, len(out), step):
            piece = torch.from_numpy(np.array(window[start : start + step]))
            out[start : start + step].copy_(piece.view(torch.bfloat16) if self.type == "BF16" else piece)


class SafetensorsFile:
    """An open file: its tensors by name."""

    def __init__(self, path: Path) -> None:
        """Map the file. Raises ModelFileError."""
        self.path = path
        try:
            with safe_open(path, framework="np") as library:  # checks sizes and offsets
                names = set(library.keys())
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (SafetensorError, OSError) as error:
            if getattr(error, "errno", None) == errno.ENOMEM:
                raise  # not the file's fault
            raise ModelFileError(path, f"is no whole safetensors file ({error})") from error
        start = 8 + int.from_bytes(self._data[:8], "little")
        header = json.loads(self._data[8:start])
        tensors = {name: self._tensor(name, header[name], start) for name in sorted(names)}
        self.tensors: Mapping[str, StoredTensor] = MappingProxyType(tensors)

    def _tensor(self, name: str, entry: dict[str, Any], start: int) -> StoredTensor:
        kind = _NUMPY_TYPES.get(entry["dtype"])
        if kind is None:
            raise ModelFileError(self.path, f"has type {entry['dtype']}, which is not supported", name)
        shape = tuple(entry["shape"])
        view = np.frombuffer(self._data, np.dtype(kind), prod(shape), start + entry["data_offsets"][0])
        return StoredTensor(self.path, name, entry["dtype"], view.reshape(shape))

    def drop_pages(self) -> None:
        """Remove the mapped pages from this process's memory; those that are read again come from the page cache."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._data.madvise(mmap.MADV_DONTNEED)


def _floats(array: Array, kind: str) -> Values:
    if kind == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    if kind == "F8_E4M3":
        return _E4M3[array]
    if kind == "F8_E5M2":
        return (array.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    if kind == "F8_E8M0":
        return powers_of_two(array)
    return array.astype(np.float32)


def powers_of_two(exponents: Array) -> Values:
    """Return 2 to the power of biased exponents in bytes (E8M0: 127 is 1, and 255 is not a number)."""
    values = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127).astype(np.float32)
    values[exponents == 255] = np.nan
    return values


def _e4m3_table() -> Values:
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    values = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    values[bits & 127 == 127] = np.nan
    return np.where(bits >> 7, -values, values).astype(np.float32)


_E4M3 = _e4m3_table()
