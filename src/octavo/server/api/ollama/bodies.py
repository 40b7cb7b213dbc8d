"""Bodies of Ollama's API, and their translation to a ChatBody or CompletionBody.

Owns: the fields, messages and options of these bodies; their translation; the translation of Ollama's field names in a
chat completion. Does not: encode answers.
The names follow Ollama's public API description and the types of its Python package.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast, Field

from octavo.server.api.completions.bodies import MAX_MESSAGES, ChatBody, CompletionBody, read_chat, read_completion
from octavo.server.api.embeddings import MAX_INPUTS
from octavo.server.api.fields import (
    TEXT_OR_TEXTS,
    Body,
    Refused,
    ignore,
    read,
    reject_unsupported,
    reject_unsupported_in,
    validate,
)
from octavo.server.api.sampling import OLLAMA_NAMES, ServedFields, Stops, with_numbers
from octavo.server.http.errors import Spelling, bad_field, renamed_fields
from octavo.text.dialect import Dialect

MAX_TOOL_ID_CHARACTERS = 256
_MAX_KEEP_ALIVE_S = 1e9
_OF_LOADING = "how the model is loaded is the server's business"

IGNORED_OLLAMA: Mapping[str, str] = {
    "keep_alive": "a server's only model stays loaded while the server runs (but see `--keep-alive`)",
    "truncate": "a conversation that does not fit is refused",
    "shift": "nothing is shifted out of a context",
}
REFUSED_CHAT: Refused = {}
REFUSED_GENERATE: Refused = {
    "suffix": ("",),
    "template": ("",),
    "context": ([],),
    "width": (0,),
    "height": (0,),
    "steps": (0,),
}
IGNORED_OPTIONS: Mapping[str, str] = {
    "num_ctx": "the context is the server's, --max-model-len",
    "num_keep": "nothing is shifted out of a context",
    "num_batch": _OF_LOADING,
    "num_gpu": _OF_LOADING,
    "main_gpu": _OF_LOADING,
    "num_thread": _OF_LOADING,
    "numa": _OF_LOADING,
    "low_vram": _OF_LOADING,
    "f16_kv": _OF_LOADING,
    "use_mmap": _OF_LOADING,
    "use_mlock": _OF_LOADING,
    "vocab_only": _OF_LOADING,
    "logits_all": _OF_LOADING,
    "embedding_only": _OF_LOADING,
}
_NO_IMAGES: Refused = {"images": ([],)}  # of a model without images
_IGNORED_CALL: Mapping[str, str] = {"index": "calls stand in their order", "type": "all are functions"}


_UNITS_S = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_DURATION = re.compile(r"([+-]?)((?:\d+(?:\.\d+)?(?:ms|us|ns|h|m|s))+)")
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|us|ns|h|m|s)")


def read_keep_alive(value: object) -> float | None:
    """Return the seconds of a keep_alive: a number, or a duration such as "5m"; below 0 without an end. None is unset.

    Raises ApiError.
    """
    if value is None or value == "":
        return None
    seconds: float | None = None
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MAX_KEEP_ALIVE_S:
        seconds = float(value)
    elif isinstance(value, str) and (match := _DURATION.fullmatch(value[:64])) is not None:
        total = sum(float(number) * _UNITS_S[unit] for number, unit in _DURATION_PART.findall(match[2]))
        seconds = -total if match[1] == "-" else total
    elif isinstance(value, str) and value[:32].removeprefix("-").isdecimal():
        seconds = float(value)
    if seconds is None or abs(seconds) > _MAX_KEEP_ALIVE_S:
        shown = str(value)[:32]
        raise bad_field("keep_alive", f'keep_alive is {shown!r}; give seconds, a duration such as "5m", or -1 for ever')
    return max(seconds, -1.0)


def _no_text_is_nothing(value: object) -> object:
    return None if value == "" else value


@with_numbers(OLLAMA_NAMES)
class Options(Body):
    """Sampling options, in Ollama's names."""

    seed: int | None = None
    num_predict: int | None = Field(None, description="-1 or -2: as many as fit")
    stop: Stops = Field([])
    repeat_last_n: int | None = Field(
        None, ge=-1, description="0 turns repeat_penalty off; else penalties look at all of the text"
    )


class Function(Body):
    """The function of a call, and the call's arguments."""

    name: str
    arguments: dict[str, object] = Field(default_factory=dict)


