"""Specifications of encoders: keys and defaults of their configurations, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.models.encoders import write_sentence_transformer, write_word_tokenizer
from tests.source_tree import ROOT

from octavo.artifacts.encoder_families import ENCODER_FAMILIES
from octavo.artifacts.model_spec import ModelSpec
from octavo.artifacts.read_encoder import read_encoder_spec
from octavo.errors import ModelFileError

BERT: dict[str, Any] = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
MEAN = {"pooling_mode_mean_tokens": True}


def read(folder: Path, **config: Any) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps({**BERT, **config}))
    return read_encoder_spec(folder)


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for model_type, family in ENCODER_FAMILIES.items():
        theirs = CONFIG_MAPPING[model_type]()
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": theirs.vocab_size}))
        spec = read_encoder_spec(tmp_path)
        assert spec.encoder is not None
        first = (theirs.pad_token_id or 0) + 1 if family.has_padding_positions else 0
        assert spec.max_model_len == theirs.max_position_embeddings - first, model_type
        for ours, name in (
            ("hidden_size", "hidden_size"),
            ("num_layers", "num_hidden_layers"),
            ("num_heads", "num_attention_heads"),
            ("intermediate_size", family.config_keys.get("intermediate_size", "intermediate_size")),
        ):
            assert getattr(spec, ours) == getattr(theirs, name), (model_type, name)
        eps = getattr(theirs, family.config_keys.get("layer_norm_eps", "layer_norm_eps"), 1e-12)
        assert spec.rms_norm_eps == eps, model_type
        assert spec.encoder.num_token_types == getattr(theirs, "type_vocab_size", 0), model_type


def test_without_sentence_transformers_it_is_the_mean_scaled_to_length_1(tmp_path: Path) -> None:
    encoder = read(tmp_path).encoder
    assert encoder is not None and (encoder.pooling, encoder.normalize) == ("mean", True)
    assert encoder.purpose.startswith("embeds texts")


CLASSIFIER = {"architectures": ["BertForSequenceClassification"], "num_labels": 2}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"hidden_act": "mish"}, "hidden_act 'mish'"),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"architectures": ["BertForQuestionAnswering"]}, "BertForQuestionAnswering"),
        ({"is_decoder": True}, "is_decoder"),
        ({"architectures": 1, "is_decoder": True}, "is_decoder"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_layers"),
        ({"hidden_size": 1 << 30}, "hidden_size"),
        ({"dtype": "int8"}, "dtype"),
        ({"model_type": "modernbert", "global_attn_every_n_layers": 0}, "global_attn_every_n_layers"),
        ({"model_type": "modernbert", "layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "nomic_bert", "rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "yarn"),
        ({"architectures": ["BertForSequenceClassification"], "num_labels": 0}, "labels"),
        ({"model_type": "nomic_bert", "prenorm": True}, "prenorm is True"),
        ({"model_type": "modernbert", "rope_parameters": [1]}, "rope scaling"),
        ({"model_type": "modernbert", "rope_parameters": {"full_attention": "default"}}, "rope scaling"),
        ({**CLASSIFIER, "classifier_pooling": ["cls"]}, "classifier_pooling"),
        ({**CLASSIFIER, "classifier_pooling": "sum"}, "classifier_pooling is 'sum'; one of cls, mean, last, late"),
        ({**CLASSIFIER, "classifier_activation": "none"}, "classifier_activation is 'none'"),
        ({"model_type": "nomic_bert", "rotary_scaling_factor": 2}, "rotary_scaling_factor"),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(config: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=named):
        read(tmp_path, **config)


@pytest.mark.parametrize(
    ("pooling", "modules", "named"),
    [
        ({"pooling_mode_mean_sqrt_len_tokens": True}, (), "mean_sqrt_len"),
        ({**MEAN, "pooling_mode_cls_token": True}, (), "cls"),
        ({"pooling_mode": "weightedmean"}, (), "weightedmean"),
        ({**MEAN, "include_prompt": False}, (), "include_prompt"),
        (MEAN, ("LSTM",), "LSTM"),
        (MEAN, ("Normalize", "Dense"), "Dense"),
        (MEAN, ("Dense",), "config.json"),
    ],
)
def test_modules_that_are_not_known_are_refused(
    pooling: dict[str, Any], modules: tuple[str, ...], named: str, tmp_path: Path
) -> None:
    prompts = {"prompts": {"query": "q: "}}
    write_sentence_transformer(tmp_path, pooling, modules, config_sentence_transformers=prompts)
    with pytest.raises(ModelFileError, match=named):
        read(tmp_path)


def test_a_module_outside_the_folder_is_refused(tmp_path: Path) -> None:
    write_sentence_transformer(tmp_path, MEAN)
    entries = json.loads((tmp_path / "modules.json").read_text())
    entries[1]["path"] = "../other"
    (tmp_path / "modules.json").write_text(json.dumps(entries))
    with pytest.raises(ModelFileError, match="outside its own"):
        read(tmp_path)


def test_the_separator_of_pairs_comes_from_the_tokenizer(tmp_path: Path) -> None:
    write_word_tokenizer(tmp_path)
    classifier = {"architectures": ["BertForSequenceClassification"], "num_labels": 1}
    encoder = read(tmp_path, **classifier).encoder
    assert encoder is not None and encoder.separator_id == 3 and encoder.score_activation == "sigmoid"
    (tmp_path / "tokenizer_config.json").write_text('{"sep_token": "<none>"}')
    with pytest.raises(ModelFileError, match="no token '<none>'"):
        read(tmp_path, **classifier)


def test_prompts_have_a_default(tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "q: ", "passage": "p: "}, "default_prompt_name": "passage"}
    write_sentence_transformer(tmp_path, MEAN, config_sentence_transformers=prompts)
    encoder = read(tmp_path).encoder
    assert encoder is not None
    assert (encoder.prefix(), encoder.prefix("query"), encoder.prefix("document")) == ("p: ", "q: ", "p: ")
    prompts["default_prompt_name"] = "none"
    write_sentence_transformer(tmp_path, MEAN, config_sentence_transformers=prompts)
    with pytest.raises(ModelFileError, match="default 'none'"):
        read(tmp_path)


def test_published_keys_of_nomic_are_read(tmp_path: Path) -> None:
    sizes = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_inner": 96, "n_positions": 512, "rotary_emb_base": 500}
    config = {"model_type": "nomic_bert", "vocab_size": 64, "activation_function": "swiglu", **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_encoder_spec(tmp_path)
    assert (spec.hidden_size, spec.num_layers, spec.num_heads, spec.intermediate_size) == (64, 3, 4, 96)
    assert (spec.max_model_len, spec.rope_theta) == (512, 500.0)


def test_the_page_of_models_lists_every_encoder() -> None:
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    for model_type in ENCODER_FAMILIES:
        assert f"`{model_type}`" in page, f"add {model_type} to docs/models.md"
