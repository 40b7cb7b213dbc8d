"""Prometheus metrics of what is counted elsewhere: the engine, admission, retries, stored responses, the sandbox.

Owns: one table, from the place of a number in a snapshot to its series: name, help, type. Does not: count, or ask for
snapshots (they are passed in). Invariant: a number that the snapshot does not have makes no series.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from octavo.config import Config
from octavo.observe.metrics.requests import vllm_labels

# What a value is: a number, a number that only grows, {"buckets": {bound: count}, "total": sum}, or texts by label.
Kind = Literal["gauge", "counter", "histogram", "info"]


@dataclass(frozen=True, slots=True)
class Series:
    """One series. `path` is the value's place; a "*" in it stands for every key there, as the label `label`.

    `vllm` are its names on vLLM's boards; a series without `name` has only those.
    """

    kind: Kind
    path: str
    name: str
    text: str
    label: str = ""
    vllm: tuple[str, ...] = ()
    has_model: bool = True


# By the section that a path is in.
# fmt: off
SERIES: dict[str, tuple[Series, ...]] = {
    "engine": (
        Series("gauge", "up", "octavo_engine_up", "whether the engine answers"),
        Series("gauge", "kv_usage", "octavo_kv_cache_usage", "share of the KV blocks held, 0 to 1",
               vllm=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")),
        Series("gauge", "waiting_by_class.*", "", "requests that wait: for room, or for something that passes",
               label="reason", vllm=("vllm:num_requests_waiting_by_reason",)),
        Series("counter", "steps.total_s.*", "octavo_step_seconds", "seconds of steps; step is all", label="part"),
        Series("counter", "collected.choice_ends.*", "octavo_choices_finished",
               "choices that ended before their request", label="finished_reason"),
        Series("histogram", "collected.step_tokens", "octavo_step_tokens", "tokens computed in a step",
               vllm=("vllm:iteration_tokens_total",)),
    ),
    "engine.scheduler": (
        Series("gauge", "num_running", "octavo_sequences_running", "sequences in the batch",
               vllm=("vllm:num_requests_running",)),
        Series("gauge", "num_waiting", "octavo_requests_waiting", "requests that wait",
               vllm=("vllm:num_requests_waiting",)),
        Series("gauge", "num_swapped", "octavo_requests_swapped", "waiting with their KV on the host",
               vllm=("vllm:num_requests_swapped",)),
        Series("counter", "num_requests", "octavo_requests", "requests taken"),
        Series("gauge", "num_blocks", "octavo_kv_blocks", "KV blocks in the pool"),
        Series("gauge", "num_blocks_used", "octavo_kv_blocks_used", "KV blocks held by requests"),
        Series("gauge", "num_blocks_cached", "octavo_kv_blocks_cached", "free KV blocks that still hold a prefix"),
        Series("gauge", "num_host_blocks", "octavo_host_kv_blocks", "KV blocks on the host"),
        Series("gauge", "num_host_blocks_used", "octavo_host_kv_blocks_used",
               "KV blocks on the host that hold something"),
        Series("counter", "num_steps", "octavo_steps", "steps committed"),
        Series("counter", "num_failed_steps", "octavo_steps_failed", "steps that failed"),
        Series("counter", "num_admitted", "octavo_admissions", "requests that began to run"),
        Series("counter", "num_preemptions", "octavo_preemptions", "preemptions for lack of room",
               vllm=("vllm:num_preemptions",)),
        Series("counter", "num_requeued", "octavo_requests_requeued", "requests put back after a failed row or step"),
        Series("counter", "num_computed_tokens", "octavo_computed_tokens", "token positions computed"),
        Series("counter", "prefix_queried_tokens", "octavo_prefix_cache_queries", "tokens looked up",
               vllm=("vllm:prefix_cache_queries",)),
        Series("counter", "prefix_hit_tokens", "octavo_prefix_cache_hits", "tokens found",
               vllm=("vllm:prefix_cache_hits",)),
        Series("counter", "num_host_hit_tokens", "octavo_host_cache_hits", "tokens found on the host"),
        Series("counter", "num_swapped_out_tokens", "octavo_swapped_out_tokens", "tokens moved to the host"),
        Series("counter", "num_swapped_in_tokens", "octavo_swapped_in_tokens", "tokens moved back"),
        Series("counter", "num_drafted_tokens", "octavo_drafted_tokens", "guessed tokens verified",
               vllm=("vllm:spec_decode_num_draft_tokens",)),
        Series("counter", "num_accepted_tokens", "octavo_accepted_tokens", "guessed tokens that were right",
               vllm=("vllm:spec_decode_num_accepted_tokens",)),
        Series("counter", "num_forks", "octavo_forks", "sequences that began with another's blocks"),
        Series("counter", "num_copies", "octavo_kv_block_copies", "KV blocks copied"),
        Series("counter", "num_adopted_blocks", "octavo_kv_blocks_adopted", "KV blocks given up for an equal one"),
        Series("counter", "num_bypasses", "octavo_bypasses", "admissions past one that lacked room"),
        Series("counter", "num_policy_errors", "octavo_policy_errors", "answers of the policy that were no key"),
        Series("gauge", "waiting_by_reason.*", "octavo_requests_waiting_by_reason", "requests that wait, by what for",
               label="reason"),
    ),
    "engine.memory.total": (
        Series("gauge", "logical_blocks", "octavo_kv_blocks_logical", "KV blocks as if nothing were shared"),
        Series("gauge", "saved_blocks", "octavo_kv_blocks_saved", "KV blocks that sharing saves"),
        Series("gauge", "reserved_slots", "octavo_kv_slots_reserved", "token slots held and not filled"),
        Series("gauge", "wasted_share", "octavo_kv_wasted_share", "share of held token slots not filled, 0 to 1"),
    ),
    "engine.drift": (
        Series("gauge", "ratio", "octavo_step_time_drift", "time of late steps over what --drift-baseline says"),
        Series("gauge", "is_drifting", "octavo_step_time_drifting", "1 while steps drift from --drift-baseline"),
        Series("counter", "alarms", "octavo_step_time_drift_alarms", "times that steps began to drift"),
    ),
    "engine.recording": (
        Series("gauge", "is_recording", "octavo_recording", "1 while decisions are recorded (--record), else 0"),
        Series("gauge", "bytes", "octavo_recording_bytes", "bytes of the segment that is being recorded"),
    ),
    "": (
        Series("info", "cache", "octavo_cache_config_info", "how the KV pool is set up",
               vllm=("vllm:cache_config_info",)),
    ),
    "admission": (
        Series("gauge", "waiting", "octavo_queue_sequences",
               "sequences that wait for a slot or KV room, as the front end sees it"),
        Series("gauge", "max_waiting", "octavo_queue_sequences_max", "the bound on them"),
        Series("gauge", "waiting_tokens", "octavo_queue_prompt_tokens",
               "prompt tokens of requests without a first token"),
        Series("gauge", "max_waiting_tokens", "octavo_queue_prompt_tokens_max", "the bound on them"),
        Series("gauge", "running", "octavo_queue_running_sequences", "sequences that have a token and no end"),
        Series("gauge", "load", "octavo_load_level",
               "0 normal, 1 busy (queue half full), 2 crowded (three quarters), 3 full"),
        Series("gauge", "wait_s", "octavo_queue_wait_estimate_seconds",
               "how long a new request would wait; absent: unknown"),
    ),
    "admission.keys.*": (
        Series("counter", "requests", "octavo_key_requests", "requests of a key that were let past its limits",
               label="key"),
        Series("counter", "tokens", "octavo_key_tokens", "prompt and output tokens of a key", label="key"),
        Series("counter", "refused", "octavo_key_refusals", "requests of a key that got 429", label="key"),
        Series("gauge", "open", "octavo_key_open_requests", "open requests of a key", label="key"),
    ),
    "retries": (
        Series("gauge", "kept", "octavo_kept_answers", "finished answers that are kept for a retry"),
        Series("gauge", "running", "octavo_running_keyed_requests", "running requests with an Idempotency-Key"),
        Series("gauge", "bytes", "octavo_kept_bytes", "bytes that both take in memory, roughly"),
        Series("counter", "attached", "octavo_retries_attached", "requests answered from one that ran or was kept"),
        Series("counter", "conflicts", "octavo_retries_conflicting",
               "requests refused because their key was used with another body"),
        Series("counter", "orphaned", "octavo_requests_orphaned",
               "requests cancelled because no client read them any more"),
    ),
    "retries.journal": (
        Series("gauge", "up", "octavo_journal_up", "0 while the disk fails the journal"),
        Series("gauge", "bytes", "octavo_journal_bytes", "bytes of the journal's segments"),
        Series("gauge", "runs", "octavo_journal_requests", "requests that the journal holds"),
        Series("counter", "suspensions", "octavo_journal_suspensions", "times that the disk failed the journal"),
        Series("counter", "compactions", "octavo_journal_compactions", "times that the journal was written anew"),
    ),
    "responses": (
        Series("gauge", "kept", "octavo_stored_responses", "responses that are stored"),
        Series("gauge", "bytes", "octavo_stored_response_bytes", "bytes that they take in memory, roughly"),
        Series("gauge", "running", "octavo_background_responses", "responses that run in the background"),
        Series("counter", "given_way", "octavo_stored_responses_given_way",
               "responses dropped because others needed the room"),
    ),
    "tool": (
        Series("counter", "jobs", "octavo_tool_jobs",
               "jobs given to tool processes: chat templates, schemas, expressions"),
        Series("counter", "refused", "octavo_tool_refusals", "jobs that ended with an error of their input"),
        Series("counter", "kills", "octavo_tool_kills", "tool processes killed because a job took too long"),
        Series("counter", "deaths", "octavo_tool_deaths", "tool processes that ended by themselves"),
        Series("counter", "starts", "octavo_tool_starts", "tool processes started"),
        Series("gauge", "processes", "octavo_tool_processes", "tool processes that run now"),
        Series("gauge", "waiting", "octavo_tool_waiting", "jobs that wait for a free process"),
    ),
    "log": (
        Series("counter", "dropped.*", "octavo_log_lines_dropped",
               "log lines dropped: too many of one kind, or stderr was not read", label="process", has_model=False),
    ),
}
# fmt: on


class SnapshotMetrics:
    """The series of snapshots by name ("engine", "admission", ...); a collector for a CollectorRegistry."""

    def __init__(self, model: str, snapshots: Mapping[str, object]) -> None:
        self._model = model
        self._snapshots = snapshots

    def collect(self) -> Iterator[Metric]:
        """Yield every series whose number is in the snapshots, under its own name and under vLLM's."""
        for section, rows in SERIES.items():
            for series in rows:
                path = f"{section}.{series.path}" if section else series.path
                values = list(_find(self._snapshots, path.split(".")))
                if not values and not any(_find(self._snapshots, path.removesuffix(".*").split("."))):
                    continue  # else a family without samples yet, whose type is exported
                own = {"model_name": self._model} if series.has_model else {}
                if series.name:
                    yield _family(series, series.name, own, values)
                for name in series.vllm:
                    yield _family(series, name, vllm_labels(self._model), values)


