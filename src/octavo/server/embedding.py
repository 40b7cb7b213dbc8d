"""embed: vectors of texts, computed as a GenerationRequest (admission, tickets, deadlines, cancelling, metrics).

Owns: that request, and operations on vectors: shorten, pack, compare. Does not: know an interface (the routes do).
A vector is the decoder's state of the last token, after the final norm, scaled to length 1 (docs/apis.md).
Invariant: all texts of a request are answered, or none.
"""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import mul
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from starlette.requests import Request

from octavo.core.request import SamplingParams, Want
from octavo.errors import EngineError, OctavoError
from octavo.server.bodies.served import ServedFields
from octavo.server.context import Context, context_of
from octavo.server.encoding import AnswerSpec, Choice, Identity
from octavo.server.generation import GenerationRequest, start
from octavo.server.http.body import off_loop
from octavo.server.http.errors import ApiError, from_exception
from octavo.server.http.lifecycle import ClientGoneError
from octavo.server.inputs import Inputs, read_inputs

if TYPE_CHECKING:
    pass

T = TypeVar("T")
Vector: TypeAlias = "array[float]"  # float32
HERE_NUMBERS = 4096  # are compared or encoded in half a millisecond
_PARAMS = SamplingParams(seed=0)  # nothing is sampled; with a seed, other requests' seeds do not change
_CLIENT_LEFT = 499


@dataclass(frozen=True, slots=True)
class Embedded:
    """A vector and the number of tokens of each text, in order. `name` is the request's id."""

    name: str
    vectors: Sequence[Vector]
    num_tokens: Sequence[int]
    num_cached: int


@dataclass(kw_only=True)
class EmbeddingRequest(GenerationRequest):
    """A request for vectors of texts."""

    context: Context
    inputs: Inputs

    async def read_prompts(self) -> Sequence[Sequence[int]]:
        """Return the ids of each text."""
        return await read_inputs(self.context.text.tokenizer, self.inputs, self.context.max_model_len)

    def answer_spec(self, identity: Identity) -> AnswerSpec:
        """Return a spec with the identity only: no text is encoded."""
        return AnswerSpec("embedding", identity)


async def embed(request: Request, kind: str, body: ServedFields, inputs: Inputs) -> Embedded:
    """Return vectors of texts; `kind` begins the answer's id, `body` has the served fields. Raises ApiError."""
    context = context_of(request)
    asked = EmbeddingRequest(
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
    generation, spec = await start(request, asked)
    try:
        choices = await context.lifecycle.supervise(generation.collect(), request.receive)
    except ClientGoneError:
        raise ApiError(_CLIENT_LEFT, "the client left", code="client_disconnected") from None
    except (ApiError, OctavoError) as error:
        raise from_exception(error) from None
    finally:
        await generation.close()
    num_cached = sum(choice.deltas[-1].usage.cached_tokens for choice in choices if choice.deltas[-1].usage)
    vectors = [_vector(choice) for choice in choices]
    return Embedded(spec.identity[0], vectors, generation.prompt_lengths, num_cached)


def _vector(choice: Choice) -> Vector:
    data = choice.deltas[-1].pooled
    if data is None:
        raise from_exception(EngineError("an embedding came without its vector"))
    return array("f", data)


def shortened(vector: Vector, num_dimensions: int) -> Vector:
    """Return the first dimensions, scaled to length 1: Matryoshka models are trained for this."""
    part = vector[:num_dimensions]
    length = math.sqrt(sum(map(mul, part, part)))
    return array("f", [value / length for value in part]) if length > 0 else part


def packed(vector: Vector) -> str:
    """Return the vector as OpenAI's base64: float32, little-endian."""
    return base64.b64encode(vector.tobytes()).decode()


def similarity(one: Vector, other: Vector) -> float:
    """Return the cosine of two vectors of length 1, from -1 to 1."""
    cosine: float = sum(map(mul, one, other))
    return max(-1.0, min(1.0, cosine))


async def worked(work: Callable[[], T], num_numbers: int) -> T:
    """Run `work` over `num_numbers` numbers: here, or on another thread if it is long."""
    return work() if num_numbers <= HERE_NUMBERS else await off_loop(work, num_numbers)
