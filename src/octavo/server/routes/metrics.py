"""GET /metrics: Prometheus text."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import generate_latest
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import EngineError
from octavo.observe.log import num_dropped_lines
from octavo.observe.metrics.snapshots import SnapshotMetrics, engine_snapshot, retry_snapshot
from octavo.server.auth import KEY
from octavo.server.context import context_of
from octavo.server.faults import ApiError
from octavo.server.http.endpoints import Endpoint, Limit
from octavo.server.keys import KeyInfo

PROBE_TIMEOUT_S = 2.0
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def metrics(request: Request) -> Response:
    """Return the front end's series and, while the engine answers, its gauges.

    If there are several keys, only those with `metrics = true` in the key file may read them.
    """
    context = context_of(request)
    holder: KeyInfo = request.scope[KEY]
    if not context.keys.may_measure(holder):
        message = f"the key {holder.name!r} may not read metrics: give it metrics = true in --api-key-file"
        raise ApiError(403, message, code="metrics_not_allowed")
    statistics: Mapping[str, object] | None = None
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            statistics = await context.engine_statistics()
    except (EngineError, TimeoutError):
        pass  # shown as octavo_engine_up 0
    snapshots = {
        "engine": engine_snapshot(statistics),
        "cache": context.cache_info or None,
        "admission": context.admission.snapshot(),
        "retries": retry_snapshot(context.runs.report()),
        "responses": {**context.responses.report(), "running": len(context.background)},
        "tool": context.sandbox.statistics(),
        "log": {"dropped": _dropped_lines(statistics)},
    }
    registry = CollectorRegistry(auto_describe=False)
    registry.register(context.metrics)
    registry.register(SnapshotMetrics(context.model, snapshots))
    ProcessCollector(registry=registry)  # process_*: this process's memory, time and open files
    return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE})


def _dropped_lines(statistics: Mapping[str, object] | None) -> dict[str, int]:
    """Return how many log lines were dropped, by process."""
    dropped = {"api": num_dropped_lines()}
    match statistics:
        case {"log": {"dropped": int(number)}}:
            dropped["engine"] = number
    return dropped


ENDPOINTS = [Endpoint("GET", "/metrics", metrics, limit=Limit.NONE)]
