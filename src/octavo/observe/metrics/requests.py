"""What the front end measures of requests: counts, token counts and times.

Owns: the series and their names. Does not: read a clock (times are arguments, seconds on one monotonic clock).
Invariant: each request is counted once, at its end; TTFT counts from its arrival at the front end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from octavo.observe.metrics.http import HttpMetrics
from octavo.observe.metrics.series import SECONDS, TOKENS, Counter, Histogram


@dataclass(frozen=True, slots=True)
class Name:
    """How one series is called: ours, and the familiar ones where existing boards may look for them.

    `bounds` are the buckets under the familiar names; ours has them and its own.
    """

    own: str
    text: str
    familiar: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


# Buckets of vLLM's histograms: quantiles that a board takes from several engines need the same ones.
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
         160.0, 640.0, 2560.0)  # fmt: skip
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_LATENCY = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
            960.0, 1920.0, 7680.0)  # fmt: skip
_COUNTS = (1, 2, 5, 10, 20)
ENDS = ("stop", "length", "abort", "error")  # finished_reason under the familiar name, each shown from the start

_COUNTERS = {
    "prompt_tokens": Name("octavo_prompt_tokens", "prompt tokens of requests with a token", ("vllm:prompt_tokens",)),
    "generation_tokens": Name("octavo_generation_tokens", "tokens generated", ("vllm:generation_tokens",)),
    "cached_tokens": Name(
        "octavo_cached_tokens", "prompt tokens served from the prefix cache", ("vllm:prompt_tokens_cached",)
    ),
    "finished": Name("octavo_requests_finished", "requests that ran to an end", labels=("finished_reason",)),
    "failed": Name("octavo_requests_failed", "requests answered with an error", labels=("code",)),
    "ignored": Name(
        "octavo_ignored_fields", "fields of requests that were ignored, by known name or other", labels=("field",)
    ),
    "http": Name("octavo_http_responses", "HTTP responses", labels=("status",)),
}
_SUCCESS = Name("vllm:request_success", "requests that ended, by how", labels=("finished_reason",))
_HISTOGRAMS = {
    "ttft": Name(
        "octavo_time_to_first_token_seconds",
        "arrival to first token",
        ("vllm:time_to_first_token_seconds",),
        bounds=_TTFT,
    ),
    "itl": Name(
        "octavo_inter_token_latency_seconds",
        "time between tokens",
        ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
        bounds=_PER_TOKEN,
    ),
    "tpot": Name(
        "octavo_time_per_output_token_seconds",
        "mean time per token after the first",
        ("vllm:request_time_per_output_token_seconds",),
        bounds=_PER_TOKEN,
    ),
    "e2e": Name(
        "octavo_e2e_request_latency_seconds",
        "arrival to last token",
        ("vllm:e2e_request_latency_seconds",),
        bounds=_LATENCY,
    ),
    "queue": Name(
        "octavo_request_queue_time_seconds", "waiting", ("vllm:request_queue_time_seconds",), bounds=_LATENCY
    ),
    "prefill": Name(
        "octavo_request_prefill_time_seconds",
        "scheduled to first token",
        ("vllm:request_prefill_time_seconds",),
        bounds=_LATENCY,
    ),
    "decode": Name(
        "octavo_request_decode_time_seconds",
        "first to last token",
        ("vllm:request_decode_time_seconds",),
        bounds=_LATENCY,
    ),
    "inference": Name(
        "octavo_request_inference_time_seconds",
        "scheduled to last token",
        ("vllm:request_inference_time_seconds",),
        bounds=_LATENCY,
    ),
    "prompt_len": Name("octavo_request_prompt_tokens", "prompt tokens of a request", ("vllm:request_prompt_tokens",)),
    "output_len": Name(
        "octavo_request_generation_tokens", "tokens generated for a request", ("vllm:request_generation_tokens",)
    ),
    "longest": Name(
        "octavo_request_max_num_generation_tokens",
        "tokens of a request's longest choice",
        ("vllm:request_max_num_generation_tokens",),
    ),
    "max_tokens": Name("octavo_request_params_max_tokens", "max_tokens asked for", ("vllm:request_params_max_tokens",)),
    "n": Name("octavo_request_params_n", "choices made for a request", ("vllm:request_params_n",), bounds=_COUNTS),
}
_TOKEN_SIZED = frozenset({"prompt_len", "output_len", "longest", "max_tokens", "n"})


def _bounds(key: str) -> tuple[float, ...]:
    usual: tuple[float, ...] = TOKENS if key in _TOKEN_SIZED else SECONDS
    return tuple(sorted({*usual, *_HISTOGRAMS[key].bounds}))


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
    num_choices: int = 1  # that were made; completion_tokens counts those of all
    longest: int | None = None  # tokens of the longest choice; None: the mean is as good


class RequestMetrics:
    """The front end's series, as a collector of prometheus-client."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.counters = {key: Counter() for key in _COUNTERS}
        self.histograms = {key: Histogram(_bounds(key)) for key in _HISTOGRAMS}
        self._ends = dict.fromkeys(ENDS, 0)
        self.http = HttpMetrics()
        self._itl = self.histograms["itl"]

    def first_tokens(self, ttft_s: float, num_tokens: int, prompt_tokens: int = 0) -> None:
        """Count a request's first output, and with it the prompt that was computed for it."""
        self.histograms["ttft"].observe(ttft_s)
        self.counters["prompt_tokens"].add(prompt_tokens)
        self.counters["generation_tokens"].add(num_tokens)

    def prompt_only(self, prompt_tokens: int) -> None:
        """Count the prompt of a request that was to have no tokens."""
        self.counters["prompt_tokens"].add(prompt_tokens)

    def next_tokens(self, gap_s: float, num_tokens: int) -> None:
        """Count a later output, `gap_s` after the one before it."""
        self._itl.observe(gap_s / num_tokens, num_tokens)
        self.counters["generation_tokens"].add(num_tokens)

    def other_tokens(self, num_tokens: int) -> None:
        """Count the first output of a choice that began beside another."""
        self.counters["generation_tokens"].add(num_tokens)

    def finished(self, end: Finished) -> None:
        """Count a request that ran to its end."""
        self.counters["finished"].add(1, end.reason)
        self._ends[end.reason] += 1
        self.counters["cached_tokens"].add(end.cached_tokens)
        see = self.histograms
        see["e2e"].observe(end.e2e_s)
        see["queue"].observe(end.queue_s)
        see["prefill"].observe(max(0.0, end.ttft_s - end.queue_s))
        see["decode"].observe(max(0.0, end.e2e_s - end.ttft_s))
        see["inference"].observe(max(0.0, end.e2e_s - end.queue_s))
        see["prompt_len"].observe(end.prompt_tokens)
        see["output_len"].observe(end.completion_tokens)
        see["longest"].observe(end.longest if end.longest is not None else end.completion_tokens // end.num_choices)
        see["n"].observe(end.num_choices)
        later = end.completion_tokens / end.num_choices - 1
        if later > 0:
            see["tpot"].observe(max(0.0, end.e2e_s - end.ttft_s) / later)
        if end.max_tokens is not None:
            see["max_tokens"].observe(end.max_tokens)

    def ended_early(self, reason: str) -> None:
        """Count a request that ran and did not get to its end: "abort" (somebody gave it up) or "error"."""
        self._ends[reason] += 1

    def failed(self, code: str) -> None:
        """Count a request that was answered with an error."""
        self.counters["failed"].add(1, code)

    def ignored_field(self, label: str) -> None:
        """Count a field of a request that was ignored; `label` is one of a fixed set of names."""
        self.counters["ignored"].add(1, label)

    def responded(self, status: int) -> None:
        """Count an HTTP response by its status."""
        self.counters["http"].add(1, str(status))

    def collect(self) -> Iterator[Metric]:
        """Every series under its own name and its familiar one."""
        for key, name in _COUNTERS.items():
            for called, labels in spellings(name.own, name.familiar, self._model):
                family: Metric = CounterMetricFamily(called, name.text, labels=(*labels, *name.labels))
                values = self.counters[key].values or ({} if name.labels else {(): 0.0})
                for given, value in values.items():
                    family.add_metric((*labels.values(), *given), value)  # type: ignore[attr-defined]
                yield family
        yield self._success()
        yield from self.http.collect()
        for key, name in _HISTOGRAMS.items():
            histogram = self.histograms[key]
            for called, labels in spellings(name.own, name.familiar, self._model):
                shown = name.bounds if called != name.own and name.bounds else None
                family = HistogramMetricFamily(called, name.text, labels=tuple(labels))
                family.add_metric(tuple(labels.values()), list(histogram.cumulative(shown)), histogram.total)
                yield family

    def _success(self) -> Metric:
        family = CounterMetricFamily(_SUCCESS.own, _SUCCESS.text, labels=("engine", "model_name", *_SUCCESS.labels))
        for reason, count in self._ends.items():
            family.add_metric(("0", self._model, reason), count)
        return family


def spellings(own: str, familiar: tuple[str, ...], model: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each name with the labels that boards for it expect."""
    yield own, {"model_name": model}
    for name in familiar:
        yield name, {"engine": "0", "model_name": model}
