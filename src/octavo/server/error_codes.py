"""Every code of an answer's error: its statuses, its exception in Python, its meaning.

Owns: the table from which docs/errors.md is made. Does not: raise or map anything (faults does).
Invariant: a code in an ApiError, in bad_field or on an exception of `octavo.errors` is here; a test finds others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo import errors


@dataclass(frozen=True, slots=True)
class Code:
    """One code. `raised` is its exception in Python, if it has one."""

    statuses: tuple[int, ...]
    meaning: str
    raised: type[errors.OctavoError] | None = None


CODES: Mapping[str, Code] = {
    "invalid_http": Code((400,), "the request is not valid HTTP/1.1"),
    "invalid_json": Code((400,), "the body is not one strict JSON object within the bounds"),
    "body_too_complex": Code((400,), "the body holds too many strings, objects, lists or numbers"),
    "invalid_event_id": Code((400,), "`Last-Event-ID` is not an id of this stream"),
    "missing_idempotency_key": Code((400,), "`Last-Event-ID` without the `Idempotency-Key` of its request"),
    "invalid_form": Code((400,), "the upload is not multipart/form-data, or not well formed"),
    "batches_off": Code((400,), "files and batches are off; the server was started without `--batch-dir`"),
    "storage_full": Code((400,), "the tenant has no room for another file, or for its bytes; delete some"),
    "unknown_field": Code((400,), "the endpoint does not know this parameter or, with `--strict-fields`, this field"),
    "thread_unsupported_request": Code(
        (400,), "`thread` of Anthropic's API is not supported; send the whole conversation"
    ),
    "missing_field": Code((400,), "a required field is missing"),
    "unsupported_field": Code((400,), "the field, or this value of it, is not supported"),
    "invalid_value": Code((400,), "a field has the wrong type or is out of its range", errors.InvalidRequestError),
    "invalid_request": Code((400,), "the request is invalid in another way", errors.RequestError),
    "too_complex": Code(
        (400,), "a template, schema, expression or grammar needs too much time or memory", errors.TooComplexError
    ),
    "context_length_exceeded": Code(
        (400,), "the prompt has more tokens than the model or the KV pool holds", errors.PromptTooLongError
    ),
    "cannot_be_scheduled": Code(
        (400,), "the request can never run on this server; the message has the numbers", errors.AdmissionError
    ),
    "duplicate_request_id": Code((400,), "the engine has an open request with this id", errors.DuplicateRequestError),
    "item_not_found": Code((400,), "no stored response of the tenant has the item that `input` refers to"),
    "client_disconnected": Code((400, 499), "the client disconnected; seen in metrics only"),
    "invalid_api_key": Code((401,), "the key is missing or unknown"),
    "host_not_allowed": Code((403,), "the `Host` is not this machine's and not in `--allowed-hosts`"),
    "cross_site": Code(
        (403,), "a page of another site sent the request, and `--allowed-origins` does not name that site"
    ),
    "dashboard_not_allowed": Code((403,), "the key may not use the dashboard"),
    "metrics_not_allowed": Code((403,), "the key may not read the metrics"),
    "priority_not_allowed": Code((403,), "the key may not use this priority"),
    "unsupported_endpoint": Code((400,), "an endpoint of another server that does not exist here"),
    "not_found": Code((404,), "there is no endpoint with this path, or no file or batch with this id"),
    "model_not_found": Code((404,), "this model is not served; the message names the served one"),
    "response_not_found": Code((404,), "there is no stored response with this id, or it is another tenant's"),
    "request_not_found": Code((404,), "there is no open or kept request with this id, or it is another tenant's"),
    "method_not_allowed": Code((405,), "the endpoint does not have this method; `Allow` names those it has"),
    "body_timeout": Code((408,), "the body did not arrive in time"),
    "queue_timeout": Code((408,), "the request did not start within its queue timeout"),
    "slow_reader": Code((408,), "the client did not read its stream, which was cut"),
    "timeout": Code((408,), "the request did not finish within its timeout"),
    "file_in_use": Code((409,), "the file is the input of an open batch"),
    "batch_is_over": Code((409,), "the batch has ended and cannot be cancelled"),
    "nothing_to_resume": Code((409,), "the stream of this `Last-Event-ID` is no longer kept"),
    "idempotency_key_reused": Code((409,), "this `Idempotency-Key` was used with another request"),
    "body_too_large": Code((413,), "the body is larger than the bound"),
    "unsupported_media_type": Code((415,), "a browser sent a body with a `Content-Type` that is not JSON"),
    "unsupported_content_encoding": Code((415,), "the body is compressed; send it uncompressed"),
    "headers_too_large": Code((431,), "the request has too many or too large headers"),
    "busy": Code((429,), "the server cannot accept the request now", errors.BusyError),
    "too_many_batches": Code((429,), "the tenant has too many open batches"),
    "too_many_uploads": Code((429,), "the tenant has too many open uploads"),
    "queue_full": Code((429,), "the queue, or the key's share of it, is full", errors.QueueFullError),
    "load_shed": Code((429,), "requests of this kind are refused at this load", errors.LoadShedError),
    "wait_too_long": Code((429,), "the request could not start within its own timeout", errors.WaitTooLongError),
    "too_many_wrong_keys": Code((429,), "the key is wrong, as were too many earlier keys from this address"),
    "too_many_watchers": Code((429,), "the feed of the dashboard has too many readers"),
    "rate_limit_exceeded": Code((429,), "the key reached its own limit", errors.RateLimitError),
    "too_many_idempotency_keys": Code((429,), "too many requests with an `Idempotency-Key` are kept"),
    "internal_error": Code((500,), "an unexpected fault of the server"),
    "engine_error": Code((500,), "the engine failed on this request", errors.EngineError),
    "engine_crash_suspect": Code(
        (500,), "the request makes steps or engines fail, so it was isolated", errors.StepFailedError
    ),
    "disk_full": Code((507,), "the server's disk is full and nothing was kept; a batch waits for room"),
    "engine_unavailable": Code((503,), "the engine is not running or does not answer", errors.EngineDeadError),
    "tool_unavailable": Code(
        (503,), "the process that checks large inputs is not running", errors.ToolUnavailableError
    ),
    "too_many_connections": Code((429, 503), "all connections, or the tenant's share of them, are in use"),
    "loading": Code((503,), "the model is loading"),
    "draining": Code((503,), "the server is shutting down"),
    "cancelled": Code((499,), "the operator or the client cancelled the request"),
    "idle_connection": Code((), "in metrics only: an idle connection was cut to make room for another"),
    "too_many_bodies": Code((), "in metrics only: an unfinished body without a key was cut to make room for others"),
    "head_timeout": Code((), "in metrics only: a connection was cut because its head did not arrive in time"),
    "head_too_large": Code(
        (), "in metrics only: a connection was cut because its head, or the framing of its body, was too large"
    ),
}
