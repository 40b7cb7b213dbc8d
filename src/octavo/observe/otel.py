"""RequestTrace: when a request was queued, prefilled, decoded and preempted; Tracer sends traces to OpenTelemetry.

Owns: the spans and their attributes (OpenTelemetry's gen_ai.* names); the package's provider (the extra `otel`; OTLP
over HTTP). Does not: measure, or hold a prompt or an answer. Times are seconds on the monotonic clock; a trace is
complete when it ends. Invariant: if tracing is off, the package is not imported; if it is on, a slow or absent
collector costs a bounded queue in another thread and delays no request. Format: OpenTelemetry Protocol, W3C Trace
Context, semantic conventions for generative AI.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from octavo.errors import ConfigError

_NEEDS = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
CLOSE_S = 3  # to send the queued traces at the end
_NS = 1_000_000_000
Value = str | bool | int | float | Sequence[str]


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """A part of a request, half-open in time."""

    name: str
    start: float
    end: float
    attributes: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Timed:
    """The times of one prompt: `arrival` and `ended` are on the clock; all other times are seconds since `arrival`."""

    arrival: float
    queue_s: float
    ttft_s: float
    ended: float
    preempted: Sequence[tuple[float, float]] = ()
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0


@dataclass(slots=True)
class RequestTrace:
    """One HTTP request. `parent` has its traceparent and tracestate headers, as received."""

    name: str
    start: float
    parent: Mapping[str, str] = field(default_factory=dict)
    attributes: dict[str, Value] = field(default_factory=dict)
    spans: list[TraceSpan] = field(default_factory=list)
    end: float | None = None
    error: str | None = None
    _timed: list[Timed] = field(default_factory=list)
    _reasons: list[str] = field(default_factory=list)

    def timed(self, times: Timed, reason: str) -> None:
        """Add the spans of one prompt that ended, and its finish reason."""
        scheduled, first = times.arrival + times.queue_s, times.arrival + times.ttft_s
        self.spans.append(TraceSpan("queue", times.arrival, scheduled))
        self.spans.append(
            TraceSpan("prefill", scheduled, max(scheduled, first), {"octavo.cached_tokens": times.cached_tokens})
        )
        self.spans.append(TraceSpan("decode", max(scheduled, first), max(first, times.ended)))
        self.spans += [
            TraceSpan("preempted", times.arrival + out, times.arrival + back) for out, back in times.preempted
        ]
        self._timed.append(times)
        self._reasons.append(reason)

    def finish(self, now: float) -> None:
        """Set the totals; only the first call has an effect."""
        if self.end is not None:
            return
        self.end = now
        if self._timed:
            first = min(times.arrival + times.ttft_s for times in self._timed) - self.start
            self.attributes |= {
                "gen_ai.usage.input_tokens": sum(times.input_tokens for times in self._timed),
                "gen_ai.usage.output_tokens": sum(times.output_tokens for times in self._timed),
                "gen_ai.usage.cache_read.input_tokens": sum(times.cached_tokens for times in self._timed),
                "gen_ai.response.finish_reasons": list(self._reasons),
                "gen_ai.latency.time_in_queue": max(times.queue_s for times in self._timed),
                "gen_ai.latency.time_to_first_token": first,
                "gen_ai.latency.e2e": now - self.start,
            }


def check_endpoint(endpoint: str | None) -> None:
    """Raise ConfigError for an endpoint that is no URL, or if the package is missing."""
    if endpoint is None:
        return
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"--otlp-traces-endpoint is {endpoint!r}; give a URL of OTLP over HTTP, such as "
            "http://127.0.0.1:4318/v1/traces"
        )
    if not all(_is_installed(name) for name in _NEEDS):
        raise ConfigError("--otlp-traces-endpoint needs OpenTelemetry; install it with: pip install 'octavo[otel]'")


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a parent package
        return False


class Tracer:
    """Sender of finished traces; with `endpoint` None it drops them."""

    def __init__(self, endpoint: str | None) -> None:
        check_endpoint(endpoint)
        self.is_on = endpoint is not None
        self._clock_offset = time.time() - time.monotonic()
        if endpoint is not None:
            self._open(endpoint)

    def _open(self, endpoint: str) -> None:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        version = importlib.metadata.version("octavo")
        self._api = trace
        self._read_parent = TraceContextTextMapPropagator().extract
        named = Resource.create({"service.name": "octavo", "service.version": version})  # OTEL_* variables win
        self._provider = TracerProvider(resource=named, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=CLOSE_S)))
        self._tracer = self._provider.get_tracer("octavo", version)

    def send(self, trace: RequestTrace) -> None:
        """Queue a finished trace; another thread sends it."""
        if not self.is_on or trace.end is None:
            return
        api = self._api
        root = self._tracer.start_span(
            trace.name,
            context=self._read_parent(trace.parent),
            kind=api.SpanKind.SERVER,
            attributes=trace.attributes,
            start_time=self._wall(trace.start),
        )
        inside = api.set_span_in_context(root)
        for span in trace.spans:
            child = self._tracer.start_span(
                span.name, context=inside, attributes=span.attributes, start_time=self._wall(span.start)
            )
            child.end(self._wall(span.end))
        if trace.error is not None:
            root.set_attribute("error.type", trace.error)
            root.set_status(api.StatusCode.ERROR)
        root.end(self._wall(trace.end))

    def close(self) -> None:
        """Send the queued traces, within a few seconds. It blocks: call it from a thread. Idempotent."""
        if self.is_on:
            self.is_on = False
            self._provider.shutdown()

    def _wall(self, at: float) -> int:
        return int((at + self._clock_offset) * _NS)
