"""ApiError: the refusals and failures of requests, as clients see them.

Owns: status, each interface's error object, retry headers; the mapping from Octavo's exceptions.
Does not: show internal details to a client (messages of engine errors are replaced).
"""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.errors import (
    BusyError,
    DuplicateRequestError,
    EngineDeadError,
    EngineError,
    RequestError,
    StepFailedError,
    ToolUnavailableError,
    too_long_message,
)

RETRY_QUEUE_S = 1  # at least
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

    `code` is a stable word for programs, `param` the field at fault as the client spelled it.
    `retry_after_s` becomes Retry-After; `is_final` marks a failure that a retry would repeat.
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
        """Return the headers of the error: when to retry, if at all, and what the status requires."""
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
        """Return the whole HTTP response, in the style of the path's interface."""
        return _Refusal(self, {**self.headers(), **(extra_headers or {})})


class _Refusal(Response):
    def __init__(self, error: ApiError, headers: Mapping[str, str]) -> None:
        super().__init__(status_code=error.status, headers=headers, media_type="application/json")
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Encode the error in the path's style, and send it."""
        self.body = msgspec.json.encode(style_of(scope["path"])(self._error, scope))
        self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def bad_field(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """Return the refusal of a request for one of its fields (400)."""
    return ApiError(400, message, code=code, param=param)


def too_long(param: str, num_held: int, given: str) -> ApiError:
    """Return the refusal of a prompt of more tokens than the model holds (400)."""
    return bad_field(param, too_long_message(num_held, given), "context_length_exceeded")


def internal_error() -> ApiError:
    """Return the error of an unexpected fault of the server, without its cause (500)."""
    return ApiError(500, "the server met an internal error", code="internal_error")


def is_disk_full(error: BaseException) -> bool:
    """Return True if a write failed because there is no room: the disk, the quota or the largest size of a file."""
    return isinstance(error, OSError) and error.errno in _DISK_FULL


def disk_full_error(error: Exception) -> ApiError:
    """Return the error of a full disk: the request's data was not stored (507)."""
    reason = getattr(error, "strerror", None) or error
    message = f"the server has no room on its disk ({reason}); nothing was kept; send it again later"
    return ApiError(507, message, code="disk_full")


def cancelled_error() -> ApiError:
    """Return the error of a request that was cancelled on purpose, which clients must not retry (499)."""
    return ApiError(499, "the request was cancelled; it is not to be sent again", code="cancelled")


def draining_error() -> ApiError:
    """Return the refusal of a request while the server shuts down (503)."""
    return ApiError(503, "the server is shutting down", code="draining", retry_after_s=RETRY_ENGINE_S)


def with_field(message: str, own: str | None, param: str) -> str:
    """Return the message of a refusal with `param` at its beginning, in place of the field's internal name `own`."""
    rest = message.removeprefix(own) if own else message
    return f"{param}: {message}" if rest == message else param + rest


def from_exception(error: Exception, params: Mapping[str, str] | None = None) -> ApiError:
    """Translate one of Octavo's exceptions; `params` maps fields to the client's names."""
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
    if isinstance(error, StepFailedError):
        return ApiError(500, "the engine failed on this request", code="engine_crash_suspect", is_final=True)
    if isinstance(error, EngineDeadError):
        return ApiError(503, "the engine is not available", code="engine_unavailable", retry_after_s=RETRY_ENGINE_S)
    if isinstance(error, ToolUnavailableError):
        message = "the process for large inputs is not available"
        return ApiError(503, message, code="tool_unavailable", retry_after_s=RETRY_ENGINE_S)
    if isinstance(error, EngineError):
        return ApiError(500, "the engine failed", code="engine_error")
    return internal_error()


Style = Callable[[ApiError, Mapping[str, Any]], dict[str, Any]]  # of an error and the scope of its request
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

NO_THREADS = "thread_unsupported_request"  # Anthropic's tool runners then send whole conversations


def openai_error(error: ApiError, scope: Mapping[str, Any]) -> dict[str, Any]:
    """Return OpenAI's error object."""
    return error.body()


def anthropic_error(error: ApiError, scope: Mapping[str, Any]) -> dict[str, Any]:
    """Return Anthropic's error object; `scope` is empty for one in mid-stream."""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error")
    message = error.message
    if error.code == "context_length_exceeded":  # agents match these words, and shorten their conversation
        message = f"prompt is too long: {message}"
    body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": message}}
    if error.code == NO_THREADS:
        body["error"]["details"] = {"error_code": NO_THREADS, "unsupported": [error.param]}
    request_id = scope.get("octavo.request_id")  # shell.REQUEST_ID; shell imports this module
    return body if request_id is None else {**body, "request_id": request_id}


def ollama_error(error: ApiError, scope: Mapping[str, Any]) -> dict[str, Any]:
    """Return Ollama's error object."""
    return {"error": error.message}


STYLES: Mapping[str, Style] = {  # the path's beginning -> style; any other path has OpenAI's
    "/v1/messages": anthropic_error,
    "/api/": ollama_error,
}


def style_of(path: str) -> Style:
    """Return the error style of a path's interface."""
    return next((style for begin, style in STYLES.items() if path.startswith(begin)), openai_error)
