"""Prometheus metrics of the API process: requests, their tokens and times, HTTP responses.

Owns: the metrics, as prometheus_client's objects, and their second names, under which vLLM's boards look for them.
Does not: read a clock (times are arguments, seconds on one monotonic clock).
Invariants: each request is counted once, at its end; TTFT counts from the request's arrival at the server; labels
have a bounded number of values, whatever a client sends.
Inter-token latency and generated tokens are counted once per token, for which prometheus_client's objects are three
times too slow: one Histogram of our own counts them, and collect() exports it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import prometheus_client
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from octavo.observe.series import SECONDS, TOKENS, Histogram

# Buckets of vLLM's histograms: quantiles that a board takes from several engines need the same ones.
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
         160.0, 640.0, 2560.0)  # fmt: skip
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_LATENCY = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
            960.0, 1920.0, 7680.0)  # fmt: skip
_COUNTS = (1, 2, 5, 10, 20)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
ENDS = ("stop", "length", "abort", "error")  # values of vllm:request_success_total, each exported from the start


def vllm_labels(model: str) -> dict[str, str]:
    """Return the labels that series under vLLM's names have."""
    return {"engine": "0", "model_name": model}


@dataclass(frozen=True, slots=True)
class Finished:
    """One request's numbers at its end; times in seconds."""

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


@dataclass(frozen=True, slots=True)
class _Aliased:
    """A metric and its vLLM names. `bounds`: the buckets exported under those; the metric has them and its own."""

    metric: prometheus_client.Counter | prometheus_client.Histogram
    vllm: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


