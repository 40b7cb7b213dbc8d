"""/v1/files and /v1/batches: file uploads, batches of requests that run beside interactive ones, and their outputs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response

from octavo.server.api.batches.service import BatchService
from octavo.server.api.batches.store import BatchRecord, BatchStore, FileRecord, new_id
from octavo.server.api.fields import IGNORED_FIELDS, Body, collect_ignored, ignore, read
from octavo.server.api.responses.bodies import MAX_METADATA, Metadata
from octavo.server.context import Context, context_of
from octavo.server.http.auth import KEY, tenant_of
from octavo.server.http.body import check_coding, json_response, read_json
from octavo.server.http.endpoints import Endpoint, Limit
from octavo.server.http.errors import ApiError, bad_field, is_anthropic
from octavo.server.http.keys import KeyInfo

MAX_FILE_ID_CHARACTERS = 128


class OutputExpiry(Body):
    """How long a batch's outputs are kept."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=2_592_000)]


class BatchBody(Body):
    """POST /v1/batches."""

    input_file_id: Annotated[str, Field(min_length=1, max_length=MAX_FILE_ID_CHARACTERS)]
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: Annotated[Metadata, Field(max_length=MAX_METADATA)] | None = None
    output_expires_after: OutputExpiry | None = None


def read_batch(fields: dict[str, object]) -> BatchBody:
    """Check a batch body. Raises ApiError naming the field."""
    return read(BatchBody, fields, {}, {})


R = TypeVar("R", FileRecord, BatchRecord)
_MAX_FIELDS = 8
_MAX_FIELD_BYTES = 4096
_MAX_NAME = 255
_AROUND_FILE = 65_536  # bytes of a form besides its file
_MAX_LISTED = 10_000  # OpenAI's bound on a page
_EXPIRY = ("expires_after[anchor]", "expires_after[seconds]")


async def create_file(request: Request) -> Response:
    """Store a file of requests."""
    context, store = context_of(request), _files(request)
    context.lifecycle.check_ready()
    service = context.batches
    holder: KeyInfo = request.scope[KEY]
    declared = request.headers.get("content-length", "")
    min_bytes = int(declared[:19]) - _AROUND_FILE if declared.isascii() and declared.isdigit() else 0
    async with service.uploads.take(holder.tenant):
        await asyncio.to_thread(store.check_room, holder, max(0, min_bytes))
        form = await _read_form(request, context, service)
        try:
            with collect_ignored(request.scope[IGNORED_FIELDS]):
                file, expires_s = _read_fields(form)
            now = int(time.time())
            record = FileRecord(
                new_id("file-"),
                holder.tenant,
                clean_name(file.filename or ""),
                str(form["purpose"]),
                file.size or 0,
                now,
                None if expires_s is None else now + expires_s,
            )
            await asyncio.to_thread(store.add_file, file.file, record, holder)
        finally:
            await form.close()
    return json_response(record.shown())


def clean_name(given: str) -> str:
    """Return a file's name without folders and unprintable characters, at most _MAX_NAME characters long."""
    name = given.replace("\\", "/").rpartition("/")[2]
    name = "".join(character for character in name if character.isprintable()).strip()[:_MAX_NAME]
    return name if name.strip(".") else "file"


