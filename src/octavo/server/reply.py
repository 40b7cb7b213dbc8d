"""From a checked body to the response, whole or streamed: the path that both kinds of completion take.

Owns: the order (seat, prompts, submission, answer) and that every failure on it frees what was taken.
Does not: know which kind it answers.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.request import SamplingParams
from octavo.errors import OctavoError
from octavo.server.auth import TENANT
from octavo.server.context import Context, context_of
from octavo.server.faults import ApiError, draining_error, from_exception
from octavo.server.generation import Asked, Generation, open_sessions
from octavo.server.lifecycle import ClientGoneError, ServerStoppingError
from octavo.server.params import spellings
from octavo.server.schema import SamplingBody
from octavo.server.shapes import Identity, Shape
from octavo.server.shell import ARRIVAL, GIVEN_ID, REQUEST_ID
from octavo.server.stream import EventStream

CLIENT_CLOSED_REQUEST = 499  # nobody reads it; it is what the logs and metrics of proxies call this


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be answered: `read_prompts` gives the ids, `make_shape` the form.

    `kind` begins the answer's id; `prompt_param` is the field that holds the prompt.
    """

    kind: str
    body: SamplingBody
    params: SamplingParams
    num_prompts: int
    prompt_param: str
    read_prompts: Callable[[], Awaitable[Sequence[Sequence[int]]]]
    make_shape: Callable[[Identity], Shape]


def wants_usage(body: SamplingBody) -> bool:
    """Whether the stream ends with a usage chunk."""
    return body.stream_options is not None and body.stream_options.include_usage


async def reply(request: Request, task: Task) -> Response:
    """Submit the prompts and answer. Raises ApiError."""
    context = context_of(request)
    request_id = request.scope[GIVEN_ID] or f"{task.kind}-{request.scope[REQUEST_ID]}"
    with ExitStack() as undo:
        try:
            seat = context.waiting.enter(task.num_prompts)
            undo.callback(seat.leave)
            asked = _asked(request, context, task, request_id, await task.read_prompts())
            opened = await open_sessions(context.sessions, asked)
        except OctavoError as error:
            names = {name: task.prompt_param for name in ("prompt_token_ids", "prompt", "messages")}
            raise from_exception(error, {**spellings(task.body), **names}) from None
        undo.pop_all()
    generation = Generation(asked, opened, context.metrics, seat)
    shape = task.make_shape((request_id, int(time.time()), context.model))
    if task.body.stream:
        return EventStream(generation, shape, context.lifecycle, context.limits, context.metrics)
    return await _whole(request, context, generation, shape)


def _asked(request: Request, context: Context, task: Task, request_id: str, prompts: Sequence[Sequence[int]]) -> Asked:
    tenant = request.scope[TENANT]
    return Asked(
        request_id=request_id,
        prompts=prompts,
        params=task.params,
        arrival=request.scope[ARRIVAL],
        terms={
            "priority": task.body.priority,
            "tenant": tenant,
            "cache_salt": context.keys.salt(tenant, task.body.cache_salt),
            "timeout_s": task.body.timeout,
            "ttft_objective": task.body.ttft_objective,
            "tpot_objective": task.body.tpot_objective,
        },
    )


async def _whole(request: Request, context: Context, generation: Generation, shape: Shape) -> Response:
    try:
        choices = await context.lifecycle.supervise(generation.collect(), request.receive)
    except ClientGoneError:
        context.metrics.failed("client_disconnected")
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except ServerStoppingError:
        raise draining_error() from None
    except (ApiError, OctavoError) as error:
        raise from_exception(error) from None
    finally:
        await generation.close()
    return Response(msgspec.json.encode(shape.whole(choices)), media_type="application/json")
