"""A weight in the layout that the C++ kernels read.

Owns: the buffer (new memory or a piece of a mapped file), the bias, the descriptor, and a slow twin, which unpacks
the bytes with torch.
Does not: quantise, read files, or pack by itself (csrc/linear_pack.cpp does; the bytes are csrc/linear_layout.h's).
Invariants: the buffer starts at a multiple of 64 bytes and is contiguous; once packed it never changes.
Shapes: F outputs, E inputs, P panels of 16 outputs, G groups of inputs.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from ctypes import c_int64, c_void_p
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.ops import cpu

Bytes = npt.NDArray[np.uint8]

ALIGNMENT = 64
GROUP = 32  # inputs that share a scale, and the unit in which weights with codes are cut
_PANEL = 16
_INT4_RECORD = 320  # bytes of one group of one int4 panel: scales, minima, codes


class WeightKind(IntEnum):
    """The enum WeightKind of csrc/linear.h. From INT8 on, weights have codes; IQ4, MXFP4 and NF4 have a table."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT4 = 3
    IQ4 = 4
    MXFP4 = 5
    NF4 = 6


# How many inputs may share a scale.
GROUPS: Mapping[WeightKind, tuple[int, ...]] = {
    WeightKind.INT8: (32, 16),
    WeightKind.INT4: (32,),
    WeightKind.IQ4: (32,),
    WeightKind.MXFP4: (32, 16),
    WeightKind.NF4: (32,),
}
# The values that a table kind's codes select; the same as in csrc/linear_layout.h, which has their sources. MXFP4's are
# doubled, so its scales are half of the format's. NF4's are multiplied by NF4_ONE and rounded.
CODE_VALUES: Mapping[WeightKind, npt.NDArray[np.int8]] = {
    WeightKind.IQ4: np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8),
    WeightKind.MXFP4: np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8),
    WeightKind.NF4: np.array([-112, -78, -59, -44, -32, -21, -10, 0, 9, 18, 28, 38, 49, 63, 81, 112], np.int8),
}
NF4_ONE = 112.05


class WeightDescriptor(ctypes.Structure):
    """struct Weight of csrc/linear.h."""

    _fields_ = (
        ("kind", c_int64),
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("group", c_int64),
        ("packed", c_void_p),
        ("bias", c_void_p),
    )


class MultiplicationDescriptor(ctypes.Structure):
    """struct Multiplication of csrc/multiply.h."""

    _fields_ = (("parts", ctypes.POINTER(WeightDescriptor)), ("num_parts", c_int64))


