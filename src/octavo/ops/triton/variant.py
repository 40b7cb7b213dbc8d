"""What each kernel is compiled for, so that a tool can compile all of them without a device.

Owns: the description of a kernel's call, and how kernels are compiled everywhere. Does not: compile.
Each module that launches kernels has `VARIANTS`: representative sizes of a model's layers for each of its kernels.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Kernels run on CPU tensors. The interpreter multiplies bit patterns in a bfloat16 tl.dot, so kernels widen operands
# first, which changes nothing else: a product of two bfloat16 numbers is exact in float32.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Of every launch: a fused multiply-add would round once where the twins round twice.
OPTIONS: Mapping[str, Any] = {"enable_fp_fusion": False}


@dataclass(frozen=True, slots=True)
class Variant:
    """One compilation of a kernel.

    `signature` has the type of each argument ("*bf16", "i32", "fp32"), `constants` the value of each constexpr.
    `aligned` names arguments that are divisible by 16: strides, and all pointers. `instruction` is a part of the PTX
    that must be there.
    """

    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3  # Triton's default
    aligned: tuple[str, ...] = ()
    instruction: str | None = None
    options: Mapping[str, Any] = field(default_factory=lambda: dict(OPTIONS))
