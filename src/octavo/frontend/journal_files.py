"""The journal on disk: a folder of numbered segments, and the records in them.

Owns: file names, modes (folder 0700, files 0600: they contain prompts and answers), the lock, whole writes and syncs;
the records, their size cap and checksums; reading a segment. Does not: decide when to write, sync or compact (journal
does), or combine records into requests (journal_state does).
A record is `u32 length | u32 crc32 | msgpack` of a tagged struct. Lengths and checksums are little-endian; the checksum
covers the length too. Packed ids have this machine's byte order: a journal stays on the machine that wrote it.
Invariants: segments are append-only. A snapshot gets its final name once it is whole and on the disk; after that, the
segments that it replaces are deleted. One process holds the lock. A file that is not a segment is neither read nor
deleted. For any bytes, read_records returns the longest prefix of whole, valid records and does not raise.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import struct
import threading
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from octavo.core.plan import Event, TokenLogprobs
from octavo.engine.wire import MAX_FRAME_BYTES, Submit
from octavo.errors import ConfigError, RequestError
from octavo.frontend.journal_format1 import LoggedEventsV1

VERSION = 2
READABLE = (1, 2)
MAX_RECORD_BYTES = MAX_FRAME_BYTES
_PREFIX = struct.Struct("<II")
_MARK = b"\xa4Head"  # the tag of a segment's first record, after its length, its checksum and one byte
_MARK_AT = _PREFIX.size + 1
_MARK_END = _MARK_AT + len(_MARK)
_NAME = re.compile(r"journal-(\d{8})\.(seg|tmp)")
_BOOT_FILE = Path("/proc/sys/kernel/random/boot_id")
_WRITE_BYTES = 1 << 20
SAME_CLOCK_S = 1.0  # if the boot has no name, clocks that differ by less than this belong to the same boot
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Number = Annotated[int, msgspec.Meta(ge=0)]


class _Record(msgspec.Struct, array_like=True, tag=True, forbid_unknown_fields=True):
    pass


class Head(_Record):
    """A segment's first record. The segment replaces all segments with numbers below `supersedes`.

    `boot` names the machine's boot; `mono` and `wall` are the same instant on the two clocks. Token ids are `model`'s.
    """

    version: int
    number: Number
    supersedes: Number
    boot: str
    mono: float
    wall: float
    model: str


class Began(_Record):
    """The begin of a run: one HTTP request with a key, made of `num_requests` requests.

    `facts` are opaque data of the server. `body_hash` shows whether a later request with the same key has the same
    body. `at` is on the monotonic clock. `num_restarts`: server processes in a row that got no token for the run.
    """

    run: Number
    tenant: str
    key: str
    body_hash: Digest
    facts: bytes
    num_requests: int
    at: float
    num_restarts: Number = 0


class Opened(_Record):
    """A request of a run, as it was submitted; later records refer to the request by `number`."""

    run: Number
    index: Number
    number: Number
    submit: Submit


class LoggedEvents(_Record):
    """The columns and decisions of one `Events` about journaled requests; `numbers` has the requests' numbers."""

    at: float
    numbers: bytes = b""
    choices: bytes = b""
    positions: bytes = b""
    token_ids: bytes = b""
    logprobs: list[TokenLogprobs | None] | None = None
    decisions: tuple[Event, ...] = ()


class Forgotten(_Record):
    """A run is dropped: refused, cancelled, or expired."""

    run: Number


Record = Head | Began | Opened | LoggedEvents | Forgotten | LoggedEventsV1
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


class RecordTooLargeError(ValueError):
    """A record over the size cap."""


def packed(record: Record) -> bytes:
    """Return a record as the bytes of the file. Raises RecordTooLargeError."""
    body = _ENCODER.encode(record)
    if len(body) > MAX_RECORD_BYTES:
        raise RecordTooLargeError(f"a {type(record).__name__} record of {len(body)} bytes, at most {MAX_RECORD_BYTES}")
    return _PREFIX.pack(len(body), _checksum(len(body), body)) + body


