"""The log of a process: lines as text or JSON, written to stderr by a thread of their own.

Owns: the formatter and the levels; the limit of lines per log statement; the bounded queue and the count of dropped
lines; the stream that replaces sys.stderr. Does not: decide what is logged.
Invariants: logging never waits for a reader of stderr and never raises. A line that does not fit the queue, or cannot
be written, is dropped and counted; the count is logged later. Callers ensure that no line contains a body, a prompt or
a key.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import logging
import os
import select
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO, cast

NOTICES = "octavo.notices"  # the logger of messages to the user: at start-up and while the server is busy
LEVELS = ("debug", "info", "warning", "error")
STATEMENT_LINES = 100  # most lines of one log statement in STATEMENT_S seconds
STATEMENT_S = 10.0
MAX_LINES = 1024  # most lines that wait to be written
MAX_BYTES = 1 << 20
NOTICE_S = 10.0  # least time between two notices of dropped lines
FLUSH_S = 1.0  # most time that a process waits at its end for its last lines
_STDERR = 2


class LogQueue:
    """A bounded queue of lines, written by a thread. `notice` makes the line that reports dropped lines."""

    def __init__(self, write: Callable[[bytes], None], notice: Callable[[int], str]) -> None:
        self.num_dropped = 0
        self._write = write
        self._notice = notice
        self._condition = threading.Condition()  # its lock is reentrant: a signal's handler may log
        self._lines: deque[bytes] = deque()
        self._num_bytes = 0
        self._num_reported = 0  # dropped lines that a notice has reported
        self._reported_at = float("-inf")
        self._dropping_since = 0.0  # while some dropped lines are not reported
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
            if self.num_dropped == self._num_reported:
                self._dropping_since = time.monotonic()
                self._condition.notify_all()
            self.num_dropped += 1

    def close(self, timeout_s: float = FLUSH_S) -> None:
        """Take no more lines, and wait until the queued ones are written, at most `timeout_s`. Idempotent."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (found := self._next()) is not None:
            line, num_reported = found
            try:
                self._write(line)
            except (OSError, ValueError):  # a full disk, a closed pipe, a closed stream
                if not num_reported:
                    self.drop()
                self._num_reported -= num_reported
                if self._is_closed:
                    return

    def _next(self) -> tuple[bytes, int] | None:
        """Wait for a line; return the line and the number of dropped lines that it reports. None at the end."""
        with self._condition:
            while True:
                num_unreported = self.num_dropped - self._num_reported
                if self._has_notice():
                    self._num_reported, self._reported_at = self.num_dropped, time.monotonic()
                    return self._notice(num_unreported).encode() + b"\n", num_unreported
                if self._lines:
                    line = self._lines.popleft()
                    self._num_bytes -= len(line)
                    return line, 0
                if self._is_closed:
                    return None
                self._condition.wait(self._reported_at + NOTICE_S - time.monotonic() if num_unreported else None)

    def _has_notice(self) -> bool:
        """Return True if the notice of dropped lines is due: after the lines queued before them, and not too often."""
        if self.num_dropped == self._num_reported:
            return False
        due = time.monotonic() - NOTICE_S
        if not self._lines:
            return self._is_closed or self._reported_at <= due
        return max(self._reported_at, self._dropping_since) <= due


class QueuedStream(io.TextIOBase):
    """Replacement of sys.stderr: passes whole lines to `put`; `isatty` and `fileno` are those of the real stream."""

    encoding = "utf-8"

    def __init__(self, put: Callable[[str], None], stream: TextIO) -> None:
        super().__init__()
        self._put = put
        self._stream = stream
        self._part = ""
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        """Add text; each line is passed on when it is complete."""
        with self._lock:
            *lines, self._part = (self._part + text).split("\n")
            for line in lines:
                self._put(line)
        return len(text)

    def finish(self) -> None:
        """Pass on an incomplete line."""
        if self._part:
            self.write("\n")

    def writable(self) -> bool:
        """Return True."""
        return True

    def isatty(self) -> bool:
        """Return True if the real stream is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Return the real stream's descriptor."""
        return self._stream.fileno()


def writer_of(stream: TextIO) -> Callable[[bytes], None]:
    """Return a function that writes to a stream's descriptor, or to the stream itself if it has none.

    Writing to the descriptor bypasses the stream's buffer and lock: a thread that hangs in a write must not keep the
    interpreter from ending.
    """
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # a test's

        def write_text(data: bytes) -> None:
            stream.write(data.decode())
            stream.flush()

        return write_text
    is_torn = False  # a full disk cut a line: the next one starts with a newline

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


