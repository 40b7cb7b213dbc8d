"""Frames between a sandbox process and its parent, over the child's stdin and stdout. A frame is `u32 length | msgpack`
of a tagged struct.

Owns: the structs, the arguments of jobs, the maximum size. Does not: read or write pipes, or run jobs.
Invariant: decoding bytes returns a checked struct or raises FrameError.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from octavo import errors
from octavo.artifacts.vision_spec import VisionSpec
from octavo.errors import EngineError, InvalidRequestError, OctavoError, RequestError, TooComplexError

VERSION = 1
MAX_FRAME_BYTES = 64 * 2**20
PROCESS_IMAGE = "process_image"  # a job of octavo.sandbox.media_child
LENGTH = struct.Struct("<I")


class FrameError(EngineError):
    """Bytes that are not a frame, or a message over the maximum size."""


class RenderChat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Render a conversation with a chat template. Returns text."""

    source: str
    tokens: dict[str, str]
    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = {}


class CheckSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Check a JSON schema, given as JSON text. Returns its counts: {"values": ..., "depth": ..., "expanded": ...}."""

    text: str


class CheckRegex(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Check a regular expression. Returns its weight, which is about its number of states."""

    pattern: str


class CompileGrammar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Compile the grammar of an answer; see octavo.grammar.compile. Returns the compiled grammar's text.

    `specials` maps ids to names of the special tokens of a vocabulary of `vocab_size` ids; if empty, any name passes.
    """

    kind: str
    source: str
    whitespace: str | None = None
    vocab_size: int = 0
    specials: dict[int, str] = {}


class ProcessImage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Decode an image file of at most `max_pixels`, and process it for a model. Returns its MediaItems."""

    data: bytes
    vision: VisionSpec
    max_pixels: int


Argument = RenderChat | CheckSchema | CheckRegex | CompileGrammar | ProcessImage | Mapping[str, Any]


class Order(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """An order to run a job within `limit_s` seconds. `argument` is msgpack, of the type in JOBS."""

    number: int
    job: str
    limit_s: float
    argument: msgspec.Raw


class WorkerReady(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """The child's first frame: the child is ready for orders."""

    version: int


class JobResult(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """The job's result: plain values."""

    number: int
    value: Any


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """The job's error."""

    number: int
    kind: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, number: int, error: BaseException) -> Refusal:
        """Pack an error. Of an error that is not Octavo's own, only the type is sent."""
        if isinstance(error, RecursionError | MemoryError):
            return cls(number, TooComplexError.__name__, "it is too large or nested too deeply")
        if isinstance(error, OctavoError):
            return cls(number, type(error).__name__, str(error), getattr(error, "param", None))
        return cls(number, EngineError.__name__, f"the job failed ({type(error).__name__})")

    def error(self) -> OctavoError:
        """Return the error, of its original class if that is a RequestError."""
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, RequestError):
            return kind(self.message, self.param)
        return InvalidRequestError(self.message) if self.kind == "ModelFileError" else EngineError(self.message)


ToParent = WorkerReady | JobResult | Refusal
_T = TypeVar("_T")
_ENCODER = msgspec.msgpack.Encoder()
_ORDER: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_TO_PARENT: msgspec.msgpack.Decoder[ToParent] = msgspec.msgpack.Decoder(ToParent)


def pack(argument: object) -> msgspec.Raw:
    """Pack an argument. Raises InvalidRequestError for values that cannot be packed."""
    try:
        return msgspec.Raw(_ENCODER.encode(argument))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        reason = "it holds a value that cannot be handed on (a number beyond 64 bits, or text that is no Unicode)"
        raise InvalidRequestError(reason) from error


def frame(message: Order | ToParent) -> bytes:
    """Return one frame, including its length. Raises FrameError over the maximum size."""
    body = _ENCODER.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a {type(message).__name__} of {len(body)} bytes; frames hold {MAX_FRAME_BYTES}")
    return LENGTH.pack(len(body)) + body


def length_of(head: bytes) -> int:
    """Return the length of the body that follows this head. Raises FrameError over the maximum size."""
    length: int = LENGTH.unpack(head)[0]
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes was announced; frames hold {MAX_FRAME_BYTES}")
    return length


def decode_order(body: bytes) -> Order:
    """Decode a frame's body as an order. Raises FrameError."""
    return _decode(_ORDER, body)


def decode_to_parent(body: bytes) -> ToParent:
    """Decode a frame's body as a message from the child. Raises FrameError."""
    return _decode(_TO_PARENT, body)


def _decode(decoder: msgspec.msgpack.Decoder[_T], body: bytes) -> _T:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"not a message: {error}") from None