async def _read_form(request: Request, context: Context, service: BatchService) -> FormData:
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "multipart/form-data":
        raise bad_field(
            "file", "send the file as multipart/form-data, with the fields file and purpose", "invalid_form"
        )
    check_coding(request)
    max_bytes, limits, deadline = service.config.max_upload_bytes, context.limits, asyncio.timeout(None)

    async def stream() -> AsyncGenerator[bytes, None]:
        size, began = 0, asyncio.get_running_loop().time()
        deadline.reschedule(began + min(limits.body_timeout_s, limits.upload_grace_s))
        async for part in request.stream():
            size += len(part)
            allowed_s = limits.upload_grace_s + size / limits.min_upload_bytes_per_s
            deadline.reschedule(began + min(limits.body_timeout_s, allowed_s))
            if size > max_bytes + _AROUND_FILE:
                message = (
                    f"the upload is larger than {max_bytes} bytes, the most this server takes (--max-upload-bytes)"
                )
                raise ApiError(413, message, code="body_too_large", param="file")
            yield part

    parser = MultiPartParser(
        request.headers, stream(), max_files=1, max_fields=_MAX_FIELDS, max_part_size=_MAX_FIELD_BYTES
    )
    try:
        async with deadline:
            return await parser.parse()
    except TimeoutError:
        message = (
            f"the body did not arrive within {limits.body_timeout_s:g} s, or came at less than "
            f"{limits.min_upload_bytes_per_s} bytes a second after the first {limits.upload_grace_s:g} s"
        )
        raise ApiError(408, message, code="body_timeout") from None
    except ClientDisconnect:
        raise ApiError(400, "the client left before the body was complete", code="client_disconnected") from None
    except (MultiPartException, ValueError, LookupError) as error:
        reason = getattr(error, "message", None) or "it is not well formed"
        raise bad_field("file", f"the form cannot be read: {reason}", "invalid_form") from None


def _read_fields(form: FormData) -> tuple[UploadFile, int | None]:
    """Return the file, and the seconds to keep it (None: no bound was sent). Raises ApiError."""
    for name in form:
        if name not in ("file", "purpose", *_EXPIRY):
            ignore(name[:64])
    file, purpose = form.get("file"), form.get("purpose")
    if not isinstance(file, UploadFile):
        raise bad_field("file", "file is missing", "missing_field")
    if purpose is None:
        raise bad_field("purpose", "purpose is missing", "missing_field")
    if purpose != "batch":
        raise bad_field("purpose", f"purpose is {str(purpose)[:64]!r}; give 'batch': files are for batches only")
    anchor, seconds = (form.get(name) for name in _EXPIRY)
    if anchor is None and seconds is None:
        return file, None
    if anchor != "created_at":
        raise bad_field(_EXPIRY[0], f"{_EXPIRY[0]} is {str(anchor)[:64]!r}; give created_at")
    if not (
        isinstance(seconds, str) and seconds.isascii() and seconds.isdigit() and 3600 <= int(seconds[:9]) <= 2592000
    ):
        raise bad_field(_EXPIRY[1], f"{_EXPIRY[1]} is {str(seconds)[:64]!r}; give seconds from 3600 to 2592000")
    return file, int(seconds)


async def list_files(request: Request) -> Response:
    """List the caller's files, newest first unless `order` is asc."""
    store = _files(request)
    purpose = request.query_params.get("purpose")
    found = [file for file in store.files.values() if purpose in (None, file.purpose)]
    return json_response(_page(request, found, _MAX_LISTED))


async def get_file(request: Request) -> Response:
    """Describe a file."""
    return json_response(_file(request).shown())


async def delete_file(request: Request) -> Response:
    """Remove a file."""
    record = _file(request)
    await asyncio.to_thread(context_of(request).batches.store.delete_file, record)
    return json_response({"id": record.id, "object": "file", "deleted": True})


async def file_content(request: Request) -> Response:
    """Return a file's bytes."""
    record = _file(request)
    path = context_of(request).batches.store.path(record.id)
    return FileResponse(path, media_type="application/octet-stream", filename=f"{record.id}.jsonl")


