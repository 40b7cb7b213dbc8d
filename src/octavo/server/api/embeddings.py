"""POST /v1/embeddings, /score, /v1/score, /rerank, /v1/rerank and /v2/rerank: vectors of texts, compared or returned.

Owns: the bodies, reading their texts, the EmbeddingRequest (with admission, deadlines and metrics like any request),
operations on vectors, and the answers. Ollama's embeddings use the same request.
A vector is the decoder's state of the last token, after the final norm, scaled to length 1 (docs/apis.md).
Invariant: either all texts of a request are answered, or none.
"""

from __future__ import annotations

import base64
import math
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from pydantic import BeforeValidator, FailFast, Field
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.request import SamplingParams, Want
from octavo.errors import EngineError, OctavoError, RequestError
from octavo.server.api.completions.bodies import Prompts
from octavo.server.api.fields import Refused, field_notes, read
from octavo.server.api.sampling import ServedFields
from octavo.server.context import Context, context_of
from octavo.server.encoding import AnswerSpec, Choice, Identity
from octavo.server.generation import GenerationRequest, start
from octavo.server.http.body import off_loop, read_json
from octavo.server.http.endpoints import Endpoint, Limit
from octavo.server.http.errors import ApiError, bad_field, from_exception, too_long
from octavo.server.http.lifecycle import ClientGoneError
from octavo.text.length import num_tokens_if_over

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer

MAX_INPUTS = 2048
IGNORED_HERE: Mapping[str, str] = {"user": "kept for the caller's own records; nothing here depends on it"}
REFUSED_EMBEDDING: Refused = {
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "normalize": (True,),
    "use_activation": (True,),
    "messages": (),
}


class PooledFields(ServedFields):
    """The fields of all endpoints that answer with vectors, or with scores computed from vectors."""

    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, lt=2**31, description="how many tokens to keep at the end of each text; -1 = as many as fit"
    )
    add_special_tokens: bool = Field(True, description="put the tokenizer's own tokens around a text")


class EmbeddingBody(PooledFields):
    """POST /v1/embeddings."""

    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(
        None, ge=1, lt=2**31, description="how many numbers of each vector to return, scaled to length 1 again"
    )


def read_embedding(fields: dict[str, object]) -> EmbeddingBody:
    """Check an embedding body. Raises ApiError naming the field."""
    body = read(EmbeddingBody, fields, REFUSED_EMBEDDING, IGNORED_HERE)
    if len(body.input) > MAX_INPUTS:
        raise bad_field("input", f"input holds {len(body.input)} texts; give at most {MAX_INPUTS}")
    return body


REFUSED_SCORE: Refused = {"use_activation": (), "activation": (), "encoding_format": ("float",)}
REFUSED_RERANK: Refused = {**REFUSED_SCORE, "rank_fields": (), "max_chunks_per_doc": (), "return_embeddings": (False,)}


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _documents(value: object) -> object:
    """Replace each document of the form {"text": ...} by its text."""
    if not isinstance(value, list):
        return value
    return [item["text"] if isinstance(item, dict) and set(item) == {"text"} else item for item in value]


TextList = Annotated[
    list[str], FailFast(), Field(min_length=1), BeforeValidator(_listed, json_schema_input_type=str | list[str])
]