class Call(Body):
    """A call that the model made."""

    id: str | None = Field(None, min_length=1, max_length=MAX_TOOL_ID_CHARACTERS)
    function: Function


class OllamaMessage(Body):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    images: list[str] = Field(default_factory=list, description="base64; they precede the text")
    thinking: str | None = None
    tool_calls: list[Call] = Field(default_factory=list)  # a plain [] would be copied for every message
    tool_name: str | None = None
    tool_call_id: str | None = Field(None, min_length=1, max_length=MAX_TOOL_ID_CHARACTERS)


Format = Annotated[
    Literal["json"] | dict[str, Any] | None,
    BeforeValidator(_no_text_is_nothing, json_schema_input_type=Literal["", "json"] | dict[str, Any] | None),
]


class OllamaBody(ServedFields):
    """The fields that /api/chat and /api/generate share."""

    stream: bool = True
    format: Format = Field(None, description='"json", or a JSON schema that the answer obeys')
    options: Options = Field(Options.model_validate({}))
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool = False
    top_logprobs: int | None = None


class OllamaChatBody(OllamaBody):
    """POST /api/chat."""

    messages: Annotated[list[OllamaMessage], FailFast()] = Field([], max_length=MAX_MESSAGES)
    tools: list[dict[str, Any]] = Field([])


class OllamaGenerateBody(OllamaBody):
    """POST /api/generate."""

    prompt: str = ""
    images: list[str] = Field(default_factory=list, description="base64; they precede the prompt")
    system: str | None = None
    raw: bool = Field(False, description="the prompt as it is, without the chat template")


def read_ollama_chat(fields: dict[str, object], takes_images: bool = False) -> OllamaChatBody:
    """Check a chat body. Raises ApiError naming the field."""
    fields = _supported(fields, REFUSED_CHAT, OllamaChatBody)
    messages = fields.get("messages")
    if isinstance(messages, list):
        messages = messages[: MAX_MESSAGES + 1]
        fields["messages"] = [
            _read_message(message, f"messages[{i}].", takes_images) for i, message in enumerate(messages)
        ]
    return validate(OllamaChatBody, fields)


def read_ollama_generate(fields: dict[str, object], takes_images: bool = False) -> OllamaGenerateBody:
    """Check a generate body. Raises ApiError naming the field."""
    if not takes_images:
        reject_unsupported({name: fields.pop(name) for name in ("images",) if name in fields}, _NO_IMAGES, Body)
    return validate(OllamaGenerateBody, _supported(fields, REFUSED_GENERATE, OllamaGenerateBody))


def read_options(options: object) -> object:
    """Return the supported options; ignore and report the others. A value that is no object is returned unchanged."""
    return reject_unsupported_in(options, {}, Options, "options.", IGNORED_OPTIONS)


def _supported(fields: dict[str, object], refused: Refused, body: type[OllamaBody]) -> dict[str, object]:
    kept = reject_unsupported(fields, refused, body, ignored=IGNORED_OLLAMA)
    if "options" in kept:
        kept["options"] = read_options(kept["options"])
    return kept


def _read_message(message: object, where: str, takes_images: bool) -> object:
    if not isinstance(message, dict):
        return message
    if not takes_images and "images" in message:
        reject_unsupported({"images": message.pop("images")}, _NO_IMAGES, Body, where)
    kept = reject_unsupported(message, {}, OllamaMessage, where)
    calls = kept.get("tool_calls")
    if isinstance(calls, list):
        kept["tool_calls"] = [_read_call(call, f"{where}tool_calls[{i}].") for i, call in enumerate(calls)]
    return kept


def _read_call(call: object, where: str) -> object:
    if not isinstance(call, dict):
        return call
    kept = reject_unsupported(call, {}, Call, where, _IGNORED_CALL)
    function = kept.get("function")
    if isinstance(function, dict):
        kept["function"] = reject_unsupported(function, {}, Function, f"{where}function.", _IGNORED_CALL)
    return kept


