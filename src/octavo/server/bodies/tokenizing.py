"""TokenizeBody and DetokenizeBody: a text or a conversation to tokenize, and ids to decode.

Owns: their fields. Does not: tokenize.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import FailFast, Field

from octavo.server.api.completions.bodies import ChatBody, read_chat
from octavo.server.bodies.checks import Body, sift, validate
from octavo.server.http.errors import bad_field

MAX_TOKENIZED_CHARACTERS = 1_048_576
MAX_DETOKENIZED = 262_144

_OWN = ("model", "return_token_strs", "add_special_tokens")


class TokenizeBody(Body):
    """POST /tokenize: give `prompt`, or `messages` with a chat completion's other fields."""

    model: str | None = Field(None, description="the served model's name; may be left out")
    prompt: str | None = Field(None, max_length=MAX_TOKENIZED_CHARACTERS)
    add_special_tokens: bool | None = Field(
        None,
        description="put the tokenizer's own tokens around it; left out, around a text only",
    )
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = Field(None, description="the served model's name; may be left out")
    tokens: Annotated[list[int], FailFast()] = Field(max_length=MAX_DETOKENIZED)


def read_tokenize(fields: dict[str, object]) -> tuple[TokenizeBody, ChatBody | None]:
    """Check a body, and the conversation in it, if there is one. Raises ApiError naming the field."""
    has_text, has_chat = (fields.get(name) is not None for name in ("prompt", "messages"))
    if has_text and has_chat:
        raise bad_field("prompt", "prompt and messages are both given; give one of them")
    if not has_text and not has_chat:
        raise bad_field("prompt", "prompt is missing; give a text, or messages", "missing_field")
    own = {name: fields[name] for name in fields if not has_chat or name in _OWN}
    own.pop("messages", None)
    body = validate(TokenizeBody, sift(own, {}, TokenizeBody, ignored={}))
    if not has_chat:
        return body, None
    chat = {name: value for name, value in fields.items() if name not in own and name != "prompt"}
    return body, read_chat({**chat, "add_special_tokens": body.add_special_tokens})


def read_detokenize(fields: dict[str, object]) -> DetokenizeBody:
    """Check a body. Raises ApiError naming the field."""
    return validate(DetokenizeBody, sift(fields, {}, DetokenizeBody, ignored={}))
