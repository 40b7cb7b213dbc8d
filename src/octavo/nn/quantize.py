"""Weights as codes: those of GGUF blocks, and 8-bit or 4-bit codes of float weights.

Owns: the conversions to codes, and which kind each weight gets.
Does not: pack codes (packed_weight.py does) or read files.
Invariants: every function converts each row by itself, so that rows may be converted in pieces. Scales and minima are
float16; a weight whose scales float16 cannot hold has no codes (None).
Shapes: F output rows, E inputs, G groups of inputs, B blocks of a row.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from octavo.artifacts.model_spec import ModelSpec
from octavo.artifacts.resolve import ModelFiles
from octavo.config import QUANTIZATIONS
from octavo.errors import ConfigError
from octavo.nn.packed_weight import Codes, WeightKind

Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.float16]
Floats = npt.NDArray[np.float32]

GROUP = 32
_MAX_INT8 = 127
_MAX_INT4 = 15
# Parts of a group's range over which 4-bit codes are first spread; the best of them is kept. For the squared errors on
# normal and heavy-tailed weights, compared with the whole range alone, see tests/nn/test_quantize.py.
_RANGES = ((0.0, 1.0), (0.03, 0.97), (0.08, 0.92), (0.0, 0.92), (0.08, 1.0))


def choose_quantization(quantization: str, dtype: str, files: ModelFiles, spec: ModelSpec) -> str:
    """Return "auto" (the codes of the files), "none", "int8" or "int4". Raises ConfigError.

    A given "auto" stays "auto" only for quantized GGUF files without a requested dtype, else it becomes "none".
    """
    if quantization not in QUANTIZATIONS:
        raise ConfigError(f"quantization is {quantization!r}; give one of {', '.join(QUANTIZATIONS)}")
    if quantization != "auto":
        return quantization
    return "auto" if files.kind == "gguf" and spec.quantization is not None and dtype == "auto" else "none"


def block_kind(kind: GGMLQuantizationType) -> tuple[WeightKind, int] | None:
    """Return the packed kind and group of a GGUF type; None if its blocks are not kept."""
    entry = _BLOCKS.get(kind)
    return entry[:2] if entry is not None else None


def coded_kinds() -> frozenset[tuple[WeightKind, int]]:
    """Return every kind and group that weights with codes can have."""
    return frozenset({entry[:2] for entry in _BLOCKS.values()} | {(WeightKind.INT8, GROUP), (WeightKind.INT4, GROUP)})


def codes_of_blocks(raw: Bytes, kind: GGMLQuantizationType) -> Codes | None:
    """Convert whole rows of GGUF blocks, [F, bytes of a row]; return None if float16 cannot hold a scale.

    Layouts: the GGUF specification. Q4_0, Q4_1 and Q8_0 lose nothing; Q4_K's and Q6_K's scales, products of two
    numbers, are rounded to float16.
    """
    packed_kind, group, convert = _BLOCKS[kind]
    block_bytes = GGML_QUANT_SIZES[kind][1]
    codes, scales, minima = convert(np.ascontiguousarray(raw).reshape(-1, block_bytes))
    num_rows = raw.shape[0]
    if not np.isfinite(scales).all() or (minima is not None and not np.isfinite(minima).all()):
        return None
    shaped_minima = None if minima is None else minima.reshape(num_rows, -1)
    return Codes(packed_kind, group, codes.reshape(num_rows, -1), scales.reshape(num_rows, -1), shaped_minima)


_Parts = tuple[npt.NDArray[np.generic], Halves, Halves | None]


def _halves(blocks: Bytes, start: int) -> Halves:
    """Return the float16 at this byte of every block."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16)[:, 0]


def _nibbles(bytes_BN: Bytes, run: int) -> Bytes:
    """Split bytes into 4-bit codes: for each `run` bytes, the low halves, then the high ones."""
    runs = bytes_BN.reshape(len(bytes_BN), -1, run)
    codes = np.empty((*runs.shape[:2], 2, run), np.uint8)
    np.bitwise_and(runs, 15, out=codes[:, :, 0])
    np.right_shift(runs, 4, out=codes[:, :, 1])
    return codes


def _q4_0(blocks: Bytes) -> _Parts:
    scales = _halves(blocks, 0)
    with np.errstate(over="ignore"):
        return _nibbles(blocks[:, 2:], 16), scales, scales * np.float16(-8)


def _q4_1(blocks: Bytes) -> _Parts:
    return _nibbles(blocks[:, 4:], 16), _halves(blocks, 0), _halves(blocks, 2)


def _q8_0(blocks: Bytes) -> _Parts:
    return np.ascontiguousarray(blocks[:, 2:]).view(np.int8), _halves(blocks, 0), None


def _q4_k(blocks: Bytes) -> _Parts:
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


def _q6_k(blocks: Bytes) -> _Parts:
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


_BLOCKS: dict[GGMLQuantizationType, tuple[WeightKind, int, Callable[[Bytes], _Parts]]] = {
    GGMLQuantizationType.Q4_0: (WeightKind.INT4, GROUP, _q4_0),
    GGMLQuantizationType.Q4_1: (WeightKind.INT4, GROUP, _q4_1),
    GGMLQuantizationType.Q8_0: (WeightKind.INT8, GROUP, _q8_0),
    GGMLQuantizationType.Q4_K: (WeightKind.INT4, GROUP, _q4_k),
    GGMLQuantizationType.Q6_K: (WeightKind.INT8, 16, _q6_k),
}


