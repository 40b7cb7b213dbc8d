"""From a checked body to the response, whole or streamed: the path that both kinds of completion take.

Owns: the order (seat, prompts, submission, answer) and that every failure on it frees what was taken.
Does not: know which kind it answers.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.request import SamplingParams
from octavo.errors import OctavoError
from octavo.frontend.outputs import MAX_SLICE
from octavo.frontend.sessions import RequestOptions
from octavo.observe.request_trace import RequestTrace, Value
from octavo.server.admission import AdmissionRequest
from octavo.server.api.encoders import ENCODERS
from octavo.server.auth import KEY
from octavo.server.bodies.sampling import SamplingBody
from octavo.server.bodies.served import ServedFields
from octavo.server.context import Context, context_of
from octavo.server.encoding import AnswerEncoder, AnswerSpec, Choice, Identity
from octavo.server.faults import ApiError, bad_field, draining_error, from_exception
from octavo.server.generation import Generation, GenerationRequest, open_sessions
from octavo.server.idempotency import Begun, IdempotentRequest, RetryKey, key_of
from octavo.server.keys import KeyInfo
from octavo.server.lifecycle import ClientGoneError, ServerStoppingError
from octavo.server.limits import OFF_LOOP_BYTES
from octavo.server.offload import off_loop
from octavo.server.params import check_scores, spellings
from octavo.server.request_index import engine_id
from octavo.server.resumable_stream import ResumableStream
from octavo.server.shell import ARRIVAL, CLIENT_CLOSED_REQUEST, GIVEN_ID, REQUEST_ID
from octavo.server.stream import EventStream

RETRY_NOTE = (
    "With a header `Idempotency-Key` the request runs once, however often it is asked for; `Last-Event-ID` beside it "
    "continues a stream behind that event."
)


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be answered: `read_prompts` gives the ids, `make_form` the form (of the answer's identity and the
    tokens of all prompts), `read_grammar` what the answer must obey, compiled once there is room for the request.

    `kind` begins the answer's id, unless it has a `name` already; `prompt_param` is the field that holds the prompt.
    `num_characters` are those of all prompts that are texts, `num_ids` the ids of those that are not. `can_continue`:
    whether each delta makes one event, so that a stream can go on behind any of them. `on_shape` is told of the shape
    before it gives anything.
    """

    kind: str
    body: SamplingBody
    params: SamplingParams
    num_prompts: int
    num_characters: int
    num_ids: int
    prompt_param: str
    read_prompts: Callable[[], Awaitable[Sequence[Sequence[int]]]]
    make_form: Callable[[Identity, int], AnswerSpec]
    read_grammar: Callable[[], Awaitable[str]] | None = None
    can_continue: bool = True
    on_shape: Callable[[AnswerEncoder], None] | None = None
    name: str | None = None


def wants_usage(body: SamplingBody) -> bool:
    """Whether the stream ends with a usage chunk."""
    return body.stream_options is not None and body.stream_options.include_usage


def answer_facts(body: SamplingBody, prompts: Sequence[Sequence[int]]) -> dict[str, object]:
    """What a form's facts hold of the fields that both kinds of completion share (see shapes.chunks, registry)."""
    facts: dict[str, object] = {}
    options = body.stream_options
    if options is not None and options.include_usage and options.continuous_usage_stats:
        facts["num_prompt_tokens_each"] = [len(ids) for ids in prompts]
    if body.return_token_ids:
        facts["prompt_token_ids"] = [list(ids) for ids in prompts]
    if body.return_tokens_as_token_ids:
        facts["shows_ids"] = True
    return facts


async def reply(request: Request, task: Task) -> Response:
    """Answer: submit the prompts, or read what runs or is kept under the same Idempotency-Key. Raises ApiError."""
    context = context_of(request)
    source: Generation | ResumableStream
    shape: AnswerEncoder
    if "idempotency-key" in request.headers or "last-event-id" in request.headers:
        source = shape = await _replay(request, context, task)
    else:
        source, form = await _begin(request, context, task)
        shape = ENCODERS[form.kind](form, context.text.tokenizer)
        if task.on_shape is not None:
            task.on_shape(shape)
    if task.body.stream:
        return EventStream(source, shape, context.lifecycle, context.limits, context.metrics)
    return await _whole(request, context, source, shape)


