"""The types of an answer's encoder: AnswerSpec, AnswerEncoder, StreamFormat; and the code that several APIs share.

Owns: these types, Choice, the table of encoders (each API registers its own), the JSON of log-probabilities and of a
call's arguments. Does not: know any API.
Invariant: the same spec and deltas give the same bytes, so that another server process can encode the answer again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
from msgspec import Struct

from octavo.core.request import FinishReason
from octavo.text.answer_format import AnswerFormat
from octavo.text.dialect import AnswerReader

if TYPE_CHECKING:
    from octavo.core.plan import TokenLogprobs
    from octavo.frontend.outputs import TextDelta, Usage
    from octavo.server.http.errors import ApiError

Json = dict[str, Any]
Identity = tuple[str, int, str]  # id, created (Unix seconds), model
REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class Pieces(Protocol):
    """The part of a tokenizer that an encoder uses."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text."""


@dataclass(slots=True)
class Choice:
    """All deltas of one choice."""

    deltas: list[TextDelta] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The choice's whole text."""
        return "".join(delta.text for delta in self.deltas)

    @property
    def usage(self) -> Usage | None:
        """The usage in the last delta; None unless this choice was the last of its prompt to end."""
        return self.deltas[-1].usage if self.deltas else None


class AnswerSpec(Struct, frozen=True, array_like=True):
    """The description of an answer, as plain data for the journal. `kind` names the encoder; `facts` is for that kind.

    The fact "format" is an AnswerFormat, or the plain data of one if it was read from the journal. `files` names the
    files of the model, in the journal of a server of several models.
    """

    kind: str
    identity: Identity
    include_usage: bool = False
    echoes: tuple[str, ...] = ("",)
    n: int = 1
    facts: dict[str, Any] = {}
    files: str = ""


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """The bytes around a stream's events. `error` encodes a failure. With an empty `keep_alive` none is sent.

    `done` ends every stream, including a failed one. `has_ids`: a line with an event's id may precede the event.
    `by_token`: each token has its own events, so that all readers of an answer get the same events.
    """

    media_type: str
    done: bytes
    keep_alive: bytes
    error: Callable[[ApiError], bytes]
    has_ids: bool = True
    by_token: bool = False


class AnswerEncoder(Protocol):
    """An encoder of one request's answer, whole or as events."""

    @property
    def stream_format(self) -> StreamFormat:
        """The bytes around the events."""

    @property
    def head(self) -> bytes:
        """The events before the first delta; b"" for none. Read once."""

    def whole(self, choices: Sequence[Choice]) -> Json:
        """Return the answer as one object."""

    def chunk(self, index: int, delta: TextDelta) -> bytes:
        """Return the events of a delta; b"" if this delta completes no event."""

    def last(self) -> bytes:
        """Return the events after the last delta: the usage, if requested."""


ENCODERS: dict[str, Callable[[AnswerSpec, Pieces], AnswerEncoder]] = {}  # by AnswerSpec.kind
E = TypeVar("E", bound=AnswerEncoder)


def encodes(kind: str) -> Callable[[type[E]], type[E]]:
    """Return a decorator that registers an encoder for this kind of AnswerSpec."""

    def add(encoder: type[E]) -> type[E]:
        make: Callable[[AnswerSpec, Pieces], AnswerEncoder] = encoder
        ENCODERS[kind] = make
        return encoder

    return add


LOWEST_LOGPROB = -9999.0  # JSON has no infinity


class IdPieces:
    """Pieces whose bytes are a token's id, for return_tokens_as_token_ids."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return "token_id:" and the id, as vLLM does."""
        return b"token_id:%d" % token_id


def chat_logprobs(deltas: Iterable[TextDelta], pieces: Pieces) -> Json | None:
    """Return the `logprobs` of a chat choice or chunk; None without log-probabilities."""
    entries = entries_of(deltas)
    if not entries:
        return None
    content = []
    for entry in entries:
        tops = [_one(t, p, pieces) for t, p in zip(entry.top_ids, entry.top_logprobs, strict=True)]
        content.append({**_one(entry.token_id, entry.logprob, pieces), "top_logprobs": tops})
    return {"content": content, "refusal": None}


def entries_of(deltas: Iterable[TextDelta]) -> list[TokenLogprobs]:
    """Return the log-probabilities of the deltas' tokens, one entry per token."""
    return [entry for delta in deltas for entry in delta.logprobs or () if entry is not None]


def _one(token_id: int, logprob: float, pieces: Pieces) -> Json:
    raw = pieces.token_bytes(token_id)
    return {"token": raw.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(raw)}


def finite(logprob: float) -> float:
    """Return the log-probability, or LOWEST_LOGPROB if it is lower: JSON has no infinity."""
    return max(logprob, LOWEST_LOGPROB)


def reader_of(spec: AnswerSpec) -> AnswerReader:
    """Return a new AnswerReader for an answer of one choice."""
    return AnswerReader(msgspec.convert(spec.facts.get("format"), AnswerFormat | None), f"{spec.identity[0]}:0")


def sse_event(kind: str, data: object) -> bytes:
    """Return one named event of a text/event-stream."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(data))


def call_input(text: str) -> Json:
    """Return a call's arguments. Text that is no JSON object is put under INVALID_JSON, as Anthropic advises."""
    try:
        value = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": text}