@dataclass(frozen=True, slots=True)
class Codes:
    """Rows of a weight before packing: value_FE = codes_FE * scales_FG + minima_FG; `group` inputs share a scale.

    Codes are uint8 in 0..15 for INT4, and int8 for INT8, which has no minima. For a kind of CODE_VALUES they are uint8
    in 0..15, value_FE = CODE_VALUES[kind][codes_FE] * scales_FG, and there are no minima. For a float kind, `codes` are
    the values (for BFLOAT16 their bits as uint16), there are no scales or minima, and `group` is 0.
    """

    kind: WeightKind
    group: int
    codes: npt.NDArray[np.generic]
    scales: npt.NDArray[np.float16] | None = None
    minima: npt.NDArray[np.float16] | None = None

    def cut(self, columns: slice) -> Codes:
        """Return these columns, whose ends are multiples of the group."""
        if columns == slice(0, self.codes.shape[1]):
            return self
        of_groups = slice(columns.start // max(1, self.group), columns.stop // max(1, self.group))
        scales, minima = (None if part is None else part[:, of_groups] for part in (self.scales, self.minima))
        return replace(self, codes=self.codes[:, columns], scales=scales, minima=minima)

    def dequantize(self) -> Tensor:
        """Return float32 values [F, E] as a new tensor."""
        if self.kind == WeightKind.FLOAT32:
            return torch.from_numpy(self.codes).clone()
        if self.kind == WeightKind.BFLOAT16:
            return torch.from_numpy(self.codes.view(np.int16)).view(torch.bfloat16).float()
        assert self.scales is not None, "quantised kinds have scales"
        rows, groups = self.scales.shape
        table = CODE_VALUES.get(self.kind)
        codes = self.codes if table is None else table[self.codes]
        values = torch.from_numpy(codes).float().view(rows, groups, self.group)
        values *= torch.from_numpy(self.scales).float()[..., None]
        if self.minima is not None:
            values += torch.from_numpy(self.minima).float()[..., None]
        return values.view(rows, -1)


@dataclass(frozen=True, slots=True)
class WeightShape:
    """The kind and sizes of a packed weight. `group` is the number of inputs that share a scale; 0 for float kinds."""

    kind: WeightKind
    outputs: int
    inputs: int
    group: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the packed form."""
        return int(_packing()[0](self.kind, self.outputs, self.inputs, self.group))


class PackedWeight:
    """y_TF = x_TE W_FE^T + b_F with W packed. A user of the descriptor must keep this object, which owns the memory."""

    __slots__ = ("bias", "buffer", "shape")

    def __init__(self, shape: WeightShape, buffer: Bytes, bias: npt.NDArray[np.float32] | None = None) -> None:
        assert len(buffer) == shape.nbytes and buffer.ctypes.data % ALIGNMENT == 0, "a packed buffer, aligned"
        assert bias is None or (bias.shape == (shape.outputs,) and bias.dtype == np.float32), "a bias of float32"
        self.shape = shape
        self.buffer = buffer
        self.bias = bias

    @classmethod
    def pack(cls, codes: Codes, bias: npt.NDArray[np.float32] | None = None) -> PackedWeight:
        """Pack all rows of a weight at once."""
        outputs, inputs = codes.codes.shape
        shape = WeightShape(codes.kind, outputs, inputs, codes.group)
        buffer = empty_buffer(shape.nbytes)
        pack_rows(shape, buffer, 0, codes)
        return cls(shape, buffer, bias)

    @property
    def kind(self) -> WeightKind:
        """The representation of the values."""
        return self.shape.kind

    @property
    def outputs(self) -> int:
        """Output rows, F."""
        return self.shape.outputs

    @property
    def inputs(self) -> int:
        """Inputs, E."""
        return self.shape.inputs

    @property
    def group(self) -> int:
        """Inputs that share a scale; 0 for the float kinds."""
        return self.shape.group

    @property
    def nbytes(self) -> int:
        """Bytes of the packed buffer."""
        return len(self.buffer)

    def descriptor(self) -> WeightDescriptor:
        """Return the struct that the kernels take; it holds addresses into this object's memory."""
        bias = None if self.bias is None else self.bias.ctypes.data
        return WeightDescriptor(self.kind, self.outputs, self.inputs, self.group, self.buffer.ctypes.data, bias)

    def dequantize(self) -> Tensor:
        """Return the float32 weight [F, E] as a new tensor, read from the packed bytes. Slow."""
        values_PE = _UNPACK[self.kind](self.buffer.copy().reshape(-(-self.outputs // _PANEL), -1), self.shape)
        return values_PE.reshape(-1, self.inputs)[: self.outputs].contiguous()


def most_frequent_code(weights: Iterable[PackedWeight | WeightShape]) -> str:
    """Return the name of the code that most values have, or "none" if most are floats."""
    sizes = Counter[WeightKind]()
    for weight in weights:
        sizes[weight.kind] += weight.outputs * weight.inputs
    kind = sizes.most_common(1)[0][0]
    return kind.name.lower() if kind in GROUPS else "none"


def empty_buffer(nbytes: int) -> Bytes:
    """Return zeroed bytes that start at a multiple of 64; untouched pages take no memory."""
    whole = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -whole.ctypes.data % ALIGNMENT
    return whole[start : start + nbytes]


def pack_rows(shape: WeightShape, buffer: Bytes, first_row: int, codes: Codes) -> None:
    """Pack rows of `codes` into a weight's buffer, from row `first_row` on. Threads may pack different rows at once."""
    num_rows, inputs = codes.codes.shape
    assert (codes.kind, codes.group, inputs) == (shape.kind, shape.group, shape.inputs), "rows of this weight"
    assert first_row >= 0 and first_row + num_rows <= shape.outputs, "rows inside the weight"
    parts = [None if part is None else np.ascontiguousarray(part) for part in (codes.codes, codes.scales, codes.minima)]
    addresses = (None if part is None else part.ctypes.data for part in parts)
    _packing()[1](
        shape.kind, shape.outputs, shape.inputs, shape.group, *addresses, buffer.ctypes.data, first_row, num_rows
    )


@cache
def _packing() -> tuple[Callable[..., Any], Callable[..., Any]]:
    size = cpu.function("octavo_linear_packed_bytes", c_int64, c_int64, c_int64, c_int64, result=c_int64)
    pack = cpu.function(
        "octavo_linear_pack",
        *(c_int64, c_int64, c_int64, c_int64),
        *(c_void_p, c_void_p, c_void_p, c_void_p),
        *(c_int64, c_int64),
    )
    assert size is not None and pack is not None, "weights are packed only where the kernels are"
    return size, pack


def _unpack_float32(panels: Bytes, shape: WeightShape) -> Tensor:
    values_PEF = torch.from_numpy(panels.view(np.float32)).view(-1, shape.inputs, _PANEL)
    return values_PEF.transpose(1, 2)


def _unpack_bfloat16(panels: Bytes, shape: WeightShape) -> Tensor:
    pairs = torch.from_numpy(panels.view(np.int16)).view(torch.bfloat16).view(len(panels), -1, _PANEL, 2)
    return pairs.transpose(1, 2).reshape(len(panels), _PANEL, -1)[..., : shape.inputs].float()


def _unpack_int8(panels: Bytes, shape: WeightShape) -> Tensor:
    quads = panels[:, -shape.inputs * _PANEL :].reshape(-1, shape.inputs // 4, _PANEL, 4)
    codes = torch.from_numpy(np.ascontiguousarray(quads.swapaxes(1, 2))).float().sub_(128)
    return _scaled(codes, panels, shape)


def _scaled(codes: Tensor, panels: Bytes, shape: WeightShape) -> Tensor:
    """Multiply the codes of panels [P, 16, E] by the scales at the start of each panel."""
    groups = shape.inputs // shape.group
    scales = np.ascontiguousarray(panels[:, : groups * 2 * _PANEL]).view(np.float16).reshape(-1, groups, _PANEL)
    codes = codes.view(len(panels), _PANEL, groups, shape.group)
    return codes * torch.from_numpy(np.ascontiguousarray(scales.swapaxes(1, 2))).float()[..., None]


def _unpack_table(panels: Bytes, shape: WeightShape) -> Tensor:
    codes = _halves(panels[:, -shape.inputs * _PANEL // 2 :])
    return _scaled(torch.from_numpy(CODE_VALUES[shape.kind][codes]).float(), panels, shape)


def _halves(packed: Bytes) -> Bytes:
    """Return the codes of panels [P, 16, G, 32] from their half bytes, [P, G * 256]."""
    quads = packed.reshape(len(packed), -1, 4, _PANEL, 4)
    lanes = quads.transpose(0, 3, 1, 2, 4).reshape(len(packed), _PANEL, -1, 16)
    return np.concatenate((lanes & 15, lanes >> 4), axis=-1)


def _unpack_int4(panels: Bytes, shape: WeightShape) -> Tensor:
    records = panels.reshape(len(panels), -1, _INT4_RECORD)
    heads = np.ascontiguousarray(records[..., : 4 * _PANEL]).view(np.float16)  # [panel, group, scales then minima]
    scales, minima = (
        torch.from_numpy(np.ascontiguousarray(part.swapaxes(1, 2))).float()[..., None]
        for part in (heads[..., :_PANEL], heads[..., _PANEL:])
    )
    codes = _halves(records[..., 4 * _PANEL :].reshape(len(panels), -1))
    return torch.from_numpy(codes).float() * scales + minima


_UNPACK = {
    WeightKind.FLOAT32: _unpack_float32,
    WeightKind.BFLOAT16: _unpack_bfloat16,
    WeightKind.INT8: _unpack_int8,
    WeightKind.INT4: _unpack_int4,
    WeightKind.IQ4: _unpack_table,
    WeightKind.MXFP4: _unpack_table,
    WeightKind.NF4: _unpack_table,
}
