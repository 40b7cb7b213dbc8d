"""How an error looks in each interface.

Owns: the styles, by path. Does not: decide what is an error (faults does).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.server.faults import ApiError

Style = Callable[["ApiError", Mapping[str, Any]], dict[str, Any]]  # of an error and the scope of its request
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
    """OpenAI's error object."""
    return error.body()


def anthropic_error(error: ApiError, scope: Mapping[str, Any]) -> dict[str, Any]:
    """Anthropic's error object; `scope` is empty for one in mid-stream."""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error")
    message = error.message
    if error.code == "context_length_exceeded":  # agents know these words, and shorten their conversation
        message = f"prompt is too long: {message}"
    body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": message}}
    if error.code == NO_THREADS:
        body["error"]["details"] = {"error_code": NO_THREADS, "unsupported": [error.param]}
    request_id = scope.get("octavo.request_id")  # shell.REQUEST_ID, which lies above this module
    return body if request_id is None else {**body, "request_id": request_id}


def ollama_error(error: ApiError, scope: Mapping[str, Any]) -> dict[str, Any]:
    """Ollama's error object."""
    return {"error": error.message}


STYLES: Mapping[str, Style] = {  # the path's beginning -> style; any other path has OpenAI's
    "/v1/messages": anthropic_error,
    "/api/": ollama_error,
}


def style_of(path: str) -> Style:
    """The style of the interface that a path belongs to."""
    return next((style for begin, style in STYLES.items() if path.startswith(begin)), openai_error)
