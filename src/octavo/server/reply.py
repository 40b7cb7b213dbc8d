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
from octavo.server.admission import Wish
from octavo.server.auth import KEY
from octavo.server.context import Context, context_of
from octavo.server.directory import engine_id
from octavo.server.faults import ApiError, draining_error, from_exception
from octavo.server.generation import Asked, Generation, open_sessions
from octavo.server.keys import KeyInfo
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

    `kind` begins the answer's id; `prompt_param` is the field that holds the prompt. `num_characters` are those of all
    prompts that are texts, `num_ids` the ids of those that are not.
    """

    kind: str
    body: SamplingBody
    params: SamplingParams
    num_prompts: int
    num_characters: int
    num_ids: int
    prompt_param: str
    read_prompts: Callable[[], Awaitable[Sequence[Sequence[int]]]]
    make_shape: Callable[[Identity], Shape]


def wants_usage(body: SamplingBody) -> bool:
    """Whether the stream ends with a usage chunk."""
    return body.stream_options is not None and body.stream_options.include_usage


async def reply(request: Request, task: Task) -> Response:
    """Submit the prompts and answer. Raises ApiError."""
    context = context_of(request)
    given = request.scope[GIVEN_ID]
    name = given or f"{task.kind}-{request.scope[REQUEST_ID]}"
    wish = _wish(request, task)
    with ExitStack() as undo:
        try:
            lease = context.admission.enter(wish)
            undo.callback(lease.leave)
            prompts = await task.read_prompts()
            lease.settle(sum(map(len, prompts)))
            asked = _asked(request, context, task, engine_id(given, name), prompts)
            undo.callback(context.directory.add(wish.key.tenant, name, asked.session_ids))
            opened = await open_sessions(context.sessions, asked)
        except OctavoError as error:
            names = {name: task.prompt_param for name in ("prompt_token_ids", "prompt", "messages")}
            raise from_exception(error, {**spellings(task.body), **names}) from None
        closing = undo.pop_all()
    generation = Generation(asked, opened, context.metrics, lease, closing)
    shape = task.make_shape((name, int(time.time()), context.model))
    if task.body.stream:
        return EventStream(generation, shape, context.lifecycle, context.limits, context.metrics)
    return await _whole(request, context, generation, shape)


def _wish(request: Request, task: Task) -> Wish:
    """What admission looks at. Raises ApiError when the key may not have this priority."""
    key: KeyInfo = request.scope[KEY]
    limits = [limit for limit in (task.body.queue_timeout, task.body.timeout) if limit is not None]
    return Wish(
        key=key,
        priority=priority_of(task.body.priority, key),
        num_prompts=task.num_prompts,
        width=task.params.num_sequences,
        max_tokens=task.params.max_tokens,
        num_characters=task.num_characters,
        num_ids=task.num_ids,
        max_wait_s=min(limits, default=None),
    )


def priority_of(asked: int | None, key: KeyInfo) -> int:
    """The request's priority, or the key's own. Raises ApiError where the key may not ask for it."""
    if asked is None:
        return key.priority
    if key.max_priority is not None and asked < key.max_priority:
        message = f"priority is {asked}; the most urgent that key {key.name!r} may ask for is {key.max_priority}"
        raise ApiError(403, message, code="priority_not_allowed", param="priority")
    return asked


def _asked(request: Request, context: Context, task: Task, request_id: str, prompts: Sequence[Sequence[int]]) -> Asked:
    key: KeyInfo = request.scope[KEY]
    waits = [
        limit for limit in (task.body.queue_timeout, context.admission.config.max_queue_time_s) if limit is not None
    ]
    return Asked(
        request_id=request_id,
        prompts=prompts,
        params=task.params,
        arrival=request.scope[ARRIVAL],
        terms={
            "priority": priority_of(task.body.priority, key),
            "tenant": key.tenant,
            "cache_salt": context.keys.salt(key.tenant, task.body.cache_salt),
            "timeout_s": task.body.timeout,
            "queue_timeout_s": min(waits, default=None),
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
