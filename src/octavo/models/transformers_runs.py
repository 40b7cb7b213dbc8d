"""Runs of a recorded program's operations, each run as one call of the C++ kernels.

Owns: which operations the kernels compute (csrc/operations.h), the buffers between them, and the calls.
Does not: find patterns (transformers_fusion does), or compute anything else: torch runs between two runs.
Invariants: a run gives the bits of its operations called one by one, which are its slow twin. Its operations keep their
order; an operation between them that needs none of their results is called before them.
Shapes: T tokens. A register of a run holds float32 rows [1, T, *tail]; a reshape of the rows is the same buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import POINTER, Structure, addressof, c_double, c_int32, c_int64, c_void_p, cast
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from octavo.models.transformers_fusion import ADD, MUL, GatedActivation, Operation, Register, attend_product
from octavo.models.transformers_layers import KernelNorm, SharedProduct
from octavo.models.transformers_probe import PagedStep, running
from octavo.nn.packed_weight import MultiplicationDescriptor, WeightDescriptor
from octavo.ops import cpu
from octavo.ops.attention_kernel import PoolLayers
from octavo.ops.gated_mul import ACTIVATION_KINDS

_ADD, _NORM, _SCALE, _MULTIPLY, _ACTIVATE, _ATTEND = range(6)  # enum OperationKind of csrc/operations.h
_VIEWS = {"reshape", "view", "flatten", "_same"}

Tails = dict[int, tuple[int, ...]]


class _Kernel(Structure):
    """struct Operation of csrc/operations.h; `x`, `other`, `out` and `sum` are registers until KernelRun."""

    _fields_ = (
        *((name, c_int64) for name in ("kind", "x", "other", "out", "sum", "size", "activation")),
        ("number", c_double),
        ("weight", c_void_p),
        ("product", MultiplicationDescriptor),
        ("attention", c_void_p),
        ("group", c_int64),
    )
    layer: int | None = None  # of one that attends
    weights: object = None  # what `product` points to

    def registers(self, *names: str) -> list[int]:
        """Return those of these registers that it has."""
        return [register for name in names if (register := getattr(self, name)) >= 0]


class _Run(Structure):
    _fields_ = (
        ("operations", c_void_p),
        ("num_operations", c_int64),
        ("widths", c_void_p),
        ("num_buffers", c_int64),
        ("num_tensors", c_int64),
    )


class _RunStep(Structure):
    _fields_ = (("num_tokens", c_int64), ("tensors", c_void_p), ("groups", c_void_p), ("workspace", c_void_p))


def with_runs(operations: list[Operation], tails: Mapping[int, tuple[int, ...]], result: int) -> list[Operation]:
    """Return the operations of a program, where consecutive ones that kernels compute are one KernelRun.

    `tails` has the tail of each recorded register of float32 rows. Where an operation writes to a tensor, nothing is
    joined: the order of all operations counts.
    """
    if any(one.writes for one in operations):
        return operations
    uses = _uses(operations)
    uses[result] = uses.get(result, 0) + 1
    builder, found = _RunBuilder(dict(tails), uses), list[Operation]()
    for one in operations:
        if builder.try_add(one):
            continue
        if builder.made & set(one.reads):
            found += builder.take()
            if builder.try_add(one):
                continue
        found.append(one)
    return found + builder.take()


def _uses(operations: Sequence[Operation]) -> dict[int, int]:
    """Return how often each register is read."""
    uses: dict[int, int] = {}
    for one in operations:
        for register in one.reads:
            uses[register] = uses.get(register, 0) + 1
    return uses


class _RunBuilder:
    """Collects the operations of one run after another."""

    def __init__(self, tails: Tails, uses: Mapping[int, int]) -> None:
        self._tails, self._uses = tails, uses
        self._workspace = cpu.Workspace()
        self._start()

    def _start(self) -> None:
        self.made: set[int] = set()
        self._operations: list[Operation] = []
        self._kernels: list[_Kernel] = []
        self._views: dict[int, int] = {}  # of which register each view is one

    def try_add(self, one: Operation) -> bool:
        """Append an operation if it can be a part of this run; return False if it cannot."""
        source = one.arguments[0].index if one.arguments and isinstance(one.arguments[0], Register) else -1
        if one.name in _VIEWS and source in self.made and one.results[0] in self._tails:
            self._views[one.results[0]] = self._views.get(source, source)
        else:
            kernel = _kernel_of(one, self._tails)
            if kernel is None or not self._tails.keys() >= set(one.results):
                return False
            products = {own.out for own in self._kernels if own.kind == _MULTIPLY}
            if kernel.kind == _ATTEND and (kernel.x not in products or self._uses[kernel.x] > 1):
                return False  # it rotates in place
            if kernel.kind in (_ADD, _SCALE) and not self.made & set(one.reads):
                return False  # it may belong to what torch computes next, as a rotation's cosines
            self._kernels.append(kernel)
        self._operations.append(one)
        self.made.update(one.results)
        return True

    def take(self) -> list[Operation]:
        """Return the run as one operation, or its only operation, and start the next one."""
        found, own_uses = self._operations, _uses(self._operations)
        if len(self._kernels) > 1:
            for kernel in self._kernels:
                kernel.x = self._views.get(kernel.x, kernel.x)
                kernel.other = self._views.get(kernel.other, kernel.other)
            results = [one for one in sorted(self.made) if self._uses.get(one, 0) > own_uses.get(one, 0)]
            sources = [(self._views.get(one, one), self._tails[one]) for one in results]
            run = KernelRun(self._kernels, sources, self._tails, self._workspace)
            found = [Operation(run, tuple(map(Register, run.inputs)), {}, tuple(results), True)]
        self._start()
        return found


def _kernel_of(one: Operation, tails: Tails) -> _Kernel | None:
    """Return how kernels compute an operation, and give its result a tail; None if they do not."""
    if one.call is attend_product:
        layer, product, rope_rows, (queries, _, _), head_dim = one.arguments
        tails[rope_rows.index], tails[one.results[0]] = (2, head_dim), (queries, head_dim)
        kernel = _Kernel(_ATTEND, product.index, rope_rows.index, one.results[0], -1)
        kernel.layer = layer
        return kernel
    registers = [part.index for part in one.arguments if isinstance(part, Register)]
    numbers = [part for part in one.arguments if type(part) in (int, float)]
    if one.options or not registers or len(registers) + len(numbers) < len(one.arguments):
        return None
    if one.name in MUL and registers[0] in tails and len(numbers) == 1:
        return _Kernel(_SCALE, registers[0], -1, one.results[0], -1, number=numbers[0])
    row_tails = {tails.get(register) for register in registers}
    tail = row_tails.pop()
    return None if row_tails or numbers or tail is None else _kernel_of_rows(one, registers, tail, tails)


def _kernel_of_rows(one: Operation, registers: list[int], tail: tuple[int, ...], tails: Tails) -> _Kernel | None:
    """Return how kernels compute an operation whose arguments are registers of this tail."""
    call, x, result = one.call, registers[0], one.results[0]
    owner = getattr(call, "__self__", None)
    if isinstance(owner, SharedProduct) and tail == (owner.num_inputs,):
        tails[result] = (owner.num_outputs,)
        kernel, weights = _Kernel(_MULTIPLY, x, -1, result, -1), owner.linear.weights
        kernel.weights = parts = (WeightDescriptor * len(weights))(*(weight.descriptor() for weight in weights))
        kernel.product = MultiplicationDescriptor(cast(parts, POINTER(WeightDescriptor)), len(parts))
        return kernel
    norm = call if isinstance(call, KernelNorm) else owner
    if isinstance(norm, KernelNorm) and tail[-1:] == norm.weight.shape:
        other, total = (-1, -1) if norm is call else (registers[1], one.results[1])
        return _Kernel(_NORM, x, other, result, total, tail[-1], 0, norm.eps, norm.weight.data_ptr())
    if isinstance(call, GatedActivation) and len(tail) == 1:
        return _Kernel(_ACTIVATE, x, -1, result, -1, 0, ACTIVATION_KINDS[call.kind])
    if one.name in ADD and len(registers) == 2:
        return _Kernel(_ADD, x, registers[1], -1, result)
    return None


class KernelRun:
    """A run: called with the tensors of `inputs`, it returns those of `results`, a register and a tail for each."""

    def __init__(
        self,
        kernels: Sequence[_Kernel],
        results: Sequence[tuple[int, tuple[int, ...]]],
        tails: Tails,
        workspace: cpu.Workspace,
    ) -> None:
        made = [register for kernel in kernels for register in kernel.registers("out", "sum")]
        read = dict.fromkeys(register for kernel in kernels for register in kernel.registers("x", "other"))
        self.inputs = [register for register in read if register not in set(made)]
        outputs = dict.fromkeys(register for register, _ in results)
        registers = list(dict.fromkeys((*self.inputs, *outputs, *made)))  # the caller's tensors first
        buffers = {register: index for index, register in enumerate(registers)}
        for kernel in kernels:
            for name in ("x", "other", "out", "sum"):
                setattr(kernel, name, buffers.get(getattr(kernel, name), -1))
        self._kernels, self._operations = kernels, (_Kernel * len(kernels))(*kernels)
        self._widths = (c_int64 * len(registers))(*(prod(tails[register]) for register in registers))
        self._results = [(buffers[register], tail) for register, tail in results]
        self._output_widths = [prod(tails[register]) for register in outputs]
        self._tensors = (c_void_p * (len(self.inputs) + len(outputs)))()
        self._run = _Run(
            addressof(self._operations), len(kernels), addressof(self._widths), len(registers), len(self._tensors)
        )
        self._step = _RunStep(tensors=addressof(self._tensors))
        self._workspace = workspace
        self._layers: PoolLayers | None = None

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """Compute the results in one parallel region. The thread's step attends by the kernels."""
        paged = running.step
        assert isinstance(paged, PagedStep) and paged.layers is not None, "a run without the kernels' attention"
        if paged.layers is not self._layers:
            self._layers = paged.layers
            for operation, kernel in zip(self._operations, self._kernels, strict=True):
                if kernel.layer is not None:
                    operation.group, layer = paged.layers.places[kernel.layer]
                    operation.attention = addressof(layer)
        num_tokens, threads, run, step = inputs[0].shape[1], cpu.team_size(), addressof(self._run), self._step
        tensors = [tensor.contiguous() for tensor in inputs]
        tensors += [torch.empty(num_tokens, width) for width in self._output_widths]
        self._tensors[:] = [tensor.data_ptr() for tensor in tensors]
        compute, workspace_bytes = _kernels()
        step.num_tokens, step.groups = num_tokens, paged.layers.groups_address
        step.workspace = self._workspace.address(workspace_bytes(run, num_tokens, threads))
        compute(run, addressof(step), threads)
        return [tensors[index].view(1, num_tokens, *tail) for index, tail in self._results]


@cache
def _kernels() -> tuple[Any, Any]:
    compute = cpu.function("octavo_run_operations", c_void_p, c_void_p, c_int32)
    workspace_bytes = cpu.function("octavo_run_workspace", c_void_p, c_int64, c_int64, result=c_int64)
    assert compute is not None and workspace_bytes is not None, "only where the kernels are"
    return compute, workspace_bytes
