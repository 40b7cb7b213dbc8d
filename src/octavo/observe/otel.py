"""Tracer: sends RequestTraces to an OpenTelemetry collector (the extra `otel`; OTLP over HTTP).

Owns: the package's provider, and the spans made of a trace. Does not: measure.
Invariant: if tracing is off, the package is not imported; if it is on, a slow or absent collector costs a bounded queue
in another thread and delays no request. Format: OpenTelemetry Protocol, W3C Trace Context, semantic conventions for
generative AI.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import time
from urllib.parse import urlsplit

from octavo.errors import ConfigError
from octavo.observe.request_trace import RequestTrace

_NEEDS = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
CLOSE_S = 3  # to send the queued traces at the end
_NS = 1_000_000_000


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
