"""Windows of tensors: the same values and codes as the whole tensor's, and nothing else of a file is read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import resolve_model
from octavo.models.shard_loader import ShardLoader
from octavo.models.shards import ModelShard
from octavo.nn.gguf_blocks import GGUF_TYPES, RawMatrix
from octavo.nn.parallel import Parallel, ShardSpec
from octavo.nn.weights import SafetensorsWeights, TensorWindow, Weights, open_weights
from tests.tiny_gguf import make_tiny_gguf, random_blocks
from tests.tiny_models import make_tiny_model

NAME = "model.layers.1.self_attn.k_proj.weight"
WINDOWS = [(range(64), None), (range(32, 64), None), (range(16, 40), range(64)), (range(8, 56), range(32, 96)),
           (range(0, 16), range(5, 7))]  # fmt: skip


def open_folder(path: Path) -> Weights:
    files = resolve_model(str(path))
    return open_weights(files, read_model_spec(files))


def read(weights: Weights, name: str) -> torch.Tensor:
    out = torch.empty(weights.shape(name))
    weights.read_into(name, out)
    return out


def check_windows(weights: Weights) -> None:
    whole = read(weights, NAME)
    windows = [TensorWindow(NAME, rows, columns) for rows, columns in WINDOWS]
    view = weights.windows(windows)
    for window in windows:
        columns = slice(None) if window.columns is None else slice(window.columns.start, window.columns.stop)
        expected = whole[window.rows.start : window.rows.stop, columns]
        assert torch.equal(read(view, window.key), expected)
        piece = torch.empty(3, expected.shape[1])
        view.read_rows(window.key, 2, piece)
        assert torch.equal(piece, expected[2:5])


def test_windows_of_safetensors(tmp_path: Path) -> None:
    check_windows(open_folder(make_tiny_model("llama3", tmp_path, hidden_size=128, head_dim=32)))


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "Q4_0"])
def test_windows_of_a_gguf_file_with_rows_in_pairs(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    make_tiny_gguf("llama3", path, kind, hidden_size=128, head_dim=32)
    check_windows(open_folder(path))


def test_a_window_of_a_vector(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    weights = open_folder(make_tiny_model("qwen2", tmp_path))
    window = TensorWindow(name, range(16, 48))
    assert torch.equal(read(weights.windows([window]), window.key), read(weights, name)[16:48])


@pytest.mark.parametrize("kind", [kind for kind, entry in GGUF_TYPES.items() if entry.codes is not None])
def test_a_window_has_the_codes_of_the_whole_matrix(kind: GGMLQuantizationType) -> None:
    """Columns that are no whole blocks: the blocks are converted, then cut."""
    raw = random_blocks(kind)
    size, size_bytes = GGML_QUANT_SIZES[kind]
    num_columns = raw.shape[1] // size_bytes * size
    whole = RawMatrix(raw, kind, range(num_columns))
    for columns in (range(0, 32), range(32, 96), range(num_columns - 32, num_columns)):
        first, end = columns.start // size, -(-columns.stop // size)
        cut = range(columns.start - first * size, columns.stop - first * size)
        window = RawMatrix(raw[:, first * size_bytes : end * size_bytes], kind, cut)
        expected, found = whole.codes(0, len(raw)), window.codes(0, len(raw))
        assert expected is not None and found is not None
        assert torch.equal(found.dequantize(), expected.dequantize()[:, columns.start : columns.stop])
        assert np.array_equal(window.values(0, len(raw)), whole.values(0, len(raw))[:, columns.start : columns.stop])
        assert window.kind is not None and RawMatrix(raw, kind, range(0, 16)).kind is None


class CountingSource(SafetensorsWeights):
    """Counts the bytes of what is read, as float32."""

    num_bytes = 0

    def read_into(self, name: str, out: torch.Tensor, first_row: int = 0, first_column: int = 0) -> None:
        self.num_bytes += out.numel() * 4
        super().read_into(name, out, first_row, first_column)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_rank_reads_its_part_only(size: int, tmp_path: Path) -> None:
    """Of the tensors that are divided; norms are whole in every rank."""
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8}
    files = resolve_model(str(make_tiny_model("llama3", tmp_path, **sizes)))
    spec = read_model_spec(files)
    counts = []
    for rank in range(size):
        source = CountingSource(files)
        parallel = Parallel(ShardSpec.of(rank, size))
        loader = ShardLoader(spec, (torch.float32, torch.device("cpu")), Weights(source), parallel)
        loader.tables()
        for layer in loader.layers:
            for linear in ("qkv", "output", "gate_up", "down"):
                loader.linear(linear, layer)
        counts.append(source.num_bytes)
    whole = 4 * sum(int(np.prod(shape)) for shape in SafetensorsWeights(files).shapes.values() if len(shape) == 2)
    assert sum(counts) == whole
    assert max(counts) - min(counts) <= 4 * spec.hidden_size * 2  # a row of each table
    assert ModelShard(spec, ShardSpec.of(0, size)).kv_heads == range(8 // size)
