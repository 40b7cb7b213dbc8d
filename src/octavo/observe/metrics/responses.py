"""What is stored of /v1/responses.

Owns: the series and their names. Does not: count, or show an id or a tenant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_GAUGES = {
    "kept": ("octavo_stored_responses", "responses that are stored"),
    "bytes": ("octavo_stored_response_bytes", "bytes that they take in memory, roughly"),
    "running": ("octavo_background_responses", "responses that run in the background"),
}
_COUNTERS = {"given_way": ("octavo_stored_responses_given_way", "responses forgotten because others needed the room")}


class ResponseMetrics:
    """One report, as a collector of prometheus-client."""

    def __init__(self, model: str, report: Mapping[str, int]) -> None:
        self._model = model
        self._report = report

    def collect(self) -> Iterator[Metric]:
        """Every series."""
        for kind, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for key, (name, text) in table.items():
                family = kind(name, text, labels=("model_name",))
                family.add_metric((self._model,), self._report[key])
                yield family
