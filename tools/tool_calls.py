"""Count the valid forced tool calls: each tool named, or the tool chosen by the model, at several temperatures.

python -m tools.tool_calls http://127.0.0.1:8000 asks a running server, two requests at once; the last line is one JSON
object. Calls that were cut off by max_tokens are counted apart.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema

TEMPERATURES = (0.0, 0.7, 1.0)
MAX_TOKENS = 256
QUESTIONS = (
    "What is the weather in Oslo?",
    "What is 3 plus 4?",
    "Write to Ann that I am late",
    "A table for two tomorrow at eight",
    "What time is it?",
    "Tell me a joke",
)


def _tool(name: str, description: str, required: list[str], **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_TEXT = {"type": "string"}
_NUMBER = {"type": "number"}
TOOLS = (
    _tool("get_weather", "The weather of a city", ["city"], city=_TEXT, unit={"enum": ["celsius", "fahrenheit"]}),
    _tool("add", "Add two numbers", ["a", "b"], a=_NUMBER, b=_NUMBER),
    _tool(
        "send_mail",
        "Send a mail",
        ["to", "subject"],
        to={"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 1, "maxItems": 3},
        subject={"type": "string", "maxLength": 60},
        urgent={"type": "boolean"},
    ),
    _tool(
        "book",
        "Book a table",
        ["when", "people"],
        when={"type": "string", "format": "date-time"},
        people={"type": "integer", "minimum": 1, "maximum": 12},
    ),
    _tool("now", "The time", []),
)
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


def ask(url: str, question: str, choice: object, temperature: float) -> str:
    """Request one forced call; return "valid", "cut", or the fault."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "tools": TOOLS,
        "tool_choice": choice,
        "temperature": temperature,
        "seed": 1,
        "max_tokens": MAX_TOKENS,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        answer = json.load(response)["choices"][0]
    if answer["finish_reason"] == "length":
        return "cut"
    calls = answer["message"].get("tool_calls") or []
    if len(calls) != 1 or answer["message"]["content"] is not None:
        return f"{len(calls)} calls beside {answer['message']['content']!r}"
    function = calls[0]["function"]
    try:
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        jsonschema.validate(json.loads(function["arguments"]), SCHEMAS[function["name"]], format_checker=checker)
    except (ValueError, KeyError, jsonschema.ValidationError) as error:
        return f"{function['name']}({function['arguments']}): {str(error).splitlines()[0]}"
    return "valid"


def main(url: str) -> int:
    """Request every call; return 1 if a complete call is not valid."""
    choices: list[object] = ["required", *({"type": "function", "function": {"name": name}} for name in SCHEMAS)]
    asked = [(question, choice, t) for question in QUESTIONS for choice in choices for t in TEMPERATURES]
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(lambda each: ask(url, *each), asked))
    wrong = [outcome for outcome in outcomes if outcome not in ("valid", "cut")]
    for outcome in wrong:
        print(outcome)
    print(json.dumps({"calls": len(outcomes), "valid": outcomes.count("valid"), "cut": outcomes.count("cut")}))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1].rstrip("/") if len(sys.argv) > 1 else "http://127.0.0.1:8000"))
