"""From items to the messages of a chat, and from a Responses body to a ChatBody's fields.

Owns: which items make one message, and the two interfaces' different names for the same thing.
Does not: check items (bodies.response_items did) or messages (ChatBody does).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from octavo.server.bodies.response_items import Item
from octavo.server.bodies.responses import LOGPROBS, AllowedTools, FunctionTool, NamedTool, ResponsesBody
from octavo.server.bodies.sampling import SamplingBody
from octavo.server.faults import ApiError, bad_field
from octavo.server.spelling import Spelling

Message = dict[str, Any]
_SYSTEM = ("system", "developer")
_OWN = frozenset({"stream_options", "response_format"})  # of SamplingBody's fields, those that are translated
# What a ChatBody calls it -> what the client called it.
SPELLING: Spelling = (
    (r"^messages(?=[.\[]|$).*", "input"),
    (r"^max_completion_tokens$", "max_output_tokens"),
    (r"^response_format(\.json_schema)?(?=[.\[]|$)", "text.format"),
    (r"^reasoning_effort$", "reasoning.effort"),
    (r"^(tools\[\d+\])\.function", r"\1"),
)


def chat_fields(body: ResponsesBody, items: Sequence[Item]) -> dict[str, object]:
    """The fields of the ChatBody that asks for the same; `items` are all, those of earlier responses first."""
    given = body.model_dump(exclude_unset=True, by_alias=True, include=set(SamplingBody.model_fields) - _OWN)
    fields: dict[str, object] = {**given, "messages": chat_messages(body.instructions, items)}
    fields["max_completion_tokens"] = body.max_output_tokens
    if LOGPROBS in body.include or body.top_logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.text.format.type != "text":
        fields["response_format"] = _response_format(body)
    if body.reasoning.effort is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if body.chat_template_kwargs:
        fields["chat_template_kwargs"] = body.chat_template_kwargs
    tools, choice = _tools(body)
    if tools:
        fields |= {"tools": [_chat_tool(tool) for tool in tools], "tool_choice": choice}
        fields["parallel_tool_calls"] = body.parallel_tool_calls
    return fields


def chat_messages(instructions: str | None, items: Iterable[Item]) -> list[Message]:
    """Messages that show the items to a model, the instructions before all others.

    What an assistant gives in one turn (reasoning, a text, calls) is one message, and so are the instructions with the
    system messages right behind them: many templates show one system message only, and only at the beginning.
    """
    messages: list[Message] = [] if instructions is None else [{"role": "system", "content": instructions}]
    calls: set[str] = set()
    for item in items:
        kind = item["type"]
        if kind == "function_call" and item["status"] == "incomplete":
            continue  # cut before its arguments were whole: nobody could have answered it
        if kind == "function_call_output":
            if item["call_id"] not in calls:
                raise _no_call(item["call_id"])
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": _text(item["output"])})
        elif kind == "reasoning":
            message = _turn(messages, "content", "tool_calls", "reasoning_content")
            message["reasoning_content"] = _reasoning(item)
        elif kind == "function_call":
            calls.add(item["call_id"])
            _turn(messages).setdefault("tool_calls", []).append(_chat_call(item))
        elif item["role"] == "assistant":
            _turn(messages, "content", "tool_calls")["content"] = _text(item["content"])
        else:
            _add(messages, item["role"], _text(item["content"]))
    for message in messages:
        if message["role"] == "assistant" and "tool_calls" not in message:
            message.setdefault("content", "")
    return messages


def _no_call(call_id: str) -> ApiError:
    return bad_field("input", f"input has an output of call {call_id!r}, but no such call before it; give both")


def _turn(messages: list[Message], *filled: str) -> Message:
    """The assistant's message to add to: the last one, or a new one where that has one of these parts already."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(part in last for part in filled):
        messages.append({"role": "assistant"})
    return messages[-1]


def _add(messages: list[Message], role: str, text: str) -> None:
    if role in _SYSTEM and len(messages) == 1 and messages[0]["role"] in _SYSTEM:
        messages[0]["content"] += "\n\n" + text
    else:
        messages.append({"role": role, "content": text})


def _text(content: str | Sequence[Item]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in content)


def _reasoning(item: Item) -> str:
    return "\n".join(part["text"] for part in item["content"] or item["summary"])


def _chat_call(item: Item) -> Message:
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def _chat_tool(tool: FunctionTool) -> Message:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def _tools(body: ResponsesBody) -> tuple[Sequence[FunctionTool], object]:
    """The functions that may be called, and how the choice is put in a chat."""
    choice, tools = body.tool_choice, body.tools
    names = {tool.name for tool in tools}
    if isinstance(choice, NamedTool):
        _check_known(choice, names, "tool_choice.name")
        return tools, {"type": "function", "function": {"name": choice.name}}
    if isinstance(choice, AllowedTools):
        for index, tool in enumerate(choice.tools):
            _check_known(tool, names, f"tool_choice.tools[{index}].name")
        allowed = [{"type": "function", "function": {"name": tool.name}} for tool in choice.tools]
        return tools, {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": allowed}}
    if choice == "required" and not tools:
        raise bad_field("tool_choice", "tool_choice is 'required', but there are no tools; give tools")
    return tools, choice


def _check_known(tool: NamedTool, names: set[str], where: str) -> None:
    if tool.name not in names:
        raise bad_field(where, f"{where} is {tool.name[:64]!r}, which is none of the tools; give the name of one")


def _response_format(body: ResponsesBody) -> Message:
    asked = body.text.format
    if asked.type == "json_object":
        return {"type": "json_object"}
    if asked.schema_ is None:
        message = "text.format.schema is missing; a format of type json_schema needs one"
        raise bad_field("text.format.schema", message, "missing_field")
    named = asked.model_dump(exclude={"type"}, exclude_none=True, by_alias=True)
    return {"type": "json_schema", "json_schema": {"name": "answer", **named}}
