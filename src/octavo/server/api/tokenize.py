"""POST /tokenize and /detokenize, GET /tokenizer_info."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from pydantic import FailFast, Field
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.api.completions.bodies import ChatBody, read_chat
from octavo.server.api.embeddings import INLINE_CHARACTERS
from octavo.server.api.fields import Body, read
from octavo.server.context import Context, context_of
from octavo.server.http.auth import KEY
from octavo.server.http.body import json_response, off_loop, read_json
from octavo.server.http.endpoints import Endpoint
from octavo.server.http.errors import bad_field

MAX_TOKENIZED_CHARACTERS = 1_048_576
MAX_DETOKENIZED = 262_144

_OWN = ("model", "return_token_strs", "add_special_tokens")


class TokenizeBody(Body):
    """POST /tokenize: `prompt`, or `messages` with the other fields of a chat completion."""

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


def read_tokenize(fields: dict[str, object], takes_images: bool = False) -> tuple[TokenizeBody, ChatBody | None]:
    """Check a body and, if it has messages, its conversation. Raises ApiError naming the field."""
    has_text, has_chat = (fields.get(name) is not None for name in ("prompt", "messages"))
    if has_text and has_chat:
        raise bad_field("prompt", "prompt and messages are both given; give one of them")
    if not has_text and not has_chat:
        raise bad_field("prompt", "prompt is missing; give a text, or messages", "missing_field")
    own = {name: fields[name] for name in fields if not has_chat or name in _OWN}
    own.pop("messages", None)
    body = read(TokenizeBody, own, {}, {})
    if not has_chat:
        return body, None
    chat = {name: value for name, value in fields.items() if name not in own and name != "prompt"}
    return body, read_chat({**chat, "add_special_tokens": body.add_special_tokens}, takes_images)


def read_detokenize(fields: dict[str, object]) -> DetokenizeBody:
    """Check a body. Raises ApiError naming the field."""
    return read(DetokenizeBody, fields, {}, {})


_OFF_LOOP_IDS = 1024


async def tokenize(request: Request) -> Response:
    """Return the token ids of a text, or of a conversation as the chat template renders it."""
    context = context_of(request)
    body, chat = await read_json(
        request, context.limits, lambda fields: read_tokenize(fields, context.dialect_of(fields).takes_images)
    )
    context = context.for_model(body.model)
    tokenizer, text = context.text.tokenizer, body.prompt or ""
    known = None if chat is None else (await context.prompts.chat(chat)).ids

    def answer() -> tuple[bytes, int]:
        ids = tokenizer.encode(text, body.add_special_tokens is not False) if known is None else known
        strings = [tokenizer.id_to_piece(token_id) for token_id in ids] if body.return_token_strs else None
        shown = {"count": len(ids), "max_model_len": context.max_model_len, "tokens": ids, "token_strs": strings}
        return msgspec.json.encode(shown), len(ids)

    size = len(text) + len(known or ())
    data, num_tokens = answer() if size <= INLINE_CHARACTERS else await off_loop(answer, size)
    context.admission.charge(request.scope[KEY], num_tokens)
    return json_response(data)


async def detokenize(request: Request) -> Response:
    """Return the text of token ids, including special tokens."""
    context = context_of(request)
    body = await read_json(request, context.limits, read_detokenize)
    context = context.for_model(body.model)
    largest = context.text.spec.vocab_size - 1
    wrong = next((token_id for token_id in body.tokens if not 0 <= token_id <= largest), None)
    if wrong is not None:
        raise bad_field("tokens", f"tokens holds {wrong}; this model's token ids are whole numbers from 0 to {largest}")

    def answer() -> bytes:
        return msgspec.json.encode({"prompt": context.text.tokenizer.decode(body.tokens, skip_special_tokens=False)})

    count = len(body.tokens)
    context.admission.charge(request.scope[KEY], count)
    return json_response(answer() if count <= _OFF_LOOP_IDS else await off_loop(answer, count))


async def tokenizer_info(request: Request) -> Response:
    """Describe the tokenizer and the chat template; of several models with `?model=`."""
    return json_response(_info(context_of(request).for_model(request.query_params.get("model") or None)))


def _info(context: Context) -> dict[str, Any]:
    tokenizer, template = context.text.tokenizer, context.text.chat_template
    added = tokenizer.backend.get_added_tokens_decoder()
    return {
        "tokenizer_class": type(tokenizer.backend.model).__name__,
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": context.max_model_len,
        **tokenizer.special_tokens,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_ids": list(tokenizer.eos_token_ids),
        "added_tokens_decoder": {
            str(token_id): {"content": token.content, "special": token.special} for token_id, token in added.items()
        },
        "chat_template": None if template is None else template.source,
    }


_ABOUT_TOKENIZE = (
    "The ids of `prompt`, or of `messages` (with the fields of a chat completion that say how the model is shown "
    "them). With `return_token_strs` the vocabulary's spelling of each."
)
ENDPOINTS = [
    Endpoint("POST", "/tokenize", tokenize, body=TokenizeBody, description=_ABOUT_TOKENIZE),
    Endpoint("POST", "/detokenize", detokenize, body=DetokenizeBody),
    Endpoint("GET", "/tokenizer_info", tokenizer_info),
]
