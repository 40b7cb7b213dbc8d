"""A native decoder's weights against the tensors that the torch twin loads, for every family and way of packing."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quants

from octavo.artifacts.families import linear_tensors
from octavo.artifacts.family import LINEARS
from octavo.artifacts.model_spec import ModelSpec
from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import ModelFiles, resolve_model
from octavo.errors import ModelFileError
from octavo.models.native_weights import NativeWeights, load_native_weights
from octavo.nn.gguf_blocks import GGUF_TYPES
from octavo.nn.packed_weight import PackedWeight, WeightKind
from octavo.nn.packing import WantedTensor, pack_runs, plan_runs
from octavo.nn.weight_cache import _PREAMBLE, WeightCache
from octavo.nn.weights import Weights, open_weights
from octavo.ops import cpu
from tests.tiny_gguf import make_tiny_gguf, write_out
from tests.tiny_models import FAMILIES, make_tiny_model, tiny_config, tiny_tensors

pytestmark = pytest.mark.skipif(not cpu.status().is_loaded, reason="weights are packed by the C++ library")

MATRICES = tuple(LINEARS)


def open_model(path: Path) -> tuple[ModelFiles, ModelSpec]:
    files = resolve_model(str(path))
    return files, read_model_spec(files)


def load(path: Path, quantization: str, dtype: torch.dtype = torch.float32, **options: WeightCache) -> NativeWeights:
    return load_native_weights(*open_model(path), quantization, dtype, **options)


def stacked(parts: tuple[PackedWeight, ...]) -> torch.Tensor:
    return torch.cat([part.dequantize() for part in parts])


def kinds(parts: tuple[PackedWeight, ...]) -> list[WeightKind]:
    return [part.kind for part in parts]


class Expected:
    """The checkpoint's tensors, as float32."""

    def __init__(self, path: Path) -> None:
        self.files, self.spec = open_model(path)
        self._weights: Weights = open_weights(self.files, self.spec)

    def __getitem__(self, name: str) -> torch.Tensor:
        out = torch.empty(self._weights.shape(name))
        self._weights.read_into(name, out)
        return out

    def matrix(self, layer: int, name: str) -> torch.Tensor:
        return torch.cat([self[f"{tensor}.weight"] for tensor in linear_tensors(self.spec, name, layer)])


def assert_matrices(weights: NativeWeights, expected: Expected, tolerance: float) -> None:
    """Every multiplication is the checkpoint's, up to a share of its largest value."""
    pairs = [(weights.embedding.dequantize(), expected["model.embed_tokens.weight"])]
    if not expected.spec.tie_word_embeddings:
        pairs.append((weights.head.dequantize(), expected["lm_head.weight"]))
    for index, layer in enumerate(weights.layers):
        pairs += [(stacked(getattr(layer, name)), expected.matrix(index, name)) for name in MATRICES]
    assert len(weights.layers) == expected.spec.num_layers
    for found, value in pairs:
        torch.testing.assert_close(found, value, rtol=0, atol=tolerance * float(value.abs().max()))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantization, tolerance", [("none", 0.0), ("int8", 0.005), ("int4", 0.13)])
def test_every_family(family: str, quantization: str, tolerance: float, tmp_path: Path) -> None:
    folder = make_tiny_model(family, tmp_path)
    weights = load(folder, quantization)
    assert_matrices(weights, Expected(folder), tolerance)
    hidden = weights.embedding.inputs
    table = {"none": WeightKind.FLOAT32, "int8": WeightKind.INT8, "int4": WeightKind.INT8}[quantization]
    assert weights.embedding.kind == (table if hidden % 32 == 0 else WeightKind.FLOAT32)
    if hidden % 32 and quantization != "none":
        assert "stay float32" in weights.notes[0]
    else:
        assert weights.notes == ()


def test_what_stays_float_has_the_dtype(tmp_path: Path) -> None:
    folder = make_tiny_model("llama2", tmp_path)
    for dtype, kind in ((torch.bfloat16, WeightKind.BFLOAT16), (torch.float16, WeightKind.FLOAT32)):
        weights = load(folder, "auto", dtype)
        assert kinds(weights.layers[0].qkv) == [kind]
    rounded = load(folder, "none", torch.bfloat16)
    expected = Expected(folder).matrix(1, "down").bfloat16().float()
    assert torch.equal(stacked(rounded.layers[1].down), expected)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("family", ["llama2", "mistral", "qwen2", "qwen3", "gemma3"])
