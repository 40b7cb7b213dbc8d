"""POST /v1/embeddings, /classify, and /score and /rerank with their versions: vectors and labels of texts, and scores.

Owns: the bodies, reading their texts, the EmbeddingRequest (with admission, deadlines and metrics like any request),
operations on vectors, and the answers. Ollama's embeddings use the same request.
A decoder's vector is the state of the last token, after the final norm, scaled to length 1; an encoder's is pooled as
its files say (docs/apis.md). Pairs of texts are scored by a classifier that reads both, else by the cosine of vectors.
Invariant: either all texts of a request are answered, or none.
"""

from __future__ import annotations

import base64
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import BeforeValidator, FailFast, Field
from starlette.requests import Request
from starlette.responses import Response

from octavo.artifacts.encoder_spec import TextInput
from octavo.core.request import SamplingParams, Want
from octavo.errors import EngineError, RequestError
from octavo.frontend.scoring import TextPairs, Vector, likeliest, pair_indices, ranked, unit
from octavo.server.api.completions.bodies import Prompts
from octavo.server.api.fields import TEXT_OR_TEXTS, Refused, field_notes, read
from octavo.server.api.sampling import ServedFields
from octavo.server.context import Context, context_of
from octavo.server.encoding import AnswerSpec, Choice, Identity
from octavo.server.generation import GenerationRequest, start
from octavo.server.http.body import json_response, off_loop, read_json
from octavo.server.http.endpoints import queued
from octavo.server.http.errors import bad_field, from_exception, too_long
from octavo.server.reply import collect

if TYPE_CHECKING:
    from octavo.text.text_model import TextModel
    from octavo.text.tokenizer import Tokenizer

T = TypeVar("T")
_Body = TypeVar("_Body", bound="PooledFields")
_Texts = TypeVar("_Texts", bound="ClassifyBody")
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
        None,
        ge=-1,
        lt=2**31,
        description="how many tokens to keep at the end of each text (an encoder: at its start); -1 = as many as fit",
    )
    add_special_tokens: bool = Field(True, description="put the tokenizer's own tokens around a text")


class ClassifyBody(PooledFields):
    """POST /classify."""

    input: Prompts


class EmbeddingBody(ClassifyBody):
    """POST /v1/embeddings."""

    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(
        None, ge=1, lt=2**31, description="how many numbers of each vector to return, scaled to length 1 again"
    )
    prompt_name: str | None = Field(
        None,
        description="which of the model's own prompts precedes each text (sentence_transformers); default: its own",
    )


def read_embedding(fields: dict[str, object]) -> EmbeddingBody:
    """Check an embedding body. Raises ApiError naming the field."""
    return _check_count(read(EmbeddingBody, fields, REFUSED_EMBEDDING, IGNORED_HERE))


def read_classify(fields: dict[str, object]) -> ClassifyBody:
    """Check a classify body. Raises ApiError naming the field."""
    return _check_count(read(ClassifyBody, fields, REFUSED_CLASSIFY, IGNORED_HERE))


def _check_count(body: _Texts) -> _Texts:
    if len(body.input) > MAX_INPUTS:
        raise bad_field("input", f"input holds {len(body.input)} texts; give at most {MAX_INPUTS}")
    return body


REFUSED_CLASSIFY: Refused = {"use_activation": (True,), "activation": (True,), "messages": ()}
REFUSED_SCORE: Refused = {"use_activation": (), "activation": (), "encoding_format": ("float",)}
REFUSED_RERANK: Refused = {**REFUSED_SCORE, "rank_fields": (), "max_chunks_per_doc": (), "return_embeddings": (False,)}


def _documents(value: object) -> object:
    """Replace each document of the form {"text": ...} by its text."""
    if not isinstance(value, list):
        return value
    return [item["text"] if isinstance(item, dict) and set(item) == {"text"} else item for item in value]


TextList = Annotated[list[str], FailFast(), Field(min_length=1), TEXT_OR_TEXTS]


class ScoreBody(PooledFields):
    """POST /score and /v1/score."""

    text_1: TextList
    text_2: TextList


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
        None, ge=1, lt=2**31, description="how many tokens to keep at the beginning of each text, or of each pair"
    )


def read_score(fields: dict[str, object]) -> ScoreBody:
    """Check a score body. Raises ApiError naming the field."""
    body = read(ScoreBody, fields, REFUSED_SCORE, IGNORED_HERE)
    first, second = len(body.text_1), len(body.text_2)
    try:
        pair_indices(first, second)
    except RequestError as error:
        raise from_exception(error) from None
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


