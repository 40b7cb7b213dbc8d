"""What the front end counts of HTTP, under the names of the usual FastAPI instrumentation.

Owns: the series and their names, and bounded labels. Does not: read a clock.
Invariant: `handler` is a route's template or "none", so that no client can make series.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from octavo.observe.metrics.series import SECONDS, Counter, Histogram

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class HttpMetrics:
    """Responses by route, method and class of status, and how long they took to their last byte."""

    def __init__(self) -> None:
        self._requests = Counter()
        self._durations: dict[tuple[str, str], Histogram] = {}

    def responded(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Count a response that has ended."""
        named = method if method in _METHODS else "other"
        self._requests.add(1, handler, named, f"{status // 100}xx")
        self._durations.setdefault((handler, named), Histogram(SECONDS)).observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """Every series."""
        requests = CounterMetricFamily(
            "http_requests", "HTTP requests by route, method and status", labels=("handler", "method", "status")
        )
        for labels, count in self._requests.values.items():
            requests.add_metric(labels, count)
        yield requests
        durations = HistogramMetricFamily(
            "http_request_duration_seconds", "request to last byte of its answer", labels=("handler", "method")
        )
        for key, histogram in self._durations.items():
            durations.add_metric(key, list(histogram.cumulative()), histogram.total)
        yield durations
