"""One segment as a file: a mark with the version, then frames of records, each checked by itself.

Owns: names, framing, compression, checksums, the header's JSON. Does not: know records.
Layout: MARK, version (uint16, little-endian), then per frame: bytes stored, bytes unpacked, CRC-32 of those stored
(three uint32), and zlib's output. The first frame is the header, the others are msgpack arrays of records.
Invariant: a file that is cut anywhere, or damaged, reads up to its last whole frame in front of that.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from octavo.errors import ConfigError
from octavo.observe.recording.calls import VERSION, Header
from octavo.observe.recording.errors import RecordingError

MARK = b"octavo-rec\n"
SUFFIX = ".octrec"
MAX_FRAME_BYTES = 256 << 20  # unpacked; a writer makes frames of some hundred KB, or of one long prompt
_FRAME = struct.Struct("<III")
_VERSION = struct.Struct("<H")
PREAMBLE_BYTES = len(MARK) + _VERSION.size


def preamble() -> bytes:
    """A segment's first bytes."""
    return MARK + _VERSION.pack(VERSION)


def pack(data: bytes) -> bytes:
    """One frame."""
    stored = zlib.compress(data, 1)
    return _FRAME.pack(len(stored), len(data), zlib.crc32(stored)) + stored


def pack_header(header: Header) -> bytes:
    """The frame of a header."""
    return pack(msgspec.json.encode(header))


def pack_records(records: list[tuple[Any, ...]]) -> bytes:
    """The frame of some records."""
    return pack(msgspec.msgpack.encode(records))


def read_header(path: Path) -> Header | None:
    """Read a segment's header; None where it was cut off before that was whole. Raises RecordingError."""
    try:
        with path.open("rb") as file:
            first = file.read(PREAMBLE_BYTES)
            if len(first) < PREAMBLE_BYTES and preamble().startswith(first):
                return None
            _check_version(path, first)
            body = _read_frame(file)
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error.strerror or error}") from None
    if body is None:
        return None
    try:
        return msgspec.json.decode(body, type=Header)
    except (msgspec.MsgspecError, ConfigError) as error:
        raise RecordingError(f"{path} has a header that cannot be ({error}); it was not written by Octavo") from None


def read_records(path: Path) -> Iterator[Any]:
    """The records of a segment, up to its last whole frame."""
    with path.open("rb") as file:
        file.seek(PREAMBLE_BYTES)
        if _read_frame(file) is None:
            return
        while (body := _read_frame(file)) is not None:
            try:
                records = msgspec.msgpack.decode(body, type=list)
            except msgspec.MsgspecError:
                return
            yield from records


def _check_version(path: Path, first: bytes) -> None:
    if not first.startswith(MARK) or len(first) < PREAMBLE_BYTES:
        raise RecordingError(f"{path} is no recording: it does not begin as one; name the folder given to --record")
    (version,) = _VERSION.unpack(first[len(MARK) :])
    if version != VERSION:
        raise RecordingError(
            f"{path} is of format {version}, this Octavo reads {VERSION}: read it with the version that wrote it"
        )


def _read_frame(file: BinaryIO) -> bytes | None:
    """The next frame unpacked; None where no whole one is."""
    head = file.read(_FRAME.size)
    if len(head) < _FRAME.size:
        return None
    num_stored, num_unpacked, checksum = _FRAME.unpack(head)
    if num_stored > MAX_FRAME_BYTES or num_unpacked > MAX_FRAME_BYTES:
        return None
    stored = file.read(num_stored)
    if len(stored) < num_stored or zlib.crc32(stored) != checksum:
        return None
    unpacker = zlib.decompressobj()
    try:
        body = unpacker.decompress(stored, num_unpacked + 1)
    except zlib.error:
        return None
    return body if len(body) == num_unpacked and unpacker.eof else None
