"""Generation: from any API's GenerationRequest to the deltas of its answer.

Owns: the order of the steps (admission, prompts, grammar, submission); submitting all prompts of a request or none;
merging the sessions' deltas; the request's metrics and OpenTelemetry trace; releasing its resources after a failure.
Does not: know an API (each builds its own GenerationRequest) or send anything.
Invariant: after `close`, no session of a Generation is open in the engine.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING

from starlette.requests import Request

from octavo.core.request import FinishError, FinishReason, SamplingParams, Span, Want
from octavo.errors import ErrorKind, OctavoError, error_of
from octavo.frontend.sessions import RequestOptions, token_bytes
from octavo.observe.metrics.prometheus import Finished, RequestMetrics
from octavo.observe.otel import RequestTrace, Timed, Value
from octavo.server.admission import AdmissionRequest, AdmissionTicket
from octavo.server.api.sampling import ServedFields
from octavo.server.context import Context
from octavo.server.encoding import REASONS, AnswerEncoder, AnswerSpec, Choice, Identity
from octavo.server.http.auth import KEY
from octavo.server.http.errors import ApiError, cancelled_error, from_exception
from octavo.server.http.keys import KeyInfo
from octavo.server.http.lifecycle import MARK
from octavo.server.http.middleware import ARRIVAL, GIVEN_ID, REQUEST_ID

if TYPE_CHECKING:
    from octavo.fleet.served_models import OnDemandModel
    from octavo.frontend.outputs import Usage
    from octavo.frontend.sessions import Session, Sessions, TextDelta
    from octavo.media.item import MediaItem
    from octavo.server.idempotency import IdempotentRequest

_PARENT = ("traceparent", "tracestate")
MAX_SESSION_CHARACTERS = 256  # of a session's name; the rest is ignored
_MAX_HEADER = 512  # characters per header; W3C Trace Context asks for at least 512 of tracestate


def open_trace(request: Request, context: Context, answer_id: str, params: SamplingParams) -> RequestTrace:
    """Return a new OpenTelemetry trace of a request."""
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
    """Send the trace when `closing` closes, with the error's code if an error closes it."""

    def leave(kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            trace.error = from_exception(error).code if isinstance(error, Exception) else "cancelled"
        trace.finish(time.monotonic())
        context.tracer.send(trace)

    closing.push(leave)


Merged = asyncio.Queue["tuple[int, TextDelta] | asyncio.Task[None]"]
GIVEN_UP = (FinishReason.CANCELLED, FinishReason.TIMEOUT)


@dataclass(kw_only=True)
class GenerationRequest(ABC):
    """A request of any API: the Context of its model, its checked body and its parameters.

    Each API has a subclass that reads the prompts and gives the AnswerSpec. `id_prefix` begins the answer's id, unless
    `name` is the whole id. `prompt_param` is the field that holds the prompt. `num_characters` counts the characters of
    all prompts given as text, `num_ids` the ids of all other prompts.
    `can_continue`: each delta makes one event, so that a stream can continue after any event.
    """

    context: Context
    body: ServedFields
    params: SamplingParams
    id_prefix: str
    prompt_param: str
    num_prompts: int = 1
    num_characters: int = 0
    num_ids: int = 0
    name: str | None = None
    session: str = ""  # the conversation that the body names
    stream: bool = False
    can_continue: bool = True
    is_constrained: bool = False  # the answer must obey a grammar
    wants: Want | None = None  # what to compute instead of text, such as embeddings
    spans: Sequence[Span] = ()  # places of images in the only prompt, set by read_prompts, and so are `media`
    media: Sequence[MediaItem] = ()
    prepare: Callable[[AnswerEncoder], None] | None = None  # called with the new encoder before its first use

    @abstractmethod
    async def read_prompts(self) -> Sequence[Sequence[int]]:
        """Return the token ids of each prompt. Raises ApiError."""

    @abstractmethod
    def answer_spec(self, identity: Identity) -> AnswerSpec:
        """Return the spec of the answer's encoder; call after `read_prompts`."""

    async def read_grammar(self) -> str:
        """Return the compiled grammar that the answer must obey; "" for none. Raises ApiError."""
        return ""

    def field_names(self) -> dict[str, str]:
        """Return a map from the engine's field names to the client's field names."""
        return dict.fromkeys(("prompt_token_ids", "prompt", "messages"), self.prompt_param)


async def start(
    request: Request, wanted: GenerationRequest, run: IdempotentRequest | None = None
) -> tuple[Generation, AnswerSpec]:
    """Admit the request, read its prompts and submit them. On ApiError, all its resources are released."""
    context, scope, params = wanted.context, request.scope, wanted.params
    if wanted.wants is None:
        try:
            context.text.check_generates()
        except OctavoError as error:
            raise from_exception(error) from None
    key: KeyInfo = scope[KEY]
    given: str | None = scope[GIVEN_ID]
    name = given or wanted.name or f"{wanted.id_prefix}-{scope[REQUEST_ID]}"
    # The random part keeps ids in the engine unique, even if clients send the same X-Request-Id.
    engine_id = name if given is None else f"{given}{MARK}{secrets.token_hex(6)}"
    options = options_of(key, context, wanted)
    options["session"] = (request.headers.get("x-session-id") or wanted.session)[:MAX_SESSION_CHARACTERS]
    with ExitStack() as undo:
        trace = None
        if context.tracer.is_on and wanted.wants is None:
            trace = open_trace(request, context, name, params)
            send_at_end(trace, context, undo)
        try:
            ticket = context.admission.admit(
                AdmissionRequest(
                    key=key,
                    priority=options["priority"],
                    num_prompts=wanted.num_prompts,
                    width=params.num_sequences,
                    max_tokens=0 if wanted.wants is not None else params.max_tokens,
                    num_characters=wanted.num_characters,
                    num_ids=wanted.num_ids,
                    max_wait_s=shorter(wanted.body.queue_timeout, wanted.body.timeout),
                )
            )
            undo.callback(ticket.leave)
            if context.served is not None:
                undo.callback(await _loaded(request, context.served, wanted, needs_client=run is None))
            prompts: list[array[int]] = []
            for read in await wanted.read_prompts():
                prompts.append(array("i", read))  # a ninth of a list's memory
            if wanted.spans:
                options["spans"], options["media"] = tuple(wanted.spans), tuple(wanted.media)
            context.admission.check_tokens(ticket, sum(map(len, prompts)))
            if wanted.is_constrained:
                params = replace(params, grammar=await wanted.read_grammar())
            ids = [engine_id] if len(prompts) == 1 else [f"{engine_id}-{index}" for index in range(len(prompts))]
            spec = wanted.answer_spec((name, int(time.time()), wanted.body.model or context.models[0]))
            undo.callback(context.request_index.add(key.tenant, name, ids))
            if run is not None:
                context.runs.announce(run, context.recorded(spec), ids)
            sessions = context.sessions if run is None else context.fine_sessions
            opened = await _open(sessions, params, options, list(zip(ids, prompts, strict=True)))
        except OctavoError as error:
            raise from_exception(error, wanted.field_names()) from None
        closing = undo.pop_all()
    generation = Generation(
        name=engine_id,
        params=params,
        prompt_lengths=list(map(len, prompts)),
        arrival=scope[ARRIVAL],
        sessions=opened,
        metrics=context.metrics,
        ticket=ticket,
        closing=closing,
        trace=trace,
    )
    return generation, spec


async def _loaded(
    request: Request, model: OnDemandModel, wanted: GenerationRequest, *, needs_client: bool
) -> Callable[[], None]:
    """Wait until a model is loaded; return the function that releases it. Raises ApiError, ModelLoadError.

    The request waits no longer than it may wait in the queue, and with `needs_client` not after its client has left.
    """
    if model.is_usable or not needs_client:
        return await model.acquire()
    max_queue_s = shorter(wanted.body.queue_timeout, wanted.context.admission.config.max_queue_time_s)
    try:
        async with asyncio.timeout(shorter(max_queue_s, wanted.body.timeout)):
            return await wanted.context.lifecycle.supervise(model.acquire(), request.receive)
    except TimeoutError:
        message = f"model {model.name} was not loaded within the request's time"
        raise ApiError(408, message, code="queue_timeout") from None


def options_of(key: KeyInfo, context: Context, wanted: GenerationRequest) -> RequestOptions:
    """Return the request's options. Raises ApiError if the key may not use the body's priority."""
    body = wanted.body
    priority = key.priority if body.priority is None else body.priority
    if body.priority is not None and key.max_priority is not None and priority < key.max_priority:
        message = f"priority is {priority}; the most urgent that key {key.name!r} may ask for is {key.max_priority}"
        raise ApiError(403, message, code="priority_not_allowed", param="priority")
    options: RequestOptions = {
        "priority": priority,
        "tenant": key.tenant,
        "cache_salt": cache_salt(key, body.cache_salt),
        "timeout_s": body.timeout,
        "queue_timeout_s": shorter(body.queue_timeout, context.admission.config.max_queue_time_s),
        "ttft_objective": body.ttft_objective,
        "tpot_objective": body.tpot_objective,
    }
    if wanted.wants is not None:
        options["wants"] = wanted.wants
    return options


def cache_salt(key: KeyInfo, given: str | None) -> bytes:
    """Return the prefix-cache salt. With keys, tenants never share prefixes; the client's salt restricts sharing."""
    own = (given or "").encode()
    return hmac.digest(key.salt, own, "sha256") if key.salt else own


def shorter(one: float | None, other: float | None) -> float | None:
    """Return the shorter of two bounds in seconds; None is no bound."""
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


@dataclass(kw_only=True)
class Generation:
    """The sessions of one request, one per prompt. Choices are numbered prompt by prompt.

    `name` identifies the request in logs. `closing` releases all resources of the request, including the ticket.
    """

    name: str
    params: SamplingParams
    prompt_lengths: Sequence[int]
    arrival: float  # when the request arrived at the server, on the monotonic clock
    sessions: list[Session]
    metrics: RequestMetrics
    ticket: AdmissionTicket
    closing: ExitStack
    trace: RequestTrace | None = None
    _started: set[int] = field(default_factory=set)  # indexes of sessions with a token
    _ended: set[int] = field(default_factory=set)  # indexes of sessions that have ended
    _last_at: dict[int, float] = field(default_factory=dict)  # time of the last token, by choice
    _num_tokens: Counter[int] = field(default_factory=Counter)  # generated tokens, by choice

    @property
    def num_choices(self) -> int:
        """The number of choices of all prompts."""
        return len(self.sessions) * self.params.n

    @property
    def unread_bytes(self) -> int:
        """The approximate bytes of unread token ids, and of their log-probabilities if requested."""
        return token_bytes(self.params.num_logprobs) * sum(session.num_unread for session in self.sessions)

    def deltas(self) -> AsyncGenerator[tuple[int, TextDelta], None]:
        """Yield (choice index, delta) until every choice has a finish reason. Raises ApiError if a choice fails."""
        return self._merged() if len(self.sessions) > 1 else self._deltas_of(0)

    async def _deltas_of(self, session: int) -> AsyncGenerator[tuple[int, TextDelta], None]:
        async for delta in self.sessions[session]:
            index = session * self.params.n + delta.choice
            if delta.finish_reason not in (None, *REASONS) and delta.text:  # first yield the text before a failure
                before = replace(delta, finish_reason=None, stop_reason=None, usage=None, error=None)
                if before.token_ids:
                    self._note_tokens(session, index, before)
                yield index, before
                delta = replace(delta, text="", token_ids=delta.token_ids[:0], logprobs=None)
            if delta.token_ids:
                self._note_tokens(session, index, delta)
            if delta.finish_reason is not None:
                self._note_end(session, delta.finish_reason, delta)
            yield index, delta
        if session not in self._ended:
            raise ApiError(500, "the engine ended an answer without a reason", code="engine_error")

    async def _merged(self) -> AsyncGenerator[tuple[int, TextDelta], None]:
        queue: Merged = asyncio.Queue()
        room = asyncio.Semaphore(len(self.sessions))  # without room, outputs stay in the ledger
        tasks = [asyncio.create_task(self._forward(index, queue, room)) for index in range(len(self.sessions))]
        for task in tasks:
            task.add_done_callback(queue.put_nowait)
        num_open = len(tasks)
        try:
            while num_open:
                item = await queue.get()
                if isinstance(item, asyncio.Task):
                    item.result()
                    num_open -= 1
                else:
                    room.release()
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _forward(self, session: int, queue: Merged, room: asyncio.Semaphore) -> None:
        async with aclosing(self._deltas_of(session)) as deltas:
            async for each in deltas:
                await room.acquire()
                queue.put_nowait(each)

    def _note_tokens(self, session: int, index: int, delta: TextDelta) -> None:
        now, num_tokens = time.monotonic(), len(delta.token_ids)
        is_first = session not in self._started
        if is_first:
            self._started.add(session)
            self.metrics.first_tokens(now - self.arrival, num_tokens, self.prompt_lengths[session])
        elif index in self._last_at:
            self.metrics.next_tokens(now - self._last_at[index], num_tokens)
        else:
            self.metrics.other_tokens(num_tokens)
        self.ticket.generated(num_tokens, is_first)
        self._num_tokens[index] += num_tokens
        self._last_at[index] = now

    def _note_end(self, session: int, reason: FinishReason, delta: TextDelta) -> None:
        """Count a choice's end, and its prompt's end if the delta has usage. Raises ApiError if the choice failed."""
        usage, trace, now = delta.usage, self.trace, time.monotonic()
        if usage is not None:
            self._ended.add(session)
            if trace is not None:
                trace.timed(_timed(usage, now), REASONS.get(reason, reason.name.lower()))
        if reason not in REASONS:
            if trace is not None:
                trace.error = reason.name.lower()
            if usage is not None:
                self.metrics.ended_early("abort" if reason in GIVEN_UP else "error")
            raise failure_of(reason, delta.error)
        if usage is not None:
            if session not in self._started:  # the request asked for no tokens: its answer comes from the prompt alone
                self.metrics.prompt_only(usage.prompt_tokens)
            n = self.params.n
            end = Finished(
                REASONS[reason],
                usage.prompt_tokens,
                usage.completion_tokens,
                usage.cached_tokens,
                usage.queue_s,
                usage.ttft_s,
                e2e_s=now - self.arrival,
                max_tokens=self.params.max_tokens,
                num_choices=self.params.num_sequences,
                longest=max(map(self._num_tokens.__getitem__, range(session * n, session * n + n))),
            )
            self.metrics.finished(end)
            self.ticket.ended(usage.prompt_tokens, usage.cached_tokens)

    async def collect(self) -> list[Choice]:
        """Wait for every choice to end, and return all choices."""
        choices = [Choice() for _ in range(self.num_choices)]
        async with aclosing(self.deltas()) as deltas:
            async for index, delta in deltas:
                choices[index].deltas.append(delta)
        return choices

    async def close(self) -> None:
        """Cancel unfinished sessions, and release all resources of the request. Idempotent."""
        if len(self._ended) < len(self.sessions) and self.trace is not None:
            self.trace.error = self.trace.error or "cancelled"
        self.closing.close()
        for index, session in enumerate(self.sessions):
            if index not in self._ended:
                self._ended.add(index)
                self.metrics.ended_early("abort")
                await session.cancel()


def _timed(usage: Usage, now: float) -> Timed:
    return Timed(
        arrival=now - usage.e2e_s,
        queue_s=usage.queue_s,
        ttft_s=usage.ttft_s,
        ended=now,
        preempted=usage.preempted,
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def failure_of(reason: FinishReason, error: FinishError | None) -> ApiError:
    """Return the ApiError for a finish reason and the engine's error, if any."""
    kind = ErrorKind.ENGINE if error is None else error.kind
    if reason is FinishReason.TIMEOUT and kind is ErrorKind.QUEUE_TIMEOUT:
        return ApiError(408, "the request did not start within its queue timeout", code="queue_timeout")
    if reason is FinishReason.TIMEOUT:
        return ApiError(408, "the request did not finish within its timeout", code="timeout")
    if reason is FinishReason.CANCELLED and kind is not ErrorKind.ENGINE_DEAD:
        return cancelled_error()
    return from_exception(error_of(kind, "the engine failed" if error is None else error.message))


async def _open(
    sessions: Sessions, params: SamplingParams, options: RequestOptions, prompts: Sequence[tuple[str, Sequence[int]]]
) -> list[Session]:
    """Submit every prompt under its id, or none: if one is refused, the others are cancelled.

    All are submitted concurrently, in order: an engine that answers between steps would otherwise accept one per step.
    """
    if len(prompts) == 1:
        [(request_id, ids)] = prompts
        return [await sessions.submit(ids, params, request_id=request_id, **options)]
    opening = [
        asyncio.ensure_future(sessions.submit(ids, params, request_id=request_id, **options))
        for request_id, ids in prompts
    ]
    try:
        return list(await asyncio.gather(*opening))
    except (OctavoError, asyncio.CancelledError):
        for each in opening:
            each.cancel()
        for opened in await asyncio.gather(*opening, return_exceptions=True):
            if not isinstance(opened, BaseException):
                await opened.cancel()
        raise
