"""Reads rows of text files, plain or gzipped, one at a time. Errors name the file, the line and the column.

Owns: CSV with a header, and JSON lines; typed fields. Does not: know any format's columns (the formats' readers do).
Invariant: for any file, a row is correct or a ConfigError names its fault.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError

MAX_LINE = 16 << 20  # maximum characters of a line; lines of all known traces are far shorter
MAX_COUNT = 1 << 30


class FileRow:
    """One record's fields by name, and its position in the file."""

    __slots__ = ("line", "path", "values")

    def __init__(self, path: Path, line: int, values: Mapping[str, Any]) -> None:
        self.path = path
        self.line = line
        self.values = values

    def fault(self, name: str, remedy: str) -> ConfigError:
        """Return the error for a field of this row."""
        value = self.values.get(name)
        shown = "missing" if value is None else repr(value)[:80]
        return ConfigError(f"{self.path}, line {self.line}, column {name}: {shown}; {remedy}")

    def count(self, name: str) -> int:
        """Return a whole number of 0 or more; a float without a fraction is accepted too."""
        value = self.values.get(name)
        try:
            number = value if type(value) is int else _read_whole(value)
        except (TypeError, ValueError, OverflowError):
            number = -1
        if not 0 <= number <= MAX_COUNT:
            raise self.fault(name, f"give a whole number from 0 to {MAX_COUNT}")
        return number

    def number(
        self, name: str, default: float | None = None, *, min_value: float = -math.inf, max_value: float = math.inf
    ) -> float:
        """Return a finite number from `min_value` to `max_value`; `default` if the field is missing or empty."""
        value = self.values.get(name)
        if default is not None and (value is None or value == ""):
            return default
        try:
            number = math.nan if value is None or isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number) or not min_value <= number <= max_value:
            raise self.fault(
                name, "give a number" + ("" if min_value == -math.inf else f" from {min_value:g} to {max_value:g}")
            )
        return number

    def text(self, name: str) -> str:
        """Return a text; empty if the field is missing."""
        value = self.values.get(name)
        return "" if value is None else str(value)

    def integers(self, name: str) -> tuple[int, ...]:
        """Return a list of whole numbers of 0 or more."""
        value = self.values.get(name)
        if not isinstance(value, list) or not all(type(one) is int and 0 <= one < 2**63 for one in value):
            raise self.fault(name, "give a list of whole numbers")
        return tuple(value)

    def rows(self, name: str) -> Iterator[FileRow]:
        """Return a list of objects as rows of the same line."""
        value = self.values.get(name)
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            raise self.fault(name, "give a list of objects")
        return (FileRow(self.path, self.line, one) for one in value)


def csv_rows(path: Path, columns: Sequence[str], optional: Sequence[str] = ()) -> Iterator[FileRow]:
    """Yield the rows of a CSV file without quoting. The header must have `columns`, in any order.

    Rows also have those `optional` columns that the header has.
    """
    lines = _numbered_lines(path)
    header = [name.strip() for name in next(lines, (0, ""))[1].lstrip("\ufeff").split(",")]
    missing = [name for name in columns if name not in header]
    if missing:
        raise ConfigError(f"{path}, line 1: no column {missing[0]}; this format has {', '.join(columns)}")
    indices = [(name, header.index(name)) for name in (*columns, *optional) if name in header]
    for number, line in lines:
        cells = line.split(",")
        if len(cells) != len(header):
            raise ConfigError(f"{path}, line {number}: {len(cells)} columns where the header has {len(header)}")
        yield FileRow(path, number, {name: cells[index] for name, index in indices})


def json_rows(path: Path) -> Iterator[FileRow]:
    """Yield the objects of a JSON-lines file."""
    for number, line in _numbered_lines(path):
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}, line {number}, column {error.colno}: no JSON ({error.msg})") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number}: no JSON ({error})") from None
        if not isinstance(value, dict):
            raise ConfigError(f"{path}, line {number}: {str(value)[:40]!r} is no object; give one JSON object a line")
        yield FileRow(path, number, value)


def _numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield lines that are not blank, with their numbers from 1. Raises ConfigError if the file cannot be read."""
    number = 0
    try:
        with open(path, "rb") as file:
            is_gzip = file.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rt", encoding="utf-8") if is_gzip else open(path, encoding="utf-8") as lines:
            while line := lines.readline(MAX_LINE):
                number += 1
                if len(line) == MAX_LINE and not line.endswith("\n"):
                    raise ConfigError(f"{path}, line {number} is longer than {MAX_LINE} characters; is it a trace?")
                if stripped := line.strip():
                    yield number, stripped
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{path} cannot be read after line {number} ({reason}); give a readable file") from None
    except (EOFError, zlib.error) as error:
        raise ConfigError(f"{path} is damaged after line {number} ({error}); fetch it again") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no UTF-8 text after line {number} ({error.reason}); is it a trace?") from None


def _read_whole(value: object) -> int:
    """Return a whole number; -1 for anything else."""
    if isinstance(value, str):
        if value.isdecimal():
            return int(value) if len(value) < 20 else -1
        value = float(value)
    if isinstance(value, float) and value == value // 1:
        return int(value)
    return -1
