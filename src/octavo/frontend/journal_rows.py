"""From events to the journal's record of it.

Owns: picking out the rows of journaled requests, by number instead of by name, and applying them to the state.
Does not: write. Invariant: the state after it is what reading the record would give.
"""

from __future__ import annotations

from array import array
from itertools import repeat

from octavo.core.plan import Event, EventKind, Events, TokenLogprobs
from octavo.core.request import FinishReason
from octavo.errors import ErrorKind
from octavo.frontend.journal_records import Appended, ChoiceEnded, Ended, Started, wire_logprobs
from octavo.frontend.journal_state import HeldRequest, JournalState


def to_record(events: Events, open_requests: dict[str, HeldRequest], state: JournalState, at: float) -> Appended | None:
    """The record of events, applied to the state; None when it is all of others. Ended requests leave the dict."""
    numbers, choices, positions, token_ids = (array("i") for _ in range(4))
    logprobs: list[TokenLogprobs | None] = []
    entries = events.logprobs if events.logprobs is not None else repeat(None)
    columns = zip(
        events.request_ids, events.choices, events.positions, events.token_ids, entries, strict=False
    )  # the last may be without an end
    for request_id, choice, position, token_id, entry in columns:
        held = open_requests.get(request_id)
        if held is not None and held.append(choice, position, token_id, entry):
            if held.first_at is None:
                held.first_at = at
            numbers.append(held.number)
            choices.append(choice)
            positions.append(position)
            token_ids.append(token_id)
            logprobs.append(entry if held.has_logprobs else None)
    starts, choice_ends, ends = _ends(events, open_requests, state, at)
    if not (numbers or choice_ends or ends or starts):
        return None
    return Appended(
        at,
        numbers.tobytes(),
        choices.tobytes(),
        positions.tobytes(),
        token_ids.tobytes(),
        None if events.logprobs is None else wire_logprobs(logprobs),
        tuple(choice_ends),
        tuple(ends),
        tuple(starts),
    )


def _ends(
    events: Events, open_requests: dict[str, HeldRequest], state: JournalState, at: float
) -> tuple[list[Started], list[ChoiceEnded], list[Ended]]:
    """Return the first admissions and the ends among the decisions, applied to the state."""
    starts: list[Started] = []
    choice_ends: list[ChoiceEnded] = []
    ends: list[Ended] = []
    for event in events.decisions:
        held = open_requests.get(event.request_id)
        if held is None:
            continue
        if event.kind == EventKind.ADMITTED and held.start is None:
            queue_s = max(0.0, event.time - held.request.arrival)
            held.start = Started(held.number, queue_s, event.cached_tokens)
            starts.append(held.start)
        elif event.kind == EventKind.CHOICE_FINISHED:
            reason, kind, message = _told(event)
            choice_ends.append(ChoiceEnded(held.number, event.choice, reason, event.stop_token_id, message, kind))
            state.end_choice(choice_ends[-1])
        elif event.kind == EventKind.FINISHED:
            reason, kind, message = _told(event)
            if reason is FinishReason.ERROR and kind is ErrorKind.ENGINE_DEAD:
                continue  # there is no engine any more: it stays open, for the next life
            del open_requests[event.request_id]
            queue_s = 0.0 if held.start is None else held.start.queue_s
            cached_tokens = event.cached_tokens
            ends.append(Ended(held.number, reason, event.stop_token_id, cached_tokens, 0, queue_s, message, kind))
            state.end(ends[-1], at)
    return starts, choice_ends, ends


def _told(end: Event) -> tuple[FinishReason, ErrorKind | None, str | None]:
    assert end.finish_reason is not None
    return end.finish_reason, None if end.error is None else end.error.kind, end.message
