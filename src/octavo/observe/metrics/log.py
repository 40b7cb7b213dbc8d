"""How many lines of the log were dropped.

Owns: the series and its name. Does not: count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, Metric


class LogMetrics:
    """Dropped lines by process, as a collector of prometheus-client."""

    def __init__(self, dropped: Mapping[str, int]) -> None:
        self._dropped = dropped

    def collect(self) -> Iterator[Metric]:
        """The series."""
        counter = CounterMetricFamily(
            "octavo_log_lines_dropped",
            "log lines dropped: too many of one kind, or stderr was not read",
            labels=("process",),
        )
        for process, num_dropped in self._dropped.items():
            counter.add_metric((process,), num_dropped)
        yield counter
