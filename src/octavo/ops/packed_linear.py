"""Linear layers over packed weights: direct calls of the C++ kernels, and a torch twin. A decoder's step calls in C++.

Owns: the binding of octavo_linear and octavo_linear_prepare; the twin's arithmetic.
Does not: pack, or own weights (nn/packed_weight.py does; these functions take its descriptor).
Invariants: an output depends on its row and its weight alone, bit for bit. Quantised kinds give equal bits on every
instruction set. Shapes: T tokens, E inputs, F outputs, G groups of 32 inputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_int32, c_int64, c_void_p
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.ops import cpu

ACTIVATION_GROUP = 32
_ALIGNMENT = 64
_FIRST_QUANTISED = 2  # the first quantised value of csrc/linear.h's WeightKind


def prepare(x_TE: Tensor, kind: int, num_threads: int = 1) -> Tensor:
    """Convert rows to the form that `linear` reads for weights of this kind: bytes [T, prepared size], aligned."""
    assert x_TE.dtype is torch.float32 and x_TE.dim() == 2 and x_TE.stride(1) == 1, "float32 rows"
    size, prepare_rows, _ = _kernels()
    num_rows, inputs = x_TE.shape
    width = size(kind, inputs)
    whole = torch.empty(num_rows * width + _ALIGNMENT, dtype=torch.uint8)
    start = -whole.data_ptr() % _ALIGNMENT
    prepared = whole[start : start + num_rows * width].view(num_rows, width)
    prepare_rows(kind, x_TE.data_ptr(), x_TE.stride(0), num_rows, inputs, prepared.data_ptr(), num_threads)
    return prepared


def linear(weight: Any, prepared: Tensor, out_TF: Tensor, *, accumulate: bool = False, num_threads: int = 1) -> None:
    """Write x W^T + b into out_TF, or add it to out_TF.

    `weight` is struct Weight of csrc/linear.h; the caller keeps its memory alive.
    """
    assert out_TF.dtype is torch.float32 and out_TF.stride(1) == 1, "float32 rows"
    assert out_TF.shape == (len(prepared), weight.outputs), "a row for each prepared one"
    address = ctypes.addressof(weight)
    rows = (prepared.data_ptr(), len(prepared), out_TF.data_ptr(), out_TF.stride(0))
    _kernels()[2](address, *rows, int(accumulate), num_threads)


class Product(NamedTuple):
    """One multiplication of `multiply`: by the weight whose descriptor is at `address`, of x's inputs from
    `first_input` on, into a buffer's outputs from `first_output` on, or added to them."""

    address: int
    kind: int
    inputs: int
    first_input: int = 0
    first_output: int = 0
    buffer: int = 0
    is_added: bool = False


def multiply(products: Sequence[Product], x_TE: Tensor, out_BTF: Tensor, num_threads: int = 1) -> None:
    """Compute the products in order; out has B buffers. The caller keeps the weights alive.

    A call of `prepare` and `linear` costs some 20 us, a product here 2.
    """
    assert x_TE.dtype is torch.float32 and x_TE.stride(1) == 1 and out_BTF.is_contiguous(), "float32 rows"
    size, prepare_rows, run = _kernels()
    num_rows, stride = x_TE.shape[0], x_TE.stride(0)
    _, _, width = out_BTF.shape
    widest = max(size(product.kind, product.inputs) for product in products)
    prepared = torch.empty(num_rows * widest + _ALIGNMENT, dtype=torch.uint8)
    to, x, out = -(-prepared.data_ptr() // _ALIGNMENT) * _ALIGNMENT, x_TE.data_ptr(), out_BTF.data_ptr()
    held = None
    for address, kind, inputs, first_input, first_output, buffer, is_added in products:
        if held != (kind, first_input, inputs):
            prepare_rows(kind, x + 4 * first_input, stride, num_rows, inputs, to, num_threads)
            held = (kind, first_input, inputs)
        target = out + 4 * (buffer * num_rows * width + first_output)
        run(address, to, num_rows, target, width, is_added, num_threads)


def linear_reference(x_TE: Tensor, weight_FE: Tensor, bias_F: Tensor | None, kind: int) -> Tensor:
    """Compute the kernels' result in float64. For quantised kinds, round the activations to codes first."""
    seen_TE = round_activations(x_TE) if kind >= _FIRST_QUANTISED else x_TE
    out_TF = seen_TE.double() @ weight_FE.double().T
    return (out_TF if bias_F is None else out_TF + bias_F.double()).float()


def round_activations(x_TE: Tensor) -> Tensor:
    """Round to int8 with one scale per 32 values, ties to even; a group with a NaN or an infinity becomes NaN."""
    groups_TGI = x_TE.view(*x_TE.shape[:-1], -1, ACTIVATION_GROUP)
    largest_TG1 = groups_TGI.abs().amax(-1, keepdim=True)
    is_scaled = (largest_TG1 >= 1e-30) & largest_TG1.isfinite()
    codes_TGI = torch.where(is_scaled, (groups_TGI * (127.0 / largest_TG1)).round(), 0.0)
    scales_TG1 = torch.where(largest_TG1.isfinite(), torch.where(is_scaled, largest_TG1 / 127.0, 0.0), torch.nan)
    return (codes_TGI * scales_TG1).flatten(-2)


@cache
def _kernels() -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    size = cpu.function("octavo_linear_prepared_bytes", c_int64, c_int64, result=c_int64)
    prepare_rows = cpu.function(
        "octavo_linear_prepare", c_int64, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int32
    )
    multiply = cpu.function(
        "octavo_linear", c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int32, c_int32
    )  # fmt: skip
    assert size is not None and prepare_rows is not None and multiply is not None, "only where the kernels are"
    return size, prepare_rows, multiply
