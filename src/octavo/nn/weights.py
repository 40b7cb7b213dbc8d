"""The weights of a model by their canonical (Hugging Face) names, from files of any supported kind.

Owns: the choice of the reader; the checks (tensor present, right shape, no tensor unread); windows of tensors;
safetensors files, single or sharded, memory-mapped. Does not: keep tensors; each is converted directly into the
caller's memory.
Invariants: a failure is a ModelFileError that names the file, the tensor and the reason. Nothing is unpickled. A
tensor is in one file.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.artifacts.checkpoint_quantization import CheckpointQuantization
from octavo.artifacts.families import expert_matrices
from octavo.artifacts.model_spec import ModelSpec
from octavo.artifacts.read_spec import read_quantization
from octavo.artifacts.resolve import ModelFiles
from octavo.errors import ModelFileError
from octavo.nn.checkpoint_formats.find import FoundMatrices, find_matrices
from octavo.nn.expert_weights import StackedExperts
from octavo.nn.gguf_weights import GGUFWeights
from octavo.nn.importance import Importances, read_importances
from octavo.nn.safetensors_file import FLOAT_TYPES, SafetensorsFile, StoredTensor
from octavo.nn.staging import Stage
from octavo.nn.weight_source import CodedMatrix, WeightSource, copy_values

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_BARE_TABLE = "embed_tokens.weight"  # of a decoder that was saved without its head, as embedding models are
_BUFFER = ".position_ids"  # the numbers from 0 on, which files of old encoders have
# Names of a checkpoint with a text part, old and new -> those of a text model.
_TEXT_PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    *((prefix, prefix) for prefix in ("model.embed_tokens.", "model.layers.", "model.norm.")),
    ("lm_head.", "lm_head."),
)
_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None  # glibc has it
_MAPPED = 1 << 23  # values after whose reading the files' pages are dropped


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


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How weights are read: an importance matrix for 4-bit codes, and a function that follows the reading.

    `on_read` gets the number of values read since its last call, and that of all tensors.
    """

    imatrix: Path | None = None
    on_read: Callable[[int, int], None] | None = None


class Weights:
    """Checked reader of a source's tensors."""

    def __init__(
        self, source: WeightSource, on_read: Callable[[int], None] | None = None, importances: Importances | None = None
    ) -> None:
        self._source = source
        self._read: set[str] = set()
        self._on_read = on_read
        self._importances: Importances = importances or {}
        self._num_mapped = 0
        self._stages: dict[torch.device, Stage] = {}  # on the way to devices; windows share them

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor's canonical name."""
        return tuple(self._source.shapes)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the user about tensors that are not used."""
        return self._source.notes

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
        if out.device.type == "cpu":
            with torch.no_grad():
                self._source.read_into(name, out)
        else:
            self.stage(out.device).fill(out, lambda first_row, rows: self.read_rows(name, first_row, rows))
        self.count_read(out.numel())

    def read(
        self,
        rows: Mapping[str, int],
        *inputs: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> Tensor:
        """Read tensors with these numbers of rows, and with these other sizes, into one new tensor."""
        for name, count in rows.items():
            self.check_shape(name, (count, *inputs))
        out = torch.empty(sum(rows.values()), *inputs, dtype=dtype, device=device)
        start = 0
        for name, count in rows.items():
            self.read_into(name, out[start : start + count])
            start += count
        return out

    def count_read(self, num_values: int) -> None:
        """Count values that were read; now and then, return the files' pages and unused heap to the system."""
        self._num_mapped += num_values
        if self._num_mapped >= _MAPPED:
            self._num_mapped = 0
            self._source.drop_pages()
            if _TRIM is not None:
                _TRIM(0)
        if self._on_read is not None:
            self._on_read(num_values)

    def importance(self, name: str) -> npt.NDArray[np.float32] | None:
        """Return the importance of each input of a matrix, None if all are equal."""
        return self._importances.get(name)

    def claim(self, name: str, shape: tuple[int, ...]) -> None:
        """Check the shape of a tensor that is read by rows later, and mark it as read."""
        self.check_shape(name, shape)
        self._read.add(name)

    def read_rows(self, name: str, first_row: int, out: Tensor) -> None:
        """Convert some rows of a claimed tensor into `out`."""
        with torch.no_grad():
            self._source.read_into(name, out, first_row)

    def raw_matrix(self, name: str) -> CodedMatrix | None:
        """Return a claimed matrix for reading its codes; None if the files have plain floats of it."""
        return self._source.raw_matrix(name)

    def windows(self, windows: Iterable[TensorWindow]) -> Weights:
        """Return the windows of claimed tensors as weights of their own, named by their keys."""
        by_key = {window.key: window for window in windows}
        importances = {
            key: values if window.columns is None else values[window.columns.start : window.columns.stop]
            for key, window in by_key.items()
            if (values := self.importance(window.name)) is not None
        }
        view = Weights(_WindowSource(self._source, by_key), self.count_read, importances)
        view._stages = self._stages
        return view

    def stage(self, device: torch.device) -> Stage:
        """Return the buffers through which weights reach a device."""
        return self._stages.setdefault(device, Stage(device))

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
        self.notes = source.notes
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

    def raw_matrix(self, name: str, rows: range | None = None, columns: range | None = None) -> CodedMatrix | None:
        """Return the window's codes."""
        assert rows is None and columns is None, "a window of a window"
        window = self._windows[name]
        return self._source.raw_matrix(window.name, window.rows, window.columns)

    def drop_pages(self) -> None:
        """Do nothing: the weights that the windows are of count what is read, and drop pages."""