_LATEST = ":latest"
_SAMPLING = {**OLLAMA_NAMES, "seed": "seed", "stop": "stop"}  # a chat completion's field -> the option's name
_ALWAYS = ("stream", *ServedFields.model_fields)
_ANY_LENGTH = (-1, -2)  # no bound, and up to the end of the context: both mean as many tokens as fit
_EFFORTS: dict[bool | str, str] = {True: "medium", False: "none", "max": "xhigh"}
SENT_NAMES = ("num_predict", "repeat_penalty", "think", "options")  # Ollama's names that a chat completion may use
_OWN_NAMES = {  # Ollama's name -> the chat completion's name, and that field's other names
    "num_predict": ("max_tokens", "max_completion_tokens"),
    **{name: (ours,) for ours, name in OLLAMA_NAMES.items() if name != ours},
    "think": ("reasoning_effort", "reasoning"),
}
SPELLING: Spelling = (
    (r"^messages\[(\d+)\]\.content\[(\d+)\]\.image_url(\.url)?$", r"messages[\1].images[\2]"),
    (r"^max_tokens$", "options.num_predict"),
    *((rf"^{ours}(?=\[|$)", f"options.{name}") for ours, name in _SAMPLING.items()),
    (r"^(response_format|structured_outputs)(\.[a-z_]+)*$", "format"),
    (r"^reasoning_effort$", "think"),
)
GENERATE_SPELLING: Spelling = (
    (r"^messages\[\d+\]\.content\[(\d+)\]\.image_url(\.url)?$", r"images[\1]"),
    *SPELLING,
    (r"^messages.*$", "prompt"),
)


def model_of(body: ServedFields) -> str | None:
    """Return the requested model without `:latest`, which Ollama's clients add to names without a tag."""
    return None if body.model is None else body.model.removesuffix(_LATEST)


def chat_of(body: OllamaChatBody, dialect: Dialect) -> ChatBody:
    """Return the same request as a ChatBody. Raises ApiError naming the field as Ollama spells it."""
    fields = _fields(body) | _conversation_fields(body, dialect)
    fields["messages"] = _messages(body.messages)
    if body.tools:
        fields["tools"] = body.tools
    if body.messages[-1].role == "assistant" and not body.messages[-1].tool_calls:
        fields["continue_final_message"] = True
    with renamed_fields(SPELLING):
        return read_chat(fields, dialect.takes_images)


def generate_of(body: OllamaGenerateBody, dialect: Dialect) -> ChatBody:
    """Return the prompt as a ChatBody of one message. Raises ApiError naming the field as Ollama spells it."""
    system = [{"role": "system", "content": body.system}] if body.system else []
    fields = _fields(body) | _conversation_fields(body, dialect)
    fields["messages"] = [*system, {"role": "user", "content": _content(body.prompt, body.images)}]
    with renamed_fields(GENERATE_SPELLING):
        return read_chat(fields, dialect.takes_images)


def raw_of(body: OllamaGenerateBody) -> CompletionBody:
    """Return a raw prompt as a CompletionBody. Raises ApiError naming the field as Ollama spells it."""
    for name, value in (("system", body.system), ("think", body.think), ("images", body.images)):
        if value:
            raise bad_field(name, f"{name} is a matter of the chat template, which raw leaves out; leave one out")
    fields: dict[str, object] = {"n_predict": -1, **_fields(body), "prompt": body.prompt}  # any length by default
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    with renamed_fields(GENERATE_SPELLING):
        return read_completion(fields)


def with_ollama_names(fields: dict[str, object], dialect: Dialect) -> dict[str, object]:
    """Return the fields of a chat completion, with Ollama's names (which Open WebUI sends) translated.

    If a field is also given in the chat completion's own name, that value is used. Ollama's fields without a meaning in
    a chat completion are ignored and reported. Raises ApiError.
    """
    made = {name: value for name, value in fields.items() if name not in SENT_NAMES}
    options = read_options(fields.get("options"))
    given: dict[str, object] = {}
    if isinstance(options, dict):
        given = {f"options.{name}": value for name, value in options.items()}
    elif options is not None:
        ignore("options", is_known=True)
    given |= {name: fields[name] for name in SENT_NAMES if name != "options" and fields.get(name) is not None}
    for path, value in given.items():
        name = path.removeprefix("options.")
        translated = _translated(name, value, dialect)
        if translated is None or any(made.get(own) is not None for own in _OWN_NAMES.get(name, (name,))):
            ignore(path, is_known=True)
        else:
            made |= translated
    return made


def _translated(name: str, value: object, dialect: Dialect) -> dict[str, object] | None:
    """Return the same field of a chat completion as a dict; None if there is no such field."""
    if name == "think":
        if not dialect.effort_variables or not isinstance(value, bool | str):
            return None
        return {"reasoning_effort": _EFFORTS.get(value, value)}
    if name == "repeat_last_n":
        return None
    if name == "num_predict" and value in _ANY_LENGTH:  # no bound is the default
        return {}
    return {_OWN_NAMES.get(name, (name,))[0]: value}


