"""Record types that changed between journal formats 1 and 2, for reading a journal of format 1 at the start.

Owns: the structs of format 1, and their conversion to decisions. Does not: read files, or write format 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec

from octavo.core.plan import Event, EventKind, TokenLogprobs
from octavo.core.request import FinishError, FinishReason, Request
from octavo.engine.client import finished
from octavo.errors import ErrorKind


class _Entry(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    number: int


class StartedRequest(_Entry):
    """The first admission of a request."""

    queue_s: float
    cached_tokens: int


class EndedChoice(_Entry):
    """The end of one choice of a request that has others."""

    choice: int
    finish_reason: FinishReason
    stop_token_id: int | None
    message: str | None
    kind: ErrorKind | None = None


class EndedRequest(_Entry):
    """The end of a request."""

    finish_reason: FinishReason
    stop_token_id: int | None
    cached_tokens: int
    num_preemptions: int
    queue_s: float
    message: str | None
    kind: ErrorKind | None = None


class LoggedEventsV1(msgspec.Struct, array_like=True, tag="Appended", forbid_unknown_fields=True):
    """The changes of one `Events`: columns of packed 32-bit numbers, then ends and admissions."""

    at: float
    numbers: bytes
    choices: bytes
    positions: bytes
    token_ids: bytes
    logprobs: tuple[tuple[int, float, int, tuple[int, ...], tuple[float, ...]] | None, ...] | None = None
    choice_ends: tuple[EndedChoice, ...] = ()
    ends: tuple[EndedRequest, ...] = ()
    starts: tuple[StartedRequest, ...] = ()

    def token_logprobs(self) -> list[TokenLogprobs | None] | None:
        """Return the log-probabilities as TokenLogprobs."""
        if self.logprobs is None:
            return None
        return [None if entry is None else TokenLogprobs(*entry) for entry in self.logprobs]

    def decisions(self, find: Callable[[int], Request | None]) -> Iterator[Event]:
        """Yield the record's admissions and ends as an engine's decisions; `find` returns a request by its number."""
        entries: tuple[StartedRequest | EndedChoice | EndedRequest, ...] = (*self.starts, *self.choice_ends, *self.ends)
        for entry in entries:
            request = find(entry.number)
            if request is None:
                continue
            name = request.request_id
            if isinstance(entry, StartedRequest):
                time = request.arrival + entry.queue_s
                yield Event(EventKind.ADMITTED, name, time, 0, cached_tokens=entry.cached_tokens)
                continue
            choice = entry.choice if isinstance(entry, EndedChoice) else None
            end = finished(
                name, entry.finish_reason, _error(entry), choice=choice, stop_token_id=entry.stop_token_id, time=self.at
            )
            yield end if isinstance(entry, EndedChoice) else replace(end, cached_tokens=entry.cached_tokens)


def _error(end: EndedChoice | EndedRequest) -> FinishError | None:
    """Return an end's error. If the record has no kind, find the kind at the begin of the message."""
    if end.message is None:
        return None
    kind = end.kind
    if kind is None:
        kind = next((each for each in ErrorKind if end.message.startswith(each.value)), ErrorKind.ENGINE)
    return FinishError(kind, end.message)
