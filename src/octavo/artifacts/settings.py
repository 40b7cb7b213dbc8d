"""Typed access to a model's settings: those of config.json, of a table in it, or of GGUF metadata.

Owns: the checks of types. Does not: know a family's keys, or read files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.errors import ModelFileError

FULL, SLIDING = "full_attention", "sliding_attention"  # of `layer_types`
_DTYPES = ("float32", "float16", "bfloat16")
_MAX_LAYERS = 1 << 16  # bounds what is listed per layer


class Settings:
    """Values by the usual names, of which `keys` maps some to the file's own.

    A failure is a ModelFileError that names the file and its key.
    """

    def __init__(self, path: Path, values: Mapping[str, Any], keys: Mapping[str, str] | None = None) -> None:
        self.path = path
        self.values = values
        self._keys = keys or {}

    def key(self, name: str) -> str:
        """Return the file's key."""
        return self._keys.get(name, name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value of any type; the default if the file lacks it."""
        return self.values.get(self.key(name), default)

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a whole number; the default if it is null or left out."""
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelFileError(self.path, f"{self.key(name)} is {value!r}; a whole number is needed")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number; the default if it is left out."""
        value = self.get(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ModelFileError(self.path, f"{self.key(name)} is {value!r}; a number is needed")
        return float(value)

    def scalar(self, name: str) -> float | None:
        """Return a number that may be null or left out."""
        return None if self.get(name) is None else self.number(name)

    def flag(self, name: str) -> bool:
        """Return True if the value is true."""
        return self.get(name) is True

    def dtype(self) -> str:
        """Return the type of the weights, by its new or its old key."""
        dtype = self.values.get("dtype") or self.values.get("torch_dtype") or "float32"
        if dtype not in _DTYPES:
            raise ModelFileError(self.path, f"dtype {dtype!r} is not supported; one of {', '.join(_DTYPES)} is")
        return str(dtype)

    def num_layers(self, name: str = "num_hidden_layers") -> int:
        """Return the number of layers of a model that has something listed for each of them."""
        layers = self.integer(name)
        if not 0 <= layers <= _MAX_LAYERS:
            raise ModelFileError(self.path, f"{self.key(name)} is {layers}; at most {_MAX_LAYERS} layers may differ")
        return layers
