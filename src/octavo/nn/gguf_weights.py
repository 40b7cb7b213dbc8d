"""Weights in GGUF files.

Owns: reverting what the conversion to GGUF changed: the row order of queries and keys, and the offset of norms.
Does not: parse the file (artifacts/gguf_file.py does), know names (artifacts/families.py) or blocks (gguf_blocks.py).
Invariants: at most a few rows are held in float32 besides the target.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES
from torch import Tensor

from octavo.artifacts.families import FAMILIES
from octavo.artifacts.gguf_file import GGUFFile, GGUFTensor, open_parts
from octavo.artifacts.model_spec import ModelSpec
from octavo.artifacts.resolve import ModelFiles
from octavo.errors import ModelFileError
from octavo.nn.gguf_blocks import GGUF_TYPES, RawMatrix, dequantize
from octavo.nn.weight_source import copy_values


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor and its file. `paired_heads`: the number of heads if the rows are stored in rotary pairs, else None."""

    file: GGUFFile
    tensor: GGUFTensor
    paired_heads: int | None


class GGUFWeights:
    """A WeightSource over one GGUF file or the parts of a split one.

    A tensor of three dimensions, which has the matrices of several experts, is one matrix with the rows of all.
    """

    def __init__(self, files: ModelFiles, spec: ModelSpec) -> None:
        self._entries: dict[str, _Entry] = {}
        self.notes: tuple[str, ...] = ()
        family = FAMILIES[spec.family]
        heads = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads} if family.has_rotary_pairs else {}
        self._norm_offset = family.norm_offset  # the conversion to GGUF added it
        self._first = files.weights[0]
        for file in open_parts(files.weights):
            for tensor in file.tensors.values():
                role, name = family.from_gguf(tensor.name)
                if name in self._entries:
                    raise ModelFileError(file.path, f"is also in {self._entries[name].file.path.name}", tensor.name)
                if tensor.type not in GGUF_TYPES:
                    known = ", ".join(kind.name for kind in GGUF_TYPES)
                    raise ModelFileError(file.path, f"has type {tensor.type.name}; {known} are supported", tensor.name)
                self._entries[name] = _Entry(file, tensor, heads.get(role))
        self.shapes: Mapping[str, tuple[int, ...]] = MappingProxyType(
            {name: _matrix_shape(entry.tensor.shape) for name, entry in self._entries.items()}
        )

    def drop_pages(self) -> None:
        """Remove the files' mapped pages from this process's memory."""
        for file in {id(entry.file): entry.file for entry in self._entries.values()}.values():
            file.drop_pages()

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
                values = values[stored_order(len(values), entry.paired_heads)]
            out.copy_(torch.from_numpy(values[first_row : first_row + len(out)]))
            return
        rows, columns = range(first_row, first_row + len(out)), range(first_column, first_column + out.shape[1])
        copy_values(self.raw_matrix(name, rows, columns), out)

    def raw_matrix(self, name: str, rows: range | None = None, columns: range | None = None) -> RawMatrix:
        """Return a matrix or a window of it, in canonical row order, as a view of the file."""
        entry = self._entries[name]
        num_rows, num_columns = self.shapes[name]
        rows = range(num_rows) if rows is None else rows
        columns = range(num_columns) if columns is None else columns
        size, size_bytes = GGML_QUANT_SIZES[entry.tensor.type]
        first_block, end_block = columns.start // size, -(-columns.stop // size)
        stored = entry.file.raw(entry.tensor.name).reshape(num_rows, -1)
        stored = stored[:, first_block * size_bytes : end_block * size_bytes]
        cut = range(columns.start - first_block * size, columns.stop - first_block * size)
        if entry.paired_heads is None:
            return RawMatrix(stored[rows.start : rows.stop], entry.tensor.type, cut)
        return RawMatrix(
            stored, entry.tensor.type, cut, stored_order(num_rows, entry.paired_heads)[rows.start : rows.stop]
        )


def _matrix_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape if len(shape) == 1 else (math.prod(shape[:-1]), shape[-1])


def stored_order(num_rows: int, num_heads: int) -> npt.NDArray[np.int64]:
    """Return the stored row of each canonical row: [head, pair, half] become [head, half, pair]."""
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)
