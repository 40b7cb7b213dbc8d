"""Importance matrices: both formats, other models' files, and what they change in 4-bit codes."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter

from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import resolve_model
from octavo.config import ExecutionConfig, ModelConfig
from octavo.errors import ConfigError, ModelFileError
from octavo.executors.loading import DecoderChoice
from octavo.models.native_weights import load_native_weights
from octavo.nn.packed_weight import WeightKind
from octavo.nn.packing import codes_of_floats
from octavo.nn.weight_cache import WeightCache
from octavo.nn.weights import ReadOptions, TensorWindow, open_weights
from tests.models.test_native_decoder import Probe
from tests.tiny_gguf import write_out
from tests.tiny_models import make_tiny_model

Entries = Mapping[str, np.ndarray]
Writer = Callable[[Path, Entries], Path]


def write_dat(path: Path, entries: Entries, num_calls: int = 4) -> Path:
    """llama.cpp's older format: sums over calls of the mean squares."""
    parts = [struct.pack("<i", len(entries))]
    for name, values in entries.items():
        encoded = name.encode()
        parts += [struct.pack("<i", len(encoded)), encoded, struct.pack("<ii", num_calls, values.size)]
        parts.append((values * num_calls).astype("<f4").tobytes())
    path.write_bytes(b"".join(parts) + struct.pack("<ii", num_calls, 8) + b"text.txt")
    return path


def write_gguf(path: Path, entries: Entries, num_tokens: int = 512) -> Path:
    """llama.cpp's GGUF format: sums of squares over tokens, and the number of tokens."""
    writer = GGUFWriter(path, "none")
    writer.add_type("imatrix")
    for name, values in entries.items():
        writer.add_tensor(f"{name}.in_sum2", (values * num_tokens).astype(np.float32)[None])
        writer.add_tensor(f"{name}.counts", np.array([[num_tokens]], np.float32))
    write_out(writer)
    return path


def skewed(size: int, seed: int = 0) -> np.ndarray:
    return np.exp(np.random.default_rng(seed).normal(0, 2, size)).astype(np.float32)


