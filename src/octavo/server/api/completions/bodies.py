"""Bodies of POST /v1/chat/completions and POST /v1/completions. Other APIs translate conversations to a ChatBody.

Owns: messages, the fields around messages, and prompts. Does not: render or parse anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, FailFast, Field, WithJsonSchema

from octavo.core.request import DEFAULT_MAX_TOKENS
from octavo.server.api.fields import (
    Body,
    Refused,
    bad_type,
    read,
    reject_unsupported,
    reject_unsupported_in,
    shown_value,
    validate,
)
from octavo.server.api.sampling import N_PREDICT, SamplingBody, read_stream_options
from octavo.server.api.tools import (
    MAX_CALL_ID_CHARACTERS,
    MAX_CALLS,
    ReasoningOptions,
    ThinkingOptions,
    ToolCall,
    ToolFields,
    check_tools,
    read_tool_calls,
    read_tools,
)
from octavo.server.http.errors import bad_field

MAX_MESSAGES = 2048
MAX_DOCUMENTS = 256

REFUSED_CHAT: Refused = {"echo": (False,)}
IGNORED_IN_MESSAGES: Mapping[str, str] = {
    "annotations": "they say nothing to a model",
    "cache_control": "prefixes are found by their content",
    "refusal": "its text is part of the assistant's message",  # done by _with_refusal
}
IGNORED_IN_PARTS: Mapping[str, str] = {
    "cache_control": IGNORED_IN_MESSAGES["cache_control"],
    "prompt_cache_breakpoint": IGNORED_IN_MESSAGES["cache_control"],
    "annotations": IGNORED_IN_MESSAGES["annotations"],
}
_PART_KINDS = {  # types of parts other than text -> their media
    "image_url": "images",
    "image": "images",
    "input_image": "images",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "videos",
    "file": "files",
    "input_file": "files",
}
_IGNORED_IN_IMAGES: Mapping[str, str] = {**IGNORED_IN_PARTS, "detail": "the model decides how images are resized"}
_WITH_IMAGES = ("user", "tool")  # roles whose messages may have images
_PLAIN = {"role", "content"}
_OF_ROLES = {"tool_calls": "assistant", "reasoning": "assistant", "tool_call_id": "tool"}


def _parts(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class TextPart(Body):
    """One text part of a message."""

    type: Literal["text"]
    text: str


class ImageUrl(Body):
    """Where an image is: a data URL, or an http(s) URL of a host that the server allows."""

    url: str


class ImagePart(Body):
    """One image of a message, for models that take images."""

    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


def _by_role(schema: dict[str, Any]) -> None:
    """Describe in the schema which fields a message of each role may have and must have."""
    known = schema.pop("properties")
    known["reasoning_content"] = {"type": "string", "description": "the same as reasoning"}
    known["tool_call_id"] = {**known["tool_call_id"]["anyOf"][0], "description": known["tool_call_id"]["description"]}
    for name in ("required", "additionalProperties", "type"):
        schema.pop(name, None)

    def branch(roles: list[str], names: tuple[str, ...], *required: str) -> dict[str, Any]:
        properties = {"role": {"enum": roles}, **{name: known[name] for name in ("content", "name", *names)}}
        must = ["role", *required]
        return {"type": "object", "properties": properties, "required": must, "additionalProperties": False}

    calling = branch(["assistant"], ("tool_calls", "reasoning_content"), "tool_calls")
    calling["properties"]["tool_calls"] = {**known["tool_calls"], "minItems": 1}
    schema["anyOf"] = [
        branch(["system", "developer", "user"], (), "content"),
        branch(["assistant"], ("tool_calls", "reasoning"), "content"),
        calling,
        branch(["tool"], ("tool_call_id",), "content", "tool_call_id"),
    ]


class Message(Body):
    """One message of a conversation. The model sees `developer` as `system`."""

    model_config = ConfigDict(json_schema_extra=_by_role)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[Part], FailFast(), BeforeValidator(_parts, json_schema_input_type=str | list[Part])] = (
        Field(default_factory=list, description="may be left out beside tool_calls or reasoning")
    )
    name: str | None = None
    tool_calls: list[ToolCall] = Field(
        default_factory=list, max_length=MAX_CALLS, description="of the assistant: the calls it made"
    )
    tool_call_id: str | None = Field(
        None, max_length=MAX_CALL_ID_CHARACTERS, description="of a tool: the call that this is the result of"
    )
    reasoning: str | None = Field(None, description="of the assistant: its reasoning")

    def shown(self) -> dict[str, Any]:
        """Return the message as templates see it: with the text of its only part, or its parts."""
        content: object = [
            {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": part.text}
            for part in self.content
        ]
        if len(self.content) == 1 and isinstance(self.content[0], TextPart):
            content = self.content[0].text
        plain: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.name is not None:
            plain["name"] = self.name
        if self.reasoning is not None:
            plain["reasoning_content"] = self.reasoning
        if self.tool_calls:
            plain["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        if self.tool_call_id is not None:
            plain["tool_call_id"] = self.tool_call_id
        return plain


class ChatBody(SamplingBody, ToolFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], FailFast()] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = None
    n_predict: int | None = Field(None, description=N_PREDICT)
    add_special_tokens: bool = Field(False, description="put the tokenizer's own tokens around the rendered template")
    documents: list[dict[str, object]] = Field(
        [], max_length=MAX_DOCUMENTS, description="for templates that show documents; others refuse them"
    )
    logprobs: bool = False
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, object] = Field({})
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None, description="for models whose template takes it; without effect on others"
    )
    reasoning: ReasoningOptions | None = Field(None, description="another way to give reasoning_effort")
    thinking: ThinkingOptions | None = Field(None, description="whether the model reasons, as DeepSeek has it")

    @property
    def image_urls(self) -> list[tuple[str, str]]:
        """The field and the URL of each image, in the order of the prompt."""
        return [
            (f"messages[{index}].content[{place}].image_url", part.image_url.url)
            for index, message in enumerate(self.messages)
            for place, part in enumerate(message.content)
            if isinstance(part, ImagePart)
        ]

    @property
    def num_characters(self) -> int:
        """The number of characters in messages and tools that the prompt shows, without the messages' names."""
        total = 0
        for message in self.messages:
            total += len(message.reasoning or "")
            total += sum(len(part.text) for part in message.content if isinstance(part, TextPart))
            for call in message.tool_calls:
                total += len(call.function.name) + len(call.function.arguments)
        if self.tools:
            total += sum(tool.num_characters for tool in self.usable_tools)
        return total

    def own_params(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return max_tokens and the log-probabilities, and the client's field name for each. Raises ApiError."""
        renamed: dict[str, str] = {}
        max_tokens = self.max_tokens
        if self.max_completion_tokens is not None:
            if max_tokens is not None and max_tokens != self.max_completion_tokens:
                raise bad_field("max_tokens", "max_tokens and max_completion_tokens differ; give one of them")
            max_tokens, renamed["max_tokens"] = self.max_completion_tokens, "max_completion_tokens"
        elif max_tokens is None and self.n_predict is not None:
            max_tokens, renamed["max_tokens"] = _length_of(self.n_predict), "n_predict"
        logprobs = None
        if self.logprobs:
            logprobs, renamed["logprobs"] = self.top_logprobs or 0, "top_logprobs"
        elif self.top_logprobs:
            message = f"top_logprobs is {self.top_logprobs}, but logprobs is not true; set logprobs to true"
            raise bad_field("top_logprobs", message)
        return {"max_tokens": max_tokens, "logprobs": logprobs, "prompt_logprobs": self.prompt_logprobs}, renamed

    @property
    def effort(self) -> str | None:
        """The reasoning effort, from the first of its fields that is given."""
        effort = self.reasoning_effort or (self.reasoning.effort if self.reasoning is not None else None)
        is_off = self.thinking is not None and self.thinking.type == "disabled"
        return effort or ("none" if is_off else None)

    @property
    def effort_field(self) -> str | None:
        """The name of the field that gives the effort."""
        if self.reasoning_effort is not None:
            return "reasoning_effort"
        is_given = self.reasoning is not None and self.reasoning.effort is not None
        return "reasoning.effort" if is_given else "thinking" if self.thinking is not None else None


def read_chat(fields: dict[str, object], takes_images: bool = False) -> ChatBody:
    """Check a chat body of a model that takes images, or not. Raises ApiError naming the field."""
    fields = reject_unsupported(fields, REFUSED_CHAT, ChatBody)
    if "stream_options" in fields:
        fields = read_stream_options(fields)
    if "tools" in fields:
        fields = read_tools(fields)
    messages = fields.get("messages")
    if isinstance(messages, list):
        supported = messages[: MAX_MESSAGES + 1]
        for index, message in enumerate(supported):
            if isinstance(message, dict):
                supported[index] = _read_message(message, f"messages[{index}].", takes_images)
        fields["messages"] = supported
    if "reasoning" in fields:
        fields["reasoning"] = reject_unsupported_in(fields["reasoning"], {}, ReasoningOptions, "reasoning.")
    body = validate(ChatBody, fields)
    if body.tools or body.tool_choice is not None:
        check_tools(body)
    for index, message in enumerate(body.messages):
        if message.model_fields_set != _PLAIN or message.role == "tool":
            _check_message(message, f"messages[{index}].")
    return body


def _read_message(message: dict[str, object], where: str, takes_images: bool) -> dict[str, object]:
    """Return the message with its calls checked and its reasoning in one field."""
    if "reasoning" in message or "reasoning_content" in message:
        message = _with_reasoning(message, where)
    if message.get("refusal"):
        message = _with_refusal(message, where)
    kept = reject_unsupported(message, {}, Message, where, IGNORED_IN_MESSAGES)
    content = kept.get("content")
    if content is not None and not isinstance(content, str | list):
        raise bad_field(
            f"{where}content", f"{where}content is {shown_value(content)}; give a string or a list of parts"
        )
    if isinstance(content, list):
        has_images = takes_images and message.get("role") in _WITH_IMAGES
        kept["content"] = [_read_part(part, f"{where}content[{i}]", has_images) for i, part in enumerate(content)]
    if "tool_calls" in kept:
        kept["tool_calls"] = read_tool_calls(kept["tool_calls"], f"{where}tool_calls")
    return kept


def _read_part(part: object, where: str, takes_images: bool) -> object:
    """Return a content part, checked. A refusal becomes text. Raises ApiError for media that the model lacks."""
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        rest = {name: value for name, value in part.items() if name != "refusal"}
        part = {**rest, "type": "text", "text": part["refusal"]}
    elif takes_images and kind in ("image_url", "input_image"):
        return _read_image(part, where)
    elif isinstance(kind, str) and kind in _PART_KINDS:
        message = f"{where}.type is {kind!r}; this server does not accept {_PART_KINDS[kind]}, give text"
        raise bad_field(f"{where}.type", message, "unsupported_field")
    elif kind != "text":
        raise bad_type(f"{where}.type", kind, "'text' or 'image_url'" if takes_images else "'text'")
    return reject_unsupported(part, {}, TextPart, f"{where}.", IGNORED_IN_PARTS)


def _read_image(part: dict[str, object], where: str) -> object:
    """Return an image part in one form: OpenAI's chat has an object as image_url, its Responses have a text."""
    kept = reject_unsupported({**part, "type": "image_url"}, {}, ImagePart, f"{where}.", _IGNORED_IN_IMAGES)
    url = kept.get("image_url")
    if isinstance(url, str):
        kept["image_url"] = {"url": url}
    elif isinstance(url, dict):
        kept["image_url"] = reject_unsupported(url, {}, ImageUrl, f"{where}.image_url.", _IGNORED_IN_IMAGES)
    return kept


def _with_refusal(message: dict[str, object], where: str) -> dict[str, object]:
    """Return the message with its refusal as a content part."""
    refusal, content = message["refusal"], message.get("content")
    if not isinstance(refusal, str):
        raise bad_field(f"{where}refusal", f"{where}refusal is {shown_value(refusal)}; give a string")
    if message.get("role") != "assistant":
        raise bad_field(f"{where}refusal", f"{where}refusal belongs to messages of the role 'assistant'")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
    return {**message, "content": [*parts, {"type": "refusal", "refusal": refusal}]}


def _with_reasoning(message: dict[str, object], where: str) -> dict[str, object]:
    message = dict(message)
    spellings = ("reasoning", "reasoning_content")
    given = [(name, value) for name in spellings if (value := message.pop(name, None)) is not None]
    if given:
        (name, value), *others = given
        if not isinstance(value, str):
            raise bad_field(where + name, f"{where}{name} is {shown_value(value)}; give a string")
        if others and others[0][1] != value:
            raise bad_field(where + others[0][0], f"{where}reasoning and reasoning_content differ; give one of them")
        message["reasoning"] = value
    return message


def _check_message(message: Message, where: str) -> None:
    for name, role in _OF_ROLES.items():
        if getattr(message, name) and message.role != role:
            raise bad_field(where + name, f"{where}{name} belongs to messages of the role {role!r}")
    if message.role == "tool" and message.tool_call_id is None:
        raise bad_field(where + "tool_call_id", f"{where}tool_call_id is missing", "missing_field")
    has_other_parts = message.tool_calls or message.reasoning
    if "content" not in message.model_fields_set and not has_other_parts:
        raise bad_field(where + "content", f"{where}content is missing", "missing_field")


REFUSED_COMPLETION: Refused = {}


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**31


def read_texts_or_ids(value: object) -> list[str | list[int]]:
    """Convert the four forms of `prompt` to a list of texts or lists of ids. Raises ValueError."""
    message = "give a string, a list of strings, a list of token ids (0 or more) or a list of lists of token ids"
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError(message)
    if all(map(_is_id, value)):
        return [value]
    has_ids = _is_id(value[0])
    for index, item in enumerate(value):
        is_text = isinstance(item, str) or (isinstance(item, list) and all(map(_is_id, item)))
        if not (_is_id(item) if has_ids else is_text):
            raise ValueError(f"its item {index} is {shown_value(item)}; {message}")
    return value


Prompts = Annotated[
    list[Any],  # texts and lists of ids; the validator below checks them
    BeforeValidator(read_texts_or_ids),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        }
    ),
]


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: Prompts
    best_of: int | None = Field(None, description="choices to make, of which the n likeliest per token are returned")
    n_predict: int | None = Field(None, description=N_PREDICT)
    add_special_tokens: bool = Field(True, description="put the tokenizer's own tokens around a prompt of text")
    logprobs: int | None = None
    echo: bool = False

    def own_params(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return max_tokens and the log-probabilities, and the client's field name for each."""
        num_scored = self.prompt_logprobs
        if self.echo and (self.logprobs is not None or self.max_tokens == 0):
            num_scored = max(num_scored or 0, self.logprobs or 0)
        params = {"logprobs": self.logprobs, "prompt_logprobs": num_scored}
        if self.max_tokens is None and self.n_predict is not None:
            return {**params, "max_tokens": _length_of(self.n_predict)}, {"max_tokens": "n_predict"}
        return {**params, "max_tokens": DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens}, {}

    @property
    def num_candidates(self) -> int | None:
        """The number of choices to generate, of which the best n are returned; None means n."""
        return self.best_of


def _length_of(n_predict: int) -> int | None:
    """Return max_tokens for llama.cpp's n_predict. A negative n_predict gives None: as many tokens as fit."""
    return None if n_predict < 0 else n_predict


def read_completion(fields: dict[str, object]) -> CompletionBody:
    """Check a completion body. Raises ApiError naming the field."""
    return read(CompletionBody, read_stream_options(fields), REFUSED_COMPLETION)
