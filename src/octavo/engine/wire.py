"""Frames between the front end and the engine process: `u32 length | msgpack` of tagged structs.

Owns: the structs, the only conversion between them and Request and Events, the size cap, and splitting a byte stream.
Does not: read or write sockets. Lengths are little-endian; packed ids have this machine's byte order, which both ends
share.
Invariant: decoding bytes returns a checked struct or raises WireError; every frame has an epoch.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, TypeVar

import msgspec

from octavo.core.kv.prefix import KEY_BYTES
from octavo.core.plan import Event, Events, TokenLogprobs
from octavo.core.request import FinishReason, Request, SamplingParams, Span, Want
from octavo.engine.client import ENDS, Accepted, Verb
from octavo.errors import EngineError, ErrorKind, OctavoError, RequestError, error_of, kind_of
from octavo.executors.protocol import Capacity
from octavo.media.item import MediaItem

VERSION = 9
MAX_FRAME_BYTES = 64 * 2**20
_LENGTH = struct.Struct("<I")


class WireError(EngineError):
    """The bytes are no frame, the frame is no message, or the message is over the size cap."""


class _Message(msgspec.Struct, array_like=True, tag=True, forbid_unknown_fields=True):
    epoch: int


ReplyTo = str | int  # the id of a Submit's request, or the number of a ControlRequest
BlockKey = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]


class Submit(_Message):
    """The command to serve a request, with all its fields. Token ids are packed as 32-bit numbers; None stays None.

    `media` has the items of its spans, each once.
    """

    request_id: str
    prompt_token_ids: bytes | None
    params: SamplingParams
    arrival: float
    num_prompt_tokens: int
    block_keys: tuple[BlockKey, ...] | None
    emitted_token_ids: bytes | None
    eos_token_ids: tuple[int, ...]
    wants: int
    priority: int
    tenant: str
    cache_salt: bytes
    adapter_id: int
    spans: tuple[Span, ...]
    score_from: int
    deadline: float | None
    queue_timeout: float | None
    ttft_objective: float | None
    tpot_objective: float | None
    session: str = ""  # absent in older journals, and so are `media`
    media: tuple[MediaItem, ...] = ()

    @classmethod
    def of(cls, epoch: int, request: Request, media: tuple[MediaItem, ...] = ()) -> Submit:
        """Pack a request."""
        values = {name: getattr(request, name) for name in _REQUEST_FIELDS}
        packed = {name: ids.tobytes() for name in _ID_FIELDS if (ids := values[name]) is not None}
        return cls(epoch, **values | packed | {"wants": int(request.wants), "media": media})

    def request(self) -> Request:
        """Unpack the request. Raises WireError, InvalidRequestError."""
        if not 0 < self.wants < 8:
            raise WireError(f"wants is {self.wants}")
        values = {name: getattr(self, name) for name in _REQUEST_FIELDS}
        unpacked = {name: _ids(packed) for name in _ID_FIELDS if (packed := values[name]) is not None}
        return Request(**values | unpacked | {"wants": Want(self.wants)})


_REQUEST_FIELDS = Submit.__struct_fields__[1:-1]  # all but the epoch and the media
_ID_FIELDS = ("prompt_token_ids", "emitted_token_ids")


class CancelRequests(_Message):
    """The command to end these requests, or one choice of each."""

    request_ids: tuple[str, ...]
    reason: FinishReason
    choice: int | None = None


class ControlRequest(_Message):
    """A verb with its argument; a ControlReply or an ErrorReply with the same number answers it."""

    number: int
    verb: Verb | str
    argument: str


class Close(_Message):
    """The command to end all requests and the engine."""


class Starting(_Message):
    """The engine process's first frame: the process begins to open the engine."""


class Ready(_Message):
    """The engine is open."""

    version: int
    capacity: Capacity


class ErrorReply(_Message):
    """An error of one Submit or ControlRequest, or of the whole engine (`to` is None)."""

    kind: ErrorKind
    message: str
    param: str | None = None
    to: ReplyTo | None = None

    @classmethod
    def of(cls, epoch: int, error: BaseException, to: ReplyTo | None = None) -> ErrorReply:
        """Pack an error. An error that is not an OctavoError becomes an EngineError whose message names its type."""
        message = str(error) if isinstance(error, OctavoError) else f"{type(error).__name__}: {error}"
        param = getattr(error, "param", None) or getattr(error, "path", None)
        return cls(epoch, kind_of(error), message, param, to)

    def error(self) -> OctavoError:
        """Return the error as an exception."""
        return error_of(self.kind, self.message, self.param)


