"""ResumableStream: reads a TokenLog for one connection, from the position where an earlier connection ended.

Owns: TokenLog; positions in a TokenLog, which are a stream's event ids; cutting a TokenLog into events.
Does not: run a request (idempotency does), or know an event's format (each API's encoder does).
Invariants: a position counts tokens, not events, so it does not depend on how the text was cut, and it is valid after a
restart. Each event advances the position of one choice. Connections that each continue at the last one's position get
one whole answer together.
"""

from __future__ import annotations

import asyncio
import re
from array import array
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from octavo.core.plan import TokenLogprobs
from octavo.frontend.outputs import TextDelta
from octavo.frontend.sessions import slice_tokens, token_bytes
from octavo.server.encoding import AnswerEncoder, Choice, Json
from octavo.server.http.errors import ApiError, bad_field

MAX_IDENTIFIED = 64  # streams with more choices have no event ids, since an id lists all choices
_PLACE = re.compile(r"(-|[0-9]{1,9})([+.]?)")
_STARTED, _TAIL, _ENDED = 0, 1, 2
ChoicePosition = tuple[
    int, int
]  # (tokens sent, or -1 before the first event; _STARTED, _TAIL if the text after the last token was sent, or _ENDED)

_NOTHING: ChoicePosition = (-1, _STARTED)


@dataclass(slots=True)
class Position:
    """The part of an answer that a client has: a ChoicePosition per choice, and whether the client has the usage."""

    places: list[ChoicePosition]
    has_usage: bool = False

    @classmethod
    def start(cls, num_choices: int) -> Position:
        """Return the position of a client that has nothing yet."""
        return cls([_NOTHING] * num_choices)

    @classmethod
    def parse(cls, text: str, num_choices: int) -> Position:
        """Return the position that an event id describes. Raises ApiError."""
        places, mark, usage = text.partition(";")
        found = [_PLACE.fullmatch(place) for place in places.split(",", num_choices)]
        read = [place for match in found if match and (place := _read_choice(match[1], match[2])) is not None]
        if len(found) != num_choices or len(read) != num_choices or (mark and usage != "u"):
            message = f"Last-Event-ID is {text[:64]!r}; give the id of an event of this stream"
            raise bad_field("Last-Event-ID", message, "invalid_event_id")
        return cls(read, usage == "u")

    def text(self) -> str:
        """Return the position as an event id."""
        marks = ("", "+", ".")
        places = ",".join("-" if tokens < 0 else f"{tokens}{marks[stage]}" for tokens, stage in self.places)
        return places + ";u" if self.has_usage else places


def _read_choice(tokens: str, mark: str) -> ChoicePosition | None:
    if tokens == "-":
        return None if mark else _NOTHING
    return int(tokens), ("", "+", ".").index(mark)


@dataclass(slots=True)
class LoggedChoice:
    """One choice: its text as UTF-8, and for each token the byte offset at which the token's text ends."""

    text: bytearray = field(default_factory=bytearray)
    ends: array[int] = field(default_factory=lambda: array("i"))
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    last: TextDelta | None = None  # the delta with the finish reason, without its text

    def add(self, delta: TextDelta) -> None:
        """Add the next delta. If it has several tokens, its text belongs to the last of them."""
        begin = len(self.text)
        self.text += delta.text.encode()
        num_tokens = len(delta.token_ids)
        if num_tokens:
            self.ends.extend([begin] * (num_tokens - 1))
            self.ends.append(len(self.text))
        if delta.logprobs is not None:
            self.logprobs.extend([None] * (len(self.ends) - num_tokens - len(self.logprobs)))
            self.logprobs.extend(delta.logprobs)
        if delta.finish_reason is not None:
            self.last = replace(delta, text="", token_ids=array("i"), logprobs=None)

    @property
    def num_bytes(self) -> int:
        """The approximate bytes in memory."""
        return len(self.text) + 4 * len(self.ends) + len(self.logprobs) * token_bytes(self._num_tops)

    @property
    def _num_tops(self) -> int | None:
        """The number of top log-probabilities of each token; None without log-probabilities."""
        if not self.logprobs:
            return None
        return len(self.logprobs[0].top_ids) if self.logprobs[0] is not None else 0

    def next_piece(self, index: int, at: ChoicePosition, stop: int) -> tuple[TextDelta, ChoicePosition] | None:
        """Return the piece after a position, and the position after that piece. No piece crosses `stop` tokens."""
        tokens, stage = at
        if tokens < 0:
            return TextDelta(index, "", array("i")), (0, _STARTED)
        if stage == _STARTED and tokens < len(self.ends):
            end = min(len(self.ends), tokens + slice_tokens(self._num_tops))
            end = min(end, stop) if tokens < stop else end
            logprobs = tuple(self.logprobs[tokens:end])
            return TextDelta(index, self._text(tokens, end), array("i"), logprobs or None), (end, _STARTED)
        if self.last is None or stage == _ENDED:
            return None
        tail = self._text(tokens, None)
        if stage == _STARTED and tail:
            return TextDelta(index, tail, array("i")), (tokens, _TAIL)
        return replace(self.last, choice=index), (tokens, _ENDED)

    def whole(self, index: int) -> TextDelta:
        """Return the whole choice as one delta. The choice must have ended."""
        assert self.last is not None
        return replace(self.last, choice=index, text=self.text.decode(), logprobs=tuple(self.logprobs) or None)

    def _text(self, tokens: int, end: int | None) -> str:
        first = self.ends[tokens - 1] if tokens else 0
        return self.text[first : len(self.text) if end is None else self.ends[end - 1]].decode()


