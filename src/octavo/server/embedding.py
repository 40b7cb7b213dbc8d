"""embed: vectors of texts, on the way that answers take: admission, tickets, deadlines, cancelling, metrics.

Owns: that way, and what is made of vectors: cut, packed, compared. Does not: know an interface (the routes do).
A vector is the decoder's state behind the last token, after the final norm, scaled to length 1 (docs/apis.md).
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
from octavo.server.faults import ApiError, from_exception
from octavo.server.generation import GenerationRequest, start
from octavo.server.inputs import Inputs, read_inputs
from octavo.server.lifecycle import ClientGoneError
from octavo.server.offload import off_loop

if TYPE_CHECKING:
    pass

T = TypeVar("T")
Vector: TypeAlias = "array[float]"  # float32
HERE_NUMBERS = 4096  # so many are compared or encoded in half a millisecond
_PARAMS = SamplingParams(seed=0)  # nothing is drawn, and no other request's seed depends on this one
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
    """Vectors of texts."""

    context: Context
    inputs: Inputs

    async def read_prompts(self) -> Sequence[Sequence[int]]:
        """Return the ids of each text."""
        return await read_inputs(self.context.text.tokenizer, self.inputs, self.context.max_model_len)

    def answer_spec(self, identity: Identity) -> AnswerSpec:
        """Return the bare identity: vectors are no text."""
        return AnswerSpec("embedding", identity)


async def embed(request: Request, kind: str, body: ServedFields, inputs: Inputs) -> Embedded:
    """Vectors of texts; `kind` begins the answer's id, `body` says how it is served. Raises ApiError."""
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
    """The first dimensions, scaled to length 1: what Matryoshka models are trained for."""
    part = vector[:num_dimensions]
    length = math.sqrt(sum(map(mul, part, part)))
    return array("f", [value / length for value in part]) if length > 0 else part


def packed(vector: Vector) -> str:
    """The vector as OpenAI's base64: float32, little-endian."""
    return base64.b64encode(vector.tobytes()).decode()


def similarity(one: Vector, other: Vector) -> float:
    """The cosine of two vectors of length 1, from -1 to 1."""
    cosine: float = sum(map(mul, one, other))
    return max(-1.0, min(1.0, cosine))


async def worked(work: Callable[[], T], num_numbers: int) -> T:
    """Do work over so many numbers: here, or on another thread where it is long."""
    return work() if num_numbers <= HERE_NUMBERS else await off_loop(work, num_numbers)
