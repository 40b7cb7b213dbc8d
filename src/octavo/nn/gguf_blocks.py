"""The GGUF types that can be read, and the conversion of their blocks.

Owns: one entry per type, which converts blocks to floats and, where a kernel can hold them, to codes that preserve the
type's bits. To add a type, add an entry here and the type's position in the order of artifacts/hub.py.
Does not: pack codes (packed_weight.py does) or read files.
Invariants: each row is converted independently, so a weight may be converted in pieces. Scales and minima are float16;
a weight whose scales float16 cannot represent has no codes (None).
Shapes: F output rows, B blocks, N bytes of a block's codes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from octavo.nn.packed_weight import GROUP, Bytes, Codes, WeightKind

Halves = npt.NDArray[np.float16]
Values = npt.NDArray[np.float32]
_TWO_BITS = np.arange(0, 8, 2, dtype=np.uint8)[:, None]  # shifts of the four numbers in a byte
# The codes, scales and minima (None if the kind has no minima) of blocks; one row per block.
BlockParts = tuple[npt.NDArray[np.generic], Halves, Halves | None]


@dataclass(frozen=True, slots=True)
class BlockCodes:
    """How a type's bits are preserved: the packed kind, the number of inputs that share a scale, and a conversion.

    `convert` takes blocks [B, N], whose layouts the GGUF specification gives; see `packed_weight.Codes` for the parts.
    """

    kind: WeightKind
    group: int
    convert: Callable[[Bytes], BlockParts]


@dataclass(frozen=True, slots=True)
class GGUFType:
    """A type that can be read. Without `codes`, values are quantised again as `nearest`, or stay floats without that.

    `dequantize` returns the values of blocks [B, N]; None means the gguf package's function.
    """

    codes: BlockCodes | None = None
    nearest: WeightKind | None = None
    dequantize: Callable[[Bytes], Values] | None = None


@dataclass(frozen=True, slots=True)
class RawMatrix:
    """A matrix, or a window of one, as whole blocks: bytes [F, bytes of the blocks], and the columns that count.

    `order` has the stored row of each row, None if the rows are in order.
    """

    stored: Bytes
    type: GGMLQuantizationType
    columns: range
    order: npt.NDArray[np.int64] | None = None

    @property
    def type_name(self) -> str:
        """Name of the blocks' type."""
        return self.type.name

    @property
    def kind(self) -> tuple[WeightKind, int] | None:
        """Kind and group of the codes; None if the values stay floats, or the window is not of whole groups."""
        entry = GGUF_TYPES[self.type]
        if self.columns.start % GROUP or self.columns.stop % GROUP:
            return None
        if entry.codes is not None:
            return entry.codes.kind, entry.codes.group
        return None if entry.nearest is None else (entry.nearest, GROUP)

    @property
    def is_kept(self) -> bool:
        """Return True if `codes` preserves the blocks' bits, False if the values are to be quantised again."""
        return GGUF_TYPES[self.type].codes is not None

    def codes(self, first_row: int, num_rows: int) -> Codes | None:
        """Convert some rows; return None if float16 cannot represent a scale of their blocks."""
        codes = codes_of_blocks(self._rows(first_row, num_rows), self.type)
        return None if codes is None else codes.cut(slice(self.columns.start, self.columns.stop))

    def values(self, first_row: int, num_rows: int) -> Values:
        """Return the float32 values of some rows."""
        values = dequantize(self._rows(first_row, num_rows), self.type)
        return np.ascontiguousarray(values[:, self.columns.start : self.columns.stop])

    def _rows(self, first_row: int, num_rows: int) -> Bytes:
        rows = slice(first_row, first_row + num_rows)
        return self.stored[rows] if self.order is None else self.stored[self.order[rows]]


def codes_of_blocks(raw: Bytes, kind: GGMLQuantizationType) -> Codes | None:
    """Convert whole rows of blocks, [F, bytes of a row]; return None if float16 cannot represent a scale.

    Types with one scale for each block lose nothing, but for an MXFP4 scale below 2**-24, which float16 cannot hold.
    The scales of other types, products of two numbers, are rounded to float16.
    """
    entry = GGUF_TYPES[kind].codes
    assert entry is not None, "a type whose bits are kept"
    codes, scales, minima = entry.convert(np.ascontiguousarray(raw).reshape(-1, GGML_QUANT_SIZES[kind][1]))
    num_rows = raw.shape[0]
    if not np.isfinite(scales).all() or (minima is not None and not np.isfinite(minima).all()):
        return None
    shaped_minima = None if minima is None else minima.reshape(num_rows, -1)
    return Codes(entry.kind, entry.group, codes.reshape(num_rows, -1), scales.reshape(num_rows, -1), shaped_minima)


