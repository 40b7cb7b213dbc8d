"""The packed weights of a mixture of experts, their C structures, and a direct call of the kernel.

Owns: the C structures of csrc/experts.h. Does not: pack weights (native_weights does), or choose experts.
Invariants: the weights of equal experts are one packed weight each for gate, up and down, expert by expert; an expert
is a run of whole panels. The owner of a descriptor keeps the NativeMixture, which owns the memory.
Shapes: T tokens, E hidden size, X experts, I intermediate size of an expert.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from ctypes import Structure, addressof, c_double, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.artifacts.model_spec import MixtureSpec
from octavo.nn.packed_weight import PackedWeight, WeightDescriptor
from octavo.ops import cpu

PANEL = 16  # outputs; an expert's rows are a multiple of it
_SCORINGS: Mapping[str, int] = {"softmax": 0, "softmax_of_chosen": 1, "sigmoid": 2}  # enum Scoring


class RouterDescriptor(Structure):
    """struct Router of csrc/experts.h."""

    _fields_ = (
        ("weight", WeightDescriptor),
        *((name, c_int64) for name in ("num_experts", "top_k", "scoring", "is_normalised", "num_groups", "top_groups")),
        ("has_shared_gate", c_int64),
        *((name, c_double) for name in ("least_sum", "scale")),
        ("choice_bias", c_void_p),
    )


class ExpertsDescriptor(Structure):
    """struct Experts of csrc/experts.h."""

    _fields_ = (*((name, WeightDescriptor) for name in ("gate", "up", "down")), ("intermediate_size", c_int64))


class MixtureDescriptor(Structure):
    """struct Mixture of csrc/experts.h."""

    _fields_ = (
        ("router", RouterDescriptor),
        ("routed", ExpertsDescriptor),
        ("shared", ExpertsDescriptor),
        ("activation", c_int64),
    )


@dataclass(frozen=True, slots=True)
class NativeExperts:
    """Equal experts: `gate` and `up` are [X * I, E], `down` is [X * E, I]."""

    gate: PackedWeight
    up: PackedWeight
    down: PackedWeight

    @property
    def parts(self) -> tuple[PackedWeight, PackedWeight, PackedWeight]:
        """The three weights."""
        return self.gate, self.up, self.down

    def describe(self, intermediate_size: int) -> ExpertsDescriptor:
        """Return the struct that the kernels take."""
        return ExpertsDescriptor(*(part.descriptor() for part in self.parts), intermediate_size)


@dataclass(frozen=True, slots=True)
class NativeMixture:
    """The weights of one layer's mixture. The router is float32; its last row may be the shared expert's gate."""

    router: PackedWeight
    routed: NativeExperts
    shared: NativeExperts | None = None
    choice_bias: npt.NDArray[np.float32] | None = None

    @property
    def parts(self) -> tuple[PackedWeight, ...]:
        """Every packed weight."""
        return (self.router, *self.routed.parts, *(() if self.shared is None else self.shared.parts))

    def idle(self, mixture: MixtureSpec) -> tuple[int, int]:
        """Return the bytes and the number of weights of experts that one token does not choose."""
        parts, count = self.routed.parts, mixture.num_experts
        sizes = sum(part.nbytes for part in parts), sum(part.outputs * part.inputs for part in parts)
        num_bytes, num_weights = (size // count * (count - mixture.top_k) for size in sizes)
        return num_bytes, num_weights

    def describe(self, mixture: MixtureSpec, activation: int) -> MixtureDescriptor:
        """Return the struct that the kernels take. `activation` is a value of csrc/rows.h's enum."""
        router = RouterDescriptor(
            weight=self.router.descriptor(),
            num_experts=mixture.num_experts,
            top_k=mixture.top_k,
            scoring=_SCORINGS[mixture.scoring],
            is_normalised=mixture.is_normalised,
            num_groups=mixture.num_groups,
            top_groups=mixture.top_groups,
            has_shared_gate=mixture.has_shared_gate,
            least_sum=mixture.least_sum,
            scale=mixture.scale,
            choice_bias=None if self.choice_bias is None else self.choice_bias.ctypes.data,
        )
        shared = ExpertsDescriptor() if self.shared is None else self.shared.describe(mixture.shared_size)
        return MixtureDescriptor(router, self.routed.describe(mixture.intermediate_size), shared, activation)


def choose_experts(descriptor: MixtureDescriptor, logits_TX: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of each token's experts and their weights, [T, C]."""
    assert logits_TX.dtype is torch.float32 and logits_TX.stride(1) == 1, "float32 rows"
    shape = (len(logits_TX), descriptor.router.top_k)
    chosen_TC, weights_TC = torch.empty(shape, dtype=torch.int32), torch.empty(shape)
    where = (logits_TX.data_ptr(), logits_TX.stride(0), len(logits_TX), chosen_TC.data_ptr(), weights_TC.data_ptr())
    _kernels()[2](addressof(descriptor), *where)
    return chosen_TC, weights_TC


def mix_experts(descriptor: MixtureDescriptor, x_TE: Tensor, num_threads: int = 1) -> tuple[Tensor, int]:
    """Return each token's mixture, and the bytes of weights that were read. The caller keeps the weights alive."""
    assert x_TE.dtype is torch.float32 and x_TE.is_contiguous(), "float32 rows"
    size, run, _ = _kernels()
    memory = torch.empty(size(addressof(descriptor), len(x_TE), num_threads) + 64, dtype=torch.uint8)
    workspace, num_bytes = -(-memory.data_ptr() // 64) * 64, c_int64(0)
    out_TE = torch.empty_like(x_TE)
    rows = (x_TE.data_ptr(), len(x_TE), out_TE.data_ptr())
    run(addressof(descriptor), *rows, workspace, ctypes.byref(num_bytes), num_threads)
    return out_TE, num_bytes.value


@cache
def _kernels() -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    size = cpu.function("octavo_mixture_workspace", c_void_p, c_int64, c_int64, result=c_int64)
    run = cpu.function("octavo_mixture", c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int32)
    choose = cpu.function("octavo_choose_experts", c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p)
    assert size is not None and run is not None and choose is not None, "only where the kernels are"
    return size, run, choose