class TokenLog:
    """The answer so far. `failure` is the error of a failed answer."""

    def __init__(self, num_choices: int) -> None:
        self.choices = [LoggedChoice() for _ in range(num_choices)]
        self.is_done = False
        self.failure: ApiError | None = None
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def num_bytes(self) -> int:
        """Approximate bytes in memory."""
        return sum(choice.num_bytes for choice in self.choices)

    def add(self, index: int, delta: TextDelta) -> None:
        """Add the next delta of a choice, and wake the readers."""
        self.choices[index].add(delta)
        self._wake()

    def finish(self, failure: ApiError | None = None) -> None:
        """Mark the end, and wake the readers. Idempotent."""
        if not self.is_done:
            self.is_done, self.failure = True, failure
            self._wake()

    async def wait_for_more(self) -> None:
        """Wait for the next delta or the end."""
        if self.is_done:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    async def collect(self) -> list[Choice]:
        """Wait for the end and return all choices. Raises ApiError if the answer failed."""
        while not self.is_done:
            await self.wait_for_more()
        if self.failure is not None:
            raise self.failure
        return [Choice([choice.whole(index)]) for index, choice in enumerate(self.choices)]

    def has_position(self, position: Position) -> bool:
        """Return True if a client can have this position. A running or failed answer allows every position."""
        if not self.is_done or self.failure is not None:
            return True
        return all(tokens <= len(c.ends) for c, (tokens, _) in zip(self.choices, position.places, strict=True))

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)


class ResumableStream:
    """One connection's reader of a TokenLog: a source of deltas, and an encoder that adds event ids."""

    def __init__(
        self, log: TokenLog, encoder: AnswerEncoder, name: str, seen: Position | None, on_close: Callable[[], None]
    ) -> None:
        self.name = name
        self._log = log
        self.encoder = encoder
        self._at = [_NOTHING] * len(log.choices)
        self._has = seen or Position.start(len(log.choices))  # what the client has after reading all that was sent
        self.stream_format = encoder.stream_format
        self._is_identified = len(log.choices) <= MAX_IDENTIFIED and self.stream_format.has_ids
        if self._is_identified and self.stream_format.keep_alive.startswith(b":"):
            # After an event with an id, OpenAI's Python package takes each blank line for an event, and fails on it.
            self.stream_format = replace(self.stream_format, keep_alive=b": keep-alive\n")
        self._on_close: Callable[[], None] | None = on_close

    @property
    def unread_bytes(self) -> int:
        """0: the TokenLog is kept anyway, so no bytes wait for this reader alone."""
        return 0

    async def deltas(self) -> AsyncGenerator[tuple[int, TextDelta], None]:
        """Yield the answer in pieces, each of which makes one event. Raises ApiError if the answer failed."""
        log = self._log
        while True:
            for index in range(len(log.choices)):
                for piece in self._pieces(index):
                    yield index, piece
            if log.is_done and not self._is_behind():
                break
            if not self._is_behind():
                await log.wait_for_more()
        if log.failure is not None:
            raise log.failure

    async def collect(self) -> list[Choice]:
        """Wait for the end and return all choices. Raises ApiError if the answer failed."""
        return await self._log.collect()

    async def close(self) -> None:
        """Call `on_close`. Idempotent."""
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    @property
    def head(self) -> bytes:
        """The events before the first delta; b"" if the client has a part of the answer."""
        event = self.encoder.head
        return event if all(place == _NOTHING for place in self._has.places) else b""

    def chunk(self, index: int, delta: TextDelta) -> bytes:
        """Return the event of a piece from `deltas`; b"" if the client has this event."""
        event, place = self.encoder.chunk(index, delta), self._at[index]
        if not event or place <= self._has.places[index]:
            return b""
        self._has.places[index] = place
        return self._identified(event)

    def last(self) -> bytes:
        """Return the events after the last delta; b"" if the client has them."""
        event = self.encoder.last()
        if not event or self._has.has_usage:
            return b""
        self._has.has_usage = True
        return self._identified(event)

    def whole(self, choices: Sequence[Choice]) -> Json:
        """Return the answer as one object."""
        return self.encoder.whole(choices)

    def _identified(self, event: bytes) -> bytes:
        return b"id: %b\n%b" % (self._has.text().encode(), event) if self._is_identified else event

    def _pieces(self, index: int) -> Iterator[TextDelta]:
        """Yield a choice's next piece, after its empty first piece. One piece per call, so that choices take turns."""
        choice, by_token = self._log.choices[index], self.stream_format.by_token
        while True:
            stop = max(0, self._at[index][0]) + 1 if by_token else self._has.places[index][0]
            found = choice.next_piece(index, self._at[index], stop)
            if found is None:
                return
            piece, place = found
            is_first = place[0] == 0
            self._at[index] = place
            yield piece
            if not is_first:
                return

    def _is_behind(self) -> bool:
        return any(
            choice.next_piece(index, self._at[index], 0) is not None for index, choice in enumerate(self._log.choices)
        )
