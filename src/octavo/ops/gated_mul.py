"""Gated product of a fused gate and up projection, with SiLU or with the tanh form of GELU.

Owns: the operations. Does not: multiply by weights. Invariants: a token's result depends on that token alone. Of
`gate_rows`, each value depends on its own gate and up alone, bit for bit; torch's depend on where a vector ends.
Shapes: T tokens, I intermediate size, G = 2 I: the gate first, then the up projection.

Source: Shazeer, "GLU Variants Improve Transformer", 2020 (SwiGLU, GEGLU). As in transformers, the activated gate is
rounded before the product.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor
from torch.nn import functional

from octavo.ops import cpu

_KINDS = {"silu": 0, "gelu": 1}  # enum Activation of csrc/rows.h


def silu_mul(gate_up_TG: Tensor) -> Tensor:
    """Return silu(gate) * up as a new contiguous tensor [T, I]."""
    size = gate_up_TG.shape[-1] // 2
    return functional.silu(gate_up_TG[:, :size]).mul_(gate_up_TG[:, size:])


def gelu_mul(gate_up_TG: Tensor) -> Tensor:
    """Return gelu(gate) * up as a new contiguous tensor [T, I]."""
    size = gate_up_TG.shape[-1] // 2
    return functional.gelu(gate_up_TG[:, :size], approximate="tanh").mul_(gate_up_TG[:, size:])


def gate_rows(activation: str) -> Callable[[Tensor], Tensor]:
    """Return the C++ kernel for float32 rows, which runs on one thread. Needs the kernels."""
    gate = cpu.function("octavo_rows_gate", c_int64, c_void_p, c_void_p, c_int64, c_int64)
    assert gate is not None, "only where the kernels are"
    kind = _KINDS[activation]

    def multiply(gate_up_TG: Tensor) -> Tensor:
        gate_up_TG = gate_up_TG.contiguous()
        num_rows, size = gate_up_TG.shape[0], gate_up_TG.shape[1] // 2
        out_TI = torch.empty(num_rows, size)
        gate(kind, gate_up_TG.data_ptr(), out_TI.data_ptr(), num_rows, size)
        return out_TI

    return multiply