def dequantize(raw: Bytes, kind: GGMLQuantizationType) -> Values:
    """Return the float32 values of whole rows of raw bytes, as a new array."""
    own = GGUF_TYPES[kind].dequantize
    if own is not None:
        return own(np.ascontiguousarray(raw).reshape(-1, GGML_QUANT_SIZES[kind][1])).reshape(*raw.shape[:-1], -1)
    values: Values = quants.dequantize(raw, kind)
    return values if values.flags.writeable else values.copy()  # float32 values are a view of the file


def _halves(blocks: Bytes, start: int) -> Halves:
    """Return the float16 at this byte of every block."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16)[:, 0]


def _scaled(blocks: Bytes, start: int, factors: npt.NDArray[np.integer[Any]]) -> Halves:
    """Return the products of the float16 at this byte with each block's factors, rounded."""
    with np.errstate(over="ignore", invalid="ignore"):
        return (_halves(blocks, start).astype(np.float32)[:, None] * factors).astype(np.float16)


def _nibbles(bytes_BN: Bytes, run: int) -> Bytes:
    """Split bytes into 4-bit codes: of each `run` bytes, first all low halves, then all high halves."""
    runs = bytes_BN.reshape(len(bytes_BN), -1, run)
    codes = np.empty((*runs.shape[:2], 2, run), np.uint8)
    np.bitwise_and(runs, 15, out=codes[:, :, 0])
    np.right_shift(runs, 4, out=codes[:, :, 1])
    return codes


def _q4_0(blocks: Bytes) -> BlockParts:
    scales = _halves(blocks, 0)
    with np.errstate(over="ignore"):
        return _nibbles(blocks[:, 2:], 16), scales, scales * np.float16(-8)


def _q4_1(blocks: Bytes) -> BlockParts:
    return _nibbles(blocks[:, 4:], 16), _halves(blocks, 0), _halves(blocks, 2)


def _q8_0(blocks: Bytes) -> BlockParts:
    return np.ascontiguousarray(blocks[:, 2:]).view(np.int8), _halves(blocks, 0), None


def _q4_k(blocks: Bytes) -> BlockParts:
    """Convert blocks of 256: two float16, eight scales and minima of 6 bits in 12 bytes, codes by runs of 64."""
    low, middle, high = (blocks[:, start : start + 4] for start in (4, 8, 12))
    scales = np.concatenate((low & 63, (high & 15) | (low >> 6 << 4)), axis=1)
    minima = np.concatenate((middle & 63, (high >> 4) | (middle >> 6 << 4)), axis=1)
    return _nibbles(blocks[:, 16:], 32), _scaled(blocks, 0, scales), -_scaled(blocks, 2, minima)


def _q6_k(blocks: Bytes) -> BlockParts:
    """Convert blocks of 256: low 4 bits, high 2 bits, sixteen int8 scales, one float16; codes are offset by 32."""
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    codes = np.empty((len(blocks), 2, 2, 64), np.uint8)  # [block, half, low or high nibbles, 2 runs of 32]
    np.bitwise_and(low, 15, out=codes[:, :, :1])
    np.right_shift(low, 4, out=codes[:, :, 1:])
    runs = codes.reshape(-1, 2, 4, 32)
    runs |= (high >> _TWO_BITS & 3) << 4
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    return runs.view(np.int8) - np.int8(32), _scaled(blocks, 208, scales), None


def _q5_0(blocks: Bytes) -> BlockParts:
    """Convert blocks of 32: the fifth bits are in 4 bytes; codes are offset by 16."""
    codes = _nibbles(blocks[:, 6:], 16).reshape(-1, 32)
    codes |= np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little") << 4
    return codes.view(np.int8) - np.int8(16), _halves(blocks, 0), None


def _q3_k(blocks: Bytes) -> BlockParts:
    """Convert blocks of 256: inverted high bits, low 2 bits, sixteen scales of 6 bits (offset by 32), one float16."""
    low = (blocks[:, 32:96].reshape(-1, 2, 1, 32) >> _TWO_BITS & 3).reshape(-1, 8, 32)
    high = np.unpackbits(blocks[:, :32].reshape(-1, 1, 32), axis=1, bitorder="little")
    codes = (low | high << 2).view(np.int8) - np.int8(4)
    low_scales = _nibbles(blocks[:, 96:104], 8).reshape(-1, 4, 4)
    scales = (low_scales | (blocks[:, None, 104:108] >> _TWO_BITS & 3) << 4).reshape(-1, 16)
    return codes.reshape(len(blocks), 256), _scaled(blocks, 108, scales.view(np.int8) - np.int8(32)), None


