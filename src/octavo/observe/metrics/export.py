"""Write tables of figures as CSV text, and as files of JSON lines, replaced atomically.

Owns: the two formats. Does not: collect figures. Reading the files cannot run code.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypedDict


class Table(TypedDict):
    """Names of columns and rows of plain JSON values, oldest first."""

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


def records(table: Table) -> Iterator[dict[str, object]]:
    """Yield each row with its columns' names."""
    for row in table["rows"]:
        yield dict(zip(table["columns"], row, strict=True))


def to_csv(table: Table) -> str:
    """Return the table as CSV, with a header; None is an empty field, a mapping is name=value with semicolons."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table["columns"])
    writer.writerows([_flat(value) for value in row] for row in table["rows"])
    return text.getvalue()


def save_json_lines(path: str | os.PathLike[str], tables: Mapping[str, Table]) -> None:
    """Write one JSON object a line, with its table's name in "table". Replaces the file atomically. Raises OSError."""
    target = Path(path)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            for kind, table in tables.items():
                for record in records(table):
                    file.write(json.dumps({"table": kind, **record}, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _flat(value: object) -> object:
    if isinstance(value, Mapping):
        return ";".join(f"{key}={entry}" for key, entry in value.items())
    return value
