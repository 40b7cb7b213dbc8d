"""POST /api/embed and /api/embeddings: Ollama's embeddings (docs/apis.md)."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.api.ollama.bodies import model_of
from octavo.server.bodies.checks import field_notes
from octavo.server.bodies.ollama_embed import (
    IGNORED_EMBED,
    REFUSED_EMBED,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    read_embed,
    read_embeddings,
)
from octavo.server.context import context_of
from octavo.server.embedding import Embedded, embed, shortened, worked
from octavo.server.encoding import Json
from octavo.server.http.body import read_json
from octavo.server.http.endpoints import Endpoint, Limit
from octavo.server.http.errors import bad_field
from octavo.server.http.middleware import ARRIVAL
from octavo.server.inputs import Inputs


async def embed_texts(request: Request) -> Response:
    """Return a vector for each text, scaled to length 1."""
    context = context_of(request)
    body = await read_json(request, context.limits, read_embed)
    model = context.check_model(model_of(body))
    size = context.text.spec.hidden_size
    if body.dimensions is not None and body.dimensions > size:
        raise bad_field("dimensions", f"dimensions is {body.dimensions}; this model's vectors have {size}")
    if not body.input:  # asks to load the model, which is loaded already
        return Response(msgspec.json.encode({"model": model, "embeddings": []}), media_type="application/json")
    params = ["input"] if len(body.input) == 1 else [f"input[{index}]" for index in range(len(body.input))]
    keep = context.max_model_len if body.truncate else None
    found = await embed(request, "embed", body, Inputs(body.input, params, keep=keep, keeps_start=True))
    total_ns = round((time.monotonic() - request.scope[ARRIVAL]) * 1e9)

    def answer() -> Json:
        length = body.dimensions or size
        vectors = [vector if length == size else shortened(vector, length) for vector in found.vectors]
        return {
            "model": model,
            "embeddings": [vector.tolist() for vector in vectors],
            "total_duration": total_ns,
            "load_duration": 0,
            "prompt_eval_count": sum(found.num_tokens),
        }

    return await _respond(answer, found)


async def embed_prompt(request: Request) -> Response:
    """Return the vector of one text."""
    context = context_of(request)
    body = await read_json(request, context.limits, read_embeddings)
    context.check_model(model_of(body))
    if not body.prompt:
        return Response(b'{"embedding":[]}', media_type="application/json")
    inputs = Inputs([body.prompt], ["prompt"], keep=context.max_model_len, keeps_start=True)
    found = await embed(request, "embed", body, inputs)
    return await _respond(lambda: {"embedding": found.vectors[0].tolist()}, found)


async def _respond(answer: Callable[[], Json], found: Embedded) -> Response:
    content = await worked(lambda: msgspec.json.encode(answer()), sum(map(len, found.vectors)))
    return Response(content, media_type="application/json")


_NOTES = field_notes(REFUSED_EMBED, IGNORED_EMBED)
ENDPOINTS = [
    Endpoint(
        "POST",
        "/api/embed",
        embed_texts,
        limit=Limit.QUEUE,
        body=OllamaEmbedBody,
        description=f"{embed_texts.__doc__}\n\n{_NOTES}",
    ),
    Endpoint(
        "POST",
        "/api/embeddings",
        embed_prompt,
        limit=Limit.QUEUE,
        body=OllamaEmbeddingsBody,
        description=f"{embed_prompt.__doc__}\n\n{_NOTES}",
    ),
]
