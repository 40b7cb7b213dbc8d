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
from contextlib import ExitStack
from dataclasses import dataclass
from operator import mul
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from starlette.requests import Request

from octavo.core.request import SamplingParams, Want
from octavo.errors import EngineError, OctavoError
from octavo.server.admission import AdmissionRequest
from octavo.server.auth import KEY
from octavo.server.bodies.served import ServedFields
from octavo.server.context import Context, context_of
from octavo.server.encoding import Choice
from octavo.server.faults import ApiError, draining_error, from_exception
from octavo.server.generation import Generation, GenerationRequest, open_sessions
from octavo.server.inputs import Inputs, read_inputs
from octavo.server.lifecycle import ClientGoneError, ServerStoppingError
from octavo.server.offload import off_loop
from octavo.server.reply import options_of, shorter
from octavo.server.request_index import engine_id
from octavo.server.shell import ARRIVAL, GIVEN_ID, REQUEST_ID

if TYPE_CHECKING:
    from octavo.frontend.sessions import RequestOptions

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


async def embed(request: Request, kind: str, body: ServedFields, inputs: Inputs) -> Embedded:
    """Vectors of texts; `kind` begins the answer's id, `body` says how it is served. Raises ApiError."""
    context = context_of(request)
    given = request.scope[GIVEN_ID]
    name = given or f"{kind}-{request.scope[REQUEST_ID]}"
    generation = await _begin(request, context, body, inputs, (name, engine_id(given, name)))
    try:
        choices = await context.lifecycle.supervise(generation.collect(), request.receive)
    except ClientGoneError:
        raise ApiError(_CLIENT_LEFT, "the client left", code="client_disconnected") from None
    except ServerStoppingError:
        raise draining_error() from None
    except (ApiError, OctavoError) as error:
        raise from_exception(error) from None
    finally:
        await generation.close()
    num_cached = sum(choice.deltas[-1].usage.cached_tokens for choice in choices if choice.deltas[-1].usage)
    return Embedded(name, [_vector(choice) for choice in choices], [*map(len, generation.asked.prompts)], num_cached)


async def _begin(
    request: Request, context: Context, body: ServedFields, inputs: Inputs, names: tuple[str, str]
) -> Generation:
    """Submit the texts. Raises ApiError; then nothing of it is left."""
    key = request.scope[KEY]
    options: RequestOptions = {**options_of(key, context, body), "wants": Want.POOL}
    wanted = AdmissionRequest(
        key=key,
        priority=options["priority"],
        num_prompts=len(inputs.texts),
        max_tokens=0,
        num_characters=inputs.num_characters,
        num_ids=inputs.num_ids,
        max_wait_s=shorter(body.queue_timeout, body.timeout),
    )
    name, own = names
    with ExitStack() as undo:
        try:
            ticket = context.admission.enter(wanted)
            undo.callback(ticket.leave)
            read = await read_inputs(context.text.tokenizer, inputs, context.max_model_len)
            prompts = [array("i", ids) for ids in read]
            ticket.settle(sum(map(len, prompts)))
            asked = GenerationRequest(own, prompts, _PARAMS, request.scope[ARRIVAL], options)
            undo.callback(context.directory.add(key.tenant, name, asked.session_ids))
            opened = await open_sessions(context.sessions, asked)
        except OctavoError as error:
            param = inputs.params[0].partition("[")[0]
            raise from_exception(error, {"prompt_token_ids": param, "prompt": param}) from None
        closing = undo.pop_all()
    return Generation(asked, opened, context.metrics, ticket, closing)


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
