"""Answers of /v1/responses: the response object, its output items, and the events that stream them.

Owns: items and their ids, the order and the numbers of events. Does not: store answers.
Invariant: the events of an item add up to that item in the whole answer.
Formats: OpenAI's API reference, "Responses" and "Streaming events".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec import Raw, convert
from msgspec.json import encode

from octavo.core.request import FinishReason
from octavo.server.encoding import (
    AnswerSpec,
    Choice,
    IdPieces,
    Json,
    Pieces,
    StreamFormat,
    chat_logprobs,
    encodes,
    timings_json,
)
from octavo.text.answer_format import AnswerFormat, CallArguments, CallBegin, Part, Reasoning, Text
from octavo.text.answer_reader import AnswerReader

if TYPE_CHECKING:
    from octavo.frontend.outputs import TextDelta, Usage
    from octavo.server.encoding import Json
    from octavo.server.http.errors import ApiError

Event = tuple[str, "Json"]  # (type, fields without type and sequence number)
_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}


class ItemWriter:
    """Makes output items from parts. An item's id consists of its kind's prefix, `seed` and its index."""

    def __init__(self, seed: str) -> None:
        self.output: list[Json] = []
        self._seed = seed
        self._texts: list[str] = []  # of the open item
        self._is_open = False
        self._logprobs: list[Raw] = []  # of tokens whose text has not arrived
        self._message_logprobs: list[Raw] = []  # of the open message
        self._place = b""  # the fields that locate the open message's text in events, as JSON members

    def add_text(self, text: str) -> bytes:
        """Add text to the open message; return the JSON members that locate this text in its event.

        Return b"" and add nothing if no message is open or if log-probabilities wait to be sent.
        """
        if self._place and not self._logprobs:
            self._texts.append(text)
            return self._place
        return b""

    def push(self, parts: Sequence[Part], logprobs: Sequence[Raw]) -> Iterator[Event]:
        """Add the next parts, and yield their events. `logprobs` belong to the parts' tokens."""
        self._logprobs += logprobs
        for part in parts:
            if isinstance(part, Text):
                yield from self._ensure("message")
                yield self._text_delta(part.text)
            elif isinstance(part, Reasoning):
                yield from self._ensure("reasoning")
                self._logprobs.clear()
                yield self._delta("response.reasoning_text.delta", part.text, content_index=0)
            elif isinstance(part, CallBegin):
                yield from self.close("completed")
                yield from self._open("function_call", call_id=part.call_id, name=part.name)
            elif isinstance(part, CallArguments):
                self._logprobs.clear()
                yield self._delta("response.function_call_arguments.delta", part.text)

    def finish(self, is_cut: bool) -> Iterator[Event]:
        """End the answer. An answer without items gets an empty message."""
        if not self.output:
            yield from self._ensure("message")
        yield from self.close("incomplete" if is_cut else "completed")

    def close(self, status: str) -> Iterator[Event]:
        """End the open item, if there is one, with this status."""
        if not self._is_open:
            return
        self._is_open, self._place = False, b""
        item, text = self.output[-1], "".join(self._texts)
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            yield self._event("response.function_call_arguments.done", arguments=text, name=item["name"])
        elif item["type"] == "reasoning":
            yield self._event("response.reasoning_text.done", text=text, content_index=0)
            yield from self._close_part({"type": "reasoning_text", "text": text})
        else:
            if self._logprobs:
                yield self._text_delta("")
            yield self._event("response.output_text.done", text=text, logprobs=self._message_logprobs, content_index=0)
            part = {"type": "output_text", "text": text, "annotations": [], "logprobs": self._message_logprobs}
            yield from self._close_part(part)
        yield "response.output_item.done", {"output_index": len(self.output) - 1, "item": item}

    def _close_part(self, part: Json) -> Iterator[Event]:
        self.output[-1]["content"] = [part]
        yield self._event("response.content_part.done", part=part, content_index=0)

    def _ensure(self, kind: str) -> Iterator[Event]:
        """Open an item of this kind, unless one is already open."""
        if self._is_open and self.output[-1]["type"] == kind:
            return
        yield from self.close("completed")
        yield from self._open(kind)

    def _open(self, kind: str, **facts: str) -> Iterator[Event]:
        self._is_open, self._texts, self._message_logprobs = True, [], []
        item: Json = {"id": f"{_PREFIXES[kind]}{self._seed}{len(self.output):02x}", "type": kind, **facts}
        item["status"] = "in_progress"
        if kind == "function_call":
            item["arguments"] = ""
        else:
            item |= {"summary": [], "content": []} if kind == "reasoning" else {"role": "assistant", "content": []}
        self.output.append(item)
        yield "response.output_item.added", {"output_index": len(self.output) - 1, "item": dict(item)}
        if kind == "reasoning":
            yield self._event("response.content_part.added", part={"type": "reasoning_text", "text": ""},
                              content_index=0)  # fmt: skip
        elif kind == "message":
            self._place = encode(self._event("", content_index=0)[1])[1:-1]
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield self._event("response.content_part.added", part=part, content_index=0)

    def _text_delta(self, text: str) -> Event:
        logprobs, self._logprobs = self._logprobs, []
        self._message_logprobs += logprobs
        return self._delta("response.output_text.delta", text, content_index=0, logprobs=logprobs)

    def _delta(self, kind: str, text: str, **facts: object) -> Event:
        self._texts.append(text)
        return self._event(kind, delta=text, **facts)

    def _event(self, kind: str, **facts: object) -> Event:
        """Return an event of the last item."""
        return kind, {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1, **facts}