def _iq4_nl(blocks: Bytes) -> BlockParts:
    return _nibbles(blocks[:, 2:], 16), _halves(blocks, 0), None


def _iq4_xs(blocks: Bytes) -> BlockParts:
    """Convert blocks of 256: one float16, eight scales of 6 bits (offset by 32) in 2 and 4 bytes, codes."""
    high = (blocks[:, 2:4, None] >> _TWO_BITS.reshape(4) & 3).reshape(-1, 8)
    low = (blocks[:, 4:8, None] >> np.array([0, 4], np.uint8) & 15).reshape(-1, 8)
    return _nibbles(blocks[:, 8:], 16), _scaled(blocks, 0, (low | high << 4).view(np.int8) - np.int8(32)), None


def _mxfp4(blocks: Bytes) -> BlockParts:
    """Convert blocks of 32: an exponent, offset by 127; the scale is half, because the table's values are doubled."""
    exponents = blocks[:, 0].astype(np.int32) - 128
    with np.errstate(over="ignore"):
        return _nibbles(blocks[:, 1:], 16), np.ldexp(np.float32(1), exponents).astype(np.float16), None


def _nvfp4(blocks: Bytes) -> BlockParts:
    """Convert blocks of 64: four scales, E4M3 without sign, which the gguf package halves; codes by runs of 8."""
    return _nibbles(blocks[:, 4:], 8), quants.NVFP4.ue4m3_to_fp32(blocks[:, :4]).astype(np.float16), None


def _ternary(read: Callable[[Bytes], Values]) -> Callable[[Bytes], BlockParts]:
    """Return the conversion of a type whose values are the last float16 times -1 to 2: codes from 0 and a minimum."""

    def convert(blocks: Bytes) -> BlockParts:
        scales = np.repeat(_halves(blocks, blocks.shape[1] - 2), 8)
        plain = blocks.copy()
        plain[:, -2:] = np.array([0, 0x3C], np.uint8)  # 1 as float16
        return (read(plain) + np.float32(1)).astype(np.uint8), scales, -scales

    return convert


GGUF_TYPES: dict[GGMLQuantizationType, GGUFType] = {
    GGMLQuantizationType.F32: GGUFType(),
    GGMLQuantizationType.F16: GGUFType(),
    GGMLQuantizationType.BF16: GGUFType(),
    GGMLQuantizationType.Q4_0: GGUFType(BlockCodes(WeightKind.INT4, 32, _q4_0)),
    GGMLQuantizationType.Q4_1: GGUFType(BlockCodes(WeightKind.INT4, 32, _q4_1)),
    GGMLQuantizationType.Q5_0: GGUFType(BlockCodes(WeightKind.INT8, 32, _q5_0)),
    GGMLQuantizationType.Q8_0: GGUFType(BlockCodes(WeightKind.INT8, 32, _q8_0)),
    GGMLQuantizationType.Q3_K: GGUFType(BlockCodes(WeightKind.INT8, 16, _q3_k)),
    GGMLQuantizationType.Q4_K: GGUFType(BlockCodes(WeightKind.INT4, 32, _q4_k)),
    GGMLQuantizationType.Q6_K: GGUFType(BlockCodes(WeightKind.INT8, 16, _q6_k)),
    GGMLQuantizationType.IQ4_NL: GGUFType(BlockCodes(WeightKind.IQ4, 32, _iq4_nl)),
    GGMLQuantizationType.IQ4_XS: GGUFType(BlockCodes(WeightKind.IQ4, 32, _iq4_xs)),
    GGMLQuantizationType.MXFP4: GGUFType(BlockCodes(WeightKind.MXFP4, 32, _mxfp4)),
    GGMLQuantizationType.NVFP4: GGUFType(BlockCodes(WeightKind.MXFP4, 16, _nvfp4)),
    GGMLQuantizationType.TQ1_0: GGUFType(BlockCodes(WeightKind.INT4, 32, _ternary(quants.TQ1_0.dequantize_blocks))),
    GGMLQuantizationType.TQ2_0: GGUFType(BlockCodes(WeightKind.INT4, 32, _ternary(quants.TQ2_0.dequantize_blocks))),
}
# No kernel has their minima or grids.
for _name in ("Q5_1", "Q2_K", "Q5_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"):
    GGUF_TYPES[GGMLQuantizationType[_name]] = GGUFType(nearest=WeightKind.INT8)
