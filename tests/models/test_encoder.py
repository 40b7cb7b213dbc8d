"""Encoders of every family against transformers: vectors, classifiers, pairs, layouts of names, and independence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from octavo.artifacts.encoder_families import ENCODER_FAMILIES
from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import resolve_model
from octavo.errors import ModelFileError
from octavo.models.encoder import Encoder, PoolingDecoder
from octavo.models.native_weights import wanted_tensors
from octavo.ops import cpu
from tests.models.encoders import SEP_ID, TINY, make_tiny_encoder, write_sentence_transformer
from tests.quick import one_in

pytest.importorskip("transformers")
LENGTHS = (1, 2, 7, 33, 61)
TEXTS = [np.array([2, *range(5, 5 + length), SEP_ID], dtype=np.int32) for length in LENGTHS]


def load(folder: Path, dtype: torch.dtype = torch.float32, quantization: str | None = "none") -> Any:
    files = resolve_model(str(folder))
    is_packed = quantization is not None and cpu.status().is_loaded
    wanted = wanted_tensors(quantization, dtype) if is_packed and quantization is not None else None
    spec = read_model_spec(files)
    kind = Encoder if spec.family in ENCODER_FAMILIES else PoolingDecoder
    return kind(files, spec, dtype, torch.device("cpu"), wanted)


def states(model: Any, text: Any, **more: Any) -> torch.Tensor:
    with torch.no_grad():
        found = model(torch.tensor(text).long()[None], **more)
    return found.logits[0] if hasattr(found, "logits") else found.last_hidden_state[0]


@pytest.mark.parametrize("model_type", sorted(ENCODER_FAMILIES))
def test_vectors_and_logits_equal_transformers(model_type: str, tmp_path: Path) -> None:
    model = make_tiny_encoder(model_type, tmp_path / "plain")
    expected = torch.stack([functional.normalize(states(model, text).mean(0), dim=0) for text in TEXTS])
    for quantization in ("none", None):  # by the C++ kernels, and by torch
        assert torch.allclose(load(tmp_path / "plain", quantization=quantization).run(TEXTS), expected, atol=1e-5)
    classifier = make_tiny_encoder(model_type, tmp_path / "classifier", num_labels=3)
    expected = torch.stack([states(classifier, text) for text in TEXTS])
    assert torch.allclose(load(tmp_path / "classifier").run(TEXTS), expected, atol=1e-4)


@pytest.mark.parametrize("model_type", ["bert", "nomic_bert", "electra"])
def test_the_two_texts_of_a_pair_have_their_types(model_type: str, tmp_path: Path) -> None:
    model = make_tiny_encoder(model_type, tmp_path, num_labels=1)
    pair = [2, 5, 6, 7, SEP_ID, 8, 9, SEP_ID]
    types = torch.tensor([[0] * 5 + [1] * 3])
    expected = states(model, pair, token_type_ids=types)
    encoder = load(tmp_path)
    assert encoder.encoder.separator_id == SEP_ID
    got = encoder.run([TEXTS[2], np.array(pair, dtype=np.int32), TEXTS[3]])
    assert torch.allclose(got[1], expected, atol=1e-4)
    assert not torch.allclose(states(model, pair), expected, atol=1e-3), "types must matter"


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("model_type", ["bert", "mpnet", "modernbert", "eurobert"])
@pytest.mark.parametrize("threads", one_in(2, [1, 2]))
def test_an_output_is_the_same_bits_in_any_batch(
    model_type: str, quantization: str, threads: int, tmp_path: Path
) -> None:
    if not cpu.status().is_loaded:
        pytest.skip("needs the C++ kernels")
    sizes = {"hidden_size": 96, "intermediate_size": 1056}  # activations of more than one of torch's grains
    make_tiny_encoder(model_type, tmp_path, **sizes)
    encoder = load(tmp_path, quantization=quantization)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = [encoder.run([text])[0] for text in TEXTS]
        for order in (range(len(TEXTS)), reversed(range(len(TEXTS))), (3, 1)):
            chosen = list(order)
            for index, output in zip(chosen, encoder.run([TEXTS[index] for index in chosen]), strict=True):
                assert torch.equal(output, alone[index]), (index, chosen)
    finally:
        torch.set_num_threads(before)


def test_int8_and_bfloat16_weights_are_near(tmp_path: Path) -> None:
    if not cpu.status().is_loaded:
        pytest.skip("needs the C++ kernels")
    make_tiny_encoder("bert", tmp_path)
    exact = load(tmp_path).run(TEXTS)
    for dtype, quantization, name in ((torch.bfloat16, "none", "none"), (torch.float32, "int8", "int8")):
        encoder = load(tmp_path, dtype, quantization)
        assert encoder.quantization == name
        assert float(functional.cosine_similarity(encoder.run(TEXTS), exact).min()) > 0.999


@pytest.mark.parametrize(
    ("pooling", "pool"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, lambda x: x[0]),
        ({"pooling_mode_mean_tokens": True}, lambda x: x.mean(0)),
        ({"pooling_mode_max_tokens": True}, lambda x: x.amax(0)),
        ({"pooling_mode_lasttoken": True}, lambda x: x[-1]),
        ({"pooling_mode": "cls"}, lambda x: x[0]),
    ],
)
def test_pooling_is_that_of_sentence_transformers(pooling: dict[str, Any], pool: Any, tmp_path: Path) -> None:
    model = make_tiny_encoder("bert", tmp_path)
    write_sentence_transformer(tmp_path, pooling, (), sentence_bert_config={"max_seq_length": 64})
    encoder = load(tmp_path)
    expected = torch.stack([pool(states(model, text)) for text in TEXTS])
    assert torch.allclose(encoder.run(TEXTS), expected, atol=1e-4)
    assert encoder.max_model_len == 64 and not encoder.encoder.normalize


def test_dense_layers_and_normalisation_follow_in_their_order(tmp_path: Path) -> None:
    model = make_tiny_encoder("roberta", tmp_path)
    modules = ("Dense", "Dense", "Normalize")
    write_sentence_transformer(tmp_path, {"pooling_mode_mean_tokens": True}, modules)
    generator = torch.Generator().manual_seed(3)
    layers = []
    for index, (inputs, outputs) in enumerate([(32, 48), (48, 16)]):
        folder = tmp_path / f"{index + 2}_Dense"
        folder.mkdir()
        weight, bias = torch.randn(outputs, inputs, generator=generator), torch.randn(outputs, generator=generator)
        tensors = {"linear.weight": weight} | ({"linear.bias": bias} if index == 0 else {})
        save_file(tensors, folder / "model.safetensors")
        activation = "torch.nn.modules.activation.Tanh" if index == 0 else "torch.nn.modules.linear.Identity"
        config = f'{{"in_features": {inputs}, "out_features": {outputs}, "bias": {str(index == 0).lower()}, '
        (folder / "config.json").write_text(config + f'"activation_function": "{activation}"}}')
        layers.append((weight, bias if index == 0 else None))
    rows = []
    for text in TEXTS:
        x = torch.tanh(functional.linear(states(model, text).mean(0), *layers[0]))
        rows.append(functional.normalize(functional.linear(x, *layers[1]), dim=0))
    encoder = load(tmp_path)
    assert encoder.spec.vector_size == 16
    assert torch.allclose(encoder.run(TEXTS), torch.stack(rows), atol=1e-5)


OLD_NAMES: dict[str, list[tuple[str, str]]] = {
    "bert": [("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")],
    "nomic_bert": [
        ("embeddings.LayerNorm", "emb_ln"),
        ("self_attn.o_proj", "attn.out_proj"),
        ("mlp.up_proj", "mlp.fc11"),
        ("mlp.gate_proj", "mlp.fc12"),
        ("mlp.down_proj", "mlp.fc2"),
        ("post_attention_layernorm", "norm1"),
        ("post_mlp_layernorm", "norm2"),
    ],
}


def renamed(folder: Path, model_type: str) -> None:
    """Rewrite a folder's tensors under the names that published files have."""
    tensors = load_file(folder / "model.safetensors")
    found: dict[str, torch.Tensor] = {"embeddings.position_ids": torch.arange(9)[None]}
    for name, tensor in tensors.items():
        for new, old in OLD_NAMES[model_type]:
            name = name.replace(new, old)
        found[("encoder." if model_type == "nomic_bert" and name.startswith("layers.") else "") + name] = tensor
    for layer in range(TINY[model_type]["num_hidden_layers"]):
        parts = [f"encoder.layers.{layer}.self_attn.{kind}_proj.weight" for kind in "qkv"]
        if model_type == "nomic_bert" and parts[0] in found:
            found[f"encoder.layers.{layer}.attn.Wqkv.weight"] = torch.cat([found.pop(part) for part in parts])
    save_file(found, folder / "model.safetensors")


