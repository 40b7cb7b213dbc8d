"""Frames as plain JSON values, from records of steps and views of the scheduler (docs/statistics.md is the schema).

Owns: every kind of frame except the end, and how much of the queue and the pool is shown: a look takes at most a
millisecond, however large they are. Does not: decide when to look, or keep anything (streams).
"""

from __future__ import annotations

import sys
from array import array
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.core.limits import Limits
from octavo.core.plan import Event, EventKind
from octavo.core.scheduler import Scheduler
from octavo.core.snapshots import Gauges, PoolSample, RequestView
from octavo.observe.explainer import reason_name
from octavo.observe.history import OpenSlots, RequestHistory, StepRecord, WaitCounts
from octavo.observe.series import StepTimes

VERSION = 1
Frame = dict[str, Any]
MAX_TOP = 50  # waiting requests shown
MAX_CELLS = 4096  # cells of all groups together
MAX_READ = 4096  # table entries read in one look
NO_OWNER = 0xFFFF  # the owner of a block whose table was not read yet
_FREE, _HELD_ONCE, _SHARED, _CACHED = range(4)  # values of a cell
# Tables from a count of references, and from "has a key", to these values. They are applied to all cells at once,
# because one Python loop over 4,096 cells takes a tenth of a millisecond.
_HELD = bytes([_FREE, _HELD_ONCE]) + bytes([_SHARED]) * 254
_UNHELD = bytes([_CACHED]) + bytes(255)
_KEYED = bytes([0, _CACHED]) + bytes(254)
_SHOWN_LIMITS = (
    "block_size", "num_blocks", "host_blocks", "max_batch_tokens", "max_sequences", "max_model_len", "policy",
)  # fmt: skip
_KINDS = {kind: kind.name.lower() for kind in EventKind}


@dataclass(frozen=True, slots=True)
class FrameSource:
    """The source of a stream. `kind` is live, recording or simulation; `began` is the clock's zero in Unix seconds.

    `stream_id` distinguishes the streams of successive engines; `device` is the model's device.
    """

    kind: str
    model: str = ""
    began: float | None = None
    stream_id: str = ""
    device: str = ""


def head_frame(source: FrameSource, limits: Limits, before: OpenSlots, now: float) -> Frame:
    """Return a stream's first frame: the state before the next frame."""
    shown = {name: getattr(limits, name) for name in _SHOWN_LIMITS}
    return {
        "k": "head",
        "v": VERSION,
        "model": source.model,
        "source": source.kind,
        "began": source.began,
        "life": source.stream_id,
        "device": source.device,
        "t": round(now, 6),
        "limits": {name: list(value) if isinstance(value, tuple) else value for name, value in shown.items()},
        "slots": [list(taken) for taken in before.slots.values()],
        "open": [_arrival(request) for request in before.open.values()],
        "totals": _totals(before.gauges),
    }


def step_frame(record: StepRecord, previous: StepRecord | None, times: StepTimes | None) -> Frame:
    """Return a step's frame; `previous` is the record before it in the same stream, None after a head.

    A record without a step gives a note.
    """
    gauges, totals = record.gauges, _totals(record.gauges)
    news = _given(**{"in": [_arrival(request) for request in record.arrivals]}, ev=decisions(record.decisions))
    if record.slots is None:
        return {"k": "note", "t": round(record.begin, 6), **news, "totals": totals}
    num_prefills, num_forks, num_prompt = record.prefill
    num_accepted, idle = 0, record.idle_s
    if previous is not None:
        num_accepted = gauges.num_accepted_tokens - previous.gauges.num_accepted_tokens
        before = _part_seconds(previous, times)
        if idle and before is not None:
            idle = max(0.0, idle - before[4])
    parts = _part_seconds(record, times) or (None, *record.computed, None)
    frame: Frame = {
        "k": "step",
        "n": record.step,
        "t": round(record.begin, 6),
        "s": round(record.end - record.begin, 6),
        "idle": round(idle, 6),
        "parts": [each and round(each, 6) for each in parts[:5]],
        "tok": [
            num_prompt,
            len(record.slots) - num_prefills - num_forks,
            sum(record.num_drafts),
            num_accepted,
            record.num_outputs,
        ],
        "run": gauges.num_running,
        "wait": gauges.num_waiting,
        "used": list(gauges.blocks_used),
        "cached": list(gauges.blocks_cached),
        **news,
        **_given(
            drafts=list(record.num_drafts),
            totals=totals if previous is None or totals != _totals(previous.gauges) else None,
            freed=list(record.freed),
            new=[list(taken) for taken in record.taken],
            moved=list(record.moved) if any(record.moved) else None,
            swapped=gauges.num_swapped,
            host=sum(gauges.host_blocks_used),
            fail=record.failure,
        ),
    }
    if previous is None or not _continues(record, previous):
        frame["rows"] = _rows(record)
    return frame


def _given(**fields: object) -> Frame:
    """Return the fields that are not empty."""
    return {name: value for name, value in fields.items() if value}


