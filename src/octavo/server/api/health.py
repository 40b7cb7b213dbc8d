"""GET /livez, /readyz, /health, and /metrics as Prometheus text."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import cast

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import EngineError
from octavo.observe.log import num_dropped_lines
from octavo.observe.metrics.prometheus import MergedMetrics, SnapshotMetrics, engine_snapshot, retry_snapshot
from octavo.server.context import Context, context_of
from octavo.server.http.auth import KEY
from octavo.server.http.body import json_response
from octavo.server.http.endpoints import Access, Endpoint, Limit
from octavo.server.http.errors import RETRY_ENGINE_S, ApiError
from octavo.server.http.keys import ANONYMOUS, KeyInfo
from octavo.server.http.middleware import UNTRUSTED

PROBE_TIMEOUT_S = 2.0
_REPLICA_FIELDS = ("number", "where", "state", "restarts", "open_requests")


async def live(request: Request) -> Response:
    """Answer 200 while this process runs, whatever the engine's state is."""
    return json_response({"status": "alive"}, is_private=True)


async def ready(request: Request) -> Response:
    """Answer 200 if new requests are accepted, or else 503 with the reason."""
    await _check_ready(context_of(request))
    return json_response({"status": "ready"}, is_private=True)


async def health(request: Request) -> Response:
    """Return the status; if the key may read metrics, also the model, open requests, journal and a fleet's replicas.

    With keys, a request without a key gets the bare status. With several keys, so does one without `metrics = true`.
    `open_requests` counts requests that are queued or generate, not this one.
    """
    context = context_of(request)
    holder: KeyInfo = request.scope[KEY]
    is_allowed = not context.keys.keys or (holder is not ANONYMOUS and context.keys.can_read_metrics(holder))
    has_details = is_allowed and UNTRUSTED not in request.scope
    try:
        await _check_ready(context)
    except ApiError as error:
        body = {"status": error.code, **(error.body() if has_details else {})}
        return json_response(body, True, error.status, error.headers())
    if not has_details:
        return json_response({"status": "ready"}, is_private=True)
    states = {each.model: each.served.state.value for each in context.each_model if each.served is not None}
    rows = cast(Mapping[str, Mapping[str, object]], (await _statistics(context) or {}).get("replicas", {}))
    replicas = [{name: row[name] for name in _REPLICA_FIELDS} for row in rows.values()]
    return json_response(
        {
            "status": "ready",
            "model": context.model,
            **({"models": states} if states else {}),
            "open_requests": sum(each.queue.num_requests for each in context.each_model),
            "journal": context.runs.report()["journal"],
            **({"replicas": replicas} if replicas else {}),
        },
        is_private=True,
    )


async def _check_ready(context: Context) -> None:
    """Raise ApiError if new work is refused or the engine makes no progress. A recovering engine counts as ready."""
    context.lifecycle.check_ready()
    ask = context.lifecycle.engine_trouble
    if ask is not None:
        trouble = ask()
        if trouble is not None:
            raise ApiError(503, trouble, code="engine_unavailable", retry_after_s=RETRY_ENGINE_S)
        return
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            await context.engine_statistics()
    except (EngineError, TimeoutError):
        message = "the engine does not answer"
        raise ApiError(503, message, code="engine_unavailable", retry_after_s=RETRY_ENGINE_S) from None


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def metrics(request: Request) -> Response:
    """Return this server's metrics and, while the engine answers, the engine's, as Prometheus text.

    With several keys, only keys with `metrics = true` in the key file may read metrics.
    """
    context = context_of(request)
    holder: KeyInfo = request.scope[KEY]
    if not context.keys.can_read_metrics(holder):
        message = f"the key {holder.name!r} may not read metrics: give it metrics = true in --api-key-file"
        raise ApiError(403, message, code="metrics_not_allowed")
    each_model = context.each_model
    collectors: list[Collector] = []
    for each, statistics in zip(each_model, await asyncio.gather(*map(_statistics, each_model)), strict=True):
        snapshots: dict[str, object] = {
            "engine": engine_snapshot(statistics) if each.is_loaded else None,
            "cache": each.cache_info or None,
            "admission": each.admission.snapshot(),
        }
        if each is context:
            snapshots |= {
                "retries": retry_snapshot(context.runs.report()),
                "responses": {**context.responses.report(), "running": len(context.background)},
                "tool": context.sandbox.statistics(),
                "log": {"dropped": _dropped_lines(statistics)},
            }
        else:
            snapshots["admission"] = {**each.admission.snapshot(), "keys": {}}  # the models share the keys' meters
        collectors += [each.metrics, SnapshotMetrics(each.model, snapshots)]
    registry = CollectorRegistry(auto_describe=False)
    for collector in collectors if len(each_model) == 1 else [MergedMetrics(collectors)]:
        registry.register(collector)
    ProcessCollector(registry=registry)  # process_*: this process's memory, time and open files
    return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE})


async def _statistics(context: Context) -> Mapping[str, object] | None:
    """Return the statistics of a model's engine; None, shown as octavo_engine_up 0, if it does not answer."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            return await context.engine_statistics()
    except (EngineError, TimeoutError):
        return None


def _dropped_lines(statistics: Mapping[str, object] | None) -> dict[str, int]:
    """Return the number of dropped log lines, by process."""
    dropped = {"api": num_dropped_lines()}
    match statistics:
        case {"log": {"dropped": int(number)}}:
            dropped["engine"] = number
    return dropped


ENDPOINTS = [
    Endpoint("GET", "/livez", live, Access.OPEN, Limit.NONE),
    Endpoint("GET", "/readyz", ready, Access.OPEN, Limit.NONE),
    Endpoint("GET", "/health", health, Access.STATUS, Limit.NONE),
    Endpoint("GET", "/metrics", metrics, limit=Limit.NONE),
]
