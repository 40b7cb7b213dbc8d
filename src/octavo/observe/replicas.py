"""Figures of several engines: the statistics of a fleet as a whole, and one row of figures for each replica.

Owns: how each kind of figure is merged; the fields of a row, which /metrics, the dashboard, `octavo ps` and `octavo
top` show. Does not: query engines, or know what a replica's status means (frontend.engine_supervisor does).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Figures of which the whole has the greatest, since their sum means nothing; a mean is weighted by its count instead.
_GREATEST = frozenset({"mean", "p50", "p90", "p99", "max", "ratio", "wasted_share"})


def merge_statistics(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the statistics of engines: sums of counts and levels, the greatest quantile, the first engine's texts."""
    if len(parts) == 1:
        return dict(parts[0])
    merged = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        values = [part[name] for part in parts if part.get(name) is not None]
        merged[name] = _merge(name, values) if values else None
    if merged.get("count") and "mean" in merged:
        merged["mean"] = sum(part["count"] * part["mean"] for part in parts if part.get("count")) / merged["count"]
    return merged


def _merge(name: str, values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        if name == "median_s":
            return {part: max(value[part] for value in values) for part in first}
        return merge_statistics(values)
    if isinstance(first, bool):
        return any(values)
    if isinstance(first, int | float):
        return max(values) if name in _GREATEST else sum(values)
    return first


def replica_row(status: Mapping[str, Any], statistics: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a replica's status with its engine's figures, which are None while no engine answers."""
    scheduler = {} if statistics is None else statistics.get("scheduler", {})
    num_blocks = scheduler.get("num_blocks")
    return {
        **status,
        "running": scheduler.get("num_running"),
        "waiting": scheduler.get("num_waiting"),
        "kv_usage": scheduler["num_blocks_used"] / num_blocks if num_blocks else None,
        "hit_tokens": scheduler.get("prefix_hit_tokens"),
        "queried_tokens": scheduler.get("prefix_queried_tokens"),
        "output_tokens": scheduler.get("num_output_tokens"),
    }