ID_PREFIX = "resp_"
_TEXT_EVENT = (
    b"event: response.output_text.delta\n"
    b'data: {"type":"response.output_text.delta","sequence_number":%d,%b,"delta":%b,"logprobs":[]}\n\n'
)


@encodes("response")
class ResponseEncoder:
    """The encoder of /v1/responses. It calls `keep` with the whole answer before it returns the last event.

    Events up to number `behind` are left out, since the reader already has them.
    """

    def __init__(self, spec: AnswerSpec, pieces: Pieces) -> None:
        facts = spec.facts
        self.stream_format = StreamFormat(
            "text/event-stream", b"", b": keep-alive\n\n", self._failure, has_ids=False, by_token=True
        )
        self.keep: Callable[[Json], None] | None = None
        self.behind = -1
        self.response_id: str = facts["id"]
        self._created = spec.identity[1]
        self._model = spec.identity[2]
        self._echo = {name: Raw(text.encode()) for name, text in facts["echo"].items()}
        self._pieces: Pieces = IdPieces() if facts.get("shows_ids") else pieces
        self._reader = AnswerReader(convert(facts.get("format"), AnswerFormat | None), seed=f"{self.response_id}:0")
        self._items = ItemWriter(self.response_id.removeprefix(ID_PREFIX))
        self._number = 1  # of the last event; `head` has events 0 and 1

    def whole(self, choices: Sequence[Choice]) -> Json:
        """Return a response object."""
        response: Json = {}
        for delta in choices[0].deltas:
            for _, facts in self._events(delta, self._read(delta)):
                response = facts.get("response", response)
        return response

    @property
    def head(self) -> bytes:
        """The events "created" and "in progress", with the response without output."""
        events = enumerate(("response.created", "response.in_progress"))
        return b"".join(
            _event(kind, number, response=self.in_progress()) for number, kind in events if number > self.behind
        )

    def in_progress(self) -> Json:
        """Return the response without any output."""
        return self._response("in_progress")

    def ended(self, error: ApiError, status: str = "failed") -> Json:
        """Return the response as an error ended it, with its output so far."""
        code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(error.status, "server_error")
        return self._response(status, error={"code": code, "message": error.message})

    def chunk(self, index: int, delta: TextDelta) -> bytes:
        """Return the events of a delta. The last delta's events include the response's last event."""
        parts = self._read(delta)
        if len(parts) == 1 and isinstance(parts[0], Text) and delta.finish_reason is None and not delta.logprobs:
            place = self._items.add_text(parts[0].text)
            if place:  # only more text, by far the most frequent case
                self._number += 1
                event = _TEXT_EVENT % (self._number, place, encode(parts[0].text))
                return event if self._number > self.behind else b""
        return self._bytes(self._events(delta, parts))

    def last(self) -> bytes:
        """Return nothing: the last delta's events include the response's last event."""
        return b""

    def _read(self, delta: TextDelta) -> list[Part]:
        parts = self._reader.push(delta.text)
        return parts if delta.finish_reason is None else parts + self._reader.finish()

    def _events(self, delta: TextDelta, parts: Sequence[Part]) -> Iterable[Event]:
        yield from self._items.push(parts, self._logprobs(delta))
        if delta.finish_reason is not None:
            is_cut = delta.finish_reason is FinishReason.LENGTH
            yield from self._items.finish(is_cut)
            status = "incomplete" if is_cut else "completed"
            response = self._response(status, delta.usage)
            if self.keep is not None:
                self.keep(response)
            yield f"response.{status}", {"response": response}

    def _logprobs(self, delta: TextDelta) -> list[Raw]:
        """Return each token's entry, encoded once because several events contain it."""
        found = chat_logprobs((delta,), self._pieces) if delta.logprobs else None
        return [Raw(encode(entry)) for entry in found["content"]] if found else []

    def _response(self, status: str, usage: Usage | None = None, error: Json | None = None) -> Json:
        is_cut = status == "incomplete"
        response: Json = {
            "id": self.response_id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._model,
            "output": self._items.output,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "completed_at": self._created + int(usage.e2e_s) if usage is not None and not is_cut else None,
            "usage": self._usage(usage) if usage is not None else None,
            **self._echo,
        }
        if usage is not None:
            response["timings"] = timings_json((usage,))
        return response

    def _usage(self, usage: Usage) -> Json:
        """Return the token counts. Reasoning tokens are estimated from the reasoning's share of the text."""
        share = self._reader.num_reasoning_characters / max(1, self._reader.num_characters)
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": round(share * usage.completion_tokens)},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _failure(self, error: ApiError) -> bytes:
        """Return the events for an error in mid-stream: the open item's end, the error, and the response's end."""
        open_items = self._bytes(self._items.close("incomplete"))
        failure = {"code": error.code, "message": error.message, "param": error.param}
        return open_items + self._bytes((("error", failure), ("response.failed", {"response": self.ended(error)})))

    def _bytes(self, events: Iterable[Event]) -> bytes:
        return b"".join(map(self._numbered, events))

    def _numbered(self, event: Event) -> bytes:
        kind, facts = event
        self._number += 1
        return _event(kind, self._number, **facts) if self._number > self.behind else b""


def _event(kind: str, number: int, **facts: object) -> bytes:
    data = {"type": kind, "sequence_number": number, **facts}
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode(data))