class SubmitReply(_Message):
    """The answer to a Submit: the engine accepted the request."""

    accepted: Accepted


class Outputs(_Message):
    """The `Events` of a step; the columns of ids are packed."""

    step: int
    time: float
    request_ids: list[str]
    choices: bytes
    positions: bytes
    token_ids: bytes
    logprobs: list[TokenLogprobs | None] | None
    scores: tuple[tuple[str, int, tuple[TokenLogprobs, ...]], ...]
    pooled: tuple[tuple[str, bytes], ...]
    decisions: tuple[Event, ...]

    @classmethod
    def of(cls, epoch: int, events: Events) -> Outputs:
        """Pack events."""
        ids = events.choices.tobytes(), events.positions.tobytes(), events.token_ids.tobytes()
        columns = *ids, events.logprobs, events.scores, events.pooled, events.decisions
        return cls(epoch, events.step, events.time, events.request_ids, *columns)

    def events(self) -> Events:
        """Unpack the events. Raises WireError if columns differ in length, or an end has no reason."""
        ids = _ids(self.choices), _ids(self.positions), _ids(self.token_ids)
        lengths = {len(self.request_ids), *map(len, ids)}
        if self.logprobs is not None:
            lengths.add(len(self.logprobs))
        if len(lengths) != 1:
            raise WireError(f"columns of {sorted(lengths)} entries in one message")
        if any(event.kind in ENDS and event.finish_reason is None for event in self.decisions):
            raise WireError("an end without a reason")
        columns = *ids, self.logprobs, self.scores, self.pooled, self.decisions
        return Events(self.step, self.time, self.request_ids, *columns)


class ControlReply(_Message):
    """The answer to a ControlRequest: plain JSON values."""

    to: ReplyTo
    value: Any


ToEngine = Submit | CancelRequests | ControlRequest | Close
FromEngine = Starting | Ready | ErrorReply | SubmitReply | Outputs | ControlReply
_T = TypeVar("_T")
_ENCODER = msgspec.msgpack.Encoder()
_TO_ENGINE: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_FROM_ENGINE: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def frame(message: ToEngine | FromEngine) -> bytes:
    """Return a message as one frame with its length. Raises WireError if it is over the size cap."""
    body = _ENCODER.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"a {type(message).__name__} message of {len(body)} bytes; frames hold {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def join_frames(bodies: Iterable[bytes]) -> bytes:
    """Return bodies as frames with their lengths, one after another."""
    return b"".join(part for body in bodies for part in (_LENGTH.pack(len(body)), body))


def decode_to_engine(body: bytes) -> ToEngine:
    """Read a frame's body as a message to the engine. Raises WireError."""
    return _decode(_TO_ENGINE, body)


def decode_from_engine(body: bytes) -> FromEngine:
    """Read a frame's body as a message from the engine. Raises WireError."""
    return _decode(_FROM_ENGINE, body)


class FrameSplitter:
    """Splits a byte stream into frame bodies; holds at most one incomplete frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add data and yield the complete bodies. Raises WireError for a length over the cap; the stream ends."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._buffer, start)
                if length > MAX_FRAME_BYTES:
                    raise WireError(f"a frame of {length} bytes was announced; frames hold {MAX_FRAME_BYTES}")
                end = start + _LENGTH.size + length
                if len(self._buffer) < end:
                    break
                body = bytes(self._buffer[start + _LENGTH.size : end])
                start = end
                yield body
        finally:
            del self._buffer[:start]


def _decode(decoder: msgspec.msgpack.Decoder[_T], body: bytes) -> _T:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RequestError, RecursionError) as error:
        raise WireError(f"not a message: {error}") from None


def _ids(packed: bytes) -> array[int]:
    if len(packed) % 4:
        raise WireError(f"{len(packed)} bytes of 32-bit ids")
    return array("i", packed)