def _fields(body: OllamaBody) -> dict[str, object]:
    """Return the fields that chat and text completions share."""
    options = body.options
    fields: dict[str, object] = {ours: getattr(options, name) for ours, name in _SAMPLING.items()}
    fields |= {name: getattr(body, name) for name in _ALWAYS}
    fields["model"] = model_of(body)
    if options.num_predict not in _ANY_LENGTH:
        fields["max_tokens"] = options.num_predict
    if options.repeat_last_n == 0:
        fields["repetition_penalty"] = 1.0
    if body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif body.format is not None:
        schema = {"name": "format", "schema": body.format}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def _conversation_fields(body: OllamaBody, dialect: Dialect) -> dict[str, object]:
    """Return the fields that only chats have. `think` is left out if the template has no variable for it."""
    fields: dict[str, object] = {"logprobs": body.logprobs, "top_logprobs": body.top_logprobs}
    if body.think is not None and dialect.effort_variables:
        fields["reasoning_effort"] = _EFFORTS.get(body.think, body.think)
    return fields


def _messages(messages: list[OllamaMessage]) -> list[dict[str, Any]]:
    """Return the messages with ids for all calls. Results get their calls' ids, by the tool's name or in order."""
    made: list[dict[str, Any]] = []
    unanswered: list[tuple[str, str]] = []  # (id, name) of each call
    num_calls = 0
    for message in messages:
        plain: dict[str, Any] = {"role": message.role, "content": _content(message.content, message.images)}
        if message.role == "assistant":
            calls = [
                (call.id or f"call_{num_calls + index}", call.function) for index, call in enumerate(message.tool_calls)
            ]
            num_calls += len(calls)
            unanswered = [(name, function.name) for name, function in calls]
            if message.thinking:
                plain["reasoning_content"] = message.thinking
            if calls:
                plain["tool_calls"] = [
                    {"id": name, "type": "function", "function": {**function.model_dump(), "arguments": text}}
                    for name, function in calls
                    for text in (json.dumps(function.arguments, ensure_ascii=False),)
                ]
        elif message.role == "tool":
            plain["tool_call_id"] = message.tool_call_id or _answered(unanswered, message.tool_name)
            if message.tool_name:
                plain["name"] = message.tool_name
        made.append(plain)
    return made


def _content(text: str, images: list[str]) -> str | list[dict[str, Any]]:
    """Return a message's content: its images, then its text."""
    if not images:
        return text
    urls = [image if image[:5].lower() == "data:" else f"data:;base64,{image}" for image in images]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [*parts, {"type": "text", "text": text}] if text else parts


def _answered(unanswered: list[tuple[str, str]], name: str | None) -> str:
    """Remove the first unanswered call (of this name, if one is given); return the call's id."""
    found = next((call for call in unanswered if name in (None, call[1])), None)
    if found is None:
        return "call_unknown"
    unanswered.remove(found)
    return found[0]


IGNORED_EMBED: Mapping[str, str] = {
    "keep_alive": "a server's only model stays loaded while the server runs (but see `--keep-alive`)",
    "options": "nothing is sampled, and how the model is loaded is the server's business",
}
REFUSED_EMBED: Refused = {}


class OllamaEmbedBody(ServedFields):
    """POST /api/embed."""

    input: Annotated[list[str], TEXT_OR_TEXTS] = Field([], max_length=MAX_INPUTS)
    truncate: bool = Field(True, description="cut a text's end that does not fit; false: it is refused")
    dimensions: int | None = Field(
        None, ge=1, lt=2**31, description="how many numbers of each vector to return, scaled to length 1 again"
    )


class OllamaEmbeddingsBody(ServedFields):
    """POST /api/embeddings."""

    prompt: str = ""


def read_embed(fields: dict[str, object]) -> OllamaEmbedBody:
    """Check a body of /api/embed. Raises ApiError naming the field."""
    return read(OllamaEmbedBody, fields, REFUSED_EMBED, IGNORED_EMBED)


def read_embeddings(fields: dict[str, object]) -> OllamaEmbeddingsBody:
    """Check a body of /api/embeddings. Raises ApiError naming the field."""
    return read(OllamaEmbeddingsBody, fields, REFUSED_EMBED, IGNORED_EMBED)
