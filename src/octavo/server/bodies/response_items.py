"""Items of a Responses conversation, as clients write them and as they are kept.

Owns: checking an item and giving it its one full form, the form in which it is listed and answered.
Does not: look items up, or say what a model sees of them (responses.messages does).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import BaseModel, Field

from octavo.server.bodies.checks import Body, Refused, sift, validate
from octavo.server.faults import ApiError, bad_field

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
_TEXTS = {
    "user": ("input_text",),
    "system": ("input_text",),
    "developer": ("input_text",),
    "assistant": ("output_text", "input_text"),
}


class _Text(Body):
    type: str
    text: str


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
}


def read_items(value: object) -> list[Item]:
    """Check `input`: a text or a list of items. Raises ApiError naming the field.

    Items come in their full form, without an id where the client gave none.
    """
    if isinstance(value, str):
        return [_message("user", [{"type": "input_text", "text": value}])]
    if not isinstance(value, list):
        raise bad_field("input", f"input is a {type(value).__name__}; give a string or a list of items")
    if not 1 <= len(value) <= MAX_INPUT_ITEMS:
        raise bad_field("input", f"input has {len(value)} items; give 1 to {MAX_INPUT_ITEMS}")
    return [_item(item, f"input[{index}]") for index, item in enumerate(value)]


def _item(value: object, where: str) -> Item:
    if not isinstance(value, dict):
        raise bad_field(where, f"{where} is a {type(value).__name__}; give an object")
    kind = value.get("type")
    if kind is None:
        kind = "message" if "role" in value else "item_reference" if set(value) <= {"id", "type"} else None
    if not isinstance(kind, str) or kind not in _KINDS:
        message = f"{where}.type is {str(kind)[:64]!r}; this server takes {', '.join(_KINDS)}"
        raise bad_field(f"{where}.type", message, "unsupported_field")
    body, refused = _KINDS[kind]
    item = checked(body, value, refused, where)
    return _full(item, where)


def checked(body: type[B], value: Mapping[str, object], refused: Refused, where: str) -> B:
    """Check one object of the body, whose errors name where it stands."""
    fields = sift(value, refused, body, f"{where}.", _IGNORED)
    try:
        return validate(body, fields)
    except ApiError as error:
        raise bad_field(f"{where}.{error.param}", f"{where}.{error.message}", error.code) from None


def _full(item: Body, where: str) -> Item:
    if isinstance(item, _Message):
        return _message(item.role, _contents(item.content, _TEXTS[item.role], f"{where}.content"), item.id)
    if isinstance(item, _Call):
        _check_arguments(item.arguments, f"{where}.arguments")
        made: Item = {"type": "function_call", "status": "completed", "name": item.name}
        made |= {"call_id": item.call_id, "arguments": item.arguments}
    elif isinstance(item, _CallOutput):
        output: object = item.output
        if isinstance(output, list):
            output = _contents(output, ("input_text",), f"{where}.output")
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
    """The parts of a message or of a call's output; a text is one part."""
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
            raise bad_field(at, f"{at} is a {type(part).__name__}; give an object")
        kind = part.get("type")
        if has_refusals and kind == "refusal":
            found.append({"type": "refusal", "refusal": checked(_Refusal, part, {}, at).refusal})
            continue
        if kind not in kinds:
            message = f"{at}.type is {str(kind)[:64]!r}; this server takes {' or '.join(kinds)} here"
            raise bad_field(f"{at}.type", message, "unsupported_field")
        found.append({"type": kind, "text": checked(_Text, part, {}, at).text})
    return found
