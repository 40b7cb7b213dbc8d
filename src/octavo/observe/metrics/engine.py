"""What the engine tells of itself, as Prometheus series.

Owns: which statistic becomes which series. Does not: ask the engine (a snapshot is passed in).
Invariant: a statistic that the engine does not give makes no series; nothing is made up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from octavo.config import Config
from octavo.observe.metrics.requests import spellings


@dataclass(frozen=True, slots=True)
class _Row:
    key: str
    own: str
    text: str
    familiar: tuple[str, ...] = ()
    is_total: bool = False


_SCHEDULER = (
    _Row("num_running", "octavo_sequences_running", "sequences in the batch", ("vllm:num_requests_running",)),
    _Row("num_waiting", "octavo_requests_waiting", "requests that wait", ("vllm:num_requests_waiting",)),
    _Row("num_swapped", "octavo_requests_swapped", "waiting with their KV on the host", ("vllm:num_requests_swapped",)),
    _Row("num_requests", "octavo_requests", "requests taken", is_total=True),
    _Row("num_blocks", "octavo_kv_blocks", "KV blocks in the pool"),
    _Row("num_blocks_used", "octavo_kv_blocks_used", "KV blocks held by requests"),
    _Row("num_blocks_cached", "octavo_kv_blocks_cached", "free KV blocks that still hold a prefix"),
    _Row("num_host_blocks", "octavo_host_kv_blocks", "KV blocks on the host"),
    _Row("num_host_blocks_used", "octavo_host_kv_blocks_used", "KV blocks on the host that hold something"),
    _Row("num_steps", "octavo_steps", "steps committed", is_total=True),
    _Row("num_failed_steps", "octavo_steps_failed", "steps that failed", is_total=True),
    _Row("num_admitted", "octavo_admissions", "requests that began to run", is_total=True),
    _Row(
        "num_preemptions",
        "octavo_preemptions",
        "preemptions for lack of room",
        ("vllm:num_preemptions",),
        is_total=True,
    ),
    _Row("num_requeued", "octavo_requests_requeued", "requests put back after a failed row or step", is_total=True),
    _Row("num_computed_tokens", "octavo_computed_tokens", "token positions computed", is_total=True),
    _Row(
        "prefix_queried_tokens",
        "octavo_prefix_cache_queries",
        "tokens looked up",
        ("vllm:prefix_cache_queries",),
        is_total=True,
    ),
    _Row("prefix_hit_tokens", "octavo_prefix_cache_hits", "tokens found", ("vllm:prefix_cache_hits",), is_total=True),
    _Row("num_host_hit_tokens", "octavo_host_cache_hits", "tokens found on the host", is_total=True),
    _Row("num_swapped_out_tokens", "octavo_swapped_out_tokens", "tokens moved to the host", is_total=True),
    _Row("num_swapped_in_tokens", "octavo_swapped_in_tokens", "tokens moved back", is_total=True),
    _Row(
        "num_drafted_tokens",
        "octavo_drafted_tokens",
        "guessed tokens verified",
        ("vllm:spec_decode_num_draft_tokens",),
        is_total=True,
    ),
    _Row(
        "num_accepted_tokens",
        "octavo_accepted_tokens",
        "guessed tokens that were right",
        ("vllm:spec_decode_num_accepted_tokens",),
        is_total=True,
    ),
    _Row("num_forks", "octavo_forks", "sequences that began with another's blocks", is_total=True),
    _Row("num_copies", "octavo_kv_block_copies", "KV blocks copied", is_total=True),
    _Row("num_adopted_blocks", "octavo_kv_blocks_adopted", "KV blocks given up for an equal one", is_total=True),
    _Row("num_bypasses", "octavo_bypasses", "admissions past one that lacked room", is_total=True),
    _Row("num_policy_errors", "octavo_policy_errors", "answers of the policy that were no key", is_total=True),
)
# Mappings from a label's value to a number: (section, key) -> the row and the label.
_LABELLED = {
    ("scheduler", "waiting_by_reason"): (
        _Row("", "octavo_requests_waiting_by_reason", "requests that wait, by what for"),
        "reason",
    ),
    ("steps", "total_s"): (_Row("", "octavo_step_seconds", "seconds of steps; step is all", is_total=True), "part"),
    ("collected", "choice_ends"): (
        _Row("", "octavo_choices_finished", "choices that ended before their request", is_total=True),
        "finished_reason",
    ),
}
_MEMORY = (
    _Row("logical_blocks", "octavo_kv_blocks_logical", "KV blocks as if nothing were shared"),
    _Row("saved_blocks", "octavo_kv_blocks_saved", "KV blocks that sharing saves"),
    _Row("reserved_slots", "octavo_kv_slots_reserved", "token slots held and not filled"),
    _Row("wasted_share", "octavo_kv_wasted_share", "share of held token slots not filled, 0 to 1"),
)
_DRIFT = (
    _Row("ratio", "octavo_step_time_drift", "time of late steps over what --drift-baseline says"),
    _Row("is_drifting", "octavo_step_time_drifting", "whether steps drift from --drift-baseline, 0 or 1"),
    _Row("alarms", "octavo_step_time_drift_alarms", "times that steps began to drift", is_total=True),
)
_RECORDING = (
    _Row("is_recording", "octavo_recording", "whether decisions are being recorded (--record), 0 or 1"),
    _Row("bytes", "octavo_recording_bytes", "bytes of the segment that is being recorded"),
)


_USAGE = _Row(
    "",
    "octavo_kv_cache_usage",
    "share of the KV blocks held, 0 to 1",
    ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
)
_CACHE = _Row("", "octavo_cache_config_info", "how the KV pool is set up", ("vllm:cache_config_info",))
# Reasons of waiting that pass by themselves, whatever room there is.
_DEFERRED = frozenset(
    {"adapter_slots", "grammar", "swap_space", "host_load", "uncommitted", "preempted_this_step", "barrier", "paused",
     "draining", "excluded"}
)  # fmt: skip


def cache_info(config: Config, block_size: int, num_blocks: int) -> dict[str, str]:
    """How the KV pool is set up, under the names of vLLM's cache_config_info."""
    cache = config.cache
    return {
        "block_size": str(block_size),
        "num_gpu_blocks": str(num_blocks),
        "num_gpu_blocks_override": str(cache.num_blocks),
        "cache_dtype": cache.kv_cache_dtype,
        "enable_prefix_caching": str(cache.enable_prefix_caching),
        "gpu_memory_utilization": str(cache.memory_fraction),
        "swap_space_bytes": str(cache.host_cache_bytes),
        "kv_cache_size_tokens": str(block_size * num_blocks),
    }


