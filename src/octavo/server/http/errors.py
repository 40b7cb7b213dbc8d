"""ApiError: the refusals and failures of requests, as clients see them; and every code that an answer can have.

Owns: the status, each API's error object, the retry headers; the mapping from Octavo's exceptions; the table of codes,
from which docs/errors.md is made; the client's field names in refusals of translated bodies.
Does not: show internal details to a client (messages of engine errors are replaced).
Invariant: CODES has every code of an ApiError, of bad_field and of `octavo.errors`; a test checks this.
"""

from __future__ import annotations

import errno
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo import errors
from octavo.errors import (
    BusyError,
    DuplicateRequestError,
    EngineDeadError,
    EngineError,
    ModelLoadError,
    RequestError,
    StepFailedError,
    ToolUnavailableError,
    too_long_message,
)

RETRY_QUEUE_S = 1  # minimum
RETRY_ENGINE_S = 5
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    499: "cancelled_error",
    500: "server_error",
    503: "service_unavailable_error",
    507: "server_error",
}
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MAY_RETRY = frozenset({408, 429, 500, 503})


class ApiError(Exception):
    """A refusal or failure, ready to be sent.

    `code` is a stable identifier for programs; `param` is the faulty field in the client's spelling.
    `retry_after_s` becomes Retry-After; `is_final` marks a failure that would repeat on a retry.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        retry_after_s: int | None = None,
        is_final: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.is_final = status not in _MAY_RETRY if is_final is None else is_final

    def body(self) -> dict[str, dict[str, str | None]]:
        """Return OpenAI's error object."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Return the error's headers: when and whether to retry, and the headers that its status requires."""
        headers: dict[str, str] = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(self.retry_after_s)
        if self.is_final:
            headers["x-should-retry"] = "false"
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.code == "unsupported_content_encoding":
            headers["accept-encoding"] = "identity"
        return headers

    def response(self, extra_headers: Mapping[str, str] | None = None) -> Response:
        """Return the HTTP response, with the error object of the request's API."""
        return _Refusal(self, {**self.headers(), **(extra_headers or {})})


