"""The weights of a model by their canonical (Hugging Face) names, from files of any supported kind.

Owns: the choice of the reader; the checks (tensor present, right shape, no tensor unread); windows of tensors;
safetensors files, single or sharded, memory-mapped. Does not: keep tensors; each is converted directly into the
caller's memory.
Invariants: a failure is a ModelFileError that names the file, the tensor and the reason. Nothing is unpickled. A
tensor is in one file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from octavo.artifacts.model_spec import ModelSpec
from octavo.artifacts.resolve import ModelFiles
from octavo.errors import ModelFileError
from octavo.nn.gguf_blocks import RawMatrix
from octavo.nn.gguf_weights import GGUFWeights

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_TYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class TensorWindow:
    """Some rows of a tensor and, for a matrix, some of their columns (None: all)."""

    name: str
    rows: range
    columns: range | None = None

    @property
    def key(self) -> str:
        """A name for the window among tensors."""
        columns = "" if self.columns is None else f", {self.columns.start}:{self.columns.stop}"
        return f"{self.name}[{self.rows.start}:{self.rows.stop}{columns}]"


class WeightSource(Protocol):
    """The interface to one kind of weight files. Names are canonical; shapes are torch's, [out, in]."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of all tensors, by name."""
        ...

    def path(self, name: str) -> Path:
        """Return the file that holds the tensor; if the tensor is missing, the path to name in the error."""
        ...

    def read_into(self, name: str, out: Tensor, first_row: int = 0, first_column: int = 0) -> None:
        """Convert the window that begins there into `out`, which may have any size, dtype and device."""
        ...

    def raw_matrix(self, name: str, rows: range | None = None, columns: range | None = None) -> RawMatrix | None:
        """Return a matrix, or a window of it, as the bytes of its blocks; None if the files are not GGUF."""
        ...


class Weights:
    """Checked reader of a source's tensors."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._read: set[str] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor's canonical name."""
        return tuple(self._source.shapes)

    def __contains__(self, name: str) -> bool:
        return name in self._source.shapes

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape. Raises ModelFileError when the tensor is missing."""
        shape = self._source.shapes.get(name)
        if shape is None:
            raise ModelFileError(self._source.path(name), "is missing", name)
        return shape

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ModelFileError if the tensor has another shape. Call it before allocating memory for `shape`."""
        actual = self.shape(name)
        if actual != shape:
            reason = f"has shape {list(actual)}, the configuration needs {list(shape)}"
            raise ModelFileError(self._source.path(name), reason, name)

    def read_into(self, name: str, out: Tensor) -> None:
        """Convert the tensor into `out`, which must have the same shape."""
        self.check_shape(name, tuple(out.shape))
        self._read.add(name)
        with torch.no_grad():
            self._source.read_into(name, out)

    def claim(self, name: str, shape: tuple[int, ...]) -> None:
        """Check the shape of a tensor that is read by rows later, and mark it as read."""
        self.check_shape(name, shape)
        self._read.add(name)

    def read_rows(self, name: str, first_row: int, out: Tensor) -> None:
        """Convert some rows of a claimed tensor into `out`."""
        with torch.no_grad():
            self._source.read_into(name, out, first_row)

    def raw_matrix(self, name: str) -> RawMatrix | None:
        """Return a claimed matrix of a GGUF file as the bytes of its rows, in canonical order; else None."""
        return self._source.raw_matrix(name)

    def windows(self, windows: Iterable[TensorWindow]) -> Weights:
        """Return the windows of claimed tensors as weights of their own, named by their keys."""
        return Weights(_WindowSource(self._source, {window.key: window for window in windows}))

    def check_all_read(self, ignored: frozenset[str] = frozenset()) -> None:
        """Raise ModelFileError for a tensor that was not read: a model with more tensors has another architecture."""
        for name in self._source.shapes:
            if name not in self._read and name not in ignored and not name.endswith(".rotary_emb.inv_freq"):
                raise ModelFileError(self._source.path(name), "is not a part of this architecture", name)


class _WindowSource:
    """A WeightSource whose tensors are windows of another source's tensors."""

    def __init__(self, source: WeightSource, windows: Mapping[str, TensorWindow]) -> None:
        self._source = source
        self._windows = windows
        self.shapes: Mapping[str, tuple[int, ...]] = MappingProxyType(
            {
                key: (len(window.rows), *((len(window.columns),) if window.columns is not None else rest))
                for key, window in windows.items()
                for rest in (source.shapes[window.name][1:],)
            }
        )

    def path(self, name: str) -> Path:
        """Return the file that holds the tensor."""
        return self._source.path(self._windows[name].name)

    def read_into(self, name: str, out: Tensor, first_row: int = 0, first_column: int = 0) -> None:
        """Convert a part of the window into `out`."""
        window = self._windows[name]
        column = 0 if window.columns is None else window.columns.start
        self._source.read_into(window.name, out, window.rows.start + first_row, column + first_column)

    def raw_matrix(self, name: str, rows: range | None = None, columns: range | None = None) -> RawMatrix | None:
        """Return the blocks that hold the window."""
        assert rows is None and columns is None, "a window of a window"
        window = self._windows[name]
        return self._source.raw_matrix(window.name, window.rows, window.columns)


def open_weights(files: ModelFiles, spec: ModelSpec) -> Weights:
    """Open the model's weight files; only their headers are read. Raises ModelFileError."""
    source: WeightSource = GGUFWeights(files, spec) if files.kind == "gguf" else SafetensorsWeights(files)
    return Weights(source)


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

    def read_into(self, name: str, out: Tensor, first_row: int = 0, first_column: int = 0) -> None:
        """Copy a window from the mapped file, converting it; nothing else of the tensor is copied."""
        path = self._paths[name]
        try:
            piece = self._handles[path].get_slice(name)
            rows = slice(first_row, first_row + out.shape[0])
            is_whole = out.dim() == 1 or out.shape[1] == self.shapes[name][1]
            out.copy_(piece[rows] if is_whole else piece[rows, first_column : first_column + out.shape[1]])
        except (SafetensorError, OSError) as error:
            raise ModelFileError(path, f"cannot be read ({getattr(error, 'strerror', None) or error})", name) from error

    def raw_matrix(self, name: str, rows: range | None = None, columns: range | None = None) -> None:
        """Return None: safetensors files have no GGUF blocks."""
        return None


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelFileError(path, f"is no whole safetensors file ({error})") from error


def _weight_files(files: ModelFiles) -> tuple[Path, ...]:
    """Return the shards that the index names; without an index, the single file; without that, all weight files.

    Some folders have the same weights twice, in a second copy under the names of another layout.
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
