"""Triton's kernels of layers, interpreted, against their torch twins.

bfloat16 results are bit-equal where both sides round alike; float32 ones differ by the order of sums and by torch's
fused multiply-adds. The interpreter's matrix product is numpy's, which may add in another order at another height: a
product of single rows takes its place where bits are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from octavo.nn.coded_linear import DeviceCodes
from octavo.nn.packed_weight import GROUPS, Codes, WeightKind, WeightShape
from octavo.nn.staging import Stage
from octavo.ops.attention import KVPool, PoolShape
from octavo.ops.gated_mul import ACTIVATION_KINDS, activation_of
from octavo.ops.rms_norm import rms_norm_reference
from octavo.ops.rope import apply_rope
from octavo.ops.triton import available

pytestmark = [
    pytest.mark.skipif(not available.is_available(), reason="no triton"),
    pytest.mark.usefixtures("patched_once"),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CPU = torch.device("cpu")
EPS = 1e-5
ops = torch.ops.octavo


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def assert_near(ours: Tensor, theirs: Tensor, ulps: int = 0) -> None:
    """Equal bits for 16 bits, unless some units in the last place are allowed; near for float32."""
    assert ours.dtype is theirs.dtype and ours.shape == theirs.shape
    if ours.dtype is torch.float32:
        torch.testing.assert_close(ours, theirs, atol=4e-6, rtol=2e-6, equal_nan=True)
    elif not ulps:
        assert torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7)) and torch.equal(ours.isnan(), theirs.isnan())
    else:
        spacing = torch.finfo(ours.dtype).eps * theirs.float().abs().clamp_min(1e-3)
        assert ((ours.float() - theirs.float()).abs() <= ulps * spacing)[~theirs.isnan()].all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, 576])
@pytest.mark.parametrize("is_wide", [False, True])
def test_rms_norm(dtype: torch.dtype, width: int, is_wide: bool) -> None:
    x_TE, residual_TE = (torch.randn(9, 2 * width)[:, :width].to(dtype) for _ in range(2))
    weight_E = torch.randn(width).to(torch.float32 if is_wide else dtype)
    for residual in (residual_TE, None):
        normed, total = ops.norm(x_TE, residual, weight_E, None, EPS, False)
        twin, twin_total = rms_norm_reference(x_TE, residual, weight_E, EPS)
        assert_near(normed, twin, ulps=1)
        assert not total.numel() if residual is None else torch.equal(total, twin_total)
        for row in (0, 4):  # a row is alone
            alone = None if residual is None else residual[row : row + 1]
            assert torch.equal(
                ops.norm(x_TE[row : row + 1], alone, weight_E, None, EPS, False)[0], normed[row : row + 1]
            )


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_heads(dtype: torch.dtype) -> None:
    x_THD = torch.randn(5, 9 * 24).to(dtype)[:, 24:].view(5, 8, 24)
    weight_HD = torch.randn(8, 24).to(dtype)
    assert_near(
        ops.norm(x_THD, None, weight_HD, None, EPS, False)[0], rms_norm_reference(x_THD, None, weight_HD, EPS)[0]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, 200])
def test_layer_norm(dtype: torch.dtype, width: int) -> None:
    x_TE, residual_TE = torch.randn(2, 7, width).to(dtype)
    weight_E, bias_E = torch.randn(2, width).to(dtype)
    for residual in (residual_TE, None):
        for bias in (bias_E, None):
            normed, _ = ops.norm(x_TE, residual, weight_E, bias, EPS, True)
            total = x_TE if residual is None else x_TE + residual
            assert_near(normed, functional.layer_norm(total, (width,), weight_E, bias, EPS), ulps=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(16, 16), (24, 16), (80, 32), (16, 0)])
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("norm", [None, "narrow", "wide"])
def test_rope_and_the_write_of_keys_and_values(
    dtype: torch.dtype, sizes: tuple[int, int], is_interleaved: bool, norm: str | None
) -> None:
    """Rotation and write together are rotation, then the pool's write; tokens without a slot are not written."""
    (size, rotated), num_heads, num_kv_heads = sizes, 3, 2
    num_tokens, num_rotated = 5, num_heads + num_kv_heads
    qkv_TF = torch.randn(num_tokens, (num_rotated + num_kv_heads) * size).to(dtype)
    qk = qkv_TF[:, : num_rotated * size].view(num_tokens, num_rotated, size)
    v = qkv_TF[:, num_rotated * size :].view(num_tokens, num_kv_heads, size)
    rows_T2R = torch.randn(num_tokens, 2, rotated).to(dtype)
    angles = (rows_T2R[:, 0:1], rows_T2R[:, 1:2]) if rotated else (None, None)
    weight = None if norm is None else torch.randn(num_rotated, size).to(torch.float32 if norm == "wide" else dtype)
    normed = qk if weight is None else rms_norm_reference(qk, None, weight, EPS)[0]
    twin = apply_rope(normed, *angles, is_interleaved) if rotated else normed
    turned = ops.rope(qk, weight, *angles, EPS, is_interleaved)
    assert_near(turned, twin)
    slots = torch.tensor([3, -1, 0, 11, 7], dtype=torch.int32)
    for pool_dtype in {dtype, torch.float32 if norm else torch.int8, torch.float8_e4m3fn}:
        ours, theirs = (KVPool(PoolShape(1, 3, 4, num_kv_heads, size, size, pool_dtype), CPU) for _ in range(2))
        planes = (ours.keys[0], ours.values[0])
        q = ops.rope_write(qk, v, weight, *angles, EPS, is_interleaved, *planes, slots, pool_dtype)
        theirs.write(0, slots[slots >= 0].long(), turned[:, num_heads:][slots >= 0], v[slots >= 0])
        assert torch.equal(q, turned[:, :num_heads])
        assert torch.equal(planes[0], theirs.keys[0]) and torch.equal(planes[1], theirs.values[0])