ENTRIES = {"blk.0.attn_q.weight": skewed(64), "blk.1.ffn_down.weight": skewed(96, 1)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model("llama2", tmp_path / "model")


@pytest.mark.parametrize("write", [write_dat, write_gguf])
def test_both_formats_give_canonical_names(write: Writer, folder: Path, tmp_path: Path) -> None:
    files = resolve_model(str(folder))
    options = ReadOptions(write(tmp_path / "imatrix", ENTRIES))
    weights = open_weights(files, read_model_spec(files), options)
    query = "model.layers.0.self_attn.q_proj.weight"
    for name, expected in zip((query, "model.layers.1.mlp.down_proj.weight"), ENTRIES.values(), strict=True):
        found = weights.importance(name)
        assert found is not None
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert weights.importance("model.layers.0.mlp.down_proj.weight") is None
    window = TensorWindow(query, range(3), range(32, 64))
    cut = weights.windows([window]).importance(window.key)
    assert cut is not None
    np.testing.assert_allclose(cut, ENTRIES["blk.0.attn_q.weight"][32:], rtol=1e-6)


@pytest.mark.parametrize("tails", [0.0, 40.0])
def test_the_weighted_error_falls(tails: float) -> None:
    values = torch.randn(64, 1024, generator=torch.Generator().manual_seed(4)) * 0.03
    values = (values * (1 + tails * values.abs())).numpy()
    importance = skewed(1024)

    def errors(importance_E: np.ndarray | None) -> tuple[float, float]:
        codes = codes_of_floats(values, WeightKind.INT4, importance_E)
        assert codes is not None
        squares = (codes.dequantize().numpy() - values) ** 2
        return float((squares * importance).sum()), float(squares.sum())

    plain, weighted = errors(None), errors(importance)
    assert weighted[0] < 0.8 * plain[0] and weighted[1] > plain[1]
    assert errors(np.ones(1024, np.float32))[1] == pytest.approx(plain[1], rel=2e-3)
    assert np.isfinite(errors(np.zeros(1024, np.float32))).all()
    rare = np.zeros(1024, np.float32)
    rare[::64] = 1.0
    assert np.isfinite(errors(rare)).all()


def test_a_model_loses_less_where_its_inputs_are_used(folder: Path, tmp_path: Path) -> None:
    path = write_dat(tmp_path / "imatrix.dat", ENTRIES)
    probe, plain = (
        Probe(folder, "native", quantization="int4", imatrix=str(path)),
        Probe(folder, "native", quantization="int4"),
    )
    assert probe.decoder is not None and plain.decoder is not None
    files = resolve_model(str(folder))
    weights = open_weights(files, read_model_spec(files))
    expected = torch.empty(64, 96)
    weights.read_into("model.layers.1.mlp.down_proj.weight", expected)
    importance = torch.from_numpy(ENTRIES["blk.1.ffn_down.weight"])
    sums = []
    for decoder in (probe.decoder, plain.decoder):
        (down,) = decoder._weights.layers[1].down
        sums.append(float(((down.dequantize() - expected) ** 2 * importance).sum()))
    assert sums[0] < 0.9 * sums[1]
    (first,), (other,) = probe.decoder._weights.layers[0].down, plain.decoder._weights.layers[0].down
    assert torch.equal(first.dequantize(), other.dequantize())  # the file has no importances for it


def test_the_file_is_part_of_the_cache_key(folder: Path, tmp_path: Path) -> None:
    files = resolve_model(str(folder))
    cache = WeightCache(tmp_path / "cache", min_bytes=0)
    path = tmp_path / "imatrix.dat"
    found = []
    for scale in (None, 1, 2):
        options = None if scale is None else ReadOptions(write_dat(path, {"blk.1.ffn_down.weight": skewed(96, scale)}))
        weights = load_native_weights(files, read_model_spec(files), "int4", torch.float32, cache, options)
        found.append(weights.layers[1].down[0].dequantize())
    assert not any(torch.equal(*pair) for pair in ((found[0], found[1]), (found[1], found[2]), (found[0], found[2])))


@pytest.mark.parametrize("write", [write_dat, write_gguf])
@pytest.mark.parametrize(
    "entries, message",
    [
        (
            {"blk.7.attn_q.weight": skewed(64)},
            "'blk.7.attn_q.weight': is of another model: this one has no such tensor",
        ),
        (
            {"blk.0.attn_q.weight": skewed(96)},
            "has 96 importances, this model's matrix 64 inputs: the file is of another",
        ),
        ({"blk.0.attn_q.weight": np.full(64, np.nan)}, "has importances that are negative or not finite"),
    ],
)
def test_another_models_file_is_refused(
    write: Writer, entries: Entries, message: str, folder: Path, tmp_path: Path
) -> None:
    files = resolve_model(str(folder))
    path = write(tmp_path / "imatrix", entries)
    with pytest.raises(ModelFileError, match=message) as error:
        open_weights(files, read_model_spec(files), ReadOptions(path))
    assert error.value.path == str(path)


@pytest.mark.parametrize("data, message", [
    (b"", "ends within the number of entries"),
    (struct.pack("<i", -3), "number of entries is -3"),
    (struct.pack("<ii", 1, 1 << 20), "length of a name is 1048576"),
    (struct.pack("<ii", 1, 3) + b"abc" + struct.pack("<ii", 1, 100), "number of values is 100"),
    (struct.pack("<ii", 1, 3) + b"abc" + struct.pack("<ii", 1, 3) + b"1234", "ends within the importances"),
    (struct.pack("<i", 0), "has no importances"),
])  # fmt: skip
def test_a_damaged_file_is_refused(data: bytes, message: str, folder: Path, tmp_path: Path) -> None:
    files = resolve_model(str(folder))
    (tmp_path / "imatrix.dat").write_bytes(data)
    with pytest.raises(ModelFileError, match=message):
        open_weights(files, read_model_spec(files), ReadOptions(tmp_path / "imatrix.dat"))


def test_a_model_is_no_importance_matrix(folder: Path, tmp_path: Path) -> None:
    files = resolve_model(str(folder))
    with pytest.raises(ModelFileError, match="cannot be read"):
        open_weights(files, read_model_spec(files), ReadOptions(tmp_path / "missing"))
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_type("model")
    write_out(writer)
    with pytest.raises(ModelFileError, match=r"general\.type is 'model'; 'imatrix' is needed"):
        open_weights(files, read_model_spec(files), ReadOptions(tmp_path / "model.gguf"))


def test_it_is_only_for_4_bit_codes(folder: Path) -> None:
    files = resolve_model(str(folder))
    for quantization in ("auto", "none", "int8"):
        model = ModelConfig(model=str(folder), quantization=quantization, imatrix="imatrix.dat")
        with pytest.raises(ConfigError, match="give --quantization int4, or leave --imatrix out"):
            DecoderChoice(files, read_model_spec(files), ExecutionConfig(), model)
