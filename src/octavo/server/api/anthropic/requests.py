"""/v1/messages and /v1/messages/count_tokens: turns a body into a ChatBody; declares the routes.

Owns: the translation of messages, tools and tool choices to a ChatBody. Does not: check blocks or encode answers.
Invariant: consecutive turns of one role become one message, as in Anthropic's API; many templates require this.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

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
from octavo.server.http.auth import KEY
from octavo.server.http.body import json_response, read_json
from octavo.server.http.endpoints import Endpoint, Limit
from octavo.server.http.errors import Spelling, bad_field, renamed_fields
from octavo.server.http.middleware import REQUEST_ID
from octavo.server.reply import RETRY_NOTE, reply
from octavo.text.dialect import Dialect

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
        response = await reply(request, wanted)
    response.headers["request-id"] = request.scope[REQUEST_ID]  # Anthropic's clients read this header
    return response


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
ENDPOINTS = [
    Endpoint(
        "POST",
        "/v1/messages",
        messages,
        limit=Limit.QUEUE,
        body=MessagesBody,
        description=f"Answer a conversation in Anthropic's form.\n\n{RETRY_NOTE}\n\n{_NOTES}",
    ),
    Endpoint(
        "POST",
        "/v1/messages/count_tokens",
        count_tokens,
        body=CountBody,
        description=f"Count the tokens of a prompt in Anthropic's form.\n\n{_NOTES}",
    ),
]
