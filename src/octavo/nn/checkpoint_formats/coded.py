"""Matrices of checkpoints whose files have codes.

Owns: rows of codes in the three forms that formats have (a grid, a table, plain values), their conversion to packed
codes, windows of matrices, and the unpacking of codes from words.
Does not: know a format; each module of this package makes matrices of one family of formats.
Invariants: each row is converted independently. At most the requested rows are held, besides the mapped file.
Shapes: F output rows, E inputs, G groups of inputs, W words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from octavo.errors import ModelFileError
from octavo.nn.packed_weight import GROUP, Bytes, Codes, WeightKind
from octavo.nn.safetensors_file import StoredTensor, Values

Stored = Mapping[str, StoredTensor]
Kind = tuple[WeightKind, int]

INT4: Kind = (WeightKind.INT4, GROUP)
INT8: Kind = (WeightKind.INT8, GROUP)
_SMALL_INT8: Kind = (WeightKind.INT8, 16)


class CodedRows(Protocol):
    """Some rows of a matrix, with all their inputs."""

    def values(self) -> Values:
        """Return the values [F, E] as a new array."""
        ...

    def codes(self, kind: Kind) -> Codes | None:
        """Return the packed form of this kind; None if float16 cannot represent a scale."""
        ...


@dataclass(frozen=True, slots=True)
class Grid:
    """Integers on a grid: value_FE = (codes_FE - zeros_FG) * scales_FG; E / G inputs share a scale.

    `zeros` is an integer if all are equal. `order` has each input's group if groups are no runs of inputs; such a
    matrix is quantised again.
    """

    integers: npt.NDArray[np.generic]
    scales: Values
    zeros: npt.NDArray[np.generic] | int
    order: npt.NDArray[np.int64] | None = None

    def values(self) -> Values:
        """Return the values."""
        if self.order is not None:
            zeros = self.zeros if isinstance(self.zeros, int) else self.zeros[:, self.order].astype(np.float32)
            return (self.integers.astype(np.float32) - zeros) * self.scales[:, self.order]
        num_rows, num_groups = self.scales.shape
        values = self.integers.astype(np.float32).reshape(num_rows, num_groups, -1)
        values -= self.zeros if isinstance(self.zeros, int) else self.zeros.astype(np.float32)[..., None]
        values *= self.scales[..., None]
        return values.reshape(num_rows, -1)

    def codes(self, kind: Kind) -> Codes | None:
        """Keep the integers: as unsigned codes with a minimum (INT4), or less their zeros (INT8)."""
        num_rows, num_inputs = self.integers.shape
        repeats = num_inputs // self.scales.shape[1] // kind[1]
        with np.errstate(over="ignore"):
            scales = self.scales.astype(np.float16)
            minima = (scales.astype(np.float32) * -np.asarray(self.zeros, np.float32)).astype(np.float16)
        if not np.isfinite(scales).all() or not np.isfinite(minima).all():
            return None
        scales = np.repeat(scales, repeats, axis=1)
        if kind[0] == WeightKind.INT4:
            return Codes(*kind, self.integers.astype(np.uint8), scales, np.repeat(minima, repeats, axis=1))
        zeros = np.asarray(self.zeros, np.int16)
        centred = self.integers.astype(np.int16).reshape(num_rows, self.scales.shape[1], -1)
        centred -= zeros[..., None] if zeros.ndim else zeros
        return Codes(*kind, centred.astype(np.int8).reshape(num_rows, -1), scales)


@dataclass(frozen=True, slots=True)
class Selected:
    """Values of a table: value_FE = table[selectors_FE] * scales_FG. The packed kind's table is that times `one`."""

    selectors: Bytes
    scales: Values
    table: Values
    one: float

    def values(self) -> Values:
        """Return the values."""
        num_rows, num_groups = self.scales.shape
        values = self.table[self.selectors].reshape(num_rows, num_groups, -1)
        values *= self.scales[..., None]
        return values.reshape(num_rows, -1)

    def codes(self, kind: Kind) -> Codes | None:
        """Keep the selectors."""
        repeats = self.selectors.shape[1] // self.scales.shape[1] // kind[1]
        with np.errstate(over="ignore"):
            scales = (self.scales / np.float32(self.one)).astype(np.float16)
        return Codes(*kind, self.selectors, np.repeat(scales, repeats, axis=1)) if np.isfinite(scales).all() else None


@dataclass(frozen=True, slots=True)
class Floats:
    """Values without codes of a packed kind."""

    floats: Values

    def values(self) -> Values:
        """Return the values."""
        return self.floats

    def codes(self, kind: Kind) -> Codes | None:
        """Never called: such a matrix is quantised again."""
        raise AssertionError("values have no codes")