def _checksum(length: int, body: bytes | memoryview) -> int:
    return zlib.crc32(body, zlib.crc32(length.to_bytes(4, "little")))


@dataclass(frozen=True, slots=True)
class Contents:
    """The whole records of a segment, and where and why reading stopped before the end, if it did.

    `is_torn`: only the last record is incomplete, as after a crash of the writer.
    """

    records: tuple[Record, ...]
    num_read: int  # bytes
    num_bytes: int
    damage: str | None = None
    is_torn: bool = False

    @property
    def head(self) -> Head | None:
        """The first record, None if it is no Head."""
        first = self.records[0] if self.records else None
        return first if isinstance(first, Head) else None


def read_records(data: bytes) -> Contents:
    """Read a segment's bytes up to the first record that is incomplete or damaged."""
    view = memoryview(data)
    records: list[Record] = []
    start = 0
    while start < len(view):
        body, end = _next_body(view, start)
        if not isinstance(body, str):
            try:
                records.append(_DECODER.decode(body))
                start = end
                continue
            except (msgspec.MsgspecError, UnicodeDecodeError, RequestError, RecursionError, OverflowError) as error:
                body, end = f"it is not a record: {error}", 0
        is_torn = end == len(view) or not any(view[start:])  # the record reaches to the end, or only zeros follow
        return Contents(tuple(records), start, len(view), f"record {len(records)} at byte {start}: {body}", is_torn)
    return Contents(tuple(records), start, len(view))


def _next_body(view: memoryview, start: int) -> tuple[memoryview | str, int]:
    """Return the record body at `start` and its end, or a description of the fault and the record's announced end."""
    if start + _PREFIX.size > len(view):
        return "its head is incomplete", len(view)
    length, checksum = _PREFIX.unpack_from(view, start)
    end = start + _PREFIX.size + length
    if length > MAX_RECORD_BYTES:
        return f"it announces {length} bytes, records have at most {MAX_RECORD_BYTES}", 0
    if end > len(view):
        return f"it announces {length} bytes, {len(view) - start - _PREFIX.size} are there", len(view)
    body = view[start + _PREFIX.size : end]
    if length == 0 or _checksum(length, body) != checksum:
        return "its checksum does not fit", end
    return body, end


class Disk:
    """The system calls that fail on a full disk; tests replace them."""

    def open(self, path: Path) -> int:
        """Create a file that only this user can access; it must not exist."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        """Call write(2)."""
        return os.write(fd, data)

    def sync(self, fd: int) -> None:
        """Call fdatasync(2)."""
        os.fdatasync(fd)


@dataclass(frozen=True, slots=True)
class BootClock:
    """The clocks of this boot: `boot` is the boot's name; `mono` and `wall` are the same instant on the two clocks."""

    boot: str
    mono: float
    wall: float

    @classmethod
    def now(cls) -> BootClock:
        """Read the clocks."""
        boot = ""
        with contextlib.suppress(OSError):
            boot = _BOOT_FILE.read_text().strip()
        return cls(boot, time.monotonic(), time.time())

    def shift_from(self, head: Head) -> float:
        """Return the seconds to add to a segment's monotonic times. The wall clock is used only across boots."""
        shift_s = (self.mono - self.wall) - (head.mono - head.wall)
        is_same = self.boot == head.boot if self.boot else abs(shift_s) < SAME_CLOCK_S
        return 0.0 if is_same else shift_s


