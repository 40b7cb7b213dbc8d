"""Answers of /v1/messages, whole and as events.

Owns: content blocks, stop reasons, usage. Does not: separate thinking and calls from text (AnswerReader does).
Invariants: blocks are numbered from 0 and never overlap; the events of a stream add up to the whole answer.
The events follow Anthropic's public description of streaming and the types of its Python package.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from octavo.core.request import FinishReason
from octavo.server.encoding import AnswerSpec, Choice, Json, Pieces, StreamFormat, call_input, encodes, reader_of
from octavo.server.http.errors import anthropic_error
from octavo.text.answer_format import CallArguments, CallBegin, Part, Reasoning, Text

if TYPE_CHECKING:
    from octavo.frontend.outputs import TextDelta, Usage
    from octavo.server.http.errors import ApiError

SIGNATURE = "unsigned"  # clients store it and send it back; this server does not check it


def event(kind: str, body: Json) -> bytes:
    """Return one event of a stream."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **body}))


def _error(error: ApiError) -> bytes:
    return b"event: error\ndata: %b\n\n" % msgspec.json.encode(anthropic_error(error, {}))


ANTHROPIC = StreamFormat("text/event-stream", b"", event("ping", {}), _error)


@encodes("anthropic")
class MessagesEncoder:
    """The encoder of /v1/messages. It uses the facts num_prompt_tokens, max_tokens, shows_thinking and format."""

    stream_format = ANTHROPIC

    def __init__(self, spec: AnswerSpec, pieces: Pieces) -> None:
        self._spec = spec
        self._reader = reader_of(spec)
        self._open: str | None = None  # the open block's kind
        self._num_blocks = 0
        self._end: TextDelta | None = None

    def whole(self, choices: Sequence[Choice]) -> Json:
        """Return a message object."""
        reader = reader_of(self._spec)
        deltas = choices[0].deltas
        blocks = self._blocks([*reader.push(choices[0].text), *reader.finish()])
        message = self._message(blocks, usage_json(choices[0].usage))
        return {**message, **self._stop(deltas[-1], reader.has_calls)}

    @property
    def head(self) -> bytes:
        """The event with the message before its content. Cached tokens are reported at the end."""
        usage = {**usage_json(None), "input_tokens": self._spec.facts["num_prompt_tokens"]}
        message = self._message([], usage)
        return event("message_start", {"message": {**message, "stop_reason": None, "stop_sequence": None}})

    def chunk(self, index: int, delta: TextDelta) -> bytes:
        """Return the events of a delta, which begin, continue and end blocks."""
        parts = self._reader.push(delta.text)
        if delta.finish_reason is not None:
            self._end = delta
            parts = [*parts, *self._reader.finish()]
        events = b"".join(map(self._part, parts))
        return events + self._stopped() if delta.finish_reason is not None else events

    def last(self) -> bytes:
        """Return the events with the stop reason, the usage, and the end of the message."""
        assert self._end is not None
        usage = usage_json(self._end.usage)
        del usage["service_tier"]
        delta = {"delta": self._stop(self._end, self._reader.has_calls), "usage": usage}
        return event("message_delta", delta) + event("message_stop", {})

    def _message(self, blocks: list[Json], usage: Json) -> Json:
        name, _, model = self._spec.identity
        message = {"id": name, "type": "message", "role": "assistant", "model": model}
        return {**message, "content": blocks, "usage": usage}

    def _stop(self, end: TextDelta, has_calls: bool) -> Json:
        word = end.stop_reason if isinstance(end.stop_reason, str) else None
        if end.finish_reason is FinishReason.LENGTH:
            used = end.usage.completion_tokens if end.usage is not None else 0
            is_full = 0 < used < self._spec.facts["max_tokens"]
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif has_calls:
            reason = "tool_use"
        else:
            reason = "end_turn" if word is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": word if reason == "stop_sequence" else None}

    def _blocks(self, parts: Sequence[Part]) -> list[Json]:
        blocks: list[Json] = []
        pieces: list[list[str]] = []
        for part in parts:
            kind = _KINDS[type(part)]
            if isinstance(part, CallBegin) or not blocks or blocks[-1]["type"] != kind:
                blocks.append(_empty(part))
                pieces.append([])
            pieces[-1].append(self._text(part))
        for block, texts in zip(blocks, pieces, strict=True):
            _fill(block, "".join(texts))
        return blocks

    def _part(self, part: Part) -> bytes:
        """Return the events of one part."""
        kind = _KINDS[type(part)]
        start = b""
        if isinstance(part, CallBegin) or self._open != kind:
            start = self._stopped()
            self._open = kind
            start += event("content_block_start", {"index": self._num_blocks, "content_block": _empty(part)})
        text = self._text(part)
        if not text:
            return start
        delta_kind, field = _DELTAS[kind]
        return start + self._delta({"type": delta_kind, field: text})

    def _text(self, part: Part) -> str:
        if isinstance(part, CallBegin) or (isinstance(part, Reasoning) and not self._spec.facts["shows_thinking"]):
            return ""
        return part.text

    def _stopped(self) -> bytes:
        """Return the events that end the open block; b"" without an open block."""
        if self._open is None:
            return b""
        signed = self._delta({"type": "signature_delta", "signature": SIGNATURE}) if self._open == "thinking" else b""
        end = event("content_block_stop", {"index": self._num_blocks})
        self._open = None
        self._num_blocks += 1
        return signed + end

    def _delta(self, delta: Json) -> bytes:
        return event("content_block_delta", {"index": self._num_blocks, "delta": delta})


_KINDS: dict[type[Part], str] = {Text: "text", Reasoning: "thinking", CallBegin: "tool_use", CallArguments: "tool_use"}
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


def usage_json(usage: Usage | None) -> Json:
    """Return the usage. As in Anthropic's API, input_tokens counts only tokens that were not in the cache."""
    prompt, cached, output = (0, 0, 0)
    if usage is not None:
        prompt, cached, output = usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
        "service_tier": "standard",
    }


def _empty(part: Part) -> Json:
    if isinstance(part, CallBegin):
        return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}}
    if isinstance(part, Reasoning):
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _fill(block: Json, text: str) -> None:
    if block["type"] == "tool_use":
        block["input"] = call_input(text)
    else:
        block[block["type"]] = text
    if block["type"] == "thinking":
        block["signature"] = SIGNATURE
