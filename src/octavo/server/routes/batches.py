"""/v1/batches: files of requests that are answered along with interactive ones."""

from __future__ import annotations

import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.batches.records import BatchRecord
from octavo.server.batches.store import new_id
from octavo.server.bodies.batch import BatchBody, read_batch
from octavo.server.context import context_of
from octavo.server.http.auth import KEY
from octavo.server.http.body import read_json
from octavo.server.http.endpoints import Endpoint, Limit
from octavo.server.http.errors import bad_field
from octavo.server.http.keys import KeyInfo
from octavo.server.routes.files import find, page

_WINDOW_S = 24 * 3600
_MAX_LISTED = 100


async def create_batch(request: Request) -> Response:
    """Accept a batch; it is checked and run later."""
    context = context_of(request)
    context.lifecycle.check_ready()
    store = context.batches.store
    body = await read_json(request, context.limits, read_batch)
    holder: KeyInfo = request.scope[KEY]
    file = store.files.get(body.input_file_id)
    if file is None or file.tenant != holder.tenant:
        raise bad_field("input_file_id", f"input_file_id is {body.input_file_id!r}, which is no file of yours")
    if file.purpose != "batch":
        raise bad_field("input_file_id", f"file {file.id} has the purpose {file.purpose}; upload one with batch")
    now = int(time.time())
    batch = BatchRecord(
        id=new_id("batch_"),
        tenant=holder.tenant,
        holder=holder.name,
        endpoint=body.endpoint,
        input_id=file.id,
        completion_window=body.completion_window,
        created_at=now,
        expires_at=now + _WINDOW_S,
        output_id=new_id("file-"),
        error_id=new_id("file-"),
        output_keep_s=None if body.output_expires_after is None else body.output_expires_after.seconds,
        metadata=body.metadata,
    )
    await context.batches.add(batch, holder)
    return _json(batch)


async def list_batches(request: Request) -> Response:
    """List the caller's batches, newest first."""
    store = context_of(request).batches.store
    return Response(
        msgspec.json.encode(page(request, list(store.batches.values()), _MAX_LISTED)), media_type="application/json"
    )


async def get_batch(request: Request) -> Response:
    """Describe a batch."""
    return _json(_batch(request))


async def cancel_batch(request: Request) -> Response:
    """Cancel a batch; it keeps its answers."""
    batch = _batch(request)
    await context_of(request).batches.cancel(batch)
    return _json(batch)


def _batch(request: Request) -> BatchRecord:
    return find(request, context_of(request).batches.store.batches, request.path_params["batch_id"])


def _json(batch: BatchRecord) -> Response:
    return Response(msgspec.json.encode(batch.shown()), media_type="application/json")


ENDPOINTS = [
    Endpoint("POST", "/v1/batches", create_batch, body=BatchBody),
    Endpoint("GET", "/v1/batches", list_batches, limit=Limit.NONE),
    Endpoint("GET", "/v1/batches/{batch_id}", get_batch, limit=Limit.NONE),
    Endpoint("POST", "/v1/batches/{batch_id}/cancel", cancel_batch, limit=Limit.NONE),
]
