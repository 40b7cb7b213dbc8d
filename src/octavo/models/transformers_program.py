"""The steps of a transformers model as a flat list of operations, without the Python code of its modules.

Owns: recording of a model's operations, their replay for any number of tokens, and the fusion of some of them. A model
runs a thousand lines of Python per step; at one row that takes longer than the arithmetic.
Does not: know families. A model whose operations depend on values (as with experts in a loop) has no program.
Invariants: the model is recorded at two lengths, and an operation's numbers must be equal in both or multiples of the
length. A program is served only after transformers_check, as the model is.
Shapes: T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from octavo.models.transformers_fusion import Multiple, Operation, Register, TracedStep, fused
from octavo.models.transformers_probe import PagedStep, running
from octavo.models.transformers_runs import with_runs

LENGTHS = (13, 17)  # primes, which are no sizes of parts of a model
# What reads a tensor's values into Python, or makes sizes of them: the operations after it may depend on them.
_READS = {
    "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__iter__", "__contains__", "__array__",
    "equal", "allclose", "is_nonzero", "nonzero", "unique", "masked_select", "argwhere",
}  # fmt: skip


class NoProgramError(Exception):
    """The model's operations are not the same for every input; the text says which one."""


class ProgramRecorder(TorchFunctionMode):
    """Records the operations of one run. `leaf` records a call as one operation."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self._registers: dict[int, int] = {}
        self._kept: list[Tensor] = []  # so that no other tensor gets a recorded one's id
        self._is_paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run and record one function of torch."""
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if not self._is_paused:
            name = getattr(func, "__name__", "")
            if name in _READS or (name == "where" and len(args) == 1):
                raise NoProgramError(f"{name} reads values")
            self._record(func, args, kwargs, found)
        return found

    def leaf(self, call: Callable[..., Any], *args: Any) -> Any:
        """Run a call and record it as one operation."""
        self._is_paused, running.recorder = True, None
        try:
            found = call(*args)
        finally:
            self._is_paused, running.recorder = False, self
        self._record(call, args, {}, found)
        return found

    def enter(self, tensor: Tensor) -> None:
        """Make an input the next register."""
        self._registers[id(tensor)] = len(self._kept)
        self._kept.append(tensor)

    @property
    def num_registers(self) -> int:
        """Number of tensors that were recorded."""
        return len(self._kept)

    def register_of(self, tensor: Tensor) -> int:
        """Return the register of a recorded tensor. Raises NoProgramError."""
        if id(tensor) not in self._registers:
            raise NoProgramError("the result is no recorded tensor")
        return self._registers[id(tensor)]

    def row_tails(self, length: int) -> dict[int, tuple[int, ...]]:
        """Return the tails of the registers that hold float32 rows [1, length, *tail]."""
        return {
            index: tuple(tensor.shape[2:])
            for index, tensor in enumerate(self._kept)
            if tensor.dtype is torch.float32 and tensor.shape[:2] == (1, length)
        }

    def _record(self, call: Callable[..., Any], args: Any, options: Mapping[str, Any], found: Any) -> None:
        is_tuple = isinstance(found, (tuple, list))
        tensors = [part for part in (found if is_tuple else (found,)) if isinstance(part, Tensor)]
        if is_tuple and tensors and len(tensors) != len(found):
            raise NoProgramError(f"{call} returns tensors and other values")
        is_written = getattr(call, "__name__", "") in ("__setitem__", "__set__")
        if not tensors and not is_written:
            return  # a size, a dtype, a device
        arguments, own = self._symbols(tuple(args)), self._symbols(dict(options))
        for tensor in tensors:
            if id(tensor) not in self._registers:
                self.enter(tensor)
        results = tuple(self._registers[id(tensor)] for tensor in tensors)
        self.operations.append(Operation(call, arguments, own, results, is_tuple))

    def _symbols(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            index = self._registers.get(id(value))
            return value if index is None else Register(index)
        if isinstance(value, torch.Size):
            return tuple(value)
        if isinstance(value, (tuple, list)):
            return type(value)(self._symbols(part) for part in value)
        if isinstance(value, dict):
            return {key: self._symbols(part) for key, part in value.items()}
        if isinstance(value, slice):
            return slice(*(self._symbols(part) for part in (value.start, value.stop, value.step)))
        return value


def merged(first: Any, second: Any) -> Any:
    """Return what two recordings have in common, with multiples of the length. Raises NoProgramError."""
    if type(first) is not type(second):
        raise NoProgramError("an argument differs between two lengths")
    if isinstance(first, Tensor):
        if first.data_ptr() == second.data_ptr() and first.shape == second.shape:
            return first
        raise NoProgramError("a constant differs between two lengths")
    if isinstance(first, (tuple, list)):
        return type(first)(merged(a, b) for a, b in zip(first, second, strict=True))
    if isinstance(first, dict):
        return {key: merged(part, second[key]) for key, part in first.items()}
    if isinstance(first, slice):
        return slice(*(merged(getattr(first, name), getattr(second, name)) for name in ("start", "stop", "step")))
    return _merged_number(first, second)


def _merged_number(first: Any, second: Any) -> Any:
    if first is second or first == second:
        return first
    if type(first) is int and first % LENGTHS[0] == 0 and second * LENGTHS[0] == first * LENGTHS[1]:
        return Multiple(first // LENGTHS[0])
    raise NoProgramError(f"{first} differs from {second} between {LENGTHS[0]} and {LENGTHS[1]} tokens")


Steps = list[tuple[Any, ...]]


class Program:
    """A recorded model: `run` replays it.

    `with_runs` are the same operations with runs of kernels, for steps whose layers attend by the kernels.
    """

    def __init__(
        self, operations: list[Operation], with_runs: list[Operation], num_registers: int, result: int
    ) -> None:
        self._num_registers = num_registers
        self._result = result
        self.steps, self.steps_with_runs = self._prepared(operations), self._prepared(with_runs)

    def _prepared(self, operations: list[Operation]) -> Steps:
        """Return what `run` needs of each operation. Registers are freed after their last use."""
        result, last = self._result, dict[int, int]()
        for index, operation in enumerate(operations):
            for register in (*operation.reads, *operation.results):
                last[register] = index
        return [
            (
                operation.call,
                list(operation.arguments),
                [(at, part.index) for at, part in enumerate(operation.arguments) if isinstance(part, Register)],
                [at for at, part in enumerate(operation.arguments) if _is_nested(part)],
                operation.options,
                operation.results,
                operation.is_tuple,
                [register for register in set(operation.reads) if last[register] == index and register != result],
            )
            for index, operation in enumerate(operations)
        ]

    def run(self, ids_BT: Tensor, positions_BT: Tensor) -> Tensor:
        """Return the hidden states [1, T, E]. The thread's step attends."""
        registers: list[Any] = [None] * self._num_registers
        registers[0], registers[1] = ids_BT, positions_BT
        num_tokens = ids_BT.shape[1]
        has_kernels = isinstance(running.step, PagedStep) and running.step.layers is not None
        steps = self.steps_with_runs if has_kernels else self.steps
        for call, template, fills, nested, options, results, is_tuple, unused in steps:
            arguments = template.copy()
            for at, register in fills:
                arguments[at] = registers[register]
            for at in nested:
                arguments[at] = _filled(template[at], registers, num_tokens)
            if options:
                found = call(*arguments, **_filled(options, registers, num_tokens))
            else:
                found = call(*arguments)
            if is_tuple:
                for register, part in zip(results, found, strict=True):
                    registers[register] = part
            elif results:
                registers[results[0]] = found
            for register in unused:
                registers[register] = None
        hidden_BTE: Tensor = registers[self._result]
        return hidden_BTE


def record(base: nn.Module, vocab_size: int) -> Program:
    """Record a model at two lengths and return its program. Raises NoProgramError."""
    recordings = []
    for length in LENGTHS:
        recorder = ProgramRecorder()
        ids_BT, positions_BT = torch.arange(length)[None] % vocab_size, torch.arange(length)[None]
        recorder.enter(ids_BT)
        recorder.enter(positions_BT)
        running.step, running.recorder = TracedStep(), recorder
        try:
            with recorder:
                hidden_BTE = base(input_ids=ids_BT, position_ids=positions_BT, use_cache=False)[0]
        finally:
            running.step = running.recorder = None
        recordings.append((recorder, recorder.register_of(hidden_BTE)))
    (first, result), (second, other) = recordings
    if len(first.operations) != len(second.operations) or result != other:
        raise NoProgramError("the operations differ between two lengths")
    operations = []
    for one, two in zip(first.operations, second.operations, strict=True):
        if one.call != two.call or one.results != two.results or one.is_tuple != two.is_tuple:
            raise NoProgramError(f"{one.call} differs from {two.call} between two lengths")
        arguments, options = merged(one.arguments, two.arguments), merged(one.options, two.options)
        operations.append(Operation(one.call, arguments, options, one.results, one.is_tuple))
    operations, num_registers = fused(operations, first.num_registers, result)
    other_tails = second.row_tails(LENGTHS[1])
    tails = {index: tail for index, tail in first.row_tails(LENGTHS[0]).items() if other_tails.get(index) == tail}
    return Program(operations, with_runs(operations, tails, result), num_registers, result)


def _is_nested(part: Any) -> bool:
    """Return True if an argument is no register and holds one, or a multiple."""
    if isinstance(part, Multiple):
        return True
    if isinstance(part, (tuple, list)):
        return any(isinstance(entry, Register) or _is_nested(entry) for entry in part)
    if isinstance(part, slice):
        return any(isinstance(entry, (Register, Multiple)) for entry in (part.start, part.stop, part.step))
    return isinstance(part, dict)


def _filled(part: Any, registers: list[Any], num_tokens: int) -> Any:
    if isinstance(part, Register):
        return registers[part.index]
    if isinstance(part, Multiple):
        return part.factor * num_tokens
    if isinstance(part, (tuple, list)):
        return type(part)(_filled(entry, registers, num_tokens) for entry in part)
    if isinstance(part, dict):
        return {key: _filled(entry, registers, num_tokens) for key, entry in part.items()}
    if isinstance(part, slice):
        return slice(*(_filled(entry, registers, num_tokens) for entry in (part.start, part.stop, part.step)))
    return part
