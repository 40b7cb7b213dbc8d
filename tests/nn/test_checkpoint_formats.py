"""Quantised checkpoints: each format packed from known codes, read as codes, as values, in windows, and as a model."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import resolve_model
from octavo.errors import ModelFileError
from octavo.models.native_weights import load_native_weights
from octavo.nn.packed_weight import WeightKind
from octavo.nn.packing import codes_of_floats
from octavo.nn.weight_cache import WeightCache
from octavo.nn.weights import SafetensorsWeights, TensorWindow, Weights
from tests.models.dense_backend import all_logits, load_decoder
from tests.models.sharded_decoders import load_shard, logits_of, logits_of_threads
from tests.models.test_decoder import prompt
from tests.models.test_native_decoder import Probe
from tests.nn import checkpoint_packing as packing
from tests.nn.checkpoint_packing import Packer, quantise_folder
from tests.tiny_models import make_tiny_model

INT4, INT8 = (WeightKind.INT4, 32), (WeightKind.INT8, 32)
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_gptq"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "static"}
BNB4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def compressed(name: str) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": name, "config_groups": {}, "ignore": ["lm_head"]}


# Name -> (config, packer, kind, whether the codes are kept).
FORMATS: dict[str, tuple[dict[str, Any], Packer, tuple[WeightKind, int], bool]] = {
    "gptq": (GPTQ, packing.gptq, INT4, True),
    "gptq zeros": (GPTQ, partial(packing.gptq, has_zeros=True), INT4, True),
    "gptq v2": ({**GPTQ, "checkpoint_format": "gptq_v2"}, partial(packing.gptq, has_zeros=True, version=2), INT4, True),
    "gptq 64": (GPTQ, partial(packing.gptq, group=64), INT4, True),
    "gptq 128": (GPTQ, partial(packing.gptq, group=128, has_zeros=True), INT4, True),
    "gptq channel": (GPTQ, partial(packing.gptq, group=-1), INT4, True),
    "gptq 16": (GPTQ, partial(packing.gptq, group=16, has_zeros=True), (WeightKind.INT8, 16), True),
    "gptq 2 bits": ({**GPTQ, "bits": 2}, partial(packing.gptq, bits=2, has_zeros=True), INT4, True),
    "gptq 3 bits": ({**GPTQ, "bits": 3}, partial(packing.gptq, bits=3, has_zeros=True), INT4, True),
    "gptq 8 bits": ({**GPTQ, "bits": 8}, partial(packing.gptq, bits=8), INT8, True),
    "gptq 8 bits zeros": ({**GPTQ, "bits": 8}, partial(packing.gptq, bits=8, has_zeros=True), INT8, False),
    "gptq mixed": (GPTQ, partial(packing.gptq, bits=8), INT8, True),
    "auto-round": (AUTO_ROUND, packing.gptq, INT4, True),
    "gptq order": (GPTQ, partial(packing.gptq, desc_act=True, has_zeros=True), INT8, False),
    "awq": (AWQ, packing.awq, INT4, True),
    "awq 128": (AWQ, partial(packing.awq, group=128), INT4, True),
    "fp8 tensor": (FP8, packing.fp8, INT8, False),
    "fp8 channel": (FP8, partial(packing.fp8, scale="channel", dtype=torch.bfloat16), INT8, False),
    "fp8 block": (FP8, partial(packing.fp8, scale="block", name="weight_scale_inv"), INT8, False),
    "packed": (compressed("pack-quantized"), packing.packed_integers, INT4, True),
    "packed zeros": (compressed("pack-quantized"), partial(packing.packed_integers, has_zeros=True), INT4, True),
    "packed channel": (compressed("pack-quantized"), partial(packing.packed_integers, group=-1), INT4, True),
    "flat": (compressed("pack-quantized"), partial(packing.packed_integers, group=-1, is_flat=True), INT4, True),
    "packed order": (compressed("pack-quantized"), partial(packing.packed_integers, desc_act=True), INT8, False),
    "int order": (compressed("int-quantized"), partial(packing.plain_integers, group=64, desc_act=True), INT8, False),
    "packed 3 bits": (compressed("pack-quantized"), partial(packing.packed_integers, bits=3), INT4, True),
    "packed 8 bits": (compressed("pack-quantized"), partial(packing.packed_integers, bits=8), INT8, True),
    "int": (compressed("int-quantized"), packing.plain_integers, INT8, True),
    "int zeros": (compressed("int-quantized"), partial(packing.plain_integers, has_zeros=True), INT8, False),
    "naive int": (compressed("naive-quantized"), partial(packing.plain_integers, group=64), INT8, True),
    "float": (compressed("float-quantized"), partial(packing.fp8, scale="channel"), INT8, False),
    "mxfp4": (compressed("mxfp4-pack-quantized"), packing.mxfp4, (WeightKind.MXFP4, 32), True),
    "nvfp4": (compressed("nvfp4-pack-quantized"), packing.nvfp4, (WeightKind.MXFP4, 16), True),
    "nf4": (BNB4, packing.bnb_four_bit, (WeightKind.NF4, 32), True),
    "nf4 flat": (BNB4, partial(packing.bnb_four_bit, is_nested=False), (WeightKind.NF4, 32), True),
    "nf4 128": (BNB4, partial(packing.bnb_four_bit, block=256), (WeightKind.NF4, 32), True),
    "fp4": (BNB4, partial(packing.bnb_four_bit, kind="fp4"), INT8, False),
    "bnb int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, packing.bnb_int8, INT8, True),
}  # fmt: skip


def write_matrix(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Weights:
    """Write one matrix x.weight; return the reader of the folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    save_file({f"x{end}": part.contiguous() for end, part in tensors.items()}, folder / "model.safetensors")
    return Weights(SafetensorsWeights(resolve_model(str(folder))))