class _Refusal(Response):
    def __init__(self, error: ApiError, headers: Mapping[str, str]) -> None:
        super().__init__(status_code=error.status, headers=headers, media_type="application/json")
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Encode the error in the style of the request's API, and send it."""
        self.body = msgspec.json.encode(style_of(scope)(self._error, scope))
        self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def bad_field(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """Return the refusal of a request for one of its fields (400)."""
    return ApiError(400, message, code=code, param=param)


def too_long(param: str, num_held: int, given: str) -> ApiError:
    """Return the refusal of a prompt with more tokens than `num_held`, which the model holds (400)."""
    return bad_field(param, too_long_message(num_held, given), "context_length_exceeded")


def internal_error() -> ApiError:
    """Return the error for an unexpected fault of the server, without the cause (500)."""
    return ApiError(500, "the server met an internal error", code="internal_error")


def is_disk_full(error: BaseException) -> bool:
    """Return True if a write failed for lack of room: the disk, the quota or the maximum file size."""
    return isinstance(error, OSError) and error.errno in _DISK_FULL


def disk_full_error(error: Exception) -> ApiError:
    """Return the error for a full disk: the request's data was not stored (507)."""
    reason = getattr(error, "strerror", None) or error
    message = f"the server has no room on its disk ({reason}); nothing was kept; send it again later"
    return ApiError(507, message, code="disk_full")


def cancelled_error() -> ApiError:
    """Return the error for a request that was cancelled on purpose; clients must not retry it (499)."""
    return ApiError(499, "the request was cancelled; it is not to be sent again", code="cancelled")


def draining_error() -> ApiError:
    """Return the refusal of a request while the server shuts down (503)."""
    return ApiError(503, "the server is shutting down", code="draining", retry_after_s=RETRY_ENGINE_S)


def with_field(message: str, own: str | None, param: str) -> str:
    """Return a refusal's message that begins with `param` instead of `own`, the field's internal name."""
    rest = message.removeprefix(own) if own else message
    return f"{param}: {message}" if rest == message else param + rest


def from_exception(error: Exception, params: Mapping[str, str] | None = None) -> ApiError:
    """Translate one of Octavo's exceptions. `params` maps internal field names to the client's names."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, BusyError):
        wait_s = math.ceil(error.retry_after_s or 0.0)
        return ApiError(429, str(error), code=error.code, param=error.param, retry_after_s=max(RETRY_QUEUE_S, wait_s))
    if isinstance(error, DuplicateRequestError):
        return bad_field("X-Request-Id", str(error), error.code)
    if isinstance(error, RequestError):
        message, param = str(error), error.param
        spelled = (params or {}).get(param or "prompt_token_ids", param)
        if param is not None and spelled is not None:
            message = with_field(message, param, spelled) if message.startswith(param) else message
        return bad_field(spelled, message, error.code)
    if isinstance(error, ModelLoadError):
        wait_s = math.ceil(error.retry_after_s or 0.0)
        return ApiError(503, str(error), code="model_not_loaded", retry_after_s=max(RETRY_QUEUE_S, wait_s))
    return _from_engine_error(error) if isinstance(error, EngineError) else internal_error()


def _from_engine_error(error: EngineError) -> ApiError:
    if isinstance(error, StepFailedError):
        return ApiError(500, "the engine failed on this request", code="engine_crash_suspect", is_final=True)
    if isinstance(error, EngineDeadError):
        return ApiError(503, "the engine is not available", code="engine_unavailable", retry_after_s=RETRY_ENGINE_S)
    if isinstance(error, ToolUnavailableError):
        message = "the process for large inputs is not available"
        return ApiError(503, message, code="tool_unavailable", retry_after_s=RETRY_ENGINE_S)
    return ApiError(500, "the engine failed", code="engine_error")


Style = Callable[[ApiError, Mapping[str, Any]], dict[str, Any]]  # (error, scope of its request) -> error object
_ANTHROPIC_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    507: "api_error",
}

NO_THREADS = "thread_unsupported_request"  # on this code, Anthropic's tool runners send whole conversations


def openai_error(error: ApiError, scope: Mapping[str, Any]) -> dict[str, Any]:
    """Return OpenAI's error object."""
    return error.body()


def anthropic_error(error: ApiError, scope: Mapping[str, Any]) -> dict[str, Any]:
    """Return Anthropic's error object. `scope` is empty for an error in mid-stream."""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error")
    message = error.message
    if error.code == "context_length_exceeded":  # agents match these words and shorten their conversation
        message = f"prompt is too long: {message}"
    body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": message}}
    if error.code == NO_THREADS:
        body["error"]["details"] = {"error_code": NO_THREADS, "unsupported": [error.param]}
    request_id = scope.get("octavo.request_id")  # middleware.REQUEST_ID; middleware imports this module
    return body if request_id is None else {**body, "request_id": request_id}


def ollama_error(error: ApiError, scope: Mapping[str, Any]) -> dict[str, Any]:
    """Return Ollama's error object."""
    return {"error": error.message}


ANTHROPIC = "/v1/messages"  # what the paths of Anthropic's API begin with
ANTHROPIC_VERSION = b"anthropic-version"  # a header that Anthropic's clients send
_SHARED = ("/v1/models", "/v1/files")  # paths of OpenAI's API and of Anthropic's


def is_anthropic(scope: Scope) -> bool:
    """Return True if a request is for Anthropic's API. On paths that OpenAI's API has too, a header decides."""
    path: str = scope["path"]
    if path.startswith(_SHARED):
        return any(name == ANTHROPIC_VERSION for name, _ in scope["headers"])
    return path.startswith(ANTHROPIC)


def style_of(scope: Scope) -> Style:
    """Return the error style of the request's API."""
    if is_anthropic(scope):
        return anthropic_error
    return ollama_error if scope["path"].startswith("/api/") else openai_error


@dataclass(frozen=True, slots=True)
class Code:
    """One error code. `raised` is its exception in Python, if any."""

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
    "adapters_not_allowed": Code((403,), "clients of this server may not load or unload adapters"),
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
    "model_not_loaded": Code(
        (503,), "the model cannot be loaded now; the message has the reason", errors.ModelLoadError
    ),
    "tool_unavailable": Code(
        (503,), "the process that checks large inputs is not running", errors.ToolUnavailableError
    ),
    "too_many_connections": Code((429, 503), "all connections, or the tenant's share of them, are in use"),
    "loading": Code((503,), "the model is loading"),
    "draining": Code((503,), "the server is shutting down"),
    "no_replica": Code((503,), "no replica of the fleet has joined yet"),
    "standby": Code((503,), "the server is a standby, and serves once its front is gone"),
    "cancelled": Code((499,), "the operator or the client cancelled the request"),
    "idle_connection": Code((), "in metrics only: an idle connection was cut to make room for another"),
    "too_many_bodies": Code((), "in metrics only: an unfinished body without a key was cut to make room for others"),
    "head_timeout": Code((), "in metrics only: a connection was cut because its head did not arrive in time"),
    "head_too_large": Code(
        (), "in metrics only: a connection was cut because its head, or the framing of its body, was too large"
    ),
}


Spelling = Sequence[tuple[str, str]]  # (pattern of a part of a field's path, the client's name)


@contextmanager
def renamed_fields(spelling: Spelling) -> Iterator[None]:
    """Replace the internal field name in a refusal that the block raises by the client's name."""
    try:
        yield
    except ApiError as error:
        if error.param is not None:
            param = error.param
            for ours, theirs in spelling:
                param = re.sub(ours, theirs, param)
            is_word = error.param.isidentifier()  # it may occur in other words: replace only its first occurrence
            error.message = error.message.replace(error.param, param, 1 if is_word else -1)
            error.param = param
        raise
