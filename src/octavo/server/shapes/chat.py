"""ChatShape: answers of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.json import encode

from octavo.server.answer import Json, Pieces, chat_logprobs, last_usage, timings_json, usage_json
from octavo.server.generation import REASONS, Choice
from octavo.server.shapes.chunks import ChunkStream, ending
from octavo.server.shapes.framing import OPENAI

if TYPE_CHECKING:
    from octavo.engine.deltas import TextDelta
    from octavo.server.shapes.shape import Identity


class ChatShape:
    """Answers of /v1/chat/completions."""

    framing = OPENAI

    def __init__(self, identity: Identity, pieces: Pieces, include_usage: bool = False) -> None:
        self._pieces = pieces
        self._stream = ChunkStream("chat.completion.chunk", identity, include_usage)
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

    def first(self) -> bytes:
        """Nothing: each choice begins by itself."""
        return b""

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
            end = b'{"index":%d,"delta":{},"logprobs":null,' % index + ending(delta)
            events.append(self._stream.event(end, self._stream.timings(delta, 1)))
        return b"".join(events)

    def last(self) -> bytes:
        """The usage chunk."""
        return self._stream.usage_event()