def _page(request: Request, records: list[R], max_records: int) -> dict[str, Any]:
    """Return the page of the caller's records that the query's limit, after and order select. Raises ApiError."""
    query = request.query_params
    limit_text, order, after = query.get("limit"), query.get("order", "desc"), query.get("after")
    if limit_text is not None and not (
        limit_text.isascii() and limit_text.isdigit() and 1 <= int(limit_text[:9]) <= max_records
    ):
        raise bad_field("limit", f"limit is {limit_text[:64]!r}; give a whole number from 1 to {max_records}")
    if order not in ("asc", "desc"):
        raise bad_field("order", f"order is {order[:64]!r}; give asc or desc")
    tenant = tenant_of(request)
    mine = [record for record in records if record.tenant == tenant]
    if order == "desc":
        mine.reverse()
    if after is not None:
        place = next((place for place, record in enumerate(mine) if record.id == after), None)
        if place is None:
            raise bad_field("after", f"after is {after[:64]!r}, which is none of these; give an id of the last page")
        mine = mine[place + 1 :]
    limit = max_records if limit_text is None else int(limit_text)
    data = [record.shown() for record in mine[:limit]]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, **ends, "has_more": len(mine) > limit}


def _find(request: Request, records: dict[str, R], name: str, kind: str, path: str) -> R:
    """Return the caller's record with this id. Raises ApiError (404), also for another tenant's record."""
    record = records.get(name)
    if record is None or record.tenant != tenant_of(request):
        raise ApiError(404, f"you have no {kind} with the id {name[:128]!r}; GET {path} lists yours", code="not_found")
    return record


def _files(request: Request) -> BatchStore:
    """Return the store of files. Raises ApiError for a request of Anthropic's Files API, which has other objects."""
    if is_anthropic(request.scope):
        message = (
            "Anthropic's Files API is not offered; send texts and images in the content of messages; files for batches "
            "are OpenAI's, so send them without the header anthropic-version"
        )
        raise ApiError(400, message, code="unsupported_endpoint")
    return context_of(request).batches.store


def _file(request: Request) -> FileRecord:
    return _find(request, _files(request).files, request.path_params["file_id"], "file", "/v1/files")


_FORM = {
    "type": "object",
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"enum": ["batch"]}},
    "required": ["file", "purpose"],
}


_WINDOW_S = 24 * 3600
_MAX_LISTED_BATCHES = 100


async def create_batch(request: Request) -> Response:
    """Accept a batch. It is checked and run later."""
    context = context_of(request)
    context.lifecycle.check_ready()
    store = context.batches.store
    body = await read_json(request, context.limits, read_batch)
    holder: KeyInfo = request.scope[KEY]
    file = store.files.get(body.input_file_id)
    if file is None or file.tenant != holder.tenant:
        message = f"input_file_id is {body.input_file_id!r}; give the id of a file that you uploaded"
        raise bad_field("input_file_id", message)
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
    return json_response(batch.shown())


async def list_batches(request: Request) -> Response:
    """List the caller's batches, newest first unless `order` is asc."""
    store = context_of(request).batches.store
    return json_response(_page(request, list(store.batches.values()), _MAX_LISTED_BATCHES))


async def get_batch(request: Request) -> Response:
    """Describe a batch."""
    return json_response(_batch(request).shown())


async def cancel_batch(request: Request) -> Response:
    """Cancel a batch. The answers that it has are kept."""
    batch = _batch(request)
    await context_of(request).batches.cancel(batch)
    return json_response(batch.shown())


def _batch(request: Request) -> BatchRecord:
    store = context_of(request).batches.store
    return _find(request, store.batches, request.path_params["batch_id"], "batch", "/v1/batches")


ENDPOINTS = [
    Endpoint("POST", "/v1/files", create_file, body=_FORM, takes_file=True),
    Endpoint("GET", "/v1/files", list_files),
    Endpoint("GET", "/v1/files/{file_id}", get_file, limit=Limit.NONE),
    Endpoint("DELETE", "/v1/files/{file_id}", delete_file, limit=Limit.NONE),
    Endpoint("GET", "/v1/files/{file_id}/content", file_content),
    Endpoint("POST", "/v1/batches", create_batch, body=BatchBody),
    Endpoint("GET", "/v1/batches", list_batches, limit=Limit.NONE),
    Endpoint("GET", "/v1/batches/{batch_id}", get_batch, limit=Limit.NONE),
    Endpoint("POST", "/v1/batches/{batch_id}/cancel", cancel_batch, limit=Limit.NONE),
]
