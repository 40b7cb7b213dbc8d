"""Prometheus metrics: the table of all (metrics.csv), the API process's own, and those of counts kept elsewhere.

Owns: the table; RequestMetrics, the metrics of requests and HTTP responses, as prometheus_client's objects;
SnapshotMetrics, which finds the others' numbers in snapshots of the engine, admission, retries and stored responses.
Each is exported under its own name and under vLLM's. Does not: read a clock (times are arguments, seconds on one
monotonic clock), or request snapshots. Invariants: a number that is not in the snapshots has no series; each request
is counted once, at its end; TTFT is measured from its arrival at the server; labels have a bounded number of values,
whatever a client sends. Inter-token latency and generated tokens are counted once per token, for which
prometheus_client's objects are three times too slow: one Histogram of our own counts them, and collect() exports it.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.config import Config
from octavo.observe.series import SECONDS, TOKENS, Histogram

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


# Buckets of vLLM's histograms: a dashboard needs the same ones for quantiles over several engines.
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
         160.0, 640.0, 2560.0)  # fmt: skip
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_LATENCY = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
            960.0, 1920.0, 7680.0)  # fmt: skip
# By their name in the table: Octavo's buckets, and those under vLLM's name, which Octavo's histograms have too.
_BUCKETS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "seconds": (SECONDS, ()),
    "ttft": (SECONDS, _TTFT),
    "per_token": (SECONDS, _PER_TOKEN),
    "latency": (SECONDS, _LATENCY),
    "tokens": (TOKENS, ()),
    "counts": (TOKENS, (1, 2, 5, 10, 20)),
}
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
ENDS = ("stop", "length", "abort", "error")  # values of vllm:request_success_total, each exported from the start


@dataclass(frozen=True, slots=True)
class Finished:
    """The figures of one request at its end; times in seconds."""

    reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    queue_s: float
    ttft_s: float
    e2e_s: float
    max_tokens: int | None = None
    num_choices: int = 1  # generated; completion_tokens is their sum
    longest: int | None = None  # tokens of the longest choice; None: the mean is used


class RequestMetrics:
    """The metrics of the API process; a collector, to be registered in a prometheus_client CollectorRegistry."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._declared = {metric.place[1]: metric for metric in METRICS if metric.place[0] == "requests"}
        self._counters: dict[str, prometheus_client.Counter] = {}
        self._histograms: dict[str, prometheus_client.Histogram] = {}
        for key, metric in self._declared.items():
            own, made = metric.own_labels(model), metric.name or metric.vllm[0]
            labels = (*own, *metric.labels)
            if metric.kind == "counter":
                self._counters[key] = prometheus_client.Counter(made, metric.help, labels, registry=None)
            else:
                buckets = sorted({bound for bounds in _BUCKETS[metric.buckets] for bound in bounds})
                self._histograms[key] = prometheus_client.Histogram(
                    made, metric.help, labels, buckets=buckets, registry=None
                )
            if not metric.labels:  # exported from the start
                (self._counters | self._histograms)[key].labels(model)
        for reason in ENDS:
            self._counters["success"].labels(model, reason)
        self._inter_token = Histogram(sorted({*SECONDS, *_PER_TOKEN}))
        self._num_generated = 0

    def first_tokens(self, ttft_s: float, num_tokens: int, prompt_tokens: int = 0) -> None:
        """Count a request's first output, and its prompt."""
        self._histograms["ttft"].labels(self._model).observe(ttft_s)
        self._count("prompt_tokens", prompt_tokens)
        self._num_generated += num_tokens

    def prompt_only(self, prompt_tokens: int) -> None:
        """Count the prompt of a request that requested no tokens."""
        self._count("prompt_tokens", prompt_tokens)

    def next_tokens(self, gap_s: float, num_tokens: int) -> None:
        """Count a later output, `gap_s` after the one before it."""
        self._inter_token.observe(gap_s / num_tokens, num_tokens)
        self._num_generated += num_tokens

    def other_tokens(self, num_tokens: int) -> None:
        """Count the first output of a choice of a request that already has tokens."""
        self._num_generated += num_tokens

    def finished(self, end: Finished) -> None:
        """Count a request that ran to its end."""
        self._count("finished", 1, end.reason)
        self._count("success", 1, end.reason)
        self._count("cached_tokens", end.cached_tokens)
        decode_s, later = max(0.0, end.e2e_s - end.ttft_s), end.completion_tokens / end.num_choices - 1
        values = {
            "e2e": end.e2e_s,
            "queue": end.queue_s,
            "prefill": max(0.0, end.ttft_s - end.queue_s),
            "decode": decode_s,
            "tpot": decode_s / later if later > 0 else None,
            "inference": max(0.0, end.e2e_s - end.queue_s),
            "prompt_length": end.prompt_tokens,
            "output_length": end.completion_tokens,
            "longest": end.longest if end.longest is not None else end.completion_tokens // end.num_choices,
            "n": end.num_choices,
            "max_tokens": end.max_tokens,
        }
        for key, value in values.items():
            if value is not None:
                self._histograms[key].labels(self._model).observe(value)

    def ended_early(self, reason: str) -> None:
        """Count a request that did not run to its end: "abort" (cancelled or disconnected) or "error"."""
        self._count("success", 1, reason)

    def failed(self, code: str) -> None:
        """Count a request that was answered with an error."""
        self._count("failed", 1, code)

    def ignored_field(self, label: str) -> None:
        """Count a field of a request that was ignored; `label` is one of a fixed set of names."""
        self._count("ignored", 1, label)

    def response_started(self, status: int) -> None:
        """Count an HTTP response by its status."""
        self._count("responses", 1, str(status))

    def response_ended(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Count a response that has ended; `handler` is a route's template or "none"."""
        known = method if method in _METHODS else "other"
        self._counters["http"].labels(handler, known, f"{status // 100}xx").inc()
        self._histograms["http_seconds"].labels(handler, known).observe(seconds)

    def _count(self, key: str, amount: int, *label: str) -> None:
        self._counters[key].labels(self._model, *label).inc(amount)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric under its own name and under vLLM's."""
        for key, metric in self._declared.items():
            [family] = (self._counters if metric.kind == "counter" else self._histograms)[key].collect()
            if metric.name:
                yield _renamed(family, metric.name, {})
            for name in metric.vllm:
                bounds = _BUCKETS[metric.buckets][1] if metric.buckets else ()
                yield _renamed(family, name, vllm_labels(self._model), bounds)
        yield from self._per_token()

    def _per_token(self) -> Iterator[Metric]:
        own = {"model_name": self._model}
        aliased = vllm_labels(self._model)
        for name, labels in (("octavo_generation_tokens", own), ("vllm:generation_tokens", aliased)):
            counter = CounterMetricFamily(name, "tokens generated", labels=tuple(labels))
            counter.add_metric(tuple(labels.values()), self._num_generated)
            yield counter
        histogram, text = self._inter_token, "time between tokens"
        for name, labels, bounds in (
            ("octavo_inter_token_latency_seconds", own, None),
            ("vllm:inter_token_latency_seconds", aliased, _PER_TOKEN),
            ("vllm:time_per_output_token_seconds", aliased, _PER_TOKEN),
        ):
            family = HistogramMetricFamily(name, text, labels=tuple(labels))
            family.add_metric(tuple(labels.values()), list(histogram.cumulative(bounds)), histogram.total)
            yield family


def _renamed(family: Metric, name: str, labels: Mapping[str, str], bounds: Iterable[float] = ()) -> Metric:
    """Return a family under this name, with these labels set, without *_created and with only these buckets."""
    renamed = Metric(name, family.documentation, family.type)
    shown = {*map(float, bounds), float("inf")}
    for sample in family.samples:
        suffix = sample.name.removeprefix(family.name)
        is_hidden = bounds and suffix == "_bucket" and float(sample.labels["le"]) not in shown
        if suffix != "_created" and not is_hidden:
            renamed.add_sample(name + suffix, {**labels, **sample.labels}, sample.value)
    return renamed


class SnapshotMetrics:
    """Exports the numbers in named snapshots ("engine", "admission", ...); a collector for a CollectorRegistry."""

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


class MergedMetrics:
    """Exports the metrics of several models: a family of one name once, with the samples of all of them."""

    def __init__(self, collectors: Sequence[Collector]) -> None:
        self._collectors = collectors

    def collect(self) -> Iterator[Metric]:
        """Yield each family once."""
        families: dict[str, Metric] = {}
        for collector in self._collectors:
            for family in collector.collect():
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples += family.samples
        yield from families.values()


def _find(snapshot: object, place: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield (the key that matches the label, value) for each value at a place; None counts as absent."""
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
