"""OllamaChatBody and OllamaGenerateBody: what POST /api/chat and /api/generate take.

Owns: their fields, messages and options. Does not: translate anything.
The names follow Ollama's public API description and the types of its Python package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast, Field

from octavo.server.bodies.chat import MAX_MESSAGES
from octavo.server.bodies.checks import Body, Refused, sift, sift_if_object, validate
from octavo.server.bodies.sampling import Stops
from octavo.server.bodies.served import ServedFields

MAX_TOOL_ID_CHARACTERS = 256
_OF_LOADING = "how the model is loaded is the server's business"

IGNORED_OLLAMA: Mapping[str, str] = {
    "keep_alive": "the model stays loaded while the server runs",
    "truncate": "a conversation that does not fit is refused",
    "shift": "nothing is shifted out of a context",
}
REFUSED_CHAT: Refused = {}
REFUSED_GENERATE: Refused = {
    "suffix": ("",),
    "template": ("",),
    "context": ([],),
    "images": ([],),
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
    "mirostat_tau": "says nothing without mirostat",
    "mirostat_eta": "says nothing without mirostat",
}
_REFUSED_MESSAGE: Refused = {"images": ([],)}
_IGNORED_CALL: Mapping[str, str] = {"index": "calls stand in their order", "type": "all are functions"}


def _no_text_is_nothing(value: object) -> object:
    return None if value == "" else value


class Options(Body):
    """How to sample, in Ollama's names."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: int | None = None
    num_predict: int | None = Field(None, description="-1 or -2: as many as fit")
    stop: Stops = Field([])
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_last_n: int | None = Field(
        None, ge=-1, description="0 turns repeat_penalty off; else penalties look at all of the text"
    )


class Function(Body):
    """What is called, and with what."""

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
    thinking: str | None = None
    tool_calls: list[Call] = Field(default_factory=list)  # a list would be copied for every message
    tool_name: str | None = None
    tool_call_id: str | None = Field(None, min_length=1, max_length=MAX_TOOL_ID_CHARACTERS)


Format = Annotated[
    Literal["json"] | dict[str, Any] | None,
    BeforeValidator(_no_text_is_nothing, json_schema_input_type=Literal["", "json"] | dict[str, Any] | None),
]


class OllamaBody(ServedFields):
    """What both endpoints share."""

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
    system: str | None = None
    raw: bool = Field(False, description="the prompt as it is, without the chat template")


def read_ollama_chat(fields: dict[str, object]) -> OllamaChatBody:
    """Check a chat body. Raises ApiError naming the field."""
    fields = _sifted(fields, REFUSED_CHAT, OllamaChatBody)
    messages = fields.get("messages")
    if isinstance(messages, list):
        messages = messages[: MAX_MESSAGES + 1]
        fields["messages"] = [_sift_message(message, f"messages[{i}].") for i, message in enumerate(messages)]
    return validate(OllamaChatBody, fields)


def read_ollama_generate(fields: dict[str, object]) -> OllamaGenerateBody:
    """Check a generate body. Raises ApiError naming the field."""
    return validate(OllamaGenerateBody, _sifted(fields, REFUSED_GENERATE, OllamaGenerateBody))


def sift_options(options: object) -> object:
    """The options that are honoured; what is no object as it is. Those not known are ignored and told."""
    return sift_if_object(options, {}, Options, "options.", IGNORED_OPTIONS)


def _sifted(fields: dict[str, object], refused: Refused, body: type[OllamaBody]) -> dict[str, object]:
    kept = sift(fields, refused, body, ignored=IGNORED_OLLAMA)
    if "options" in kept:
        kept["options"] = sift_options(kept["options"])
    return kept


def _sift_message(message: object, where: str) -> object:
    if not isinstance(message, dict):
        return message
    kept = sift(message, _REFUSED_MESSAGE, OllamaMessage, where)
    calls = kept.get("tool_calls")
    if isinstance(calls, list):
        kept["tool_calls"] = [_sift_call(call, f"{where}tool_calls[{i}].") for i, call in enumerate(calls)]
    return kept


def _sift_call(call: object, where: str) -> object:
    if not isinstance(call, dict):
        return call
    kept = sift(call, {}, Call, where, _IGNORED_CALL)
    function = kept.get("function")
    if isinstance(function, dict):
        kept["function"] = sift(function, {}, Function, f"{where}function.", _IGNORED_CALL)
    return kept
