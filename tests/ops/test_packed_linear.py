"""The C++ linear kernels against their twin, and against themselves by bits: rows, threads, instruction sets.

One bound, relative 2e-6 of the largest output: the kernels sum float32 in an order of their own, the reference sums
float64. What a kernel multiplies is modelled by the reference: quantised kinds see the activations' codes; AVX512_BF16
sees activations rounded to bfloat16, whose products are exact and whose sums are float32, as everywhere else.
"""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.nn.packed_weight import Codes, PackedWeight, WeightKind
from octavo.ops import cpu, packed_linear

KINDS = [(WeightKind.FLOAT32, 0), (WeightKind.BFLOAT16, 0), (WeightKind.INT8, 32), (WeightKind.INT8, 16),
         (WeightKind.INT4, 32), (WeightKind.IQ4, 32), (WeightKind.MXFP4, 32), (WeightKind.MXFP4, 16),
         (WeightKind.NF4, 32)]  # fmt: skip
SHAPES = [(16, 32), (50, 576), (33, 1568), (117, 64)]  # one panel of 16 outputs, and numbers that leave a rest
ROOT = Path(__file__).parents[2]
BOUND = 2e-6

pytestmark = pytest.mark.skipif(not cpu.status().is_loaded, reason=f"no C++ kernels: {cpu.status().reason}")


