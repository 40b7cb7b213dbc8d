"""Pack the tensors of a checkpoint: choose each tensor's kind, and pack with several threads.

Owns: the choice for each tensor, stacking parts of one kind into one weight, pieces of rows as jobs.
Does not: know layers or families, convert (quantize.py does), or keep packed weights.
Invariants: weights are yielded in the order planned; beside them, memory for a few pieces of rows is used.
Torch runs in the calling thread only, on one core: in each other thread it would start another OpenMP pool, and the
pools would slow each other down.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from gguf import GGMLQuantizationType

from octavo.nn.gguf_weights import dequantize
from octavo.nn.packed_weight import Bytes, Codes, PackedWeight, WeightKind, WeightShape, empty_buffer, pack_rows
from octavo.nn.quantize import GROUP, block_kind, codes_of_blocks, codes_of_floats
from octavo.nn.weights import Weights

_PIECE = 1 << 18  # values converted by one job: its data fits in a core's own cache
_AHEAD = 2  # weights whose jobs are submitted before the first one is waited for
_CONVERSIONS = 1  # increment it when the codes of GGUF blocks change


@dataclass(frozen=True, slots=True)
class WantedTensor:
    """The requested quantization of matrices ("auto", "none", "int8" or "int4"), and the kind of float weights."""

    quantization: str
    float_kind: WeightKind
    float_names: frozenset[str] = frozenset()  # tensors found to have no codes


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor and its number of rows; with `is_raw` its GGUF blocks' codes are kept."""

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
    """Return kind and group, and whether the file's own codes are kept, which they are if they are as coarse."""
    plain = ((wanted.float_kind, 0), False)
    if wanted.quantization == "none" or name in wanted.float_names:
        return plain
    raw = weights.raw_rows(name)
    own = block_kind(raw[1]) if raw is not None else None
    if wanted.quantization == "auto":
        return (own, True) if own is not None else plain
    kind = WeightKind.INT4 if wanted.quantization == "int4" else WeightKind.INT8
    if own is not None and own[0] >= kind:
        return own, True
    return ((kind, GROUP), False) if inputs % GROUP == 0 else plain


def pack_runs(weights: Weights, runs: Iterable[WeightRun], num_threads: int) -> Generator[Bytes, None, None]:
    """Pack the runs in order, yielding each one's buffer. Close the generator: it has threads. Raises NoCodesError."""
    with _one_torch_thread(), ThreadPoolExecutor(num_threads, "octavo-pack") as pool:
        begun: deque[tuple[Bytes, list[Future[None]]]] = deque()
        open_jobs: deque[Future[None]] = deque()
        for run in runs:
            buffer = empty_buffer(run.shape.nbytes)
            jobs = []
            for job in _jobs(weights, run, buffer):
                if len(open_jobs) > 4 * num_threads:
                    open_jobs.popleft().result()
                jobs.append(pool.submit(job))
                open_jobs.append(jobs[-1])
            begun.append((buffer, jobs))
            if len(begun) > _AHEAD:
                yield _finished(*begun.popleft())
        while begun:
            yield _finished(*begun.popleft())


@contextlib.contextmanager
def _one_torch_thread() -> Iterator[None]:
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
    """Split a run into jobs for pieces of rows. Tensors that torch must read are read here, in the caller's thread."""
    shape, start = run.shape, 0
    step = max(1, _PIECE // shape.inputs)
    for part in run.parts:
        raw = weights.raw_rows(part.name)
        for first in range(0, part.num_rows, step):
            count = min(step, part.num_rows - first)
            pack = partial(_pack, shape, buffer, start + first, part.name)
            if raw is None:
                values = torch.empty(count, shape.inputs)
                weights.read_rows(part.name, first, values)
                yield partial(pack, partial(codes_of_floats, values.numpy(), shape.kind))
            elif part.is_raw:
                yield partial(pack, partial(codes_of_blocks, raw[0][first : first + count], raw[1]))
            else:
                yield partial(pack, partial(_codes_anew, raw[0][first : first + count], raw[1], shape.kind))
        start += part.num_rows


def _codes_anew(raw: Bytes, stored: GGMLQuantizationType, kind: WeightKind) -> Codes | None:
    return codes_of_floats(dequantize(raw, stored), kind)


def _pack(shape: WeightShape, buffer: Bytes, first_row: int, name: str, convert: Callable[[], Codes | None]) -> None:
    codes = convert()
    if codes is None:
        raise NoCodesError(name)
    pack_rows(shape, buffer, first_row, codes)


@cache
def packing_version() -> str:
    """Return a text that changes whenever this code packs equal weights differently: layout, codes, conversions."""
    sample = np.sin(np.arange(17 * 64, dtype=np.float32) ** 2).reshape(17, 64)  # numpy.random takes 50 ms to load
    digest = hashlib.sha256(f"{_CONVERSIONS} {list(GGMLQuantizationType)}".encode())
    for kind in WeightKind:
        codes = codes_of_floats(sample, kind)
        assert codes is not None, "the sample has codes"
        digest.update(PackedWeight.pack(codes).buffer.tobytes())
    return digest.hexdigest()
