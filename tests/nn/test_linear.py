"""Both paths of Linear: equal to the definition, and blind to the number of rows."""

from __future__ import annotations

import pytest
import torch

from octavo.nn.layers import Linear, choose_path

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
ROWS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 64, 100, 127, 128)


def paths(dtype: torch.dtype) -> list[str]:
    return sorted({"plain", choose_path(dtype, CPU)})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(96, 64), (577, 33), (1, 1)])
def test_equals_the_definition(dtype: torch.dtype, has_bias: bool, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape).to(dtype)
    bias = torch.randn(shape[0]).to(dtype) if has_bias else None
    x = torch.randn(9, shape[1]).to(dtype)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    for path in paths(dtype):
        found = Linear(weight, bias, path)(x)
        assert found.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 1.6e-2
        torch.testing.assert_close(found.double(), expected, atol=tolerance * shape[1] ** 0.5, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(960, 576), (576, 1536), (64, 48), (1000, 576), (192, 1024), (192, 1025), (128, 4096)]
)
def test_the_packed_path_gives_a_row_one_result_whatever_the_rows_beside_it(
    dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    if choose_path(dtype, CPU) != "packed":
        pytest.skip("this machine multiplies with plain weights")
    linear = Linear(torch.randn(shape).to(dtype))
    x = torch.randn(max(ROWS), shape[1]).to(dtype)
    full = linear(x)
    for rows in ROWS:
        assert torch.equal(linear(x[:rows]), full[:rows]), rows
        assert torch.equal(linear(x[-rows:]), full[-rows:]), rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_strided_input(dtype: torch.dtype) -> None:
    linear = Linear(torch.randn(8, 16).to(dtype))
    x = torch.randn(5, 64).to(dtype)
    torch.testing.assert_close(linear(x[:, 8:24]), linear(x[:, 8:24].contiguous()))


def test_only_this_machine_and_the_dtype_choose() -> None:
    assert choose_path(torch.float32, torch.device("cuda")) == "plain"
    linear = Linear(torch.zeros(3, 5), torch.zeros(3))
    assert (linear.in_features, linear.out_features, linear.nbytes) == (5, 3, 4 * 18)
