"""Fingerprints: equal for copies of a model, and another one for each file or setting that changes ids."""

import shutil
from pathlib import Path
from typing import Any

from tests.tiny_gguf import make_tiny_gguf
from tests.tiny_models import make_tiny_model

from octavo.artifacts.fingerprint import WHOLE_BYTES, _sample, model_fingerprint, tokenizer_fingerprint
from octavo.artifacts.resolve import resolve_model
from octavo.assembly import open_engine
from octavo.config.sources import config_from_keywords
from octavo.executors.protocol import Fingerprint


def of(path: Path) -> tuple[str, str]:
    files = resolve_model(str(path))
    return model_fingerprint(files), tokenizer_fingerprint(files)


def test_copies_are_equal_and_one_byte_of_weights_or_tokenizer_is_not(tmp_path: Path) -> None:
    first = make_tiny_model("smollm2", tmp_path / "first")
    other = tmp_path / "other"
    shutil.copytree(first, other)
    assert of(first) == of(other)
    weights = other / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    assert of(first)[0] != of(other)[0] and of(first)[1] == of(other)[1]
    shutil.copytree(first, tmp_path / "third")
    tokenizer = tmp_path / "third" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    assert of(first)[0] == of(tmp_path / "third")[0] and of(first)[1] != of(tmp_path / "third")[1]


def test_a_gguf_file_has_a_tokenizer_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "one.gguf"
    make_tiny_gguf("llama2", path, "Q4_1")
    model, tokenizer = of(path)
    assert model != tokenizer and of(path) == (model, tokenizer)


def test_large_files_are_sampled_over_their_whole_length(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(4 * WHOLE_BYTES))
    before = list(_sample(path))
    assert sum(map(len, before)) < 3 * WHOLE_BYTES
    for at in (0, 2 * WHOLE_BYTES, 4 * WHOLE_BYTES - 1):
        data = bytearray(4 * WHOLE_BYTES)
        data[at] = 1
        path.write_bytes(data)
        assert list(_sample(path)) != before, at


def opened(model: Path | str, **keywords: Any) -> Fingerprint:
    config = config_from_keywords(str(model), {"kv_cache_tokens": 256, "weight_cache_bytes": 0, **keywords})
    loop, capacity = open_engine(config, is_own_process=True)
    loop.stop()
    return capacity.fingerprint


def test_an_opened_engine_has_one_that_depends_on_its_numerics(tmp_path: Path) -> None:
    path = make_tiny_model("smollm2", tmp_path / "model")
    first = opened(path, dtype="float32")
    assert first == opened(path, dtype="float32") and all((first.model, first.tokenizer, first.numerics))
    assert first.differences(opened(path, dtype="bfloat16")) == ["numerics"]
    assert first.differences(opened(path, dtype="float32", kv_cache_dtype="bfloat16")) == ["numerics"]


def test_a_scripted_model_has_one_too(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"rules": [{"say": "yes"}]}')
    first = opened(f"scripted:{path}")
    path.write_text('{"rules": [{"say": "no!"}]}')
    assert first.differences(opened(f"scripted:{path}")) == ["model"]
