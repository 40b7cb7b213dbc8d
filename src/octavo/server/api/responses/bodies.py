"""The body of POST /v1/responses: its fields, its items, and their translation to the fields of a ChatBody.

Owns: the types and bounds of items, and their translation to messages. Does not: store or assemble conversations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import BaseModel, Field, WithJsonSchema

from octavo.server.api.fields import (
    Body,
    Refused,
    bad_type,
    ignore,
    reject_unsupported,
    reject_unsupported_in,
    shown_value,
    validate,
)
from octavo.server.api.responses.mcp import (
    IGNORED_MCP,
    MCP_ITEMS,
    REFUSED_MCP,
    McpApprovalRequest,
    McpApprovalResponse,
    McpCallItem,
    McpChoice,
    McpItem,
    McpServerField,
    ServerTools,
    plain_items,
)
from octavo.server.api.sampling import SamplingBody, check_stream_options
from octavo.server.api.tools import IGNORED_IN_TOOLS, MAX_TOOLS, drop_hosted_tools
from octavo.server.http.errors import ApiError, Spelling, bad_field

MAX_METADATA = 16
MAX_METADATA_KEY_CHARACTERS = 64
MAX_METADATA_CHARACTERS = 512
MAX_LABEL_CHARACTERS = 512

REFUSED_RESPONSES: Refused = {
    "prompt": (),
    "background_options": ({"completion_window": "soonest"},),
    "access_programs": (),
}
# Fields of other bodies that this endpoint does not have.
NOT_HERE: Refused = {
    "max_tokens": (),
    "n": (1,),
    "use_beam_search": (False,),
    "length_penalty": (),
    "early_stopping": (),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
}
_NAMED_HERE = {"max_tokens": "max_output_tokens", "messages": "input", "response_format": "text.format"}
IGNORED_RESPONSES: Mapping[str, str] = {
    "prompt_cache_retention": "the prefix cache evicts by use",
}
_REFUSED_REASONING: Refused = {"context": ("auto",), "mode": ("standard",)}
_REFUSED_TOOL: Refused = {
    "async": (False,),
    "defer_loading": (False,),
    "allowed_callers": (["direct"],),
    "output_schema": (),
}
LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (LOGPROBS, "reasoning.encrypted_content")  # the second has no effect: reasoning is returned as text

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
Items = Annotated[list[Any], WithJsonSchema(_INPUT_SCHEMA)]  # read_items checks them


class Format(Body):
    """The format of the text. A json_schema has its name and schema in this object."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, object] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(Body):
    """The options of the answer's text."""

    format: Format = Format()


class ReasoningConfig(Body):
    """How much the model reasons. `summary` and `generate_summary` have no effect: the reasoning itself is returned."""

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
    """One function, named."""

    type: Literal["function"]
    name: str


class AllowedTools(Body):
    """The functions among `tools` that may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=MAX_TOOLS)


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools | McpChoice


class ResponsesBody(SamplingBody):
    """POST /v1/responses. A sampling field that is absent takes the model's own default."""

    input: Items
    instructions: str | None = None
    previous_response_id: str | None = Field(None, max_length=128)
    store: bool = True
    background: bool = Field(False, description="whether it runs on without this connection; it must be stored")
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[str] = Field([], max_length=16)
    tools: list[FunctionTool | McpServerField] = Field([], max_length=MAX_TOOLS)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = Field(None, ge=1, description="calls of tools of MCP servers; default 16, at most 128")
    text: TextConfig = TextConfig()
    reasoning: ReasoningConfig = ReasoningConfig()
    truncation: Literal["auto", "disabled"] = Field(
        "disabled", description="auto leaves out the oldest turns of what would not fit"
    )
    metadata: Metadata = Field({}, max_length=MAX_METADATA)
    user: Label | None = Field(None, description="given back; nothing here depends on it")
    safety_identifier: Label | None = Field(None, description="given back; no such checks are made here")
    prompt_cache_key: Label | None = Field(None, description="given back; names the session for the router of a fleet")
    chat_template_kwargs: dict[str, object] = Field({})

    @property
    def items(self) -> list[Item]:
        """The input as a list of items."""
        return self.input


