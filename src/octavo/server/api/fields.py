"""The fields of a body: accepted, refused by name or ignored; and error messages that name the field.

Owns: reading and validating any body; the tables of fields that no body declares; a plain sentence for each kind of
error; a body's part of the API description. Does not: know the fields of a single body.
Invariant: a field is honoured (a body declares it), refused by name (it would change the meaning of the answer),
documented as ignored, or ignored and named in the answer's header (IgnoredFields).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from octavo.server.http.errors import ApiError, bad_field


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A field that changes the meaning of an answer, so it is refused. `harmless` values and null are accepted."""

    means: str
    harmless: tuple[object, ...] = ()


_ADAPTER = "another model's weights"
_FORM = "a form that the answer must have; give response_format or structured_outputs"
_MEDIA = "images are parts of messages; no audio or video is taken, and answers are text"
_STATE = "a conversation kept by the server; send the messages themselves"
UNSUPPORTED: Mapping[str, Unsupported] = {
    "adapter": Unsupported(_ADAPTER),
    "adapters": Unsupported(_ADAPTER, ([],)),
    "lora": Unsupported(_ADAPTER, ([],)),
    "lora_request": Unsupported(_ADAPTER),
    "control_vectors": Unsupported("other weights", ([],)),
    "audio": Unsupported(_MEDIA),
    "image": Unsupported(_MEDIA),
    "images": Unsupported(_MEDIA, ([],)),
    "videos": Unsupported(_MEDIA, ([],)),
    "modalities": Unsupported(_MEDIA, (["text"],)),
    "functions": Unsupported("the old form of tools; give tools", ([],)),
    "function_call": Unsupported("the old form of tool_choice and tool_calls; give those", ("none", "auto")),
    "mcp_servers": Unsupported("tools that the server runs; give function tools", ([],)),
    "format": Unsupported(_FORM, ("", "text", {"type": "text"})),
    "grammar": Unsupported(_FORM, ("",)),
    "json_schema": Unsupported(_FORM),
    "ebnf": Unsupported(_FORM),
    "regex": Unsupported(_FORM),
    "structural_tag": Unsupported(_FORM),
    "messages": Unsupported("a conversation; use /v1/chat/completions"),
    "tools": Unsupported("calls of functions; use /v1/chat/completions", ([],)),
    "chat_template": Unsupported("only the model's own template is rendered; start the server with --chat-template"),
    "template": Unsupported("another chat template", ("",)),
    "suffix": Unsupported("text to write up to", ("",)),
    "prefix": Unsupported("a message to go on with; give continue_final_message", (False,)),
    "partial": Unsupported("a message to go on with; give continue_final_message", (False,)),
    "prompt_embeds": Unsupported("a prompt as vectors; give text or token ids"),
    "logits_processors": Unsupported("code that chooses tokens", ([],)),
    "conversation": Unsupported(_STATE),
    "context_management": Unsupported("what is left out of a conversation; leave it out yourself", ([],)),
    "data_sources": Unsupported("documents to search in; give their text in a message", ([],)),
    "moderation": Unsupported("a check of the answer that is not made here"),
}

# Hints: the values listed here change nothing and are not reported. Other values are ignored and reported.
HINTS: Mapping[str, tuple[object, ...]] = {
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
    "prediction": (),
    "spaces_between_special_tokens": (True,),
    "include_reasoning": (True,),
    "web_search_options": (),
    "prompt_cache_options": (),
    "include_obfuscation": (False,),
    "disable_fallback": (True, False),
    "tfs_z": (1, 1.0),
    "penalize_newline": (True,),
    "speed": ("standard",),
    "inference_geo": (),
    "fallbacks": ([],),
    "fallback_credit_token": (),
    "task_budget": (),
    "defer_loading": (False,),
    "allowed_callers": (["direct"],),
}

_SENT = """
    add_special_tokens allowed_callers cache_prompt client_metadata computer_use custom defer_loading detokenize
    dynatemp_exponent dynatemp_range enable_thinking file_search frequency_penalty guided_decoding_backend id_slot
    image_generation keep_alive kv_transfer_params local_shell logit_bias mcp min_keep
    mirostat
    mirostat_eta mirostat_tau mm_processor_kwargs n_keep n_predict n_probs namespace num_batch num_ctx num_gpu num_gqa
    num_keep num_thread options parallel_tool_calls plugins presence_penalty provider provider_specific_fields
    repeat_last_n repeat_penalty request_id return_progress return_token_ids return_tokens_as_token_ids
    rope_frequency_base rope_frequency_scale route safe_prompt samplers seed shell
    temperature think thinking thinking_blocks thread timings_per_token tool_choice tool_search top_a top_k top_p
    transforms truncate_prompt_tokens type typical use_mlock use_mmap vllm_xargs vocab_only web_search
    web_search_preview xtc_probability xtc_threshold
"""
# Names that known clients send. octavo_ignored_fields_total has a label for each; any other name counts as "other".
KNOWN_NAMES = frozenset(HINTS) | frozenset(_SENT.split())


