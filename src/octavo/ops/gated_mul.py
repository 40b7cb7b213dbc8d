"""The activation of an MLP: of a fused gate and up projection (act(gate) * up), or of the up projection alone.

Owns: the operations: torch's, C++'s of float32 rows, and the choice of Triton's where the device is no CPU.
Does not: multiply by weights. Invariants: a token's result depends on that token alone. Of `activate_rows`, each
value depends on its own inputs alone, bit for bit; torch's depend on where a vector ends.
Shapes: T tokens, I intermediate size, G = 2 I: the gate first, then the up projection.

Source: Shazeer, "GLU Variants Improve Transformer", 2020 (SwiGLU, GEGLU). As in transformers, the activated gate is
rounded before the product.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_int64, c_void_p
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from octavo.ops import cpu
from octavo.ops.triton import available

# enum Activation of csrc/rows.h
ACTIVATION_KINDS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3, "relu2": 4, "clamped_swiglu": 5}
SWIGLU_LIMIT, SWIGLU_SLOPE = 7.0, 1.702  # of clamped_swiglu, GPT-OSS's


def _relu2(x_TI: Tensor) -> Tensor:
    return functional.relu(x_TI).square()


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "relu2": _relu2,
}


def activation_of(name: str, is_gated: bool) -> Callable[[Tensor], Tensor]:
    """Return the operation from [T, G], or from [T, I] if not gated, to a new contiguous tensor [T, I]."""
    if name == "clamped_swiglu":
        return partial(_activate, _clamped_swiglu, ACTIVATION_KINDS[name], True)
    plain = partial(_gated_mul, _ACTIVATIONS[name]) if is_gated else _ACTIVATIONS[name]
    return partial(_activate, plain, ACTIVATION_KINDS[name], is_gated)


def _activate(plain: Callable[[Tensor], Tensor], kind: int, is_gated: bool, x_TG: Tensor) -> Tensor:
    if available.uses_kernels(x_TG) and x_TG.stride(-1) == 1:
        out_TI: Tensor = torch.ops.octavo.activate(x_TG, kind, is_gated)
        return out_TI
    return plain(x_TG)


def _gated_mul(activate: Callable[[Tensor], Tensor], gate_up_TG: Tensor) -> Tensor:
    size = gate_up_TG.shape[-1] // 2
    return activate(gate_up_TG[:, :size]).mul_(gate_up_TG[:, size:])


def _clamped_swiglu(gate_up_TG: Tensor) -> Tensor:
    """Clamp both halves, the gate only from above; SiLU with a steeper sigmoid; times up + 1."""
    size = gate_up_TG.shape[-1] // 2
    gate_TI = gate_up_TG[:, :size].clamp(max=SWIGLU_LIMIT)
    up_TI = gate_up_TG[:, size:].clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (gate_TI * (gate_TI * SWIGLU_SLOPE).sigmoid()).mul_(up_TI + 1)


def activate_rows(name: str, is_gated: bool) -> Callable[[Tensor], Tensor]:
    """Return the C++ kernel of the same operation for float32 rows, which runs on one thread. Needs the kernels."""
    kernel = cpu.function("octavo_rows_activate", c_int64, c_int64, c_void_p, c_void_p, c_int64, c_int64)
    assert kernel is not None, "only where the kernels are"
    kind = ACTIVATION_KINDS[name]

    def activate(gate_up_TG: Tensor) -> Tensor:
        gate_up_TG = gate_up_TG.contiguous()
        num_rows, size = gate_up_TG.shape[0], gate_up_TG.shape[1] // (2 if is_gated else 1)
        out_TI = torch.empty(num_rows, size)
        kernel(kind, is_gated, gate_up_TG.data_ptr(), out_TI.data_ptr(), num_rows, size)
        return out_TI

    return activate