async def _replay(request: Request, context: Context, task: Task) -> ResumableStream:
    """Read the run of the request's Idempotency-Key, which goes on without this connection. Raises ApiError."""
    key, event = key_of(request)
    assert key is not None  # an event alone is refused
    if task.params.prompt_logprobs is not None:
        message = "answers with log-probabilities of the prompt are not kept; leave Idempotency-Key or those out"
        raise bad_field("Idempotency-Key", message)
    if event is not None and not task.body.stream:
        raise bad_field("Last-Event-ID", "Last-Event-ID goes with a stream; set stream to true")
    if event is not None and not task.can_continue:
        raise bad_field("Last-Event-ID", "streams of this endpoint cannot be continued; leave Last-Event-ID out")
    holder: KeyInfo = request.scope[KEY]
    return await open_run(request, context, task, RetryKey(holder.tenant, key, await body_hash(task), event))


async def open_run(request: Request, context: Context, task: Task, retry: RetryKey) -> ResumableStream:
    """A reading of the run of this key, which is begun if there is none; it needs no connection. Raises ApiError."""

    async def begin(run: IdempotentRequest) -> Begun:
        generation, form = await _begin(request, context, task, run)
        return Begun(generation, form, generation.num_choices)

    replay = await context.runs.replay(retry, begin)
    if task.on_shape is not None:
        task.on_shape(replay.shape)
    return replay


def options_of(key: KeyInfo, context: Context, body: ServedFields) -> RequestOptions:
    """Return how a request is served. Raises ApiError when its key may not have this priority."""
    priority = key.priority if body.priority is None else body.priority
    if body.priority is not None and key.max_priority is not None and priority < key.max_priority:
        message = f"priority is {priority}; the most urgent that key {key.name!r} may ask for is {key.max_priority}"
        raise ApiError(403, message, code="priority_not_allowed", param="priority")
    return {
        "priority": priority,
        "tenant": key.tenant,
        "cache_salt": context.keys.salt(key.tenant, body.cache_salt),
        "timeout_s": body.timeout,
        "queue_timeout_s": shorter(body.queue_timeout, context.admission.config.max_queue_time_s),
        "ttft_objective": body.ttft_objective,
        "tpot_objective": body.tpot_objective,
    }


def shorter(one: float | None, other: float | None) -> float | None:
    """Return the shorter of two bounds in seconds, each of which may be absent."""
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


async def body_hash(task: Task) -> bytes:
    """What tells two bodies apart: the endpoint and the fields given, however they were written."""

    def digest() -> bytes:
        return hashlib.sha256(
            task.kind.encode() + b"\n" + task.body.model_dump_json(exclude_unset=True).encode()
        ).digest()

    is_long = task.num_characters + task.num_ids > OFF_LOOP_BYTES
    return await off_loop(digest) if is_long else digest()


