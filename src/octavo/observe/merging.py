"""Merges the answers of several engines to one verb, for readers that expect those of one.

Owns: how each value is merged; the row of figures of each replica, which /metrics, the dashboard and `octavo top` show.
Does not: ask an engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_GREATEST = {
    "p50", "p90", "p99", "max", "median_s", "max_step_tokens", "ratio", "wasted_share", "acceptance", "expected_gain",
}  # fmt: skip
_COUNTS = ("resumed_requests", "moved_requests", "inexact_requests")  # of a supervisor's report


def merge_answers(verb: str, answers: Mapping[str, Any], report: Mapping[str, Any]) -> object:
    """Return one answer for the answers of several replicas, by name. `report` is their supervisor's.

    statistics: counters and gauges are added, of quantiles the greatest is taken; `replicas` has a row for each replica
    by its number. explain: the requests of all. forecast: the shortest wait, and the figures of all engines together.
    Verbs that return a bool: True if all do.
    """
    values = list(answers.values())
    if verb == "statistics":
        rows = {str(each["number"]): _replica_row(each, answers.get(each["name"])) for each in report["replicas"]}
        return {**_sum(values), "replicas": rows, "fleet": {name: report[name] for name in _COUNTS}}
    if verb == "forecast":
        return {"new_request_s": _least(value["new_request_s"] for value in values), "model": _merge_models(values)}
    if verb == "explain":
        return _merge_explanations(values)
    return all(values)


def _replica_row(status: Mapping[str, Any], statistics: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a replica's status with its engine's figures, which are None while no engine answers."""
    scheduler, figures = ({} if statistics is None else statistics.get(name, {}) for name in ("scheduler", "ranks"))
    num_blocks = scheduler.get("num_blocks")
    return {
        **status,
        "ranks": [figures.get(str(rank["rank"]), {}) | rank for rank in status.get("ranks", ())],
        "up": int(status["state"] == "ready"),
        "running": scheduler.get("num_running"),
        "waiting": scheduler.get("num_waiting"),
        "kv_usage": scheduler["num_blocks_used"] / num_blocks if num_blocks else None,
        "hit_tokens": scheduler.get("prefix_hit_tokens"),
        "queried_tokens": scheduler.get("prefix_queried_tokens"),
        "output_tokens": scheduler.get("num_output_tokens"),
    }


def _sum(values: list[Any], key: str = "") -> Any:
    """Add numbers, at every depth. Of quantiles take the greatest, of other values the first."""
    first = values[0]
    if isinstance(first, Mapping):
        tables = [value for value in values if isinstance(value, Mapping)]
        keys = dict.fromkeys(name for table in tables for name in table)
        inner = key if key in _GREATEST else ""
        merged = {name: _sum([table[name] for table in tables if name in table], inner or str(name)) for name in keys}
        if "mean" in first and "count" in first:
            total = sum(table["mean"] * table["count"] for table in tables if table["count"])
            merged["mean"] = total / merged["count"] if merged["count"] else first["mean"]
        return merged
    numbers = [value for value in values if isinstance(value, int | float)]
    if isinstance(first, bool) or not numbers:
        return first
    return max(numbers) if key in _GREATEST else sum(numbers)


def _least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _merge_models(answers: list[Any]) -> dict[str, float] | None:
    """Return figures of engines that step at the same time: each computes its share of the tokens."""
    models = [answer["model"] for answer in answers if answer["model"] is not None]
    if not models:
        return None
    mean = {name: sum(model[name] for model in models) / len(models) for name in models[0]}
    return {**mean, "token_s": mean["token_s"] / len(models)}


def _merge_explanations(answers: list[Any]) -> Any:
    """Return the answer of an engine that knows the request; for all requests, the lists of all engines."""
    known = [answer for answer in answers if answer.get("state") != "unknown"]
    if not known or "text" in known[0]:
        return (known or answers)[0]
    merged = _sum(known)
    for key, value in merged.items():
        if isinstance(value, list):
            merged[key] = [entry for answer in known for entry in answer.get(key, ())]
    return {**merged, "new_request_s": _least(answer.get("new_request_s") for answer in known)}
