"""Restore a former server's runs from the journal: open requests continue, finished answers serve retries.

Owns: making runs from journaled records. Does not: read files (the journal did), or keep runs (idempotency does).
Invariants: a finished answer is never computed again, and its text is not made before its first reader; a run that
cannot be restored is removed from the journal, so that a retry starts it again.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace

import msgspec

from octavo.core.request import FinishReason
from octavo.engine.client import Accepted, TokenOutput
from octavo.frontend.journal import Journal
from octavo.frontend.journal_state import JournaledRequest, JournaledRun
from octavo.frontend.open_request import OpenRequest
from octavo.frontend.outputs import TextDelta
from octavo.frontend.sessions import OutputClient, Session
from octavo.server.admission import AdmissionRequest
from octavo.server.context import Context
from octavo.server.encoding import REASONS, AnswerSpec
from octavo.server.generation import Generation, failure_of
from octavo.server.http.lifecycle import MARK
from octavo.server.idempotency import Begun, IdempotentRequest, RetryKey

_log = logging.getLogger(__name__)
RestoreEntries = Callable[[Iterable[OpenRequest]], None]


def take_over(context: Context, journal: Journal, restore: RestoreEntries) -> tuple[int, int]:
    """Continue open runs in the engine, and keep ended ones; return the number of runs of each kind.

    Call it in the event loop, before anything is served. `restore` is EngineSupervisor.restore. Raises EngineDeadError.
    """
    runs = context.runs
    runs.journal = journal
    runs.start_sweeping()
    going: list[tuple[JournaledRun, AnswerSpec]] = []
    num_kept = 0
    latest = {(held.began.tenant, held.began.key): held for held in journal.recovered}
    for held in journal.recovered:
        form = _form(held)
        is_latest = latest[held.began.tenant, held.began.key] is held  # a key may be reused once its run was dropped
        if form is None or not is_latest or not _is_worth_keeping(held):
            journal.forget(held.began.run)
        elif held.is_ended:
            runs.keep(_stored(context, held, form))
            num_kept += 1
        else:
            going.append((held, form))
    restore([request.state for run, _ in going for request in _requests(run)])
    for held_run, form in going:
        run = _run(held_run)
        runs.keep(run)
        runs.start(run, Begun(_generation(context, held_run), form, _num_choices(held_run)))
    return len(going), num_kept


def _form(held: JournaledRun) -> AnswerSpec | None:
    try:
        return msgspec.msgpack.decode(held.began.facts, type=AnswerSpec)
    except msgspec.MsgspecError:
        _log.warning("journal: request %s was written by another version and is left out", held.began.run)
        return None


def _requests(held: JournaledRun) -> list[JournaledRequest]:
    return [held.requests[index] for index in sorted(held.requests)]


def _num_choices(held: JournaledRun) -> int:
    return sum(each.request.params.n for each in held.requests.values())


def _is_worth_keeping(held: JournaledRun) -> bool:
    """Return True if no request of it failed in a way that may be retried."""
    for request in held.requests.values():
        end = request.end
        if end is None or end.finish_reason is None or end.finish_reason in REASONS:
            continue
        if not failure_of(end.finish_reason, end.error).is_final:
            return False
    return True


def _run(held: JournaledRun) -> IdempotentRequest:
    began = held.began
    run = IdempotentRequest(RetryKey(began.tenant, began.key, began.body_hash))
    run.number = began.run
    return run


def _stored(context: Context, held: JournaledRun, form: AnswerSpec) -> IdempotentRequest:
    run = _run(held)
    run.ended_at = max(each.ended_at or 0.0 for each in held.requests.values())
    run.num_bytes = held.num_bytes
    run.revive = lambda: Begun(_StoredAnswer(context, held), form, _num_choices(held))
    return run


def _sessions(context: Context, held: JournaledRun, client: OutputClient) -> list[Session]:
    return [_session(context, each, client) for each in _requests(held)]


def _session(context: Context, held: JournaledRequest, client: OutputClient) -> Session:
    request, tokenizer = held.request, context.text.tokenizer
    accepted = Accepted(request.request_id, request.params.max_tokens or 0, False)
    return Session(client, request, accepted, tokenizer, max_slice=1)  # an event id may name any token


def _generation(context: Context, held: JournaledRun) -> Generation:
    """Return the Generation of an open run, with a new ticket: it was admitted before."""
    requests = [each.request for each in _requests(held)]
    first = requests[0]
    wanted = AdmissionRequest(priority=first.priority, num_prompts=len(requests), width=first.params.num_sequences)
    ticket = context.admission.readmit(wanted)
    closing = ExitStack()
    closing.callback(ticket.leave)
    names = [request.request_id for request in requests]
    closing.callback(context.request_index.add(first.tenant, names[0].partition(MARK)[0], names))
    return Generation(
        name=first.request_id,
        params=first.params,
        prompt_lengths=[request.num_prompt_tokens for request in requests],
        arrival=first.arrival,
        sessions=_sessions(context, held, context.sessions.client),
        metrics=context.metrics,
        ticket=ticket,
        closing=closing,
    )


class _StoredOutputs:
    """The outputs of requests that have ended."""

    def __init__(self, entries: Mapping[str, OpenRequest]) -> None:
        self._entries = entries

    async def outputs(
        self, request_id: str, final_only: bool = False, max_ids: int = sys.maxsize
    ) -> AsyncIterator[TokenOutput]:
        """Yield all outputs of a request."""
        while outputs := self._entries[request_id].take(max_ids):
            for output in outputs:
                yield output

    def cancel(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.CANCELLED, choice: int | None = None
    ) -> int:
        """Do nothing: the requests have ended."""
        return 0


class _StoredAnswer:
    """The deltas of a run that has ended; metrics do not count them again."""

    def __init__(self, context: Context, held: JournaledRun) -> None:
        self._held = _requests(held)
        entries = {each.request.request_id: each.state for each in self._held}
        self._sessions = _sessions(context, held, _StoredOutputs(entries))

    async def deltas(self) -> AsyncGenerator[tuple[int, TextDelta], None]:
        """Yield (index, delta), one request after the other. Raises ApiError for one that failed."""
        for number, (held, session) in enumerate(zip(self._held, self._sessions, strict=True)):
            async for delta in session:
                if delta.usage is not None:
                    usage = replace(delta.usage, e2e_s=(held.ended_at or 0.0) - held.request.arrival)
                    delta = replace(delta, usage=usage)
                if delta.finish_reason is not None and delta.finish_reason not in REASONS:
                    raise failure_of(delta.finish_reason, delta.error)
                yield number * held.request.params.n + delta.choice, delta

    async def close(self) -> None:
        """Do nothing: the requests have ended."""
