"""What the engine tells of itself, as Prometheus series.

Owns: which statistic becomes which series. Does not: ask the engine (a snapshot is passed in).
Invariant: a statistic that the engine does not give makes no series; nothing is made up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from octavo.metrics.requests import spellings


@dataclass(frozen=True, slots=True)
class _Row:
    key: str
    own: str
    text: str
    familiar: str | None = None
    is_total: bool = False


_SCHEDULER = (
    _Row("num_running", "octavo_sequences_running", "sequences in the batch", "vllm:num_requests_running"),
    _Row("num_waiting", "octavo_requests_waiting", "requests that wait", "vllm:num_requests_waiting"),
    _Row("num_blocks", "octavo_kv_blocks", "KV blocks in the pool"),
    _Row("num_blocks_used", "octavo_kv_blocks_used", "KV blocks held by requests"),
    _Row("num_blocks_cached", "octavo_kv_blocks_cached", "free KV blocks that still hold a prefix"),
    _Row("num_steps", "octavo_steps", "steps committed", is_total=True),
    _Row("num_failed_steps", "octavo_steps_failed", "steps that failed", is_total=True),
    _Row("num_admitted", "octavo_admissions", "admissions, resumptions included", is_total=True),
    _Row("num_preemptions", "octavo_preemptions", "preemptions", "vllm:num_preemptions", is_total=True),
    _Row("num_computed_tokens", "octavo_computed_tokens", "token positions computed", is_total=True),
    _Row(
        "prefix_queried_tokens",
        "octavo_prefix_cache_queries",
        "tokens looked up",
        "vllm:prefix_cache_queries",
        is_total=True,
    ),
    _Row("prefix_hit_tokens", "octavo_prefix_cache_hits", "tokens found", "vllm:prefix_cache_hits", is_total=True),
)


class EngineMetrics:
    """One snapshot of the engine's statistics (None: it does not answer), as a collector of prometheus-client."""

    def __init__(self, model: str, statistics: Mapping[str, object] | None) -> None:
        self._model = model
        self._is_up = statistics is not None
        scheduler = (statistics or {}).get("scheduler")
        self._scheduler: Mapping[str, object] = scheduler if isinstance(scheduler, Mapping) else {}
        cache = (statistics or {}).get("cache_config")
        self._cache: Mapping[str, object] = cache if isinstance(cache, Mapping) else {}

    def collect(self) -> Iterator[Metric]:
        """Every series that the snapshot can fill."""
        yield from self._families(_Row("", "octavo_engine_up", "whether the engine answers"), float(self._is_up))
        for row in _SCHEDULER:
            value = self._scheduler.get(row.key)
            if isinstance(value, (int, float)):
                yield from self._families(row, float(value))
        usage = self._kv_usage()
        if usage is not None:
            row = _Row("", "octavo_kv_cache_usage", "share of the KV blocks held, 0 to 1", "vllm:kv_cache_usage_perc")
            yield from self._families(row, usage)
        if self._cache:
            row = _Row("", "octavo_cache_config_info", "how the KV pool is set up", "vllm:cache_config_info")
            for called, labels in spellings(row.own, row.familiar, self._model):
                labels = {**labels, **{key: str(value) for key, value in self._cache.items()}}
                yield _family(GaugeMetricFamily, called, row.text, labels, 1.0)

    def _kv_usage(self) -> float | None:
        total, used = self._scheduler.get("num_blocks"), self._scheduler.get("num_blocks_used")
        return used / total if isinstance(total, int) and isinstance(used, int) and total else None

    def _families(self, row: _Row, value: float) -> Iterator[Metric]:
        kind = CounterMetricFamily if row.is_total else GaugeMetricFamily
        for called, labels in spellings(row.own, row.familiar, self._model):
            yield _family(kind, called, row.text, labels, value)


def _family(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    text: str,
    labels: Mapping[str, str],
    value: float,
) -> Metric:
    family = kind(name, text, labels=tuple(labels))
    family.add_metric(tuple(labels.values()), value)
    return family
