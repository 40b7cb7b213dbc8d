"""POST /v1/embeddings, /score, /v1/score, /rerank, /v1/rerank and /v2/rerank.

Owns: the answers with vectors, scores and ranks. Does not: compute vectors (server.embedding does).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.bodies.checks import field_notes
from octavo.server.bodies.embedding import (
    IGNORED_HERE,
    REFUSED_EMBEDDING,
    EmbeddingBody,
    PooledFields,
    read_embedding,
)
from octavo.server.bodies.scoring import (
    REFUSED_RERANK,
    REFUSED_SCORE,
    RerankBody,
    ScoreBody,
    read_rerank,
    read_score,
)
from octavo.server.context import Context, context_of
from octavo.server.embedding import Embedded, Vector, embed, packed, shortened, similarity, worked
from octavo.server.http.body import read_json
from octavo.server.http.endpoints import Endpoint, Limit
from octavo.server.http.errors import bad_field
from octavo.server.inputs import Inputs

Json = dict[str, Any]
_V2 = "/v2/rerank"
_RETRY_NOTE = "Nothing is drawn at random and nothing kept: a header `Idempotency-Key` has no effect."


async def embeddings(request: Request) -> Response:
    """Return a vector for each text."""
    context = context_of(request)
    body = await read_json(request, context.limits, read_embedding)
    model = context.check_model(body.model)
    size = context.text.spec.hidden_size
    if body.dimensions is not None and body.dimensions > size:
        raise bad_field("dimensions", f"dimensions is {body.dimensions}; this model's vectors have {size}")
    params = ["input"] if len(body.input) == 1 else [f"input[{index}]" for index in range(len(body.input))]
    found = await embed(request, "embd", body, _inputs(context, body, body.input, params))

    def answer() -> bytes:
        vectors = found.vectors
        if body.dimensions is not None and body.dimensions < size:
            vectors = [shortened(vector, body.dimensions) for vector in vectors]
        is_packed = body.encoding_format == "base64"
        data = [
            {"object": "embedding", "index": index, "embedding": packed(vector) if is_packed else vector.tolist()}
            for index, vector in enumerate(vectors)
        ]
        head = {"id": found.name, "object": "list", "created": int(time.time()), "model": model}
        return msgspec.json.encode({**head, "data": data, "usage": _usage(found)})

    return await _respond(answer, found)


async def score(request: Request) -> Response:
    """Compare texts: one with several, or each with its counterpart."""
    context = context_of(request)
    body = await read_json(request, context.limits, read_score)
    model = context.check_model(body.model)
    params = [*_named("text_1", body.text_1), *_named("text_2", body.text_2)]
    found = await embed(request, "score", body, _inputs(context, body, [*body.text_1, *body.text_2], params))
    firsts, seconds = found.vectors[: len(body.text_1)], found.vectors[len(body.text_1) :]

    def answer() -> bytes:
        data = [
            {"index": index, "object": "score", "score": similarity(firsts[one], seconds[other])}
            for index, (one, other) in enumerate(body.pairs)
        ]
        head = {"id": found.name, "object": "list", "created": int(time.time()), "model": model}
        return msgspec.json.encode({**head, "data": data, "usage": _usage(found)})

    return await _respond(answer, found)


async def rerank(request: Request) -> Response:
    """Order documents by their similarity to a query, the most similar first."""
    context = context_of(request)
    body = await read_json(request, context.limits, read_rerank)
    model = context.check_model(body.model)
    params = ["query", *_named("documents", body.documents, is_list=True)]
    found = await embed(request, "rerank", body, _inputs(context, body, [body.query, *body.documents], params))
    has_documents = request.scope["path"] != _V2 if body.return_documents is None else body.return_documents

    def answer() -> bytes:
        query, *vectors = found.vectors
        results = [(similarity(query, vector), index) for index, vector in enumerate(vectors)]
        results.sort(key=lambda result: (-result[0], result[1]))
        shown = [_result(value, index, body if has_documents else None) for value, index in results]
        head = {"id": found.name, "model": model, "usage": _usage(found)}
        return msgspec.json.encode({**head, "results": shown[: body.top_n or None]})

    return await _respond(answer, found)


def _result(value: float, index: int, body: RerankBody | None) -> Json:
    result: Json = {"index": index, "relevance_score": value}
    return result if body is None else {**result, "document": {"text": body.documents[index]}}


async def _respond(answer: Callable[[], bytes], found: Embedded) -> Response:
    vectors: Sequence[Vector] = found.vectors
    return Response(await worked(answer, sum(map(len, vectors))), media_type="application/json")


def _usage(found: Embedded) -> Json:
    total = sum(found.num_tokens)
    return {
        "prompt_tokens": total,
        "total_tokens": total,
        "completion_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": found.num_cached},
    }


def _named(param: str, texts: Sequence[str], is_list: bool = False) -> list[str]:
    if len(texts) == 1 and not is_list:
        return [param]
    return [f"{param}[{index}]" for index in range(len(texts))]


def _inputs(context: Context, body: PooledFields, texts: Sequence[str | list[int]], params: Sequence[str]) -> Inputs:
    keep = context.max_model_len if body.truncate_prompt_tokens == -1 else body.truncate_prompt_tokens
    if keep == 0:
        raise bad_field("truncate_prompt_tokens", "truncate_prompt_tokens is 0; give at least 1, or -1")
    keeps_start = isinstance(body, RerankBody) and body.max_tokens_per_doc is not None
    if isinstance(body, RerankBody) and keeps_start:
        keep = body.max_tokens_per_doc
    return Inputs(texts, params, body.add_special_tokens, keep, keeps_start)


def _description(first: str, refused: Sequence[str]) -> str:
    return f"{first}\n\n{_RETRY_NOTE}\n\n{field_notes(dict.fromkeys(refused, ()), IGNORED_HERE)}"


_METHOD = "A vector is the decoder's state at a text's last token, after the final norm, scaled to length 1"
_SCORES = f"{_METHOD}; a score is the cosine of two, from -1 to 1."
_ABOUT_EMBEDDINGS = _description(f"Vectors of texts. {_METHOD}.", [*REFUSED_EMBEDDING])
_ABOUT_SCORE = _description(f"Compare texts. {_SCORES}", [*REFUSED_SCORE])
_ABOUT_RERANK = _description(f"Order documents by a query. {_SCORES}", [*REFUSED_RERANK])
ENDPOINTS = [
    Endpoint(
        "POST", "/v1/embeddings", embeddings, limit=Limit.QUEUE, body=EmbeddingBody, description=_ABOUT_EMBEDDINGS
    ),
    *(
        Endpoint("POST", path, score, limit=Limit.QUEUE, body=ScoreBody, description=_ABOUT_SCORE)
        for path in ("/score", "/v1/score")
    ),
    *(
        Endpoint("POST", path, rerank, limit=Limit.QUEUE, body=RerankBody, description=_ABOUT_RERANK)
        for path in ("/rerank", "/v1/rerank", _V2)
    ),
]
