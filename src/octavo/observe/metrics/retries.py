"""What is kept of requests with an Idempotency-Key, and how the journal is.

Owns: the series and their names. Does not: count, or show a key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_GAUGES = {
    "kept": ("octavo_kept_answers", "finished answers that are kept for a retry"),
    "running": ("octavo_running_keyed_requests", "requests with an Idempotency-Key that go on"),
    "bytes": ("octavo_kept_bytes", "bytes that both take in memory, roughly"),
}
_COUNTERS = {
    "attached": ("octavo_retries_attached", "requests answered from one that ran or was kept"),
    "conflicts": ("octavo_retries_conflicting", "requests refused because their key was used with another body"),
    "orphaned": ("octavo_requests_orphaned", "requests given up because nobody read them any more"),
}
_JOURNAL_GAUGES = {
    "bytes": ("octavo_journal_bytes", "bytes of the journal's segments"),
    "runs": ("octavo_journal_requests", "requests that the journal holds"),
}
_JOURNAL_COUNTERS = {
    "suspensions": ("octavo_journal_suspensions", "times that the disk failed the journal"),
    "compactions": ("octavo_journal_compactions", "times that the journal was written anew"),
}


class RetryMetrics:
    """One report, as a collector of prometheus-client. `octavo_journal_up` is absent where there is no journal."""

    def __init__(self, model: str, report: Mapping[str, object]) -> None:
        self._model = model
        self._report = report

    def collect(self) -> Iterator[Metric]:
        """Every series that the report can fill."""
        yield from self._families(self._report, _GAUGES, _COUNTERS)
        journal = self._report.get("journal")
        if isinstance(journal, Mapping) and journal.get("state") != "off":
            up = {"up": int(journal["state"] == "on")}
            yield from self._families(up, {"up": ("octavo_journal_up", "0 while the disk fails the journal")}, {})
            yield from self._families(journal, _JOURNAL_GAUGES, _JOURNAL_COUNTERS)

    def _families(
        self,
        values: Mapping[str, object],
        gauges: Mapping[str, tuple[str, str]],
        counters: Mapping[str, tuple[str, str]],
    ) -> Iterator[Metric]:
        for kind, table in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for key, (name, text) in table.items():
                value = values.get(key)
                if isinstance(value, (int, float)):
                    family = kind(name, text, labels=("model_name",))
                    family.add_metric((self._model,), value)
                    yield family
