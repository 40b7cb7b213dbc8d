"""A request's OpenTelemetry trace: opened from its headers, sent when the request ends.

Owns: its attributes. Does not: time anything (generation does) or send it (observe.otel does).
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from types import TracebackType

from starlette.requests import Request

from octavo.core.request import SamplingParams
from octavo.observe.otel import RequestTrace, Value
from octavo.server.context import Context
from octavo.server.http.errors import from_exception
from octavo.server.http.middleware import ARRIVAL

_PARENT = ("traceparent", "tracestate")
_MAX_HEADER = 512  # of each; the standard requires up to this to be accepted


def open_trace(request: Request, context: Context, answer_id: str, params: SamplingParams) -> RequestTrace:
    """Open a request's trace."""
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
    """Send the trace when the stack closes, with the code of the error if there is one."""

    def leave(kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            trace.error = from_exception(error).code if isinstance(error, Exception) else "cancelled"
        trace.finish(time.monotonic())
        context.tracer.send(trace)

    closing.push(leave)
