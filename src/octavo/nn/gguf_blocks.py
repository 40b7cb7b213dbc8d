"""The GGUF types that can be read, and the conversion of their blocks.

Owns: one entry per type, which converts blocks to floats and to codes that preserve the type's bits. To add a type,
add an entry here and the type's position in the order of artifacts/hub.py.
Does not: pack codes (packed_weight.py does) or read files.
Invariants: each row is converted independently, so a weight may be converted in pieces. Scales and minima are float16;
a weight whose scales float16 cannot represent has no codes (None).
Shapes: F output rows, B blocks, N bytes of a block's codes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from octavo.nn.packed_weight import Bytes, Codes, WeightKind

Halves = npt.NDArray[np.float16]
Values = npt.NDArray[np.float32]
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
    """A type that can be read. If it has no `codes`, its values become floats when they are loaded.

    `dequantize` returns the values of blocks [B, N]; None means the gguf package's function.
    """

    codes: BlockCodes | None = None
    dequantize: Callable[[Bytes], Values] | None = None


@dataclass(frozen=True, slots=True)
class RawMatrix:
    """A matrix, or a window of one, as whole blocks: bytes [F, bytes of the blocks], and the columns that count."""

    rows: Bytes
    type: GGMLQuantizationType
    columns: range

    def is_aligned(self, group: int) -> bool:
        """Return True if the columns are whole groups of this size."""
        return self.columns.start % group == 0 and self.columns.stop % group == 0

    def codes(self, first_row: int, num_rows: int) -> Codes | None:
        """Convert some rows; return None if float16 cannot represent a scale of their blocks."""
        codes = codes_of_blocks(self.rows[first_row : first_row + num_rows], self.type)
        return None if codes is None else codes.cut(slice(self.columns.start, self.columns.stop))

    def values(self, first_row: int, num_rows: int) -> Values:
        """Return the float32 values of some rows."""
        values = dequantize(self.rows[first_row : first_row + num_rows], self.type)[
            :, self.columns.start : self.columns.stop
        ]
        return np.ascontiguousarray(values)


def codes_of_blocks(raw: Bytes, kind: GGMLQuantizationType) -> Codes | None:
    """Convert whole rows of blocks, [F, bytes of a row]; return None if float16 cannot represent a scale.

    Q4_0, Q4_1 and Q8_0 lose nothing. The scales of Q4_K and Q6_K, products of two numbers, are rounded to float16.
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
    step = _halves(blocks, 0).astype(np.float32)[:, None]
    min_step = _halves(blocks, 2).astype(np.float32)[:, None]
    with np.errstate(over="ignore", invalid="ignore"):
        return (
            _nibbles(blocks[:, 16:], 32),
            (step * scales).astype(np.float16),
            (min_step * minima * np.float32(-1)).astype(np.float16),
        )


def _q6_k(blocks: Bytes) -> BlockParts:
    """Convert blocks of 256: low 4 bits, high 2 bits, sixteen int8 scales, one float16; codes are offset by 32."""
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    codes = np.empty((len(blocks), 2, 2, 64), np.uint8)  # [block, half, low or high nibbles, 2 runs of 32]
    np.bitwise_and(low, 15, out=codes[:, :, :1])
    np.right_shift(low, 4, out=codes[:, :, 1:])
    runs = codes.reshape(-1, 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    runs |= (high >> shifts & 3) << 4
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    with np.errstate(over="ignore", invalid="ignore"):
        products = _halves(blocks, 208).astype(np.float32)[:, None] * scales
        return runs.view(np.int8) - np.int8(32), products.astype(np.float16), None


GGUF_TYPES: dict[GGMLQuantizationType, GGUFType] = {
    GGMLQuantizationType.F32: GGUFType(),
    GGMLQuantizationType.F16: GGUFType(),
    GGMLQuantizationType.BF16: GGUFType(),
    GGMLQuantizationType.Q4_0: GGUFType(BlockCodes(WeightKind.INT4, 32, _q4_0)),
    GGMLQuantizationType.Q4_1: GGUFType(BlockCodes(WeightKind.INT4, 32, _q4_1)),
    GGMLQuantizationType.Q8_0: GGUFType(BlockCodes(WeightKind.INT8, 32, _q8_0)),
    GGMLQuantizationType.Q4_K: GGUFType(BlockCodes(WeightKind.INT4, 32, _q4_k)),
    GGMLQuantizationType.Q6_K: GGUFType(BlockCodes(WeightKind.INT8, 16, _q6_k)),
}
