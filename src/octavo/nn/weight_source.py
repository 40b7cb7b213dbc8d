"""The interface between the readers of weight files and what wraps or checks them.

Owns: the protocols of a source of tensors, and of a matrix whose files have codes. Does not: know a kind of files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.nn.packed_weight import Codes, WeightKind

_CHUNK = 1 << 20  # values converted at once; 0.45 s for 135M weights against 0.68 s tensor by tensor (one thread)


class CodedMatrix(Protocol):
    """A matrix whose files have codes, or a window of one. Rows count from the window's first."""

    @property
    def type_name(self) -> str:
        """Name of the files' codes, for messages."""
        ...

    @property
    def kind(self) -> tuple[WeightKind, int] | None:
        """Kind and group of the packed weight unless other codes are requested; None if its values stay floats."""
        ...

    @property
    def is_kept(self) -> bool:
        """Return True if `codes` gives the files' codes, False if the values are to be quantised again as `kind`."""
        ...

    def codes(self, first_row: int, num_rows: int) -> Codes | None:
        """Return some rows in the form that is packed; None if float16 cannot represent one of their scales."""
        ...

    def values(self, first_row: int, num_rows: int) -> npt.NDArray[np.float32]:
        """Return the values of some rows as a new array."""
        ...


class WeightSource(Protocol):
    """The interface to one kind of weight files. Names are canonical; shapes are torch's, [out, in]."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of all tensors, by name."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the user about tensors that are not used."""
        ...

    def path(self, name: str) -> Path:
        """Return the file that holds the tensor; if the tensor is missing, the path to name in the error."""
        ...

    def read_into(self, name: str, out: Tensor, first_row: int = 0, first_column: int = 0) -> None:
        """Convert the window that begins there into `out`, which may have any size, dtype and device."""
        ...

    def raw_matrix(self, name: str, rows: range | None = None, columns: range | None = None) -> CodedMatrix | None:
        """Return a matrix, or a window of it, for reading its codes; None if the files have plain floats of it."""
        ...

    def drop_pages(self) -> None:
        """Remove the files' mapped pages from this process's memory; what is read again is mapped again."""
        ...


def copy_values(matrix: CodedMatrix, out: Tensor) -> None:
    """Convert the values of a matrix, or of the window that it is, into `out`, a few rows at a time."""
    step = max(1, _CHUNK // out.shape[1])
    for start in range(0, len(out), step):
        values = matrix.values(start, min(step, len(out) - start))
        out[start : start + step].copy_(torch.from_numpy(values))