def test_X07_gguf_blocks_are_kept(family: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    make_tiny_gguf(family, path, kind)
    weights = load(path, "auto")
    assert_matrices(weights, Expected(path), 0.0)
    wanted = WeightKind.INT8 if kind == "Q8_0" else WeightKind.INT4
    assert kinds(weights.layers[0].qkv) == [wanted] and weights.embedding.kind == wanted
    assert kinds(load(path, "none").layers[0].qkv) == [WeightKind.FLOAT32]


@pytest.mark.parametrize("kind", [kind for kind in GGUF_TYPES if kind.name not in ("F32", "F16", "BF16")], ids=str)
def test_X07_every_gguf_type_loads(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    """Files of one type, beside another: llama.cpp's K-quant files have other types where rows are short."""
    path, entry = tmp_path / "tiny.gguf", GGUF_TYPES[kind]
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    make_tiny_gguf("qwen2", path, lambda name: "Q8_0" if "down_proj" in name else kind.name, **sizes)
    weights = load(path, "auto")
    assert_matrices(weights, Expected(path), 0.0005 if entry.codes is not None else 0.005)
    layer = weights.layers[0]
    wanted = entry.codes.kind if entry.codes is not None else WeightKind.INT8
    assert kinds(layer.qkv) == [wanted] == kinds(layer.gate_up) and kinds(layer.down) == [WeightKind.INT8]
    if entry.codes is not None:
        assert weights.notes == ()
    else:
        assert f" tensors in {kind.name} become int8, the nearest" in weights.notes[0]
    cache = WeightCache(tmp_path / "cache", min_bytes=0)
    for _ in range(2):  # packed into a file, then mapped
        mapped = load(path, "auto", cache=cache)
        assert mapped.notes == weights.notes
        np.testing.assert_array_equal(mapped.layers[0].qkv[0].buffer, layer.qkv[0].buffer)
    assert kinds(load(path, "none").layers[0].qkv) == [WeightKind.FLOAT32]
    assert kinds(load(path, "int4").layers[0].qkv) == [wanted if wanted >= WeightKind.INT4 else WeightKind.INT4]


@pytest.mark.parametrize("kind, quantization, expected", [
    ("Q4_1", "int8", WeightKind.INT4),  # codes are never made of finer ones
    ("Q8_0", "int8", WeightKind.INT8),
    ("Q8_0", "int4", WeightKind.INT4),
    ("F16", "int4", WeightKind.INT4),
    ("F16", "auto", WeightKind.FLOAT32),
])  # fmt: skip
def test_files_with_more_bits_are_shortened(kind: str, quantization: str, expected: WeightKind, tmp_path: Path) -> None:
    make_tiny_gguf("llama2", tmp_path / "tiny.gguf", kind)
    weights = load(tmp_path / "tiny.gguf", quantization)
    assert kinds(weights.layers[1].gate_up) == [expected]
    assert_matrices(weights, Expected(tmp_path / "tiny.gguf"), 0.13 if expected == WeightKind.INT4 else 0.0)


def test_parts_of_different_types_are_runs_of_rows(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    types = {"q_proj": "Q4_0", "k_proj": "Q4_1", "v_proj": "Q8_0", "up_proj": "F16"}
    make_tiny_gguf("qwen2", path, lambda name: types.get(name.split(".")[-2], "Q8_0"))
    weights = load(path, "auto")
    layer = weights.layers[0]
    assert kinds(layer.qkv) == [WeightKind.INT4, WeightKind.INT8]
    assert [part.outputs for part in layer.qkv] == [64 + 32, 32]
    assert kinds(layer.gate_up) == [WeightKind.INT8, WeightKind.FLOAT32]
    assert_matrices(weights, Expected(path), 0.0)
    biases = [part.bias for part in layer.qkv]
    expected = torch.cat([Expected(path)[f"model.layers.0.self_attn.{part}_proj.bias"] for part in "qkv"])
    np.testing.assert_array_equal(np.concatenate([bias for bias in biases if bias is not None]), expected.numpy())
    assert layer.output[0].bias is None


def test_a_weight_that_has_no_codes_stays_float(tmp_path: Path) -> None:
    tensors = tiny_tensors(tiny_config("llama2"), 0, torch.float32)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][0, 0] = 1e6
    make_tiny_gguf("llama2", tmp_path / "tiny.gguf", lambda name: "F32", tensors=tensors)
    for cache in (None, WeightCache(tmp_path / "cache", min_bytes=0)):
        weights = load_native_weights(*open_model(tmp_path / "tiny.gguf"), "int4", torch.float32, cache)
        assert kinds(weights.layers[0].down) == [WeightKind.INT4]
        assert kinds(weights.layers[1].down) == [WeightKind.FLOAT32]
        assert torch.equal(stacked(weights.layers[1].down), tensors[name])
        assert "1 of 10 weights stay float32, layers.1.down" in weights.notes[0]


def test_norms_have_the_offset(tmp_path: Path) -> None:
    folder = make_tiny_model("gemma3", tmp_path)
    weights, expected = load(folder, "none", torch.bfloat16), Expected(folder)
    layer, prefix = weights.layers[2], "model.layers.2."
    names = {
        "attention_norm": "input_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "after_attention": "post_attention_layernorm",
        "after_mlp": "post_feedforward_layernorm",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
    }
    for name, tensor in names.items():
        found = layer.vectors[name]
        assert found.dtype == np.float32 and found.flags.c_contiguous
        np.testing.assert_array_equal(found, (expected[f"{prefix}{tensor}.weight"] + 1.0).numpy())
    np.testing.assert_array_equal(weights.vectors["final_norm"], (expected["model.norm.weight"] + 1.0).numpy())


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    tied, untied = (load(make_tiny_model(family, tmp_path / family), "int8") for family in ("qwen2", "llama2"))
    assert tied.head is tied.embedding and untied.head is not untied.embedding
    parts = [part for layer in tied.layers for name in MATRICES for part in getattr(layer, name)]
    assert tied.nbytes == tied.embedding.nbytes + sum(part.nbytes for part in parts)


def test_rope_factors_are_read(tmp_path: Path) -> None:
    factors = np.linspace(1, 2, 8, dtype=np.float32)
    make_tiny_gguf("llama3", tmp_path / "tiny.gguf", "Q8_0", extra={"rope_freqs.weight": factors})
    found = load(tmp_path / "tiny.gguf", "auto").vectors["rope_factors"]
    assert found is not None
    np.testing.assert_array_equal(found, factors)


def equal(first: NativeWeights, second: NativeWeights) -> bool:
    def bits(weights: NativeWeights) -> list[bytes]:
        vectors = [*weights.vectors.values()]
        matrices = [weights.embedding, weights.head]
        for layer in weights.layers:
            matrices += [*layer.qkv, *layer.output, *layer.gate_up, *layer.down]
            vectors += layer.vectors.values()
        vectors += [part.bias for part in matrices]
        return [b"" if array is None else array.tobytes() for array in (*vectors, *(m.buffer for m in matrices))]

    return bits(first) == bits(second)


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_mapped_weights_are_the_packed_ones(family: str, quantization: str, tmp_path: Path) -> None:
    folder = make_tiny_model(family, tmp_path / "model")
    fresh = load(folder, quantization)
    written = []
    for _ in ("packed", "mapped"):
        weights = load(folder, quantization, cache=WeightCache(tmp_path / "cache", min_bytes=0))
        assert equal(weights, fresh) and weights.notes == fresh.notes
        written.append([path.stat().st_ino for path in (tmp_path / "cache").iterdir()])
        assert (weights.head is weights.embedding) == (fresh.head is fresh.embedding)
    assert len(written[0]) == 1 and written[0] == written[1]


def test_every_way_of_packing_has_its_file(tmp_path: Path) -> None:
    cache, folder = WeightCache(tmp_path / "cache", min_bytes=0), make_tiny_model("qwen2", tmp_path / "model")
    for quantization in ("none", "int8", "int4"):
        for dtype in (torch.float32, torch.bfloat16):
            load(folder, quantization, dtype, cache=cache)
    assert len(list(cache.folder.iterdir())) == 6 and cache.notes == []


def test_without_a_place_for_the_file_weights_stay_in_memory(tmp_path: Path) -> None:
    folder = make_tiny_model("qwen2", tmp_path / "model")
    weights = load(folder, "int8", cache=WeightCache(folder / "config.json", min_bytes=0))
    assert equal(weights, load(folder, "int8"))
    assert "weights are not cached" in weights.notes[-1]


@pytest.mark.parametrize("count", [1, 2])
def test_a_disk_that_fills_leaves_the_weights_in_memory(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model("qwen2", tmp_path / "model")
    fresh = load(folder, "int8")
    write, written = os.pwrite, []

    def fail_later(descriptor: int, data: memoryview, offset: int) -> int:
        written.append(offset)
        if len(written) > count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", fail_later)
    torch.set_num_threads(2)
    weights = load(folder, "int8", cache=WeightCache(tmp_path / "cache", min_bytes=0))
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    assert equal(weights, fresh)
    assert "No space left" in weights.notes[-1]
    assert list((tmp_path / "cache").iterdir()) == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("octavo-pack")]


_STARTER = """
import sys
import torch
from pathlib import Path
from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import resolve_model
from octavo.models.native_weights import load_native_weights
from octavo.nn.weight_cache import WeightCache
files = resolve_model(sys.argv[1])
cache = WeightCache(Path(sys.argv[2]), min_bytes=0)
print("ready", flush=True)
sys.stdin.readline()
weights = load_native_weights(files, read_model_spec(files), "int4", torch.float32, cache)
print(weights.layers[1].down[0].buffer.tobytes().hex(), cache.notes)
"""


def test_processes_that_start_at_once_agree(tmp_path: Path) -> None:
    folder = make_tiny_model("qwen2", tmp_path / "model")
    arguments = [sys.executable, "-c", _STARTER, str(folder), str(tmp_path / "cache")]
    started = [subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for process in started:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=60)[0] for process in started]
    expected = load(folder, "int4").layers[1].down[0].buffer.tobytes().hex()
    assert outputs == [f"{expected} []\n"] * 3
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    tensors = tiny_tensors(tiny_config("llama2"), 0, torch.float32)
    gone = {name: tensor for name, tensor in tensors.items() if "layers.1.mlp.down_proj" not in name}
    make_tiny_gguf("llama2", tmp_path / "gone.gguf", "Q4_0", tensors=gone)
    with pytest.raises(ModelFileError, match=r"layers\.1\.mlp\.down_proj\.weight.*missing"):
        load(tmp_path / "gone.gguf", "auto")
    make_tiny_gguf("llama2", tmp_path / "more.gguf", "Q4_0", extra={"blk.0.attn_sinks.weight": np.zeros(4, np.float32)})
    with pytest.raises(ModelFileError, match=r"attn_sinks.*not a part"):
        load(tmp_path / "more.gguf", "auto")
    files, spec = open_model(tmp_path / "more.gguf")
    with pytest.raises(ModelFileError, match=r"has shape \[300, 64\], the configuration needs \[301, 64\]"):
        load_native_weights(files, replace(spec, vocab_size=301), "auto", torch.float32)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"])
def test_more_rows_than_one_piece(kind: str, tmp_path: Path) -> None:
    """Random blocks of 2,100 rows, converted by two threads in pieces, against the gguf package on the whole."""
    qtype, rows, columns = GGMLQuantizationType[kind], 2100, 512
    block, block_bytes = GGML_QUANT_SIZES[qtype]
    raw = np.random.default_rng(0).integers(0, 256, (rows, columns // block, block_bytes), dtype=np.uint8)
    for start in {"Q4_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,)}.get(kind, (0,)):
        raw[..., start + 1] = raw[..., start + 1] & 0x81 | 0x20  # float16 between 2 ** -7 and 2 ** -5
    raw = raw.reshape(rows, -1)
    writer = GGUFWriter(tmp_path / "blocks.gguf", "qwen2")
    writer.add_tensor("blk.0.ffn_up.weight", raw, raw_dtype=qtype)
    write_out(writer)
    spec = read_model_spec(resolve_model(str(make_tiny_model("qwen2", tmp_path / "folder"))))
    weights = open_weights(ModelFiles("x", "gguf", tmp_path, (tmp_path / "blocks.gguf",)), spec)
    name = "model.layers.0.mlp.up_proj.weight"
    expected = torch.from_numpy(np.array(quants.dequantize(raw, qtype)))
    for quantization, tolerance in (("auto", 2e-3 if kind.endswith("K") else 0.0), ("none", 0.0)):
        runs = plan_runs(weights, {name: rows}, columns, WantedTensor(quantization, WeightKind.FLOAT32))
        (buffer,) = pack_runs(weights, runs, 2)
        found = PackedWeight(runs[0].shape, buffer).dequantize()
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * float(expected.abs().max()))


def rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    """Give a cache file another header, with a checksum that is right."""
    data = path.read_bytes()
    magic, length, _ = _PREAMBLE.unpack(data[: _PREAMBLE.size])
    text = json.dumps(change(json.loads(data[_PREAMBLE.size : _PREAMBLE.size + length]))).encode()
    new = _PREAMBLE.pack(magic, len(text), zlib.crc32(text)) + text
    path.write_bytes(new + data[len(new) :])


NASTY = (None, True, 0, -1, 1, 2, 3, 7, 16, 32, 64, 1 << 40, 10**30, 1.5, 1e999, "", "x", [], [[]], {}, {"x": 1})


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a header."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def mutated(header: Any, rng: random.Random) -> Any:
    """Put something else into one place of a header, leave one out, or exchange two."""
    keys = rng.choice([path for path in places(header) if path])
    parent = reduce(lambda value, key: value[key], keys[:-1], header)
    kind = rng.randrange(3)
    if kind == 0:
        del parent[keys[-1]]
    elif kind == 1:
        parent[keys[-1]] = rng.choice(NASTY)
    else:
        other = rng.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        parent[keys[-1]], parent[other] = parent[other], parent[keys[-1]]
    return header


@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        ("qwen2", "int4"),
        pytest.param("gemma3", "none", marks=pytest.mark.slow),
        pytest.param("qwen3", "int8", marks=pytest.mark.slow),
    ],
)
def test_a_header_of_anything_gives_the_weights_or_makes_them_again(
    family: str, quantization: str, tmp_path: Path
) -> None:
    folder, rng = make_tiny_model(family, tmp_path / "model"), random.Random(13)
    fresh = load(folder, quantization, cache=WeightCache(tmp_path / "cache", min_bytes=0))
    (path,) = (tmp_path / "cache").iterdir()
    whole, num_made = path.read_bytes(), 0
    for _ in range(150):
        path.write_bytes(whole)
        rewrite(path, lambda header: mutated(header, rng))
        cache = WeightCache(tmp_path / "cache", min_bytes=0)
        weights = load(folder, quantization, cache=cache)
        assert equal(weights, fresh)
        assert len(cache.notes) <= 1 and all("packed again" in note for note in cache.notes)
        num_made += len(cache.notes)
    assert num_made > 50, "headers that do not fit are told"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda about: about.update(shapes={}), "lists other weights"),
        (lambda about: about["vectors"].pop(), "lists other weights"),
        (lambda about: about["shapes"].update(embedding=[[0, 1, 64, 0]]), "section embedding.0"),
        (lambda about: about["shapes"].update(embedding=[[9, 300, 64, 0]]), "wrong shape for embedding"),
        (lambda about: about["shapes"].update(embedding=[[2, 300, 64, 0]]), "wrong shape for embedding"),
        (lambda about: about["shapes"].update(embedding=None), "0 rows for embedding"),
    ],
)
def test_a_wrong_header_is_one_note(change: Callable[[Any], object], words: str, tmp_path: Path) -> None:
    folder = make_tiny_model("llama3", tmp_path / "model")
    fresh = load(folder, "none", cache=WeightCache(tmp_path / "cache", min_bytes=0))
    (path,) = (tmp_path / "cache").iterdir()
    rewrite(path, lambda header: (change(header["about"]), header)[1])
    weights = load(folder, "none", cache=WeightCache(tmp_path / "cache", min_bytes=0))
    assert equal(weights, fresh) and len(weights.notes) == len(fresh.notes) + 1 and words in weights.notes[-1]
    again = load(folder, "none", cache=WeightCache(tmp_path / "cache", min_bytes=0))
    assert equal(again, fresh) and again.notes == fresh.notes
