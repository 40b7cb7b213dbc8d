"""The gated product against its definition."""

from __future__ import annotations

import pytest
import torch

from octavo.ops.gated_mul import activation_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7])
def test_equals_the_definition(dtype: torch.dtype, rows: int) -> None:
    gate_up = (torch.randn(rows, 2 * 37) * 3).to(dtype)
    before = gate_up.clone()
    gate, up = gate_up.double().chunk(2, -1)
    found = activation_of("silu", is_gated=True)(gate_up)
    assert found.shape == (rows, 37) and found.is_contiguous() and found.dtype == dtype
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.double(), gate * gate.sigmoid() * up, atol=1e-6, rtol=tolerance)
    assert torch.equal(gate_up, before)
