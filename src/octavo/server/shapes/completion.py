"""CompletionShape: answers of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.json import encode

from octavo.server.answer import (
    Json,
    Pieces,
    completion_logprobs,
    last_usage,
    logprobs_length,
    timings_json,
    usage_json,
)
from octavo.server.generation import REASONS, Choice
from octavo.server.shapes.chunks import ChunkStream, ending
from octavo.server.shapes.framing import OPENAI

if TYPE_CHECKING:
    from octavo.engine.deltas import TextDelta
    from octavo.server.shapes.shape import Identity


class CompletionShape:
    """Answers of /v1/completions; `echoes` are the prompts' texts to put in front, each of its `n` choices."""

    framing = OPENAI

    def __init__(
        self, identity: Identity, pieces: Pieces, echoes: Sequence[str], n: int = 1, include_usage: bool = False
    ) -> None:
        self._pieces = pieces
        self._stream = ChunkStream("text_completion", identity, include_usage)
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

    def first(self) -> bytes:
        """Nothing: each choice begins by itself."""
        return b""

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
        return self._stream.event(choice + ending(delta), self._stream.timings(delta, self._num_prompts))

    def last(self) -> bytes:
        """The usage chunk."""
        return self._stream.usage_event()
