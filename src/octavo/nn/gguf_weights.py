"""Weights in GGUF files.

Owns: reverting what the conversion to GGUF changed: the row order of queries and keys, and the offset of norms.
Does not: parse the file (artifacts/gguf_file.py does), know names (artifacts/families.py) or blocks (gguf_blocks.py).
Invariants: at most _CHUNK values are held in float32 besides the target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES
from torch import Tensor

from octavo.artifacts.families import FAMILIES
from octavo.artifacts.gguf_file import GGUFFile, GGUFTensor
from octavo.artifacts.model_spec import ModelSpec
from octavo.artifacts.resolve import ModelFiles
from octavo.errors import ModelFileError
from octavo.nn.gguf_blocks import GGUF_TYPES, RawMatrix, dequantize
from octavo.nn.packed_weight import Bytes

Item = TypeVar("Item", np.uint8, np.float32)

_CHUNK = 1 << 20  # values dequantised at once; 0.45 s for 135M weights against 0.68 s tensor by tensor (one thread)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor and its file. `paired_heads`: the number of heads if the rows are stored in rotary pairs, else None."""

    file: GGUFFile
    tensor: GGUFTensor
    paired_heads: int | None


class GGUFWeights:
    """A WeightSource over one GGUF file or the parts of a split one."""

    def __init__(self, files: ModelFiles, spec: ModelSpec) -> None:
        self._entries: dict[str, _Entry] = {}
        family = FAMILIES[spec.family]
        heads = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads} if family.has_rotary_pairs else {}
        self._norm_offset = family.norm_offset  # the conversion to GGUF added it
        self._first = files.weights[0]
        for path in files.weights:
            file = GGUFFile.open(path)
            for tensor in file.tensors.values():
                role, name = family.from_gguf(tensor.name)
                if name in self._entries:
                    raise ModelFileError(path, f"is also in {self._entries[name].file.path.name}", tensor.name)
                if tensor.type not in GGUF_TYPES:
                    known = ", ".join(kind.name for kind in GGUF_TYPES)
                    raise ModelFileError(path, f"has type {tensor.type.name}; {known} are supported", tensor.name)
                self._entries[name] = _Entry(file, tensor, heads.get(role))
        self.shapes: Mapping[str, tuple[int, ...]] = MappingProxyType(
            {name: entry.tensor.shape for name, entry in self._entries.items()}
        )

    def path(self, name: str) -> Path:
        """Return the tensor's file, or the first file if none has it."""
        return self._entries[name].file.path if name in self._entries else self._first

    def read_into(self, name: str, out: Tensor, first_row: int = 0, first_column: int = 0) -> None:
        """Dequantise a few rows at a time into `out`, in canonical row order; of columns, whole blocks are read."""
        entry = self._entries[name]
        tensor = entry.tensor
        if len(tensor.shape) == 1:
            values = dequantize(entry.file.raw(tensor.name), tensor.type)
            if self._norm_offset and name.endswith("norm.weight"):
                values = values - np.float32(self._norm_offset)
            if entry.paired_heads is not None:
                values = _without_pairs(values[:, None], entry.paired_heads)[:, 0]
            out.copy_(torch.from_numpy(values[first_row : first_row + len(out)]))
            return
        num_rows, num_columns = out.shape
        columns = range(first_column, first_column + num_columns)
        matrix = self.raw_matrix(name, range(first_row, first_row + num_rows), columns)
        step = max(1, _CHUNK // num_columns)
        for start in range(0, num_rows, step):
            values = matrix.values(start, step)
            out[start : start + step].copy_(torch.from_numpy(values))

    def raw_matrix(self, name: str, rows: range | None = None, columns: range | None = None) -> RawMatrix:
        """Return a matrix or a window of it, in canonical row order: a view of the file, or a copy if in pairs."""
        entry = self._entries[name]
        num_rows, num_columns = entry.tensor.shape
        columns = range(num_columns) if columns is None else columns
        size, size_bytes = GGML_QUANT_SIZES[entry.tensor.type]
        first_block, end_block = columns.start // size, -(-columns.stop // size)
        blocks = self._rows(entry, range(num_rows) if rows is None else rows)
        cut = range(columns.start - first_block * size, columns.stop - first_block * size)
        return RawMatrix(blocks[:, first_block * size_bytes : end_block * size_bytes], entry.tensor.type, cut)

    def _rows(self, entry: _Entry, rows: range) -> Bytes:
        stored = entry.file.raw(entry.tensor.name).reshape(entry.tensor.shape[0], -1)
        if entry.paired_heads is None:
            return stored[rows.start : rows.stop]
        size = stored.shape[0] // entry.paired_heads  # rows are in pairs within a head, so whole heads are read
        first, end = rows.start // size, -(-rows.stop // size)
        heads = _without_pairs(stored[first * size : end * size], end - first)
        return heads[rows.start - first * size : rows.stop - first * size]


def _without_pairs(rows: npt.NDArray[Item], num_heads: int) -> npt.NDArray[Item]:
    """Reorder rows, raw or not, from [head, pair, half] to [head, half, pair]; quantisation blocks never span rows."""
    paired = rows.reshape(num_heads, -1, 2, rows.shape[-1])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(rows.shape)
