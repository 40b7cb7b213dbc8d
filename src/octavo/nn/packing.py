"""Pack the tensors of a checkpoint: choose each tensor's kind, convert it to codes, and pack with several threads.

Owns: the choice of the kind; the 8-bit and 4-bit codes of floats; stacking tensors of one kind into one weight; jobs
for pieces of rows. Does not: know layers or families, convert GGUF blocks, or keep packed weights.
Invariants: weights are yielded in the order planned; besides them, memory for a few pieces of rows is used. Each row is
converted independently. Torch runs only in the calling thread, on one core: in another thread it would start another
OpenMP pool, and the pools would slow each other down.
Shapes: F output rows, E inputs, G groups of inputs, N values of a group.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from octavo.artifacts.model_spec import ModelSpec
from octavo.config import QUANTIZATIONS
from octavo.errors import ConfigError
from octavo.nn.gguf_blocks import Halves, Values
from octavo.nn.packed_weight import (
    CODE_VALUES,
    GROUP,
    GROUPS,
    Bytes,
    Codes,
    PackedWeight,
    WeightKind,
    WeightShape,
    empty_buffer,
    pack_rows,
)
from octavo.nn.weights import Weights

_MAX_INT8 = 127
_MAX_INT4 = 15
# Parts of a group's range over which 4-bit codes are first spread; the best result is kept. tests/nn/test_quantize.py
# has the squared errors on normal and heavy-tailed weights, compared with the whole range alone.
_RANGES = ((0.0, 1.0), (0.03, 0.97), (0.08, 0.92), (0.0, 0.92), (0.08, 1.0))
_PIECE = 1 << 18  # values converted by one job: its data fits in a core's own cache
_AHEAD = 2  # weights whose jobs are submitted before the first one is waited for
_CONVERSIONS = 1  # increment it when the codes of GGUF blocks change


def choose_quantization(quantization: str, dtype: str, spec: ModelSpec) -> str:
    """Return "auto" (the codes of the files), "none", "int8" or "int4". Raises ConfigError.

    If `quantization` is "auto", return "auto" for quantized files without a requested dtype, else "none".
    """
    if quantization not in QUANTIZATIONS:
        raise ConfigError(f"quantization is {quantization!r}; give one of {', '.join(QUANTIZATIONS)}")
    if quantization != "auto":
        return quantization
    return "auto" if spec.quantization is not None and dtype == "auto" else "none"


def code_kinds() -> frozenset[tuple[WeightKind, int]]:
    """Return every kind and group that weights with codes can have."""
    return frozenset((kind, group) for kind, groups in GROUPS.items() for group in groups)


@dataclass(frozen=True, slots=True)
class WantedTensor:
    """The requested quantization of matrices ("auto", "none", "int8" or "int4"), and the kind of float weights."""

    quantization: str
    float_kind: WeightKind
    float_names: frozenset[str] = frozenset()  # tensors found to have no codes


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor and its number of rows. `is_raw`: the codes of its files are kept."""

    name: str
    num_rows: int
    is_raw: bool


@dataclass(frozen=True, slots=True)
class WeightRun:
    """Consecutive output rows of one linear layer, of one kind."""

    shape: WeightShape
    parts: tuple[Part, ...]


class NoCodesError(Exception):
    """The values of this tensor cannot be coded: they are not finite, or float16 cannot hold their scales."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def plan_runs(weights: Weights, rows: dict[str, int], inputs: int, wanted: WantedTensor) -> tuple[WeightRun, ...]:
    """Choose a kind for each tensor of one linear layer; adjacent tensors of one kind become one run."""
    chosen = []
    for name, num_rows in rows.items():
        weights.claim(name, (num_rows, inputs))
        (kind, group), is_raw = _choose(weights, name, inputs, wanted)
        chosen.append(((kind, group), Part(name, num_rows, is_raw)))
    runs = []
    for (kind, group), entries in itertools.groupby(chosen, key=lambda entry: entry[0]):
        parts = tuple(part for _, part in entries)
        runs.append(WeightRun(WeightShape(kind, sum(part.num_rows for part in parts), inputs, group), parts))
    return tuple(runs)


def _choose(weights: Weights, name: str, inputs: int, wanted: WantedTensor) -> tuple[tuple[WeightKind, int], bool]:
    """Return kind and group, and whether the file's own codes are kept: they are unless fewer bits are requested."""
    plain = ((wanted.float_kind, 0), False)
    if wanted.quantization == "none" or name in wanted.float_names:
        return plain
    raw = weights.raw_matrix(name)
    own = None if raw is None else raw.kind
    if wanted.quantization == "auto":
        return (own, raw.is_kept) if raw is not None and own is not None else plain
    kind = WeightKind.INT4 if wanted.quantization == "int4" else WeightKind.INT8
    if raw is not None and own is not None and own[0] >= kind:
        return own, raw.is_kept
    return ((kind, GROUP), False) if inputs % GROUP == 0 else plain


