"""Explainer: answers the verb `explain` for one request or all open ones, and for a while after a request's end.

Owns: the answer as plain JSON values. It has the request's state (core.explain), when its next token is expected
(forecast), and its events so far (history). Does not: decide, or fold events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

from octavo.core.explain import Explanation, Room, Shortage, Standing
from octavo.core.plan import Event, EventKind, WaitReason
from octavo.observe.forecast import NEW_REQUEST, Forecaster
from octavo.observe.history import PHASES, History, RequestHistory

MAX_LISTED = 256  # waiting requests, and as many running ones, in a list of all
_LISTED = ("tenant", "position", "behind", "num_prompt_tokens", "num_outputs", "num_blocks", "num_preemptions")
_UNITS = {
    WaitReason.TOKEN_BUDGET: "tokens of a step",
    WaitReason.SEQUENCE_CAP: "sequences",
    WaitReason.KV_BLOCKS: "blocks",
    WaitReason.HEADROOM: "blocks",
    WaitReason.SWAP_SPACE: "blocks",
    WaitReason.FORK_BLOCKS: "blocks",
    WaitReason.KV_READ_BUDGET: "tokens of context to read in a step",
    WaitReason.ENCODER_BUDGET: "media items to encode in a step",
    WaitReason.ADAPTER_SLOTS: "adapter slots",
    WaitReason.PARTIAL_PREFILL_CAP: "partly computed prompts",
    WaitReason.HOST_LOAD: "blocks to load from the host",
    WaitReason.UNCOMMITTED: "rows in flight to be committed",
    WaitReason.KV_TRANSFER: "KV transfers from another engine",
}
_FIELDS = {
    EventKind.ADMITTED: ("num_tokens", "cached_tokens"),
    EventKind.RESUMED: ("num_tokens", "cached_tokens"),
    EventKind.CHUNKED: ("num_tokens", "needed"),
    EventKind.DEFERRED: ("reason", "needed", "available"),
    EventKind.PREEMPTED: ("reason", "by", "num_tokens"),
    EventKind.SWAPPED: ("by", "num_tokens"),
    EventKind.FINISHED: ("finish_reason", "num_tokens", "cached_tokens", "message"),
    EventKind.CHOICE_FINISHED: ("choice", "finish_reason", "num_tokens"),
}


class Explainer:
    """Explains requests, in the engine's thread; `now` is the scheduler's clock."""

    def __init__(self, history: History, now: Callable[[], float]) -> None:
        self._history = history
        self._scheduler = history.scheduler
        self._now = now
        self.forecaster = Forecaster(history.scheduler, history.step_times, history.answer_lengths, now)

    def answer(self, argument: str) -> dict[str, object]:
        """Explain the request with the id `argument`, or all open requests if it is empty.

        `new_request_s`: the seconds until a request that arrived now would be admitted; null if not known.
        """
        now = self._now()
        self._history.drop_old(now)
        values = self._one(argument, now) if argument else self._all(now)
        found = self.forecaster.next_tokens().get(NEW_REQUEST)
        return {**values, "new_request_s": None if found is None else found.seconds}

    def _one(self, name: str, now: float) -> dict[str, object]:
        history = self._history.open.get(name) or self._history.ended.get(name)
        explanation = self._scheduler.explain(name)
        if explanation is None:
            return unknown(name) if history is None or history.end is None else _ended(history, now)
        values = plain_values(explanation, now) | {"prediction": None}
        expected = ""
        if explanation.state is not Standing.DECODE:
            values["prediction"], text = self._predict(explanation)
            expected = f"; {text}"
        values["text"] = sentence(explanation) + expected
        values["public_text"] = sentence(explanation, is_named=False) + expected
        return values | _past(history, now)

    def _all(self, now: float) -> dict[str, object]:
        """Return the first waiting and the first running requests, without their histories."""
        forecasts = self.forecaster.next_tokens()
        listed = []
        for one in self._scheduler.explain_all(MAX_LISTED):
            lacks = "" if one.shortage is None else shortage_text(one.shortage, () if one.is_first_short else one.room)
            listed.append(
                {
                    **{name: getattr(one, name) for name in _LISTED},
                    "id": one.name,
                    "state": one.state.value,
                    "reason": reason_name(one.reason),
                    "lacks": lacks,
                    "age_s": now - one.arrival,
                    "next_token_s": forecasts[one.name].seconds if one.name in forecasts else None,
                }
            )
        gauges = self._scheduler.gauges()
        counts = {"num_waiting": gauges.num_waiting, "num_running": gauges.num_running_requests}
        return {"open": listed, **counts, "num_ended_kept": len(self._history.ended)}

    def _predict(self, explanation: Explanation) -> tuple[dict[str, object], str]:
        """Return the seconds to the next token, or why they are not known, both as values and as a text."""
        found = self.forecaster.next_tokens().get(explanation.name)
        names, values = ("next_token_s", "least_s", "most_s", "why_not"), dict[str, object]()
        if found is not None:
            token = "first" if explanation.num_outputs == 0 else "next"
            band = "" if found.least == found.most else f" ({found.least:.2f} to {found.most:.2f} s)"
            values.update(zip(names, (found.seconds, found.least, found.most, None), strict=True))
            return values, f"its {token} token is expected in about {found.seconds:.2f} s{band}"
        if self._scheduler.is_paused:
            why = "the engine is paused"
        elif self._history.step_times.fit() is None:
            why = "too few steps were made yet"
        elif self._history.answer_lengths:
            why = "the forecast was made before this request arrived; try again"
        else:
            why = "it has to wait for answers to end, and how long they get is not known yet"
        return dict.fromkeys(names) | {"why_not": why}, f"no prediction: {why}"


def unknown(name: str) -> dict[str, object]:
    """Return the answer for an id of which there is neither an open request nor a stored ended one."""
    text = "is not known here: no such request was submitted, or it ended and its record was dropped"
    return {"id": name, "state": "unknown", "text": f"{name} {text}", "public_text": text}


def _ended(history: RequestHistory, now: float) -> dict[str, object]:
    """Return the answer for a request that has ended."""
    end = history.end
    assert end is not None
    how = "error" if end.finish_reason is None else end.finish_reason.name.lower()
    total = end.time - history.arrival
    phases = zip(PHASES, history.phase_s, strict=True)
    parts = ", ".join(f"{seconds:.2f} s {phase}" for phase, seconds in phases if seconds > 0)
    again = f", preempted {times(history.num_preemptions)}" if history.num_preemptions else ""
    because = f": {end.message}" if end.message else ""
    text = f"ended ({how}) after {total:.2f} s with {end.num_tokens} tokens{again}{f' ({parts})' if parts else ''}"
    return {
        "id": history.request_id,
        "tenant": history.tenant,
        "state": Standing.FINISHED.value,
        "text": f"{history.request_id} {text}{because}",
        "public_text": text + because,
        "age_s": now - history.arrival,
        "num_prompt_tokens": history.num_prompt_tokens,
        "num_outputs": end.num_tokens,
        "num_preemptions": history.num_preemptions,
        "cached_tokens": end.cached_tokens,
        "end": {"finish_reason": how, "message": end.message, "total_s": total, "ago_s": now - end.time},
        **_past(history, now),
    }


def _past(history: RequestHistory | None, now: float) -> dict[str, object]:
    """Return a request's past: its seconds by phase, and its events."""
    if history is None:  # the request arrived before the history began
        return {"seconds": {}, "events": [], "num_events_left_out": 0}
    seconds = list(history.phase_s)
    if history.end is None:
        seconds[history.phase] += max(0.0, now - history.phase_since)
    events = (*history.first_events, *history.last_events)
    return {
        "seconds": dict(zip(PHASES, seconds, strict=True)) | {"total": sum(seconds)},
        "first_token_s": history.ttft_s,
        "num_recomputed_tokens": history.num_recomputed_tokens,
        "events": [_event(event, history.arrival) for event in events],
        "num_events_left_out": history.num_events - len(events),
    }


