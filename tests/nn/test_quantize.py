"""Codes: every GGUF block type against the gguf package; the errors of 8-bit and 4-bit codes of floats."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from octavo.artifacts.model_spec import ModelSpec
from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import ModelFiles, resolve_model
from octavo.errors import ConfigError
from octavo.nn.gguf_blocks import GGUF_TYPES, RawMatrix, codes_of_blocks
from octavo.nn.packed_weight import CODE_VALUES, NF4_ONE, WeightKind
from octavo.nn.packing import choose_quantization, codes_of_floats
from tests.tiny_gguf import make_tiny_gguf, random_blocks
from tests.tiny_models import make_tiny_model

TYPES = [kind for kind, entry in GGUF_TYPES.items() if entry.codes is not None]
NEAREST = [kind for kind, entry in GGUF_TYPES.items() if entry.nearest is not None]
ROUNDED = ("Q3_K", "Q4_K", "Q6_K", "IQ4_XS")  # their scales are products


def test_every_type_of_the_gguf_package_with_blocks_has_an_entry() -> None:
    readable = {GGMLQuantizationType(kind) for kind in quants._type_traits}
    floats = {GGMLQuantizationType[name] for name in ("F32", "F16", "BF16")}
    assert {*TYPES, *NEAREST} | floats == readable | floats == set(GGUF_TYPES)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_blocks_give_what_the_gguf_package_reads_in_them(kind: GGMLQuantizationType) -> None:
    raw = random_blocks(kind)
    codes = codes_of_blocks(raw, kind)
    entry = GGUF_TYPES[kind].codes
    assert codes is not None and entry is not None and (codes.kind, codes.group) == (entry.kind, entry.group)
    found, expected = codes.dequantize().numpy(), quants.dequantize(raw, kind)
    if kind.name not in ROUNDED:
        np.testing.assert_array_equal(found, expected)
        return
    # A scale, and a minimum, is a product of two numbers rounded to float16: half a unit in the last place of each.
    assert codes.scales is not None
    scale = np.repeat(np.abs(codes.scales.astype(np.float32)), codes.group, axis=1)
    table = CODE_VALUES.get(codes.kind)
    factors = np.abs((codes.codes if table is None else table[codes.codes]).astype(np.float32))
    bound = 2.0**-11 * scale * factors + 2.0**-25 * factors  # half a unit, also of subnormal scales
    if codes.minima is not None:
        bound += 2.0**-11 * np.repeat(np.abs(codes.minima.astype(np.float32)), codes.group, axis=1) + 2.0**-24
    assert (np.abs(found - expected) <= bound * 1.001).all()


@pytest.mark.parametrize("kind", NEAREST, ids=lambda kind: kind.name)
def test_types_without_codes_become_the_nearest(kind: GGMLQuantizationType) -> None:
    matrix = RawMatrix(random_blocks(kind), kind, range(768))
    assert matrix.kind == (WeightKind.INT8, 32) and not matrix.is_kept
    values = matrix.values(0, 40)
    np.testing.assert_array_equal(values, quants.dequantize(matrix.stored, kind))
    codes = codes_of_floats(values, WeightKind.INT8)
    assert codes is not None
    largest = np.repeat(np.abs(values).reshape(40, -1, 32).max(-1), 32, axis=1)
    assert (np.abs(codes.dequantize().numpy() - values) <= largest * (0.5 / 127 + 2.0**-10) + 2.0**-18).all()


def test_an_mxfp4_scale_has_the_range_of_float16() -> None:
    kind = GGMLQuantizationType.MXFP4
    raw = np.full((40, 17), 0x71, np.uint8)
    raw[:, 0] = np.arange(104, 144)  # 2**-24 to 2**15
    codes = codes_of_blocks(raw, kind)
    assert codes is not None
    np.testing.assert_array_equal(codes.dequantize().numpy(), quants.dequantize(raw, kind))
    raw[0, 0] = 102
    codes = codes_of_blocks(raw, kind)
    assert (
        codes is not None
        and (codes.dequantize()[0] == 0).all()
        and np.abs(quants.dequantize(raw[:1], kind)).max() < 4e-7
    )
    raw[1, 0] = 144
    assert codes_of_blocks(raw, kind) is None


@pytest.mark.parametrize("kind", [WeightKind.IQ4, WeightKind.MXFP4, WeightKind.NF4])
def test_codes_with_a_table_select_the_nearest_values(kind: WeightKind) -> None:
    values = torch.randn(64, 256).numpy()
    codes = codes_of_floats(values, kind)
    assert codes is not None and codes.scales is not None
    scaled = values / np.repeat(codes.scales.astype(np.float32), 32, axis=1)
    best = np.abs(scaled[..., None] - CODE_VALUES[kind].astype(np.float32)).min(-1)
    found = np.abs(scaled - CODE_VALUES[kind][codes.codes])
    np.testing.assert_allclose(found, best, atol=1e-4)
    error = np.square(codes.dequantize().numpy() - values).mean()
    assert error < 0.012  # of values with a variance of 1: int4's search reaches 0.006


def test_nf4_has_the_values_of_normal_float() -> None:
    """The quantiles as bitsandbytes has them, to within 0.4% of the largest."""
    nf4 = [-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.0795803, 0.1609302,
           0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]  # fmt: skip
    assert np.abs(CODE_VALUES[WeightKind.NF4] / NF4_ONE - np.array(nf4)).max() < 0.004


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_rows_are_converted_alike_in_pieces(kind: GGMLQuantizationType) -> None:
    raw = random_blocks(kind)
    whole, piece = codes_of_blocks(raw, kind), codes_of_blocks(raw[7:12], kind)
    assert whole is not None and piece is not None
    assert torch.equal(whole.dequantize()[7:12], piece.dequantize())


def test_what_float16_cannot_hold_has_no_codes() -> None:
    raw = random_blocks(GGMLQuantizationType.Q4_0)
    raw[3, :2] = np.array([9000], np.float16).view(np.uint8)  # -8 times that is too much
    assert codes_of_blocks(raw, GGMLQuantizationType.Q4_0) is None
    raw = random_blocks(GGMLQuantizationType.Q6_K)
    raw[0, 208:210] = np.array([65504], np.float16).view(np.uint8)
    assert codes_of_blocks(raw, GGMLQuantizationType.Q6_K) is None


@pytest.mark.parametrize("kind", [WeightKind.INT8, WeightKind.INT4])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e6])
def test_values_out_of_range_have_no_codes(kind: WeightKind, value: float) -> None:
    values = torch.randn(4, 64)
    values[2, 5] = value
    assert codes_of_floats(values.numpy(), kind) is None


def weights_like(name: str) -> torch.Tensor:
    if name == "normal":
        return torch.randn(64, 1024) * 0.03
    return torch.distributions.StudentT(4.0).sample((64, 1024)) * 0.03


@pytest.mark.parametrize("name", ["normal", "heavy tails"])
def test_8_bit_codes_err_by_half_a_step_at_most(name: str) -> None:
    values = weights_like(name)
    codes = codes_of_floats(values.numpy(), WeightKind.INT8)
    assert codes is not None and codes.minima is None and codes.codes.dtype == np.int8
    largest = values.view(64, -1, 32).abs().amax(-1, keepdim=True)
    error = (codes.dequantize() - values).view(64, -1, 32).abs()
    assert (error <= largest * (0.5 / 127 + 2.0**-10)).all()


@pytest.mark.parametrize("name", ["normal", "heavy tails"])
def test_the_search_for_4_bit_codes_pays(name: str) -> None:
    """Against spreading the codes over each group's range, which is Q4_1."""
    values = weights_like(name)
    codes = codes_of_floats(values.numpy(), WeightKind.INT4)
    assert codes is not None and codes.codes.max() == 15
    kind = GGMLQuantizationType.Q4_1
    plain = torch.from_numpy(np.array(quants.dequantize(quants.quantize(values.numpy(), kind), kind)))
    assert (codes.dequantize() - values).square().sum() < 0.9 * (plain - values).square().sum()


