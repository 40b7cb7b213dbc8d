"""Answers of /api/chat and /api/generate, as lines of JSON.

Owns: the lines, durations and finish reasons. Does not: separate thinking and calls from text (AnswerReader does).
Invariants: each delta makes at most one line. A call is sent when it is complete. Durations add up to the total.
The lines follow Ollama's public API description and the types of its Python package.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from octavo.server.encoding import (
    REASONS,
    AnswerSpec,
    Choice,
    Json,
    Pieces,
    StreamFormat,
    call_input,
    chat_logprobs,
    encodes,
    reader_of,
)
from octavo.server.http.errors import ollama_error
from octavo.text.answer_format import CallArguments, CallBegin, Part, Reasoning, Text

if TYPE_CHECKING:
    from octavo.frontend.outputs import TextDelta, Usage
    from octavo.server.http.errors import ApiError


def line(body: Json) -> bytes:
    """Return one line of a stream."""
    return msgspec.json.encode(body) + b"\n"


def _error(error: ApiError) -> bytes:
    return line(ollama_error(error, {}))


OLLAMA = StreamFormat("application/x-ndjson", b"", b"", _error, has_ids=False)


@encodes("ollama")
class OllamaEncoder:
    """The encoder of /api/chat and /api/generate. It uses the facts is_chat and format."""

    stream_format = OLLAMA
    head = b""

    def __init__(self, spec: AnswerSpec, pieces: Pieces) -> None:
        self._spec = spec
        self._pieces = pieces
        self._head = line_begin(spec.identity[2], spec.identity[1])
        self._reader = reader_of(spec)
        self._calls = Calls()
        self._end: TextDelta | None = None

    def whole(self, choices: Sequence[Choice]) -> Json:
        """Return the answer as one object."""
        reader, calls = reader_of(self._spec), Calls()
        deltas = choices[0].deltas
        parts = [*reader.push(choices[0].text), *reader.finish()]
        whole = [*calls.take(parts), *calls.finish()]
        body = {**self._head, **self._members(parts, whole), **ending(deltas[-1], choices[0].usage)}
        logprobs = chat_logprobs(deltas, self._pieces)
        return body if logprobs is None else {**body, "logprobs": logprobs["content"]}

    def chunk(self, index: int, delta: TextDelta) -> bytes:
        """Return a line with the delta's text and completed calls; b"" if it has neither."""
        parts = self._reader.push(delta.text)
        if delta.finish_reason is not None:
            self._end = delta
            parts = [*parts, *self._reader.finish()]
        whole = self._calls.take(parts)
        if delta.finish_reason is not None:
            whole += self._calls.finish()
        logprobs = chat_logprobs((delta,), self._pieces) if delta.logprobs else None
        if not whole and logprobs is None and not any(isinstance(part, Text | Reasoning) for part in parts):
            return b""
        body = {**self._head, **self._members(parts, whole), "done": False}
        return line(body if logprobs is None else {**body, "logprobs": logprobs["content"]})

    def last(self) -> bytes:
        """Return the line with the finish reason and the durations."""
        assert self._end is not None
        return line({**self._head, **self._members([], []), **ending(self._end, self._end.usage)})

    def _members(self, parts: Iterable[Part], calls: list[Json]) -> Json:
        text = "".join(part.text for part in parts if isinstance(part, Text))
        thinking = "".join(part.text for part in parts if isinstance(part, Reasoning))
        thought: Json = {"thinking": thinking} if thinking else {}
        if not self._spec.facts["is_chat"]:
            return {"response": text, **thought}
        return {
            "message": {"role": "assistant", "content": text, **thought, **({"tool_calls": calls} if calls else {})}
        }


class Calls:
    """The calls of an answer. It collects each call's arguments until the call is complete."""

    def __init__(self) -> None:
        self._open_call: CallBegin | None = None
        self._arguments: list[str] = []

    def take(self, parts: Iterable[Part]) -> list[Json]:
        """Add parts; return the calls that these parts complete."""
        done: list[Json] = []
        for part in parts:
            if isinstance(part, CallArguments):
                self._arguments.append(part.text)
                continue
            done += self.finish()
            if isinstance(part, CallBegin):
                self._open_call = part
        return done

    def finish(self) -> list[Json]:
        """Return the open call as a list; empty if there is none."""
        open_call, text = self._open_call, "".join(self._arguments)
        self._open_call, self._arguments = None, []
        if open_call is None:
            return []
        function = {"index": open_call.index, "name": open_call.name, "arguments": call_input(text)}
        return [{"id": open_call.call_id, "function": function}]


def line_begin(model: str, created: int) -> Json:
    """Return the fields that begin every line. `created` is in Unix seconds."""
    moment = datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")
    return {"model": model, "created_at": moment}


def ending(end: TextDelta, usage: Usage | None) -> Json:
    """Return the finish reason, the counts and the durations in nanoseconds. load_duration is the time in the queue."""
    assert end.finish_reason is not None
    over: Json = {"done": True, "done_reason": REASONS[end.finish_reason]}
    if usage is None:
        return over
    queued, first, total = (round(seconds * 1e9) for seconds in (usage.queue_s, usage.ttft_s, usage.e2e_s))
    first = min(max(first, queued), total) if usage.completion_tokens else total
    return {
        **over,
        "total_duration": total,
        "load_duration": queued,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": max(0, first - queued),
        "eval_count": usage.completion_tokens,
        "eval_duration": total - first,
    }