class ScoreBody(PooledFields):
    """POST /score and /v1/score."""

    text_1: TextList
    text_2: TextList

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The pairs of indices into `text_1` and `text_2` to compare: one with all, or each with its counterpart."""
        firsts = [0] * len(self.text_2) if len(self.text_1) == 1 else range(len(self.text_1))
        return list(zip(firsts, range(len(self.text_2)), strict=True))


class RerankBody(PooledFields):
    """POST /rerank, /v1/rerank and /v2/rerank."""

    query: str
    documents: Annotated[
        list[str],
        FailFast(),
        Field(min_length=1, max_length=MAX_INPUTS - 1),
        BeforeValidator(_documents, json_schema_input_type=list[str | dict[str, str]]),
    ]
    top_n: int | None = Field(None, ge=0, lt=2**31, description="so many of the best are given; 0 or none = all")
    return_documents: bool | None = Field(
        None, description="whether each result has its document (default: yes, but for /v2/rerank)"
    )
    max_tokens_per_doc: int | None = Field(
        None, ge=1, lt=2**31, description="how many tokens to keep at the beginning of each text"
    )


def read_score(fields: dict[str, object]) -> ScoreBody:
    """Check a score body. Raises ApiError naming the field."""
    body = read(ScoreBody, fields, REFUSED_SCORE, IGNORED_HERE)
    first, second = len(body.text_1), len(body.text_2)
    if first not in (1, second):
        message = f"text_1 has {first} texts and text_2 has {second}; give one, or as many as text_2 has"
        raise bad_field("text_1", message)
    if first + second > MAX_INPUTS:
        name = "text_2" if second >= first else "text_1"
        raise bad_field(name, f"text_1 and text_2 have {first + second} texts; give at most {MAX_INPUTS} together")
    return body


def read_rerank(fields: dict[str, object]) -> RerankBody:
    """Check a rerank body. Raises ApiError naming the field."""
    body = read(RerankBody, fields, REFUSED_RERANK, IGNORED_HERE)
    if body.max_tokens_per_doc is not None and body.truncate_prompt_tokens is not None:
        message = "max_tokens_per_doc and truncate_prompt_tokens both shorten texts; give one of them"
        raise bad_field("max_tokens_per_doc", message)
    return body


INLINE_CHARACTERS = 4096  # texts of this total length are tokenized in 2 ms
Input = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Inputs:
    """Texts or lists of token ids. `params` has the client's field name for each.

    `keep` is the number of tokens to keep of each, from the end or, with `keeps_start`, from the beginning. With None,
    all tokens are kept and a long text is refused.
    """

    texts: Sequence[Input]
    params: Sequence[str]
    add_special_tokens: bool = True
    keep: int | None = None
    keeps_start: bool = False

    @property
    def num_characters(self) -> int:
        """The number of characters in all texts."""
        return sum(len(text) for text in self.texts if isinstance(text, str))

    @property
    def num_ids(self) -> int:
        """The number of ids in all lists."""
        return sum(len(text) for text in self.texts if not isinstance(text, str))


async def read_inputs(tokenizer: Tokenizer, inputs: Inputs, max_len: int) -> list[Sequence[int]]:
    """Return the token ids of each input, at most `max_len`. Raises ApiError naming the field."""

    def read() -> list[Sequence[int]]:
        pairs = zip(inputs.texts, inputs.params, strict=True)
        return [_read_input(tokenizer, text, param, inputs, max_len) for text, param in pairs]

    return read() if inputs.num_characters <= INLINE_CHARACTERS else await off_loop(read, inputs.num_characters)


def _read_input(tokenizer: Tokenizer, text: Input, param: str, inputs: Inputs, max_len: int) -> Sequence[int]:
    keep = inputs.keep
    ids = _encode_input(tokenizer, text, param, inputs, max_len) if isinstance(text, str) else text
    if keep is not None and len(ids) > keep:
        ids = ids[:keep] if inputs.keeps_start else ids[-keep:]
    if not ids:
        raise bad_field(param, f"{param} is empty; give at least one token")
    if len(ids) > max_len:
        raise too_long(param, max_len, f"{param} has {len(ids)}")
    return ids


def _encode_input(tokenizer: Tokenizer, text: str, param: str, inputs: Inputs, max_len: int) -> list[int]:
    if inputs.keep is not None:  # a token has at most as many characters as the longest piece
        max_characters = inputs.keep * tokenizer.longest_piece
        text = text[:max_characters] if inputs.keeps_start else text[-max_characters:]
    elif len(text) > INLINE_CHARACTERS and (min_tokens := num_tokens_if_over(tokenizer, text, max_len)) is not None:
        raise too_long(param, max_len, f"{param} has {len(text)} characters, so at least {min_tokens} tokens")
    try:
        return tokenizer.encode(text, inputs.add_special_tokens)
    except RequestError as error:
        raise from_exception(error, {"prompt": param}) from None


T = TypeVar("T")
Vector: TypeAlias = "array[float]"  # float32
HERE_NUMBERS = 4096  # this many numbers are compared or encoded in 0.5 ms
_PARAMS = SamplingParams(seed=0)  # nothing is sampled; a seed of its own does not change other requests' seeds
_CLIENT_LEFT = 499


@dataclass(frozen=True, slots=True)
class Embedded:
    """Each text's vector and number of tokens, in order. `name` is the request's id."""

    name: str
    vectors: Sequence[Vector]
    num_tokens: Sequence[int]
    num_cached: int


@dataclass(kw_only=True)
class EmbeddingRequest(GenerationRequest):
    """A request for vectors of texts."""

    inputs: Inputs

    async def read_prompts(self) -> Sequence[Sequence[int]]:
        """Return the token ids of each text."""
        return await read_inputs(self.context.text.tokenizer, self.inputs, self.context.max_model_len)

    def answer_spec(self, identity: Identity) -> AnswerSpec:
        """Return a spec with the identity only, since there is no text to encode."""
        return AnswerSpec("embedding", identity)


async def embed(request: Request, context: Context, kind: str, body: ServedFields, inputs: Inputs) -> Embedded:
    """Return the vectors of texts. `kind` begins the answer's id; `body` has the ServedFields. Raises ApiError."""
    wanted = EmbeddingRequest(
        context=context,
        body=body,
        params=_PARAMS,
        id_prefix=kind,
        prompt_param=inputs.params[0].partition("[")[0],
        num_prompts=len(inputs.texts),
        num_characters=inputs.num_characters,
        num_ids=inputs.num_ids,
        inputs=inputs,
        wants=Want.POOL,
    )
    generation, spec = await start(request, wanted)
    try:
        choices = await context.lifecycle.supervise(generation.collect(), request.receive)
    except ClientGoneError:
        raise ApiError(_CLIENT_LEFT, "the client left", code="client_disconnected") from None
    except (ApiError, OctavoError) as error:
        raise from_exception(error) from None
    finally:
        await generation.close()
    num_cached = sum(choice.deltas[-1].usage.cached_tokens for choice in choices if choice.deltas[-1].usage)
    vectors = [_vector_of(choice) for choice in choices]
    return Embedded(spec.identity[0], vectors, generation.prompt_lengths, num_cached)