def read_responses(fields: dict[str, object], takes_images: bool = False) -> ResponsesBody:
    """Check a Responses body of a model that takes images, or not. Raises ApiError naming the field."""
    here = {name: value for name, value in fields.items() if name not in NOT_HERE and name != "stream_options"}
    for name, own in _NAMED_HERE.items():
        if fields.get(name) not in (None, {"type": "text"}):
            raise bad_field(name, f"{name} is not a field of this endpoint; give {own}", "unsupported_field")
    reject_unsupported({name: fields[name] for name in NOT_HERE if name in fields}, NOT_HERE, Body)
    options = fields.get("stream_options")
    if options is not None:
        if not isinstance(options, dict):
            raise bad_field("stream_options", f"stream_options is {shown_value(options)}; give an object")
        check_stream_options(fields)
        reject_unsupported(options, {}, Body, "stream_options.")
    if here.pop("return_token_ids", None):
        ignore("return_token_ids", is_known=True)
    here = reject_unsupported(here, REFUSED_RESPONSES, ResponsesBody, ignored=IGNORED_RESPONSES)
    if "input" in here:
        here["input"] = read_items(here["input"], takes_images)
    _read_parts(here)
    body = validate(ResponsesBody, here)
    for index, name in enumerate(body.include):
        if name not in _INCLUDED:
            message = f"include[{index}] is {name[:64]!r}; this server can include {', '.join(_INCLUDED)}"
            raise bad_field(f"include[{index}]", message, "unsupported_field")
    return body


def _read_parts(fields: dict[str, object]) -> None:
    """Check the nested objects in place, so that unsupported fields are refused by name."""
    text = fields.get("text")
    if isinstance(text, dict):
        text = reject_unsupported(text, {}, TextConfig, "text.")
        text_format = text.get("format")
        if isinstance(text_format, dict):
            text["format"] = _format(text_format)
        fields["text"] = text
    reasoning = fields.get("reasoning")
    if isinstance(reasoning, dict):
        fields["reasoning"] = reject_unsupported(reasoning, _REFUSED_REASONING, ReasoningConfig, "reasoning.")
    tools = fields.get("tools")
    if isinstance(tools, list):
        usable = drop_hosted_tools(tools, ("function", "mcp"), fields.get("tool_choice"))
        fields["tools"] = [_tool(tool, f"tools[{index}].") for index, tool in usable]
    if "tool_choice" in fields:
        fields["tool_choice"] = _choice(fields["tool_choice"])


def _format(value: dict[str, object]) -> dict[str, object]:
    schema = {name: part for name, part in value.items() if name == "schema" and part is not None}
    others = {name: part for name, part in value.items() if name != "schema"}
    return {**reject_unsupported(others, {}, Format, "text.format."), **schema}


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
    if isinstance(value, dict) and kind == "mcp":
        return checked(McpChoice, value, {}, "tool_choice")
    shown = f"of type {str(kind)[:64]!r}" if isinstance(value, dict) else repr(value)[:64]
    message = f"tool_choice is {shown}; give {', '.join(words)}, or an object of type function, allowed_tools or mcp"
    raise bad_field("tool_choice", message, "unsupported_field" if isinstance(kind, str) else "invalid_value")


def _tool(value: object, where: str) -> object:
    if isinstance(value, dict) and value.get("type") == "mcp":
        return checked(McpServerField, value, REFUSED_MCP, where.removesuffix("."), IGNORED_MCP)
    return reject_unsupported_in(value, _REFUSED_TOOL, FunctionTool, where, IGNORED_IN_TOOLS)


MAX_INPUT_ITEMS = 2048
MAX_ITEM_ID_CHARACTERS = 128

Item = dict[str, Any]
B = TypeVar("B", bound=BaseModel)
ItemId = Annotated[str, Field(min_length=1, max_length=MAX_ITEM_ID_CHARACTERS)]
_IGNORED: Mapping[str, str] = {
    "status": "an item that is given has ended",
    "phase": "no model here tells comments from answers",
    "annotations": "they say nothing to a model",
    "logprobs": "they say nothing to a model",
    "parsed": "made by a client from the text",
    "parsed_arguments": "made by a client from the arguments",
    "created_by": "says nothing to a model",
    "prompt_cache_breakpoint": "prefixes are found by their content",
    "encrypted_content": "reasoning is given as text here",
}
_REFUSED_CALL: Refused = {"async": (False,), "caller": ({"type": "direct"},), "namespace": ()}
_IMAGE = "input_image"
_TEXTS = {
    "user": ("input_text",),
    "system": ("input_text",),
    "developer": ("input_text",),
    "assistant": ("output_text", "input_text"),
}


