"""The matrices of experts as one matrix for each role, however the files have them.

Owns: the layouts of experts in files (see MixtureFamily): a tensor for each expert, or one tensor of all experts.
Does not: read files (the wrapped source does), pack, or know families.
Invariants: a stacked matrix [X * F, E] has the F rows of each expert in order, and is read by rows without a copy of
the whole. It has codes if all experts have codes of one kind.
Shapes: X experts, F output rows of an expert, E inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.artifacts.mixtures import ExpertMatrix
from octavo.errors import ModelFileError
from octavo.nn.packed_weight import Codes, WeightKind
from octavo.nn.weight_source import CodedMatrix, WeightSource


@dataclass(frozen=True, slots=True)
class _Piece:
    """One expert's rows: those of a matrix, or of matrix `expert` of a tensor of three dimensions, or columns of it."""

    tensor: str
    rows: range
    expert: int | None = None
    is_transposed: bool = False


class StackedExperts:
    """A WeightSource over another one, in which every ExpertMatrix is one tensor."""

    def __init__(self, source: WeightSource, matrices: Sequence[ExpertMatrix]) -> None:
        """Find the experts. Raises ModelFileError for an expert that is missing or of another shape."""
        self._source = source
        self._pieces: dict[str, list[_Piece]] = {}
        self._small: dict[str, tuple[str, ExpertMatrix]] = {}  # the tensor, and where in it the values are
        self._transposed: tuple[str, int, Tensor] | None = None  # the last matrix, because its rows are read in pieces
        shapes = dict(source.shapes)
        for matrix in matrices:
            stored = shapes.get(matrix.name)
            if stored == matrix.shape:
                continue
            if not matrix.num_inputs or (stored is not None and len(stored) == 1):
                self._find_small(matrix)
            else:
                self._pieces[matrix.name] = list(self._find(matrix))
        used = {piece.tensor for pieces in self._pieces.values() for piece in pieces}
        for name in used.union(tensor for tensor, _ in self._small.values()):
            shapes.pop(name, None)
        for matrix in matrices:
            if matrix.name in self._small or self._pieces.get(matrix.name):
                shapes[matrix.name] = matrix.shape
        self.shapes: Mapping[str, tuple[int, ...]] = MappingProxyType(shapes)

    @property
    def notes(self) -> tuple[str, ...]:
        """The wrapped source's notes."""
        return self._source.notes

    def path(self, name: str) -> Path:
        """Return the file of a tensor, or of the first expert."""
        if name in self._small:
            return self._source.path(self._small[name][0])
        pieces = self._pieces.get(name)
        return self._source.path(pieces[0].tensor if pieces else name)

    def read_into(self, name: str, out: Tensor, first_row: int = 0, first_column: int = 0) -> None:
        """Convert a window, expert by expert."""
        if name in self._small:
            out.copy_(self._read_small(name)[first_row : first_row + len(out)])
            return
        pieces = self._pieces.get(name)
        if not pieces:
            self._source.read_into(name, out, first_row, first_column)
            return
        for piece, rows, start in _overlaps(pieces, first_row, len(out)):
            self._read_piece(piece, rows, out[start : start + len(rows)], first_column)

    def raw_matrix(self, name: str, rows: range | None = None, columns: range | None = None) -> CodedMatrix | None:
        """Return a matrix whose experts all have codes, or a window of it."""
        pieces = self._pieces.get(name)
        if not pieces:
            return None if name in self._small else self._source.raw_matrix(name, rows, columns)
        if any(piece.expert is not None for piece in pieces):
            return None
        wanted = range(len(pieces) * len(pieces[0].rows)) if rows is None else rows
        coded = []
        for piece, rows_there, _ in _overlaps(pieces, wanted.start, len(wanted)):
            matrix = self._source.raw_matrix(piece.tensor, range(rows_there.start, rows_there[-1] + 1), columns)
            if matrix is None:
                return None
            coded.append(_CodedPiece(matrix, len(rows_there), rows_there.step))
        return StackedCodes(tuple(coded))

    def drop_pages(self) -> None:
        """Remove the files' mapped pages from this process's memory."""
        self._source.drop_pages()

    def _find(self, matrix: ExpertMatrix) -> Iterator[_Piece]:
        """Yield each expert's rows; nothing if no tensor has them."""
        shapes, rows = self._source.shapes, range(matrix.first_row, matrix.rows_of_expert, matrix.step)
        rows = rows[: matrix.num_rows]
        if matrix.whole in shapes:
            count, stored, inputs = matrix.num_experts, matrix.rows_of_expert, matrix.num_inputs
            whole = (count, inputs, stored) if matrix.is_transposed else (count, stored, inputs)
            is_matrix = len(shapes[matrix.whole]) == 2  # of codes, whose rows are in order
            self._check(matrix.whole, (count * stored, inputs) if is_matrix else whole)
            for expert in range(count):
                start = expert * stored
                if is_matrix:
                    yield _Piece(matrix.whole, range(start + rows.start, start + rows.stop, rows.step))
                else:
                    yield _Piece(matrix.whole, rows, expert, matrix.is_transposed)
        elif matrix.of_expert(0) in shapes:
            for expert in range(matrix.num_experts):
                self._check(matrix.of_expert(expert), (matrix.num_rows, matrix.num_inputs))
                yield _Piece(matrix.of_expert(expert), range(matrix.num_rows))

    def _find_small(self, matrix: ExpertMatrix) -> None:
        """Find a vector, or a matrix of one row, whose tensor has another name or shape."""
        own = matrix._replace(whole=matrix.name, first_row=0, step=1, rows_of_expert=matrix.num_rows)
        for place in (own, matrix):
            shape = self._source.shapes.get(place.whole)
            if shape is not None:
                count = place.rows_of_expert * max(1, place.num_inputs)
                if math.prod(shape) != place.num_experts * count:
                    self._check(place.whole, (place.num_experts, count))
                self._small[matrix.name] = (place.whole, place)
                return

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        actual = self._source.shapes.get(name)
        if actual is None:
            raise ModelFileError(self._source.path(name), "is missing", name)
        if actual != shape:
            reason = f"has shape {list(actual)}, the configuration needs {list(shape)}"
            raise ModelFileError(self._source.path(name), reason, name)

    def _read_small(self, name: str) -> Tensor:
        tensor, place = self._small[name]
        values = torch.empty(self._source.shapes[tensor])
        self._source.read_into(tensor, values)
        if place.num_inputs:
            return values.view(place.shape)
        return values.view(place.num_experts, -1)[:, place.first_row :: place.step][:, : place.num_rows].reshape(-1)

    def _read_piece(self, piece: _Piece, rows: range, out: Tensor, first_column: int) -> None:
        """Read rows of one expert, some of which may be skipped."""
        columns, num_stored = slice(first_column, first_column + out.shape[1]), rows[-1] + 1 - rows.start
        if piece.is_transposed:
            out.copy_(self._columns_of(piece)[columns, rows.start : rows[-1] + 1 : rows.step].T)
        elif piece.expert is not None:
            values = torch.empty(1, num_stored, self._source.shapes[piece.tensor][-1])
            self._source.read_into(piece.tensor, values, piece.expert, rows.start)
            out.copy_(values[0, :: rows.step, columns])
        elif rows.step == 1:
            self._source.read_into(piece.tensor, out, rows.start, first_column)
        else:
            values = torch.empty(num_stored, out.shape[1])
            self._source.read_into(piece.tensor, values, rows.start, first_column)
            out.copy_(values[:: rows.step])

    def _columns_of(self, piece: _Piece) -> Tensor:
        """Return one expert's matrix [E, rows of the expert]."""
        assert piece.expert is not None, "only tensors of three dimensions are transposed"
        held = self._transposed
        if held is None or held[:2] != (piece.tensor, piece.expert):
            values = torch.empty(1, *self._source.shapes[piece.tensor][1:])
            self._source.read_into(piece.tensor, values, piece.expert)
            held = self._transposed = (piece.tensor, piece.expert, values[0])
        return held[2]