Input = str | TextInput | Sequence[int]


@dataclass(frozen=True, slots=True)
class Inputs:
    """Texts, pairs of texts or lists of token ids. `params` has the client's field name for each.

    `keep` is the number of tokens to keep of each, from the end or, with `keeps_start` and for an encoder, from the
    beginning. With None, all tokens are kept and a long text is refused.
    """

    texts: Sequence[Input]
    params: Sequence[str]
    add_special_tokens: bool = True
    keep: int | None = None
    keeps_start: bool = False

    @property
    def num_characters(self) -> int:
        """The number of characters in all texts."""
        inputs = sum(text.num_characters for text in self.texts if isinstance(text, TextInput))
        return inputs + sum(len(text) for text in self.texts if isinstance(text, str))

    @property
    def num_ids(self) -> int:
        """The number of ids in all lists."""
        return sum(len(text) for text in self.texts if not isinstance(text, str | TextInput))


async def read_inputs(text: TextModel, inputs: Inputs, max_len: int) -> list[Sequence[int]]:
    """Return the token ids of each input, at most `max_len`. Raises ApiError naming the field."""

    def read() -> list[Sequence[int]]:
        return [_read_input(text, index, inputs, max_len) for index in range(len(inputs.texts))]

    return read() if inputs.num_characters <= INLINE_CHARACTERS else await off_loop(read, inputs.num_characters)


def _read_input(model: TextModel, index: int, inputs: Inputs, max_len: int) -> Sequence[int]:
    given, param, keep = inputs.texts[index], inputs.params[index], inputs.keep
    keeps_start = inputs.keeps_start or model.spec.encoder is not None
    if isinstance(given, str):
        given = TextInput(given)
    ids = _encode(model, given, param, inputs, max_len) if isinstance(given, TextInput) else given
    if keep is not None and len(ids) > keep:
        ids = ids[:keep] if keeps_start else ids[-keep:]
    if not ids:
        raise bad_field(param, f"{param} is empty; give at least one token")
    if len(ids) > max_len:
        raise too_long(param, max_len, f"{param} has {len(ids)}")
    return ids


def _encode(model: TextModel, given: TextInput, param: str, inputs: Inputs, max_len: int) -> Sequence[int]:
    if model.spec.encoder is not None and (not given.text or given.second == ""):
        raise bad_field(param, f"{param} is empty; give a text")
    if inputs.keep is None:
        _check_characters(model.tokenizer, given, param, max_len)
    elif model.spec.encoder is None:  # a token has at most as many characters as the longest piece
        most = inputs.keep * model.tokenizer.longest_piece
        given = given._replace(text=given.text[:most] if inputs.keeps_start else given.text[-most:])
    try:
        return model.encode_input(given, keep=inputs.keep, add_special_tokens=inputs.add_special_tokens)
    except RequestError as error:
        raise from_exception(error, {"prompt": param}) from None


def _check_characters(tokenizer: Tokenizer, given: TextInput, param: str, max_len: int) -> None:
    """Raise ApiError if one of the texts is so long that it need not be tokenized."""
    first = param if given.second is None else f"the text that is compared with {param}"
    for text, name in ((given.text, first), (given.second or "", param)):
        if len(text) > INLINE_CHARACTERS and (num_tokens := tokenizer.num_tokens_if_over(text, max_len)) is not None:
            raise too_long(param, max_len, f"{name} has {len(text)} characters, so at least {num_tokens} tokens")


HERE_NUMBERS = 4096  # this many numbers are compared or encoded in 0.5 ms
_PARAMS = SamplingParams(seed=0)  # nothing is sampled; a seed of its own does not change other requests' seeds


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
        return await read_inputs(self.context.text, self.inputs, self.context.max_model_len)

    def answer_spec(self, identity: Identity) -> AnswerSpec:
        """Return a spec with the identity only, since there is no text to encode."""
        return AnswerSpec("embedding", identity)


async def embed(
    request: Request, context: Context, kind: str, body: ServedFields, inputs: Inputs, output: str = "vectors"
) -> Embedded:
    """Return the vectors, or logits, of texts. `kind` begins the answer's id; `body` has the ServedFields.

    Raises ApiError, also if the model's output is not `output`.
    """
    try:
        context.text.check_output(output)
    except RequestError as error:
        raise from_exception(error) from None
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
    choices = await collect(request, context, generation)
    num_cached = sum(choice.deltas[-1].usage.cached_tokens for choice in choices if choice.deltas[-1].usage)
    vectors = [_vector_of(choice) for choice in choices]
    return Embedded(spec.identity[0], vectors, generation.prompt_lengths, num_cached)


