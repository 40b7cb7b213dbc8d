"""ChatEncoder: answers of /v1/chat/completions.

Owns: messages and chunks, with calls and reasoning where there are some. Does not: tell them apart (AnswerReader does).
Invariant: beside a choice's beginning and end, a delta makes at most one event.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.json import encode

from octavo.core.request import FinishReason
from octavo.server.answer import Json, Pieces, chat_logprobs, last_usage, read_format, timings_json, usage_json
from octavo.server.generation import REASONS, Choice
from octavo.server.shapes.chunks import ChunkStream, ending
from octavo.server.shapes.framing import OPENAI
from octavo.text.answer_parts import CallArguments, CallBegin, Part, Reasoning, Text
from octavo.text.answer_reader import AnswerReader

if TYPE_CHECKING:
    from octavo.frontend.outputs import TextDelta
    from octavo.server.shapes.form import AnswerSpec

CALLED = "tool_calls"


class ChatEncoder:
    """Answers of /v1/chat/completions. Without a format all text is content."""

    framing = OPENAI

    def __init__(self, form: AnswerSpec, pieces: Pieces) -> None:
        self._pieces = pieces
        self._stream = ChunkStream("chat.completion.chunk", form.identity, form.include_usage, form.facts)
        self._format = read_format(form.facts)
        ids = form.facts.get("prompt_token_ids")
        self._prompt_member: Json = {} if ids is None else {"prompt_token_ids": ids[0]}
        self._num_characters = 0
        self._num_reasoning_characters = 0
        self._readers: dict[int, AnswerReader] = {}
        self._begun: set[int] = set()

    def whole(self, choices: Sequence[Choice]) -> Json:
        """A chat.completion object."""
        usages = [last_usage(choice.deltas) for choice in choices]
        return {
            **self._stream.identity,
            "object": "chat.completion",
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": usage_json(usages, self._reasoning_share()),
            "timings": timings_json(usages),
            **self._prompt_member,
        }

    def _note(self, text: str, parts: Sequence[Part]) -> None:
        self._num_characters += len(text)
        for part in parts:
            if isinstance(part, Reasoning):
                self._num_reasoning_characters += len(part.text)

    def _reasoning_share(self) -> float:
        return self._num_reasoning_characters / max(1, self._num_characters)

    def _choice(self, index: int, choice: Choice) -> Json:
        end = choice.deltas[-1]
        reader = self._reader(index)
        parts = [*reader.push(choice.text), *reader.finish()]
        self._note(choice.text, parts)
        ids = [token_id for delta in choice.deltas for token_id in delta.token_ids]
        return {
            "index": index,
            "message": {"role": "assistant", **_message(parts)},
            "logprobs": chat_logprobs(choice.deltas, self._pieces),
            "finish_reason": self._reason(reader, end.finish_reason) if end.finish_reason is not None else None,
            "stop_reason": end.stop_reason,
            **({"token_ids": ids} if self._prompt_member else {}),
        }

    def first(self) -> bytes:
        """Nothing: each choice begins by itself."""
        return b""

    def chunk(self, index: int, delta: TextDelta) -> bytes:
        """The role first, then text, reasoning and calls, then a delta with the reason and whatever was held back."""
        events = []
        if index not in self._begun:
            events.append(self._begin(index))
        self._stream.count(index, delta.token_ids)
        logprobs = chat_logprobs((delta,), self._pieces) if delta.logprobs else None
        fields = b'"content":%b' % encode(delta.text) if delta.text or logprobs else b""
        held = b""
        if self._format is not None:
            reader = self._reader(index)
            parts = reader.push(delta.text)
            rest = reader.finish() if delta.finish_reason is not None else []
            if parts or logprobs:
                parts, rest = parts + rest, []
            self._note(delta.text, [*parts, *rest])
            fields, held = _fields(parts), _fields(rest)
        if fields or logprobs:
            event = (index, fields, encode(logprobs), self._stream.ids(index))
            events.append(self._stream.event(b'{"index":%d,"delta":{%b},"logprobs":%b,"finish_reason":null%b}' % event))
        if delta.finish_reason is not None:
            reason = self._reason(self._reader(index), delta.finish_reason)
            end = b'{"index":%d,"delta":{%b},"logprobs":null,' % (index, held)
            end += ending(delta, reason, self._stream.ids(index))
            events.append(self._stream.event(end, self._stream.timings(delta, 1)))
        return b"".join(events)

    def _begin(self, index: int) -> bytes:
        """The first chunk of a choice, with its role; the answer's first has the prompt's ids, where they are given."""
        prompt = b"" if self._begun else encode(self._prompt_member)[1:-1]
        self._begun.add(index)
        self._stream.count(index, ())
        begin = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return self._stream.event(begin % index, b"," + prompt if prompt else b"")

    def last(self) -> bytes:
        """The usage chunk."""
        return self._stream.usage_event(self._reasoning_share()) if self._stream.include_usage else b""

    def _reader(self, index: int) -> AnswerReader:
        """The reader of a choice; ids of calls are made from the answer's id and the choice."""
        reader = self._readers.get(index)
        if reader is None:
            reader = self._readers[index] = AnswerReader(self._format, f"{self._stream.identity['id']}:{index}")
        return reader

    def _reason(self, reader: AnswerReader, reason: FinishReason) -> str:
        """OpenAI's word for the end: calls end an answer as such, unless the client named the function."""
        may_call = self._format is not None and self._format.calls is not None and self._format.forced != "named"
        if may_call and reason is FinishReason.STOP and reader.has_calls:
            return CALLED
        return REASONS[reason]


def _message(parts: Sequence[Part]) -> Json:
    """The members of a message beside its role."""
    text = "".join(part.text for part in parts if isinstance(part, Text))
    thought = "".join(part.text for part in parts if isinstance(part, Reasoning))
    calls = [{"id": call["id"], "type": call["type"], "function": call["function"]} for call in _calls(parts)]
    message: Json = {"content": text if text or not calls else None, "refusal": None}
    if thought:
        message |= {"reasoning": thought, "reasoning_content": thought}
    if calls:
        message["tool_calls"] = calls
    return message


def _calls(parts: Sequence[Part]) -> list[Json]:
    """What the parts say of calls, one object for each; one that began earlier has its arguments alone."""
    calls: dict[int, Json] = {}
    for part in parts:
        if isinstance(part, CallBegin):
            function = {"name": part.name, "arguments": ""}
            calls[part.index] = {"index": part.index, "id": part.call_id, "type": "function", "function": function}
        elif isinstance(part, CallArguments):
            call = calls.setdefault(part.index, {"index": part.index, "function": {"arguments": ""}})
            call["function"]["arguments"] += part.text
    return list(calls.values())


def _fields(parts: Sequence[Part]) -> bytes:
    """The members of a delta, without its braces."""
    if not parts:
        return b""
    delta: Json = {}
    has_calls = False
    for part in parts:
        if isinstance(part, Text):
            delta["content"] = delta.get("content", "") + part.text
        elif isinstance(part, Reasoning):
            thought = delta.get("reasoning", "") + part.text
            delta |= {"reasoning": thought, "reasoning_content": thought}
        else:
            has_calls = True
    if has_calls:
        delta["tool_calls"] = _calls(parts)
    return encode(delta)[1:-1]