def test_constant_and_zero_groups_are_kept() -> None:
    values = torch.zeros(3, 64)
    values[1] = 0.25
    values[2, :32] = torch.linspace(-1, 1, 32)
    for kind in (WeightKind.INT8, WeightKind.INT4):
        codes = codes_of_floats(values.numpy(), kind)
        assert codes is not None
        found = codes.dequantize()
        assert torch.equal(found[0], values[0])
        torch.testing.assert_close(found[1], values[1], rtol=2e-3, atol=0)
        assert torch.equal(found[2, 32:], values[2, 32:])


def test_float_kinds_round_or_keep() -> None:
    values = torch.randn(5, 7)
    kept, rounded = (codes_of_floats(values.numpy(), kind) for kind in (WeightKind.FLOAT32, WeightKind.BFLOAT16))
    assert kept is not None and torch.equal(kept.dequantize(), values)
    assert rounded is not None and torch.equal(rounded.dequantize(), values.bfloat16().float())


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelFiles, ModelSpec]:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    make_tiny_gguf("llama2", path, "Q4_1")
    files = resolve_model(str(path))
    return files, read_model_spec(files)


@pytest.mark.parametrize(
    "quantization, dtype, expected",
    [
        ("auto", "auto", "auto"),
        ("auto", "float32", "none"),
        ("auto", "bfloat16", "none"),
        ("none", "auto", "none"),
        ("int4", "bfloat16", "int4"),
    ],
)
def test_auto_keeps_the_codes_of_a_file_unless_a_dtype_was_asked_for(
    gguf: tuple[ModelFiles, ModelSpec], quantization: str, dtype: str, expected: str
) -> None:
    assert choose_quantization(quantization, dtype, gguf[1]) == expected


def test_auto_leaves_plain_files_alone(tmp_path: Path) -> None:
    files = resolve_model(str(make_tiny_model("llama2", tmp_path)))
    assert choose_quantization("auto", "auto", read_model_spec(files)) == "none"


def test_an_unknown_quantization_is_refused(gguf: tuple[ModelFiles, ModelSpec]) -> None:
    with pytest.raises(ConfigError, match=r"quantization is 'int3'; give one of auto, none, int8, int4"):
        choose_quantization("int3", "auto", gguf[1])


def test_rounding_to_bfloat16_is_torchs() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
    ties = (np.arange(1 << 16, dtype=np.uint32) << 16) | 0x8000  # also infinities, NaNs, subnormals
    values = np.concatenate((bits, ties)).view(np.float32).reshape(-1, 64)
    codes = codes_of_floats(values, WeightKind.BFLOAT16)
    assert codes is not None
    torch.testing.assert_close(
        codes.dequantize(), torch.from_numpy(values).bfloat16().float(), rtol=0, atol=0, equal_nan=True
    )