def random_values(num_rows: int = 48, num_inputs: int = 256) -> torch.Tensor:
    return torch.randn(num_rows, num_inputs, generator=torch.Generator().manual_seed(2)) * 0.05


@pytest.mark.parametrize("name", FORMATS)
def test_a_matrix_has_the_values_of_its_codes(name: str, tmp_path: Path) -> None:
    config, pack, kind, is_kept = FORMATS[name]
    tensors, expected = pack(random_values())
    weights = write_matrix(tmp_path, config, tensors)
    assert weights.names == ("x.weight",) and weights.shape("x.weight") == (48, 256)
    values = torch.empty(48, 256)
    weights.read_into("x.weight", values)
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-9)
    weights.check_all_read()
    raw = weights.raw_matrix("x.weight")
    assert raw is not None and (raw.kind, raw.is_kept) == (kind, is_kept)
    np.testing.assert_array_equal(raw.values(5, 9), values[5:14].numpy())
    codes = raw.codes(0, 48) if is_kept else codes_of_floats(raw.values(0, 48), kind[0])
    assert codes is not None and (codes.kind, codes.group) == kind
    error = (codes.dequantize() - expected).abs()
    # Kept codes: scales and minima are rounded to float16, NF4's values to whole numbers. Others: half a step of int8.
    share = 0.0045 if kind[0] == WeightKind.NF4 else 2.0**-10 if is_kept else 0.504 / 127
    size = 256 if kind[0] == WeightKind.NF4 else 32  # values that share a largest magnitude
    largest = expected.unflatten(1, (-1, size)).abs().amax(-1).repeat_interleave(size, 1)
    assert (error <= share * largest + 1e-6).all(), float((error / largest).max())
    if is_kept:
        piece = raw.codes(5, 9)
        assert piece is not None and torch.equal(piece.dequantize(), codes.dequantize()[5:14])


@pytest.mark.parametrize("name", FORMATS)
def test_a_window_is_a_part_of_its_matrix(name: str, tmp_path: Path) -> None:
    config, pack, kind, is_kept = FORMATS[name]
    whole = write_matrix(tmp_path, config, pack(random_values())[0])
    whole.claim("x.weight", (48, 256))
    values = torch.empty(48, 256)
    whole.read_into("x.weight", values)
    aligned, odd = (TensorWindow("x.weight", range(7, 30), columns) for columns in (range(64, 160), range(8, 20)))
    windows = whole.windows([aligned, odd])
    for window in (aligned, odd):
        assert window.columns is not None
        expected = values[7:30, window.columns.start : window.columns.stop]
        found = torch.empty(expected.shape)
        windows.read_into(window.key, found)
        assert torch.equal(found, expected)
    raw, unaligned = windows.raw_matrix(aligned.key), windows.raw_matrix(odd.key)
    assert raw is not None and raw.kind == kind and unaligned is not None and unaligned.kind is None
    if is_kept:
        part, every = raw.codes(2, 10), whole.raw_matrix("x.weight")
        assert part is not None and every is not None
        codes = every.codes(9, 10)
        assert codes is not None and torch.equal(part.dequantize(), codes.dequantize()[:, 64:160])