def weight(kind, group, outputs, inputs):
    random = np.random.default_rng(outputs + inputs)
    bias = random.standard_normal(outputs).astype(np.float32)
    if kind in (WeightKind.FLOAT32, WeightKind.BFLOAT16):
        values = random.standard_normal((outputs, inputs)).astype(np.float32)
        codes = values if kind == WeightKind.FLOAT32 else (values.view(np.uint32) >> 16).astype(np.uint16)
        return PackedWeight.pack(Codes(kind, 0, codes), bias)
    low, high, dtype = (-128, 128, np.int8) if kind == WeightKind.INT8 else (0, 16, np.uint8)
    codes = random.integers(low, high, (outputs, inputs)).astype(dtype)
    scales = random.uniform(0.001, 0.01, (outputs, inputs // group)).astype(np.float16)
    minima = random.uniform(-0.1, 0, scales.shape).astype(np.float16) if kind == WeightKind.INT4 else None
    return PackedWeight.pack(Codes(kind, group, codes, scales, minima), bias)


def rows(count, inputs):
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(inputs))


def outputs_of(packed, x_TE, num_threads=1):
    out_TF = torch.full((len(x_TE), packed.outputs), 7.0)
    prepared = packed_linear.prepare(x_TE, packed.kind, num_threads)
    packed_linear.linear(packed.descriptor(), prepared, out_TF, num_threads=num_threads)
    return out_TF


def rounds_to_bfloat16():
    """Return True if the kernels in use read activations as bfloat16 beside bfloat16 weights: two bytes each."""
    size, _, _ = packed_linear._kernels()
    return size(WeightKind.BFLOAT16, 4096) < 4 * 4096


def error_of(packed, x_TE, out_TF):
    """Return the largest difference from a float64 reference of the same arithmetic, relative to its largest value."""
    seen_TE = x_TE.bfloat16().float() if packed.kind == WeightKind.BFLOAT16 and rounds_to_bfloat16() else x_TE
    expected = packed_linear.linear_reference(seen_TE, packed.dequantize(), torch.from_numpy(packed.bias), packed.kind)
    return (out_TF - expected).abs().max() / expected.abs().max()


@pytest.fixture(params=cpu.ISA_NAMES)
def isa(request):
    best = cpu.status().isa
    if cpu.use_isa(request.param) != request.param:
        cpu.use_isa(best)
        pytest.skip(f"this machine has {best}")
    yield request.param
    cpu.use_isa(best)


@pytest.mark.parametrize(("kind", "group"), KINDS)
@pytest.mark.parametrize("shape", [*SHAPES, (50, 37)])
def test_kernels_stand_close_to_the_twin(kind, group, shape, isa):
    if group and shape[1] % 32:
        pytest.skip("quantised inputs are whole groups")
    packed, x_TE = weight(kind, group, *shape), rows(13, shape[1])
    assert error_of(packed, x_TE, outputs_of(packed, x_TE)) <= BOUND


def test_rows_for_bfloat16_weights_are_as_they_are_or_rounded_to_nearest_even(isa):
    x_TE = rows(9, 576)
    x_TE[:, :16] = 1 + torch.arange(16) * 2.0**-8  # every second one is a tie
    prepared = packed_linear.prepare(x_TE, WeightKind.BFLOAT16)
    if rounds_to_bfloat16():
        assert isa == "avx512"
        assert torch.equal(prepared[:, : 576 * 2].view(torch.bfloat16), x_TE.bfloat16())
    else:
        assert torch.equal(prepared[:, : 576 * 4].view(torch.float32), x_TE)


@pytest.mark.parametrize(("kind", "group"), KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_is_the_same_by_bits_beside_any_rows_and_on_any_threads(kind, group, shape, isa):
    packed, x_TE = weight(kind, group, *shape), rows(200, shape[1])  # more than a block of rows
    whole = outputs_of(packed, x_TE)
    counts = (1, 2, 3, 4, 5, 6, 7, 11, 13, 70) if isa == "portable" else range(1, 71)
    for count in counts:
        for num_threads in (1, 2) if count % 8 == 5 or count == 1 else (1,):
            assert torch.equal(outputs_of(packed, x_TE[-count:], num_threads), whole[-count:])


@pytest.mark.parametrize(("kind", "group"), KINDS[2:])
def test_quantised_kinds_give_the_same_bits_on_every_instruction_set(kind, group, isa):
    packed, x_TE = weight(kind, group, 50, 576), rows(9, 576)
    here = outputs_of(packed, x_TE)
    cpu.use_isa("portable")
    assert torch.equal(here, outputs_of(packed, x_TE))


@pytest.mark.parametrize(("kind", "group"), KINDS)
def test_a_nan_or_infinity_makes_its_row_non_finite_and_no_other(kind, group, isa):
    packed, x_TE = weight(kind, group, 50, 576), rows(9, 576)
    clean = outputs_of(packed, x_TE)
    x_TE[3, 5], x_TE[4, 570], x_TE[5, 0] = float("inf"), float("nan"), -float("inf")
    out_TF = outputs_of(packed, x_TE)
    assert not out_TF[3:6].isfinite().any()
    assert torch.equal(out_TF[:3], clean[:3]) and torch.equal(out_TF[6:], clean[6:])


@pytest.mark.parametrize(("kind", "group"), KINDS)
def test_rows_of_zeros_and_of_tiny_numbers(kind, group, isa):
    packed = weight(kind, group, 33, 64)
    for scale in (0.0, 1e-38):
        assert torch.equal(outputs_of(packed, torch.full((2, 64), scale)).isfinite(), torch.ones(2, 33).bool())
    assert torch.equal(outputs_of(packed, torch.zeros(1, 64))[0], torch.from_numpy(packed.bias))


@pytest.mark.parametrize(("kind", "group"), KINDS)
def test_accumulating_adds_and_nothing_beside_the_outputs_is_written(kind, group, isa):
    packed, x_TE = weight(kind, group, 50, 96), rows(7, 96)
    plain, wide = outputs_of(packed, x_TE), torch.full((7, 64), 3.0)
    prepared = packed_linear.prepare(x_TE, kind)
    packed_linear.linear(packed.descriptor(), prepared, wide[:, :50], accumulate=True)
    assert torch.equal(wide[:, :50], plain + 3.0) and (wide[:, 50:] == 3.0).all()


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """A library whose AVX-512 files are compiled over plain functions instead of the instructions."""
    compiler = shutil.which("g++")
    if compiler is None or not (ROOT / "csrc").is_dir() or not cpu.status().isa.startswith("avx"):
        pytest.skip("needs g++, the sources and an x86-64 machine")
    here, target = Path(__file__).parent / "emulated_avx512", tmp_path_factory.mktemp("emulated") / "library.so"
    sources = sorted((ROOT / "csrc").glob("linear*.cpp"))
    flags = ["-O1", "-std=c++17", "-fPIC", "-shared", "-ffp-contract=off", "-fvisibility=hidden", "-w"]
    includes = ["-DOCTAVO_EMULATED", f"-I{here}", f"-I{ROOT / 'csrc'}"]
    subprocess.run([compiler, *flags, *includes, *sources, here / "features.cpp", "-o", target], check=True)
    return ctypes.CDLL(str(target))


@pytest.mark.parametrize(("kind", "group"), KINDS)
@pytest.mark.parametrize("extensions", [False, True])
def test_avx512_by_emulation(kind, group, extensions, emulated, monkeypatch):
    packed, x_TE = weight(kind, group, 50, 576), rows(70, 576)
    native = outputs_of(packed, x_TE)

    def function(name, *argument_types, result=None):
        kernel = getattr(emulated, name)
        kernel.argtypes, kernel.restype = argument_types, result
        return kernel

    monkeypatch.setattr(packed_linear.cpu, "function", function)
    monkeypatch.setattr(packed_linear, "_kernels", packed_linear._kernels.__wrapped__)
    emulated.octavo_use_extensions(int(extensions))
    out_TF = outputs_of(packed, x_TE)
    if group:
        assert torch.equal(out_TF, native)
    assert rounds_to_bfloat16() == extensions
    assert error_of(packed, x_TE, out_TF) <= BOUND
    for count in (1, 2, 3, 4, 5, 12, 13, 23):
        assert torch.equal(outputs_of(packed, x_TE[:count]), out_TF[:count])