async def _begin(
    request: Request, context: Context, task: Task, run: IdempotentRequest | None = None
) -> tuple[Generation, AnswerSpec]:
    """Submit the prompts. Raises ApiError; then nothing of it is left."""
    scope, body, params = request.scope, task.body, task.params
    key: KeyInfo = scope[KEY]
    given = scope[GIVEN_ID]
    name = given or task.name or f"{task.kind}-{scope[REQUEST_ID]}"
    options = options_of(key, context, body)
    wanted = AdmissionRequest(
        key=key,
        priority=options["priority"],
        num_prompts=task.num_prompts,
        width=params.num_sequences,
        max_tokens=params.max_tokens,
        num_characters=task.num_characters,
        num_ids=task.num_ids,
        max_wait_s=shorter(body.queue_timeout, body.timeout),
    )
    model = context.check_model(body.model)
    with ExitStack() as undo:
        trace = open_trace(request, context, name, params) if context.tracer.is_on else None
        if trace is not None:
            send_at_end(trace, context, undo)
        try:
            ticket = context.admission.enter(wanted)
            undo.callback(ticket.leave)
            prompts: list[array[int]] = []
            num_tokens = 0
            for ids in await task.read_prompts():
                prompts.append(array("i", ids))  # a ninth of the memory of a list
                num_tokens += len(ids)
            ticket.settle(num_tokens)
            if params.prompt_logprobs is not None:
                check_scores(num_tokens, params.prompt_logprobs)
            if task.read_grammar is not None:
                params = replace(params, grammar=await task.read_grammar())
            asked = GenerationRequest(engine_id(given, name), prompts, params, scope[ARRIVAL], options, trace)
            form = task.make_form((name, int(time.time()), model), num_tokens)
            undo.callback(context.directory.add(key.tenant, name, asked.session_ids))
            if run is not None:
                context.runs.announce(run, form, asked.session_ids)
            sessions = context.sessions if run is None else context.fine_sessions
            opened = await open_sessions(sessions, asked)
        except OctavoError as error:
            names = {name: task.prompt_param for name in ("prompt_token_ids", "prompt", "messages")}
            raise from_exception(error, {**spellings(body), **names}) from None
        closing = undo.pop_all()
    return Generation(asked, opened, context.metrics, ticket, closing), form


async def _whole(
    request: Request, context: Context, source: Generation | ResumableStream, shape: AnswerEncoder
) -> Response:
    try:
        choices = await context.lifecycle.supervise(source.collect(), request.receive)
    except ClientGoneError:
        context.metrics.failed("client_disconnected")
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except ServerStoppingError:
        raise draining_error() from None
    except (ApiError, OctavoError) as error:
        raise from_exception(error) from None
    finally:
        await source.close()
    return Response(await _encoded(shape, choices), media_type="application/json")


async def _encoded(shape: AnswerEncoder, choices: Sequence[Choice]) -> bytes:
    """The answer as JSON, made on another thread where it has many log-probabilities."""

    def encode() -> bytes:
        return msgspec.json.encode(shape.whole(choices))

    deltas = (delta for choice in choices for delta in choice.deltas)
    num_entries = sum(
        len(delta.logprobs or ()) + len(delta.prompt_logprobs[1] if delta.prompt_logprobs is not None else ())
        for delta in deltas
    )
    return encode() if num_entries <= MAX_SLICE else await off_loop(encode)


_PARENT = ("traceparent", "tracestate")
_MAX_HEADER = 512  # of each; the standard's own bound on what must be taken


def open_trace(request: Request, context: Context, answer_id: str, params: SamplingParams) -> RequestTrace:
    """Begin a request's trace."""
    operation = "text_completion" if request.url.path == "/v1/completions" else "chat"
    given_parent = {name: request.headers.get(name, "") for name in _PARENT}
    parent = {name: value for name, value in given_parent.items() if 0 < len(value) <= _MAX_HEADER}
    given: dict[str, Value | None] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "octavo",
        "gen_ai.request.model": context.model,
        "gen_ai.response.model": context.model,
        "gen_ai.response.id": answer_id,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.choice.count": params.n,
        "http.request.method": request.method,
        "url.path": request.url.path,
    }
    attributes = {name: value for name, value in given.items() if value is not None}
    return RequestTrace(f"{operation} {context.model}", request.scope[ARRIVAL], parent, attributes)


def send_at_end(trace: RequestTrace, context: Context, closing: ExitStack) -> None:
    """Send it when the stack is left; with the code of the error where one left it."""

    def leave(kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            trace.error = from_exception(error).code if isinstance(error, Exception) else "cancelled"
        trace.finish(time.monotonic())
        context.tracer.send(trace)

    closing.push(leave)