def _vector_of(choice: Choice) -> Vector:
    data = choice.deltas[-1].pooled
    if data is None:
        raise from_exception(EngineError("an embedding came without its vector"))
    return array("f", data)


def check_dimensions(context: Context, num_dimensions: int | None) -> None:
    """Raise ApiError if the model's vectors have fewer dimensions."""
    size = context.text.spec.vector_size
    if num_dimensions is not None and num_dimensions > size:
        raise bad_field(
            "dimensions", f"dimensions is {num_dimensions}; this model's vectors have {size}, give at most that"
        )


def shortened(vectors: Sequence[Vector], num_dimensions: int | None) -> Sequence[Vector]:
    """Return the first dimensions of each, scaled to length 1. Matryoshka models are trained for this."""
    if num_dimensions is None or num_dimensions == len(vectors[0]):
        return vectors
    return [unit(vector[:num_dimensions]) for vector in vectors]


def to_base64(vector: Vector) -> str:
    """Return the vector as base64 of float32, little-endian, as OpenAI does."""
    return base64.b64encode(vector.tobytes()).decode()


async def compute(work: Callable[[], T], num_numbers: int) -> T:
    """Run `work` over `num_numbers` numbers. Long work runs on another thread."""
    return work() if num_numbers <= HERE_NUMBERS else await off_loop(work, num_numbers)


Json = dict[str, Any]
_V2 = "/v2/rerank"
_RETRY_NOTE = "Nothing is drawn at random and nothing kept: a header `Idempotency-Key` has no effect."


async def _read(request: Request, reader: Callable[[dict[str, object]], _Body]) -> tuple[Context, _Body, str]:
    """Return the context of the model that a body names, the body, and the model's name in the answer."""
    context = context_of(request)
    body = await read_json(request, context.limits, reader)
    context = context.for_model(body.model)
    return context, body, body.model or context.model


async def embeddings(request: Request) -> Response:
    """Return a vector for each text."""
    context, body, model = await _read(request, read_embedding)
    check_dimensions(context, body.dimensions)
    texts: Sequence[Input] = body.input
    if body.prompt_name is not None:
        prefix = _prompt(context, body.prompt_name)
        texts = [TextInput(text, prefix=prefix) if isinstance(text, str) else text for text in texts]
    found = await embed(request, context, "embd", body, _inputs(context, body, texts, _params("input", texts)))

    def answer() -> bytes:
        is_packed = body.encoding_format == "base64"
        data = [
            {"object": "embedding", "index": index, "embedding": to_base64(vector) if is_packed else vector.tolist()}
            for index, vector in enumerate(shortened(found.vectors, body.dimensions))
        ]
        return _list_answer(found, model, data)

    return await _respond(answer, found)


def _compared(context: Context, body: PooledFields, comparison: TextPairs, params: Sequence[str]) -> Inputs:
    """Return the texts of a comparison; `params` has a field name for each, the first ones first.

    A pair has the name of its second text.
    """
    texts = comparison.texts(context.text.spec.encoder)
    if texts[0].second is not None:
        params = [params[len(comparison.firsts) + second] for _, second in comparison.pairs]
    return _inputs(context, body, texts, params)


async def score(request: Request) -> Response:
    """Compare texts: one text with several, or each text with its counterpart."""
    context, body, model = await _read(request, read_score)
    params = [*_params("text_1", body.text_1), *_params("text_2", body.text_2)]
    comparison = TextPairs.of(body.text_1, body.text_2)
    found = await embed(request, context, "score", body, _compared(context, body, comparison, params), "scores")

    def answer() -> bytes:
        scores = enumerate(comparison.scores(context.text.spec.encoder, found.vectors))
        return _list_answer(found, model, [{"index": i, "object": "score", "score": value} for i, value in scores])

    return await _respond(answer, found)