class _Text(Body):
    type: str
    text: str


class _Image(Body):
    type: Literal["input_image"]
    image_url: str
    detail: str = "auto"


class _Refusal(Body):
    type: Literal["refusal"]
    refusal: str


class _Message(Body):
    type: Literal["message"] = "message"
    id: ItemId | None = None
    role: Literal["user", "system", "developer", "assistant"]
    content: str | list[object]


class _Call(Body):
    type: Literal["function_call"]
    id: ItemId | None = None
    call_id: ItemId
    name: Annotated[str, Field(min_length=1, max_length=MAX_ITEM_ID_CHARACTERS)]
    arguments: str


class _CallOutput(Body):
    type: Literal["function_call_output"]
    id: ItemId | None = None
    call_id: ItemId
    name: str | None = None
    output: str | list[object]


class _Reasoning(Body):
    type: Literal["reasoning"]
    id: ItemId | None = None
    summary: list[object] = Field(default=[])
    content: list[object] = Field(default=[])


class _Reference(Body):
    type: Literal["item_reference"] = "item_reference"
    id: ItemId


_KINDS: Mapping[str, tuple[type[Body], Refused]] = {
    "message": (_Message, {}),
    "function_call": (_Call, _REFUSED_CALL),
    "function_call_output": (_CallOutput, _REFUSED_CALL),
    "reasoning": (_Reasoning, {}),
    "item_reference": (_Reference, {}),
    **MCP_ITEMS,
}


def read_items(value: object, takes_images: bool = False) -> list[Item]:
    """Return the items of `input`, which is a text or a list of items. Raises ApiError naming the field.

    Every item has all fields of its type, but an id only if the client sent one.
    """
    if isinstance(value, str):
        return [_message("user", [{"type": "input_text", "text": value}])]
    if not isinstance(value, list):
        raise bad_field("input", f"input is {shown_value(value)}; give a string or a list of items")
    if not 1 <= len(value) <= MAX_INPUT_ITEMS:
        raise bad_field("input", f"input has {len(value)} items; give 1 to {MAX_INPUT_ITEMS}")
    return [_item(item, f"input[{index}]", takes_images) for index, item in enumerate(value)]


def _item(value: object, where: str, takes_images: bool) -> Item:
    if not isinstance(value, dict):
        raise bad_field(where, f"{where} is {shown_value(value)}; give an object")
    kind = value.get("type")
    if kind is None:
        kind = "message" if "role" in value else "item_reference" if set(value) <= {"id", "type"} else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise bad_type(f"{where}.type", kind, ", ".join(_KINDS))
    body, refused = _KINDS[kind]
    return _full(checked(body, value, refused, where), where, takes_images)


def checked(
    body: type[B], value: Mapping[str, object], refused: Refused, where: str, ignored: Mapping[str, str] = _IGNORED
) -> B:
    """Check one object of the body. Raises ApiError with the object's place."""
    fields = reject_unsupported(value, refused, body, f"{where}.", ignored)
    try:
        return validate(body, fields)
    except ApiError as error:
        raise bad_field(f"{where}.{error.param}", f"{where}.{error.message}", error.code) from None


def _full(item: Body, where: str, takes_images: bool) -> Item:
    if isinstance(item, _Message):
        kinds = _TEXTS[item.role]
        kinds = (*kinds, _IMAGE) if takes_images and item.role == "user" else kinds
        return _message(item.role, _contents(item.content, kinds, f"{where}.content"), item.id)
    if isinstance(item, McpItem | McpApprovalResponse):
        if isinstance(item, McpCallItem | McpApprovalRequest):
            _check_arguments(item.arguments, f"{where}.arguments")
        return item.model_dump(exclude={"id"} if item.id is None else None)
    if isinstance(item, _Call):
        _check_arguments(item.arguments, f"{where}.arguments")
        made: Item = {"type": "function_call", "status": "completed", "name": item.name}
        made |= {"call_id": item.call_id, "arguments": item.arguments}
    elif isinstance(item, _CallOutput):
        output: object = item.output
        if isinstance(output, list):
            output = _contents(output, ("input_text", _IMAGE) if takes_images else ("input_text",), f"{where}.output")
        made = {"type": "function_call_output", "status": "completed", "call_id": item.call_id, "output": output}
    elif isinstance(item, _Reasoning):
        summary = _texts(item.summary, ("summary_text",), f"{where}.summary")
        content = _texts(item.content, ("reasoning_text",), f"{where}.content")
        made = {"type": "reasoning", "status": "completed", "summary": summary, "content": content}
    else:
        assert isinstance(item, _Reference)
        made = {"type": "item_reference"}
    return made if item.id is None else {"id": item.id, **made}


