"""The weights of a model by their canonical (Hugging Face) names, from whichever files hold them.

Owns: the choice of the reader, and the checks: present, of the right shape, none left over.
Does not: keep tensors: each is converted straight into the memory that the caller gives.
Invariants: a failure is a ModelFileError that names the file, the tensor and the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from octavo.artifacts.model_spec import ModelSpec
from octavo.artifacts.resolve import ModelFiles
from octavo.errors import ModelFileError
from octavo.nn.gguf_weights import GGUFWeights
from octavo.nn.safetensors_weights import SafetensorsWeights

RawRows = tuple[npt.NDArray[np.uint8], GGMLQuantizationType]


class WeightSource(Protocol):
    """One kind of weight files. Names are canonical; shapes are torch's, [out, in]."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each tensor there is."""
        ...

    def path(self, name: str) -> Path:
        """The file that holds the tensor, or where a missing one would be expected."""
        ...

    def read_into(self, name: str, out: Tensor, first_row: int = 0) -> None:
        """Convert the rows from `first_row` on into `out`, as many as it has, whatever its dtype and device."""
        ...

    def raw_rows(self, name: str) -> RawRows | None:
        """Return a matrix as the bytes of whole rows, [rows, bytes of a row]; None where the files are not GGUF."""
        ...


class Weights:
    """Hands out each tensor of a source once, checked."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._read: set[str] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor's canonical name."""
        return tuple(self._source.shapes)

    def __contains__(self, name: str) -> bool:
        return name in self._source.shapes

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape. Raises ModelFileError when the tensor is missing."""
        shape = self._source.shapes.get(name)
        if shape is None:
            raise ModelFileError(self._source.path(name), "is missing", name)
        return shape

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse another shape, before memory is taken for the one that the configuration claims."""
        found = self.shape(name)
        if found != shape:
            reason = f"has shape {list(found)}, the configuration needs {list(shape)}"
            raise ModelFileError(self._source.path(name), reason, name)

    def read_into(self, name: str, out: Tensor) -> None:
        """Convert the tensor into `out`, whose shape it must have."""
        self.check_shape(name, tuple(out.shape))
        self._read.add(name)
        with torch.no_grad():
            self._source.read_into(name, out)

    def claim(self, name: str, shape: tuple[int, ...]) -> None:
        """Check the shape of a tensor that will be read by rows."""
        self.check_shape(name, shape)
        self._read.add(name)

    def read_rows(self, name: str, first_row: int, out: Tensor) -> None:
        """Convert some rows of a claimed tensor into `out`."""
        with torch.no_grad():
            self._source.read_into(name, out, first_row)

    def raw_rows(self, name: str) -> RawRows | None:
        """Return a claimed matrix of a GGUF file as the bytes of its rows, in canonical order; else None."""
        return self._source.raw_rows(name)

    def check_all_read(self, ignored: frozenset[str] = frozenset()) -> None:
        """Refuse tensors that nobody asked for: a model that has them computes something else."""
        for name in self._source.shapes:
            if name not in self._read and name not in ignored and not name.endswith(".rotary_emb.inv_freq"):
                raise ModelFileError(self._source.path(name), "is not a part of this architecture", name)


def open_weights(files: ModelFiles, spec: ModelSpec) -> Weights:
    """Open the model's weight files; nothing is read but their headers. Raises ModelFileError."""
    source: WeightSource = GGUFWeights(files, spec) if files.kind == "gguf" else SafetensorsWeights(files)
    return Weights(source)
