"""Fusion of recorded operations: linear columns to products, rotations, gates, and norms after additions.

Owns: the form of an operation, and the patterns. Does not: record or run.
Invariants: a pattern is found by what operations compute on which registers. What matches no pattern stays as it was.
Shapes: T tokens, H heads, D size of a head, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import c_int64, c_void_p
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from octavo.models.transformers_layers import KernelNorm, LinearColumns
from octavo.models.transformers_probe import PagedStep, running
from octavo.ops import cpu
from octavo.ops.gated_mul import activate_rows


@dataclass(frozen=True, slots=True)
class Register:
    """The place of a tensor that an operation made."""

    index: int


@dataclass(frozen=True, slots=True)
class Multiple:
    """A number that is this many times the tokens of the step."""

    factor: int


@dataclass(slots=True)
class Operation:
    """A call whose arguments may hold registers and multiples; `results` are the registers of its tensors."""

    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    results: tuple[int, ...]
    is_tuple: bool = False

    @property
    def name(self) -> str:
        """The name of its function."""
        return str(getattr(self.call, "__name__", ""))

    @property
    def reads(self) -> list[int]:
        """The registers that it reads."""
        found: list[int] = []
        pending: list[Any] = [self.arguments, self.options]
        while pending:
            part = pending.pop()
            if isinstance(part, Register):
                found.append(part.index)
            elif isinstance(part, (tuple, list)):
                pending.extend(part)
            elif isinstance(part, dict):
                pending.extend(part.values())
            elif isinstance(part, slice):
                pending.extend((part.start, part.stop, part.step))
        return found

    @property
    def writes(self) -> bool:
        """True if it writes to an argument."""
        is_in_place = self.name.endswith("_") and not self.name.endswith("__")
        return not self.results or is_in_place or self.name.startswith("__i") or "out" in self.options


ADD, MUL, _NEG = {"add", "__add__", "__radd__"}, {"mul", "__mul__", "__rmul__"}, {"neg", "__neg__"}


class _Maker:
    """The operations that made each register."""

    def __init__(self, operations: list[Operation]) -> None:
        self.makers = {result: one for one in operations for result in one.results}

    def of(self, part: Any, names: set[str], num_arguments: int = 2) -> Operation | None:
        """Return the operation that made a register, if it has one of these names."""
        if not isinstance(part, Register):
            return None
        maker = self.makers.get(part.index)
        if maker is None or maker.name not in names or maker.options or len(maker.arguments) != num_arguments:
            return None
        return maker


def fused(operations: list[Operation], num_registers: int, result: int) -> tuple[list[Operation], int]:
    """Return fewer operations that compute the same `result`, and the number of registers.

    Where an operation writes to a tensor, nothing is fused: a register then is not one value.
    """
    if any(one.writes for one in operations):
        return operations, num_registers
    operations = [one for one in operations if not _returns_its_argument(one)]
    operations, num_registers = _share_products(_share_views(operations), num_registers)
    operations, num_registers = _fuse_rotations(operations, num_registers)
    operations = _fuse_norms(_fuse_attention(_fuse_gates(operations)))
    return _live(operations, result), num_registers


def _returns_its_argument(operation: Operation) -> bool:
    """Return True for x.to(its own dtype), x.contiguous() of contiguous x, and the like."""
    return set(operation.results) <= set(operation.reads)


def _share_views(operations: list[Operation]) -> list[Operation]:
    """Make each view of a register once; views with equal arguments are equal whatever is written."""
    made: dict[tuple[int, tuple[Any, ...]], int] = {}
    same: dict[int, int] = {}
    found = []
    for one in operations:
        one = replace(one, arguments=_renamed(one.arguments, same), options=_renamed(one.options, same))
        if one.name in ("unsqueeze", "transpose") and isinstance(one.arguments[0], Register) and not one.options:
            key = (one.arguments[0].index, (one.name, *one.arguments[1:]))
            if key in made:
                same[one.results[0]] = made[key]
                continue
            made[key] = one.results[0]
        found.append(one)
    return found


def _renamed(part: Any, same: Mapping[int, int]) -> Any:
    if isinstance(part, Register):
        return Register(same.get(part.index, part.index))
    if isinstance(part, (tuple, list)):
        return type(part)(_renamed(entry, same) for entry in part)
    if isinstance(part, dict):
        return {key: _renamed(entry, same) for key, entry in part.items()}
    if isinstance(part, slice):
        return slice(*(_renamed(entry, same) for entry in (part.start, part.stop, part.step)))
    return part


def _share_products(operations: list[Operation], num_registers: int) -> tuple[list[Operation], int]:
    """Compute a shared product once; its linear layers take their columns."""
    made: dict[tuple[int, int], int] = {}
    found = []
    for one in operations:
        columns = one.call
        if not isinstance(columns, LinearColumns) or not isinstance(one.arguments[0], Register):
            found.append(one)
            continue
        key = (id(columns.product), one.arguments[0].index)
        if columns.is_whole:
            found.append(Operation(columns.product.multiply, one.arguments, {}, one.results))
            continue
        if key not in made:
            made[key] = num_registers
            found.append(Operation(columns.product.multiply, one.arguments, {}, (num_registers,)))
            num_registers += 1
        found.append(
            Operation(Tensor.narrow, (Register(made[key]), -1, columns.start, columns.out_features), {}, one.results)
        )
    return found, num_registers


def _fuse_rotations(operations: list[Operation], num_registers: int) -> tuple[list[Operation], int]:
    """Replace x * cos + cat(-x2, x1) * sin, with x1 and x2 the halves of x, by one kernel."""
    maker, rows = _Maker(operations), dict[tuple[int, int], int]()
    found = []
    for one in operations:
        match = _rotation(maker, one)
        if match is None:
            found.append(one)
            continue
        x, cos, sin = match
        if (cos.index, sin.index) not in rows:
            rows[cos.index, sin.index] = num_registers
            found.append(Operation(rope_rows, (cos, sin), {}, (num_registers,)))
            num_registers += 1
        found.append(Operation(rotate, (x, Register(rows[cos.index, sin.index])), {}, one.results))
    return found, num_registers


def _rotation(maker: _Maker, one: Operation) -> tuple[Register, Register, Register] | None:
    if one.name not in ADD or len(one.arguments) != 2 or one.options:
        return None
    plain, turned = (maker.of(part, MUL) for part in one.arguments)
    if plain is None or turned is None:
        return None
    (x, cos), (pair, sin) = plain.arguments, turned.arguments
    joined = maker.of(pair, {"cat"}, 1) or maker.of(pair, {"cat"})
    if joined is None and isinstance(pair, Register) and (held := maker.makers.get(pair.index)) is not None:
        joined = held if held.name == "cat" else None
    if joined is None or not all(isinstance(part, Register) for part in (x, cos, sin)):
        return None
    parts = joined.arguments[0]
    if len(parts) != 2 or (negated := maker.of(parts[0], _NEG, 1)) is None:
        return None
    high, low = maker.of(negated.arguments[0], {"__getitem__"}), maker.of(parts[1], {"__getitem__"})
    if high is None or low is None or not high.arguments[0] == low.arguments[0] == x:
        return None
    upper, lower = high.arguments[1], low.arguments[1]
    is_halves = (
        isinstance(upper, tuple)
        and isinstance(lower, tuple)
        and upper[:-1] == lower[:-1] == (Ellipsis,)
        and (lower[-1].start, upper[-1].stop) == (None, None)
        and lower[-1].stop == upper[-1].start
    )
    return (x, cos, sin) if is_halves else None


def _fuse_gates(operations: list[Operation]) -> list[Operation]:
    """Replace act(gate) * up, the two halves of one product, by one kernel."""
    maker, found = _Maker(operations), []
    for one in operations:
        product = _gated_product(maker, one)
        found.append(one if product is None else Operation(GatedActivation(product[1]), (product[0],), {}, one.results))
    return found


def _gated_product(maker: _Maker, one: Operation) -> tuple[Register, str] | None:
    if one.name not in MUL or len(one.arguments) != 2:
        return None
    for left, right in (one.arguments, one.arguments[::-1]):
        activation = maker.makers.get(left.index) if isinstance(left, Register) else None
        kind = None if activation is None else _activation(activation)
        if activation is None or kind is None:
            continue
        gate, up = maker.of(activation.arguments[0], {"narrow"}, 4), maker.of(right, {"narrow"}, 4)
        if gate is None or up is None or gate.arguments[0] != up.arguments[0]:
            continue
        (product, _, first, size), (_, _, second, other) = gate.arguments, up.arguments
        source = maker.makers[product.index]
        width = getattr(getattr(source.call, "__self__", None), "num_outputs", None)
        if (first, second) == (0, size) and size == other and width == 2 * size:
            return product, kind
    return None


def _activation(one: Operation) -> str | None:
    if one.name == "silu":
        return "silu"
    if one.name == "gelu" and one.options.get("approximate") == "tanh":
        return "gelu_tanh"
    return None


def _fuse_attention(operations: list[Operation]) -> list[Operation]:
    """Rotate queries and keys in one call, where they and the values are all columns of one product."""
    maker, found = _Maker(operations), []
    for one in operations:
        match = _attended_product(maker, one.arguments[1:]) if one.name == PAGED else None
        found.append(one if match is None else Operation(attend_product, (one.arguments[0], *match), {}, one.results))
    return found


def _attended_product(maker: _Maker, states: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return the product, the rows of its rotation, the numbers of heads and their size."""
    parts = [part for state in states if (part := _heads(maker, state)) is not None]
    if len(parts) != 3:
        return None
    query, key, value = parts
    sizes = [part.num_heads * part.head_dim for part in parts]
    is_one = len({part.source for part in parts}) == len({part.head_dim for part in parts}) == 1
    is_row = [part.start for part in parts] == [0, sizes[0], sizes[0] + sizes[1]]
    if not (is_one and is_row) or query.rows is None or query.rows != key.rows or value.rows is not None:
        return None
    return query.source, query.rows, tuple(part.num_heads for part in parts), query.head_dim


