"""The journal's file format: `u32 length | u32 crc32 | msgpack` of tagged structs, one after the other.

Owns: the structs, size caps, checksums, reading a segment's bytes and saying how they end. Does not: touch files,
or know what the records add up to (journal_state does). Lengths and checksums are little-endian; the checksum covers
the length too; packed ids are in this machine's order: a journal stays on the machine that wrote it.
Invariant: whatever the bytes, reading gives the longest beginning of whole, checked records and never raises.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import msgspec

from octavo.core.plan import TokenLogprobs
from octavo.core.request import FinishError, FinishReason
from octavo.engine.wire import MAX_FRAME_BYTES, Submit
from octavo.errors import ErrorKind, RequestError

VERSION = 1
MAX_RECORD_BYTES = MAX_FRAME_BYTES
_HEAD = struct.Struct("<II")
_MARK = b"\xa4Head"  # the tag of a segment's first record, behind its length, its checksum and one byte
_MARK_AT = _HEAD.size + 1
MARK_BYTES = _MARK_AT + len(_MARK)
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Number = Annotated[int, msgspec.Meta(ge=0)]


class _Record(msgspec.Struct, array_like=True, tag=True, forbid_unknown_fields=True):
    pass


class Head(_Record):
    """A segment's first record. Segments below `supersedes` are replaced by this one and count no more.

    `boot` names the machine's boot; `mono` and `wall` are one instant on both clocks, `model` what ids mean.
    """

    version: int
    number: Number
    supersedes: Number
    boot: str
    mono: float
    wall: float
    model: str


class Began(_Record):
    """A run: one HTTP request with a key, made of `num_requests` requests. `facts` are the server's own.

    `body_hash` tells whether a later request with the same key is the same; `at` is on the monotonic clock. `lives`:
    how many lives of the server in a row took it over and gave it no token.
    """

    run: Number
    tenant: str
    key: str
    body_hash: Digest
    facts: bytes
    num_requests: int
    at: float
    lives: Number = 0


class Opened(_Record):
    """A request of a run, whole, as it went to the ledger; `number` names it in later records."""

    run: Number
    index: Number
    number: Number
    submit: Submit


class LoggedLogprobs(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Log-probabilities at one position."""

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class Started(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The first admission of a request."""

    number: Number
    queue_s: float
    cached_tokens: int


class ChoiceEnded(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The end of one choice of a request that goes on."""

    number: Number
    choice: Number
    finish_reason: FinishReason
    stop_token_id: int | None
    message: str | None
    kind: ErrorKind | None = None  # None: of nothing, or written by an earlier version

    @property
    def error(self) -> FinishError | None:
        """What went wrong."""
        return _error_of(self.kind, self.message)


class Ended(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The end of a request."""

    number: Number
    finish_reason: FinishReason
    stop_token_id: int | None
    cached_tokens: int
    num_preemptions: int
    queue_s: float
    message: str | None
    kind: ErrorKind | None = None

    @property
    def error(self) -> FinishError | None:
        """What went wrong."""
        return _error_of(self.kind, self.message)


class Appended(_Record):
    """What one delivery added: columns of packed 32-bit numbers, one entry per token, then ends."""

    at: float
    numbers: bytes
    choices: bytes
    positions: bytes
    token_ids: bytes
    logprobs: tuple[LoggedLogprobs | None, ...] | None = None
    choice_ends: tuple[ChoiceEnded, ...] = ()
    ends: tuple[Ended, ...] = ()
    starts: tuple[Started, ...] = ()


class Forgotten(_Record):
    """A run is of no use any more: refused, cancelled, or kept for long enough."""

    run: Number


Record = Head | Began | Opened | Appended | Forgotten
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


class RecordTooLargeError(ValueError):
    """A record over the size cap."""


def packed(record: Record) -> bytes:
    """A record as it stands in the file. Raises RecordTooLargeError."""
    body = _ENCODER.encode(record)
    if len(body) > MAX_RECORD_BYTES:
        raise RecordTooLargeError(f"a {type(record).__name__} record of {len(body)} bytes, at most {MAX_RECORD_BYTES}")
    return _HEAD.pack(len(body), _checksum(len(body), body)) + body


def is_segment(start: bytes) -> bool:
    """Return True if a file that begins so is a segment: whole, cut off, or with no byte but zeros on the disk."""
    return not any(start) or (len(start) > _MARK_AT and _MARK.startswith(start[_MARK_AT:MARK_BYTES]))


def _checksum(length: int, body: bytes | memoryview) -> int:
    return zlib.crc32(body, zlib.crc32(length.to_bytes(4, "little")))


@dataclass(frozen=True, slots=True)
class Contents:
    """A segment as read: its whole records, and where and why reading stopped before the end, if it did.

    `is_torn`: only the last record is incomplete, which is what a sudden end of the writer leaves behind.
    """

    records: tuple[Record, ...]
    num_read: int  # bytes
    num_bytes: int
    damage: str | None = None
    is_torn: bool = False


def read_records(data: bytes) -> Contents:
    """Read a segment's bytes up to the first record that is incomplete or damaged."""
    view = memoryview(data)
    records: list[Record] = []
    start = 0
    while start < len(view):
        body, end = _next_body(view, start)
        if isinstance(body, str):
            return _stopped(records, start, view, end, body)
        try:
            records.append(_DECODER.decode(body))
        except (msgspec.MsgspecError, UnicodeDecodeError, RequestError, RecursionError, OverflowError) as error:
            return _stopped(records, start, view, 0, f"it is no record: {error}")
        start = end
    return Contents(tuple(records), start, len(view))


def _next_body(view: memoryview, start: int) -> tuple[memoryview | str, int]:
    """The body that begins at `start` and where it ends, or what is wrong and where the record would end."""
    if start + _HEAD.size > len(view):
        return "its head is incomplete", len(view)
    length, checksum = _HEAD.unpack_from(view, start)
    end = start + _HEAD.size + length
    if length > MAX_RECORD_BYTES:
        return f"it announces {length} bytes, records have at most {MAX_RECORD_BYTES}", 0
    if end > len(view):
        return f"it announces {length} bytes, {len(view) - start - _HEAD.size} are there", len(view)
    body = view[start + _HEAD.size : end]
    if length == 0 or _checksum(length, body) != checksum:
        return "its checksum does not fit", end
    return body, end


def _stopped(records: list[Record], start: int, view: memoryview, end: int, why: str) -> Contents:
    """Reading ends here. It is a torn tail if the record reaches to the end, or nothing but zeros follows."""
    is_torn = end == len(view) or not any(view[start:])
    return Contents(tuple(records), start, len(view), f"record {len(records)} at byte {start}: {why}", is_torn)


def _error_of(kind: ErrorKind | None, message: str | None) -> FinishError | None:
    """Return an end's error; where an earlier version wrote it, the text begins with its kind."""
    if message is None:
        return None
    if kind is None:
        kind = next((each for each in ErrorKind if message.startswith(each.value)), ErrorKind.ENGINE)
    return FinishError(kind, message)


def wire_logprobs(entries: Iterable[TokenLogprobs | None]) -> tuple[LoggedLogprobs | None, ...]:
    """Log-probabilities as they stand in a record."""
    return tuple(
        None if e is None else LoggedLogprobs(e.token_id, e.logprob, e.rank, e.top_ids, e.top_logprobs) for e in entries
    )


def core_logprobs(entry: LoggedLogprobs | None) -> TokenLogprobs | None:
    """One entry, as the rest of the engine has it."""
    if entry is None:
        return None
    return TokenLogprobs(entry.token_id, entry.logprob, entry.rank, entry.top_ids, entry.top_logprobs)
