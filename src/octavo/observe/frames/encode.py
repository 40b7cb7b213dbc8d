"""Frames as plain JSON values, from records (docs/frames.md is the schema).

Owns: the head, steps, notes, and the fields of decisions. Does not: look at a scheduler (snapshots, records).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.core.limits import Limits
from octavo.core.plan import Event, EventKind
from octavo.observe.frames.records import PartTimes, Places, Record, Sums

VERSION = 1
Frame = dict[str, Any]
_KINDS = {kind: kind.name.lower() for kind in EventKind}


@dataclass(frozen=True, slots=True)
class Source:
    """What a stream is of. `kind` is live, recording or simulation; `began` the clock's zero in seconds since 1970.

    `life` tells one engine's stream from the next one's; `device` is what computes, in words.
    """

    kind: str
    model: str = ""
    began: float | None = None
    life: str = ""
    device: str = ""


def head_frame(source: Source, limits: Limits, places: Places, now: float) -> Frame:
    """The first frame, of what is so before the next one."""
    return {
        "k": "head",
        "v": VERSION,
        "model": source.model,
        "source": source.kind,
        "began": source.began,
        "life": source.life,
        "device": source.device,
        "t": round(now, 6),
        "limits": {
            "block_size": limits.block_size,
            "num_blocks": list(limits.num_blocks),
            "host_blocks": list(limits.host_blocks),
            "max_batch_tokens": limits.max_batch_tokens,
            "max_sequences": limits.max_sequences,
            "max_model_len": limits.max_model_len,
            "policy": limits.policy,
        },
        "slots": [list(taken) for taken in places.slots.values()],
        "open": list(places.open.values()),
        "totals": _totals(places.sums),
    }


def step_frame(record: Record, previous: Record | None, times: PartTimes | None) -> Frame:
    """A step's frame; `previous` is the record before it in the same stream, None behind a head.

    A record without a step gives a note.
    """
    if record.slots is None:
        return {"k": "note", "t": round(record.time, 6), **_news(record), "totals": _totals(record.sums)}
    parts, prompt, decode = _parts(record, times), 0, 0
    if record.is_plain:
        decode = len(record.slots)
    elif record.drafts:
        pairs = zip(record.counts, record.drafts, strict=True)
        prompt = sum([count for count, drafts in pairs if count > 1 and not drafts])
        decode = sum([1 for count, drafts in zip(record.counts, record.drafts, strict=True) if count == 1 or drafts])
    else:
        decode = record.counts.count(1)
        prompt = record.num_tokens - decode
    accepted = record.gauges[4] - previous.gauges[4] if previous is not None else 0
    idle = record.idle_s
    if idle and previous is not None:
        emit = _emit(previous, times)
        idle = max(0.0, idle - emit) if emit is not None else idle
    frame: Frame = {
        "k": "step",
        "n": record.step,
        "t": round(record.time, 6),
        "s": round(record.end - record.time, 6),
        "idle": round(idle, 6),
        "parts": parts,
        "tok": [prompt, decode, sum(record.drafts), accepted, record.given],
    }
    if previous is None or not _goes_on(record, previous):
        frame["rows"] = _rows(record)
    if record.drafts:
        frame["drafts"] = list(record.drafts)
    if previous is None or record.sums != previous.sums:
        frame["totals"] = _totals(record.sums)
    return {**frame, **_changes(record), **_news(record)}


def _totals(sums: Sums) -> dict[str, int]:
    return dict(zip(("finished", "preempted", "looked_up", "found"), sums, strict=True))


def _rows(record: Record) -> list[int]:
    """Slot, first position, tokens of each row, flat."""
    assert record.slots is not None
    flat = array("i", bytes(12 * len(record.slots)))
    flat[0::3], flat[1::3], flat[2::3] = record.slots, record.starts, record.counts
    return flat.tolist()


def _goes_on(record: Record, previous: Record) -> bool:
    """Whether the rows are those of the step before, each behind its last one.

    A row that is not behind its last one begins before that (it is repeated, or drafts were wrong), unless its
    sequence came in anew: so that the sum tells.
    """
    if record.taken or record.slots != previous.slots or record.counts != previous.counts:
        return False
    return sum(record.starts) == sum(previous.starts) + sum(previous.counts)


def _parts(record: Record, times: PartTimes | None) -> list[float | None]:
    known = times.get(record.timing) if times is not None and record.timing >= 0 else None
    if known is not None:
        return [round(seconds, 6) for seconds in known[:5]]
    return [None, *(round(seconds, 6) for seconds in record.computed), None]


def _emit(record: Record, times: PartTimes | None) -> float | None:
    known = times.get(record.timing) if times is not None and record.timing >= 0 else None
    return None if known is None else known[4]


def _changes(record: Record) -> Frame:
    frame: Frame = {}
    if record.freed:
        frame["freed"] = list(record.freed)
    if record.taken:
        frame["new"] = [list(taken) for taken in record.taken]
    if any(record.moved):
        frame["moved"] = list(record.moved)
    running, waiting, swapped, host, _ = record.gauges
    frame["run"] = running
    frame["wait"] = waiting
    if swapped:
        frame["swapped"] = swapped
    frame["used"] = list(record.used)
    frame["cached"] = list(record.cached)
    if host:
        frame["host"] = host
    if record.failure is not None:
        frame["fail"] = record.failure
    return frame


def _news(record: Record) -> Frame:
    frame: Frame = {}
    if record.arrivals:
        frame["in"] = list(record.arrivals)
    if record.decisions:
        told = decisions(record.decisions)
        if told:
            frame["ev"] = told
    return frame


def decisions(events: Sequence[Event]) -> list[list[object]]:
    """Decisions with their numbers; chunks are seen in the rows."""
    return [
        [_KINDS[event.kind], event.request_id, _fields(event)] for event in events if event.kind != EventKind.CHUNKED
    ]


def _fields(event: Event) -> dict[str, object]:
    fields: dict[str, object] = {"t": round(event.time, 6)}
    if event.num_tokens:
        fields["n"] = event.num_tokens
    if event.reason is not None:
        fields["reason"] = event.reason.name.lower()
    if event.needed or event.available:
        fields["needed"], fields["available"] = event.needed, event.available
    if event.by is not None:
        fields["by"] = event.by
    if event.cached_tokens:
        fields["cached"] = event.cached_tokens
    if event.finish_reason is not None:
        fields["finish"] = event.finish_reason.name.lower()
    if event.message is not None:
        fields["message"] = event.message
    if event.choice:
        fields["choice"] = event.choice
    return fields
