"""Chat messages in the form that templates expect.

Owns: flattening text parts, parsing tool arguments, and cutting a prompt inside its last message.
Does not: render.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.errors import InvalidRequestError

_CONTINUE_MARK = "\ue000octavo-continues-here\ue001"  # private-use characters: in no message
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # templates read the first two


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return copies with string content and parsed tool arguments. Raises InvalidRequestError.

    Text parts are joined by line ends; a missing content becomes empty.
    """
    if not isinstance(messages, Sequence) or not messages:
        raise InvalidRequestError("messages must be a list of at least one message", "messages")
    return list(map(_plain_message, messages, range(len(messages))))


def _plain_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"message {index} must be an object with a role", f"messages.{index}")
    plain = dict(message)
    content = message.get("content")
    plain["content"] = content if isinstance(content, str) else _plain_content(content, index)
    for name in _REASONING_FIELDS:
        reasoning = message.get(name)
        if reasoning is not None:
            plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
            break
    calls = message.get("tool_calls") or []
    if not isinstance(calls, Sequence):
        raise InvalidRequestError(f"the tool_calls of message {index} must be a list", f"messages.{index}.tool_calls")
    if calls:
        plain["tool_calls"] = [_plain_tool_call(call, index) for call in calls]
    return plain


def _plain_content(content: object, index: int) -> str:
    if content is None:
        return ""
    param = f"messages.{index}.content"
    if not isinstance(content, Sequence):
        raise InvalidRequestError(f"the content of message {index} must be a string or a list of parts", param)
    texts: list[str] = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str) or (isinstance(part, Mapping) and part.get("type", "text") != "text"):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise InvalidRequestError(f"message {index} has a part of type {kind!r}; this model takes text only", param)
        texts.append(text)
    return "\n".join(texts)


def _plain_tool_call(call: object, index: int) -> object:
    """Templates write arguments as JSON themselves, so those that came as a string are parsed."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise InvalidRequestError(f"message {index} has a tool call without a function", f"messages.{index}.tool_calls")
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError) as error:
            reason = f"the tool arguments of message {index} are not JSON ({error})"
            raise InvalidRequestError(reason, f"messages.{index}.tool_calls") from None
    return {**call, "function": function}


def mark_continuation(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mark the end of the last message, where the model is to go on."""
    last = messages[-1]
    if last["role"] != "assistant":
        raise InvalidRequestError("continue_final_message needs a last message of the assistant", "messages")
    return [*messages[:-1], {**last, "content": last["content"] + _CONTINUE_MARK + " "}]


def cut_at_continuation(prompt: str) -> str:
    """Cut a rendered prompt at the mark. Raises InvalidRequestError when the template dropped it."""
    head, mark, tail = prompt.rpartition(_CONTINUE_MARK)
    if not mark:
        raise InvalidRequestError(
            "the chat template does not show the last message, so it cannot be continued", "messages"
        )
    return head if tail.startswith(" ") else head.rstrip()  # a template that trims has cut the message's own end too
