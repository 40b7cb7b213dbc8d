"""The models of one server, from words and from a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.settings import load_config

from octavo.errors import ConfigError
from octavo.fleet.model_configs import model_name, served_models


def _file(tmp_path: Path, text: str) -> dict[str, str]:
    path = tmp_path / "models.yaml"
    path.write_text(text)
    return {"models_file": str(path)}


def test_words_and_a_file_are_all_served_the_first_by_default(tmp_path: Path) -> None:
    text = (
        "models:\n- qwen3:0.6b\n- model: ./folder\n  name: mine\n  served-model-name: [alias]\n  replicas: 2\n"
        "  quantization: int8\n  max_model_len: 4K\n"
    )
    found = served_models(load_config({"dtype": "float32", **_file(tmp_path, text)}), ["smollm2"])
    assert [each.name for each in found] == ["smollm2", "qwen3:0.6b", "mine"]
    mine = found[2]
    assert mine.config.model.served_model_name == ("mine", "alias") and mine.config.fleet.replicas == 2
    assert (mine.config.model.quantization, mine.config.model.max_model_len) == ("int8", 4096)
    assert {each.config.model.dtype for each in found} == {"float32"}, "what is not their own is common"
    assert found[0].config.model.quantization == "auto" and found[0].config.fleet.replicas is None


def test_without_words_the_common_model_is_served() -> None:
    [only] = served_models(load_config({"model": "smollm2", "served_model_name": ["x", "y"]}), ())
    assert only.name == "x" and only.config.model.served_model_name == ("x", "y")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2", "smollm2"),
        ("owner/name:Q4_K_M", "owner/name:Q4_K_M"),
        ("/models/one.gguf", "one"),
        ("models/of/mine", "mine"),
        ("scripted:/a/b.yaml", "b"),
    ],
)
def test_a_model_without_a_name_has_its_words_or_its_paths(model: str, name: str) -> None:
    assert model_name(model) == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: [a, {model: b, name: a}]", "two models have the name 'a'"),
        ("models: [{model: a, port: 3}]", "model 1: port is a setting of the whole server"),
        ("models: [a, {model: b, quantisation: int8}]", "model 2: unknown setting 'quantisation'; did you mean"),
        ("models: [{model: a, quantization: int9}]", "quantization 'int9'; did you mean"),
        ("models: [{name: a}]", "model 1 has no 'model'"),
        ("models: [{model: a, replicas: -1}]", "replicas is -1; give a whole number from 0 to 1024"),
        ("models: [{model: a, name: 3}]", "name is 3; give a text"),
        ("models: 3", "has no list of models"),
        ("other: 3", "has no list of models"),
    ],
)
def test_mistakes_name_the_place_and_the_remedy(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        served_models(load_config(_file(tmp_path, text)), ())
    assert message in str(caught.value)


def test_settings_of_one_model_are_refused_with_several() -> None:
    with pytest.raises(ConfigError, match="--served-model-name names one model"):
        served_models(load_config({"served_model_name": ["x"]}), ("a", "b"))
    with pytest.raises(ConfigError, match="--record records one model"):
        served_models(load_config({"record": "/r"}), ("a", "b"))
