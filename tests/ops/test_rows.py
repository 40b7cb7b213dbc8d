"""The decoder step's row operations against torch, in every instruction set that this machine has."""

from __future__ import annotations

from ctypes import c_float, c_int64, c_void_p

import pytest
import torch
from tests.ops.instruction_sets import isa
from torch.nn import functional

from octavo.ops import cpu
from octavo.ops.gated_mul import ACTIVATION_KINDS, activate_rows, activation_of
from octavo.ops.rope import apply_rope

pytestmark = [
    pytest.mark.skipif(not cpu.LIBRARY_PATH.exists(), reason="the kernels are not built"),
    pytest.mark.usefixtures("isa"),
]
__all__ = ["isa"]


def random(*shape: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale


PLAIN = [name for name in ACTIVATION_KINDS if name != "clamped_swiglu"]  # those of any MLP, gated or not


def gate(name: str, gate_up: torch.Tensor) -> torch.Tensor:
    return activate_rows(name, is_gated=True)(gate_up)


@pytest.mark.parametrize("size", [1, 7, 16, 48, 576, 1000])
def test_rms_norm(size: int) -> None:
    x, weight, out = random(5, size), random(size), torch.empty(5, size)
    kernel = cpu.function("octavo_rows_rms_norm", c_void_p, c_void_p, c_float, c_void_p, c_int64, c_int64)
    assert kernel is not None
    kernel(x.data_ptr(), weight.data_ptr(), 1e-5, out.data_ptr(), 5, size)
    torch.testing.assert_close(out, functional.rms_norm(x, (size,), weight, 1e-5), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [1, 7, 16, 48, 576, 1000])
@pytest.mark.parametrize("has_bias", [False, True])
def test_layer_norm(size: int, has_bias: bool) -> None:
    x, weight, out = random(5, size) + 3.0, random(size), torch.empty(5, size)
    bias = random(size + 1)[1:].contiguous() if has_bias else None
    kernel = cpu.function("octavo_rows_layer_norm", *[c_void_p] * 3, c_float, c_void_p, c_int64, c_int64)
    assert kernel is not None
    kernel(x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), 1e-5, out.data_ptr(), 5, size)
    torch.testing.assert_close(out, functional.layer_norm(x, (size,), weight, bias, 1e-5), atol=2e-5, rtol=2e-5)


def test_soft_cap() -> None:
    x = torch.cat((random(1000, scale=60.0), torch.tensor([0.0, 1e-6, -1e-3, 1e6, -1e6, float("nan")])))
    expected = 30.0 * (x / 30.0).tanh()
    kernel = cpu.function("octavo_rows_soft_cap", c_float, c_void_p, c_int64)
    assert kernel is not None
    kernel(30.0, x.data_ptr(), len(x))
    torch.testing.assert_close(x, expected, atol=1e-5, rtol=0, equal_nan=True)


@pytest.mark.parametrize("size", [1, 8, 31, 1536])
def test_activations_and_gates(size: int) -> None:
    gate_up = random(3, 2 * size, scale=8.0)
    x, up = gate_up[:, :size], gate_up[:, size:]
    for name in PLAIN:
        expected = activation_of(name, is_gated=False)(x)
        torch.testing.assert_close(activate_rows(name, is_gated=False)(x), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(gate(name, gate_up), expected * up, atol=2e-5, rtol=2e-5)


def test_gates_far_out_are_finite_and_right() -> None:
    gate_up = torch.tensor([[-1e4, -200.0, -90.0, 90.0, 1e4, 0.0, -0.0, 1e-30] + [1.0] * 8])
    for name in PLAIN:
        exact = activation_of(name, is_gated=False)(gate_up[:, :8])
        torch.testing.assert_close(gate(name, gate_up), exact, atol=1e-30, rtol=1e-5)


def test_what_is_not_finite_does_not_become_finite() -> None:
    bad = torch.tensor([[float("nan"), float("inf"), 1.0, 2.0] + [1.0] * 4])
    for name in PLAIN:
        found = gate(name, bad)
        assert not found[0, :2].isfinite().any()
        assert found[0, 2:].isfinite().all()


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("size, rope_size", [(8, 8), (16, 16), (64, 64), (128, 128), (64, 24), (8, 2)])
def test_rotation(size: int, rope_size: int, is_interleaved: bool) -> None:
    heads = random(6, 5, size)
    angles = random(6, rope_size // 2)
    cos, sin = angles.cos(), angles.sin()
    halves = (cos, cos), (-sin, sin)
    parts = [torch.stack(pair, -1).flatten(-2) if is_interleaved else torch.cat(pair, -1) for pair in halves]
    turns = torch.stack(parts, 1).contiguous()
    expected = apply_rope(heads, turns[:, 0:1], turns[:, 1:2], is_interleaved)
    assert torch.equal(expected[..., rope_size:], heads[..., rope_size:])
    kernel = cpu.function("octavo_rows_rotate", c_void_p, c_void_p, *[c_int64] * 5)
    assert kernel is not None
    kernel(heads.data_ptr(), turns.data_ptr(), 6, 5, size, rope_size, is_interleaved)
    torch.testing.assert_close(heads, expected, atol=1e-6, rtol=1e-6)
