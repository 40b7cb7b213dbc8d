"""The interface of an API's encoder: AnswerSpec, AnswerEncoder, StreamFormat.

Owns: these types, and the choices to encode. Does not: know any API (`api.encoders` has the table).
Invariant: the same spec and deltas give the same bytes, so that another server can encode the answer again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from octavo.core.request import FinishReason

if TYPE_CHECKING:
    from octavo.frontend.outputs import TextDelta, Usage
    from octavo.server.http.errors import ApiError

Json = dict[str, Any]
Identity = tuple[str, int, str]  # id, created (Unix seconds), model
REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class Pieces(Protocol):
    """The part of a tokenizer that an encoder uses."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text."""
        ...


@dataclass(slots=True)
class Choice:
    """All deltas of one choice."""

    deltas: list[TextDelta] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of its text."""
        return "".join(delta.text for delta in self.deltas)

    @property
    def usage(self) -> Usage | None:
        """The usage that its last delta carries, if it was its prompt's last choice to end."""
        return self.deltas[-1].usage if self.deltas else None


class AnswerSpec(Struct, frozen=True, array_like=True):
    """Plain data that the journal stores. `kind` names the encoder; `facts` holds the data of this kind only.

    The fact "format" is an AnswerFormat, or its plain form if read from the journal.
    """

    kind: str
    identity: Identity
    include_usage: bool = False
    echoes: tuple[str, ...] = ("",)
    n: int = 1
    facts: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """The bytes around a stream's events. `error` encodes a failure; an empty `keep_alive` means none is sent.

    `done` ends every stream, including a failed one. `has_ids`: a line with an event's id may precede the event.
    `by_token`: each token has events of its own, so that all readers of an answer get the same events.
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
        ...

    @property
    def head(self) -> bytes:
        """The events before any delta, b"" for none. Read once."""
        ...

    def whole(self, choices: Sequence[Choice]) -> Json:
        """Return the answer as one object."""
        ...

    def chunk(self, index: int, delta: TextDelta) -> bytes:
        """Return the events of a delta, b"" for none yet."""
        ...

    def last(self) -> bytes:
        """Return the events after the last delta: the usage, if requested."""
        ...
