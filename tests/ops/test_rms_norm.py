"""The C++ kernel against its torch twin, against transformers, and against itself on every instruction set.

Bounds, in units in the last place (ulp) of the result: the two sum a row's squares in different orders, and nothing
else differs. The residual sum is bit-equal. In bfloat16 the normalised value is at most 1 ulp off, in fewer than one
element in ten thousand (2 after the weight). In float32 both stand within 4 ulp of the exact value.
"""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.ops import cpu
from octavo.ops.rms_norm import add_rms_norm, rms_norm_reference

DTYPES = [torch.float32, torch.bfloat16]
WIDTHS = [5, 64, 576, 1000, 2048]
EPS = 1e-5

needs_kernels = pytest.mark.skipif(not cpu.status().is_loaded, reason=f"no C++ kernels: {cpu.status().reason}")


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """Representable numbers between a and b, element by element."""
    integer, mask = (torch.int32, 0x7FFFFFFF) if a.dtype is torch.float32 else (torch.int16, 0x7FFF)

    def ordinal(x: Tensor) -> Tensor:
        bits = x.contiguous().view(integer).long()
        return torch.where(bits < 0, -(bits & mask), bits)

    return (ordinal(a) - ordinal(b)).abs()


def rows(dtype: torch.dtype, width: int, count: int = 64, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(width)
    x_TE, residual_TE = (torch.randn(count, width, generator=generator) * scale for _ in range(2))
    return x_TE.to(dtype), residual_TE.to(dtype), torch.randn(width, generator=generator).to(dtype)


def test_kernels_are_used_when_a_compiler_was_there():
    """The skips below must not hide a library that exists and does not load."""
    assert cpu.status().is_loaded == cpu.LIBRARY_PATH.exists()
    assert cpu.status().is_loaded or cpu.status().reason


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_kernel_equals_the_twin(dtype, width, scale):
    x_TE, residual_TE, weight_E = rows(dtype, width, scale=scale)
    for residual in (residual_TE, None):
        normed, total = add_rms_norm(x_TE, residual, weight_E, EPS)
        twin_normed, twin_total = rms_norm_reference(x_TE, residual, weight_E, EPS)
        assert torch.equal(total, twin_total)
        assert normed.dtype is dtype and normed.shape == x_TE.shape
        assert ulp_distance(normed, twin_normed).max() <= (8 if dtype is torch.float32 else 2)


@needs_kernels
@pytest.mark.parametrize("width", WIDTHS)
def test_kernel_rounds_bfloat16_like_the_twin_but_for_rare_neighbours(width):
    x_TE, residual_TE, _ = rows(torch.bfloat16, width, count=512)
    ones_E = torch.ones(width, dtype=torch.bfloat16)
    normed, _ = add_rms_norm(x_TE, residual_TE, ones_E, EPS)
    distance = ulp_distance(normed, rms_norm_reference(x_TE, residual_TE, ones_E, EPS)[0])
    assert distance.max() <= 1
    assert distance.float().mean() < 1e-4


@needs_kernels
@pytest.mark.parametrize("width", WIDTHS)
def test_kernel_stands_close_to_the_exact_value(width):
    x_TE, _, _ = rows(torch.float32, width, count=256)
    wide_TE = x_TE.double()
    exact_TE = wide_TE / torch.sqrt(wide_TE.pow(2).mean(-1, keepdim=True) + EPS)
    assert ulp_distance(add_rms_norm(x_TE, None, torch.ones(width), EPS)[0], exact_TE.float()).max() <= 4


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_instruction_set_gives_the_same_bits(dtype):
    x_TE, residual_TE, weight_E = rows(dtype, 577)
    results = []
    best = cpu.status().isa
    try:
        for name in cpu.ISA_NAMES[: cpu.ISA_NAMES.index(best) + 1]:
            assert cpu.use_isa(name) == name
            results.append(add_rms_norm(x_TE, residual_TE, weight_E, EPS)[0])
    finally:
        cpu.use_isa(best)
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_rows_beside_it_or_on_the_threads(dtype, monkeypatch):
    x_TE, residual_TE, weight_E = rows(dtype, 576)
    whole, _ = add_rms_norm(x_TE, residual_TE, weight_E, EPS)
    for row in (0, 31, 63):
        alone, _ = add_rms_norm(x_TE[row : row + 1], residual_TE[row : row + 1], weight_E, EPS)
        assert torch.equal(alone[0], whole[row])
    monkeypatch.setattr(cpu, "num_threads", lambda elements: 2)
    assert torch.equal(add_rms_norm(x_TE, residual_TE, weight_E, EPS)[0], whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_rows_and_other_shapes_give_the_same(dtype):
    x_TE, residual_TE, weight_E = rows(dtype, 64)
    whole, total = add_rms_norm(x_TE, residual_TE, weight_E, EPS)
    padded = torch.cat([x_TE, x_TE], dim=1)[:, :64]
    assert torch.equal(add_rms_norm(padded, residual_TE, weight_E, EPS)[0], whole)
    three, three_total = add_rms_norm(x_TE.view(8, 8, 64), residual_TE.view(8, 8, 64), weight_E, EPS)
    assert three.shape == (8, 8, 64) and torch.equal(three_total.view(64, 64), total)
    empty, _ = add_rms_norm(x_TE[:0], residual_TE[:0], weight_E, EPS)
    assert empty.shape == (0, 64)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_or_infinity_stays_in_its_row(dtype):
    x_TE, residual_TE, weight_E = rows(dtype, 64, count=3)
    clean, _ = add_rms_norm(x_TE, residual_TE, weight_E, EPS)
    x_TE[1, 7] = float("nan")
    normed, _ = add_rms_norm(x_TE, residual_TE, weight_E, EPS)
    assert normed[1].isnan().all()
    assert torch.equal(normed[0], clean[0]) and torch.equal(normed[2], clean[2])


def test_the_arguments_are_not_written_to():
    x_TE, residual_TE, weight_E = rows(torch.float32, 64)
    before = x_TE.clone(), residual_TE.clone()
    add_rms_norm(x_TE, residual_TE, weight_E, EPS)
    assert torch.equal(x_TE, before[0]) and torch.equal(residual_TE, before[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_twin_is_transformers_norm(dtype):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    x_TE, residual_TE, weight_E = rows(dtype, 576)
    module = llama.LlamaRMSNorm(576, EPS)
    module.weight = torch.nn.Parameter(weight_E, requires_grad=False)
    assert torch.equal(rms_norm_reference(x_TE, residual_TE, weight_E, EPS)[0], module(x_TE + residual_TE))


@needs_kernels
def test_one_openmp_pool_is_shared_with_torch():
    """In a process of its own: other tests may map what they like."""
    code = "from octavo.ops import cpu; print(cpu.status().is_loaded, len(cpu.mapped_openmp_pools()))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert output[0] == "True"
    assert int(output[1]) <= 1 or cpu.status().reason


def test_a_second_openmp_pool_makes_the_kernels_serial(monkeypatch):
    if not cpu.LIBRARY_PATH.exists():
        pytest.skip("no C++ kernels were built")
    monkeypatch.setattr(cpu, "mapped_openmp_pools", lambda: ("/a/libgomp.so.1", "/b/libgomp-1234.so.1"))
    with pytest.warns(RuntimeWarning, match="one thread"):
        library, status = cpu._load.__wrapped__()
    assert library is not None and not status.is_parallel


def test_the_variable_octavo_isa_restricts_the_kernels(monkeypatch):
    best = cpu.status().isa
    if not best:
        pytest.skip("no C++ kernels were built")
    monkeypatch.setattr(cpu, "MAX_ISA", "portable")
    try:
        assert cpu._load.__wrapped__()[1].isa == "portable"
    finally:
        cpu.use_isa(best)
    monkeypatch.setattr(cpu, "MAX_ISA", "avx3")
    with pytest.raises(ConfigError, match="OCTAVO_ISA must be one of portable, avx2, avx512, amx, got 'avx3'"):
        cpu._load.__wrapped__()


def test_a_missing_library_leaves_the_twin(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu, "LIBRARY_PATH", tmp_path / "absent.so")
    library, status = cpu._load.__wrapped__()
    assert library is None and "no C++ compiler" in status.reason


def test_a_damaged_library_is_reported(monkeypatch, tmp_path):
    path = tmp_path / "libkernels.so"
    path.write_bytes(b"not a library")
    monkeypatch.setattr(cpu, "LIBRARY_PATH", path)
    with pytest.warns(RuntimeWarning, match="cannot be loaded"):
        assert cpu._load.__wrapped__()[0] is None