@dataclass(frozen=True, slots=True)
class _CodedPiece:
    """Every `step`-th row of a matrix with codes."""

    matrix: CodedMatrix
    num_rows: int
    step: int


@dataclass(frozen=True, slots=True)
class StackedCodes:
    """Matrices with codes as one; see CodedMatrix."""

    pieces: tuple[_CodedPiece, ...]

    @property
    def type_name(self) -> str:
        """Name of the first expert's codes."""
        return self.pieces[0].matrix.type_name

    @property
    def kind(self) -> tuple[WeightKind, int] | None:
        """The kind that all experts have; None if theirs differ."""
        kinds = {piece.matrix.kind for piece in self.pieces}
        return kinds.pop() if len(kinds) == 1 else None

    @property
    def is_kept(self) -> bool:
        """Return True if every expert's codes are kept."""
        return all(piece.matrix.is_kept for piece in self.pieces)

    def codes(self, first_row: int, num_rows: int) -> Codes | None:
        """Return some rows in the form that is packed."""
        found = []
        for piece, first, count in self._parts(first_row, num_rows):
            codes = piece.matrix.codes(first * piece.step, (count - 1) * piece.step + 1)
            if codes is None:
                return None
            found.append(codes)
        return _joined(found, [piece.step for piece, _, _ in self._parts(first_row, num_rows)])

    def values(self, first_row: int, num_rows: int) -> npt.NDArray[np.float32]:
        """Return the values of some rows."""
        return np.concatenate(
            [
                piece.matrix.values(first * piece.step, (count - 1) * piece.step + 1)[:: piece.step]
                for piece, first, count in self._parts(first_row, num_rows)
            ]
        )

    def _parts(self, first_row: int, num_rows: int) -> Iterator[tuple[_CodedPiece, int, int]]:
        """Yield the experts that have some of these rows, with the first of them and their number."""
        start = 0
        for piece in self.pieces:
            first, end = max(first_row - start, 0), min(first_row + num_rows - start, piece.num_rows)
            if first < end:
                yield piece, first, end - first
            start += piece.num_rows


def _joined(parts: Sequence[Codes], steps: Sequence[int]) -> Codes:
    """Stack rows of codes, of each part every `step`-th."""
    if len(parts) == 1 and steps[0] == 1:
        return parts[0]

    def stack(name: str) -> Any:
        found = [(getattr(part, name), step) for part, step in zip(parts, steps, strict=True)]
        return None if found[0][0] is None else np.concatenate([array[::step] for array, step in found])

    return replace(parts[0], codes=stack("codes"), scales=stack("scales"), minima=stack("minima"))


def _overlaps(pieces: Sequence[_Piece], first_row: int, num_rows: int) -> Iterator[tuple[_Piece, range, int]]:
    """Yield the pieces that have some of these rows, those rows, and where they begin among the rows wanted."""
    size = len(pieces[0].rows)  # of every piece
    for index in range(first_row // size, -(-(first_row + num_rows) // size)):
        piece = pieces[index]
        first, end = max(first_row - index * size, 0), min(first_row + num_rows - index * size, size)
        yield piece, piece.rows[first:end], index * size + first - first_row
