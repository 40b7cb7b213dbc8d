"""POST /tokenize and /detokenize, GET /tokenizer_info.

Owns: the answers with ids, texts and the tokenizer's properties. Does not: tokenize, or call the engine.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.bodies.tokenizing import DetokenizeBody, TokenizeBody, read_detokenize, read_tokenize
from octavo.server.context import Context, context_of
from octavo.server.http.auth import KEY
from octavo.server.http.body import off_loop, read_json
from octavo.server.http.endpoints import Endpoint
from octavo.server.http.errors import bad_field
from octavo.server.inputs import HERE_CHARS

_OFF_LOOP_IDS = 1024


async def tokenize(request: Request) -> Response:
    """Return the ids of a text, or of a conversation as the template renders it."""
    context = context_of(request)
    body, chat = await read_json(request, context.limits, read_tokenize)
    context.check_model(body.model)
    tokenizer, text = context.text.tokenizer, body.prompt or ""
    known = None if chat is None else await context.prompts.chat(chat)

    def answer() -> tuple[bytes, int]:
        ids = tokenizer.encode(text, body.add_special_tokens is not False) if known is None else known
        strings = [tokenizer.id_to_piece(token_id) for token_id in ids] if body.return_token_strs else None
        shown = {"count": len(ids), "max_model_len": context.max_model_len, "tokens": ids, "token_strs": strings}
        return msgspec.json.encode(shown), len(ids)

    size = len(text) + len(known or ())
    data, num_tokens = answer() if size <= HERE_CHARS else await off_loop(answer, size)
    context.admission.charge(request.scope[KEY], num_tokens)
    return Response(data, media_type="application/json")


async def detokenize(request: Request) -> Response:
    """Return the text of ids, special tokens included."""
    context = context_of(request)
    body = await read_json(request, context.limits, read_detokenize)
    context.check_model(body.model)
    largest = context.text.spec.vocab_size - 1
    wrong = next((token_id for token_id in body.tokens if not 0 <= token_id <= largest), None)
    if wrong is not None:
        raise bad_field("tokens", f"tokens holds {wrong}; this model's token ids are whole numbers from 0 to {largest}")

    def answer() -> bytes:
        return msgspec.json.encode({"prompt": context.text.tokenizer.decode(body.tokens, skip_special_tokens=False)})

    count = len(body.tokens)
    context.admission.charge(request.scope[KEY], count)
    return Response(
        answer() if count <= _OFF_LOOP_IDS else await off_loop(answer, count), media_type="application/json"
    )


async def tokenizer_info(request: Request) -> Response:
    """Describe the tokenizer and the chat template."""
    return Response(msgspec.json.encode(_info(context_of(request))), media_type="application/json")


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
