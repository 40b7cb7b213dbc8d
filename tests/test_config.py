"""Settings: precedence, origins, every type's reading, and errors that name setting, value and remedy."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from octavo.config import SETTINGS, Config
from octavo.config.sources import load, resolve
from octavo.errors import ConfigError
from tests.settings import load_config


def test_defaults_are_the_dataclasses() -> None:
    assert load_config({}) == Config()


def test_every_field_is_one_setting_with_its_own_spellings() -> None:
    parts = [getattr(Config(), part.name) for part in dataclasses.fields(Config)]
    assert [s.name for s in SETTINGS] == [f.name for part in parts for f in dataclasses.fields(part)]
    flags = [flag for s in SETTINGS for flag in s.flags]
    keys = [key for s in SETTINGS for key in s.keys]
    assert len(flags) == len(set(flags))
    assert len(keys) == len(set(keys))
    assert all(s.help and s.flags[0].startswith("--") for s in SETTINGS)


def test_each_part_has_at_most_twelve_fields() -> None:
    assert all(len(dataclasses.fields(getattr(Config(), part.name))) <= 12 for part in dataclasses.fields(Config))


def test_precedence_is_flag_environment_file_default(tmp_path) -> None:
    path = tmp_path / "octavo.yaml"
    path.write_text("max-num-seqs: 3\nmax_model_len: 300\nthreads: 3\n")
    environ = {"OCTAVO_MAX_NUM_SEQS": "2", "OCTAVO_MAX_MODEL_LEN": "200"}
    resolved = load({"max_sequences": "1"}, environ, path)
    config = resolved.config
    assert (config.scheduling.max_sequences, config.model.max_model_len, config.execution.threads) == (1, 200, 3)
    assert config.serving.port == 8000
    assert resolved.origins["max_sequences"] == "--max-num-seqs"
    assert resolved.origins["max_model_len"] == "OCTAVO_MAX_MODEL_LEN"
    assert resolved.origins["threads"] == f"{path}: threads"
    assert resolved.origins["port"] == "default"


def test_environment_names_the_file(tmp_path) -> None:
    path = tmp_path / "octavo.toml"
    path.write_text('port = 9000\n[scheduling]\nmax-num-seqs = 4\n[model]\ndtype = "bf16"\n')
    config = load({}, {"OCTAVO_CONFIG": str(path)}, None).config
    assert (config.serving.port, config.scheduling.max_sequences, config.model.dtype) == (9000, 4, "bfloat16")


def test_model_is_a_setting_and_a_section(tmp_path) -> None:
    path = tmp_path / "octavo.yaml"
    path.write_text("model: tiny.gguf\n")
    assert load_config({}, {}, path).model.model == "tiny.gguf"
    path.write_text("model:\n  model: other.gguf\n")
    assert load_config({}, {}, path).model.model == "other.gguf"


@pytest.mark.parametrize(
    ("text", "value"),
    [("32K", 32768), ("32k", 32000), ("1.5K", 1536), ("2Ki", 2048), ("2KiB", 2048), ("4M", 4 * 2**20), ("1_000", 1000),
     ("1e3", 1000), (77, 77), ("auto", None), (None, None)],
)  # fmt: skip
def test_numbers(text, value) -> None:
    assert load_config({"max_model_len": text}).model.max_model_len == value


def test_large_numbers_are_exact() -> None:
    assert load_config({"seed": str(2**63 + 1)}).execution.seed == 2**63 + 1


@pytest.mark.parametrize("text", ["0", "-4", "12x", "K", "1.0001K", "nan", "", True, "32 Q", [1]])
def test_bad_numbers_name_setting_value_and_remedy(text) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"max_model_len": text})
    assert f"--max-model-len is {text!r}; give a whole number of at least 1 (32K is 32768" in str(caught.value)


def test_range_of_fractions() -> None:
    assert load_config({"memory_fraction": "0.5"}).cache.memory_fraction == 0.5
    with pytest.raises(ConfigError, match=r"--gpu-memory-utilization is '1.5'; give a number from 0.01 to 1.0"):
        load_config({"memory_fraction": "1.5"})


@pytest.mark.parametrize(("word", "value"), [("1", True), ("on", True), ("False", False), ("no", False), (True, True)])
def test_booleans(word, value) -> None:
    assert load_config({"insecure": word}).serving.insecure is value


def test_bad_boolean_names_the_variable() -> None:
    with pytest.raises(ConfigError, match="OCTAVO_INSECURE is 'maybe'; give true or false"):
        load_config({}, {"OCTAVO_INSECURE": "maybe"})


def test_choices_know_synonyms_and_near_names() -> None:
    assert load_config({"dtype": "BF16"}).model.dtype == "bfloat16"
    with pytest.raises(ConfigError, match=r"unknown --dtype 'floaf32'; did you mean 'float32'"):
        load_config({"dtype": "floaf32"})


def test_unknown_key_gives_near_names(tmp_path) -> None:
    path = tmp_path / "octavo.yaml"
    path.write_text("max-num-seq: 3\n")
    with pytest.raises(ConfigError, match="unknown setting 'max-num-seq'; did you mean 'max-num-seqs'"):
        load_config({}, {}, path)


def test_unknown_variable_is_remarked_only_when_near_a_setting() -> None:
    resolved = resolve({}, {"OCTAVO_MAX_NUM_SEQ": "3", "OCTAVO_ZZZ": "1"}, {})
    assert len(resolved.remarks) == 1
    assert "unknown variable 'OCTAVO_MAX_NUM_SEQ' has no effect; did you mean" in resolved.remarks[0]
    assert "OCTAVO_MAX_NUM_SEQS" in resolved.remarks[0]


def test_two_spellings_of_one_setting_are_refused(tmp_path) -> None:
    path = tmp_path / "octavo.yaml"
    path.write_text("max-num-seqs: 3\nparallel: 4\n")
    with pytest.raises(ConfigError, match="are one setting; give one of them"):
        load_config({}, {}, path)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.yaml", "a: [", "is not well formed"),
        ("a.toml", "a =", "is not well formed"),
        ("a.yaml", "- 1", "is not a list of settings"),
    ],
)
def test_bad_files_are_named(tmp_path, name, text, reason) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason) as caught:
        load_config({}, {}, path)
    assert str(path) in str(caught.value)


def test_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match="config file not found"):
        load_config({}, {}, tmp_path / "none.yaml")


def test_empty_file_is_no_settings(tmp_path) -> None:
    path = tmp_path / "octavo.yaml"
    path.write_text("# nothing\n")
    assert load_config({}, {}, path) == Config()


def test_keys_come_as_list_or_commas_and_stay_secret() -> None:
    assert load_config({"api_key": ["a", "b"]}).serving.api_key == ("a", "b")
    assert load_config({}, {"OCTAVO_API_KEY": "a, b"}).serving.api_key == ("a", "b")
    with pytest.raises(ConfigError) as caught:
        load_config({"api_key": ["hunter2", 3]})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("value", ["", " ", "\t", "a,,b", "a, ,b", "a,"])
def test_a_blank_key_is_refused_wherever_it_comes_from(value: str, tmp_path: Path) -> None:
    path = tmp_path / "octavo.yaml"
    path.write_text(f"api-key: {json.dumps(value)}\n")
    with pytest.raises(ConfigError, match="OCTAVO_API_KEY is empty; give a key, or leave it out"):
        load_config({}, {"OCTAVO_API_KEY": value})
    with pytest.raises(ConfigError, match=r"octavo.yaml: api-key is empty"):
        load_config({}, {}, path)
    if "," not in value:
        for given in ([value], ["sk-a", value]):
            with pytest.raises(ConfigError, match="--api-key is empty"):
                load_config({"api_key": given})


def test_two_pool_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_blocks and kv_cache_tokens are both set"):
        load_config({"num_blocks": "4", "kv_cache_tokens": "64"})