MODELS = ["gptq zeros", "gptq order", "gptq 8 bits", "awq", "fp8 tensor", "fp8 block", "packed zeros", "int", "mxfp4",
          "nvfp4", "nf4", "fp4", "bnb int8"]  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_what_its_values_compute(name: str, tmp_path: Path) -> None:
    config, pack, kind, _ = FORMATS[name]
    source = make_tiny_model("llama3", tmp_path / "source", hidden_size=128, head_dim=32, intermediate_size=192)
    folder = tmp_path / "packed"
    plain = quantise_folder(source, folder, pack, config)
    rows = [prompt(40), prompt(1, 2), prompt(17, 3)]
    expected = all_logits(load_decoder(plain), rows)
    for found, logits in zip(all_logits(load_decoder(folder), rows), expected, strict=True):
        torch.testing.assert_close(found, logits, atol=2e-5, rtol=1e-5)
    floats = Probe(folder, "native", dtype="float32")
    for logits, found in zip(expected, floats.all_logits(rows), strict=True):
        torch.testing.assert_close(found, logits[-1], atol=1e-4, rtol=0)
    native = Probe(folder, "native")
    assert native.decoder is not None
    layers = native.decoder._weights.layers
    assert {(part.kind, part.group) for layer in layers for part in (*layer.qkv, *layer.down)} == {kind}
    for logits, found in zip(expected, native.all_logits(rows), strict=True):
        assert (found - logits[-1]).norm() < 0.04 * logits[-1].norm()


def test_int8_codes_of_fp8_add_little_error() -> None:
    """The squared error of FP8 against that of the int8 codes made of it, for normal and for heavy-tailed weights."""
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(128, 1024, generator=generator) * 0.03
    for values, bound in ((normal, 1.1), (normal * (1 + normal.abs() * 40), 1.25)):
        found = packing.fp8(values, "block")[1]
        codes = codes_of_floats(found.numpy(), WeightKind.INT8)
        assert codes is not None
        assert (codes.dequantize() - values).square().sum() < bound * (found - values).square().sum()


