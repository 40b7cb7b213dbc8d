"""Safetensors weights: shards, types, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.artifacts.resolve import ModelFiles, resolve_model
from octavo.errors import ModelFileError
from octavo.nn.weights import SafetensorsWeights, Weights
from tests.models.dense_backend import all_logits, load_decoder
from tests.tiny_models import make_tiny_model, tiny_config, tiny_tensors, write_tensors

IDS = [5, 9, 2, 250, 31, 7, 7]


def changed(folder: Path, **tensors: torch.Tensor | None) -> Path:
    """Rewrite the folder's weights with some replaced (by dotted names with `__` for the dots) or removed."""
    all_tensors = load_file(folder / "model.safetensors")
    for key, tensor in tensors.items():
        name = key.replace("__", ".")
        all_tensors.pop(name, None)
        if tensor is not None:
            all_tensors[name] = tensor
    write_tensors(folder, all_tensors)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_are_converted_into_the_memory_given(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = make_tiny_model("llama2", tmp_path, dtype="bfloat16")
    source = Weights(SafetensorsWeights(resolve_model(str(folder))))
    for name, expected in tiny_tensors(tiny_config("llama2"), 0, torch.bfloat16).items():
        out = torch.empty(source.shape(name), dtype=dtype)
        source.read_into(name, out)
        assert torch.equal(out, expected.to(dtype)), name
    source.check_all_read()


def test_shards_equal_a_single_file(tmp_path: Path) -> None:
    single = make_tiny_model("qwen3", tmp_path / "single")
    sharded = make_tiny_model("qwen3", tmp_path / "sharded", shards=3)
    assert not (sharded / "model.safetensors").exists()
    assert torch.equal(all_logits(load_decoder(single), [IDS])[0], all_logits(load_decoder(sharded), [IDS])[0])


def test_a_second_copy_in_another_layout_is_left_alone(tmp_path: Path) -> None:
    single = make_tiny_model("mistral", tmp_path / "single")
    save_file({"tok_embeddings.weight": torch.zeros(3)}, single / "consolidated.safetensors")
    sharded = make_tiny_model("mistral", tmp_path / "sharded", shards=2)
    save_file({"tok_embeddings.weight": torch.zeros(3)}, sharded / "consolidated.safetensors")
    assert torch.equal(all_logits(load_decoder(single), [IDS])[0], all_logits(load_decoder(sharded), [IDS])[0])


def test_what_tied_and_old_checkpoints_carry_along_is_ignored(tmp_path: Path) -> None:
    folder = make_tiny_model("smollm2", tmp_path)
    before = all_logits(load_decoder(folder), [IDS])[0]
    changed(
        folder, lm_head__weight=torch.zeros(300, 48), model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(8)
    )
    assert torch.equal(all_logits(load_decoder(folder), [IDS])[0], before)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = changed(make_tiny_model("llama2", tmp_path), model__layers__1__self_attn__v_proj__weight=None)
    with pytest.raises(
        ModelFileError, match=r"tensor 'model\.layers\.1\.self_attn\.v_proj\.weight': is missing"
    ) as error:
        load_decoder(folder)
    assert error.value.path == str(folder) and error.value.tensor == "model.layers.1.self_attn.v_proj.weight"


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    folder = changed(make_tiny_model("llama2", tmp_path), model__norm__weight=torch.ones(63))
    with pytest.raises(ModelFileError, match=r"safetensors: tensor 'model\.norm\.weight': has shape \[63\].*\[64\]"):
        load_decoder(folder)


def test_a_tensor_of_another_architecture_is_refused(tmp_path: Path) -> None:
    folder = changed(make_tiny_model("llama2", tmp_path), model__layers__0__self_attn__sinks=torch.ones(4))
    with pytest.raises(ModelFileError, match=r"self_attn\.sinks': is not a part of this architecture"):
        load_decoder(folder)


def test_an_unsupported_type_is_named(tmp_path: Path) -> None:
    folder = changed(make_tiny_model("llama2", tmp_path), model__norm__weight=torch.ones(64, dtype=torch.int8))
    with pytest.raises(ModelFileError, match=r"model\.norm\.weight': has type I8; F64, F32, F16, BF16 are supported"):
        load_decoder(folder)


@pytest.mark.parametrize("keep", [0, 5, 100, -1000])
def test_a_truncated_file_is_refused(keep: int, tmp_path: Path) -> None:
    folder = make_tiny_model("llama2", tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelFileError, match=r"model\.safetensors: is no whole safetensors file"):
        load_decoder(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = make_tiny_model("llama2", tmp_path, shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"model-00002-of-00002\.safetensors.*is missing.*index"):
        load_decoder(folder)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_a_damaged_index_is_refused(content: str, tmp_path: Path) -> None:
    folder = make_tiny_model("llama2", tmp_path, shards=2)
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelFileError, match=r"index\.json: is no shard index"):
        load_decoder(folder)


@pytest.mark.parametrize("sizes", [{"vocab_size": 1 << 24}, {"hidden_size": 1 << 22}, {"intermediate_size": 1 << 24}])
def test_sizes_that_no_memory_could_hold_are_refused_by_name(sizes: dict[str, int], tmp_path: Path) -> None:
    folder = make_tiny_model("llama2", tmp_path)
    config = json.loads((folder / "config.json").read_text()) | sizes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match=r"safetensors: tensor '.*': has shape \[.*, the configuration needs"):
        load_decoder(folder)


def test_damaged_headers_are_refused_or_read(tmp_path: Path) -> None:
    """Bytes of the header changed at random: a typed error, or weights of the right shapes; never another end."""
    folder = make_tiny_model("llama2", tmp_path, num_hidden_layers=1)
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    header_end = 8 + int.from_bytes(whole[:8], "little")
    random = Random(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(random.choice((1, 1, 2, 8))):
            damaged[random.randrange(header_end)] = random.choice((random.randrange(256), *b'0159[]{}",:'))
        path.write_bytes(damaged)
        try:
            load_decoder(folder)
        except ModelFileError as error:
            refused += 1
            assert str(folder) in str(error)
    assert refused > 200


def test_an_index_cannot_reach_out_of_its_folder(tmp_path: Path) -> None:
    folder = make_tiny_model("llama2", tmp_path / "model", shards=2)
    index = {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match="outside its folder"):
        load_decoder(folder)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"x": torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    paths = (tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    with pytest.raises(ModelFileError, match=r"b\.safetensors: tensor 'x': is also in a\.safetensors"):
        SafetensorsWeights(ModelFiles("x", "hf", tmp_path, paths))
