"""Small GGUF files for tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

LLAMA: dict[str, Any] = {
    "context_length": 256,
    "embedding_length": 64,
    "block_count": 2,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
    "rope.dimension_count": 16,
}


def write_gguf(path: Path, metadata: dict[str, Any], tensors: dict[str, np.ndarray], arch: str = "llama") -> Path:
    """Write metadata (python values; lists become arrays) and tensors."""
    writer = gguf.GGUFWriter(path, arch)
    add_metadata(writer, metadata)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_metadata(writer: gguf.GGUFWriter, metadata: Mapping[str, Any]) -> None:
    """Add python values and arrays of numbers."""
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, np.ndarray):
            writer.add_array(key, value.tolist())
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)


def write_llama(path: Path, arch: str = "llama", tensors: tuple[str, ...] = (), **overrides: Any) -> Path:
    """Write a file with a family's metadata and an embedding; `overrides` replace its keys (None removes one)."""
    sizes = {**LLAMA, **{key.replace("__", "."): value for key, value in overrides.items()}}
    metadata = {f"{arch}.{key}": value for key, value in sizes.items() if value is not None}
    metadata |= {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.bos_token_id": 1}
    arrays = {"token_embd.weight": np.zeros((300, 64), np.float32)}
    arrays |= {name: np.ones(8, np.float32) for name in tensors}
    return write_gguf(path, metadata, arrays, arch)
