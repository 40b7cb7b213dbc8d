"""How an answer looks on the wire: chat and text, whole and as chunks.

Owns: OpenAI's objects and the bytes of each chunk. Does not: send anything or wait for anything.
Invariants: every chunk of a stream has the same id; finish_reason is null in all but a choice's last chunk.
Chunks are joined from bytes made once per request; only the text and what follows from it is encoded per delta.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from msgspec import Struct
from msgspec.json import encode

from octavo.server.answer import (
    Json,
    Pieces,
    chat_logprobs,
    completion_logprobs,
    last_usage,
    logprobs_length,
    timings_json,
    usage_json,
)
from octavo.server.generation import REASONS, Choice

if TYPE_CHECKING:
    from octavo.core.request import FinishReason
    from octavo.engine.sessions import TextDelta, Usage

Identity = tuple[str, int, str]  # id, created (Unix seconds), model


class Shape(Protocol):
    """One request's answer, in whichever form."""

    def whole(self, choices: Sequence[Choice]) -> Json:
        """The answer as one object."""
        ...

    def chunk(self, index: int, delta: TextDelta) -> bytes:
        """The events that a delta makes, b"" when there is nothing to show yet."""
        ...

    def last(self) -> bytes:
        """The events behind the last delta: usage when asked for."""
        ...


class Form(Struct, frozen=True, array_like=True):
    """What a shape is made from: plain data, so that an answer can be shaped again, by another server too."""

    kind: Literal["chat", "text"]
    identity: Identity
    include_usage: bool = False
    echoes: tuple[str, ...] = ("",)
    n: int = 1

    def shape(self, pieces: Pieces) -> Shape:
        """A new shape, which has given nothing yet."""
        if self.kind == "chat":
            return ChatShape(self.identity, pieces, self.include_usage)
        return CompletionShape(self.identity, pieces, self.echoes, self.n, self.include_usage)


class _Stream:
    """What the chunks of one request share: id, model and the usage of the choices that ended."""

    def __init__(self, kind: str, identity: Identity, include_usage: bool) -> None:
        request_id, created, model = identity
        self.identity: Json = {"id": request_id, "object": kind, "created": created, "model": model}
        self.head = b"data: " + encode(self.identity)[:-1] + b',"choices":['
        self.include_usage = include_usage
        self.tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self.usages: list[Usage] = []

    def event(self, choice: bytes, extra: bytes = b"") -> bytes:
        """One chunk with one choice; `extra` are further members of the object, each with its comma."""
        return b"".join((self.head, choice, b"]", extra, self.tail))

    def timings(self, delta: TextDelta, num_prompts: int) -> bytes:
        """Take a choice's last delta; the member with the timings if it ends the answer and no usage chunk has them."""
        if delta.usage is not None:
            self.usages.append(delta.usage)
        if delta.usage is None or self.include_usage or len(self.usages) < num_prompts:
            return b""
        return b',"timings":' + encode(timings_json(self.usages))

    def usage_event(self) -> bytes:
        """The chunk without choices that carries the usage; b"" when it was not asked for."""
        if not self.include_usage:
            return b""
        usage = encode(usage_json(self.usages))
        return b"".join((self.head, b'],"usage":', usage, b',"timings":', encode(timings_json(self.usages)), b"}\n\n"))


def _ending(delta: TextDelta) -> bytes:
    reason: FinishReason | None = delta.finish_reason
    assert reason is not None
    return b'"finish_reason":%b,"stop_reason":%b}' % (encode(REASONS[reason]), encode(delta.stop_reason))


class ChatShape:
    """Answers of /v1/chat/completions."""

    def __init__(self, identity: Identity, pieces: Pieces, include_usage: bool = False) -> None:
        self._pieces = pieces
        self._stream = _Stream("chat.completion.chunk", identity, include_usage)
        self._begun: set[int] = set()

    def whole(self, choices: Sequence[Choice]) -> Json:
        """A chat.completion object."""
        usages = [last_usage(choice.deltas) for choice in choices]
        return {
            **self._stream.identity,
            "object": "chat.completion",
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": usage_json(usages),
            "timings": timings_json(usages),
        }

    def _choice(self, index: int, choice: Choice) -> Json:
        end = choice.deltas[-1]
        return {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": chat_logprobs(choice.deltas, self._pieces),
            "finish_reason": REASONS[end.finish_reason] if end.finish_reason is not None else None,
            "stop_reason": end.stop_reason,
        }

    def chunk(self, index: int, delta: TextDelta) -> bytes:
        """The role first, then text, then an empty delta with the reason."""
        events = []
        if index not in self._begun:
            self._begun.add(index)
            begin = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
            events.append(self._stream.event(begin % index))
        logprobs = chat_logprobs((delta,), self._pieces) if delta.logprobs else None
        if delta.text or logprobs:
            parts = (index, encode(delta.text), encode(logprobs))
            events.append(
                self._stream.event(b'{"index":%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":null}' % parts)
            )
        if delta.finish_reason is not None:
            end = b'{"index":%d,"delta":{},"logprobs":null,' % index + _ending(delta)
            events.append(self._stream.event(end, self._stream.timings(delta, 1)))
        return b"".join(events)

    def last(self) -> bytes:
        """The usage chunk."""
        return self._stream.usage_event()


class CompletionShape:
    """Answers of /v1/completions; `echoes` are the prompts' texts to put in front, each of its `n` choices."""

    def __init__(
        self, identity: Identity, pieces: Pieces, echoes: Sequence[str], n: int = 1, include_usage: bool = False
    ) -> None:
        self._pieces = pieces
        self._stream = _Stream("text_completion", identity, include_usage)
        self._num_prompts = len(echoes)
        self._echoes = [echo for echo in echoes for _ in range(n)]
        self._offsets = [len(echo) for echo in self._echoes]

    def whole(self, choices: Sequence[Choice]) -> Json:
        """A text_completion object."""
        usages = [last_usage(choice.deltas) for choice in choices]
        return {
            **self._stream.identity,
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": usage_json(usages),
            "timings": timings_json(usages),
        }

    def _choice(self, index: int, choice: Choice) -> Json:
        end = choice.deltas[-1]
        return {
            "index": index,
            "text": self._echoes[index] + choice.text,
            "logprobs": completion_logprobs(choice.deltas, self._pieces, self._offsets[index]),
            "finish_reason": REASONS[end.finish_reason] if end.finish_reason is not None else None,
            "stop_reason": end.stop_reason,
        }

    def chunk(self, index: int, delta: TextDelta) -> bytes:
        """Text, with the reason in the choice's last chunk."""
        echo, self._echoes[index] = self._echoes[index], ""
        logprobs = None
        if delta.logprobs:
            logprobs = completion_logprobs((delta,), self._pieces, self._offsets[index])
            self._offsets[index] += logprobs_length((delta,), self._pieces)
        text = echo + delta.text
        if not text and not logprobs and delta.finish_reason is None:
            return b""
        choice = b'{"index":%d,"text":%b,"logprobs":%b,' % (index, encode(text), encode(logprobs))
        if delta.finish_reason is None:
            return self._stream.event(choice + b'"finish_reason":null}')
        return self._stream.event(choice + _ending(delta), self._stream.timings(delta, self._num_prompts))

    def last(self) -> bytes:
        """The usage chunk."""
        return self._stream.usage_event()
