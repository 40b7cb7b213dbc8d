"""The adapters of a native decoder: packed for the kernels, and grouped by adapter for each step.

Owns: the C structures of csrc/lora.h and the memory that they point to.
Does not: read files (nn/lora.py does), or know sequences.
Shapes: T rows of the step, N rows with an adapter, E inputs, F outputs, R rank.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_int64, c_void_p
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.artifacts.family import LINEARS
from octavo.artifacts.model_spec import ModelSpec
from octavo.nn.lora import Adapter, LoraPart, Values
from octavo.nn.packed_weight import Bytes, empty_buffer

_LANES = 16  # kLanes of csrc/lora.cpp


class _Piece(Structure):
    _fields_ = (*((name, c_int64) for name in ("first_rank", "rank", "first_output", "outputs")), ("b", c_void_p))


class _Weight(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("is_bfloat16", "rank", "inputs", "num_pieces")),
        ("a", c_void_p),
        ("pieces", POINTER(_Piece)),
    )


class LoraStep(Structure):
    """The rows of a step that have adapters (csrc/lora.h)."""

    _fields_ = (
        *((name, c_int64) for name in ("num_rows", "num_groups", "max_inputs", "max_rank")),
        *((name, c_void_p) for name in ("adapters", "rows", "group_starts", "weights", "inputs", "hidden")),
    )


class NativeAdapters:
    """The loaded adapters by number, and the structure of the current step."""

    def __init__(self, spec: ModelSpec) -> None:
        self._num_layers = spec.num_layers
        self._max_inputs = max(spec.hidden_size, spec.num_heads * spec.head_dim, spec.intermediate_size)
        self._adapters: dict[int, _PackedAdapter] = {}
        self._step = LoraStep()
        self._held: list[object] = []  # arrays of the current step
        self._inputs = self._hidden = torch.empty(0)

    def put(self, number: int, adapter: Adapter, is_bfloat16: bool) -> None:
        """Pack an adapter."""
        self._adapters[number] = _PackedAdapter(adapter, self._num_layers, is_bfloat16)

    def drop(self, number: int) -> None:
        """Free an adapter's memory."""
        del self._adapters[number]

    def begin(self, adapters_T: Tensor) -> int | None:
        """Return the address of the structure of a step whose rows have these adapters; None if no row has one."""
        numbers_T: npt.NDArray[np.int32] = np.ascontiguousarray(adapters_T.numpy(), np.int32)
        rows_N = np.flatnonzero(numbers_T >= 0)
        if not len(rows_N):
            return None
        rows_N = rows_N[np.argsort(numbers_T[rows_N], kind="stable")]
        numbers_N = numbers_T[rows_N]
        starts = np.flatnonzero(np.concatenate(([True], numbers_N[1:] != numbers_N[:-1])))
        packed = [self._adapters[number] for number in numbers_N[starts].tolist()]
        ends = np.append(starts, len(rows_N))
        weights = (c_void_p * len(packed))(*(ctypes.addressof(one.weights) for one in packed))
        rank = max(one.max_rank for one in packed)
        self._inputs = _grown(self._inputs, len(numbers_T) * self._max_inputs)
        self._hidden = _grown(self._hidden, len(rows_N) * rank)
        self._held = [numbers_T, rows_N, ends, weights]
        step = self._step
        step.num_rows, step.num_groups, step.max_inputs, step.max_rank = (
            len(rows_N), len(packed), self._max_inputs, rank,
        )  # fmt: skip
        step.adapters, step.rows = numbers_T.ctypes.data, rows_N.ctypes.data
        step.group_starts, step.weights = ends.ctypes.data, ctypes.addressof(weights)
        step.inputs, step.hidden = self._inputs.data_ptr(), self._hidden.data_ptr()
        return ctypes.addressof(step)


class _PackedAdapter:
    """One adapter's weights [layers * 4] as the kernels read them: in one buffer, in the order of a step."""

    def __init__(self, adapter: Adapter, num_layers: int, is_bfloat16: bool) -> None:
        self._held: list[object] = []
        self._is_bfloat16 = is_bfloat16
        self.max_rank = _LANES
        places = [adapter.get((layer, linear), ()) for layer in range(num_layers) for linear in LINEARS]
        self._room = empty_buffer(sum(self._num_bytes(parts) for parts in places))
        self._held.append(self._room)
        packed = [self._weight(parts) for parts in places]
        self.weights = (_Weight * len(packed))(*packed)

    def _weight(self, parts: Sequence[LoraPart]) -> _Weight:
        if not parts:
            return _Weight()
        inputs, rank, ranks = parts[0].a_RE.shape[1], _rank(parts), [len(part.a_RE) for part in parts]
        self.max_rank = max(self.max_rank, rank)
        a_RE = np.zeros((rank, inputs), np.float32)
        a_RE[: sum(ranks)] = np.concatenate([part.a_RE for part in parts])
        a, firsts = self._keep(_panels(a_RE)), np.cumsum([0, *ranks])
        pieces = (_Piece * len(parts))(
            *(
                _Piece(int(first), len(part.a_RE), part.first_output, len(part.b_FR), self._keep(_panels(part.b_FR)))
                for first, part in zip(firsts, parts, strict=False)
            )
        )
        self._held.append(pieces)
        return _Weight(self._is_bfloat16, rank, inputs, len(parts), a, ctypes.cast(pieces, POINTER(_Piece)))

    def _num_bytes(self, parts: Sequence[LoraPart]) -> int:
        size = 2 if self._is_bfloat16 else 4
        a = _rank(parts) * parts[0].a_RE.shape[1] if parts else 0
        return size * (a + sum(_round_up(len(part.b_FR)) * len(part.a_RE) for part in parts))

    def _keep(self, values: Values) -> int:
        """Store values, whole panels, in the adapter's type in the room that is left; return their address."""
        stored: Any = torch.from_numpy(values)
        stored = (stored.to(torch.bfloat16).view(torch.int16) if self._is_bfloat16 else stored).numpy().reshape(-1)
        data: Bytes = stored.view(np.uint8)
        kept, self._room = self._room[: len(data)], self._room[len(data) :]
        kept[:] = data
        return int(kept.ctypes.data)


def _rank(parts: Sequence[LoraPart]) -> int:
    return _round_up(sum(len(part.a_RE) for part in parts))


def _round_up(count: int) -> int:
    return -(-count // _LANES) * _LANES


def _panels(rows: Values) -> Values:
    """Return a matrix as [panel of 16 rows][column][16], padded with zeros."""
    count, columns = rows.shape
    padded = np.zeros((_round_up(count), columns), np.float32)
    padded[:count] = rows
    return np.ascontiguousarray(padded.reshape(-1, _LANES, columns).swapaxes(1, 2))


def _grown(buffer: Tensor, size: int) -> Tensor:
    return buffer if buffer.numel() >= size else torch.empty(size)