def lock_folder(folder: Path, option: str) -> int:
    """Make the folder and take its lock; return the descriptor that holds it. Raises ConfigError, naming `option`."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"{option} is {str(folder)!r} ({reason}); give a folder of this user") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise ConfigError(f"{option} {str(folder)!r} is in use by another server; give each one its own") from None
    return fd


class JournalSegment:
    """One open segment. Every `add` is one write(2), or a few if the kernel accepts only a part."""

    def __init__(self, path: Path, head: Head, disk: Disk) -> None:
        """Create the segment with its head. Raises OSError."""
        self.path = path
        self.num_bytes = 0
        self._disk = disk
        self._fd = disk.open(path)
        self._lock = threading.Lock()  # syncs run in other threads; the descriptor stays open during a sync
        try:
            self.add(packed(head))
        except OSError:
            self.discard()
            raise

    def add(self, data: bytes) -> None:
        """Append whole records. On an error, cut off the bytes already written, if possible, and raise OSError."""
        view = memoryview(data)
        try:
            while view:
                view = view[self._disk.write(self._fd, view) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self.num_bytes)
            raise
        self.num_bytes += len(data)

    def sync(self) -> None:
        """Wait until the whole segment is on the disk. Raises OSError."""
        with self._lock:
            if self._fd >= 0:
                self._disk.sync(self._fd)

    def close(self) -> None:
        """Close the segment. Idempotent."""
        with self._lock:
            if self._fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(self._fd)
                self._fd = -1

    def discard(self) -> None:
        """Close and delete the segment."""
        self.close()
        with contextlib.suppress(OSError):
            self.path.unlink()


def segment_path(folder: Path, number: int) -> Path:
    """Return a segment's path."""
    return folder / f"journal-{number:08d}.seg"


def write_snapshot(folder: Path, head: Head, records: Iterable[Record], disk: Disk) -> int:
    """Write a segment that replaces all earlier segments, then delete them; return its size. Raises OSError."""
    unfinished = segment_path(folder, head.number).with_suffix(".tmp")
    _delete(unfinished)
    segment = JournalSegment(unfinished, head, disk)
    try:
        buffer = bytearray()
        for record in records:
            buffer += packed(record)
            if len(buffer) >= _WRITE_BYTES:
                segment.add(bytes(buffer))
                buffer.clear()
        segment.add(bytes(buffer))
        segment.sync()
        replace_segments(folder, segment, head.number)
    except BaseException:
        segment.discard()
        raise
    segment.close()
    return segment.num_bytes


def copy_head(data: bytes, number: int) -> Head:
    """Return the head of a copy, which replaces all segments before it. Raises ValueError if `data` is no head."""
    head = read_records(data).head
    if head is None or head.version != VERSION:
        raise ValueError("the copy of a journal does not begin with a head of this version")
    return msgspec.structs.replace(head, number=number, supersedes=number)


def replace_segments(folder: Path, segment: JournalSegment, number: int) -> None:
    """Give a whole segment, whose file is unfinished, its name, and delete all earlier ones. Raises OSError."""
    path = segment_path(folder, number)
    segment.path.rename(path)
    segment.path = path
    sync_folder(folder)
    for older, old_path in numbered(folder):
        if older < number:
            _delete(old_path)


def sync_folder(folder: Path) -> None:
    """Make the folder's file names durable. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def numbered(folder: Path, kind: str = "seg") -> list[tuple[int, Path]]:
    """Return the folder's segments, lowest number first. Raises OSError."""
    found = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in found if match is not None and match[2] == kind)


def delete_unfinished(folder: Path) -> None:
    """Delete unfinished snapshots. Raises OSError if the folder cannot be read."""
    for _, path in numbered(folder, "tmp"):
        _delete(path)


def read_segment(path: Path) -> tuple[Contents, str | None]:
    """Read a segment as far as possible; return its contents, and a warning for the log."""
    try:
        if not _is_segment(path):
            return Contents((), 0, 0), f"{path.name} is not a segment of a journal and is left alone"
        return read_records(path.read_bytes()), None
    except OSError as error:
        warning = f"{path.name} cannot be read ({error.strerror or error}); its requests are lost"
        return Contents((), 0, 0, "unreadable"), warning


def _delete(path: Path) -> None:
    """Delete a segment, finished or not; leave a file of another program, and one that cannot be deleted."""
    with contextlib.suppress(OSError):
        if _is_segment(path):
            path.unlink()


def _is_segment(path: Path) -> bool:
    """Return True for a segment that is whole, cut off, or empty or all zeros on the disk. Raises OSError."""
    if not stat.S_ISREG(path.lstat().st_mode):
        return False
    with path.open("rb") as file:
        start = file.read(_MARK_END)
    return not any(start) or (len(start) > _MARK_AT and _MARK.startswith(start[_MARK_AT:]))
