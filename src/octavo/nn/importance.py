"""Importance matrices: how strongly each input of a matrix is used, as llama.cpp's imatrix tool measured it on a text.

Owns: both formats (the older imatrix.dat, and GGUF), the mapping of their names to canonical ones, and the refusal of
another model's file. Does not: quantise; packing.py weights its squared errors with the importances.
An importance is the mean of the squares of an input over the tokens of the text. Experts that are one tensor share the
mean of their importances, and experts that are tensors of their own too.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from octavo.artifacts.families import FAMILIES
from octavo.artifacts.gguf_file import GGUFFile
from octavo.artifacts.model_spec import ModelSpec
from octavo.errors import ModelFileError

Importances = Mapping[str, npt.NDArray[np.float32]]

_MAX_BYTES = 1 << 30
_MAX_NAME = 256
_EXPERTS = "_exps."
_SUMS, _COUNTS = ".in_sum2", ".counts"


def read_importances(path: Path, spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]]) -> Importances:
    """Return the importances [E] of the model's matrices, by canonical name. Raises ModelFileError.

    `shapes` are those of the model's tensors. A matrix that the file lacks has equal importances.
    """
    family = FAMILIES.get(spec.family)
    if family is None:
        raise ModelFileError(path, f"names the tensors of GGUF files, which are not known for {spec.family}")
    entries = _gguf_entries(path) if _starts_as_gguf(path) else _dat_entries(path)
    found: dict[str, npt.NDArray[np.float32]] = {}
    for gguf_name, values in entries:
        name = family.from_gguf(gguf_name)[1]
        shape = shapes.get(name)
        if _EXPERTS in gguf_name:
            if shape is None:
                continue  # the experts are tensors of their own
            values = values.reshape(-1, shape[-1]).mean(axis=0) if values.size % shape[-1] == 0 else values
        if shape is None:
            raise ModelFileError(path, "is of another model: this one has no such tensor", gguf_name)
        if values.size != shape[-1]:
            reason = (
                f"has {values.size} importances, this model's matrix {shape[-1]} inputs: the file is of another model"
            )
            raise ModelFileError(path, reason, gguf_name)
        if not np.isfinite(values).all() or (values < 0).any():
            raise ModelFileError(path, "has importances that are negative or not finite", gguf_name)
        found[name] = values
    if not found:
        raise ModelFileError(path, "has no importances")
    return found


def _starts_as_gguf(path: Path) -> bool:
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise ModelFileError(path, f"has {size} bytes; at most {_MAX_BYTES} are read")
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError as error:
        raise ModelFileError(path, f"cannot be read ({error.strerror or error})") from error


def _gguf_entries(path: Path) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    file = GGUFFile.open(path)
    if file.metadata.get("general.type") != "imatrix":
        raise ModelFileError(path, f"general.type is {file.metadata.get('general.type')!r}; 'imatrix' is needed")
    for name, tensor in file.tensors.items():
        if not name.endswith(_SUMS):
            continue
        stem = name.removesuffix(_SUMS)
        counts = file.tensors.get(stem + _COUNTS)
        if counts is None:
            raise ModelFileError(path, "is missing", stem + _COUNTS)
        if tensor.type.name != "F32" or counts.type.name != "F32":
            raise ModelFileError(path, f"has type {tensor.type.name}; F32 is needed", name)
        sums = file.raw(name).view(np.float32)
        num_tokens = file.raw(counts.name).view(np.float32)
        if not num_tokens.size or sums.size % num_tokens.size:
            raise ModelFileError(path, f"has {sums.size} sums for {num_tokens.size} counts", name)
        means = sums.reshape(num_tokens.size, -1) / np.maximum(num_tokens, 1)[:, None]
        yield stem, means.astype(np.float32).ravel()


def _dat_entries(path: Path) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Read int32 counts and lengths, names, and float32 sums that are already divided by the tokens of a call."""
    data = path.read_bytes()
    position = 0

    def integer(limit: int, what: str) -> int:
        nonlocal position
        if position + 4 > len(data):
            raise ModelFileError(path, f"is no importance matrix: it ends within the {what}")
        (value,) = struct.unpack_from("<i", data, position)
        position += 4
        if not 0 <= value <= limit:
            raise ModelFileError(path, f"is no importance matrix: {what} is {value}; at most {limit} are read")
        return int(value)

    for _ in range(integer(1 << 20, "number of entries")):
        length = integer(_MAX_NAME, "length of a name")
        name = data[position : position + length].decode("utf-8", "replace")
        position += length
        num_calls = integer(2**31 - 1, "number of calls")
        count = integer(len(data) // 4, "number of values")
        if position + 4 * count > len(data):
            raise ModelFileError(path, "ends within the importances", name)
        values = np.frombuffer(data, "<f4", count, position)
        position += 4 * count
        yield name, (values / np.float32(max(num_calls, 1))).astype(np.float32)
