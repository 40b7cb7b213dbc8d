"""The exception tree.

OctavoError
├── ConfigError              a setting is wrong; names the field, the value and the remedy
├── ModelFileError           a model file is missing, damaged or unsupported; names the file, the tensor, the reason
├── UnknownModelError        no model of this name is found
├── ModelLoadError           a served model cannot be loaded now (HTTP 503); names the reason
├── CapacityError            the memory is too small for the model or a useful KV pool; names the sizes and a remedy
├── RequestError             one request is at fault; no other request is affected
│   ├── InvalidRequestError      a field is out of range (HTTP 400); `param` names it
│   │   └── TooComplexError          the request takes too much time or memory to parse or check (HTTP 400)
│   ├── AdmissionError           the request could never run on this engine (HTTP 400); names the numbers
│   ├── DuplicateRequestError    the request id is in use
│   └── BusyError                the same request may be accepted later (HTTP 429); estimates when
│       ├── QueueFullError           the queue is at its limit
│       ├── LoadShedError            requests of this kind are refused at this load
│       ├── WaitTooLongError         the request could not start within its time limit, or the server's
│       └── RateLimitError           the API key is at one of its limits
├── EngineError
│   ├── EngineDeadError          the engine ended while requests were open
│   ├── StepFailedError          a step failed and could not be retried for this request
│   └── ToolUnavailableError     no sandbox process can be started (HTTP 503)
└── InvariantError           an invariant is violated: a bug in Octavo
"""

from __future__ import annotations

from enum import Enum


class ErrorKind(Enum):
    """The kind of an error, as sent between processes and stored. The value is the exception class's name, if any."""

    CONFIG = "ConfigError"
    MODEL_FILE = "ModelFileError"
    UNKNOWN_MODEL = "UnknownModelError"
    CAPACITY = "CapacityError"
    REQUEST = "RequestError"
    INVALID_REQUEST = "InvalidRequestError"
    TOO_COMPLEX = "TooComplexError"
    ADMISSION = "AdmissionError"
    PROMPT_TOO_LONG = "PromptTooLongError"
    DUPLICATE_REQUEST = "DuplicateRequestError"
    BUSY = "BusyError"
    QUEUE_FULL = "QueueFullError"
    LOAD_SHED = "LoadShedError"
    WAIT_TOO_LONG = "WaitTooLongError"
    RATE_LIMIT = "RateLimitError"
    ENGINE = "EngineError"
    ENGINE_DEAD = "EngineDeadError"
    STEP_FAILED = "StepFailedError"
    MODEL_LOAD = "ModelLoadError"
    TOOL_UNAVAILABLE = "ToolUnavailableError"
    INVARIANT = "InvariantError"
    QUEUE_TIMEOUT = "queue_timeout"  # the request did not start in time
    DEADLINE = "deadline"  # the request did not finish in time


class OctavoError(Exception):
    """Base of every error that Octavo raises on purpose."""


class ConfigError(OctavoError):
    """A setting is wrong. The message names the field, the value and the remedy."""


class ModelFileError(OctavoError):
    """A model file is missing, damaged or of an unsupported kind.

    `unsupported` names the family or setting that has no native implementation, if that is what is wrong.
    """

    unsupported: str | None = None

    def __init__(self, path: object, reason: str, tensor: str | None = None) -> None:
        where = f"{path}: tensor {tensor!r}" if tensor is not None else f"{path}"
        super().__init__(f"{where}: {reason}")
        self.path = str(path)
        self.reason = reason
        self.tensor = tensor


class UnknownModelError(OctavoError):
    """No model of that name can be found."""


class ModelLoadError(OctavoError):
    """A served model cannot be loaded now, so its requests fail. The message names the reason."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class CapacityError(OctavoError):
    """The memory is too small for the model or for a useful KV pool. The message names the sizes and a remedy."""


class RequestError(OctavoError):
    """One request is at fault; no other request is affected.

    `param` is the field at fault, as the caller spelled it; `code` is a stable identifier for programs.
    """

    code = "invalid_request"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequestError(RequestError):
    """A field of the request is out of range or of the wrong kind."""

    code = "invalid_value"


class TooComplexError(InvalidRequestError):
    """The request takes too much time or memory to parse or check."""

    code = "too_complex"


class AdmissionError(RequestError):
    """The request could never run on this engine, whatever else is in the batch."""

    code = "cannot_be_scheduled"


class PromptTooLongError(AdmissionError):
    """The prompt has more tokens than the model or the KV pool can hold."""

    code = "context_length_exceeded"


def too_long_message(num_held: int, given: str, remedy: str = "shorten it") -> str:
    """Return the message about a prompt that is too long, in OpenAI's wording, which clients search for."""
    return f"This model's maximum context length is {num_held} tokens, and {given}; {remedy}"


class DuplicateRequestError(RequestError):
    """The request id is already in use."""

    code = "duplicate_request_id"


class BusyError(RequestError):
    """The same request may be accepted later; `retry_after_s` is an estimate of the wait, or None."""

    code = "busy"

    def __init__(self, message: str, param: str | None = None, *, retry_after_s: float | None = None) -> None:
        super().__init__(message, param)
        self.retry_after_s = retry_after_s


class QueueFullError(BusyError):
    """The queue is at its limit."""

    code = "queue_full"


class LoadShedError(BusyError):
    """Requests of this kind are refused at this load."""

    code = "load_shed"


class WaitTooLongError(BusyError):
    """The request could not start within its own time limit, or the server's."""

    code = "wait_too_long"


class RateLimitError(BusyError):
    """The API key is at one of its limits."""

    code = "rate_limit_exceeded"


class EngineError(OctavoError):
    """The engine, not the request, is at fault."""


class EngineDeadError(EngineError):
    """The engine ended while requests were open."""


class StepFailedError(EngineError):
    """A step failed, and retries of parts of the step found this request as the suspect."""


class ToolUnavailableError(EngineError):
    """No sandbox process can be started."""


class InvariantError(OctavoError, AssertionError):
    """An invariant is violated: a bug in Octavo."""


_CLASSES: dict[ErrorKind, type[OctavoError]] = {  # every class has a kind
    ErrorKind(name): value
    for name, value in tuple(globals().items())
    if isinstance(value, type) and issubclass(value, OctavoError) and value is not OctavoError
}


def kind_of(error: BaseException) -> ErrorKind:
    """Return the kind of an error; ENGINE for exceptions that are not Octavo's."""
    return next((kind for kind, of_kind in _CLASSES.items() if type(error) is of_kind), ErrorKind.ENGINE)


def error_of(kind: ErrorKind, message: str, param: str | None = None) -> OctavoError:
    """Return an error of a kind. `param` is the request's field at fault, or the path of the model file at fault."""
    of_kind = _CLASSES.get(kind, EngineError)
    if issubclass(of_kind, RequestError):
        return of_kind(message, param)
    if of_kind is ModelFileError:
        return ModelFileError(param, message.removeprefix(f"{param}: "))
    return of_kind(message)