def open_weights(files: ModelFiles, spec: ModelSpec, options: ReadOptions | None = None) -> Weights:
    """Open the model's weight files; only their headers are read. Raises ModelFileError."""
    source: WeightSource = (
        GGUFWeights(files, spec) if files.kind == "gguf" else SafetensorsWeights(files, spec.text_part)
    )
    if spec.mixture is not None:
        source = StackedExperts(source, tuple(expert_matrices(spec)))
    if options is None:
        return Weights(source)
    importances = None if options.imatrix is None else read_importances(options.imatrix, spec, source.shapes)
    follow = options.on_read
    total = sum(prod(shape) for shape in source.shapes.values())
    return Weights(source, None if follow is None else lambda count: follow(count, total), importances)


def text_name(name: str) -> str | None:
    """Return a tensor's name in a text model, or None if it is not a part of the language model."""
    for prefix, text_prefix in _TEXT_PREFIXES:
        if name.startswith(prefix):
            return text_prefix + name.removeprefix(prefix)
    return None


def num_other_values(files: ModelFiles) -> int:
    """Return how many values a folder of safetensors has beside those of its text part. Raises ModelFileError."""
    opened = (SafetensorsFile(path) for path in _weight_files(files))
    stored = [(name, tensor.shape) for file in opened for name, tensor in file.tensors.items()]
    return sum(prod(shape) for name, shape in stored if text_name(name) is None and not name.endswith(_BUFFER))


class SafetensorsWeights:
    """A WeightSource over a Hugging Face folder, whose matrices may have codes.

    `text_part`: only the tensors of the language model are read, under the names that they have in a text model.
    """

    def __init__(self, files: ModelFiles, text_part: bool = False) -> None:
        self._folder = files.root
        self._files = [SafetensorsFile(path) for path in _weight_files(files)]
        stored: dict[str, StoredTensor] = {}
        for file in self._files:
            for stored_name, tensor in file.tensors.items():
                name = text_name(stored_name) if text_part else stored_name
                if name is None or name.endswith(_BUFFER):
                    continue
                if name in stored:
                    raise ModelFileError(file.path, f"is also in {stored[name].path.name}", name)
                stored[name] = tensor
        if _BARE_TABLE in stored:
            stored = {name if name.startswith("lm_head.") else f"model.{name}": file for name, file in stored.items()}
        quantization = read_quantization(files.root)
        found = FoundMatrices({}, frozenset(), ()) if quantization is None else find_matrices(stored, quantization)
        self.notes = found.notes
        self._coded = found.matrices
        self._plain = {name: tensor for name, tensor in stored.items() if name not in found.parts}
        for tensor in self._plain.values():
            if tensor.type not in FLOAT_TYPES:
                raise tensor.error(
                    f"has type {tensor.type}; {', '.join(FLOAT_TYPES)} are supported{_hint(quantization)}"
                )
        shapes = {name: tensor.shape for name, tensor in self._plain.items()}
        shapes |= {name: tensor.shape for name, tensor in self._coded.items()}
        self.shapes: Mapping[str, tuple[int, ...]] = MappingProxyType(shapes)

    def path(self, name: str) -> Path:
        """Return the tensor's file, or the folder if no file has it."""
        tensor = self._coded.get(name) or self._plain.get(name)
        return self._folder if tensor is None else tensor.path

    def read_into(self, name: str, out: Tensor, first_row: int = 0, first_column: int = 0) -> None:
        """Convert a window of the mapped file, a few rows at a time."""
        if name in self._plain:
            self._plain[name].copy_into(out, first_row, first_column)
            return
        rows, columns = range(first_row, first_row + len(out)), range(first_column, first_column + out.shape[1])
        copy_values(self._coded[name].window(rows, columns), out)

    def raw_matrix(self, name: str, rows: range | None = None, columns: range | None = None) -> CodedMatrix | None:
        """Return a matrix that has codes, or a window of it."""
        coded = self._coded.get(name)
        return None if coded is None else coded.window(rows, columns)

    def drop_pages(self) -> None:
        """Remove the files' mapped pages from this process's memory."""
        for file in self._files:
            file.drop_pages()


def _hint(quantization: CheckpointQuantization | None) -> str:
    if quantization is not None:
        return f", and it is no part of a matrix of the checkpoint's method ({quantization.label})"
    return "; codes need a quantization_config in config.json"


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
