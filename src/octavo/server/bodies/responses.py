"""ResponsesBody: what POST /v1/responses takes.

Owns: its fields, what of them is refused or ignored. Does not: check what a conversation shares with chat completions
(ChatBody does, once the body is translated to one).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from octavo.server.bodies.checks import Body, Refused, ignore, sift, sift_if_object, validate
from octavo.server.bodies.response_items import Item, checked, read_items
from octavo.server.bodies.sampling import SamplingBody, check_stream_options
from octavo.server.bodies.tools import IGNORED_IN_TOOLS, MAX_TOOLS, without_hosted
from octavo.server.faults import bad_field

MAX_METADATA = 16
MAX_METADATA_KEY_CHARACTERS = 64
MAX_METADATA_CHARACTERS = 512
MAX_LABEL_CHARACTERS = 512

REFUSED_RESPONSES: Refused = {
    "prompt": (),
    "background_options": ({"completion_window": "soonest"},),
    "access_programs": (),
}
# Fields of the other bodies that have no place here.
NOT_HERE: Refused = {
    "max_tokens": (),
    "n": (1,),
    "use_beam_search": (False,),
    "length_penalty": (),
    "early_stopping": (),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
}
IGNORED_RESPONSES: Mapping[str, str] = {
    "prompt_cache_retention": "the prefix cache evicts by use",
    "max_tool_calls": "counts calls of built-in tools, of which there are none",
}
_REFUSED_REASONING: Refused = {"context": ("auto",), "mode": ("standard",)}
_REFUSED_TOOL: Refused = {
    "async": (False,),
    "defer_loading": (False,),
    "allowed_callers": (["direct"],),
    "output_schema": (),
}
LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (LOGPROBS, "reasoning.encrypted_content")  # the second asks for nothing: reasoning is given as text

Label = Annotated[str, Field(max_length=MAX_LABEL_CHARACTERS)]
Metadata = dict[
    Annotated[str, Field(max_length=MAX_METADATA_KEY_CHARACTERS)],
    Annotated[str, Field(max_length=MAX_METADATA_CHARACTERS)],
]
_INPUT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "object"}, "description": "messages, function calls and their outputs"},
    ]
}
Items = Annotated[list[Any], WithJsonSchema(_INPUT_SCHEMA)]  # read_items has looked at them


class Format(Body):
    """What the text must be. A json_schema has its name and schema beside its type."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, object] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(Body):
    """How the text of the answer is made."""

    format: Format = Format()


class ReasoningConfig(Body):
    """How much the model reasons. `summary` and `generate_summary` do nothing: the reasoning itself is given."""

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class FunctionTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class NamedTool(Body):
    """One function, by its name."""

    type: Literal["function"]
    name: str


class AllowedTools(Body):
    """Some of the functions."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=MAX_TOOLS)


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


class ResponsesBody(SamplingBody):
    """POST /v1/responses. A sampling field left out takes the model's own default."""

    input: Items
    instructions: str | None = None
    previous_response_id: str | None = Field(None, max_length=128)
    store: bool = True
    background: bool = Field(False, description="whether it runs on without this connection; it must be stored")
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[str] = Field([], max_length=16)
    tools: list[FunctionTool] = Field([], max_length=MAX_TOOLS)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool | None = None
    text: TextConfig = TextConfig()
    reasoning: ReasoningConfig = ReasoningConfig()
    truncation: Literal["auto", "disabled"] = Field(
        "disabled", description="auto leaves out the oldest turns of what would not fit"
    )
    metadata: Metadata = Field({}, max_length=MAX_METADATA)
    user: Label | None = Field(None, description="given back; nothing here depends on it")
    safety_identifier: Label | None = Field(None, description="given back; no such checks are made here")
    prompt_cache_key: Label | None = Field(None, description="given back; prefixes are found by their content")
    chat_template_kwargs: dict[str, object] = Field({})

    @property
    def items(self) -> list[Item]:
        """The input in full form."""
        return self.input


def read_responses(fields: dict[str, object]) -> ResponsesBody:
    """Check a Responses body. Raises ApiError naming the field."""
    here = {name: value for name, value in fields.items() if name not in NOT_HERE and name != "stream_options"}
    sift({name: fields[name] for name in NOT_HERE if name in fields}, NOT_HERE, Body)
    options = fields.get("stream_options")
    if options is not None:
        if not isinstance(options, dict):
            raise bad_field("stream_options", f"stream_options is a {type(options).__name__}; give an object")
        check_stream_options(fields)
        sift(options, {}, Body, "stream_options.")
    if here.pop("return_token_ids", None):
        ignore("return_token_ids", is_known=True)
    here = sift(here, REFUSED_RESPONSES, ResponsesBody, ignored=IGNORED_RESPONSES)
    if "input" in here:
        here["input"] = read_items(here["input"])
    _sift_parts(here)
    body = validate(ResponsesBody, here)
    for index, name in enumerate(body.include):
        if name not in _INCLUDED:
            message = f"include[{index}] is {name[:64]!r}; this server can include {', '.join(_INCLUDED)}"
            raise bad_field(f"include[{index}]", message, "unsupported_field")
    return body


def _sift_parts(fields: dict[str, object]) -> None:
    """Look at the fields of parts, so that what is not supported is refused by its name."""
    text = fields.get("text")
    if isinstance(text, dict):
        text = sift(text, {}, TextConfig, "text.")
        asked = text.get("format")
        if isinstance(asked, dict):
            text["format"] = _format(asked)
        fields["text"] = text
    reasoning = fields.get("reasoning")
    if isinstance(reasoning, dict):
        fields["reasoning"] = sift(reasoning, _REFUSED_REASONING, ReasoningConfig, "reasoning.")
    tools = fields.get("tools")
    if isinstance(tools, list):
        usable = without_hosted(tools, "function", fields.get("tool_choice"))
        fields["tools"] = [_tool(tool, f"tools[{index}].") for index, tool in usable]
    if "tool_choice" in fields:
        fields["tool_choice"] = _choice(fields["tool_choice"])


def _format(value: dict[str, object]) -> dict[str, object]:
    schema = {name: part for name, part in value.items() if name == "schema" and part is not None}
    others = {name: part for name, part in value.items() if name != "schema"}
    return {**sift(others, {}, Format, "text.format."), **schema}


def _choice(value: object) -> object:
    """Check tool_choice. Raises ApiError."""
    words = ("none", "auto", "required")
    if isinstance(value, str) and value in words:
        return value
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(value, dict) and kind == "function":
        return checked(NamedTool, value, {}, "tool_choice")
    if isinstance(value, dict) and kind == "allowed_tools":
        return checked(AllowedTools, value, {}, "tool_choice")
    shown = f"of type {str(kind)[:64]!r}" if isinstance(value, dict) else repr(value)[:64]
    message = f"tool_choice is {shown}; give {', '.join(words)}, or an object of type function or allowed_tools"
    raise bad_field("tool_choice", message, "unsupported_field" if isinstance(kind, str) else "invalid_value")


def _tool(value: object, where: str) -> object:
    return sift_if_object(value, _REFUSED_TOOL, FunctionTool, where, IGNORED_IN_TOOLS)