def _vector_of(choice: Choice) -> Vector:
    data = choice.deltas[-1].pooled
    if data is None:
        raise from_exception(EngineError("an embedding came without its vector"))
    return array("f", data)


def truncate(vector: Vector, num_dimensions: int) -> Vector:
    """Return the first dimensions, scaled to length 1. Matryoshka models are trained for this."""
    part = vector[:num_dimensions]
    length = math.sqrt(sum(map(mul, part, part)))
    return array("f", [value / length for value in part]) if length > 0 else part


def to_base64(vector: Vector) -> str:
    """Return the vector as base64 of float32, little-endian, as OpenAI does."""
    return base64.b64encode(vector.tobytes()).decode()


def similarity(one: Vector, other: Vector) -> float:
    """Return the cosine of two vectors of length 1: -1 to 1."""
    cosine: float = sum(map(mul, one, other))
    return max(-1.0, min(1.0, cosine))


async def compute(work: Callable[[], T], num_numbers: int) -> T:
    """Run `work` over `num_numbers` numbers. Long work runs on another thread."""
    return work() if num_numbers <= HERE_NUMBERS else await off_loop(work, num_numbers)


Json = dict[str, Any]
_V2 = "/v2/rerank"
_RETRY_NOTE = "Nothing is drawn at random and nothing kept: a header `Idempotency-Key` has no effect."


async def embeddings(request: Request) -> Response:
    """Return a vector for each text."""
    context = context_of(request)
    body = await read_json(request, context.limits, read_embedding)
    context = context.for_model(body.model)
    model = body.model or context.model
    size = context.text.spec.hidden_size
    if body.dimensions is not None and body.dimensions > size:
        raise bad_field("dimensions", f"dimensions is {body.dimensions}; this model's vectors have {size}")
    params = ["input"] if len(body.input) == 1 else [f"input[{index}]" for index in range(len(body.input))]
    found = await embed(request, context, "embd", body, _inputs(context, body, body.input, params))

    def answer() -> bytes:
        vectors = found.vectors
        if body.dimensions is not None and body.dimensions < size:
            vectors = [truncate(vector, body.dimensions) for vector in vectors]
        is_packed = body.encoding_format == "base64"
        data = [
            {"object": "embedding", "index": index, "embedding": to_base64(vector) if is_packed else vector.tolist()}
            for index, vector in enumerate(vectors)
        ]
        head = {"id": found.name, "object": "list", "created": int(time.time()), "model": model}
        return msgspec.json.encode({**head, "data": data, "usage": _usage(found)})

    return await _respond(answer, found)


async def score(request: Request) -> Response:
    """Compare texts: one text with several, or each text with its counterpart."""
    context = context_of(request)
    body = await read_json(request, context.limits, read_score)
    context = context.for_model(body.model)
    model = body.model or context.model
    params = [*_params("text_1", body.text_1), *_params("text_2", body.text_2)]
    found = await embed(request, context, "score", body, _inputs(context, body, [*body.text_1, *body.text_2], params))
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
    """Order documents by their similarity to a query, most similar first."""
    context = context_of(request)
    body = await read_json(request, context.limits, read_rerank)
    context = context.for_model(body.model)
    model = body.model or context.model
    params = ["query", *_params("documents", body.documents, is_list=True)]
    found = await embed(request, context, "rerank", body, _inputs(context, body, [body.query, *body.documents], params))
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
    return Response(await compute(answer, sum(map(len, vectors))), media_type="application/json")


def _usage(found: Embedded) -> Json:
    total = sum(found.num_tokens)
    return {
        "prompt_tokens": total,
        "total_tokens": total,
        "completion_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": found.num_cached},
    }


def _params(param: str, texts: Sequence[str], is_list: bool = False) -> list[str]:
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
