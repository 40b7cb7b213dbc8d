"""Code that all benchmark reports share: percentiles, facts about the engine and this process, terminal tables.

Owns: the names of the shared facts, the style of the tables. Does not: measure.
A report is one JSON-compatible dictionary; the tables are printed from the report.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from octavo.config import Config
from octavo.executors.protocol import Capacity
from octavo.simulator.columns import nearest_rank

POINTS = (50, 90, 95, 99)
Report = dict[str, Any]


def percentile(values: Iterable[float], point: float) -> float:
    """Return the smallest value v such that at least `point` per cent of the values are <= v; 0 without values."""
    ordered = sorted(values)
    return ordered[nearest_rank(point, len(ordered))] if ordered else 0.0


def spread_ms(seconds: Iterable[float]) -> dict[str, float]:
    """Return the percentiles of POINTS as {"p50": ...}, in milliseconds."""
    ordered = sorted(seconds)
    return {f"p{point}": round(percentile(ordered, point) * 1e3, 3) for point in POINTS}


def engine_facts(model: str, config: Config, capacity: Capacity) -> Report:
    """Return the engine's model, types, device, threads and memory."""
    return {
        "model": model,
        "dtype": capacity.dtype,
        "quantization": _first(capacity, config, "quantization"),
        "speculate": _first(capacity, config, "speculate"),
        "device": capacity.device,
        "threads": capacity.num_threads,
        "weight_bytes": capacity.weight_bytes,
        "kv_bytes_per_token": capacity.kv_bytes_per_token,
        "kv_blocks": sum(capacity.num_blocks),
    }


def headline(report: Mapping[str, Any]) -> str:
    """Return model, types, device and threads as text."""
    words = [report["model"], report["dtype"]]
    words += [f"{name} {report[name]}" for name in ("quantization", "speculate") if report[name] not in (None, "none")]
    return ", ".join([*words, report["device"], f"{report['threads']} threads"])


def peak_memory_bytes() -> int:
    """Return the peak of this process's resident memory."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def show_rows(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows of values under column names; align numbers to the right."""
    table = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for index, column in enumerate(columns):
        is_number = all(isinstance(row[index], (int, float)) for row in rows)
        table.add_column(column, justify="right" if is_number else "left")
    for row in rows:
        table.add_row(*map(_text, row))
    console.print(table)


def show_facts(console: Console, title: str, facts: Mapping[str, object]) -> None:
    """Print names with their values, one pair per line."""
    table = Table(title=title, title_justify="left", box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    for name, value in facts.items():
        table.add_row(name, _text(value))
    console.print(table)


def _first(capacity: Capacity, config: Config, name: str) -> object:
    """Return `name` from the capacity, else the setting of that name from any section; None if there is neither."""
    parts = (capacity, config.model, config.scheduling, config.execution)
    return next((getattr(part, name) for part in parts if hasattr(part, name)), None)


def _text(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 1 else f"{value:,.1f}"