def queue_frame(scheduler: Scheduler, waits: WaitCounts, now: float) -> Frame:
    """Return the queue: the number of waiting requests by reason, and the first of them."""
    total, reasons = scheduler.num_waiting, dict(waits.by_reason())
    rest = total - sum(reasons.values())  # requests without a reason of their own: those before them wait
    if rest > 0:
        reasons["behind"] = reasons.get("behind", 0) + rest
    top = [_waiting(entry, now) for entry in scheduler.first_waiting(MAX_TOP)]
    return {"k": "queue", "t": round(now, 6), "total": total, "reasons": reasons, "top": top}


def _waiting(one: RequestView, now: float) -> list[object]:
    waited = round(max(0.0, now - one.arrival), 3)
    return [one.name, one.tenant, reason_name(one.reason), one.needed, one.available, waited, one.num_known]


class PoolFrames:
    """Frames of one scheduler's KV pools.

    Each look reads the owners of blocks from about MAX_READ table entries, and keeps them. The owners of a large pool
    are complete only after several looks, and a block that changed owners may show the previous one until then.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._owners = [array("H", [NO_OWNER]) * num_blocks for num_blocks in scheduler.limits.num_blocks]
        self._next_slot = 0

    def frame(self, now: float) -> Frame:
        """Return the pools as they are now."""
        self._find_owners()
        samples = self._scheduler.sample_pools(MAX_CELLS)
        groups = [_group(sample, owners) for sample, owners in zip(samples, self._owners, strict=True)]
        frame: Frame = {"k": "blocks", "t": round(now, 6), "groups": groups}
        num_host = sum(self._scheduler.limits.host_blocks)
        if num_host:
            frame["host"] = [sum(self._scheduler.gauges().host_blocks_used), num_host]
        return frame

    def _find_owners(self) -> None:
        num_read = 0
        for sequence in self._scheduler.read_tables(self._next_slot, MAX_READ):
            self._next_slot = sequence.slot + 1
            for owners, table in zip(self._owners, sequence.tables, strict=True):
                num_read += len(table)
                for block in table:
                    owners[block] = sequence.slot
        if num_read < MAX_READ:
            self._next_slot = 0


def _group(sample: PoolSample, owners: array[int]) -> Frame:
    shown = owners[:: sample.stride]
    if sys.byteorder == "big":
        shown.byteswap()
    cached = int.from_bytes(sample.references.translate(_UNHELD)) & int.from_bytes(sample.has_key.translate(_KEYED))
    cells = (int.from_bytes(sample.references.translate(_HELD)) | cached).to_bytes(len(sample.references))
    return {
        "n": sample.num_blocks,
        "per": sample.stride,
        "cells": b64encode(cells).decode(),
        "owner": b64encode(shown.tobytes()).decode(),
    }


def _totals(gauges: Gauges | None) -> dict[str, int]:
    if gauges is None:
        return dict.fromkeys(("finished", "preempted", "looked_up", "found"), 0)
    return {
        "finished": gauges.num_finished,
        "preempted": gauges.num_preemptions,
        "looked_up": gauges.queried_tokens,
        "found": gauges.hit_tokens,
    }


def _arrival(request: RequestHistory) -> list[object]:
    return [
        request.request_id,
        round(request.arrival, 6),
        request.tenant,
        request.num_prompt_tokens,
        request.priority,
        request.max_tokens,
    ]


def _rows(record: StepRecord) -> list[int]:
    """Return slot, first position and tokens of each row, flat."""
    assert record.slots is not None
    flat = array("i", bytes(12 * len(record.slots)))
    flat[0::3], flat[1::3], flat[2::3] = record.slots, record.starts, record.counts
    return flat.tolist()


def _continues(record: StepRecord, previous: StepRecord) -> bool:
    """Return True if the rows are those of the step before, each starting where its last one ended.

    Any other row of the same sequence starts earlier (it is repeated, or drafts were wrong), so comparing the sums of
    the starts suffices.
    """
    if record.taken or record.slots != previous.slots or record.counts != previous.counts:
        return False
    return sum(record.starts) == sum(previous.starts) + sum(previous.counts)


def _part_seconds(record: StepRecord, times: StepTimes | None) -> Sequence[float] | None:
    return times.get(record.timing) if times is not None and record.timing >= 0 else None


def decisions(events: Sequence[Event]) -> list[list[object]]:
    """Return decisions with their numbers, without chunks, which are visible in the rows."""
    return [
        [_KINDS[event.kind], event.request_id, _fields(event)] for event in events if event.kind != EventKind.CHUNKED
    ]


def _fields(event: Event) -> dict[str, object]:
    room = {"needed": event.needed, "available": event.available} if event.needed or event.available else {}
    return {
        "t": round(event.time, 6),
        **room,
        **_given(
            n=event.num_tokens,
            reason=reason_name(event.reason),
            by=event.by,
            cached=event.cached_tokens,
            finish=None if event.finish_reason is None else event.finish_reason.name.lower(),
            message=event.message,
            choice=event.choice,
        ),
    }
