"""Linear layers and embeddings whose weights stay coded on a device, and their torch twins.

Owns: the codes on a device, which Triton's kernel reads, and reading them from files.
Does not: quantise, or choose kinds (packing.py does); the packed weights of CPUs are packed_weight.py's.
Invariants: a weight is Codes.dequantize's value, rounded to the dtype of the activations, on every path. A row's result
depends on that row alone where the kernel computes it.
Shapes: T rows (tokens), F outputs, E inputs, C chunks of 32 bytes of codes, G groups of inputs with one scale.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from octavo.nn.packed_weight import CODE_VALUES, Codes, WeightKind, WeightShape
from octavo.nn.packing import NoCodesError, WantedTensor, WeightRun, conversions, one_torch_thread, plan_runs
from octavo.nn.staging import Stage
from octavo.nn.weights import Weights
from octavo.ops.triton import available

_CHUNK = 32  # bytes


@dataclass(frozen=True, slots=True)
class DeviceCodes:
    """A weight's codes: of 8 bits plus 128, or of 4 bits, two to a byte, of which the low one is 32 inputs before.

    Codes are by chunk and output, scales and minima (float16) by group and output; zeros fill the last chunk up.
    """

    shape: WeightShape
    codes_CF32: Tensor
    scales_GF: Tensor
    minima_GF: Tensor | None
    table: Tensor | None

    @classmethod
    def empty(cls, shape: WeightShape, stage: Stage) -> DeviceCodes:
        """Return a weight of zeros on the stage's device, to be filled by `put`."""
        device = stage.device
        num_chunks = -(-shape.inputs // _values_of_chunk(shape.kind))
        num_groups = num_chunks * _values_of_chunk(shape.kind) // shape.group
        values = CODE_VALUES.get(shape.kind)
        scales_GF = torch.zeros(num_groups, shape.outputs, dtype=torch.float16, device=device)
        return cls(
            shape,
            torch.zeros(num_chunks, shape.outputs, _CHUNK, dtype=torch.uint8, device=device),
            scales_GF,
            torch.zeros_like(scales_GF) if shape.kind == WeightKind.INT4 else None,
            None if values is None else stage.send(values)[0],
        )

    def put(self, first_row: int, codes: Codes, stage: Stage) -> None:
        """Write consecutive rows, which reach the device in one copy."""
        num_rows = len(codes.codes)
        rows = slice(first_row, first_row + num_rows)
        given = [part for part in (codes.codes, codes.scales, codes.minima) if part is not None]
        codes_FE, *parts_FG = stage.send(*given)
        if self.shape.kind == WeightKind.INT8:
            codes_FE = codes_FE.view(torch.uint8) ^ 128  # adds 128
        codes_FE = functional.pad(codes_FE, (0, -self.shape.inputs % _values_of_chunk(self.shape.kind)))
        chunks_FCN = codes_FE.view(num_rows, len(self.codes_CF32), -1)
        if self.shape.kind != WeightKind.INT8:
            chunks_FCN = chunks_FCN[..., :_CHUNK] | chunks_FCN[..., _CHUNK:] << 4
        self.codes_CF32[:, rows] = chunks_FCN.transpose(0, 1)
        targets = [part_GF for part_GF in (self.scales_GF, self.minima_GF) if part_GF is not None]
        for part_GF, part_FG in zip(targets, parts_FG, strict=True):
            part_GF[: part_FG.shape[1], rows] = part_FG.T

    @property
    def outputs(self) -> int:
        """Output rows."""
        return self.shape.outputs

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and minima."""
        parts = (self.codes_CF32, self.scales_GF, self.minima_GF)
        return sum(part.numel() * part.itemsize for part in parts if part is not None)

    def window(self, rows: range) -> DeviceCodes:
        """Return consecutive rows, without a copy."""
        shape = replace(self.shape, outputs=len(rows))
        scales_GF, minima_GF = (
            None if part_GF is None else part_GF[:, rows.start : rows.stop]
            for part_GF in (self.scales_GF, self.minima_GF)
        )
        assert scales_GF is not None
        return DeviceCodes(shape, self.codes_CF32[:, rows.start : rows.stop], scales_GF, minima_GF, self.table)

    def rows(self, ids_N: Tensor) -> Tensor:
        """Return the values of some rows, float32 [N, E]."""
        return replace(
            self,
            codes_CF32=self.codes_CF32.index_select(1, ids_N),
            scales_GF=self.scales_GF.index_select(1, ids_N),
            minima_GF=None if self.minima_GF is None else self.minima_GF.index_select(1, ids_N),
        ).dequantize()

    def dequantize(self) -> Tensor:
        """Return all values, float32 [F, E], as a new tensor."""
        codes_FCN = self.codes_CF32.transpose(0, 1)
        if self.shape.kind != WeightKind.INT8:
            codes_FCN = torch.cat((codes_FCN & 15, codes_FCN >> 4), -1)
        values_FE = codes_FCN.flatten(1)
        values_FE = values_FE.float() if self.table is None else self.table[values_FE.int()].float()
        if self.shape.kind == WeightKind.INT8:
            values_FE -= 128
        values_FGN = values_FE.view(len(values_FE), len(self.scales_GF), -1)
        values_FGN *= self.scales_GF.T.float()[..., None]
        if self.minima_GF is not None:
            values_FGN += self.minima_GF.T.float()[..., None]
        return values_FGN.flatten(1)[:, : self.shape.inputs]

    def multiply_into(self, x_TE: Tensor, bias_F: Tensor | None, out_TF: Tensor) -> None:
        """Write x W^T + b."""
        if available.uses_kernels(x_TE):
            weight = (self.codes_CF32, self.scales_GF, self.minima_GF, self.table)
            torch.ops.octavo.coded_linear(x_TE, *weight, bias_F, out_TF)
        else:
            out_TF.copy_(functional.linear(x_TE, self.dequantize().to(x_TE.dtype), bias_F))


Part = DeviceCodes | Tensor  # consecutive outputs of one kind: codes, or floats [F, E]


class CodedLinear:
    """y_TF = x_TE W_FE^T + b_F of parts, in order of the outputs, of which some are coded."""

    __slots__ = ("_bias_F", "_parts", "_size", "in_features", "nbytes", "num_weights")

    def __init__(self, parts: Sequence[Part], bias_F: Tensor | None = None) -> None:
        self._parts = tuple(parts)
        self._bias_F = bias_F
        self._size = sum(outputs_of(part) for part in parts)
        self.nbytes = sum(part.nbytes for part in parts) + (0 if bias_F is None else bias_F.nbytes)
        first = parts[0]
        self.in_features = first.shape[1] if isinstance(first, Tensor) else first.shape.inputs
        self.num_weights = self._size * self.in_features

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Return a new tensor [T, F] of x's dtype."""
        out_TF = x_TE.new_empty((x_TE.shape[0], self._size))
        first = 0
        for part in self._parts:
            end = first + outputs_of(part)
            bias_F = None if self._bias_F is None else self._bias_F[first:end]
            if isinstance(part, DeviceCodes):
                part.multiply_into(x_TE, bias_F, out_TF[:, first:end])
            elif available.uses_kernels(x_TE):
                torch.ops.octavo.linear(x_TE, part, bias_F, out_TF[:, first:end])
            else:
                out_TF[:, first:end] = functional.linear(x_TE, part, bias_F)
            first = end
        return out_TF


class CodedEmbedding:
    """Lookup of a coded table's rows, times a scale as nn.layers.ScaledEmbedding's."""

    __slots__ = ("_codes", "_dtype", "_scale")

    def __init__(self, codes: DeviceCodes, dtype: torch.dtype, scale: float = 1.0) -> None:
        self._codes, self._dtype = codes, dtype
        self._scale = float(torch.tensor(scale, dtype=dtype))

    def __call__(self, token_ids_T: Tensor) -> Tensor:
        """Return the rows as a new tensor [T, E]."""
        rows_TE = self._codes.rows(token_ids_T).to(self._dtype)
        return rows_TE if self._scale == 1.0 else rows_TE.mul_(self._scale)


def read_parts(
    weights: Weights, rows: dict[str, int], inputs: int, wanted: WantedTensor, place: tuple[torch.dtype, torch.device]
) -> tuple[list[Part], tuple[WeightRun, ...]]:
    """Read matrices with these numbers of rows, in order; return their parts, of one kind each, and the runs.

    `place` has the dtype of those that stay floats, and the device.
    """
    while True:
        runs = plan_runs(weights, rows, inputs, wanted)
        try:
            return [_read_run(weights, run, place) for run in runs], runs
        except NoCodesError as error:
            wanted = replace(wanted, float_names=wanted.float_names | {error.name})


def _read_run(weights: Weights, run: WeightRun, place: tuple[torch.dtype, torch.device]) -> Part:
    """Read one run; threads convert pieces, of which a few are in memory at once. Raises NoCodesError."""
    dtype, device = place
    if run.shape.group == 0:
        return weights.read(
            {part.name: part.num_rows for part in run.parts}, run.shape.inputs, dtype=dtype, device=device
        )
    stage = weights.stage(device)
    part = DeviceCodes.empty(run.shape, stage)
    count = torch.get_num_threads()
    with one_torch_thread(), ThreadPoolExecutor(count, "octavo-codes") as pool:
        started: deque[tuple[int, str, Future[Codes | None]]] = deque()
        for first_row, name, convert in conversions(weights, run):
            started.append((first_row, name, pool.submit(convert)))
            if len(started) > 4 * count:
                _put(part, stage, *started.popleft())
        while started:
            _put(part, stage, *started.popleft())
    return part


def _put(part: DeviceCodes, stage: Stage, first_row: int, name: str, converted: Future[Codes | None]) -> None:
    codes = converted.result()
    if codes is None:
        raise NoCodesError(name)
    part.put(first_row, codes, stage)


def outputs_of(part: Part) -> int:
    """Return the number of a part's outputs."""
    return part.shape[0] if isinstance(part, Tensor) else part.outputs


def _values_of_chunk(kind: WeightKind) -> int:
    return _CHUNK if kind == WeightKind.INT8 else 2 * _CHUNK
