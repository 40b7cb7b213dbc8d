"""Every code that an answer's error may have: its statuses, Python's exception for it, what it means, what to do.

Owns: the table that docs/errors.md is made from. Does not: raise or map anything (faults does).
Invariant: a code in an ApiError, in bad_field or on an exception of `octavo.errors` is in here; a test finds others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo import errors


@dataclass(frozen=True, slots=True)
class Code:
    """One code. `raised` is what Python raises for it, where it has one."""

    statuses: tuple[int, ...]
    meaning: str
    raised: type[errors.OctavoError] | None = None


CODES: Mapping[str, Code] = {
    "invalid_http": Code((400,), "what was sent is no request in HTTP/1.1"),
    "invalid_json": Code((400,), "the body is not one strict JSON object within the bounds"),
    "body_too_complex": Code((400,), "the body holds too many parts to look at"),
    "invalid_event_id": Code((400,), "`Last-Event-ID` is none that this server gave"),
    "missing_idempotency_key": Code((400,), "`Last-Event-ID` without the `Idempotency-Key` of its request"),
    "invalid_form": Code((400,), "an upload that is not multipart/form-data, or not well formed"),
    "batches_off": Code((400,), "files and batches are off; the server was started without `--batch-dir`"),
    "storage_full": Code((400,), "the tenant has no room for another file, or for its bytes; delete some"),
    "unknown_field": Code((400,), "a field that the endpoint does not know; `param` names it"),
    "thread_unsupported_request": Code((400,), "`thread` of Anthropic's interface; send the whole conversation"),
    "missing_field": Code((400,), "a field that must be there is not"),
    "unsupported_field": Code((400,), "a known field, or a value of it, that is not supported yet"),
    "invalid_value": Code((400,), "a field is of the wrong kind or out of its range", errors.InvalidRequestError),
    "invalid_request": Code((400,), "the request is at fault in another way", errors.RequestError),
    "too_complex": Code((400,), "what was sent costs too much time or memory to look at", errors.TooComplexError),
    "context_length_exceeded": Code(
        (400,), "the prompt has more tokens than the model, or the KV pool, holds", errors.PromptTooLongError
    ),
    "cannot_be_scheduled": Code(
        (400,), "the request could never run here; the message has the numbers", errors.AdmissionError
    ),
    "duplicate_request_id": Code((400,), "the engine has an open request of this id", errors.DuplicateRequestError),
    "item_not_found": Code((400,), "no stored response of the tenant has the item that `input` refers to"),
    "client_disconnected": Code((400, 499), "the client left; nobody reads this, it is for metrics"),
    "invalid_api_key": Code((401,), "no key, or none that is known here"),
    "host_not_allowed": Code((403,), "the `Host` is neither this machine's nor in `--allowed-hosts`"),
    "cross_site": Code((403,), "a page of another site sent this, and `--allowed-origins` does not name it"),
    "dashboard_not_allowed": Code((403,), "the key may not watch what the engine does for others"),
    "metrics_not_allowed": Code((403,), "the key may not read what is counted for all tenants"),
    "priority_not_allowed": Code((403,), "the key may not ask for this priority"),
    "unsupported_endpoint": Code((400,), "an endpoint of another server's interface that has no place in this one"),
    "not_found": Code((404,), "no endpoint of this path, or no file or batch of this id"),
    "model_not_found": Code((404,), "no such model is served; the message names the one that is"),
    "response_not_found": Code((404,), "no stored response of this id, or it is another tenant's"),
    "request_not_found": Code((404,), "no request of this id is open or kept, or it is another tenant's"),
    "method_not_allowed": Code((405,), "the endpoint has other methods; `Allow` names them"),
    "body_timeout": Code((408,), "the body did not arrive in time"),
    "queue_timeout": Code((408,), "the request did not start within its queue timeout"),
    "slow_reader": Code((408,), "the client did not read what was sent to it; at the end of a stream that was cut"),
    "timeout": Code((408,), "the request did not finish within its timeout"),
    "file_in_use": Code((409,), "the file is the input of a batch that is not over"),
    "batch_is_over": Code((409,), "only a batch that is not over can be cancelled"),
    "nothing_to_resume": Code((409,), "the stream of this `Last-Event-ID` is not here any more"),
    "idempotency_key_reused": Code((409,), "another request was made with this `Idempotency-Key`"),
    "body_too_large": Code((413,), "the body is larger than the bound"),
    "unsupported_media_type": Code((415,), "a browser sent a body that must be JSON with another `Content-Type`"),
    "unsupported_content_encoding": Code((415,), "the body is compressed; send it as it is"),
    "headers_too_large": Code((431,), "too many headers, or too large ones"),
    "busy": Code((429,), "the request may be taken later", errors.BusyError),
    "too_many_batches": Code((429,), "too many batches of the tenant are not over"),
    "too_many_uploads": Code((429,), "too many uploads of the tenant are open"),
    "queue_full": Code((429,), "the queue, or the key's share of it, is full", errors.QueueFullError),
    "load_shed": Code((429,), "requests of this kind are refused at this load", errors.LoadShedError),
    "wait_too_long": Code((429,), "it could not start within the time that it gives", errors.WaitTooLongError),
    "too_many_wrong_keys": Code((429,), "the key is wrong, and so were too many before it from this address"),
    "too_many_watchers": Code((429,), "as many watch already as there are places"),
    "rate_limit_exceeded": Code((429,), "the key is at a limit of its own", errors.RateLimitError),
    "too_many_idempotency_keys": Code((429,), "too many requests with keys are remembered"),
    "internal_error": Code((500,), "a fault of ours that nobody expected"),
    "engine_error": Code((500,), "the engine failed on this request", errors.EngineError),
    "engine_crash_suspect": Code((500,), "steps with this request fail, those without do not", errors.StepFailedError),
    "disk_full": Code((507,), "the server's disk is full; nothing was kept. In a batch: it waits until there is room"),
    "engine_unavailable": Code((503,), "the engine is not there, or does not answer", errors.EngineDeadError),
    "tool_unavailable": Code((503,), "the process for large inputs is not there", errors.ToolUnavailableError),
    "too_many_connections": Code(
        (429, 503), "every connection that there is, or the tenant's part of them, is at work"
    ),
    "loading": Code((503,), "the model is loading"),
    "draining": Code((503,), "the server is going down"),
    "cancelled": Code((499,), "the operator, or the client itself, cancelled the request; SDKs do not send it again"),
    "idle_connection": Code((), "in metrics only: a connection was cut because its place was needed"),
    "too_many_bodies": Code((), "in metrics only: an unfinished body without a key was cut because others came"),
    "head_timeout": Code((), "in metrics only: a connection was cut because a head did not arrive in time"),
    "head_too_large": Code((), "in metrics only: a connection was cut because there was too much around a body"),
}