@dataclass(frozen=True, slots=True)
class CodedTensor:
    """A matrix of a checkpoint. `read` returns some rows; `parts` are the file's tensors that it consists of.

    `kind` is what it is packed as, None for floats; if it `is_kept`, the packed codes are the file's.
    """

    type_name: str
    path: Path
    shape: tuple[int, int]
    parts: tuple[str, ...]
    read: Callable[[slice], CodedRows]
    kind: Kind | None
    is_kept: bool = True

    def window(self, rows: range | None, columns: range | None) -> CodedWindow:
        """Return a window (None: all rows, all columns)."""
        every_row, every_column = (range(size) for size in self.shape)
        return CodedWindow(self, every_row if rows is None else rows, every_column if columns is None else columns)


@dataclass(frozen=True, slots=True)
class CodedWindow:
    """A window of a coded tensor; see nn.weights.CodedMatrix."""

    tensor: CodedTensor
    rows: range
    columns: range

    @property
    def type_name(self) -> str:
        """Name of the files' codes, for messages."""
        return self.tensor.type_name

    @property
    def kind(self) -> Kind | None:
        """The tensor's kind; None if the window is not of whole groups."""
        is_aligned = self.columns.start % GROUP == 0 and self.columns.stop % GROUP == 0
        return self.tensor.kind if is_aligned else None

    @property
    def is_kept(self) -> bool:
        """Return True if `codes` gives the files' codes."""
        return self.tensor.is_kept

    def codes(self, first_row: int, num_rows: int) -> Codes | None:
        """Return some rows in the form that is packed; None if float16 cannot represent one of their scales."""
        assert self.tensor.kind is not None, "a matrix with codes"
        codes = self._read(first_row, num_rows).codes(self.tensor.kind)
        return None if codes is None else codes.cut(slice(self.columns.start, self.columns.stop))

    def values(self, first_row: int, num_rows: int) -> Values:
        """Return the values of some rows."""
        values = self._read(first_row, num_rows).values()
        return np.ascontiguousarray(values[:, self.columns.start : self.columns.stop])

    def _read(self, first_row: int, num_rows: int) -> CodedRows:
        first = self.rows.start + first_row
        return self.tensor.read(slice(first, min(first + num_rows, self.rows.stop)))


def grid_kind(
    bits: int, num_inputs: int, num_groups: int, has_zeros: bool, has_order: bool = False
) -> tuple[Kind | None, bool]:
    """Return the kind of a grid of unsigned codes, and whether packing keeps the codes.

    Codes less zeros are int8 except for 8 bits with zeros of any size, which are quantised again.
    """
    group = num_inputs // num_groups
    if num_inputs % GROUP:
        return None, False
    if has_order or group % 16 or (bits == 8 and has_zeros):
        return INT8, False
    if group % GROUP:
        return _SMALL_INT8, True
    return INT4 if bits <= 4 else INT8, True


def unpack(words: npt.NDArray[np.generic], bits: int) -> Bytes:
    """Split little-endian words along the last axis, [..., W] of 32 bits, into unsigned codes [..., 32 * W / bits]."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return octets
    if bits == 4:
        codes = np.empty((*octets.shape, 2), np.uint8)
        np.bitwise_and(octets, 15, out=codes[..., 0])
        np.right_shift(octets, 4, out=codes[..., 1])
        return codes.reshape(*octets.shape[:-1], -1)
    flags = np.unpackbits(octets, axis=-1, bitorder="little")
    flags = flags[..., : flags.shape[-1] // bits * bits].reshape(*octets.shape[:-1], -1, bits)
    weights = (1 << np.arange(bits)).astype(np.uint8)
    sums: Bytes = (flags * weights).sum(axis=-1, dtype=np.uint8)
    return sums


def unpack_slice(words: npt.NDArray[Any], bits: int, rows: slice) -> Bytes:
    """Unpack only the codes `rows` along the last axis; whole units of 32 codes are read."""
    first, end = rows.start // 32, -(-rows.stop // 32)
    codes = unpack(words[..., first * bits : end * bits], bits)
    return codes[..., rows.start - first * 32 : rows.stop - first * 32]


def part(stored: Stored, base: str, name: str, *, beside: StoredTensor) -> StoredTensor:
    """Return the part `base` + `name` of a matrix. Raises ModelFileError if the files lack it."""
    found = stored.get(base + name)
    if found is None:
        raise ModelFileError(beside.path, f"is missing, though {beside.name} is there", base + name)
    return found


def whole_groups(scales: StoredTensor, num_inputs: int, num_groups: int) -> None:
    """Raise ModelFileError unless the groups divide the inputs."""
    if num_groups < 1 or num_inputs % num_groups:
        raise scales.error(f"has {num_groups} groups, which do not divide {num_inputs} inputs")


def group_order(g_idx: StoredTensor | None, num_inputs: int, num_groups: int) -> npt.NDArray[np.int64] | None:
    """Return the group of each input, or None if groups are runs of inputs, in order."""
    if g_idx is None or not g_idx.array.size:
        return None
    g_idx.check(("I32", "I64"), (num_inputs,))
    order = g_idx.array.astype(np.int64)
    if order.min() < 0 or order.max() >= num_groups:
        raise g_idx.error(f"names groups {order.min()} to {order.max()}; there are {num_groups}")
    is_plain = np.array_equal(order, np.arange(num_inputs) // (num_inputs // num_groups))
    return None if is_plain else order
