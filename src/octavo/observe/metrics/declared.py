"""The table of Prometheus metrics, read from metrics.csv: the place of each number, its names, and its help.

Owns: the table, and the labels of series under vLLM's names. Does not: count (requests), or find numbers (snapshots).
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from importlib.resources import files

_WITHOUT_MODEL = ("octavo_log_lines_dropped", "http_requests", "http_request_duration_seconds")


@dataclass(frozen=True, slots=True)
class DeclaredMetric:
    """One metric.

    `kind`: gauge, counter, histogram ({"buckets": {bound: count}, "total": sum}) or info (texts by label). `place` is
    the path of its value in the snapshots, or in RequestMetrics under `requests`; a "{label}" in it matches every
    key there, exported under that label. `name` is "" for a metric that has only vLLM's names.
    """

    kind: str
    place: tuple[str, ...]
    name: str
    help: str
    vllm: tuple[str, ...]
    buckets: str

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels in its place."""
        return tuple(part[1:-1] for part in self.place if part[0] == "{")

    def own_labels(self, model: str) -> dict[str, str]:
        """Return the labels of all its samples under its own name."""
        return {} if self.name in _WITHOUT_MODEL else {"model_name": model}


def _read_table() -> tuple[DeclaredMetric, ...]:
    text = (files("octavo.observe.metrics") / "metrics.csv").read_text(encoding="utf-8")
    return tuple(
        DeclaredMetric(kind, tuple(place.split(".")), name, text, tuple(vllm.split()), buckets)
        for kind, place, name, text, vllm, buckets in list(csv.reader(text.splitlines()))[1:]
    )


METRICS = _read_table()


def vllm_labels(model: str) -> dict[str, str]:
    """Return the labels of series under vLLM's names."""
    return {"engine": "0", "model_name": model}