def recoding_notes(weights: Weights, runs: Iterable[WeightRun]) -> tuple[str, ...]:
    """Return a note about each type of the files whose own codes no kernel reads."""
    counts = Counter[tuple[str, str]]()
    for run in runs:
        for part in run.parts if run.shape.group else ():
            matrix = None if part.is_raw else weights.raw_matrix(part.name)
            if matrix is not None:
                counts[matrix.type_name, run.shape.kind.name.lower()] += 1
    return tuple(
        f"{count} tensors in {name} become {kind}, the nearest that the kernels read; quantization none keeps "
        "their values exactly, as floats"
        for (name, kind), count in counts.items()
    )


def pack_runs(weights: Weights, runs: Iterable[WeightRun], num_threads: int) -> Generator[Bytes, None, None]:
    """Pack the runs in order; yield each run's buffer. Close the generator to end its threads. Raises NoCodesError."""
    with one_torch_thread(), ThreadPoolExecutor(num_threads, "octavo-pack") as pool:
        started: deque[tuple[Bytes, list[Future[None]]]] = deque()
        open_jobs: deque[Future[None]] = deque()
        for run in runs:
            buffer = empty_buffer(run.shape.nbytes)
            jobs = []
            for job in _jobs(weights, run, buffer):
                if len(open_jobs) > 4 * num_threads:
                    open_jobs.popleft().result()
                jobs.append(pool.submit(job))
                open_jobs.append(jobs[-1])
            started.append((buffer, jobs))
            if len(started) > _AHEAD:
                yield _finished(*started.popleft())
        while started:
            yield _finished(*started.popleft())


def pack_matrices(
    weights: Weights, rows: dict[str, int], inputs: int, wanted: WantedTensor, bias_F: Tensor | None = None
) -> list[PackedWeight]:
    """Pack matrices with these numbers of rows, in order; those of one kind become one weight.

    A matrix without codes stays float. `bias_F` is float32.
    """
    while True:
        runs = plan_runs(weights, rows, inputs, wanted)
        try:
            buffers = list(pack_runs(weights, runs, torch.get_num_threads()))
            break
        except NoCodesError as error:
            wanted = replace(wanted, float_names=wanted.float_names | {error.name})
    packed, start = [], 0
    for run, buffer in zip(runs, buffers, strict=True):
        end = start + run.shape.outputs
        packed.append(PackedWeight(run.shape, buffer, None if bias_F is None else bias_F[start:end].numpy()))
        start = end
    return packed