def _check_arguments(text: str, where: str) -> None:
    try:
        is_object = isinstance(msgspec.json.decode(text or "{}"), dict)
    except (msgspec.DecodeError, RecursionError):
        is_object = False
    if not is_object:
        raise bad_field(where, f"{where} is {text[:64]!r}; give the text of a JSON object")


def _message(role: str, content: list[Item], item_id: str | None = None) -> Item:
    if role == "assistant":
        content = [
            {**part, "type": "output_text", "annotations": [], "logprobs": []} if "text" in part else part
            for part in content
        ]
    made: Item = {"type": "message", "role": role, "status": "completed", "content": content}
    return made if item_id is None else {"id": item_id, **made}


def _contents(value: str | list[object], kinds: tuple[str, ...], where: str) -> list[Item]:
    """Return the parts of a message or of a call's output. A text becomes one part."""
    if isinstance(value, str):
        return [{"type": kinds[0], "text": value}]
    if not value:
        raise bad_field(where, f"{where} is empty; give a text or at least one part")
    return _texts(value, kinds, where, has_refusals="output_text" in kinds)


def _texts(value: list[object], kinds: tuple[str, ...], where: str, has_refusals: bool = False) -> list[Item]:
    found: list[Item] = []
    for index, part in enumerate(value):
        at = f"{where}[{index}]"
        if not isinstance(part, dict):
            raise bad_field(at, f"{at} is {shown_value(part)}; give an object")
        kind = part.get("type")
        if has_refusals and kind == "refusal":
            found.append({"type": "refusal", "refusal": checked(_Refusal, part, {}, at).refusal})
            continue
        if kind not in kinds:
            raise bad_type(f"{at}.type", kind, " or ".join(kinds))
        if kind == _IMAGE:
            image = checked(_Image, part, {"file_id": ()}, at)
            found.append({"type": kind, "image_url": image.image_url, "detail": image.detail})
            continue
        found.append({"type": kind, "text": checked(_Text, part, {}, at).text})
    return found


Message = dict[str, Any]
_SYSTEM = ("system", "developer")
_OWN = frozenset({"stream_options", "response_format"})  # the fields of SamplingBody that are translated separately
# Field path in a ChatBody -> field path in this body.
SPELLING: Spelling = (
    (r"^messages(?=[.\[]|$).*", "input"),
    (r"^max_completion_tokens$", "max_output_tokens"),
    (r"^response_format(\.json_schema)?(?=[.\[]|$)", "text.format"),
    (r"^reasoning_effort$", "reasoning.effort"),
    (r"^(tools\[\d+\])\.function", r"\1"),
)


def chat_fields(body: ResponsesBody, items: Sequence[Item], servers: ServerTools) -> dict[str, object]:
    """Return the fields of the same request as a ChatBody. `items` are all items, earlier responses first."""
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
    tools, choice = _tools(body, servers)
    if tools:
        fields |= {"tools": [_chat_tool(tool) for tool in tools], "tool_choice": choice}
        fields["parallel_tool_calls"] = body.parallel_tool_calls
    return fields