class RequestMetrics:
    """The metrics of the API process; a collector, to be registered in a prometheus_client CollectorRegistry."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._metrics: list[_Aliased] = []
        self.prompt_tokens = self._counter(
            "octavo_prompt_tokens", "prompt tokens of requests with a token", "vllm:prompt_tokens"
        ).labels(model)
        self.cached_tokens = self._counter(
            "octavo_cached_tokens", "prompt tokens served from the prefix cache", "vllm:prompt_tokens_cached"
        ).labels(model)
        self._finished = self._counter("octavo_requests_finished", "requests that ran to an end", by="finished_reason")
        self._failed = self._counter("octavo_requests_failed", "requests answered with an error", by="code")
        self._ignored = self._counter(
            "octavo_ignored_fields", "fields of requests that were ignored, by known name or other", by="field"
        )
        self._responses = self._counter("octavo_http_responses", "HTTP responses", by="status")
        self._success = prometheus_client.Counter(
            "vllm:request_success",
            "requests that ended, by how",
            ("engine", "model_name", "finished_reason"),
            registry=None,
        )
        for reason in ENDS:
            self._success.labels("0", model, reason)
        self._http_requests = prometheus_client.Counter(
            "http_requests",
            "HTTP requests by route, method and status",
            ("handler", "method", "status"),
            registry=None,
        )
        self._http_seconds = prometheus_client.Histogram(
            "http_request_duration_seconds",
            "request to last byte of its answer",
            ("handler", "method"),
            buckets=SECONDS,
            registry=None,
        )
        self._metrics += [_Aliased(self._success), _Aliased(self._http_requests), _Aliased(self._http_seconds)]
        self._add_histograms()
        self._inter_token = Histogram(sorted({*SECONDS, *_PER_TOKEN}))
        self._num_generated = 0

    def _add_histograms(self) -> None:
        add = self._histogram
        self._ttft = add("octavo_time_to_first_token_seconds", "arrival to first token", _TTFT)
        self._tpot = add(
            "octavo_time_per_output_token_seconds",
            "mean time per token after the first",
            _PER_TOKEN,
            vllm="vllm:request_time_per_output_token_seconds",
        )
        self._e2e = add("octavo_e2e_request_latency_seconds", "arrival to last token", _LATENCY)
        self._queue = add("octavo_request_queue_time_seconds", "waiting", _LATENCY)
        self._prefill = add("octavo_request_prefill_time_seconds", "scheduled to first token", _LATENCY)
        self._decode = add("octavo_request_decode_time_seconds", "first to last token", _LATENCY)
        self._inference = add("octavo_request_inference_time_seconds", "scheduled to last token", _LATENCY)
        self._prompt_len = add("octavo_request_prompt_tokens", "prompt tokens of a request", usual=TOKENS)
        self._output_len = add("octavo_request_generation_tokens", "tokens generated for a request", usual=TOKENS)
        self._longest = add(
            "octavo_request_max_num_generation_tokens", "tokens of a request's longest choice", usual=TOKENS
        )
        self._max_tokens = add("octavo_request_params_max_tokens", "max_tokens of a request", usual=TOKENS)
        self._n = add("octavo_request_params_n", "choices made for a request", _COUNTS, usual=TOKENS)

    def _counter(self, name: str, text: str, *vllm: str, by: str = "") -> prometheus_client.Counter:
        labels = ("model_name", by) if by else ("model_name",)
        counter = prometheus_client.Counter(name, text, labels, registry=None)
        self._metrics.append(_Aliased(counter, vllm))
        return counter

    def _histogram(
        self,
        name: str,
        text: str,
        bounds: tuple[float, ...] = (),
        *,
        usual: tuple[float, ...] = SECONDS,
        vllm: str | None = None,
    ) -> prometheus_client.Histogram:
        """Make a histogram whose vLLM name is that after `octavo_` where `vllm` is None."""
        buckets = sorted({*usual, *bounds})
        histogram = prometheus_client.Histogram(name, text, ("model_name",), buckets=buckets, registry=None)
        alias = name.replace("octavo_", "vllm:", 1) if vllm is None else vllm
        self._metrics.append(_Aliased(histogram, (alias,), bounds))
        return histogram.labels(self._model)

    def first_tokens(self, ttft_s: float, num_tokens: int, prompt_tokens: int = 0) -> None:
        """Count a request's first output, and with it the prompt that was computed for it."""
        self._ttft.observe(ttft_s)
        self.prompt_tokens.inc(prompt_tokens)
        self._num_generated += num_tokens

    def prompt_only(self, prompt_tokens: int) -> None:
        """Count the prompt of a request that ended without a token, as asked."""
        self.prompt_tokens.inc(prompt_tokens)

    def next_tokens(self, gap_s: float, num_tokens: int) -> None:
        """Count a later output, `gap_s` after the one before it."""
        self._inter_token.observe(gap_s / num_tokens, num_tokens)
        self._num_generated += num_tokens

    def other_tokens(self, num_tokens: int) -> None:
        """Count the first output of a choice of a request that has tokens already."""
        self._num_generated += num_tokens

    def finished(self, end: Finished) -> None:
        """Count a request that ran to its end."""
        self._finished.labels(self._model, end.reason).inc()
        self._success.labels("0", self._model, end.reason).inc()
        self.cached_tokens.inc(end.cached_tokens)
        self._e2e.observe(end.e2e_s)
        self._queue.observe(end.queue_s)
        self._prefill.observe(max(0.0, end.ttft_s - end.queue_s))
        self._decode.observe(max(0.0, end.e2e_s - end.ttft_s))
        self._inference.observe(max(0.0, end.e2e_s - end.queue_s))
        self._prompt_len.observe(end.prompt_tokens)
        self._output_len.observe(end.completion_tokens)
        self._longest.observe(end.longest if end.longest is not None else end.completion_tokens // end.num_choices)
        self._n.observe(end.num_choices)
        later = end.completion_tokens / end.num_choices - 1
        if later > 0:
            self._tpot.observe(max(0.0, end.e2e_s - end.ttft_s) / later)
        if end.max_tokens is not None:
            self._max_tokens.observe(end.max_tokens)

    def ended_early(self, reason: str) -> None:
        """Count a request that did not run to its end: "abort" (the client cancelled it or left) or "error"."""
        self._success.labels("0", self._model, reason).inc()

    def failed(self, code: str) -> None:
        """Count a request that was answered with an error."""
        self._failed.labels(self._model, code).inc()

    def ignored_field(self, label: str) -> None:
        """Count a field of a request that was ignored; `label` is one of a fixed set of names."""
        self._ignored.labels(self._model, label).inc()

    def response_started(self, status: int) -> None:
        """Count an HTTP response by its status."""
        self._responses.labels(self._model, str(status)).inc()

    def response_ended(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Count a response that has ended; `handler` is a route's template or "none"."""
        known = method if method in _METHODS else "other"
        self._http_requests.labels(handler, known, f"{status // 100}xx").inc()
        self._http_seconds.labels(handler, known).observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric under its own name and under vLLM's."""
        for each in self._metrics:
            for family in each.metric.collect():
                yield _renamed(family, family.name, {})
                for name in each.vllm:
                    yield _renamed(family, name, vllm_labels(self._model), each.bounds)
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