class EngineMetrics:
    """One snapshot of the engine's statistics (None: it does not answer), as a collector of prometheus-client."""

    def __init__(
        self, model: str, statistics: Mapping[str, object] | None, cache: Mapping[str, str] | None = None
    ) -> None:
        self._model = model
        self._is_up = statistics is not None
        self._sections = statistics or {}
        self._scheduler = _mapping(self._sections, "scheduler")
        self._cache = cache or {}

    def collect(self) -> Iterator[Metric]:
        """Every series that the snapshot can fill."""
        yield from self._families(_Row("", "octavo_engine_up", "whether the engine answers"), float(self._is_up))
        memory = _mapping(_mapping(self._sections, "memory"), "total")
        drift = _mapping(self._sections, "drift")
        recording = _mapping(self._sections, "recording")
        for rows, section in (
            (_SCHEDULER, self._scheduler),
            (_MEMORY, memory),
            (_DRIFT, drift),
            (_RECORDING, recording),
        ):
            for row in rows:
                value = section.get(row.key)
                if isinstance(value, (int, float)):
                    yield from self._families(row, float(value))
        yield from self._labelled()
        yield from self._waiting()
        yield from self._step_tokens()
        usage = self._kv_usage()
        if usage is not None:
            yield from self._families(_USAGE, usage)
        if self._cache:
            for called, labels in spellings(_CACHE.own, _CACHE.familiar, self._model):
                yield _family(GaugeMetricFamily, called, _CACHE.text, {**labels, **self._cache}, 1.0)

    def _labelled(self) -> Iterator[Metric]:
        for (section, key), (row, label) in _LABELLED.items():
            values = _mapping(self._sections, section).get(key)
            if not isinstance(values, Mapping):
                continue
            kind = CounterMetricFamily if row.is_total else GaugeMetricFamily
            for called, labels in spellings(row.own, row.familiar, self._model):
                family = kind(called, row.text, labels=(*labels, label))
                for name, value in values.items():
                    family.add_metric((*labels.values(), str(name)), float(value))
                yield family

    def _waiting(self) -> Iterator[Metric]:
        """Who waits, in the two classes of vLLM: for room, or for something that passes."""
        values = _mapping(self._sections, "scheduler").get("waiting_by_reason")
        if not isinstance(values, Mapping):
            return
        deferred = sum(count for reason, count in values.items() if reason in _DEFERRED)
        counts = {"capacity": sum(values.values()) - deferred, "deferred": deferred}
        name, text = "vllm:num_requests_waiting_by_reason", "requests that wait: for room, or for something that passes"
        family = GaugeMetricFamily(name, text, labels=("engine", "model_name", "reason"))
        for reason, count in counts.items():
            family.add_metric(("0", self._model, reason), count)
        yield family

    def _step_tokens(self) -> Iterator[Metric]:
        values = _mapping(_mapping(self._sections, "collected"), "step_tokens")
        buckets, total = values.get("buckets"), values.get("total")
        if not isinstance(buckets, Mapping) or not isinstance(total, (int, float)):
            return
        for called, labels in spellings("octavo_step_tokens", ("vllm:iteration_tokens_total",), self._model):
            family = HistogramMetricFamily(called, "tokens computed in a step", labels=tuple(labels))
            family.add_metric(tuple(labels.values()), list(buckets.items()), total)
            yield family

    def _kv_usage(self) -> float | None:
        total, used = self._scheduler.get("num_blocks"), self._scheduler.get("num_blocks_used")
        return used / total if isinstance(total, int) and isinstance(used, int) and total else None

    def _families(self, row: _Row, value: float) -> Iterator[Metric]:
        kind = CounterMetricFamily if row.is_total else GaugeMetricFamily
        for called, labels in spellings(row.own, row.familiar, self._model):
            yield _family(kind, called, row.text, labels, value)


def _mapping(values: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = values.get(key)
    return value if isinstance(value, Mapping) else {}


def _family(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    text: str,
    labels: Mapping[str, str],
    value: float,
) -> Metric:
    family = kind(name, text, labels=tuple(labels))
    family.add_metric(tuple(labels.values()), value)
    return family
