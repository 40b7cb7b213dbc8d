"""The decoder step's row operations against torch, in every instruction set that this machine has."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import c_float, c_int64, c_void_p

import pytest
import torch
from torch.nn import functional

from octavo.ops import cpu
from octavo.ops.rope import apply_rope

pytestmark = pytest.mark.skipif(not cpu.LIBRARY_PATH.exists(), reason="the kernels are not built")


@pytest.fixture(params=cpu.ISA_NAMES, autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    best = cpu.status().isa
    if cpu.use_isa(request.param) != request.param:
        cpu.use_isa(best)
        pytest.skip(f"this machine has no {request.param}")
    yield request.param
    cpu.use_isa(best)


def random(*shape: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale


def gate(kind: int, gate_up: torch.Tensor) -> torch.Tensor:
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size)
    kernel = cpu.function("octavo_rows_gate", c_int64, c_void_p, c_void_p, c_int64, c_int64)
    assert kernel is not None
    kernel(kind, gate_up.data_ptr(), out.data_ptr(), rows, size)
    return out


@pytest.mark.parametrize("size", [1, 7, 16, 48, 576, 1000])
def test_rms_norm(size: int) -> None:
    x, weight, out = random(5, size), random(size), torch.empty(5, size)
    kernel = cpu.function("octavo_rows_rms_norm", c_void_p, c_void_p, c_float, c_void_p, c_int64, c_int64)
    assert kernel is not None
    kernel(x.data_ptr(), weight.data_ptr(), 1e-5, out.data_ptr(), 5, size)
    torch.testing.assert_close(out, functional.rms_norm(x, (size,), weight, 1e-5), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [1, 8, 31, 1536])
def test_silu_and_gelu_gates(size: int) -> None:
    gate_up = random(3, 2 * size, scale=8.0)
    x, up = gate_up[:, :size], gate_up[:, size:]
    torch.testing.assert_close(gate(0, gate_up), functional.silu(x) * up, atol=1e-5, rtol=1e-5)
    expected = functional.gelu(x, approximate="tanh") * up
    torch.testing.assert_close(gate(1, gate_up), expected, atol=2e-5, rtol=2e-5)


def test_gates_far_out_are_finite_and_right() -> None:
    gate_up = torch.tensor([[-1e4, -200.0, -90.0, 90.0, 1e4, 0.0, -0.0, 1e-30] + [1.0] * 8])
    for kind, exact in ((0, functional.silu), (1, lambda x: functional.gelu(x, approximate="tanh"))):
        torch.testing.assert_close(gate(kind, gate_up), exact(gate_up[:, :8]), atol=1e-30, rtol=1e-5)


def test_what_is_not_finite_does_not_become_finite() -> None:
    bad = torch.tensor([[float("nan"), float("inf"), 1.0, 2.0] + [1.0] * 4])
    for kind in (0, 1):
        found = gate(kind, bad)
        assert not found[0, :2].isfinite().any()
        assert found[0, 2:].isfinite().all()


@pytest.mark.parametrize("size", [8, 16, 64, 128])
def test_rotation(size: int) -> None:
    heads = random(6, 5, size)
    angles = random(6, size // 2)
    cos, sin = angles.cos(), angles.sin()
    turns = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1).contiguous()
    expected = apply_rope(heads, turns[:, 0:1], turns[:, 1:2])
    kernel = cpu.function("octavo_rows_rotate", c_void_p, c_void_p, c_int64, c_int64, c_int64)
    assert kernel is not None
    kernel(heads.data_ptr(), turns.data_ptr(), 6, 5, size)
    torch.testing.assert_close(heads, expected, atol=1e-6, rtol=1e-6)
