"""GGUF weights: names, row order, every supported block format, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quants

from octavo.artifacts.families import FAMILIES
from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import ModelFiles, resolve_model
from octavo.errors import ModelFileError
from octavo.nn.gguf_blocks import GGUF_TYPES
from octavo.nn.layers import inverse_frequencies
from octavo.nn.packed_weight import WeightKind
from octavo.nn.weights import TensorWindow, Weights, open_weights
from tests.models.dense_backend import all_logits, load_decoder
from tests.tiny_gguf import gguf_name, make_tiny_gguf, random_blocks, write_out
from tests.tiny_models import make_tiny_model, parameter_shapes, tiny_config, tiny_tensors, write_tensors

IDS = [5, 9, 2, 250, 31, 7, 7, 120, 3]


def open_file(path: Path) -> Weights:
    files = resolve_model(str(path))
    return open_weights(files, read_model_spec(files))


def read(weights: Weights, name: str) -> torch.Tensor:
    out = torch.empty(weights.shape(name))
    weights.read_into(name, out)
    return out


def test_every_name_maps_back() -> None:
    for family in ("llama3", "qwen2", "qwen3", "gemma3"):
        for name in parameter_shapes(tiny_config(family)):
            entry = FAMILIES["llama" if family == "llama3" else family]
            assert entry.from_gguf(gguf_name(name, family))[1] == name
    assert FAMILIES["llama"].from_gguf("blk.0.attn_strange.weight") == ("", "blk.0.attn_strange.weight")


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("family", ["llama2", "qwen2", "qwen3", "gemma3"])
def test_round_trip(family: str, kind: str, tmp_path: Path) -> None:
    stored = make_tiny_gguf(family, tmp_path / "tiny.gguf", kind)
    weights = open_file(tmp_path / "tiny.gguf")
    assert set(weights.names) == set(stored)
    for name, tensor in stored.items():
        assert torch.equal(read(weights, name), tensor), name


@pytest.mark.parametrize("family", ["llama2", "mistral", "qwen2", "qwen3"])
def test_logits_equal_those_of_the_same_values_in_safetensors(family: str, tmp_path: Path) -> None:
    stored = make_tiny_gguf(family, tmp_path / "tiny.gguf", "Q4_1")
    folder = make_tiny_model(family, tmp_path / "folder")
    write_tensors(folder, stored)
    found = all_logits(load_decoder(tmp_path / "tiny.gguf"), [IDS])[0]
    assert torch.equal(found, all_logits(load_decoder(folder), [IDS])[0])


def test_X01_a_gemma3_file_computes_what_the_same_values_in_safetensors_do(tmp_path: Path) -> None:
    change = {"query_pre_attn_scalar": 32}  # GGUF says nothing of it: the head size
    stored = make_tiny_gguf("gemma3", tmp_path / "tiny.gguf", "Q8_0", **change)
    folder = make_tiny_model("gemma3", tmp_path / "folder", **change)
    write_tensors(folder, stored)
    found = all_logits(load_decoder(tmp_path / "tiny.gguf"), [IDS * 9])[0]
    assert torch.equal(found, all_logits(load_decoder(folder), [IDS * 9])[0])


def test_rope_factors_stand_for_llama3_scaling(tmp_path: Path) -> None:
    folder = make_tiny_model("llama3", tmp_path / "folder")
    spec = read_model_spec(resolve_model(str(folder)))
    plain = inverse_frequencies(spec.head_dim, spec.rope_theta, None, 256)
    factors = plain / inverse_frequencies(spec.head_dim, spec.rope_theta, spec.rope_scaling, 256)
    make_tiny_gguf("llama3", tmp_path / "tiny.gguf", "F32", extra={"rope_freqs.weight": factors.numpy()})
    found = all_logits(load_decoder(tmp_path / "tiny.gguf"), [list(range(100, 250))])[0]
    expected = all_logits(load_decoder(folder), [list(range(100, 250))])[0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", GGUF_TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_synthetic_blocks_of_every_type(kind: GGMLQuantizationType, dtype: torch.dtype, tmp_path: Path) -> None:
    """More values than are dequantised at once, random bits, against the gguf package on the whole."""
    rows, columns = 2100, 512
    block, block_bytes = GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 256, (rows, columns // block * block_bytes), dtype=np.uint8)
    writer = GGUFWriter(tmp_path / "blocks.gguf", "qwen2")
    writer.add_tensor("blk.0.ffn_up.weight", raw, raw_dtype=kind)
    write_out(writer)
    make_tiny_model("qwen2", tmp_path / "folder")
    spec = read_model_spec(resolve_model(str(tmp_path / "folder")))
    weights = open_weights(ModelFiles("x", "gguf", tmp_path, (tmp_path / "blocks.gguf",)), spec)
    out = torch.empty(rows, columns, dtype=dtype)
    with np.errstate(all="ignore"):
        weights.read_into("model.layers.0.mlp.up_proj.weight", out)
        expected = torch.from_numpy(np.array(quants.dequantize(raw, kind))).to(dtype)
    torch.testing.assert_close(out, expected, atol=0, rtol=0, equal_nan=True)
    assert out.isfinite().float().mean() > 0.8


def test_an_unsupported_type_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(GGUF_TYPES, GGMLQuantizationType.Q5_0)
    make_tiny_gguf("llama2", tmp_path / "tiny.gguf", "Q5_0")
    with pytest.raises(ModelFileError, match=r"'token_embd\.weight': has type Q5_0; .*Q4_K.* supported"):
        load_decoder(tmp_path / "tiny.gguf")


def test_experts_are_rows_of_one_matrix(tmp_path: Path) -> None:
    """A tensor of three dimensions, as llama.cpp writes those of a mixture of experts, read by windows of rows."""
    kind, shape = GGMLQuantizationType.Q4_K, (4, 24, 512)
    raw = random_blocks(kind, 4 * 24, 512)
    writer = GGUFWriter(tmp_path / "blocks.gguf", "qwen2")
    writer.add_tensor("blk.0.ffn_gate_exps.weight", raw.reshape(4, 24, -1), raw_dtype=kind)
    write_out(writer)
    make_tiny_model("qwen2", tmp_path / "folder")
    spec = read_model_spec(resolve_model(str(tmp_path / "folder")))
    weights = open_weights(ModelFiles("x", "gguf", tmp_path, (tmp_path / "blocks.gguf",)), spec)
    (name,) = weights.names
    assert weights.shape(name) == (4 * 24, 512)
    weights.claim(name, (4 * 24, 512))
    expected = torch.from_numpy(np.array(quants.dequantize(raw, kind)))
    assert torch.equal(read(weights, name), expected)
    matrix = weights.raw_matrix(name)
    assert matrix is not None and matrix.kind == (WeightKind.INT4, 32)
    for expert in range(shape[0]):
        window = TensorWindow(name, range(24 * expert, 24 * (expert + 1)))
        part = weights.windows([window])
        assert torch.equal(read(part, window.key), expected[24 * expert : 24 * (expert + 1)])
        codes, own = matrix.codes(24 * expert, 24), part.raw_matrix(window.key)
        assert codes is not None and own is not None
        np.testing.assert_array_equal(own.values(3, 2), expected[24 * expert + 3 : 24 * expert + 5].numpy())
        np.testing.assert_allclose(codes.dequantize().numpy(), expected[24 * expert : 24 * (expert + 1)], atol=0.01)


def test_a_split_model_is_read_as_one(tmp_path: Path) -> None:
    stored = make_tiny_gguf("llama2", tmp_path / "m.gguf", "Q8_0", tensors_per_part=8)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert [part.name for part in parts] == [f"m-0000{index}-of-00003.gguf" for index in (1, 2, 3)]
    weights = open_file(parts[0])
    assert set(weights.names) == set(stored)
    for name, tensor in stored.items():
        assert torch.equal(read(weights, name), tensor), name
    (tmp_path / "whole").mkdir()
    make_tiny_gguf("llama2", tmp_path / "whole" / "m.gguf", "Q8_0")
    one, split = (all_logits(load_decoder(path), [IDS])[0] for path in (tmp_path / "whole" / "m.gguf", parts[0]))
    assert torch.equal(one, split)


def test_parts_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    make_tiny_gguf("llama2", tmp_path / "m.gguf", "Q8_0", tensors_per_part=8)
    first, second, third = sorted(tmp_path.glob("*.gguf"))
    whole = second.read_bytes()
    second.write_bytes(third.read_bytes())  # a part twice
    with pytest.raises(ModelFileError, match=r"m-00002-of-00003\.gguf.*split\.no 2 and .* but 1 and 3 by its name"):
        open_file(first)
    second.write_bytes(whole)
    alone = tmp_path / "alone.gguf"
    alone.write_bytes(second.read_bytes())
    with pytest.raises(ModelFileError, match=r"alone\.gguf.*is one of 3 parts; name the first"):
        open_file(alone)
    other = tmp_path / "other"
    other.mkdir()
    make_tiny_gguf("llama2", other / "m.gguf", "Q8_0", tensors_per_part=8, num_hidden_layers=3)
    second.write_bytes((other / "m-00002-of-00004.gguf").read_bytes())
    with pytest.raises(ModelFileError, match=r"split\.no 1 and split\.count 4"):
        open_file(first)
    second.write_bytes(whole)
    third.unlink()
    with pytest.raises(ModelFileError, match=r"m-00003-of-00003\.gguf.*is missing"):
        open_file(first)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = tiny_tensors(tiny_config("llama2"), 0, torch.float32)
    del tensors["model.layers.1.mlp.down_proj.weight"]
    make_tiny_gguf("llama2", tmp_path / "tiny.gguf", "F16", tensors=tensors)
    with pytest.raises(ModelFileError, match=r"tiny\.gguf.*layers\.1\.mlp\.down_proj\.weight.*missing"):
        load_decoder(tmp_path / "tiny.gguf")


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    tensors = tiny_tensors(tiny_config("llama2"), 0, torch.float32)
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(32, 64)
    make_tiny_gguf("llama2", tmp_path / "tiny.gguf", "F16", tensors=tensors)
    with pytest.raises(ModelFileError, match=r"k_proj\.weight.*\[32, 64\].*\[64, 64\]"):
        load_decoder(tmp_path / "tiny.gguf")


def test_an_unknown_tensor_is_refused(tmp_path: Path) -> None:
    extra = {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}
    make_tiny_gguf("llama2", tmp_path / "tiny.gguf", "F16", extra=extra)
    with pytest.raises(ModelFileError, match=r"attn_sinks.*not a part"):
        load_decoder(tmp_path / "tiny.gguf")


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    make_tiny_gguf("llama2", path, "F16")
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(ModelFileError, match=r"tiny\.gguf.*truncated"):
        load_decoder(path)


def test_a_qwen3_file_without_its_head_norms_is_refused(tmp_path: Path) -> None:
    tensors = tiny_tensors(tiny_config("qwen3"), 0, torch.float32)
    for name in [name for name in tensors if "q_norm" in name or "k_norm" in name]:
        del tensors[name]
    make_tiny_gguf("qwen3", tmp_path / "tiny.gguf", "F16", tensors=tensors)
    with pytest.raises(ModelFileError, match=r"q_norm\.weight.*missing"):
        load_decoder(tmp_path / "tiny.gguf")


def test_biases_of_paired_heads_are_reordered_too(tmp_path: Path) -> None:
    """A llama file with attention biases: llama.cpp pairs their rows like those of the weights."""
    names = [f"model.layers.{layer}.self_attn.{part}_proj.bias" for layer in range(2) for part in "qkv"]
    tensors = tiny_tensors(tiny_config("llama2"), 0, torch.float32) | {name: torch.randn(64) for name in names}
    stored = make_tiny_gguf("llama2", tmp_path / "tiny.gguf", "F32", tensors=tensors)
    files = resolve_model(str(tmp_path / "tiny.gguf"))
    weights = open_weights(files, replace(read_model_spec(files), biases=("qkv",)))
    for name in names:
        assert torch.equal(read(weights, name), stored[name])
