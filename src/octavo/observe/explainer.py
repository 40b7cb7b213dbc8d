"""Explainer: answers `explain` for one request or all open ones, also for a while after the end.

Owns: the answer as plain JSON values: where a request is (core.explain), when its next token is expected
(forecast), and what happened to it so far (history). Does not: decide, or fold events.
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.core.explain import Explanation, Standing
from octavo.core.plan import Event, EventKind
from octavo.observe.explain import plain_values, reason_name, sentence, shortage_text, times
from octavo.observe.forecast import NEW_REQUEST, Forecaster
from octavo.observe.history import PHASES, History, RequestHistory

MAX_LISTED = 256  # that wait, and as many that run, in a list of all
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
    """Answers in the thread that steps; `now` is the scheduler's clock."""

    def __init__(self, history: History, now: Callable[[], float]) -> None:
        self._history = history
        self._scheduler = history.scheduler
        self._now = now
        self.forecaster = Forecaster(history.scheduler, history.step_times, history.answer_lengths, now)

    def answer(self, argument: str) -> dict[str, object]:
        """Explain one request by its id, or with an empty argument all open ones.

        `new_request_s`: when a request that arrived now would be admitted; null where that is not known.
        """
        now = self._now()
        self._history.drop_old(now)
        values = self._one(argument, now) if argument else self._all(now)
        found = self.forecaster.next_tokens().get(NEW_REQUEST)
        return {**values, "new_request_s": None if found is None else found.seconds}

    def _one(self, name: str, now: float) -> dict[str, object]:
        history = self._history.open.get(name) or self._history.ended.get(name)
        explanation = self._scheduler.explain(name, now)
        if explanation is None:
            return unknown(name) if history is None or history.end is None else _ended(history, now)
        values = _plain(explanation, now) | {"prediction": None}
        expected = ""
        if explanation.state is not Standing.DECODE:
            values["prediction"], text = self._predict(explanation)
            expected = f"; {text}"
        values["text"] = sentence(explanation) + expected
        values["public_text"] = sentence(explanation, is_named=False) + expected
        return values | _past(history, now)

    def _all(self, now: float) -> dict[str, object]:
        """Open requests without their histories: the first that wait and the first that run."""
        forecasts = self.forecaster.next_tokens()
        listed = []
        for one in self._scheduler.explain_all(now, MAX_LISTED):
            lacks = "" if one.shortage is None else shortage_text(one.shortage, () if one.is_first_short else one.room)
            listed.append(
                {
                    "id": one.name,
                    "tenant": one.tenant,
                    "state": one.state.value,
                    "position": one.position,
                    "reason": reason_name(one.reason),
                    "lacks": lacks,
                    "behind": one.behind,
                    "age_s": now - one.arrival,
                    "num_prompt_tokens": one.work.num_prompt_tokens,
                    "num_outputs": one.work.num_outputs,
                    "num_blocks": one.work.num_blocks,
                    "num_preemptions": one.num_preemptions,
                    "next_token_s": forecasts[one.name].seconds if one.name in forecasts else None,
                }
            )
        gauges = self._scheduler.gauges()
        counts = {"num_waiting": gauges.num_waiting, "num_running": gauges.num_running_requests}
        return {"open": listed, **counts, "num_ended_kept": len(self._history.ended)}

    def _predict(self, explanation: Explanation) -> tuple[dict[str, object], str]:
        """Return the seconds to the next token, or why they are not known, as values and in words."""
        found = self.forecaster.next_tokens().get(explanation.name)
        if found is not None:
            token = "first" if explanation.work.num_outputs == 0 else "next"
            values: dict[str, object] = {
                "next_token_s": found.seconds,
                "least_s": found.least,
                "most_s": found.most,
                "why_not": None,
            }
            band = "" if found.least == found.most else f" ({found.least:.2f} to {found.most:.2f} s)"
            return values, f"its {token} token is expected in about {found.seconds:.2f} s{band}"
        if self._scheduler.is_paused:
            why = "the engine is paused"
        elif self._history.step_times.fit() is None:
            why = "too few steps were made yet"
        elif self._history.answer_lengths.is_known:
            why = "it was made before this came here; ask again"
        else:
            why = "it has to wait for answers to end, and how long they get is not known yet"
        return {"next_token_s": None, "least_s": None, "most_s": None, "why_not": why}, f"no prediction: {why}"


def unknown(name: str) -> dict[str, object]:
    """Return the answer for an id that no open request has, and none that ended and is kept."""
    text = "is not known here: no such request was submitted, or it ended and its record was dropped"
    return {"id": name, "state": "unknown", "text": f"{name} {text}", "public_text": text}


def _plain(explanation: Explanation, now: float) -> dict[str, object]:
    """Return an explanation's values, with times as seconds from now, and those of `work` beside the rest."""
    values = plain_values(explanation)
    work = values.pop("work")
    assert isinstance(work, dict)
    del values["now"], values["arrival"]
    del values["deadline"], values["queue_until"]
    until = explanation.queue_until
    return {
        "id": values.pop("name"),
        **values,
        **work,
        "age_s": now - explanation.arrival,
        "deadline_in_s": None if explanation.deadline is None else explanation.deadline - now,
        "queue_timeout_in_s": None if until is None else until - now,
    }


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
    """Return what happened to a request so far: its seconds by phase, and its events."""
    if history is None:  # it arrived before the history began
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
    """Return an event with the fields that its kind has; `time_s` since the request's arrival."""
    values: dict[str, object] = {"event": event.kind.name.lower(), "time_s": event.time - arrival, "step": event.step}
    for name in _FIELDS[event.kind]:
        value = getattr(event, name)
        values[name] = value.name.lower() if name in ("reason", "finish_reason") and value is not None else value
    return values