def chat_messages(instructions: str | None, items: Iterable[Item]) -> list[Message]:
    """Return the messages of the items, after a message with the instructions.

    An assistant's turn (reasoning, text, calls) becomes one message. The instructions and a system message that
    directly follows them become one message too: many templates show only one system message, at the beginning.
    """
    messages: list[Message] = [] if instructions is None else [{"role": "system", "content": instructions}]
    calls: set[str] = set()
    for item in plain_items(items):
        kind = item["type"]
        if kind == "function_call" and item["status"] == "incomplete":
            continue  # the call was cut before its arguments were complete, so it has no output
        if kind == "function_call_output":
            if item["call_id"] not in calls:
                text = f"input has an output of call {item['call_id']!r}, but no such call before it; give both"
                raise bad_field("input", text)
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": _content(item["output"])})
        elif kind == "reasoning":
            message = _turn(messages, "content", "tool_calls", "reasoning_content")
            message["reasoning_content"] = _reasoning(item)
        elif kind == "function_call":
            calls.add(item["call_id"])
            _turn(messages).setdefault("tool_calls", []).append(_chat_call(item))
        elif item["role"] == "assistant":
            _turn(messages, "content", "tool_calls")["content"] = _text(item["content"])
        else:
            _add(messages, item["role"], _content(item["content"]))
    for message in messages:
        if message["role"] == "assistant" and "tool_calls" not in message:
            message.setdefault("content", "")
    return messages


def _turn(messages: list[Message], *filled: str) -> Message:
    """Return the assistant's message to extend: the last message, or a new one if that has one of these parts."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(part in last for part in filled):
        messages.append({"role": "assistant"})
    return messages[-1]


def _add(messages: list[Message], role: str, content: str | list[Item]) -> None:
    if role in _SYSTEM and len(messages) == 1 and messages[0]["role"] in _SYSTEM:
        messages[0]["content"] += f"\n\n{content}"
    else:
        messages.append({"role": role, "content": content})


def _text(content: str | Sequence[Item]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in content)


def _content(content: str | Sequence[Item]) -> str | list[Item]:
    """Return the content of a chat's message: a text, or parts if there are images."""
    if isinstance(content, str) or all(part["type"] != _IMAGE for part in content):
        return _text(content)
    return [part if part["type"] == _IMAGE else {"type": "text", "text": _text([part])} for part in content]


def _reasoning(item: Item) -> str:
    return "\n".join(part["text"] for part in item["content"] or item["summary"])


def _chat_call(item: Item) -> Message:
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def _chat_tool(tool: FunctionTool) -> Message:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def _tools(body: ResponsesBody, servers: ServerTools) -> tuple[Sequence[FunctionTool], object]:
    """Return the functions, those of MCP servers too, and tool_choice in a chat's form."""
    choice, tools = body.tool_choice, [tool for tool in body.tools if isinstance(tool, FunctionTool)]
    for name, tool in servers.tools.items():
        function = FunctionTool(type="function", name=name, description=tool.description, parameters=dict(tool.schema))
        tools.append(function)
    names = {tool.name for tool in tools}
    if isinstance(choice, NamedTool):
        _check_known(choice, names, "tool_choice.name")
        return tools, {"type": "function", "function": {"name": choice.name}}
    if isinstance(choice, AllowedTools):
        for index, named in enumerate(choice.tools):
            _check_known(named, names, f"tool_choice.tools[{index}].name")
        return tools, _allowed(choice.mode, [named.name for named in choice.tools])
    if isinstance(choice, McpChoice):
        chosen = servers.named(choice)
        if not chosen:
            message = "tool_choice names no tool that tools has: give a server_label of tools, and a name of its tools"
            raise bad_field("tool_choice", message)
        return tools, _allowed("required", chosen)
    if choice == "required" and not tools:
        raise bad_field("tool_choice", "tool_choice is 'required', but there are no tools; give tools")
    return tools, choice


def _allowed(mode: str, names: Sequence[str]) -> Message:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def _check_known(tool: NamedTool, names: set[str], where: str) -> None:
    if tool.name not in names:
        raise bad_field(where, f"{where} is {tool.name[:64]!r}, which is none of the tools; give the name of one")


def _response_format(body: ResponsesBody) -> Message:
    text_format = body.text.format
    if text_format.type == "json_object":
        return {"type": "json_object"}
    if text_format.schema_ is None:
        message = "text.format.schema is missing; a format of type json_schema needs one"
        raise bad_field("text.format.schema", message, "missing_field")
    named = text_format.model_dump(exclude={"type"}, exclude_none=True, by_alias=True)
    return {"type": "json_schema", "json_schema": {"name": "answer", **named}}