@pytest.mark.parametrize(
    "config, message",
    [
        ({"quant_method": "aqlm"}, "quantization method 'aqlm' is not supported; use a checkpoint without"),
        ({"quant_method": "quip"}, "quantization method 'quip' is not supported"),
        ({"quant_method": "hqq"}, "quantization method 'hqq' is not supported"),
        ({"quant_method": "eetq"}, "quantization method 'eetq' is not supported"),
        ({}, "quantization method None is not supported"),
        ([], r"quantization_config is \[\]; an object is needed"),
        ({**GPTQ, "bits": 5}, "bits 5 of a gptq checkpoint is not supported"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin' of a gptq checkpoint is not supported"),
        ({**AWQ, "version": "gemv"}, "version 'gemv' of a awq checkpoint is not supported"),
        (compressed("marlin-24"), "format 'marlin-24' of a compressed-tensors checkpoint is not supported"),
        (
            {**compressed("pack-quantized"), "sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config.format",
        ),
        ({**compressed("x"), "config_groups": {"a": 1}}, "format 'x' of a compressed-tensors checkpoint"),
        ({**compressed("pack-quantized"), "transform_config": {"config_groups": {"R1": {}}}}, "rotated weights"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo 'NVFP4' of a modelopt checkpoint"),
    ],
)
def test_an_unknown_method_is_refused(config: object, message: str, tmp_path: Path) -> None:
    folder = make_tiny_model("llama2", tmp_path, quantization_config=config)
    with pytest.raises(ModelFileError, match=message) as error:
        read_model_spec(resolve_model(str(folder)))
    assert error.value.path == str(folder / "config.json")


# Format -> (a part, what replaces it or None, the tensor and the reason of the error).
DAMAGED: list[tuple[str, str, torch.Tensor | None, str, str]] = [
    ("gptq", ".scales", None, "x.scales", "is missing, though x.qweight is there"),
    ("gptq", ".qzeros", None, "x.qzeros", "is missing, though x.qweight is there"),
    ("gptq", ".scales", torch.ones(3, 48), "x.scales", "has 3 groups, which do not divide 256 inputs"),
    ("gptq", ".qzeros", torch.ones(8, 48, dtype=torch.int32), "x.qzeros", r"has shape \[8, 48\], which is of no"),
    ("gptq", ".qweight", torch.ones(32, 48), "x.qweight", "has type F32, not I32"),
    ("gptq", ".qzeros", torch.ones(9, 6, dtype=torch.int32), "x.qzeros", r"has shape \[9, 6\], its matrix needs"),
    ("gptq", ".g_idx", torch.full((256,), 9, dtype=torch.int32), "x.g_idx", "names groups 9 to 9; there are 8"),
    ("awq", ".scales", None, "x.scales", "is missing, though x.qweight is there"),
    ("awq", ".qzeros", torch.ones(8, 5, dtype=torch.int32), "x.qzeros", r"has shape \[8, 5\]"),
    ("fp8 tensor", ".weight_scale", None, "x.weight", "there is no tensor x.weight_scale or weight_scale_inv"),
    ("fp8 block", ".weight_scale_inv", torch.ones(2, 3), "x.weight_scale_inv", "needs one scale, one a row, or"),
    ("packed", ".weight_scale", None, "x.weight_scale", "is missing, though x.weight_packed is there"),
    ("packed", ".weight_shape", torch.tensor([48, 250]), "x.weight_scale", "has 8 groups, which do not divide 250"),
    ("packed", ".weight_shape", torch.tensor([47, 256]), "x.weight_packed", "holds no matrix of 47 x 256"),
    ("int", ".weight_scale", torch.ones(7, 1), "x.weight_scale", r"has shape \[7, 1\]"),
    ("mxfp4", ".weight_scale", torch.ones(48, 9, dtype=torch.uint8), "x.weight_scale", r"has shape \[48, 9\]"),
    ("nvfp4", ".weight_global_scale", None, "x.weight_global_scale", "is missing, though x.weight_packed is there"),
    ("nf4", ".weight.absmax", None, "x.weight.absmax", "is missing, though"),
    ("nf4", ".weight.nested_absmax", torch.ones(2), "x.weight.nested_absmax", r"has shape \[2\]"),
    ("nf4", ".weight", torch.ones(7, 1, dtype=torch.uint8), "x.weight", "has 7 bytes, a matrix of 48 x 256 needs"),
    ("bnb int8", ".weight_format", torch.tensor(2, dtype=torch.uint8), "x.weight_format", "names a layout of another"),
    ("bnb int8", ".SCB", torch.ones(5), "x.SCB", r"has shape \[5\]"),
]


@pytest.mark.parametrize("name, end, other, tensor, reason", DAMAGED)
def test_a_damaged_matrix_is_named(
    name: str, end: str, other: torch.Tensor | None, tensor: str, reason: str, tmp_path: Path
) -> None:
    config, pack, _, _ = FORMATS[name]
    tensors = pack(random_values())[0] | ({} if other is None else {end: other})
    if other is None:
        del tensors[end]
    with pytest.raises(ModelFileError, match=reason) as error:
        write_matrix(tmp_path, config, tensors)
    assert error.value.tensor == tensor and error.value.path == str(tmp_path / "model.safetensors")


@pytest.mark.parametrize("text", ["{", '{"quant_type": "nf4", "blocksize": 0, "shape": [48, 256]}', '{"shape": [48]}'])
def test_a_damaged_state_of_bitsandbytes_is_named(text: str, tmp_path: Path) -> None:
    tensors = packing.bnb_four_bit(random_values())[0]
    tensors[".weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text.encode()), dtype=torch.uint8)
    with pytest.raises(ModelFileError, match=r"is not JSON|quant_type nf4 or fp4, blocksize and a shape"):
        write_matrix(tmp_path, BNB4, tensors)


def test_codes_without_a_declaration_are_refused(tmp_path: Path) -> None:
    source = make_tiny_model("llama2", tmp_path / "source", hidden_size=128)
    quantise_folder(source, tmp_path / "packed", packing.gptq, GPTQ)
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "packed" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match=r"codes need a quantization_config in config\.json"):
        load_decoder(tmp_path / "packed")


def test_a_declaration_of_model_optimizer_is_read(tmp_path: Path) -> None:
    source = make_tiny_model("llama2", tmp_path / "source", hidden_size=128)
    folder = tmp_path / "packed"
    quantise_folder(source, folder, packing.fp8, FP8)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(0.25)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    declared = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(declared))
    assert read_model_spec(resolve_model(str(folder))).quantization == "FP8"
    probe = Probe(folder, "native")
    assert probe.capacity.quantization == "int8"
    assert probe.capacity.notes == (
        "14 scales of activations are not used: activations keep their precision",
        "1 scales of an 8-bit KV cache are not used",
        "14 tensors in FP8 (E4M3) become int8, the nearest that the kernels read; quantization none keeps their values "
        "exactly, as floats",
    )


def test_the_zero_points_of_a_version_are_part_of_the_cache_key(tmp_path: Path) -> None:
    """Files of both versions have the same names and shapes, so only config.json tells them apart."""
    source = make_tiny_model("llama2", tmp_path / "source", hidden_size=128)
    folder = tmp_path / "packed"
    quantise_folder(source, folder, partial(packing.gptq, has_zeros=True), GPTQ)
    cache = WeightCache(tmp_path / "cache", min_bytes=0)
    files = resolve_model(str(folder))

    def first_weight() -> torch.Tensor:
        weights = load_native_weights(files, read_model_spec(files), "auto", torch.float32, cache)
        return weights.layers[0].qkv[0].dequantize()

    first = first_weight()
    assert torch.equal(first_weight(), first) and len(list(cache.folder.iterdir())) == 1
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["checkpoint_format"] = "gptq_v2"
    (folder / "config.json").write_text(json.dumps(config))
    assert not torch.equal(first_weight(), first)


def test_four_bit_bytes_may_be_stored_as_other_numbers(tmp_path: Path) -> None:
    tensors, expected = packing.bnb_four_bit(random_values())
    tensors[".weight"] = tensors[".weight"].flatten().view(torch.bfloat16)
    weights = write_matrix(tmp_path, BNB4, tensors)
    values = torch.empty(48, 256)
    weights.read_into("x.weight", values)
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-9)


def test_gpt_oss_experts_are_rows_of_one_matrix(tmp_path: Path) -> None:
    values = torch.randn(3 * 8, 64, generator=torch.Generator().manual_seed(3))
    tensors, expected = packing.mxfp4(values)
    experts = {
        "_blocks": tensors[".weight_packed"].reshape(3, 8, 2, 16),
        "_scales": tensors[".weight_scale"].reshape(3, 8, 2),
    }
    weights = write_matrix(tmp_path, {"quant_method": "mxfp4"}, experts)
    weights.claim("x", (24, 64))
    raw = weights.raw_matrix("x")
    assert raw is not None and raw.kind == (WeightKind.MXFP4, 32) and raw.is_kept
    np.testing.assert_array_equal(raw.values(8, 8), expected[8:16].numpy())


@pytest.mark.parametrize("name", ["awq", "fp8 block", "nf4"])
def test_ranks_divide_a_model_with_codes(name: str, tmp_path: Path) -> None:
    """Two ranks compute the bits of one rank with the arithmetic of several, which keeps the files' codes."""
    config, pack, kind, _ = FORMATS[name]
    sizes = {"hidden_size": 256, "head_dim": 32, "num_attention_heads": 8, "intermediate_size": 512}
    source = make_tiny_model("llama2", tmp_path / "source", num_key_value_heads=4, num_hidden_layers=1, **sizes)
    folder = tmp_path / "packed"
    plain = quantise_folder(source, folder, pack, config)
    decoder = load_shard(str(folder), "auto")
    assert {weight.kind for weight, _ in decoder._layers[0].qkv._held} == {kind[0]}
    alone, exact = logits_of(None, str(folder), "auto"), logits_of(None, str(plain), "plain")
    for found in logits_of_threads(2, str(folder), "auto"):
        assert all(torch.equal(*pair) for pair in zip(found, alone, strict=True))
    for found, expected in zip(alone, exact, strict=True):
        assert (found - expected).norm() < 0.04 * expected.norm()
