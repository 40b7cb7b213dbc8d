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
from tests.ops.instruction_sets import isa

from octavo.nn.packed_weight import Codes, PackedWeight, WeightKind
from octavo.ops import cpu, packed_linear

__all__ = ["isa"]
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
        assert isa in ("avx512", "amx")
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


EMULATION = Path(__file__).parent / "emulated_avx512"


def compiled(target, flags, names, extras):
    """Compile files of csrc, by names or a pattern, with files beside the emulated intrinsics."""
    compiler = shutil.which("g++")
    if compiler is None or not (ROOT / "csrc").is_dir() or cpu.status().isa in ("", "portable"):
        pytest.skip("needs g++, the sources and an x86-64 machine")
    sources = [path for name in names for path in sorted((ROOT / "csrc").glob(name))]
    sources += [EMULATION / name for name in extras]
    always = ["-std=c++17", "-fPIC", "-shared", "-ffp-contract=off", "-fvisibility=hidden", "-w", f"-I{ROOT / 'csrc'}"]
    subprocess.run([compiler, *flags, *always, *sources, "-o", target], check=True)
    return ctypes.CDLL(str(target))


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """A library whose AVX-512 and AMX files are compiled over plain functions instead of the instructions."""
    target = tmp_path_factory.mktemp("emulated") / "library.so"
    flags = ["-O1", "-DOCTAVO_EMULATED", f"-I{EMULATION}"]
    return compiled(target, flags, ["linear*.cpp"], ["features.cpp", "tiles.cpp"])


@pytest.fixture(scope="module")
def trapped(tmp_path_factory):
    """A library with the AMX files as setup.py compiles them; a signal handler executes the instructions of AMX."""
    if not {"avx512", "amx"} & {cpu.status().isa}:
        pytest.skip("needs AVX-512")
    target = tmp_path_factory.mktemp("trapped") / "library.so"
    names = ["linear.cpp", "linear_amx*.cpp", "linear_pack.cpp", "linear_portable.cpp"]
    flags = ["-O3", "-fno-math-errno", "-fno-trapping-math"]
    return compiled(target, flags, names, ["features.cpp", "tiles.cpp", "trapped_tiles.cpp"])


@pytest.fixture
def call(monkeypatch):
    """Return a function that makes packed_linear call another library."""
    look_up = packed_linear._kernels.__wrapped__

    def call(library):
        def function(name, *argument_types, result=None):
            kernel = getattr(library, name)
            kernel.argtypes, kernel.restype = argument_types, result
            return kernel

        monkeypatch.setattr(packed_linear.cpu, "function", function)
        monkeypatch.setattr(packed_linear, "_kernels", look_up)

    return call


@pytest.fixture
def use_emulated(emulated, call):
    """Return a function that makes packed_linear call the emulated library, with the instruction set of a name."""

    def use(isa):
        call(emulated)
        emulated.octavo_use_extensions(int(isa != "avx512 alone"))
        emulated.octavo_plant_fault(0)
        used = emulated.octavo_try_amx() if isa == "amx" else emulated.octavo_kernels_use_isa(2)
        assert cpu.ISA_NAMES[used] == isa.split()[0]

    return use


@pytest.fixture
def use_trapped(trapped, call):
    """Return a function that makes packed_linear call the library whose AMX instructions are trapped."""

    def use():
        call(trapped)
        assert cpu.ISA_NAMES[trapped.octavo_try_amx()] == "amx"

    trapped.octavo_trap_tiles()
    yield use
    trapped.octavo_untrap_tiles()


@pytest.mark.parametrize(("kind", "group"), KINDS)
@pytest.mark.parametrize("emulated_isa", ["avx512 alone", "avx512", "amx"])
def test_avx512_and_amx_by_emulation(kind, group, emulated_isa, use_emulated):
    packed, x_TE = weight(kind, group, 50, 576), rows(70, 576)
    native = outputs_of(packed, x_TE)
    use_emulated(emulated_isa)
    out_TF = outputs_of(packed, x_TE)
    if group:
        assert torch.equal(out_TF, native)
    assert rounds_to_bfloat16() == (emulated_isa != "avx512 alone")
    assert error_of(packed, x_TE, out_TF) <= BOUND
    for count in (1, 2, 3, 4, 5, 12, 13, 23):
        assert torch.equal(outputs_of(packed, x_TE[:count]), out_TF[:count])


def zeros_for_subnormals(values):
    return np.where(np.abs(values) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), values), values)


