"""Answers of /v1/responses: the response object, its output items, and the events that stream them.

Owns: items and their ids, the order and the numbers of events. Does not: store answers.
Invariant: the events of an item add up to that item in the whole answer.
Formats: OpenAI's API reference, "Responses" and "Streaming events".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import Raw, convert
from msgspec.json import encode

from octavo.core.request import FinishReason
from octavo.server.api.completions.answers import timings_json
from octavo.server.encoding import (
    AnswerSpec,
    Choice,
    IdPieces,
    Json,
    Pieces,
    StreamFormat,
    chat_logprobs,
    encodes,
    sse_event,
)
from octavo.text.answer_format import AnswerFormat, CallArguments, CallBegin, Part, Reasoning, Text
from octavo.text.dialect import AnswerReader

if TYPE_CHECKING:
    from octavo.frontend.outputs import TextDelta, Usage
    from octavo.server.encoding import Json
    from octavo.server.http.errors import ApiError

Event = tuple[str, "Json"]  # (type, fields without type and sequence number)
_PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "mcp_list_tools": "mcpl_",
    "mcp_call": "mcp_",
    "mcp_approval_request": "mcpr_",
}
_CALLS = {  # the events of a call's arguments, by kind of item; those of a request for approval come in its own events
    "function_call": "response.function_call_arguments.",
    "mcp_call": "response.mcp_call_arguments.",
}


@dataclass(frozen=True, slots=True)
class ServerTool:
    """A tool that this server calls, on the MCP server `label`; with `needs_approval`, after the client approved."""

    label: str
    name: str
    needs_approval: bool


class ItemWriter:
    """Makes output items from parts. An item's id consists of its kind's prefix, `seed` and its index."""

    def __init__(self, seed: str) -> None:
        self.output: list[Json] = []
        self.server_tools: Mapping[str, ServerTool] = {}  # by the names that the model sees
        self._seed = seed
        self._num_before = 0  # items of earlier rounds
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
                tool = self.server_tools.get(part.name)
                if tool is None:
                    yield from self._open("function_call", call_id=part.call_id, name=part.name)
                else:
                    yield from self.open_call(tool)
            elif isinstance(part, CallArguments):
                self._logprobs.clear()
                yield from self.add_arguments(part.text)

    def finish(self, is_cut: bool) -> Iterator[Event]:
        """End a round, which is mostly the whole answer. A round without items gets an empty message."""
        if len(self.output) == self._num_before:
            yield from self._ensure("message")
        yield from self.close("incomplete" if is_cut else "completed")
        self._num_before = len(self.output)

    def open_call(self, tool: ServerTool, approval_id: str | None = None) -> Iterator[Event]:
        """Open the call of a tool of an MCP server, or the request to approve that call."""
        facts: Json = {"server_label": tool.label, "name": tool.name}
        if tool.needs_approval and approval_id is None:
            yield from self._open("mcp_approval_request", **facts)
            return
        yield from self._open("mcp_call", **facts, approval_request_id=approval_id, output=None, error=None)
        yield self._event("response.mcp_call.in_progress")

    def add_arguments(self, text: str) -> Iterator[Event]:
        """Add text to the arguments of the open call."""
        kind = self.output[-1]["type"]
        if kind in _CALLS:
            yield self._delta(f"{_CALLS[kind]}delta", text)
        else:
            self._texts.append(text)

    def end_call(self, item: Json, output: str | None, error: Json | None) -> Iterator[Event]:
        """End a call of a tool of an MCP server, with its result or an error."""
        end = "completed" if error is None else "failed"
        item |= {"status": end, "output": output, "error": error}
        index = self.output.index(item)
        yield f"response.mcp_call.{end}", {"item_id": item["id"], "output_index": index}
        yield "response.output_item.done", {"output_index": index, "item": item}

    def add_list(self, label: str, tools: list[Json], error: str | None) -> Iterator[Event]:
        """Add the list of an MCP server's tools, or the error for which there is none."""
        yield from self._open("mcp_list_tools", server_label=label, tools=[], error=None)
        self._is_open = False
        yield self._event("response.mcp_list_tools.in_progress")
        self.output[-1] |= {"tools": tools, "error": error}
        yield self._event(f"response.mcp_list_tools.{'completed' if error is None else 'failed'}")
        yield "response.output_item.done", {"output_index": len(self.output) - 1, "item": self.output[-1]}
        self._num_before = len(self.output)

    def close(self, status: str) -> Iterator[Event]:
        """End the open item, if there is one, with this status."""
        if not self._is_open:
            return
        self._is_open, self._place = False, b""
        item, text = self.output[-1], "".join(self._texts)
        if item["type"] == "mcp_approval_request":
            item["arguments"] = text
        elif item["type"] == "mcp_call":
            item["arguments"] = text
            yield self._event("response.mcp_call_arguments.done", arguments=text)
            if status == "completed":
                return  # end_call ends it
            item["status"] = status
        elif item["type"] == "function_call":
            item |= {"status": status, "arguments": text}
            yield self._event("response.function_call_arguments.done", arguments=text, name=item["name"])
        elif item["type"] == "reasoning":
            item["status"] = status
            yield self._event("response.reasoning_text.done", text=text, content_index=0)
            yield from self._close_part({"type": "reasoning_text", "text": text})
        else:
            item["status"] = status
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

    def _open(self, kind: str, **facts: object) -> Iterator[Event]:
        self._is_open, self._texts, self._message_logprobs = True, [], []
        item: Json = {"id": f"{_PREFIXES[kind]}{self._seed}{len(self.output):02x}", "type": kind, **facts}
        if kind not in ("mcp_list_tools", "mcp_approval_request"):
            item["status"] = "in_progress"
        if kind in ("function_call", "mcp_call", "mcp_approval_request"):
            item["arguments"] = ""
        elif kind != "mcp_list_tools":
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
        self._has_rounds = False
        self._usages: list[Usage] = []  # of the rounds that have ended
        self._num_reasoning = 0  # tokens

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

    # --- rounds: an answer with calls that this server makes has several

    @property
    def items(self) -> ItemWriter:
        """The items of all rounds."""
        return self._items

    @property
    def usages(self) -> Sequence[Usage]:
        """The usage of each round that has ended."""
        return self._usages

    def begin_round(self, answer_format: AnswerFormat | None) -> None:
        """Read the next deltas as a new round. The end of a round does not end the response; `end` does."""
        self._has_rounds = True
        self._reader = AnswerReader(answer_format, seed=f"{self.response_id}:{len(self._usages)}")

    def encode(self, events: Iterable[Event]) -> bytes:
        """Return the next events as bytes."""
        return self._bytes(events)

    def end(self, is_cut: bool) -> tuple[bytes, Json]:
        """End the response; return its last event and the response."""
        [(kind, facts)] = self._end(is_cut)
        return self._bytes([(kind, facts)]), facts["response"]

    def _read(self, delta: TextDelta) -> list[Part]:
        parts = self._reader.push(delta.text)
        return parts if delta.finish_reason is None else parts + self._reader.finish()

    def _events(self, delta: TextDelta, parts: Sequence[Part]) -> Iterable[Event]:
        yield from self._items.push(parts, self._logprobs(delta))
        if delta.finish_reason is not None:
            is_cut = delta.finish_reason is FinishReason.LENGTH
            yield from self._items.finish(is_cut)
            if delta.usage is not None:
                # Reasoning tokens are estimated from the reasoning's share of the text.
                share = self._reader.num_reasoning_characters / max(1, self._reader.num_characters)
                self._num_reasoning += round(share * delta.usage.completion_tokens)
                self._usages.append(delta.usage)
            if not self._has_rounds:
                yield from self._end(is_cut)

    def _end(self, is_cut: bool) -> Iterator[Event]:
        status = "incomplete" if is_cut else "completed"
        response = self._response(status, self._usages)
        if self.keep is not None:
            self.keep(response)
        yield f"response.{status}", {"response": response}

    def _logprobs(self, delta: TextDelta) -> list[Raw]:
        """Return each token's entry, encoded once because several events contain it."""
        found = chat_logprobs((delta,), self._pieces) if delta.logprobs else None
        return [Raw(encode(entry)) for entry in found["content"]] if found else []

    def _response(self, status: str, usages: Sequence[Usage] = (), error: Json | None = None) -> Json:
        is_cut = status == "incomplete"
        took_s = sum(usage.e2e_s for usage in usages)
        response: Json = {
            "id": self.response_id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._model,
            "output": self._items.output,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "completed_at": self._created + int(took_s) if usages and not is_cut else None,
            "usage": self._usage(usages) if usages else None,
            **self._echo,
        }
        if usages:
            response["timings"] = timings_json(usages)
        return response

    def _usage(self, usages: Sequence[Usage]) -> Json:
        """Return the token counts of all rounds."""
        num_input = sum(usage.prompt_tokens for usage in usages)
        num_output = sum(usage.completion_tokens for usage in usages)
        cached = sum(usage.cached_tokens for usage in usages)
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning},
            "total_tokens": num_input + num_output,
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
    return sse_event(kind, {"type": kind, "sequence_number": number, **facts})