class JsonLines(logging.Formatter):
    """Formatter of one JSON object a line: time (RFC 3339, UTC), level, logger, process, message, exception if any."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as one line of JSON."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "pid": record.process,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class _Handler(logging.Handler):
    """Handler which queues lines. A statement's lines over STATEMENT_LINES are dropped before they are formatted."""

    def __init__(self, queue: LogQueue) -> None:
        super().__init__()
        self._queue = queue
        self._counts: dict[tuple[str, int], int] = {}
        self._window_start = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        """Format a record and queue it."""
        if not self._is_allowed(record):
            self._queue.drop()
            return
        try:
            self._queue.put(self.format(record))
        except Exception:  # the instrument shell, as in logging's own handlers
            self.handleError(record)

    def _is_allowed(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now - self._window_start >= STATEMENT_S:
            self._window_start = now
            self._counts.clear()
        place = (record.pathname, record.lineno)
        self._counts[place] = count = self._counts.get(place, 0) + 1
        return count <= STATEMENT_LINES or record.name == NOTICES


@dataclass(frozen=True, slots=True)
class _Log:
    """The log of this process, and the stream that it replaced."""

    queue: LogQueue
    handler: logging.Handler
    stream: TextIO
    queued: QueuedStream


_log: _Log | None = None


def set_up_log(log_format: str, level: str, process: str) -> None:
    """Write this process's log to stderr in this format, from this level on; NOTICES are written at any level.

    Everything else that is written to sys.stderr is queued too, so that a stderr that is not read blocks nothing.
    """
    global _log
    close_log()
    stream = sys.stderr
    formatter = JsonLines(process) if log_format == "json" else logging.Formatter("%(name)s: %(message)s")
    is_json = log_format == "json"

    def notice(num_dropped: int) -> str:
        text = f"{num_dropped} log lines dropped: too many, or stderr was not read"
        return formatter.format(logging.LogRecord(__name__, logging.WARNING, "", 0, text, None, None))

    def put(text: str) -> None:
        if not is_json:
            queue.put(text)
        elif text:
            queue.put(formatter.format(logging.LogRecord("stderr", logging.WARNING, "", 0, text, None, None)))

    queue = LogQueue(writer_of(stream), notice)
    handler = _Handler(queue)
    handler.setFormatter(formatter)
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.getLogger(NOTICES).setLevel(logging.INFO)
    queued = QueuedStream(put, stream)
    sys.stderr = cast(TextIO, queued)
    _log = _Log(queue, handler, stream, queued)
    atexit.unregister(_end_log)
    atexit.register(_end_log)


def close_log() -> None:
    """Write the queued lines, for at most FLUSH_S, and restore sys.stderr. Idempotent."""
    global _log
    if _log is not None:
        log, _log = _log, None
        log.queued.finish()
        sys.stderr = log.stream
        logging.getLogger().removeHandler(log.handler)
        log.queue.close()


def _end_log() -> None:
    """Write the queued lines as the process ends. Lines that a thread logs after that are dropped.

    sys.stderr is not restored: a thread that wrote there would hang if stderr is not read, holding the lock
    that logging takes as the interpreter ends.
    """
    if _log is not None:
        _log.queued.finish()
        _log.queue.close()


def num_dropped_lines() -> int:
    """Return how many lines of this process's log were dropped."""
    return 0 if _log is None else _log.queue.num_dropped


def print_notice(line: str) -> None:
    """Write a line for the user to stderr, in the format of the log."""
    root = logging.getLogger()
    if not any(isinstance(handler.formatter, JsonLines) for handler in root.handlers):
        print(line, file=sys.stderr, flush=True)
        return
    for word, level in (("error: ", logging.ERROR), ("warning: ", logging.WARNING)):
        if line.startswith(word):
            logging.getLogger(NOTICES).log(level, "%s", line.removeprefix(word))
            return
    if line:
        logging.getLogger(NOTICES).info("%s", line)


def stderr_of_children() -> int | None:
    """Return a non-blocking descriptor of stderr's pipe for child processes; None if stderr is no pipe.

    Text that C code writes to it, such as the stacks of a crash, is cut off if nothing reads the pipe. The pipe is
    opened again because other processes share the mode of the inherited descriptor. Also None if that fails.
    """
    with contextlib.suppress(OSError):
        if stat.S_ISFIFO(os.fstat(_STDERR).st_mode):
            return os.open(f"/proc/self/fd/{_STDERR}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    return None


def open_missing_streams() -> None:
    """Open missing standard streams on /dev/null; otherwise the next opened file would get their descriptors."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, "w" if descriptor else "r", encoding="utf-8", closefd=False))