TOKEN_ID_KEY = r"^(0|[1-9][0-9]{0,9})$"
FUNCTION_NAME = r"^[A-Za-z0-9_-]{1,128}$"  # OpenAI allows 64 characters, Anthropic 128
_PATTERN_REMEDIES: Mapping[object, str] = {
    TOKEN_ID_KEY: 'give token ids as decimal strings, e.g. {"50256": -100}',
    FUNCTION_NAME: "give 1 to 128 of the characters A-Z, a-z, 0-9, _ and -",
}
Details = Mapping[str, Any]  # one of pydantic's errors
_REMEDIES: Mapping[str, Callable[[Details], str]] = {  # type of error -> the remedy
    "string_type": lambda _: "give a string",
    "int_type": lambda _: "give a whole number",
    "int_parsing": lambda _: "give a whole number",
    "int_from_float": lambda _: "give a whole number",
    "int_parsing_size": lambda _: "give a smaller number",
    "float_type": lambda _: "give a number",
    "float_parsing": lambda _: "give a number",
    "finite_number": lambda _: "give a finite number",
    "bool_type": lambda _: "give true or false",
    "bool_parsing": lambda _: "give true or false",
    "list_type": lambda _: "give a list",
    "dict_type": lambda _: "give an object",
    "model_type": lambda _: "give an object",
    "model_attributes_type": lambda _: "give an object",
    "literal_error": lambda each: f"give {each['ctx']['expected']}",
    "enum": lambda each: f"give {each['ctx']['expected']}",
    "none_required": lambda _: "leave it out",
    "greater_than": lambda each: f"give more than {each['ctx']['gt']:g}",
    "greater_than_equal": lambda each: f"give at least {each['ctx']['ge']:g}",
    "less_than": lambda each: f"give less than {each['ctx']['lt']:g}",
    "less_than_equal": lambda each: f"give at most {each['ctx']['le']:g}",
    "string_pattern_mismatch": lambda each: _PATTERN_REMEDIES.get(each["ctx"]["pattern"], each["msg"]),
    "extra_forbidden": lambda _: "leave it out",
}
_SIZES = {"too_short": "items", "too_long": "items", "string_too_short": "characters", "string_too_long": "characters"}


def refusal_of(error: ValidationError, fields: Mapping[str, object], where: str) -> ApiError:
    """Return the refusal of a body for its first faulty field. `where` precedes the field's name."""
    found = sorted(error.errors(include_url=False), key=lambda each: each["type"] == "extra_forbidden")
    first, *others = found
    is_missing = first["type"] == "missing"
    place = place_of(first["loc"], fields, is_missing)
    param = where + place if place else where.removesuffix(".")
    if is_missing:
        return bad_field(param, f"{param} is missing", "missing_field")
    if first["type"] in _SIZES:
        return bad_field(param, _of_size(param, first))
    same = [first, *(other for other in others if place_of(other["loc"], fields, False) == place)]
    remedies = list(dict.fromkeys(_remedy(each) for each in same if each["type"] not in _SIZES))
    remedy = " or ".join([remedies[0], *(remedy.removeprefix("give ") for remedy in remedies[1:])])
    return bad_field(param, f"{param} is {shown_value(first['input'])}; {remedy}")


def bad_type(param: str, kind: object, known: str) -> ApiError:
    """Return the refusal of an object whose type is missing, or is none of those that `known` lists."""
    if kind is None:
        return bad_field(param, f"{param} is missing; give {known}", "missing_field")
    return bad_field(param, f"{param} is {shown_value(kind)}; give {known}", "unsupported_field")


def _remedy(each: Details) -> str:
    remedy = _REMEDIES.get(each["type"])
    return str(each["msg"]).removeprefix("Value error, ") if remedy is None else remedy(each)


def _of_size(param: str, each: Details) -> str:
    """Return the message for a text or list that is too short or too long."""
    size, unit = len(each["input"]), _SIZES[each["type"]]
    least, most = each["ctx"].get("min_length"), each["ctx"].get("max_length")
    if size == 0:
        return f"{param} is empty; give at least {f'{least} {unit}' if least > 1 else f'one {unit[:-1]}'}"
    return f"{param} has {size} {unit}; give at {f'most {most}' if least is None else f'least {least}'}"


