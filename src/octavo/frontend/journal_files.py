"""A journal's folder: numbered segments, a lock, and how they are read, written and replaced.

Owns: file names, modes (the folder 0700, files 0600: they hold prompts and answers), whole writes, syncs, recovery.
Does not: decide when to write, sync or compact (journal does).
Invariants: a segment is only ever added to; a snapshot has its name only when it is whole and on the disk, and only
then what it supersedes is deleted; one process holds the lock; a file that is no segment is neither read nor deleted.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from octavo.errors import ConfigError
from octavo.frontend.journal_records import (
    MARK_BYTES,
    VERSION,
    Contents,
    Head,
    Record,
    is_segment,
    packed,
    read_records,
)
from octavo.frontend.journal_state import JournalState

_NAME = re.compile(r"journal-(\d{8})\.seg")
_UNFINISHED = re.compile(r"journal-\d{8}\.tmp")
_BOOT_FILE = Path("/proc/sys/kernel/random/boot_id")
_WRITE_BYTES = 1 << 20
SAME_CLOCK_S = 1.0  # clocks that drifted by less are taken as the same boot where the boot has no name


class Disk:
    """The system calls that can fail for want of room; tests put others in their place."""

    def open(self, path: Path) -> int:
        """Create a file of this user alone; it must not exist."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        """write(2)."""
        return os.write(fd, data)

    def sync(self, fd: int) -> None:
        """fdatasync(2)."""
        os.fdatasync(fd)


@dataclass(frozen=True, slots=True)
class Clock:
    """This boot's clocks: `boot` names it, `mono` and `wall` are one instant on both."""

    boot: str
    mono: float
    wall: float

    @classmethod
    def now(cls) -> Clock:
        """Read the clocks."""
        boot = ""
        with contextlib.suppress(OSError):
            boot = _BOOT_FILE.read_text().strip()
        return cls(boot, time.monotonic(), time.time())

    def shift_from(self, head: Head) -> float:
        """What to add to a segment's monotonic times. The wall clock counts only across boots."""
        shift_s = (self.mono - self.wall) - (head.mono - head.wall)
        is_same = self.boot == head.boot if self.boot else abs(shift_s) < SAME_CLOCK_S
        return 0.0 if is_same else shift_s


def segment_path(folder: Path, number: int) -> Path:
    """Where a segment is."""
    return folder / f"journal-{number:08d}.seg"


def lock_folder(folder: Path) -> int:
    """Make the folder and take its lock; give the descriptor that holds it. Raises ConfigError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--journal is {str(folder)!r} ({reason}); give a folder of this user") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise ConfigError(f"--journal {str(folder)!r} is in use by another server; give each one its own") from None
    return fd


class Segment:
    """One open segment. Every `add` is one write(2), or a few where the kernel takes only a part."""

    def __init__(self, path: Path, disk: Disk) -> None:
        """Create it. Raises OSError."""
        self.path = path
        self.num_bytes = 0
        self._disk = disk
        self._fd = disk.open(path)
        self._lock = threading.Lock()  # syncs run in other threads; the descriptor stays while one does

    def add(self, data: bytes) -> None:
        """Add whole records. Raises OSError; then nothing of them is left where that can be had."""
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
        """Wait until all of it is on the disk. Raises OSError."""
        with self._lock:
            if self._fd >= 0:
                self._disk.sync(self._fd)

    def close(self) -> None:
        """Close it. Idempotent."""
        with self._lock:
            if self._fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(self._fd)
                self._fd = -1


def write_snapshot(folder: Path, head: Head, records: Iterable[Record], disk: Disk) -> int:
    """Write a segment that replaces all before it, then delete those; give its size. Raises OSError, WireError."""
    path = segment_path(folder, head.number)
    unfinished = path.with_suffix(".tmp")
    _delete(unfinished)
    segment = Segment(unfinished, disk)
    try:
        held = bytearray(packed(head))
        for record in records:
            held += packed(record)
            if len(held) >= _WRITE_BYTES:
                segment.add(bytes(held))
                held.clear()
        segment.add(bytes(held))
        segment.sync()
        unfinished.rename(path)
        sync_folder(folder)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    finally:
        segment.close()
    delete_below(folder, head.supersedes)
    return segment.num_bytes


def sync_folder(folder: Path) -> None:
    """Make names durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def delete_below(folder: Path, number: int) -> None:
    """Delete superseded segments; one that stays is superseded all the same."""
    for found, path in numbered(folder):
        if found < number:
            _delete(path)


def _delete(path: Path) -> None:
    """Delete a segment, finished or not; leave a file of another program."""
    with contextlib.suppress(OSError):
        if _is_own(path):
            path.unlink()


def _is_own(path: Path) -> bool:
    """Return True for a segment. Raises OSError."""
    if not stat.S_ISREG(path.lstat().st_mode):
        return False
    with path.open("rb") as file:
        return is_segment(file.read(MARK_BYTES))


def numbered(folder: Path) -> list[tuple[int, Path]]:
    """The segments there are, lowest number first."""
    found = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in found if match is not None)


@dataclass(slots=True)
class Recovery:
    """What a folder held: the state, warnings for the log, and the first number that is free."""

    state: JournalState = field(default_factory=JournalState)
    warnings: list[str] = field(default_factory=list)
    next_number: int = 1


def recover(folder: Path, model: str, clock: Clock) -> Recovery:
    """Read every segment that counts. Raises OSError when the folder cannot be read."""
    result = Recovery()
    for path in folder.iterdir():
        if _UNFINISHED.fullmatch(path.name):
            _delete(path)
    segments = numbered(folder)
    contents: list[tuple[Path, Contents]] = []
    first = 0
    for number, path in segments:
        read = _read(path, result)
        result.next_number = number + 1
        head = read.records[0] if read.records else None
        if isinstance(head, Head):
            first = max(first, head.supersedes)
        contents.append((path, read))
    for index, (path, read) in enumerate(contents):
        if segments[index][0] >= first:
            _apply(path, read, result, (model, clock), is_last=index == len(contents) - 1)
    if result.state.num_faults:
        result.warnings.append(
            f"{result.state.num_faults} records do not fit what came before them and are left out; requests that they "
            "belong to keep what they had, and are computed again from there"
        )
    return result


def _read(path: Path, result: Recovery) -> Contents:
    try:
        if not _is_own(path):
            result.warnings.append(f"{path.name} is no segment of a journal and is left alone")
            return Contents((), 0, 0)
        return read_records(path.read_bytes())
    except OSError as error:
        result.warnings.append(f"{path.name} cannot be read ({error.strerror or error}); what it holds is lost")
        return Contents((), 0, 0, "unreadable")


def _apply(path: Path, read: Contents, result: Recovery, here: tuple[str, Clock], *, is_last: bool) -> None:
    model, clock = here
    head = read.records[0] if read.records else None
    if isinstance(head, Head) and head.version == VERSION and head.model == model:
        shift_s = clock.shift_from(head)
        for record in read.records[1:]:
            result.state.apply(record, shift_s)
        if head.supersedes:
            result.state.begin_life()
    elif isinstance(head, Head):
        result.warnings.append(
            f"{path.name} is of version {head.version} and model {head.model!r}, this server of version {VERSION} and "
            f"model {model!r}; what it holds is left out"
        )
    if read.damage is not None:
        lost = read.num_bytes - read.num_read
        what = "a torn tail is cut" if read.is_torn else "a damaged record ends this segment"
        result.warnings.append(f"{path.name}: {what}, {lost} bytes are lost ({read.damage})")
        if not (is_last and read.is_torn):
            result.state.distrust()
