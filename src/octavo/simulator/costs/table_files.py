"""The files of a table of measured operators.

Owns: finding and reading them, with errors that name file and line. Does not: predict (table).
A table is a folder, or a folder and the beginning of its files' names: [PREFIX]dense.csv, per_sequence.csv and
attention.csv, optionally skew_fit.csv and profile.json, each plain or .gz. docs/simulating.md describes their columns.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from octavo.errors import ConfigError

MAX_FILE_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class Profile:
    """The fields of a table's profile.json, all optional.

    `num_layers` and `hidden_size`: the model's, needed if no model is named beside the table. `padded_tokens`: the
    sizes that steps are padded up to (captured graphs); larger steps are not. `all_reduce_s` and `all_reduce_bandwidth`
    (bytes/s): one all-reduce of b bytes over `tp` devices takes all_reduce_s + b / all_reduce_bandwidth. `step_s` is
    the overhead of each step between the operators, `host_s` the host's time.
    """

    num_layers: int = 0
    hidden_size: int = 0
    tp: int = 1
    padded_tokens: tuple[int, ...] = ()
    all_reduce_s: float = 0.0
    all_reduce_bandwidth: float = 0.0
    step_s: float = 0.0
    host_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TableFiles:
    """The table's times in seconds: by layer and size, and by attention's four sizes."""

    name: str
    dense: Mapping[str, Mapping[tuple[int, ...], float]]
    per_sequence: Mapping[str, Mapping[tuple[int, ...], float]]
    attention: Mapping[tuple[int, ...], float]
    skew: Sequence[Mapping[str, str]] = ()
    profile: Profile = field(default_factory=Profile)


ATTENTION_COLUMNS = ("prefill_chunk", "n_decode", "kv_prefill", "kv_decode")


def read_table(where: str) -> TableFiles:
    """Read a table. Raises ConfigError naming the file, the line and the fault."""
    if experts := _find(where, "moe.csv"):
        raise ConfigError(
            f"{experts}: this profile is of a mixture-of-experts model, whose experts a table cannot predict yet; "
            "give the profile of a dense model, or fit a recording of the model (--fit)"
        )
    attention = {
        tuple(_integer(row, column, place) for column in ATTENTION_COLUMNS): _seconds(row, place)
        for place, row in _rows(where, "attention.csv", (*ATTENTION_COLUMNS, "time_us"))
    }
    if not any(point[1] for point in attention):
        raise ConfigError(f"cost table {where!r}: attention.csv has no row with n_decode of 1 or more")
    if not any(point[0] for point in attention):
        raise ConfigError(f"cost table {where!r}: attention.csv has no row with a prefill_chunk of 1 or more")
    skew_columns = ("pc", "n_label", "skew_rate_label", "kv_big_label", "kp_label", "alpha", "n_samples")
    skew = _rows(where, "skew_fit.csv", skew_columns) if _find(where, "skew_fit.csv") else ()
    return TableFiles(
        Path(where).name,
        _by_layer(where, "dense.csv", "tokens"),
        _by_layer(where, "per_sequence.csv", "sequences"),
        attention,
        [row for _, row in skew],
        _profile(where),
    )


def _by_layer(where: str, file: str, size: str) -> dict[str, dict[tuple[int, ...], float]]:
    layers: dict[str, dict[tuple[int, ...], float]] = {}
    for place, row in _rows(where, file, ("layer", size, "time_us")):
        layers.setdefault(row["layer"], {})[(_integer(row, size, place),)] = _seconds(row, place)
    if not layers:
        raise ConfigError(f"cost table {where!r}: {file} has no rows")
    return layers


def _find(where: str, file: str) -> Path | None:
    folder = Path(where)
    for path in (folder / file, folder / f"{file}.gz", Path(f"{where}{file}"), Path(f"{where}__{file}")):
        for candidate in (path, path.with_name(f"{path.name}.gz")):
            if candidate.is_file():
                return candidate
    return None


def _text(path: Path) -> str:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: more than {MAX_FILE_BYTES} bytes; a table of operators is smaller")
        return data.decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _rows(where: str, file: str, columns: tuple[str, ...]) -> list[tuple[str, dict[str, str]]]:
    """Return the file's rows, each with its position for errors."""
    path = _find(where, file)
    if path is None:
        raise ConfigError(f"cost table {where!r}: no {file} or {file}.gz there, in the folder or behind the prefix")
    reader = csv.DictReader(io.StringIO(_text(path)), restval="")
    missing = [column for column in columns if column not in (reader.fieldnames or ())]
    if missing:
        raise ConfigError(f"{path}: no column {', '.join(missing)}; its header is {reader.fieldnames}")
    return [(f"{path}:{reader.line_num}", row) for row in reader]


def _integer(row: Mapping[str, str], column: str, place: str) -> int:
    try:
        value = int(row[column])
    except ValueError:
        value = -1
    if value < 0:
        raise ConfigError(f"{place}: {column} is {row[column]!r}; give a whole number of 0 or more")
    return value


def _seconds(row: Mapping[str, str], place: str) -> float:
    try:
        value = float(row["time_us"])
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e12:
        raise ConfigError(f"{place}: time_us is {row['time_us']!r}; give microseconds, 0 or more")
    return value * 1e-6


def _profile(where: str) -> Profile:
    path = _find(where, "profile.json")
    if path is None:
        return Profile()
    try:
        values = json.loads(_text(path))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    known = {entry.name for entry in fields(Profile)}
    if not isinstance(values, dict) or not known >= set(values):
        raise ConfigError(f"{path}: give an object of {', '.join(sorted(known))}")
    padded = values.pop("padded_tokens", ())
    numbers = (
        [*values.values(), *(padded if isinstance(padded, list) else [None])] if padded != () else [*values.values()]
    )
    if not all(isinstance(number, (int, float)) and not isinstance(number, bool) and number >= 0 for number in numbers):
        raise ConfigError(f"{path}: every value is a number of 0 or more, padded_tokens a list of them")
    return Profile(**values, padded_tokens=tuple(sorted(int(size) for size in padded)))