async def rerank(request: Request) -> Response:
    """Order documents by their relevance to a query, most relevant first."""
    context, body, model = await _read(request, read_rerank)
    params = ["query", *_params("documents", body.documents, is_list=True)]
    comparison = TextPairs.of_documents(body.query, body.documents)
    inputs = _compared(context, body, comparison, params)
    if body.max_tokens_per_doc is not None:
        inputs = replace(inputs, keep=body.max_tokens_per_doc, keeps_start=True)
    found = await embed(request, context, "rerank", body, inputs, "scores")
    has_documents = request.scope["path"] != _V2 if body.return_documents is None else body.return_documents

    def answer() -> bytes:
        scores = comparison.scores(context.text.spec.encoder, found.vectors)
        shown = [_result(scores[index], index, body if has_documents else None) for index in ranked(scores, body.top_n)]
        head = {"id": found.name, "model": model, "usage": _usage(found)}
        return msgspec.json.encode({**head, "results": shown})

    return await _respond(answer, found)


async def classify(request: Request) -> Response:
    """Return the probability of each label, for each text."""
    context, body, model = await _read(request, read_classify)
    inputs = _inputs(context, body, body.input, _params("input", body.input))
    found = await embed(request, context, "classify", body, inputs, "labels")

    def answer() -> bytes:
        classified = [likeliest(logits, context.text.spec.encoder) for logits in found.vectors]
        data = [
            {"index": index, "label": label, "probs": probs, "num_classes": len(probs)}
            for index, (label, probs) in enumerate(classified)
        ]
        return _list_answer(found, model, data)

    return await _respond(answer, found)


def _list_answer(found: Embedded, model: str, data: Sequence[Json]) -> bytes:
    head = {"id": found.name, "object": "list", "created": int(time.time()), "model": model}
    return msgspec.json.encode({**head, "data": data, "usage": _usage(found)})


def _result(value: float, index: int, body: RerankBody | None) -> Json:
    result: Json = {"index": index, "relevance_score": value}
    return result if body is None else {**result, "document": {"text": body.documents[index]}}


def _prompt(context: Context, name: str) -> str:
    """Return one of the model's own prompts. Raises ApiError."""
    encoder = context.text.spec.encoder
    known = {} if encoder is None else encoder.prompts
    if name not in known:
        has = f"its prompts are {', '.join(known)}" if known else "it has no prompts"
        raise bad_field("prompt_name", f"prompt_name is {name[:128]!r}; {has}")
    return known[name]


async def _respond(answer: Callable[[], bytes], found: Embedded) -> Response:
    return json_response(await compute(answer, sum(map(len, found.vectors))))


def _usage(found: Embedded) -> Json:
    total = sum(found.num_tokens)
    return {
        "prompt_tokens": total,
        "total_tokens": total,
        "completion_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": found.num_cached},
    }


def _params(param: str, texts: Sequence[object], is_list: bool = False) -> list[str]:
    if len(texts) == 1 and not is_list:
        return [param]
    return [f"{param}[{index}]" for index in range(len(texts))]


def _inputs(context: Context, body: PooledFields, texts: Sequence[Input], params: Sequence[str]) -> Inputs:
    keep = context.max_model_len if body.truncate_prompt_tokens == -1 else body.truncate_prompt_tokens
    if keep == 0:
        raise bad_field("truncate_prompt_tokens", "truncate_prompt_tokens is 0; give at least 1, or -1")
    return Inputs(texts, params, body.add_special_tokens, keep)


def _description(first: str, refused: Sequence[str]) -> str:
    return f"{first}\n\n{_RETRY_NOTE}\n\n{field_notes(dict.fromkeys(refused, ()), IGNORED_HERE)}"


_METHOD = (
    "An encoder's vector is pooled as its files say; a decoder's is the state at a text's last token, after the final "
    "norm, scaled to length 1"
)
_SCORES = f"{_METHOD}; a score is the cosine of two, from -1 to 1. A classifier of one label reads both texts at once."
_ABOUT_EMBEDDINGS = _description(f"Vectors of texts. {_METHOD}.", [*REFUSED_EMBEDDING])
_ABOUT_SCORE = _description(f"Compare texts. {_SCORES}", [*REFUSED_SCORE])
_ABOUT_RERANK = _description(f"Order documents by a query. {_SCORES}", [*REFUSED_RERANK])
_ABOUT_CLASSIFY = _description("Classify texts, by a sequence classifier.", [*REFUSED_CLASSIFY])
ENDPOINTS = [
    queued("/classify", classify, ClassifyBody, _ABOUT_CLASSIFY),
    queued("/v1/embeddings", embeddings, EmbeddingBody, _ABOUT_EMBEDDINGS),
    *(queued(path, score, ScoreBody, _ABOUT_SCORE) for path in ("/score", "/v1/score")),
    *(queued(path, rerank, RerankBody, _ABOUT_RERANK) for path in ("/rerank", "/v1/rerank", _V2)),
]