def place_of(loc: tuple[int | str, ...], fields: Mapping[str, object], is_missing: bool) -> str:
    """Return a field's path as the client wrote it, without the names of a union's members."""
    param = ""
    node: object = fields
    for index, part in enumerate(loc):
        if isinstance(part, int):
            param += f"[{part}]"
            node = node[part] if isinstance(node, list) and part < len(node) else None
        elif (isinstance(node, dict) and part in node) or (is_missing and index == len(loc) - 1):
            param += f".{part}" if param else part
            node = node.get(part) if isinstance(node, dict) else None
    return param or (str(loc[0]) if loc else "")


_CONSTANTS: Mapping[object, str] = {None: "null", True: "true", False: "false"}


def shown_value(value: object) -> str:
    """Return a value as short text for a message, as JSON spells it, without the contents of lists and objects."""
    if value is None or isinstance(value, bool):
        return _CONSTANTS[value]
    if isinstance(value, (dict, list)):
        kind = "object" if isinstance(value, dict) else "list"
        return f"{'an' if kind == 'object' else 'a'} {kind} of {len(value)}" if value else f"an empty {kind}"
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


HEADER = "X-Octavo-Ignored"
IGNORED_FIELDS = "octavo.ignored_fields"  # key in the request's scope
MAX_PATHS = 16
MAX_PATH_CHARACTERS = 64
OTHER = "other"  # the label for names in no table
_INDEX = re.compile(r"\[\d+\]")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.\[\]-]")
_NAME = re.compile(r"[A-Za-z0-9_]+")


@dataclass(slots=True)
class IgnoredFields:
    """The ignored fields of one request. With `is_strict` (--strict-fields) they are refused instead."""

    is_strict: bool = False
    paths: dict[str, None] = field(default_factory=dict)  # in the order of their first use

    def add(self, path: str) -> None:
        """Add a field. After MAX_PATHS fields, add only "..." for all others."""
        path = _UNSAFE.sub("_", _INDEX.sub("[]", path[: 4 * MAX_PATH_CHARACTERS]))[:MAX_PATH_CHARACTERS]
        self.paths[path if path in self.paths or len(self.paths) < MAX_PATHS else "..."] = None

    @property
    def labels(self) -> list[str]:
        """The fields' names as metric labels: known names, or OTHER."""
        names = (_NAME.findall(path) for path in self.paths)
        return [found[-1] if found and found[-1] in KNOWN_NAMES else OTHER for found in names]


_CURRENT: ContextVar[IgnoredFields | None] = ContextVar("octavo_ignored_fields", default=None)


@contextmanager
def collect_ignored(ignored: IgnoredFields) -> Iterator[None]:
    """Make `ignore` add fields to `ignored` while the block runs, in this context."""
    token = _CURRENT.set(ignored)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def ignore(path: str, is_known: bool = False) -> None:
    """Ignore a field. Raises ApiError under --strict-fields and outside of `collect_ignored`.

    `is_known`: the field belongs to the API, but has no effect here.
    """
    current = _CURRENT.get()
    if current is not None and not current.is_strict:
        current.add(path)
    elif is_known:
        raise bad_field(path, f"{path}: this server does not support it; leave it out", "unsupported_field")
    else:
        raise bad_field(path, f"{path} is not a field that this endpoint knows", "unknown_field")


def are_unknown_refused() -> bool:
    """Return True if `ignore` would raise."""
    current = _CURRENT.get()
    return current is None or current.is_strict


def _listed(value: object) -> object:
    if not isinstance(value, str | list):
        raise ValueError("give a string or a list of strings")
    return [value] if isinstance(value, str) else value


TEXT_OR_TEXTS = BeforeValidator(_listed, json_schema_input_type=str | list[str])  # of a list of texts
Refused = Mapping[str, tuple[object, ...]]  # field -> accepted values without an effect; null is always accepted
IGNORED: Mapping[str, str] = {
    "user": "kept for the caller's own records; nothing here depends on it",
    "metadata": "nothing is stored, so there is nothing to label",
    "store": "nothing is stored",
    "safety_identifier": "no such checks are made here",
    "prompt_cache_key": "prefixes are found by their content",
    "prompt_cache_retention": "the prefix cache evicts by use",
}


