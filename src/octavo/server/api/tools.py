"""The fields about tools: the functions, the choice among functions, and the calls in a conversation.

Owns: the types, names and bounds of these fields. Does not: show tools to a model or read the model's calls.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast, Field, WithJsonSchema

from octavo.server.api.fields import FUNCTION_NAME, Body, Refused, ignore, reject_unsupported, reject_unsupported_in
from octavo.server.api.structured_output import schema_text
from octavo.server.http.errors import bad_field

MAX_TOOLS = 128
MAX_CALLS = 128
MAX_TOOL_DESCRIPTION_CHARACTERS = 65_536  # descriptions of coding agents have up to about 16,384
MAX_CALL_ID_CHARACTERS = 256
NO_PARAMETERS = '{"type": "object", "properties": {}}'

IGNORED_IN_TOOLS = {"cache_control": "prefixes are found by their content"}
_REFUSED_CALL: Refused = {"custom": ()}
IGNORED_IN_CALLS = {"index": "calls are taken in their order"}
IGNORED_IN_CALLED = {"parsed_arguments": "the arguments' own text is taken"}

FunctionName = Annotated[str, Field(pattern=FUNCTION_NAME)]


def _parameters(value: object) -> object:
    if not isinstance(value, dict):
        raise ValueError("give a JSON schema, an object")
    return schema_text(value)


class FunctionDefinition(Body):
    """A function that the model may call."""

    name: FunctionName
    description: str = Field("", max_length=MAX_TOOL_DESCRIPTION_CHARACTERS)
    parameters: Annotated[str, BeforeValidator(_parameters), WithJsonSchema({"type": "object"})] = Field(
        NO_PARAMETERS, description="a JSON schema of the arguments; left out, there are none"
    )
    strict: bool = Field(
        False, description="forced calls always obey their schema; of calls that the model is free to make none need to"
    )


class Tool(Body):
    """One of `tools`."""

    type: Literal["function"]
    function: FunctionDefinition

    def shown(self) -> dict[str, Any]:
        """Return the tool in the form that chat templates expect."""
        definition = self.function
        function = {
            "name": definition.name,
            "description": definition.description,
            "parameters": json.loads(definition.parameters),
        }
        return {"type": "function", "function": function}

    @property
    def num_characters(self) -> int:
        """The number of characters in the name, description and parameters."""
        return len(self.function.name) + len(self.function.description) + len(self.function.parameters)


class FunctionCall(Body):
    """The function that was called, and the arguments of the call."""

    name: str = Field(min_length=1, max_length=128)
    arguments: str = Field("", description="a JSON object, as text")


class ToolCall(Body):
    """A call in an assistant's message."""

    id: str = Field(max_length=MAX_CALL_ID_CHARACTERS)
    type: Literal["function"] = "function"
    function: FunctionCall


class ToolChoice(Body):
    """`tool_choice` in one form: whether calls are made, and the names of the allowed functions (None: all)."""

    mode: Literal["none", "auto", "required", "named"]
    names: list[str] | None = None


class ReasoningOptions(Body):
    """`reasoning` as in the Responses API."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class ThinkingOptions(Body):
    """`thinking` as in DeepSeek's API."""

    type: Literal["enabled", "disabled"]


def _choice(value: object) -> object:
    """Return a client's tool_choice as the fields of a ToolChoice."""
    if value in ("none", "auto", "required"):
        return {"mode": value}
    try:
        match value:
            case {"type": "function", "function": {"name": str(name), **rest}, **others}:
                for unknown in (*(f"function.{key}" for key in rest), *others):
                    ignore(f"tool_choice.{unknown}")
                return {"mode": "named", "names": [name]}
            case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*tools]}}:
                return {"mode": mode, "names": [tool["function"]["name"] for tool in tools]}
    except (TypeError, KeyError):
        pass
    raise ValueError(
        'give "none", "auto", "required", {"type": "function", "function": {"name": ...}}, or {"type": "allowed_tools"'
        ', "allowed_tools": {"mode": "auto" or "required", "tools": [{"type": "function", "function": {"name": ...}}]}}'
    )


