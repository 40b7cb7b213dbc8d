"""The bodies of the endpoints, as clients write them.

Owns: each field's name and type, and the tables of fields that are refused or ignored.
Does not: check ranges of sampling fields (SamplingParams does) or know the model.
Invariant: every field is honoured (declared in a body), refused by name, or documented as ignored; nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError, WithJsonSchema

from octavo.server.faults import ApiError, bad_field

MAX_MESSAGES = 2048
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_BIASES = 1024
MAX_STOP_IDS = 1024
MAX_BAD_WORDS = 128
MAX_BREAKERS = 64
MAX_WORD_CHARACTERS = 256
MAX_ALLOWED_IDS = 65_536
MAX_TIMEOUT_S = 86_400.0

IGNORED: Mapping[str, str] = {
    "user": "kept for the caller's own records; nothing here depends on it",
    "metadata": "nothing is stored, so there is nothing to label",
    "store": "nothing is stored",
    "safety_identifier": "no such checks are made here",
    "prompt_cache_key": "prefixes are found by their content",
    "prompt_cache_retention": "the prefix cache evicts by use",
    "parallel_tool_calls": "says nothing while tools are refused",
}

# Refused unless the value is one of these, with which it asks for nothing. (null always counts as left out.)
_REFUSED_BOTH: Mapping[str, tuple[object, ...]] = {
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
}
REFUSED_CHAT: Mapping[str, tuple[object, ...]] = {
    **_REFUSED_BOTH,
    "echo": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "web_search_options": (),
    "moderation": (),
    "service_tier": ("auto", "default"),
    "prompt_cache_options": (),
}
REFUSED_COMPLETION: Mapping[str, tuple[object, ...]] = {**_REFUSED_BOTH, "suffix": ("",)}
_REFUSED_MESSAGE: Mapping[str, tuple[object, ...]] = {
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "reasoning": (),
    "reasoning_content": (),
}
_REFUSED_STREAM_OPTIONS: Mapping[str, tuple[object, ...]] = {"include_obfuscation": (False,)}


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _parts(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _prompts(value: object) -> list[str | list[int]]:
    """Normalise the four shapes of `prompt` to a list of texts or id lists."""
    message = "give a string, a list of strings, a list of token ids (0 or more) or a list of lists of token ids"
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError(message)
    if not value:
        raise ValueError("it is empty; " + message)
    if all(map(_is_id, value)):
        return [value]
    for item in value:
        if not isinstance(item, str) and not (isinstance(item, list) and all(map(_is_id, item))):
            raise ValueError(message)
    return value


def _early_stopping(value: object) -> object:
    if value is not None and not isinstance(value, bool) and value != "never":
        raise ValueError('give true, false or "never"')
    return value


Stops = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]],
    Field(max_length=MAX_STOPS),
    BeforeValidator(_listed, json_schema_input_type=str | list[str]),
]
Word = Annotated[str, Field(min_length=1, max_length=MAX_WORD_CHARACTERS)]
Prompts = Annotated[
    list[Any],  # texts and lists of ids: the validator below has looked at them
    BeforeValidator(_prompts),
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


EarlyStopping = Annotated[
    object,
    BeforeValidator(_early_stopping),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"const": "never"}, {"type": "null"}]}),
]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TextPart(_Body):
    """One text part of a message."""

    type: Literal["text"]
    text: str


class Message(_Body):
    """One message of a conversation. `developer` is shown to the model as `system`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], FailFast(), BeforeValidator(_parts, json_schema_input_type=str | list[TextPart])]
    name: str | None = None

    @property
    def text(self) -> str:
        """The text parts, one below the other."""
        return "\n".join(part.text for part in self.content)


class StreamOptions(_Body):
    """What a stream holds besides the text."""

    include_usage: bool = False


