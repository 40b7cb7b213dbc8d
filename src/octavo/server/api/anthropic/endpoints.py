"""/v1/messages and /v1/messages/count_tokens: turns a body into a ChatBody, and its answer into messages and events.

Owns: the translation of messages, tools and tool choices; an answer's blocks, stop reason and usage; the routes.
Does not: check blocks, or separate thinking and calls from text (AnswerReader does).
Invariants: consecutive turns of one role become one message, as in Anthropic's API; many templates require this. Blocks
of an answer are numbered from 0 and never overlap; the events of a stream add up to the whole answer.
The events follow Anthropic's public description of streaming and the types of its Python package.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.core.request import FinishReason
from octavo.server.api.anthropic.bodies import (
    IGNORED_MESSAGES,
    REFUSED_MESSAGES,
    TEXTS,
    AnthropicToolChoice,
    Block,
    BlockText,
    CountBody,
    ImageBlock,
    MessagesBody,
    RedactedBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    read_blocks,
    read_count,
    read_messages,
    read_turn,
)
from octavo.server.api.completions.bodies import ChatBody, read_chat
from octavo.server.api.completions.requests import ChatRequest
from octavo.server.api.fields import field_notes
from octavo.server.api.sampling import MESSAGES_NAMES, ServedFields
from octavo.server.context import context_of
from octavo.server.encoding import (
    AnswerSpec,
    Choice,
    Json,
    Pieces,
    StreamFormat,
    call_input,
    encodes,
    reader_of,
    sse_event,
)
from octavo.server.http.auth import KEY
from octavo.server.http.body import json_response, read_json
from octavo.server.http.endpoints import Endpoint, queued
from octavo.server.http.errors import Spelling, anthropic_error, bad_field, renamed_fields
from octavo.server.reply import RETRY_NOTE, reply
from octavo.text.answer_format import CallArguments, CallBegin, Part, Reasoning, Text
from octavo.text.dialect import Dialect

if TYPE_CHECKING:
    from octavo.frontend.outputs import TextDelta, Usage

Message = dict[str, Any]
# A coding agent's first system block has this mark. The block differs with each request and is not meant for the model;
# a prompt that began with it would never be found in the prefix cache.
BILLING_MARK = "x-anthropic-billing-header:"
_SAME = ("max_tokens", *MESSAGES_NAMES, "seed", "stream", *ServedFields.model_fields)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
SPELLING: Spelling = (
    (r"\.function\.parameters", ".input_schema"),
    (r"\.function\.", "."),
    (r"^response_format\.json_schema", "output_config.format"),
    (r"^stop(?=\[|$)", "stop_sequences"),
)


def chat_of(body: MessagesBody, dialect: Dialect) -> ChatBody:
    """Return the same request as a ChatBody. Raises ApiError naming the field as Anthropic spells it.

    The effort is left out if the model's template has no variable for it.
    """
    messages = _system(body) + _conversation(body, dialect.takes_images)
    fields: dict[str, object] = {name: getattr(body, name) for name in _SAME}
    fields["messages"] = messages
    fields["stop"] = body.stop_sequences
    last = messages[-1]
    if last["role"] == "assistant" and not last.get("tool_calls"):
        fields["continue_final_message"] = True
    if body.tools:
        fields["tools"] = [_tool(tool.name, tool.description, tool.input_schema, tool.strict) for tool in body.tools]
    if body.tool_choice is not None:
        fields |= _tool_choice(body.tool_choice, bool(body.tools))
    if dialect.effort_variables:
        fields["reasoning_effort"] = _effort(body)
    if body.output_config is not None and body.output_config.format is not None:
        schema = {"name": "output", "schema": body.output_config.format.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    with renamed_fields(SPELLING):
        return read_chat(fields, dialect.takes_images)


def _system(body: MessagesBody) -> list[Message]:
    blocks = read_blocks(body.system or "", "system", ("text",))
    parts = [block.text for block in blocks if isinstance(block, BlockText) and not block.text.startswith(BILLING_MARK)]
    return [{"role": "system", "content": _parts(parts)}] if parts else []


def _conversation(body: MessagesBody, takes_images: bool) -> list[Message]:
    messages: list[Message] = []
    for index, value in enumerate(body.messages):
        where = f"messages[{index}]."
        role, blocks = read_turn(value, where, takes_images)
        made = _assistant(blocks) if role == "assistant" else _others(role, blocks, where, takes_images)
        for message in made:
            _append(messages, message)
    return messages


def _append(messages: list[Message], message: Message) -> None:
    """Add a message. Join it to the previous message if both have the same role and are not results of calls."""
    if not messages or messages[-1]["role"] != message["role"] or message["role"] == "tool":
        messages.append(message)
        return
    before = messages[-1]
    before["content"] = before["content"] + message["content"]
    if "tool_calls" in message:
        before["tool_calls"] = before.get("tool_calls", []) + message["tool_calls"]
    if "reasoning_content" in message:
        earlier = [before["reasoning_content"]] if "reasoning_content" in before else []
        before["reasoning_content"] = "\n".join([*earlier, message["reasoning_content"]])


def _assistant(blocks: list[Block]) -> list[Message]:
    """Return one message with all text, thinking and calls of a turn."""
    text = "".join(block.text for block in blocks if isinstance(block, BlockText))
    message: Message = {"role": "assistant", "content": _parts([text] if text else [])}
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock) and block.thinking]
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = [_call(call) for call in calls]
    return [message]


def _call(call: ToolUseBlock) -> Message:
    arguments = json.dumps(call.input, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _others(role: str, blocks: list[Block], where: str, takes_images: bool) -> list[Message]:
    """Return the messages of a user's or system turn. Each result of a call becomes its own message, in order."""
    made: list[Message] = []
    for index, block in enumerate(blocks):
        if isinstance(block, ToolResultBlock):
            made.append(_result(block, f"{where}content[{index}].content", takes_images))
        elif isinstance(block, BlockText | ImageBlock):
            parts = [_image(block)] if isinstance(block, ImageBlock) else _parts([block.text])
            if made and made[-1]["role"] == role:
                made[-1]["content"] += parts
            else:
                made.append({"role": role, "content": parts})
        else:
            assert not isinstance(block, ThinkingBlock | RedactedBlock | ToolUseBlock)
    return made or [{"role": role, "content": _parts([""])}]