@dataclass(frozen=True, slots=True)
class _Heads:
    """Heads [1, H, T, D] that are columns of a product, rotated by `rows` if these are there."""

    source: Register
    start: int
    num_heads: int
    head_dim: int
    rows: Register | None


def _heads(maker: _Maker, state: Any) -> _Heads | None:
    rows = None
    if (rotated := maker.of(state, {"rotate"})) is not None:
        state, rows = rotated.arguments
    turned = maker.of(state, {"transpose"}, 3)
    viewed = None if turned is None or turned.arguments[1:] != (1, 2) else maker.of(turned.arguments[0], {"view"})
    columns = None if viewed is None else maker.of(viewed.arguments[0], {"narrow"}, 4)
    if viewed is None or columns is None or columns.arguments[1] != -1:
        return None
    shape, (source, _, start, count) = viewed.arguments[1], columns.arguments
    if not isinstance(shape, tuple) or len(shape) != 4 or shape[0] != 1 or shape[2] != -1:
        return None
    return _Heads(source, start, count // shape[3], shape[3], rows)


def _fuse_norms(operations: list[Operation]) -> list[Operation]:
    """Let a norm's kernel add the residual before it."""
    maker = _Maker(operations)
    added: dict[int, Operation] = {}
    for one in operations:
        if isinstance(one.call, KernelNorm):
            addition = maker.of(one.arguments[0], ADD)
            if addition is not None and all(isinstance(part, Register) for part in addition.arguments):
                added.setdefault(addition.results[0], one)
    norms, found = {id(one) for one in added.values()}, []
    for one in operations:
        norm = added.get(one.results[0]) if len(one.results) == 1 and one.name in ADD else None
        if norm is not None and isinstance(norm.call, KernelNorm):
            found.append(Operation(norm.call.add_norm, one.arguments, {}, (*norm.results, *one.results), True))
        elif id(one) not in norms:
            found.append(one)
    return found


def _live(operations: list[Operation], result: int) -> list[Operation]:
    """Drop operations whose results nothing reads, and dropout, which does nothing when a model serves."""
    needed, found = {result}, []
    for one in reversed(operations):
        if one.name in (PAGED, "attend_product") or needed & set(one.results):
            if one.name == "dropout":
                one = replace(one, call=_same, arguments=one.arguments[:1], options={})
            needed |= set(one.reads)
            found.append(one)
    return found[::-1]


PAGED = "attend_paged"


def attend_paged(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend in a layer of this thread's step: heads [1, H, T, D] to [1, T, H, V]."""
    step = running.step
    assert isinstance(step, (PagedStep, TracedStep)), "a program runs outside of a step"
    return step.attend_layer(layer, query, key, value)


def attend_product(
    layer: int, product: Tensor, rope_rows_T2D: Tensor, counts: tuple[int, int, int], head_dim: int
) -> Tensor:
    """Attend in a layer whose queries, keys and values are the columns of `product` [1, T, F]; return [1, T, H, D]."""
    queries, rotated = counts[0], counts[0] + counts[1]
    heads = product.view(*product.shape[:2], -1, head_dim).transpose(1, 2)
    turned = rotate(heads[:, :rotated], rope_rows_T2D)
    return attend_paged(layer, turned[:, :queries], turned[:, queries:], heads[:, rotated : sum(counts)])


class TracedStep:
    """Attention while a model is recorded: zeros of the right shape."""

    def __init__(self) -> None:
        self._index = 0

    def attend(
        self, module: nn.Module, states: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, options: Mapping[str, Any]
    ) -> Tensor:
        """Record the next layer's attention."""
        assert running.recorder is not None, "a recorder records"
        index = self._index
        self._index = index + 1
        attended: Tensor = running.recorder.leaf(attend_paged, index, *states)
        return attended

    def attend_layer(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return zeros [1, T, H, V]."""
        return value.new_zeros((1, query.shape[2], query.shape[1], value.shape[3]))


def _same(x: Tensor) -> Tensor:
    return x


class GatedActivation:
    """The gated activation of rows [1, T, 2 * I]."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._activate = activate_rows(kind, True)

    def __call__(self, x: Tensor) -> Tensor:
        """Return [1, T, I]."""
        return self._activate(x.view(-1, x.shape[-1])).view(*x.shape[:-1], -1)


def rope_rows(cos: Tensor, sin: Tensor) -> Tensor:
    """Return cosines and signed sines as the kernel reads them, [T, 2, D], from [1, 1, T, D]."""
    half = sin.shape[-1] // 2
    rows = torch.stack((cos, sin), dim=-2).reshape(-1, 2, sin.shape[-1]).float()
    rows[:, 1, :half].neg_()
    return rows


@cache
def _rotate() -> Callable[..., None]:
    function = cpu.function("octavo_rows_rotate", c_void_p, c_void_p, *[c_int64] * 5)
    assert function is not None, "only where the kernels are"
    return function


def rotate(x: Tensor, rope_rows_T2D: Tensor) -> Tensor:
    """Return heads [1, H, T, D] rotated, with the memory of [T, H, D]."""
    heads = x.transpose(1, 2).clone(memory_format=torch.contiguous_format)
    _, tokens, count, size = heads.shape
    _rotate()(heads.data_ptr(), rope_rows_T2D.data_ptr(), tokens, count, size, size, 0)
    return heads.transpose(1, 2)
