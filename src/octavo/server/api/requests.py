"""GET explain and POST cancel under /v1/requests/{id}; explanations for the operator's admin socket.

Owns: requesting the engine's explanation of each prompt, and hiding other tenants' requests. Does not: find reasons
(observe.explainer does, in the engine).
Invariant: an answer to a client never names another tenant's request. Where that request is the reason, it has null.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.context import Context, context_of
from octavo.server.http.auth import tenant_of
from octavo.server.http.body import json_response
from octavo.server.http.endpoints import Endpoint, Limit
from octavo.server.http.errors import ApiError

MAX_EXPLANATIONS = 64  # per request; the engine reads its queue for each explained prompt
UNKNOWN = "unknown"
_HIDDEN = ("id", "tenant", "public_text", "name")
_NEW_S = "new_request_s"


async def explain_own(context: Context, name: str, tenant: str) -> dict[str, object] | None:
    """Explain a tenant's open or recently ended request, without other tenants' names; return None if unknown."""
    ids = context.request_index.find(name, tenant) or context.request_index.find_ended(name, tenant)
    context, answers = await _ask_any(context, ids)
    queue = queue_of(context, answers)
    shown = [answer for answer in answers if answer.get("state") != UNKNOWN]
    if not shown:
        return None
    own = context.request_index.names(tenant)
    return {
        "id": name,
        "explanations": [_for_client(answer, own) for answer in shown],
        "num_left_out": len(ids[MAX_EXPLANATIONS:]),
        "queue": queue,
    }


async def explain_any(context: Context, name: str) -> dict[str, object]:
    """Explain a request of any tenant to the operator. `name` is the client's name or the engine id."""
    ids = context.request_index.find(name) or context.request_index.find_ended(name) or [name]
    context, answers = await _ask_any(context, ids)
    queue = queue_of(context, answers)
    return {"id": name, "explanations": answers, "num_left_out": len(ids[MAX_EXPLANATIONS:]), "queue": queue}


async def explain_open(context: Context) -> dict[str, object]:
    """Explain all open requests of one model to the operator."""
    answer = await context.sessions.client.control("explain") if context.is_loaded else {"open": []}
    shown = dict(answer) if isinstance(answer, Mapping) else {}
    queue = queue_of(context, [shown])
    return {**shown, "queue": queue}


def queue_of(context: Context, answers: list[dict[str, Any]]) -> dict[str, object]:
    """Return the queue as admission counts it, with the numbers that a 429 shows.

    Remove the wait of a new request from the engine's answers and pass it to admission, so that admission reports the
    same wait to the next request.
    """
    waits = [answer.pop(_NEW_S) for answer in answers if _NEW_S in answer]
    if waits:
        context.queue.forecast.update({_NEW_S: waits[0]}, context.queue.state())
    figures = context.admission.snapshot()
    return {
        "num_waiting": figures["waiting"],
        "max_waiting": figures["max_waiting"],
        "num_waiting_tokens": figures["waiting_tokens"],
        "max_waiting_tokens": figures["max_waiting_tokens"],
        "wait_s": figures["wait_s"],
    }


async def _ask_any(context: Context, ids: list[str]) -> tuple[Context, list[dict[str, Any]]]:
    """Return the Context of the model whose engine knows the requests, and what it answers about them.

    If no engine knows them, return what the default model's answers. Ids are unique over all models.
    """
    each_model = context.each_model
    if len(each_model) == 1:
        return context, await _ask(context, ids)
    unknown = (context, list[dict[str, Any]]())
    for each in each_model:
        if each.is_loaded:
            answers = await _ask(each, ids)
            if any(answer.get("state") != UNKNOWN for answer in answers):
                return each, answers
            unknown = (each, answers)
    return unknown


async def _ask(context: Context, ids: list[str]) -> list[dict[str, Any]]:
    answers = [await context.sessions.client.control("explain", one) for one in ids[:MAX_EXPLANATIONS]]
    return [dict(answer) for answer in answers if isinstance(answer, Mapping)]


def _for_client(answer: dict[str, Any], own: Mapping[str, str]) -> dict[str, object]:
    """Return an engine's answer with the client's names for the tenant's own requests, and without other names."""
    shown = {key: value for key, value in answer.items() if key not in _HIDDEN}
    shown["text"] = answer.get("public_text", "")
    if "behind" in shown:
        shown["behind"] = own.get(shown["behind"])
    if "ahead" in shown:
        shown["num_ahead"] = max(0, answer.get("position", 0) - 1)
        shown["ahead"] = [
            {"id": own[other["name"]], "why": other["why"]} for other in shown["ahead"] if other["name"] in own
        ]
    if "events" in shown:  # only the client's own requests have a name
        shown["events"] = [
            {**event, "by": own.get(event["by"])} if "by" in event else event for event in shown["events"]
        ]
    return shown


async def explain(request: Request) -> Response:
    """Explain the state of a request, or how it ended, for each of its prompts. Only its own tenant can find it."""
    context, name = context_of(request), request.path_params["request_id"]
    shown = await explain_own(context, name, tenant_of(request))
    if shown is None:
        kept = context.explain_kept
        text = f"no request {name[:128]!r} of yours is open or can still be explained: {kept} are, after their end"
        raise ApiError(404, text, code="request_not_found")
    return json_response(shown, is_private=True)


async def cancel(request: Request) -> Response:
    """Cancel an open request. A client that waits for its answer gets an error. Only its own tenant can find it."""
    context, name = context_of(request), request.path_params["request_id"]
    ids = context.request_index.find(name, tenant_of(request))
    if not ids:
        raise ApiError(404, f"no request {name[:128]!r} of yours is open", code="request_not_found")
    for each in context.each_model:  # ids are unique over all models
        each.sessions.client.cancel(ids)
    return json_response({"id": name, "cancelled": True}, is_private=True)


ENDPOINTS = [
    Endpoint("GET", "/v1/requests/{request_id}/explain", explain),
    Endpoint("POST", "/v1/requests/{request_id}/cancel", cancel, limit=Limit.NONE),
]