def codes_of_floats(values_FE: Floats, kind: WeightKind) -> Codes | None:
    """Quantise or round rows to a kind, None if float16 cannot hold a scale. For codes, GROUP must divide E."""
    if kind == WeightKind.FLOAT32:
        return Codes(kind, 0, values_FE)
    if kind == WeightKind.BFLOAT16:
        return Codes(kind, 0, _bfloat16_bits(values_FE))
    groups = values_FE.reshape(values_FE.shape[0], -1, GROUP)
    if not np.isfinite(values_FE).all() or np.abs(values_FE).max(initial=0) > np.finfo(np.float16).max:
        return None
    return _int8(groups) if kind == WeightKind.INT8 else _int4(groups)


def _bfloat16_bits(values: Floats) -> npt.NDArray[np.uint16]:
    """Round to nearest, ties to even; a NaN stays one. In numpy, so that no thread pool of torch is started."""
    bits = values.view(np.uint32)
    rounded = bits >> 16 & 1
    rounded += bits
    rounded += 0x7FFF
    rounded >>= 16
    result = rounded.astype(np.uint16)
    result[np.isnan(values)] = 0x7FC0
    return result


def _int8(groups_FGN: Floats) -> Codes:
    """Quantise symmetrically: the largest magnitude of a group becomes 127."""
    num_rows = groups_FGN.shape[0]
    scales = (np.abs(groups_FGN).max(axis=-1) / _MAX_INT8).astype(np.float16)
    codes = np.rint(groups_FGN * _inverse(scales)[..., None])
    np.clip(codes, -_MAX_INT8, _MAX_INT8, out=codes)
    return Codes(WeightKind.INT8, GROUP, codes.astype(np.int8).reshape(num_rows, -1), scales)


def _int4(groups_FGN: Floats) -> Codes:
    """Quantise asymmetrically, with a search: first codes from several ranges, each refined once by least squares.

    Given codes, the best scale and minimum are a linear regression; given those, the best codes are the nearest
    (Lloyd's alternation). The result with the least squared error, computed with the stored scale and minimum, is kept.
    """
    num_rows, num_groups = groups_FGN.shape[:2]
    x_NG = np.ascontiguousarray(groups_FGN.reshape(-1, GROUP).T)  # a group per column, so that sums run over whole rows
    low_G, high_G = x_NG.min(axis=0), x_NG.max(axis=0)
    best_error = np.full(x_NG.shape[1], np.inf, np.float32)
    best_codes = np.zeros(x_NG.shape, np.float32)
    best = np.zeros((2, x_NG.shape[1]), np.float16)
    for start, end in _RANGES:
        span_G = high_G - low_G
        fit = _stored((end - start) / _MAX_INT4 * span_G, low_G + start * span_G)
        fit = _stored(*_regression(x_NG, _nearest(x_NG, fit)))
        codes = _nearest(x_NG, fit)
        rest = codes * fit[0].astype(np.float32)
        rest += fit[1].astype(np.float32)
        rest -= x_NG
        error = np.einsum("ng,ng->g", rest, rest)
        better = error < best_error
        np.copyto(best_error, error, where=better)
        np.copyto(best_codes, codes, where=better)
        np.copyto(best, fit, where=better)
    codes_FE = best_codes.T.astype(np.uint8).reshape(num_rows, -1)
    shape = (num_rows, num_groups)
    return Codes(WeightKind.INT4, GROUP, codes_FE, best[0].reshape(shape), best[1].reshape(shape))


def _stored(scale_G: Floats, minimum_G: Floats) -> Halves:
    """Round scale and minimum, [2, G], as they are stored."""
    return np.stack((scale_G, minimum_G)).astype(np.float16)


def _nearest(x_NG: Floats, fit: Halves) -> Floats:
    """Return the codes, as floats, whose values are nearest."""
    codes: Floats = x_NG - fit[1].astype(np.float32)
    codes *= _inverse(fit[0])
    np.rint(codes, out=codes)
    np.clip(codes, 0, _MAX_INT4, out=codes)
    return codes


def _regression(x_NG: Floats, codes_NG: Floats) -> tuple[Floats, Floats]:
    """Return scale and minimum of each group for its codes, by least squares; for equal codes, 0 and the mean."""
    mean_x, mean_code = x_NG.mean(axis=0), codes_NG.mean(axis=0)
    spread = np.einsum("ng,ng->g", codes_NG, codes_NG) - GROUP * mean_code * mean_code
    joint = np.einsum("ng,ng->g", codes_NG, x_NG) - GROUP * mean_code * mean_x
    scale = np.divide(joint, spread, out=np.zeros_like(joint), where=spread > 0.5)  # sums of integers: 0 or >= 31/32
    return scale, mean_x - scale * mean_code


def _inverse(scales: Halves) -> Floats:
    """Return 1 / scale, 0 for scale 0."""
    wide = scales.astype(np.float32)
    return np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=wide != 0)
