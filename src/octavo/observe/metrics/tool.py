"""What the tool processes count: jobs, kills, deaths.

Owns: the series and their names. Does not: count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_COUNTERS = {
    "jobs": ("octavo_tool_jobs", "jobs given to tool processes: chat templates, schemas, expressions"),
    "refused": ("octavo_tool_refusals", "jobs that ended with an error of their input"),
    "kills": ("octavo_tool_kills", "tool processes killed because a job took too long"),
    "deaths": ("octavo_tool_deaths", "tool processes that ended by themselves"),
    "starts": ("octavo_tool_starts", "tool processes started"),
}
_GAUGES = {
    "processes": ("octavo_tool_processes", "tool processes that run now"),
    "waiting": ("octavo_tool_waiting", "jobs that wait for a free process"),
}


class ToolMetrics:
    """One snapshot, as a collector of prometheus-client."""

    def __init__(self, model: str, statistics: Mapping[str, int]) -> None:
        self._model = model
        self._statistics = statistics

    def collect(self) -> Iterator[Metric]:
        """Every series."""
        for key, (name, text) in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=("model_name",))
            counter.add_metric((self._model,), self._statistics[key])
            yield counter
        for key, (name, text) in _GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=("model_name",))
            gauge.add_metric((self._model,), self._statistics[key])
            yield gauge