@pytest.mark.parametrize("pool_dtype", [torch.int8, torch.float8_e4m3fn])
def test_codes_of_special_numbers(pool_dtype: torch.dtype) -> None:
    """Zeros, numbers too small or too large for a code, and what is not finite."""
    tiny = [0.0, -0.0, 1e-38, -1e-40, 2**-9, 2**-10, 1.5 * 2**-9, 0.0156, 447.0, 448.0, 463.9, 464.0, 1e5, -1e30]
    nan, inf = float("nan"), float("inf")
    rows = [[*tiny, 0.0, 1.0], [0.0] * 16, [1e-39] * 16, [nan, *tiny, 1.0], [inf, *tiny, 1.0], [-inf] + [2.0] * 15]
    k = torch.tensor(rows).view(6, 1, 16)
    ours, theirs = (KVPool(PoolShape(1, 2, 4, 1, 16, 16, pool_dtype), CPU) for _ in range(2))
    slots = torch.arange(6)
    theirs.write(0, slots, k, k)
    planes = (ours.keys[0], ours.values[0])
    ops.rope_write(torch.cat((k, k), 1), k, None, None, None, EPS, False, *planes, slots, pool_dtype)
    for plane, twin in ((planes[0], theirs.keys[0]), (planes[1], theirs.values[0])):
        (found, _), (expected, _) = ours.read(plane, plane), theirs.read(twin, twin)
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATION_KINDS)
@pytest.mark.filterwarnings("ignore:overflow")
def test_activations(name: str, dtype: torch.dtype) -> None:
    x_TG = (3 * torch.randn(70, 80)).to(dtype)[:, :74]
    x_TG[0, :5] = torch.tensor([0.0, -0.0, 90, -50, float("nan")]).to(dtype)
    for is_gated in (True, False) if name != "clamped_swiglu" else (True,):
        found, twin = ops.activate(x_TG, ACTIVATION_KINDS[name], is_gated), activation_of(name, is_gated)(x_TG)
        assert torch.equal(found.isnan(), twin.isnan())
        assert_near(found.nan_to_num(7), twin.nan_to_num(7), ulps=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(1, 5, 7), (3, 70, 130), (33, 64, 64), (130, 150, 96)])