@contextlib.contextmanager
def one_torch_thread() -> Iterator[None]:
    """Let torch use one thread inside the context."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


def _finished(buffer: Bytes, jobs: list[Future[None]]) -> Bytes:
    for job in jobs:
        job.result()
    return buffer


def _jobs(weights: Weights, run: WeightRun, buffer: Bytes) -> Iterator[Callable[[], None]]:
    """Split a run into jobs for pieces of rows."""
    for first_row, name, convert in conversions(weights, run):
        yield partial(_pack, run.shape, buffer, first_row, name, convert)


def conversions(weights: Weights, run: WeightRun) -> Iterator[tuple[int, str, Callable[[], Codes | None]]]:
    """Yield the first row of each piece of a run, its tensor, and its conversion to codes, which threads may do.

    Tensors that torch must read are read here, in the caller's thread.
    """
    shape, start = run.shape, 0
    step = max(1, _PIECE // shape.inputs)
    for part in run.parts:
        raw, importance = weights.raw_matrix(part.name), weights.importance(part.name)
        for first in range(0, part.num_rows, step):
            count = min(step, part.num_rows - first)
            if raw is None:
                values = torch.empty(count, shape.inputs)
                weights.read_rows(part.name, first, values)
                convert = partial(codes_of_floats, values.numpy(), shape.kind, importance)
            elif part.is_raw:
                convert = partial(raw.codes, first, count)
            else:
                convert = partial(_codes_anew, partial(raw.values, first, count), shape.kind, importance)
            yield start + first, part.name, convert
            weights.count_read(count * shape.inputs)
        start += part.num_rows


def _codes_anew(values_of: Callable[[], Values], kind: WeightKind, importance_E: Values | None) -> Codes | None:
    return codes_of_floats(values_of(), kind, importance_E)


def _pack(shape: WeightShape, buffer: Bytes, first_row: int, name: str, convert: Callable[[], Codes | None]) -> None:
    codes = convert()
    if codes is None:
        raise NoCodesError(name)
    pack_rows(shape, buffer, first_row, codes)


@cache
def packing_version() -> str:
    """Return a text that changes whenever this code packs the same weights to other bytes."""
    sample = np.sin(np.arange(17 * 64, dtype=np.float32) ** 2).reshape(17, 64)  # numpy.random takes 50 ms to load
    digest = hashlib.sha256(f"{_CONVERSIONS} {list(GGMLQuantizationType)}".encode())
    for kind in WeightKind:
        codes = codes_of_floats(sample, kind)
        assert codes is not None, "the sample has codes"
        digest.update(PackedWeight.pack(codes).buffer.tobytes())
    return digest.hexdigest()


def codes_of_floats(values_FE: Values, kind: WeightKind, importance_E: Values | None = None) -> Codes | None:
    """Convert rows to a kind; return None if float16 cannot represent a scale. For codes, GROUP must divide E.

    `importance_E` weights the squared errors of the inputs in the search for 4-bit codes.
    """
    if kind == WeightKind.FLOAT32:
        return Codes(kind, 0, values_FE)
    if kind == WeightKind.BFLOAT16:
        return Codes(kind, 0, _bfloat16_bits(values_FE))
    groups = values_FE.reshape(values_FE.shape[0], -1, GROUP)
    if not np.isfinite(values_FE).all() or np.abs(values_FE).max(initial=0) > np.finfo(np.float16).max:
        return None
    if kind in CODE_VALUES:
        return _selected(groups, kind)
    return _int8(groups) if kind == WeightKind.INT8 else _int4(groups, importance_E)


def _bfloat16_bits(values: Values) -> npt.NDArray[np.uint16]:
    """Round to nearest, ties to even; a NaN stays NaN. NumPy computes this, so that torch starts no thread pool."""
    bits = values.view(np.uint32)
    rounded = bits >> 16 & 1
    rounded += bits
    rounded += 0x7FFF
    rounded >>= 16
    result = rounded.astype(np.uint16)
    result[np.isnan(values)] = 0x7FC0
    return result


def _int8(groups_FGN: Values) -> Codes:
    """Quantise symmetrically: the largest magnitude of a group becomes 127."""
    num_rows = groups_FGN.shape[0]
    scales = (np.abs(groups_FGN).max(axis=-1) / _MAX_INT8).astype(np.float16)
    codes = np.rint(groups_FGN * _inverse(scales)[..., None])
    np.clip(codes, -_MAX_INT8, _MAX_INT8, out=codes)
    return Codes(WeightKind.INT8, GROUP, codes.astype(np.int8).reshape(num_rows, -1), scales)


def _selected(groups_FGN: Values, kind: WeightKind) -> Codes:
    """Select the nearest values of a kind's table: its value of the largest magnitude stands for that of the group."""
    values = CODE_VALUES[kind].astype(np.float32)
    order = np.argsort(values, kind="stable")
    largest = np.take_along_axis(groups_FGN, np.abs(groups_FGN).argmax(axis=-1)[..., None], axis=-1)[..., 0]
    scales = (largest / values[np.abs(values).argmax()]).astype(np.float16)
    bounds = (values[order][1:] + values[order][:-1]) / 2
    codes = order.astype(np.uint8)[np.searchsorted(bounds, groups_FGN * _inverse(scales)[..., None])]
    return Codes(kind, GROUP, codes.reshape(groups_FGN.shape[0], -1), scales)