def specified_amx(packed, x_TE):
    """Return what Intel's manual says of TDPBF16PS, for inputs 32 at a time: even and odd ones are summed apart.

    A float64 holds a product of bfloat16 numbers exactly, and its sum with a float32 number of a similar size.
    """
    weight_FE = packed.dequantize().numpy()
    steps = -(-packed.inputs // 32)
    x_TKD, weight_FKD = (
        zeros_for_subnormals(np.pad(values, ((0, 0), (0, steps * 32 - packed.inputs)))).reshape(len(values), steps, 32)
        for values in (x_TE.bfloat16().float().numpy(), weight_FE)
    )
    out_TF = np.zeros((len(x_TE), packed.outputs), np.float32)
    for step in range(steps):
        sums = [np.zeros_like(out_TF), np.zeros_like(out_TF)]  # of even inputs and of odd ones
        for i in range(32):
            products_TF = np.multiply.outer(x_TKD[:, step, i].astype(float), weight_FKD[:, step, i].astype(float))
            sums[i % 2] = zeros_for_subnormals((sums[i % 2].astype(float) + products_TF).astype(np.float32))
        out_TF = zeros_for_subnormals(out_TF + zeros_for_subnormals(sums[0] + sums[1]))
    return torch.from_numpy(out_TF + packed.bias)


@pytest.mark.parametrize("shape", [(16, 32), (50, 576), (33, 70), (117, 37), (5, 1), (40, 1000)])
def test_amx_sums_bfloat16_in_the_specified_order_for_any_number_of_rows(shape, use_emulated):
    packed, x_TE = weight(WeightKind.BFLOAT16, 0, *shape), rows(100, shape[1])
    use_emulated("amx")
    expected = specified_amx(packed, x_TE)
    for count in (*range(1, 36), 40, 48, 49, 63, 64, 65, 100):
        for num_threads in (1, 2) if count % 8 == 1 else (1,):
            assert torch.equal(outputs_of(packed, x_TE[-count:], num_threads), expected[-count:])


@pytest.mark.parametrize(("shape", "count"), [((40, 33), 300), ((17, 21_000), 70)])
def test_amx_gives_a_row_the_same_bits_in_any_block_of_rows(shape, count, use_emulated):
    packed, x_TE = weight(WeightKind.BFLOAT16, 0, *shape), rows(count, shape[1])
    use_emulated("amx")
    whole = outputs_of(packed, x_TE)
    for first in (0, count // 2, count - 1):
        assert torch.equal(outputs_of(packed, x_TE[first : first + 1]), whole[first : first + 1])


@pytest.mark.parametrize("scale", [2.0**-64, 2.0**-70, 2.0**-128])
def test_amx_takes_subnormal_numbers_as_zeros(scale, use_emulated):
    codes = (np.random.default_rng(1).standard_normal((20, 64)).astype(np.float32) * 2.0**-60).view(np.uint32) >> 16
    packed = PackedWeight.pack(Codes(WeightKind.BFLOAT16, 0, codes.astype(np.uint16)), np.zeros(20, np.float32))
    x_TE = rows(18, 64) * scale
    use_emulated("amx")
    out_TF = outputs_of(packed, x_TE)
    assert torch.equal(out_TF, specified_amx(packed, x_TE))
    assert out_TF.any() == (scale == 2.0**-64)  # products of 2^-130 are lost


def test_amx_keeps_rows_apart_and_writes_nothing_else(use_emulated, emulated):
    packed, x_TE = weight(WeightKind.BFLOAT16, 0, 50, 570), rows(23, 570)
    use_emulated("amx")
    clean, wide = outputs_of(packed, x_TE), torch.full((23, 64), 3.0)
    packed_linear.linear(packed.descriptor(), packed_linear.prepare(x_TE, packed.kind), wide[:, :50], accumulate=True)
    assert torch.equal(wide[:, :50], clean + 3.0) and (wide[:, 50:] == 3.0).all()
    x_TE[3, 5], x_TE[4, 569], x_TE[5, 0] = float("inf"), float("nan"), -float("inf")
    out_TF = outputs_of(packed, x_TE)
    assert not out_TF[3:6].isfinite().any()
    assert torch.equal(out_TF[:3], clean[:3]) and torch.equal(out_TF[6:], clean[6:])
    assert not emulated.octavo_tiles_are_configured()


@pytest.mark.parametrize(("kind", "group"), KINDS[2:])
@pytest.mark.parametrize(
    ("shape", "counts"), [((50, 1568), range(1, 50)), ((17, 64), (255, 256, 300)), ((17, 20_992), (70,))]
)
def test_amx_gives_quantised_kinds_the_bits_of_every_instruction_set(kind, group, shape, counts, use_emulated):
    packed, x_TE = weight(kind, group, *shape), rows(max(counts), shape[1])
    native = outputs_of(packed, x_TE)
    use_emulated("amx")
    for count in counts:
        for num_threads in (1, 2) if count % 8 == 1 else (1,):
            assert torch.equal(outputs_of(packed, x_TE[-count:], num_threads), native[-count:])


@pytest.mark.parametrize("shape", [(50, 800), (33, 70), (117, 37)])
def test_compiled_amx_instructions_sum_bfloat16_as_specified(shape, use_trapped):
    packed, x_TE = weight(WeightKind.BFLOAT16, 0, *shape), rows(70, shape[1])
    use_trapped()
    expected = specified_amx(packed, x_TE)
    for count in (1, 9, 16, 17, 33, 64, 70):
        assert torch.equal(outputs_of(packed, x_TE[-count:]), expected[-count:])


@pytest.mark.parametrize("kind", [WeightKind.INT8, WeightKind.INT4, WeightKind.IQ4, WeightKind.MXFP4, WeightKind.NF4])
def test_compiled_amx_instructions_give_quantised_kinds_their_bits(kind, use_trapped):
    packed, x_TE = weight(kind, 32, 50, 1568), rows(70, 1568)
    native = outputs_of(packed, x_TE)
    use_trapped()
    for count in (9, 16, 17, 33, 64, 70):
        assert torch.equal(outputs_of(packed, x_TE[-count:]), native[-count:])


@pytest.mark.parametrize("fault", [1, 2, 3, 4])  # EmulatedFault of emulated_avx512/tiles.h
def test_amx_is_refused_if_its_sums_differ_by_a_bit(fault, use_emulated, emulated):
    packed, x_TE = weight(WeightKind.BFLOAT16, 0, 33, 96), rows(20, 96)
    use_emulated("amx")
    by_amx = outputs_of(packed, x_TE)
    use_emulated("avx512")
    by_avx512 = outputs_of(packed, x_TE)
    emulated.octavo_plant_fault(fault)
    assert cpu.ISA_NAMES[emulated.octavo_try_amx()] == "avx512"
    assert torch.equal(outputs_of(packed, x_TE), by_avx512) and not torch.equal(by_amx, by_avx512)
