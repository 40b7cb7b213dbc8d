"""The weights of a model by their canonical (Hugging Face) names, from files of any supported kind.

Owns: the choice of the reader, and the checks: present, of the right shape, none left over.
Does not: keep tensors: each is converted directly into the caller's memory.
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
    """The interface of one kind of weight files. Names are canonical; shapes are torch's, [out, in]."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of all tensors, by name."""
        ...

    def path(self, name: str) -> Path:
        """Return the file that holds the tensor, or the place to name in an error if it is missing."""
        ...

    def read_into(self, name: str, out: Tensor, first_row: int = 0) -> None:
        """Convert the rows from `first_row` on into `out`, which may have any number of rows, dtype and device."""
        ...

    def raw_rows(self, name: str) -> RawRows | None:
        """Return a matrix as the bytes of whole rows, [rows, bytes of a row]; None if the files are not GGUF."""
        ...


class Weights:
    """Checked reader of a source's tensors."""

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
        """Raise ModelFileError for another shape, before memory is allocated for the configuration's shape."""
        found = self.shape(name)
        if found != shape:
            reason = f"has shape {list(found)}, the configuration needs {list(shape)}"
            raise ModelFileError(self._source.path(name), reason, name)

    def read_into(self, name: str, out: Tensor) -> None:
        """Convert the tensor into `out`, which must have the same shape."""
        self.check_shape(name, tuple(out.shape))
        self._read.add(name)
        with torch.no_grad():
            self._source.read_into(name, out)

    def claim(self, name: str, shape: tuple[int, ...]) -> None:
        """Check the shape of a tensor that is read by rows later, and mark it as read."""
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
        """Raise ModelFileError for tensors that were not read: a model with more tensors is of another architecture."""
        for name in self._source.shapes:
            if name not in self._read and name not in ignored and not name.endswith(".rotary_emb.inv_freq"):
                raise ModelFileError(self._source.path(name), "is not a part of this architecture", name)


def open_weights(files: ModelFiles, spec: ModelSpec) -> Weights:
    """Open the model's weight files; only their headers are read. Raises ModelFileError."""
    source: WeightSource = GGUFWeights(files, spec) if files.kind == "gguf" else SafetensorsWeights(files)
    return Weights(source)