def _int4(groups_FGN: Values, importance_E: Values | None = None) -> Codes:
    """Quantise asymmetrically: try several ranges, refine each by least squares, keep the best.

    For fixed codes, the best scale and minimum are a linear regression; for a fixed scale and minimum, the best codes
    are the nearest ones (Lloyd's alternation). Errors are computed with the scale and minimum as stored; importances
    weight them.
    """
    num_rows, num_groups = groups_FGN.shape[:2]
    x_NG = np.ascontiguousarray(groups_FGN.reshape(-1, GROUP).T)  # one group per column, so that sums are over rows
    weights_NG = None if importance_E is None else _error_weights(importance_E, num_rows)
    low_G, high_G = x_NG.min(axis=0), x_NG.max(axis=0)
    best_error = np.full(x_NG.shape[1], np.inf, np.float32)
    best_codes = np.zeros(x_NG.shape, np.float32)
    best = np.zeros((2, x_NG.shape[1]), np.float16)
    for start, end in _RANGES:
        span_G = high_G - low_G
        fit = _stored((end - start) / _MAX_INT4 * span_G, low_G + start * span_G)
        fit = _stored(*_regression(x_NG, _nearest(x_NG, fit), weights_NG))
        codes = _nearest(x_NG, fit)
        rest = codes * fit[0].astype(np.float32)
        rest += fit[1].astype(np.float32)
        rest -= x_NG
        error = _dot(rest, rest, weights_NG)
        better = error < best_error
        np.copyto(best_error, error, where=better)
        np.copyto(best_codes, codes, where=better)
        np.copyto(best, fit, where=better)
    codes_FE = best_codes.T.astype(np.uint8).reshape(num_rows, -1)
    shape = (num_rows, num_groups)
    return Codes(WeightKind.INT4, GROUP, codes_FE, best[0].reshape(shape), best[1].reshape(shape))


def _stored(scale_G: Values, minimum_G: Values) -> Halves:
    """Round scale and minimum to float16, as they are stored; return both, [2, G]."""
    return np.stack((scale_G, minimum_G)).astype(np.float16)


def _nearest(x_NG: Values, fit: Halves) -> Values:
    """Return the codes, as floats, whose values are nearest."""
    codes: Values = x_NG - fit[1].astype(np.float32)
    codes *= _inverse(fit[0])
    np.rint(codes, out=codes)
    np.clip(codes, 0, _MAX_INT4, out=codes)
    return codes


def _regression(x_NG: Values, codes_NG: Values, weights_NG: Values | None) -> tuple[Values, Values]:
    """Return the least-squares scale and minimum of each group for its codes; 0 and the mean if all codes are equal."""
    if weights_NG is None:
        mean_x, mean_code = x_NG.mean(axis=0), codes_NG.mean(axis=0)
    else:
        mean_x, mean_code = (np.einsum("ng,ng->g", weights_NG, part) / GROUP for part in (x_NG, codes_NG))
    spread = _dot(codes_NG, codes_NG, weights_NG) - GROUP * mean_code * mean_code
    joint = _dot(codes_NG, x_NG, weights_NG) - GROUP * mean_code * mean_x
    # Without weights, the spread is a sum of integers: 0 or >= 31/32. With weights, rounding leaves up to 0.01.
    is_spread = spread > (0.5 if weights_NG is None else 0.02)
    scale = np.divide(joint, spread, out=np.zeros_like(joint), where=is_spread)
    return scale, mean_x - scale * mean_code


def _dot(a_NG: Values, b_NG: Values, weights_NG: Values | None) -> Values:
    """Return the sums of the groups' products, weighted if there are weights."""
    sums: Values = np.einsum("ng,ng->g", a_NG, b_NG if weights_NG is None else b_NG * weights_NG)
    return sums


def _error_weights(importance_E: Values, num_rows: int) -> Values:
    """Return the weights of the values of each group, [GROUP, num_rows * G], whose mean is 1 in each group.

    Inputs without importance have a small weight, so that their values are kept where that costs nothing.
    """
    weights = importance_E.reshape(-1, GROUP)
    weights = weights + np.maximum(1e-3 * weights.mean(axis=1, keepdims=True), np.float32(1e-30))
    weights = weights / weights.mean(axis=1, keepdims=True)
    return np.tile(weights.T.astype(np.float32), (1, num_rows))


def _inverse(scales: Halves) -> Values:
    """Return 1 / scale, or 0 where the scale is 0."""
    wide = scales.astype(np.float32)
    return np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=wide != 0)