class SamplingBody(_Body):
    """The fields that chat and text completions share. A field left out takes the model's own default."""

    model: str | None = Field(None, description="the served model's name; may be left out")
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    dry_multiplier: float | None = Field(None, description="DRY: strength of the penalty on repetitions; 0 = off")
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_range: int | None = Field(None, description="DRY: how many of the last tokens are looked at; 0 = all")
    dry_sequence_breakers: list[Word] | None = Field(
        None, max_length=MAX_BREAKERS, description="DRY: texts that no repetition reaches across"
    )
    bad_words: list[Word] = Field([], max_length=MAX_BAD_WORDS, description="texts that may not be said")
    allowed_token_ids: Annotated[list[int], FailFast()] = Field(
        [], max_length=MAX_ALLOWED_IDS, description="the only ids that may be sampled; empty = all"
    )
    logit_bias: dict[Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")], float] = Field({}, max_length=MAX_BIASES)
    seed: int | None = None
    n: int | None = Field(None, description="choices to return")
    use_beam_search: bool = Field(False, description="beam search of n beams, or of best_of where that is given")
    length_penalty: float | None = Field(None, description="of beam search: scores are divided by length ** this")
    early_stopping: EarlyStopping = Field(None, description="of beam search, as in transformers")
    stop: Stops = []
    stop_token_ids: list[int] = Field([], max_length=MAX_STOP_IDS)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: int | None = Field(
        None,
        ge=-(2**31),
        lt=2**31,
        description="smaller is more urgent, 0 unless the key says otherwise; for the scheduling policy (fcfs and fifo "
        "do not look at it), and what is above 0 is refused first under load",
    )
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    timeout: float | None = Field(None, gt=0, le=MAX_TIMEOUT_S, description="seconds until the request is given up")
    queue_timeout: float | None = Field(
        None,
        gt=0,
        le=MAX_TIMEOUT_S,
        description="seconds until the request is given up if it has not started; the server may have a shorter bound",
    )
    ttft_objective: float | None = Field(
        None, gt=0, le=MAX_TIMEOUT_S, description="seconds to the first token that the deadline policy aims at"
    )
    tpot_objective: float | None = Field(
        None, gt=0, le=MAX_TIMEOUT_S, description="seconds for each later token that the deadline policy aims at"
    )


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], FailFast()] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, object] = {}
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: Prompts
    best_of: int | None = Field(None, description="choices to make, of which the n likeliest per token are returned")
    logprobs: int | None = None
    echo: bool = False


B = TypeVar("B", bound=BaseModel)


def read_chat(fields: dict[str, object]) -> ChatBody:
    """Check a chat body. Raises ApiError naming the field."""
    fields = _sift(fields, REFUSED_CHAT, ChatBody)
    messages = fields.get("messages")
    if isinstance(messages, list):
        messages = messages[: MAX_MESSAGES + 1]
        fields["messages"] = [
            _sift_if_object(m, _REFUSED_MESSAGE, Message, f"messages[{i}].") for i, m in enumerate(messages)
        ]
    return _validate(ChatBody, fields)


def read_completion(fields: dict[str, object]) -> CompletionBody:
    """Check a completion body. Raises ApiError naming the field."""
    return _validate(CompletionBody, _sift(fields, REFUSED_COMPLETION, CompletionBody))


def _sift_if_object(
    value: object, refused: Mapping[str, tuple[object, ...]], body: type[BaseModel], where: str
) -> object:
    return _sift(value, refused, body, where) if isinstance(value, dict) else value


def _sift(
    fields: dict[str, object], refused: Mapping[str, tuple[object, ...]], body: type[BaseModel], where: str = ""
) -> dict[str, object]:
    """Take out ignored fields, nulls and refused fields that ask for nothing; refuse the others by name."""
    kept: dict[str, object] = {}
    for name, value in fields.items():
        if name in body.model_fields:
            if value is not None:
                kept[name] = value
        elif name in refused:
            if value is not None and not any(
                type(value) is type(neutral) and value == neutral for neutral in refused[name]
            ):
                message = f"{where}{name}: this server does not support it yet; leave it out"
                raise bad_field(where + name, message, "unsupported_field")
        elif where or name not in IGNORED:
            raise bad_field(
                where + name[:64], f"{where}{name[:64]} is not a field that this endpoint knows", "unknown_field"
            )
    options = kept.get("stream_options")
    if not where and isinstance(options, dict):
        kept["stream_options"] = _sift(options, _REFUSED_STREAM_OPTIONS, StreamOptions, "stream_options.")
    return kept


def _validate(body: type[B], fields: dict[str, object]) -> B:
    try:
        return body.model_validate(fields)
    except ValidationError as error:
        raise _refusal(error) from None


def _refusal(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False)[0]
    param = ""
    for part in first["loc"]:
        if part != "[key]":
            param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else part
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return bad_field(param, f"{param} is missing", "missing_field")
    return bad_field(param, f"{param} is {_shown(first['input'])}; {message}")


def _shown(value: object) -> str:
    shown = repr(value) if not isinstance(value, (dict, list)) else f"a {type(value).__name__} of {len(value)}"
    return shown if len(shown) <= 80 else shown[:77] + "..."


def field_notes(refused: Mapping[str, object]) -> str:
    """What the API description says of fields that do nothing here."""
    ignored = "; ".join(f"`{name}` ({reason})" for name, reason in IGNORED.items())
    names = ", ".join(f"`{name}`" for name in refused)
    return f"Taken and ignored: {ignored}.\n\nNot supported yet, refused unless left at their neutral value: {names}."


def inline_schema(body: type[BaseModel]) -> dict[str, object]:
    """The body's JSON schema with its definitions put in place, for the API description."""
    schema = body.model_json_schema()
    definitions = schema.pop("$defs", {})

    def placed(node: object) -> object:
        if isinstance(node, list):
            return [placed(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return placed(definitions[node["$ref"].rsplit("/", 1)[-1]])
        return {key: placed(value) for key, value in node.items()}

    return {str(key): placed(value) for key, value in schema.items()}
