"""Weights in safetensors files, single or sharded, memory-mapped.

Owns: which files are read, and their tensors' names, shapes and types.
Does not: check shapes against a configuration (nn/weights.py does).
Invariants: nothing is unpickled; a tensor is in one file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from octavo.artifacts.resolve import ModelFiles
from octavo.errors import ModelFileError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_TYPES = ("F64", "F32", "F16", "BF16")


class SafetensorsWeights:
    """A WeightSource over a Hugging Face folder."""

    def __init__(self, files: ModelFiles) -> None:
        self._paths: dict[str, Path] = {}
        self._handles: dict[Path, Any] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        self._folder = files.root
        for path in _weight_files(files):
            handle = self._handles[path] = _open(path)
            for name in sorted(handle.keys()):
                if name in shapes:
                    raise ModelFileError(path, f"is also in {self._paths[name].name}", name)
                piece = handle.get_slice(name)
                if piece.get_dtype() not in _TYPES:
                    raise ModelFileError(path, f"has type {piece.get_dtype()}; {', '.join(_TYPES)} are supported", name)
                shapes[name] = tuple(piece.get_shape())
                self._paths[name] = path
        self.shapes: Mapping[str, tuple[int, ...]] = MappingProxyType(shapes)

    def path(self, name: str) -> Path:
        """Return the tensor's file, or the folder if no file has it."""
        return self._paths.get(name, self._folder)

    def read_into(self, name: str, out: Tensor, first_row: int = 0) -> None:
        """Copy from the mapped file, converting."""
        path = self._paths[name]
        try:
            out.copy_(self._handles[path].get_slice(name)[first_row : first_row + out.shape[0]])
        except (SafetensorError, OSError) as error:
            raise ModelFileError(path, f"cannot be read ({getattr(error, 'strerror', None) or error})", name) from error

    def raw_rows(self, name: str) -> None:
        """Return None: safetensors files have no GGUF blocks."""
        return None


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelFileError(path, f"is no whole safetensors file ({error})") from error


def _weight_files(files: ModelFiles) -> tuple[Path, ...]:
    """Return the shards that the index names; else the usual single file; else every file of the folder.

    Some folders hold the same weights twice, the second time with the names of another layout.
    """
    index = files.root / INDEX_FILE
    if index.is_file():
        return _indexed_files(index)
    single = files.root / SINGLE_FILE
    return (single,) if single in files.weights else files.weights


def _indexed_files(index: Path) -> tuple[Path, ...]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = sorted(set(weight_map.values()))
        paths = tuple(index.parent / name for name in names)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFileError(
            index, "is no shard index: it needs an object 'weight_map' from tensors to files"
        ) from error
    for name, path in zip(names, paths, strict=True):
        if Path(name).name != name:
            raise ModelFileError(index, f"names the file {name!r}, which lies outside its folder")
        if not path.is_file():
            tensor = next(tensor for tensor, file in weight_map.items() if file == name)
            raise ModelFileError(path, "is missing, though the shard index names it", tensor)
    return paths
