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
from gguf import GGMLQuantizationType
from torch import Tensor

from octavo.artifacts.families import FAMILIES
from octavo.artifacts.gguf_file import GGUFFile, GGUFTensor
from octavo.artifacts.model_spec import ModelSpec
from octavo.artifacts.resolve import ModelFiles
from octavo.errors import ModelFileError
from octavo.nn.gguf_blocks import GGUF_TYPES, dequantize
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

    def read_into(self, name: str, out: Tensor, first_row: int = 0) -> None:
        """Dequantise a few rows at a time into `out`, in canonical row order."""
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
        rows = self._rows(entry)[first_row : first_row + out.shape[0]]
        step = max(1, _CHUNK // out.shape[1])
        for start in range(0, rows.shape[0], step):
            values = dequantize(rows[start : start + step], tensor.type)
            out[start : start + step].copy_(torch.from_numpy(values))

    def raw_rows(self, name: str) -> tuple[Bytes, GGMLQuantizationType]:
        """Return a matrix's bytes in canonical row order: a view of the file, or a copy if rows were in pairs."""
        entry = self._entries[name]
        return self._rows(entry), entry.tensor.type

    def _rows(self, entry: _Entry) -> Bytes:
        rows = entry.file.raw(entry.tensor.name).reshape(entry.tensor.shape[0], -1)
        return rows if entry.paired_heads is None else _without_pairs(rows, entry.paired_heads)


def _without_pairs(rows: npt.NDArray[Item], num_heads: int) -> npt.NDArray[Item]:
    """Reorder rows, raw or not, from [head, pair, half] to [head, half, pair]; quantisation blocks never span rows."""
    paired = rows.reshape(num_heads, -1, 2, rows.shape[-1])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(rows.shape)
