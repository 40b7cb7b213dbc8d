"""Files that the transformers decoder refuses: settings that the library rejects, and weights that the files lack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.artifacts.fingerprint import model_fingerprint
from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import resolve_model
from octavo.config import ExecutionConfig, ModelConfig
from octavo.errors import ModelFileError
from octavo.executors.loading import DecoderChoice
from tests.models.zoo_checks import random_model
from tests.models.zoo_transformers import TRANSFORMERS

GPT2 = next(row for row in TRANSFORMERS if row.model_type == "gpt2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random_model(GPT2, 0).save_pretrained(tmp_path)
    return tmp_path


def change(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def load(folder: Path) -> None:
    files = resolve_model(str(folder))
    DecoderChoice(files, read_model_spec(files), ExecutionConfig(threads=1), ModelConfig()).load(None)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"n_inner": 1 << 30}, r"describes \d+ weights, but the files have \d+"),
        ({"vocab_size": 1 << 24}, r"describes \d+ weights, but the files have \d+"),
        ({"n_layer": 1 << 20}, r"has 1048576 layers, but the files have \d+ tensors"),
        ({"use_cache": "yes"}, "the model cannot run through transformers: .*'use_cache'"),
        ({"activation_function": "no such"}, "the model cannot run through transformers: KeyError"),
        ({"n_head": 3, "num_key_value_heads": None}, "the model cannot run through transformers: "),
    ],
)
def test_X01_settings_that_do_not_fit_are_refused_in_one_line(
    folder: Path, settings: dict[str, Any], reason: str
) -> None:
    change(folder, **settings)
    with pytest.raises(ModelFileError, match=reason) as refused:
        load(folder)
    assert "\n" not in str(refused.value) and refused.value.path == str(folder / "config.json")


def test_any_setting_of_the_library_changes_the_fingerprint(folder: Path) -> None:
    files = resolve_model(str(folder))
    before = model_fingerprint(files)
    change(folder, scale_attn_by_inverse_layer_idx=True)
    assert model_fingerprint(files) != before