def _event(event: Event, arrival: float) -> dict[str, object]:
    """Return an event with the fields of its kind; `time_s` counts from the request's arrival."""
    values: dict[str, object] = {"event": event.kind.name.lower(), "time_s": event.time - arrival, "step": event.step}
    for name in _FIELDS[event.kind]:
        value = getattr(event, name)
        values[name] = value.name.lower() if name in ("reason", "finish_reason") and value is not None else value
    return values


# --- the scheduler's facts in words and plain values ---------------------------------------------------


def sentence(one: Explanation, is_named: bool = True) -> str:
    """Return an explanation as a sentence; without `is_named` the sentence contains no request's name."""
    text = _running(one) if one.position == 0 else _waiting(one, is_named)
    return f"{one.name} {text}" if is_named else text


def plain_values(one: Explanation, now: float) -> dict[str, object]:
    """Return an explanation's values for JSON: enumerations by name, times from now."""
    values = asdict(one)
    for name in ("arrival", "deadline", "queue_until"):
        del values[name]
    if one.shortage is not None:
        values["shortage"] |= {"reason": reason_name(one.shortage.reason), "unit": unit(one.shortage)}
    for room, plain in zip(one.room, values["room"], strict=True):
        plain["short"] = room.short
    return {
        "id": values.pop("name"),
        **values,
        "state": one.state.value,
        "reason": reason_name(one.reason),
        "age_s": now - one.arrival,
        "deadline_in_s": None if one.deadline is None else one.deadline - now,
        "queue_timeout_in_s": None if one.queue_until is None else one.queue_until - now,
    }