@pytest.mark.parametrize("model_type", sorted(OLD_NAMES))
def test_published_names_of_tensors_are_read(model_type: str, tmp_path: Path) -> None:
    make_tiny_encoder(model_type, tmp_path)
    before = load(tmp_path).run(TEXTS)
    renamed(tmp_path, model_type)
    assert torch.equal(load(tmp_path).run(TEXTS), before)


def test_a_damaged_file_names_the_tensor(tmp_path: Path) -> None:
    make_tiny_encoder("bert", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    cases = {
        "embeddings.position_embeddings.weight": lambda x: x[:9].clone(),
        "encoder.layer.1.output.dense.weight": lambda x: x[:, :9].clone(),
        "encoder.layer.2.attention.self.key.bias": None,
        "embeddings.LayerNorm.weight": None,
    }
    for name, change in cases.items():
        damaged = {key: value for key, value in tensors.items() if key != name}
        if change is not None:
            damaged[name] = change(tensors[name])
        save_file(damaged, path)
        with pytest.raises(ModelFileError, match=name.replace(".", r"\.")):
            load(tmp_path)
    save_file({**tensors, "encoder.layer.3.output.dense.weight": torch.zeros(4)}, path)
    with pytest.raises(ModelFileError, match="not a part of this architecture"):
        load(tmp_path)


def test_a_shorter_limit_keeps_the_vectors(tmp_path: Path) -> None:
    make_tiny_encoder("xlm-roberta", tmp_path)
    files = resolve_model(str(tmp_path))
    spec = read_model_spec(files)
    assert spec.max_model_len == 96  # of 98 rows, two precede the first position
    short = Encoder(files, spec, torch.float32, torch.device("cpu"), max_model_len=40)
    whole = Encoder(files, replace(spec), torch.float32, torch.device("cpu"))
    assert short.max_model_len == 40
    assert torch.equal(short.run(TEXTS[:3]), whole.run(TEXTS[:3]))


@pytest.mark.parametrize("quantization", ["none", None])
def test_a_decoder_that_sees_both_ways_is_an_encoder(quantization: str | None, tmp_path: Path) -> None:
    model = make_tiny_encoder("gemma3_text", tmp_path)
    write_sentence_transformer(tmp_path, {"pooling_mode_mean_tokens": True})
    tensors = load_file(tmp_path / "model.safetensors")
    assert "embed_tokens.weight" in tensors, "as embedding models are published: without a head, and without a prefix"
    encoder = load(tmp_path, quantization=quantization)
    assert read_model_spec(resolve_model(str(tmp_path))).layer_windows == (8, None, 8)
    expected = torch.stack([functional.normalize(states(model, text).mean(0), dim=0) for text in TEXTS])
    got = encoder.run(TEXTS)
    assert torch.allclose(got, expected, atol=1e-4)
    if quantization is not None:
        assert all(torch.equal(encoder.run([text])[0], row) for text, row in zip(TEXTS, got, strict=True))


@pytest.mark.parametrize("quantization", ["none", None])
def test_a_decoder_with_a_classifiers_head_reads_the_last_token(quantization: str | None, tmp_path: Path) -> None:
    model = make_tiny_encoder("mistral", tmp_path, num_labels=3)
    encoder = load(tmp_path, quantization=quantization)
    expected = torch.stack([states(model, text) for text in TEXTS])
    assert torch.allclose(encoder.run(TEXTS), expected, atol=1e-4)
    spec = read_model_spec(resolve_model(str(tmp_path)))
    assert spec.encoder is not None and spec.encoder.labels == ("LABEL_0", "LABEL_1", "LABEL_2")


def test_a_decoder_without_a_head_embeds_by_its_last_token(tmp_path: Path) -> None:
    model = make_tiny_encoder("mistral", tmp_path)
    write_sentence_transformer(tmp_path, {"pooling_mode_lasttoken": True})
    expected = torch.stack([functional.normalize(states(model, text)[-1], dim=0) for text in TEXTS])
    assert torch.allclose(load(tmp_path).run(TEXTS), expected, atol=1e-5)