_CHOICE_SCHEMA = {"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]}


class ToolFields(Body):
    """The fields of a conversation about tools."""

    tools: Annotated[list[Tool], FailFast()] = Field([], max_length=MAX_TOOLS)
    tool_choice: Annotated[ToolChoice | None, BeforeValidator(_choice), WithJsonSchema(_CHOICE_SCHEMA)] = Field(
        None, description="auto by default; required and a named function are enforced"
    )
    parallel_tool_calls: bool | None = Field(
        None,
        description="whether an answer may hold several calls; left out, one whose calls are required holds one, since "
        "small models do not know when to stop",
    )

    @property
    def usable_tools(self) -> list[Tool]:
        """The tools that the model may call."""
        choice = self.tool_choice
        if choice is None or (choice.mode == "auto" and choice.names is None):
            return self.tools
        if choice.mode == "none":
            return []
        return [tool for tool in self.tools if choice.names is None or tool.function.name in choice.names]

    @property
    def forced(self) -> str | None:
        """Return "required" or "named" if a call must be made; else None."""
        choice = self.tool_choice
        return choice.mode if choice is not None and choice.mode in ("required", "named") else None


def read_tools(fields: dict[str, object]) -> dict[str, object]:
    """Return the fields with each tool's fields checked. Raises ApiError."""
    tools = fields.get("tools")
    if not isinstance(tools, list):
        return fields
    usable = drop_hosted_tools(tools, ("function",), fields.get("tool_choice"))
    return {**fields, "tools": [_read_tool(tool, f"tools[{i}].") for i, tool in usable]}


def drop_hosted_tools(tools: list[Any], usable: Sequence[str], choice: object) -> list[tuple[int, Any]]:
    """Return the usable tools with their indices, without hosted tools (all whose type is not in `usable`).

    Hosted tools are ignored and reported, unless `choice` requires a call. Raises ApiError if it does.
    """
    kept: list[tuple[int, Any]] = []
    for index, tool in enumerate(tools[: MAX_TOOLS + 1]):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(kind, str) or kind in usable:
            kept.append((index, tool))
        elif choice != "required":  # later checks refuse an object that names no function
            ignore(f"tools[{index}].type.{kind[:64]}", is_known=True)
        else:
            where = f"tools[{index}].type"
            message = f"{where} is {kind[:64]!r}; this server runs no tools itself: give tools of type {usable[0]!r}"
            raise bad_field(where, f"{message}, or tool_choice 'auto'", "unsupported_field")
    return kept


def _read_tool(tool: object, where: str) -> object:
    tool = reject_unsupported_in(tool, {}, Tool, where, IGNORED_IN_TOOLS)
    if isinstance(tool, dict) and "function" in tool:
        tool["function"] = reject_unsupported_in(
            tool["function"], {}, FunctionDefinition, f"{where}function.", IGNORED_IN_TOOLS
        )
    return tool


def read_tool_calls(calls: object, where: str) -> object:
    """Return the tool_calls of a message, with their fields checked. Raises ApiError."""
    if not isinstance(calls, list):
        return calls
    return [_read_call(call, f"{where}[{i}].") for i, call in enumerate(calls[: MAX_CALLS + 1])]


def _read_call(call: object, where: str) -> object:
    if not isinstance(call, dict):
        return call
    kept = reject_unsupported(call, _REFUSED_CALL, ToolCall, where, IGNORED_IN_CALLS)
    called = kept.get("function")
    if isinstance(called, dict):
        kept["function"] = reject_unsupported(called, {}, FunctionCall, f"{where}function.", IGNORED_IN_CALLED)
    return kept


def check_tools(body: ToolFields) -> None:
    """Check the fields about tools against each other. Raises ApiError."""
    names = [tool.function.name for tool in body.tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            where = f"tools[{index}].function.name"
            raise bad_field(where, f"{where} is {name!r}, the name of an earlier tool; give each its own")
    choice = body.tool_choice
    if choice is None:
        return
    if not names and choice.mode in ("required", "named"):
        raise bad_field("tool_choice", "tool_choice asks for a call, but there are no tools; give tools")
    for name in choice.names or ():
        if name not in names:
            known = ", ".join(names[:16]) or "none"
            raise bad_field("tool_choice", f"tool_choice names {name[:64]!r}; the tools are: {known}")
    if choice.names is not None and not choice.names:
        raise bad_field("tool_choice", "tool_choice allows no tools; name at least one, or give none")