class Body(BaseModel):
    """The base of all bodies and their parts. It allows no unknown fields and converts no types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


B = TypeVar("B", bound=BaseModel)
_MAX_PASSES = 8  # passes of validation; each pass drops the unknown fields that the previous one found


def read(
    body: type[B],
    fields: Mapping[str, object],
    refused: Refused,
    ignored: Mapping[str, str] | None = None,
    where: str = "",
) -> B:
    """Check a body or a part of a body with `reject_unsupported` and `validate`. Raises ApiError naming the field."""
    return validate(body, reject_unsupported(fields, refused, body, where, ignored), where)


def reject_unsupported_in(
    value: object,
    refused: Refused,
    body: type[BaseModel],
    where: str,
    ignored: Mapping[str, str] | None = None,
) -> object:
    """Return `reject_unsupported` of an object; return any other value unchanged, for validation to refuse."""
    return reject_unsupported(value, refused, body, where, ignored) if isinstance(value, dict) else value


def reject_unsupported(
    fields: Mapping[str, object],
    refused: Refused,
    body: type[BaseModel],
    where: str = "",
    ignored: Mapping[str, str] | None = None,
) -> dict[str, object]:
    """Return the fields that `body` declares and that are not null; refuse or ignore the others.

    `where` is the prefix of field names in messages. If `where` is set, only fields in `ignored` are ignored silently.
    `refused` are refused fields of this body, in addition to UNSUPPORTED. Raises ApiError.
    """
    if ignored is None:
        ignored = {} if where else IGNORED
    known = _known(body)
    kept: dict[str, object] = {}
    for name, value in fields.items():
        if name in known:
            if value is not None:
                kept[name] = value
        elif name not in ignored:
            _leave_out(name, value, refused, where + name[:64])
    return kept


def _leave_out(name: str, value: object, refused: Refused, shown: str) -> None:
    """Ignore a field that the body does not declare. Raises ApiError if the field changes the meaning of an answer."""
    unsupported = UNSUPPORTED.get(name)
    if name in refused:
        _refuse_unless(value, refused[name], shown, "")
    elif unsupported is not None:
        _refuse_unless(value, unsupported.harmless, shown, f" ({unsupported.means})")
    elif name in HINTS:
        if value is not None and not _is_one_of(value, HINTS[name]):
            ignore(shown, is_known=True)
    elif value is not None or are_unknown_refused():
        ignore(shown)


def _refuse_unless(value: object, harmless: tuple[object, ...], shown: str, why: str) -> None:
    if value is not None and not _is_one_of(value, harmless):
        raise bad_field(shown, f"{shown}: this server does not support it{why}; leave it out", "unsupported_field")


def _is_one_of(value: object, values: tuple[object, ...]) -> bool:
    return any(type(value) is type(each) and value == each for each in values)


@cache
def _known(body: type[BaseModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in body.model_fields.items())


def validate(body: type[B], fields: Mapping[str, object], where: str = "") -> B:
    """Check types and lengths. Raises ApiError naming the field; `where` precedes the name.

    Unknown fields of parts that `reject_unsupported` has not checked are ignored and removed from `fields`.
    """
    for _ in range(_MAX_PASSES):
        try:
            return body.model_validate(fields)
        except ValidationError as error:
            if any(each["type"] != "extra_forbidden" for each in error.errors(include_url=False)):
                raise refusal_of(error, fields, where) from None
            extra = [each["loc"] for each in error.errors(include_url=False)]
        for loc in extra:
            _drop(loc, fields, where)
    raise bad_field(where.removesuffix(".") or None, "the body has too many unknown fields; leave them out")


def _drop(loc: tuple[int | str, ...], fields: Any, where: str) -> None:
    shown = where + place_of(loc, fields, False)
    *path, name = loc
    node = fields
    for part in path:
        is_there = part in node if isinstance(node, dict) else isinstance(part, int)
        node = node[part] if is_there else node  # the part is the name of a union's member
    _leave_out(str(name), node.pop(name), {}, shown)


def field_notes(refused: Refused, ignored_fields: Mapping[str, str] = IGNORED) -> str:
    """Return the text about ignored and refused fields for the API description."""
    ignored = "; ".join(f"`{name}` ({reason})" for name, reason in ignored_fields.items())
    names = ", ".join(f"`{name}`" for name in (*refused, *UNSUPPORTED))
    return (
        f"Taken and ignored: {ignored}.\n\nNot supported, refused unless left at their neutral value: {names}.\n\n"
        f"Any other field is ignored, and named in the answer's header `{HEADER}`; --strict-fields refuses it."
    )


def inline_schema(body: type[BaseModel]) -> dict[str, object]:
    """Return the body's JSON schema for the API description: without references, and with other fields allowed."""
    schema = body.model_json_schema()
    definitions = schema.pop("$defs", {})

    def placed(node: object) -> object:
        if isinstance(node, list):
            return [placed(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return placed(definitions[node["$ref"].rsplit("/", 1)[-1]])
        return {key: placed(value) for key, value in node.items() if (key, value) != ("additionalProperties", False)}

    made = placed(schema)
    assert isinstance(made, dict)
    return made
