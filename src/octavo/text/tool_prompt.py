"""Write tools and calls into the messages of a model whose chat template does not support them.

Owns: the section that describes the tools; calls and results as plain messages; call ids as Mistral's templates require
them. Calls have the form that Hermes and Qwen use. Does not: render.
Invariant: no message with the role tool remains; consecutive results are one message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

NO_SYSTEM = "System role not supported"  # in templates of Gemma and others that refuse a system message
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_INTRODUCTION = """\
You can call functions. These are the functions, one JSON object a line:
<tools>
{tools}
</tools>
To call a function, answer with its name and arguments as a JSON object between tags, and with nothing else:
<tool_call>
{{"name": "the function's name", "arguments": {{"argument": "value"}}}}
</tool_call>
The result comes between <tool_response> tags. Call a function only if it helps; otherwise just answer."""
_RESULT = "<tool_response>\n{}\n</tool_response>"
_AFTER_RESULTS = "\nNow answer my question in plain words."  # without this the smallest models repeat the result


def with_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, takes_system: bool = True
) -> list[dict[str, Any]]:
    """Describe the tools in the system message, and write calls and results as text. `messages` are plain messages.

    If the template takes no system message, the description is put into the user's first message.
    """
    shown: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != "tool":
            shown.append(_with_calls(message))
        elif shown and "results" in shown[-1]:
            shown[-1]["results"].append(message["content"])
        else:
            shown.append({"role": "user", "results": [message["content"]]})
    for message in shown:
        if "results" in message:
            message["content"] = "\n".join(map(_RESULT.format, message.pop("results"))) + _AFTER_RESULTS
    if tools:
        section = _INTRODUCTION.format(tools="\n".join(map(_line, tools)))
        if shown[0]["role"] == "system" or (not takes_system and shown[0]["role"] == "user"):
            shown[0]["content"] = "\n\n".join(filter(None, _ordered(shown[0], section)))
        else:
            shown.insert(0, {"role": "system", "content": section})
    return shown


def _ordered(message: Mapping[str, Any], section: str) -> tuple[str, str]:
    """Return text and description in order: a system message begins with its text, a user's message ends with it.
    (A description after the user's question would be read as the question.)
    """
    return (message["content"], section) if message["role"] == "system" else (section, message["content"])


def _with_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    plain = dict(message)
    calls = plain.pop("tool_calls", None) or ()
    texts = [plain["content"], *(_call(call["function"]) for call in calls)]
    plain["content"] = "\n".join(filter(None, texts))
    return plain


def _call(function: Mapping[str, Any]) -> str:
    called = {"name": function.get("name"), "arguments": function.get("arguments")}
    return f"<tool_call>\n{json.dumps(called, ensure_ascii=False)}\n</tool_call>"


def _line(tool: Mapping[str, Any]) -> str:
    return json.dumps(tool.get("function", tool), ensure_ascii=False)


def with_short_ids(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Replace call ids that are not nine letters and digits, because Mistral's templates refuse other ids."""
    shown = [dict(message) for message in messages]
    for message in shown:
        if message.get("tool_calls"):
            message["tool_calls"] = [{**call, "id": _short(call.get("id"))} for call in message["tool_calls"]]
        if message.get("tool_call_id"):
            message["tool_call_id"] = _short(message["tool_call_id"])
    return shown


def _short(call_id: object) -> str:
    if isinstance(call_id, str) and _SHORT_ID.fullmatch(call_id):
        return call_id
    return blake2b(str(call_id).encode(), digest_size=5).hexdigest()[:9]