def test_linear(dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    tokens, outputs, inputs = sizes
    x_TE, weight_FE, bias_F = (
        torch.randn(*size).to(dtype) for size in ((tokens, inputs), (outputs, inputs), (outputs,))
    )
    for bias in (None, bias_F):
        whole = torch.full((tokens, outputs + 3), 7.0, dtype=dtype)
        out = whole[:, 1 : outputs + 1]
        ops.linear(x_TE, weight_FE, bias, out)
        exact = x_TE.double() @ weight_FE.double().T + (0 if bias is None else bias.double())
        torch.testing.assert_close(out, exact.to(dtype), atol=2e-5, rtol=1.01 * torch.finfo(dtype).eps)
        assert (whole[:, 0] == 7).all() and (whole[:, outputs + 1 :] == 7).all()


@pytest.fixture
def row_by_row(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A matrix product in which each element is a sum of its own; tokens are columns of the kernels' products."""

    def matmul(a: Any, b: Any, dtype: Any = None) -> Any:
        columns = [(a * column[None, :]).sum(axis=1, dtype=np.float32) for column in np.ascontiguousarray(b.T)]
        return np.stack(columns, axis=1).astype(dtype or a.dtype)

    monkeypatch.setattr("triton.runtime.interpreter.np.matmul", matmul)
    yield


def coded(kind: WeightKind, group: int, outputs: int, inputs: int) -> tuple[DeviceCodes, Codes]:
    """Return random codes on the device, written in two pieces, and as they were."""
    rng = np.random.default_rng(0)
    numbers = (
        rng.integers(-127, 128, (outputs, inputs))
        if kind == WeightKind.INT8
        else rng.integers(0, 16, (outputs, inputs))
    )
    scales, minima = rng.normal(0, 0.05, (2, outputs, inputs // group)).astype(np.float16)
    codes = Codes(
        kind, group, numbers.astype(np.int8 if kind == WeightKind.INT8 else np.uint8), scales,
        minima if kind == WeightKind.INT4 else None,
    )  # fmt: skip
    stage = Stage(CPU)
    device = DeviceCodes.empty(WeightShape(kind, outputs, inputs, group), stage)
    for rows in (slice(0, 10), slice(10, outputs)):
        parts = (None if part is None else part[rows] for part in (codes.scales, codes.minima))
        device.put(rows.start, Codes(kind, group, codes.codes[rows], *parts), stage)
    return device, codes


@pytest.mark.usefixtures("row_by_row")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", [None, WeightKind.INT4, WeightKind.INT8])
def test_a_row_has_the_same_bits_in_any_company_and_tile(dtype: torch.dtype, kind: WeightKind | None) -> None:
    """From 1 token, in a tile of 16, to 130, in two of 128."""
    inputs, outputs = 160, 40
    x_TE, out_TF = torch.randn(130, inputs).to(dtype), torch.empty(130, outputs, dtype=dtype)
    weight_FE = torch.randn(outputs, inputs).to(dtype)
    device = None if kind is None else coded(kind, 32, outputs, inputs)[0]

    def multiply(rows: Tensor) -> Tensor:
        out = torch.empty(len(rows), outputs, dtype=dtype)
        if device is None:
            ops.linear(rows, weight_FE, None, out)
        else:
            ops.coded_linear(rows, device.codes_CF32, device.scales_GF, device.minima_GF, device.table, None, out)
        return out

    out_TF = multiply(x_TE)
    for first, count in ((0, 1), (7, 1), (129, 1), (3, 16), (40, 17), (60, 33), (1, 64), (10, 65), (2, 128)):
        assert torch.equal(multiply(x_TE[first : first + count]), out_TF[first : first + count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind, group", [(kind, group) for kind, groups in GROUPS.items() for group in groups])
def test_coded_linear(kind: WeightKind, group: int, dtype: torch.dtype) -> None:
    """The product is that of the dequantised weight, rounded; also of a window of outputs, such as one expert's."""
    for tokens, outputs, inputs in ((1, 20, 32), (17, 70, 96), (70, 33, 128)):
        device, codes = coded(kind, group, outputs, inputs)
        weight_FE = codes.dequantize()
        assert torch.equal(device.dequantize(), weight_FE)
        assert torch.equal(device.rows(torch.tensor([3, 0, 3])), weight_FE[[3, 0, 3]])
        assert device.nbytes < weight_FE.nbytes / 2
        x_TE, bias_F = torch.randn(tokens, inputs).to(dtype), torch.randn(outputs).to(dtype)
        for rows in (range(outputs), range(4, 12)):
            part, out = device.window(rows), torch.empty(tokens, len(rows), dtype=dtype)
            ops.coded_linear(
                x_TE, part.codes_CF32, part.scales_GF, part.minima_GF, part.table, bias_F[rows.start : rows.stop], out
            )
            exact = x_TE.double() @ weight_FE.to(dtype).double().T[:, rows] + bias_F.double()[rows]
            # a sum in float32, in any order, is off by at most so much; then it is rounded
            magnitude = (
                x_TE.double().abs() @ weight_FE.to(dtype).double().T[:, rows].abs() + bias_F.double()[rows].abs()
            )
            allowed = inputs * torch.finfo(torch.float32).eps * magnitude + exact.abs() * torch.finfo(dtype).eps
            assert ((out.double() - exact).abs() <= allowed).all()
