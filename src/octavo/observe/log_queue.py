"""Lines on the way to stderr, which may be read late, or never, or be gone.

Owns: the queue and its bounds, the thread that writes, counting what is dropped, the stream in sys.stderr's place.
Does not: format lines, or decide which there are.
Invariants: adding a line never waits for a reader and never raises; a line that finds no room or cannot be written is
dropped and counted, and the count is written once lines get through again.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

MAX_LINES = 1024  # that wait
MAX_BYTES = 1 << 20
NOTICE_S = 10.0  # between two lines that tell how many were dropped
FLUSH_S = 1.0  # that the end of a process waits for its last lines
_STDERR = 2


class LogQueue:
    """A bounded queue of lines, written by a thread of its own. `notice` makes the line about dropped ones."""

    def __init__(self, write: Callable[[bytes], None], notice: Callable[[int], str]) -> None:
        self.num_dropped = 0
        self._write = write
        self._notice = notice
        self._condition = threading.Condition()  # its lock is reentrant: a signal's handler may log
        self._lines: deque[bytes] = deque()
        self._num_bytes = 0
        self._num_told = 0  # of the dropped
        self._told_at = float("-inf")
        self._dropping_since = 0.0  # while some are not told
        self._is_writing = False
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="octavo-log", daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        """Add a line, or count it as dropped."""
        data = line.encode("utf-8", "backslashreplace") + b"\n"
        with self._condition:
            if self._is_closed or len(self._lines) >= MAX_LINES or self._num_bytes + len(data) > MAX_BYTES:
                self.drop()
                return
            self._lines.append(data)
            self._num_bytes += len(data)
            self._condition.notify_all()

    def drop(self) -> None:
        """Count a line as dropped."""
        with self._condition:
            if self.num_dropped == self._num_told:
                self._dropping_since = time.monotonic()
                self._condition.notify_all()
            self.num_dropped += 1

    def close(self, timeout_s: float = FLUSH_S) -> None:
        """Take no more lines, and wait until those that there are are written, for so long at most. Idempotent."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        self._thread.join(timeout_s)

    def flush(self, timeout_s: float = FLUSH_S) -> None:
        """Wait until the lines that there are are written, for so long at most."""
        with self._condition:
            self._condition.wait_for(lambda: not self._lines and not self._is_writing, timeout_s)

    def _run(self) -> None:
        while (found := self._next()) is not None:
            line, num_told = found
            try:
                self._write(line)
            except (OSError, ValueError):  # a full disk, a reader that is gone, a stream that was closed
                if not num_told:
                    self.drop()
                self._num_told -= num_told
                if self._is_closed:
                    return
            with self._condition:
                self._is_writing = False
                self._condition.notify_all()

    def _next(self) -> tuple[bytes, int] | None:
        """Wait for a line, and return it with the number of dropped ones that it tells; None at the end."""
        with self._condition:
            while True:
                if self._has_notice():
                    num_told = self.num_dropped - self._num_told
                    line = self._notice(num_told).encode() + b"\n"
                    self._num_told, self._told_at = self.num_dropped, time.monotonic()
                    break
                if self._lines:
                    line, num_told = self._lines.popleft(), 0
                    self._num_bytes -= len(line)
                    break
                if self._is_closed:
                    return None
                is_told = self.num_dropped == self._num_told
                self._condition.wait(None if is_told else self._told_at + NOTICE_S - time.monotonic())
            self._is_writing = True
            return line, num_told

    def _has_notice(self) -> bool:
        """Return True if the notice of dropped lines is due: after the lines queued before them, and not too often."""
        if self.num_dropped == self._num_told:
            return False
        due = time.monotonic() - NOTICE_S
        if not self._lines:
            return self._is_closed or self._told_at <= due
        return max(self._told_at, self._dropping_since) <= due


class QueuedStream(io.TextIOBase):
    """What stands in for sys.stderr: whole lines go to `put`; `beneath` answers what it is asked of the real one."""

    encoding = "utf-8"

    def __init__(self, put: Callable[[str], None], beneath: TextIO) -> None:
        super().__init__()
        self._put = put
        self._beneath = beneath
        self._part = ""
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        """Add text; its lines leave as they are completed."""
        with self._lock:
            *lines, self._part = (self._part + text).split("\n")
            for line in lines:
                self._put(line)
        return len(text)

    def finish(self) -> None:
        """Pass on a line that was not completed."""
        if self._part:
            self.write("\n")

    def writable(self) -> bool:
        """Return True."""
        return True

    def isatty(self) -> bool:
        """Return what the real stream says."""
        return self._beneath.isatty()

    def fileno(self) -> int:
        """Return the real stream's descriptor."""
        return self._beneath.fileno()


def writer_of(stream: TextIO) -> Callable[[bytes], None]:
    """Return what writes to a stream's descriptor, past its buffer and that buffer's lock: a thread that hangs in a
    write must not keep the interpreter from ending. A stream without one is written to as it is.
    """
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # a test's

        def write_text(data: bytes) -> None:
            stream.write(data.decode())
            stream.flush()

        return write_text
    is_torn = False  # a line was cut by a full disk: the next begins anew

    def write(data: bytes) -> None:
        nonlocal is_torn
        view = memoryview(b"\n" + data if is_torn else data)
        while view:
            try:
                view = view[os.write(descriptor, view) :]
            except BlockingIOError:
                _wait_for_room(descriptor)
            except OSError:
                is_torn = is_torn or len(view) < len(data)
                raise
        is_torn = False

    return write


def _wait_for_room(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    poll.poll()


def stderr_of_children() -> int | None:
    """Return a descriptor of stderr's pipe for child processes, on which no write waits: what C code writes there,
    such as the stacks of a crash, is cut where it is not read. None where stderr is no pipe, or cannot be opened anew.

    A new opening is this program's own: the mode of the one that it was given belongs to others, too.
    """
    with contextlib.suppress(OSError):
        if stat.S_ISFIFO(os.fstat(_STDERR).st_mode):
            return os.open(f"/proc/self/fd/{_STDERR}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    return None


def open_missing_streams() -> None:
    """Open the standard streams that were closed at the start, on nothing: the next file would be taken for them."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, "w" if descriptor else "r", encoding="utf-8", closefd=False))
