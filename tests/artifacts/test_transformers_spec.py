"""Specifications of models without a native family, read from config.json alone."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.artifacts.model_spec import ModelSpec
from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import ModelFiles
from octavo.errors import ModelFileError

GPT2 = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 300, "n_embd": 64, "n_layer": 3,
    "n_head": 4, "n_positions": 128, "layer_norm_epsilon": 1e-5, "eos_token_id": 2,
}  # fmt: skip
Read = Callable[..., ModelSpec]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def read(config: dict[str, Any], **changes: Any) -> ModelSpec:
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True, "top_p": 0.5}))
        return read_model_spec(ModelFiles("m", "hf", tmp_path, ()))

    return read


def test_X01_sizes_under_the_names_of_gpt2(read: Read) -> None:
    spec = read(GPT2)
    assert (spec.path, spec.family) == ("transformers", "gpt2")
    assert spec.path_reason == "model_type 'gpt2' has no native implementation"
    assert (spec.hidden_size, spec.num_layers, spec.num_heads, spec.num_kv_heads) == (64, 3, 4, 4)
    assert (spec.head_dim, spec.intermediate_size, spec.max_model_len) == (16, 256, 128)
    assert spec.eos_token_ids == (2,) and spec.generation == {"top_p": 0.5}


def test_X01_nested_text_settings_and_heads_of_compressed_attention(read: Read) -> None:
    text = {"model_type": "some_text", "vocab_size": 90, "hidden_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
    spec = read({"model_type": "some", "eos_token_id": [1, 500], "text_config": {**text, **heads}})
    assert (spec.family, spec.head_dim, spec.max_model_len) == ("some_text", 24, 2048)
    assert spec.eos_token_ids == (1,)


def test_X01_K07_windows_that_the_configuration_names(read: Read) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert read(GPT2, layer_types=kinds, sliding_window=16).layer_windows == (16, None, 16)


def test_X01_a_native_family_with_an_unsupported_setting_runs_through_transformers(read: Read) -> None:
    config = {"vocab_size": 90, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    spec = read({"model_type": "llama", **config, "hidden_act": "quick_gelu", "intermediate_size": 96})
    assert spec.path == "transformers" and "quick_gelu" in spec.path_reason
    assert read({"model_type": "llama", **config, "intermediate_size": 96}).path == "native"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_encoder_decoder": True}, "an encoder-decoder"),
        ({"layer_types": ["mamba", "full_attention", "mamba"]}, "layers of type mamba keep a state"),
        ({"state_size": 16}, "state_size describes layers that keep a state"),
        ({"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM is not a causal language model"),
        ({"n_layer": None}, "the model's size is not known"),
        ({"n_layer": 0}, "num_layers is 0"),
    ],
)
def test_X01_what_cannot_run_is_refused_with_the_reason(read: Read, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelFileError, match=reason):
        read(GPT2, **changes)


def test_mutated_configurations_are_read_or_refused(read: Read) -> None:
    rng = random.Random(1)
    values = [None, True, -1, 0, 1 << 70, 1.5, float("nan"), "x", [], {}, [[1]], {"a": {}}]
    keys = [*GPT2, "architectures", "layer_types", "sliding_window", "head_dim", "text_config", "dtype", "bos_token_id"]
    for _ in range(400):
        with contextlib.suppress(ModelFileError):
            read(GPT2, **{key: rng.choice(values) for key in rng.sample(keys, 2)})
