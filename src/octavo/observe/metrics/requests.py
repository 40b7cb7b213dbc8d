"""Prometheus metrics of the API process: requests, their tokens and times, HTTP responses.

Owns: the metrics, as prometheus_client's objects, and their second names, which vLLM's dashboards use.
Does not: read a clock (times are arguments, seconds on one monotonic clock).
Invariants: each request is counted once, at its end; TTFT is measured from the request's arrival at the server; labels
have a bounded number of values, whatever a client sends.
Inter-token latency and generated tokens are counted once per token, for which prometheus_client's objects are three
times too slow: one Histogram of our own counts them, and collect() exports it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import prometheus_client
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from octavo.observe.metrics.declared import METRICS, vllm_labels
from octavo.observe.series import SECONDS, TOKENS, Histogram

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