def _find(snapshot: object, path: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield (key at "*", value) of each value at this path; None counts as absent."""
    for index, part in enumerate(path):
        if not isinstance(snapshot, Mapping):
            return
        if part == "*":
            for key, value in snapshot.items():
                yield from ((str(key), found) for _, found in _find(value, path[index + 1 :]))
            return
        snapshot = snapshot.get(part)
    if snapshot is not None:
        yield "", snapshot


def _family(series: Series, name: str, labels: Mapping[str, str], values: Sequence[tuple[str, Any]]) -> Metric:
    names = (*labels, series.label) if series.label else tuple(labels)
    match series.kind:
        case "info":
            (_, texts), *_ = values
            info = GaugeMetricFamily(name, series.text, labels=(*labels, *texts))
            info.add_metric((*labels.values(), *texts.values()), 1.0)
            return info
        case "histogram":
            (_, value), *_ = values
            histogram = HistogramMetricFamily(name, series.text, labels=names)
            histogram.add_metric(tuple(labels.values()), list(value["buckets"].items()), value["total"])
            return histogram
    family = (GaugeMetricFamily if series.kind == "gauge" else CounterMetricFamily)(name, series.text, labels=names)
    for key, value in values:
        family.add_metric((*labels.values(), key) if series.label else tuple(labels.values()), float(value))
    return family


# Reasons of waiting that end by themselves, however much room there is.
_DEFERRED = frozenset(
    {"adapter_slots", "grammar", "swap_space", "host_load", "uncommitted", "preempted_this_step", "barrier", "paused",
     "draining", "excluded"}
)  # fmt: skip


def engine_snapshot(statistics: Mapping[str, Any] | None) -> dict[str, object]:
    """Return the engine's statistics (None: it does not answer) with the figures that follow from them."""
    if statistics is None:
        return {"up": 0}
    scheduler = statistics.get("scheduler", {})
    snapshot = {**statistics, "up": 1}
    if scheduler.get("num_blocks") and "num_blocks_used" in scheduler:
        snapshot["kv_usage"] = scheduler["num_blocks_used"] / scheduler["num_blocks"]
    if "waiting_by_reason" in scheduler:  # vLLM has two classes: waiting for room, or for something that passes
        counts = scheduler["waiting_by_reason"]
        deferred = sum(count for reason, count in counts.items() if reason in _DEFERRED)
        snapshot["waiting_by_class"] = {"capacity": sum(counts.values()) - deferred, "deferred": deferred}
    return snapshot


def retry_snapshot(report: Mapping[str, Any]) -> dict[str, object]:
    """Return the report of kept answers with the journal's figures, which are absent without one."""
    journal = report["journal"]
    if journal["state"] == "off":
        return {**report, "journal": None}
    return {**report, "journal": {**journal, "up": int(journal["state"] == "on")}}


def cache_info(config: Config, block_size: int, num_blocks: int) -> dict[str, str]:
    """Return how the KV pool is set up, under the names of vLLM's cache_config_info."""
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
