"""Everything of octavo.core that the frozen decisions use: one file to edit when a name moves.

Owns: the imports, and the translation of plans, events and statistics into plain JSON values with names, not numbers.
Does not: drive the scheduler (random_runs) or compare (decisions). Only public verbs and columns are read here.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from typing import Any
from zlib import crc32

from octavo.core import plan as plan_module
from octavo.core.limits import GroupKind, GroupSpec, Limits
from octavo.core.plan import Event, EventKind, Events, StepFailure, StepPlan, StepResult, TokenLogprobs
from octavo.core.policy import POLICIES, Policy
from octavo.core.request import FinishReason, Request, SamplingParams, Span, Want
from octavo.core.scheduler import Scheduler
from octavo.errors import InvariantError, OctavoError

__all__ = [
    "BUILT_IN", "ROW", "Event", "EventKind", "Events", "FinishReason", "GroupSpec", "InvariantError", "Limits",
    "OctavoError", "Request", "SamplingParams", "Scheduler", "Span", "StepFailure", "StepPlan", "StepResult",
    "TokenLogprobs", "Want", "event_record", "events_record", "quads", "rows", "statistics_record", "triples",
]  # fmt: skip

ROW: dict[str, int] = {
    name: getattr(plan_module, f"ROW_{name.upper()}") for name in ("sample", "carry", "score", "pool", "fork", "beam")
}
DROPPED: int = plan_module.DROP_BLOCK
BUILT_IN = ("deadline", "fair", "fcfs", "fifo", "prefill_first", "prefix_affinity", "priority", "shortest_prefill")
STATISTICS = (
    "step", "num_running", "num_waiting", "waiting_by_reason", "num_swapped", "num_in_flight", "num_blocks",
    "num_blocks_used", "num_blocks_cached", "num_host_blocks", "num_host_blocks_used", "num_requests", "num_steps",
    "num_failed_steps", "num_admitted", "num_preemptions", "num_requeued", "num_computed_tokens", "num_prompt_tokens",
    "num_output_tokens", "num_drafted_tokens", "num_accepted_tokens", "num_swapped_out_tokens",
    "num_swapped_in_tokens", "num_host_hit_tokens", "num_forks", "num_copies", "num_adopted_blocks", "num_bypasses",
    "prefix_queried_tokens", "prefix_hit_tokens", "finished",
)  # fmt: skip


class Moody(Policy):
    """Answers by the request's id alone, whenever and however often it is asked; one answer in four is no key."""

    name = "moody_freeze"
    headroom = 0.1
    skip_ahead = True
    preempt_on_arrival = True

    def key(self, request: Any) -> Any:
        return self._answer(request, 1)

    def victim_key(self, request: Any) -> Any:
        return self._answer(request, 2)

    def lane(self, request: Any) -> str:
        return "ab"[crc32(request.request.request_id.encode()) % 2]

    @staticmethod
    def _answer(request: Any, salt: int) -> Any:
        number = crc32(f"{request.request.request_id} {salt}".encode())
        if number % 12 == 0:
            raise RuntimeError("a policy's bug")
        return (None, (math.nan,))[number % 2] if number % 12 < 3 else (float(number % 5),)


POLICIES.setdefault(Moody.name, Moody)
ALL_POLICIES = (*BUILT_IN, Moody.name)


def group(window: int) -> GroupSpec:
    """A group of layers of full attention, or of a sliding window."""
    return GroupSpec(GroupKind.SLIDING if window else GroupKind.FULL, window)


def rows(plan: StepPlan) -> Iterator[tuple[int, int, int, list[str], list[int]]]:
    """(slot, start, count, names of flags, drafts) of each row."""
    for row in plan.rows():
        yield row.slot, row.start, row.count, [name for name, bit in ROW.items() if row.flags & bit], list(row.drafts)


def triples(flat: array[int]) -> list[tuple[int, int, int]]:
    """A flat column of three numbers an entry."""
    return list(zip(flat[::3], flat[1::3], flat[2::3], strict=True))


def quads(flat: array[int]) -> list[tuple[int, int, int, int]]:
    """A flat column of four numbers an entry."""
    return list(zip(flat[::4], flat[1::4], flat[2::4], flat[3::4], strict=True))


def event_record(event: Event) -> dict[str, Any]:
    """One decision; fields at their defaults and the prose are left out."""
    record: dict[str, Any] = {
        "kind": event.kind.name, "request": event.request_id, "time": event.time, "step": event.step,
    }  # fmt: skip
    for name in ("num_tokens", "needed", "available", "by", "cached_tokens", "stop_token_id", "choice"):
        value = getattr(event, name)
        if value not in (0, None):
            record[name] = value
    if event.reason is not None:
        record["reason"] = event.reason.name
    if event.finish_reason is not None:
        record["finish_reason"] = event.finish_reason.name
    return record


def _logprob(entry: TokenLogprobs | None) -> list[Any] | None:
    return None if entry is None else [entry.token_id, entry.logprob, entry.rank, list(entry.top_ids)]


def events_record(events: Events) -> dict[str, Any]:
    """What a commit made known."""
    columns = zip(events.request_ids, events.choices, events.positions, events.token_ids, strict=True)
    return {
        "step": events.step,
        "time": events.time,
        "tokens": [list(entry) for entry in columns],
        "logprobs": None if events.logprobs is None else [_logprob(entry) for entry in events.logprobs],
        "scores": [[name, first, [_logprob(entry) for entry in made]] for name, first, made in events.scores],
        "pooled": [[name, data.hex()] for name, data in events.pooled],
        "events": [event_record(event) for event in events.decisions],
    }


def statistics_record(scheduler: Scheduler) -> dict[str, Any]:
    """Gauges and totals by name."""
    snapshot = scheduler.statistics()
    return {name: getattr(snapshot, name) for name in STATISTICS}