def reason_name(reason: WaitReason | None) -> str | None:
    """Return a reason's name in texts and metrics."""
    return None if reason is None else reason.name.lower()


def unit(shortage: Shortage) -> str:
    """Return what is short, in words; empty for reasons without numbers."""
    return _UNITS.get(shortage.reason, "")


def shortage_text(shortage: Shortage, room: Sequence[Room]) -> str:
    """Return the numbers of a shortage as a text; if `room` is given, the current numbers of blocks."""
    worst = max(room, key=lambda group: group.short, default=None)
    if worst is not None:
        return _room_text(worst, len(room))
    units = unit(shortage)
    if not units:
        return ""
    limit = f" of {shortage.limit}" if shortage.limit else ""
    units = units.removesuffix("s") if shortage.needed == 1 and not limit else units
    return f"needs {shortage.needed}{limit} {units}, {shortage.available} left"


def times(count: int) -> str:
    """Return "once", or how many times."""
    return "once" if count == 1 else f"{count} times"


def _waiting(one: Explanation, is_named: bool) -> str:
    after = f", after {one.behind}" if is_named and one.behind is not None else ""
    again = ""
    if one.state is not Standing.WAITING:
        cause = f"{one.state.value} {times(one.num_preemptions)}"
        again = f" ({cause})" if one.num_preemptions else " (put back after a failure)"
    reason = reason_name(one.reason) or "not looked at yet"
    status = f"waits{again} at position {one.position} of {one.num_waiting}{after}: {reason}"
    if one.shortage is None:
        return status
    numbers = shortage_text(one.shortage, () if one.is_first_short else one.room)
    if one.is_first_short:
        return f"{status}; the first in line lacks {reason_name(one.shortage.reason)}: {numbers}"
    return f"{status}: {numbers}" if numbers else status


def _running(one: Explanation) -> str:
    phase = "decoding" if one.state is Standing.DECODE else "prefilling"
    several = f" over {one.num_choices} sequences" if one.num_choices > 1 else ""
    again = f", preempted {times(one.num_preemptions)}" if one.num_preemptions else ""
    lacks = "" if one.shortage is None else f", {reason_name(one.reason)}: {shortage_text(one.shortage, ())}"
    drafted = f", {one.num_accepted} of {one.num_drafted} drafts accepted" if one.num_drafted else ""
    known = f"{one.num_computed} of {one.num_known} known tokens computed"
    blocks = "1 block" if one.num_blocks == 1 else f"{one.num_blocks} blocks"
    return f"is {phase}: {known}{several}, {blocks} held{again}{lacks}{drafted}"


def _room_text(room: Room, num_groups: int) -> str:
    where = f" of group {room.group}" if num_groups > 1 else ""
    shared = f" beside {room.found} that it finds" if room.found else ""
    kept = [
        f"{count} {what}"
        for count, what in (
            (room.promised, "promised to running requests"),
            (room.headroom, "kept as headroom"),
            (room.growth, "kept so that running requests can grow"),
        )
        if count
    ]
    parts = [f"needs {room.needed} blocks{where}{shared}", f"{room.free} free", f"{room.evictable} evictable", *kept]
    end = "" if room.short > 0 else "; there is room by now, and the next step looks again"
    return ", ".join(parts) + end
