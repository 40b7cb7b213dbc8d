"""What admission counts: who waits, how full the queue is, what each key used.

Owns: the series and their names. Does not: count, or show a key (its name only).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_GAUGES = {
    "waiting": ("octavo_queue_sequences", "sequences that wait for a slot or KV room, as the front end sees it"),
    "max_waiting": ("octavo_queue_sequences_max", "the bound on them"),
    "waiting_tokens": ("octavo_queue_prompt_tokens", "prompt tokens of requests without a first token"),
    "max_waiting_tokens": ("octavo_queue_prompt_tokens_max", "the bound on them"),
    "running": ("octavo_queue_running_sequences", "sequences that have a token and no end"),
    "load": ("octavo_load_level", "0 normal, 1 busy (queue half full), 2 crowded (three quarters), 3 full"),
    "wait_s": ("octavo_queue_wait_estimate_seconds", "how long a request that comes now would wait; absent: unknown"),
}
_KEY_COUNTERS = {
    "requests": ("octavo_key_requests", "requests of a key that were let past its limits"),
    "tokens": ("octavo_key_tokens", "prompt and output tokens of a key"),
    "refused": ("octavo_key_refusals", "requests of a key that got 429"),
}


class AdmissionMetrics:
    """One snapshot, as a collector of prometheus-client."""

    def __init__(self, model: str, snapshot: Mapping[str, object]) -> None:
        self._model = model
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """Every series that the snapshot can fill."""
        for key, (name, text) in _GAUGES.items():
            value = self._snapshot.get(key)
            if isinstance(value, (int, float)):
                gauge = GaugeMetricFamily(name, text, labels=("model_name",))
                gauge.add_metric((self._model,), value)
                yield gauge
        keys = self._snapshot.get("keys")
        if not isinstance(keys, Mapping) or not keys:
            return
        for counted, (name, text) in _KEY_COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=("model_name", "key"))
            for key, values in keys.items():
                counter.add_metric((self._model, key), values[counted])
            yield counter
        family = GaugeMetricFamily("octavo_key_open_requests", "open requests of a key", labels=("model_name", "key"))
        for key, values in keys.items():
            family.add_metric((self._model, key), values["open"])
        yield family