def _result(block: ToolResultBlock, where: str, takes_images: bool) -> Message:
    """Return the message of a call's result, whose images follow its text."""
    allowed = (*TEXTS, "image") if takes_images else TEXTS
    found = read_blocks(block.content, where, allowed)
    text = "\n".join(each.text for each in found if isinstance(each, BlockText))
    text = f"Error: {text}" if block.is_error else text
    images = [_image(each) for each in found if isinstance(each, ImageBlock)]
    content = [*_parts([text] if text else []), *images] if images else text
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _image(block: ImageBlock) -> Message:
    return {"type": "image_url", "image_url": {"url": block.address}}


def _parts(found: list[str]) -> list[Message]:
    return [{"type": "text", "text": text} for text in found]


def _tool(name: str, description: str | None, schema: dict[str, object], strict: bool | None) -> Message:
    function: Message = {"name": name, "parameters": schema}
    if description is not None:
        function["description"] = description
    if strict is not None:
        function["strict"] = strict
    return {"type": "function", "function": function}


def _effort(body: MessagesBody) -> str | None:
    """Return the reasoning effort in OpenAI's words; None leaves the effort to the template."""
    if body.thinking is not None and body.thinking.type == "disabled":
        return "none"
    effort = None if body.output_config is None else body.output_config.effort
    if effort is None:
        return None if body.thinking is None else "medium"
    return "xhigh" if effort == "max" else effort


def _tool_choice(choice: AnthropicToolChoice, has_tools: bool) -> dict[str, object]:
    if choice.type == "tool":
        if choice.name is None:
            raise bad_field("tool_choice.name", "tool_choice.name is missing; name one of the tools", "missing_field")
        tool_choice: object = {"type": "function", "function": {"name": choice.name}}
    elif choice.name is not None:
        raise bad_field("tool_choice.name", f"tool_choice.name goes with type tool, not {choice.type}; leave it out")
    else:
        tool_choice = _CHOICES[choice.type]
    if not has_tools and choice.type in ("any", "tool"):
        raise bad_field("tool_choice", f"tool_choice is {choice.type}, and there are no tools; give some")
    parallel = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    return {"tool_choice": tool_choice, **parallel} if has_tools else {}


SIGNATURE = "unsigned"  # clients store it and send it back; this server does not check it


def event(kind: str, body: Json) -> bytes:
    """Return one event of a stream."""
    return sse_event(kind, {"type": kind, **body})


ANTHROPIC = StreamFormat(
    "text/event-stream", b"", event("ping", {}), lambda error: sse_event("error", anthropic_error(error, {}))
)


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


async def messages(request: Request) -> Response:
    """Answer a conversation."""
    context = context_of(request)
    body, chat = await read_json(
        request, context.limits, lambda fields: _read_bodies(fields, context.dialect_of(fields))
    )
    context = context.for_model(body.model)
    shows_thinking = body.thinking is None or body.thinking.display != "omitted"
    facts: dict[str, object] = {"max_tokens": body.max_tokens, "shows_thinking": shows_thinking}
    with renamed_fields(SPELLING):
        wanted = await ChatRequest.of(context, chat, "anthropic", "msg", facts=facts, can_continue=False)
        return await reply(request, wanted)


async def count_tokens(request: Request) -> Response:
    """Count the tokens of a conversation's prompt, including its tools."""
    context = context_of(request)
    chat = await read_json(
        request, context.limits, lambda fields: chat_of(read_count(fields), context.dialect_of(fields))
    )
    context = context.for_model(chat.model)
    with renamed_fields(SPELLING):
        count = len((await context.prompts.chat(chat)).ids)
    context.admission.charge(request.scope[KEY], count)
    return json_response({"input_tokens": count})


def _read_bodies(fields: dict[str, object], dialect: Dialect) -> tuple[MessagesBody, ChatBody]:
    body = read_messages(fields)
    return body, chat_of(body, dialect)


_NOTES = field_notes(REFUSED_MESSAGES, IGNORED_MESSAGES)
_ABOUT_COUNT = f"Count the tokens of a prompt in Anthropic's form.\n\n{_NOTES}"
ENDPOINTS = [
    queued("/v1/messages", messages, MessagesBody, "Answer a conversation in Anthropic's form.", RETRY_NOTE, _NOTES),
    Endpoint("POST", "/v1/messages/count_tokens", count_tokens, body=CountBody, description=_ABOUT_COUNT),
]
