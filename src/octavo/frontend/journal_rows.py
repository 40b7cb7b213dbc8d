"""From a delivery to the journal's record of it.

Owns: picking out the rows of journaled requests, by number instead of by name, and applying them to the state.
Does not: write. Invariant: the state after it is what reading the record would give.
"""

from __future__ import annotations

from array import array
from itertools import repeat

from octavo.core.plan import TokenLogprobs
from octavo.core.request import FinishReason
from octavo.engine.delivery import Delivery
from octavo.errors import ErrorKind
from octavo.frontend.journal_records import Appended, ChoiceEnded, Ended, Started, wire_logprobs
from octavo.frontend.journal_state import HeldRequest, JournalState


def to_record(
    delivery: Delivery, open_requests: dict[str, HeldRequest], state: JournalState, at: float
) -> Appended | None:
    """The record of a delivery, applied to the state; None when it is all of others. Ended requests leave the dict."""
    numbers, choices, positions, token_ids = (array("i") for _ in range(4))
    logprobs: list[TokenLogprobs | None] = []
    entries = delivery.logprobs if delivery.logprobs is not None else repeat(None)
    columns = zip(
        delivery.request_ids, delivery.choices, delivery.positions, delivery.token_ids, entries, strict=False
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
    starts = _starts(delivery, open_requests)
    choice_ends = _choice_ends(delivery, open_requests, state)
    ends = _ends(delivery, open_requests, state, at)
    if not (numbers or choice_ends or ends or starts):
        return None
    return Appended(
        at,
        numbers.tobytes(),
        choices.tobytes(),
        positions.tobytes(),
        token_ids.tobytes(),
        None if delivery.logprobs is None else wire_logprobs(logprobs),
        choice_ends,
        ends,
        starts,
    )


def _starts(delivery: Delivery, open_requests: dict[str, HeldRequest]) -> tuple[Started, ...]:
    starts: list[Started] = []
    for start in delivery.starts:
        held = open_requests.get(start.request_id)
        if held is not None and held.start is None:
            held.start = Started(held.number, start.queue_s, start.cached_tokens)
            starts.append(held.start)
    return tuple(starts)


def _choice_ends(
    delivery: Delivery, open_requests: dict[str, HeldRequest], state: JournalState
) -> tuple[ChoiceEnded, ...]:
    ends: list[ChoiceEnded] = []
    for end in delivery.choice_ends:
        held = open_requests.get(end.request_id)
        if held is not None:
            error = end.error
            said = (None, None) if error is None else (error.message, error.kind)
            ends.append(ChoiceEnded(held.number, end.choice, end.finish_reason, end.stop_token_id, *said))
            state.end_choice(ends[-1])
    return tuple(ends)


def _ends(
    delivery: Delivery, open_requests: dict[str, HeldRequest], state: JournalState, at: float
) -> tuple[Ended, ...]:
    ends: list[Ended] = []
    for end in delivery.ends:
        if (
            end.finish_reason is FinishReason.ERROR
            and end.error is not None
            and end.error.kind is ErrorKind.ENGINE_DEAD
        ):
            continue  # there is no engine any more: it stays open, for the next life
        held = open_requests.pop(end.request_id, None)
        if held is not None:
            error = end.error
            ends.append(
                Ended(
                    held.number,
                    end.finish_reason,
                    end.stop_token_id,
                    end.cached_tokens,
                    end.num_preemptions,
                    end.queue_s,
                    message=None if error is None else error.message,
                    kind=None if error is None else error.kind,
                )
            )
            state.end(ends[-1], at)
    return tuple(ends)
