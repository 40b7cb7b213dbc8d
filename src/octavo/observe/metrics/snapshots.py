"""Prometheus metrics of counts kept elsewhere: the engine, admission, retries, stored responses, the sandbox.

Owns: finding the declared metrics' numbers in snapshots, and derived figures. Does not: count, or request snapshots
(they are passed in). Invariant: a number that is not in the snapshots has no series.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from octavo.config import Config
from octavo.observe.metrics.declared import METRICS, DeclaredMetric, vllm_labels


class SnapshotMetrics:
    """The series of snapshots by name ("engine", "admission", ...); a collector for a CollectorRegistry."""

    def __init__(self, model: str, snapshots: Mapping[str, object]) -> None:
        self._model = model
        self._snapshots = snapshots

    def collect(self) -> Iterator[Metric]:
        """Yield every series whose number is in the snapshots, under its own name and under vLLM's."""
        for metric in METRICS:
            place = metric.place
            values = list(_find(self._snapshots, place))
            if not values and not (place[-1][0] == "{" and any(_find(self._snapshots, place[:-1]))):
                continue  # else a family without samples yet, whose type is exported
            if metric.name:
                yield _family(metric, metric.name, metric.own_labels(self._model), values)
            for name in metric.vllm:
                yield _family(metric, name, vllm_labels(self._model), values)


def _find(snapshot: object, place: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield (key at the label, value) of each value at a place; None counts as absent."""
    for index, part in enumerate(place):
        if not isinstance(snapshot, Mapping):
            return
        if part[0] == "{":
            for key, value in snapshot.items():
                yield from ((str(key), found) for _, found in _find(value, place[index + 1 :]))
            return
        snapshot = snapshot.get(part)
    if snapshot is not None:
        yield "", snapshot


def _family(metric: DeclaredMetric, name: str, labels: Mapping[str, str], values: Sequence[tuple[str, Any]]) -> Metric:
    """Return the family of a metric under this name."""
    given, names = tuple(labels.values()), (*labels, *metric.labels)
    if metric.kind == "info":
        texts = values[0][1]
        info = GaugeMetricFamily(name, metric.help, labels=(*names, *texts))
        info.add_metric((*given, *texts.values()), 1.0)
        return info
    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(name, metric.help, labels=names)
        histogram.add_metric(given, list(values[0][1]["buckets"].items()), values[0][1]["total"])
        return histogram
    family = (GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily)(name, metric.help, labels=names)
    for key, value in values:
        family.add_metric((*given, key) if metric.labels else given, float(value))
    return family


# Reasons of waiting that end by themselves, independent of free capacity.
_DEFERRED = frozenset(
    {"adapter_slots", "grammar", "swap_space", "host_load", "uncommitted", "preempted_this_step", "barrier", "paused",
     "draining", "excluded"}
)  # fmt: skip


def engine_snapshot(statistics: Mapping[str, Any] | None) -> dict[str, object]:
    """Return the engine's statistics (None: it does not answer) with the figures derived from them."""
    if statistics is None:
        return {"up": 0}
    scheduler = statistics.get("scheduler", {})
    snapshot = {**statistics, "up": 1}
    if scheduler.get("num_blocks") and "num_blocks_used" in scheduler:
        snapshot["kv_usage"] = scheduler["num_blocks_used"] / scheduler["num_blocks"]
    if "waiting_by_reason" in scheduler:  # vLLM has two classes: waiting for room, or for something that passes
        counts = scheduler["waiting_by_reason"]
        deferred = sum(count for reason, count in counts.items() if reason in _DEFERRED)
        snapshot["waiting_by_class"] = {"capacity": sum(counts.values()) - deferred, "deferred": deferred}
    return snapshot


def retry_snapshot(report: Mapping[str, Any]) -> dict[str, object]:
    """Return the report of kept answers with the journal's figures, which are absent without one."""
    journal = report["journal"]
    if journal["state"] == "off":
        return {**report, "journal": None}
    return {**report, "journal": {**journal, "up": int(journal["state"] == "on")}}


def cache_info(config: Config, block_size: int, num_blocks: int) -> dict[str, str]:
    """Return the settings of the KV pool, under the names of vLLM's cache_config_info."""
    cache = config.cache
    return {
        "block_size": str(block_size),
        "num_gpu_blocks": str(num_blocks),
        "num_gpu_blocks_override": str(cache.num_blocks),
        "cache_dtype": cache.kv_cache_dtype,
        "enable_prefix_caching": str(cache.enable_prefix_caching),
        "gpu_memory_utilization": str(cache.memory_fraction),
        "swap_space_bytes": str(cache.host_cache_bytes),
        "kv_cache_size_tokens": str(block_size * num_blocks),
    }
