"""How lines of the log look: text, or one JSON object a line.

Owns: the formatter, the levels, each statement's share of lines, what a line told at start-up or while busy becomes.
Does not: decide what is told, or write (log_queue does).
Invariant: no line holds a body, a prompt or a key; those who log see to it (SERVING: no bodies in logs).
"""

from __future__ import annotations

import atexit
import json
import logging
import sys
import time
from dataclasses import dataclass
from typing import TextIO, cast

from octavo.observe.log_queue import LogQueue, QueuedStream, writer_of

TOLD = "octavo.told"  # the logger of lines that people see at start-up and while the server is busy
LEVELS = ("debug", "info", "warning", "error")
SHARE = 100  # lines of one statement in SHARE_S seconds
SHARE_S = 10.0


class JsonLines(logging.Formatter):
    """One object a line: time (RFC 3339, UTC), level, logger, process, message, and exception where there is one."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Write a record."""
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
    """Hands lines to the queue. A statement that logs more than its share is cut: those lines are dropped unmade."""

    def __init__(self, queue: LogQueue) -> None:
        super().__init__()
        self._queue = queue
        self._counts: dict[tuple[str, int], int] = {}
        self._begun = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        """Format a record and queue it."""
        if not self._has_share(record):
            self._queue.drop()
            return
        try:
            self._queue.put(self.format(record))
        except Exception:  # the instrument shell, as in logging's own handlers
            self.handleError(record)

    def _has_share(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now - self._begun >= SHARE_S:
            self._begun = now
            self._counts.clear()
        place = (record.pathname, record.lineno)
        self._counts[place] = count = self._counts.get(place, 0) + 1
        return count <= SHARE or record.name == TOLD


@dataclass(frozen=True, slots=True)
class _Log:
    """The log of this process, and the stream that it took the place of."""

    queue: LogQueue
    handler: logging.Handler
    stream: TextIO
    queued: QueuedStream


_log: _Log | None = None


def set_up_log(log_format: str, level: str, process: str) -> None:
    """Send this process's log to stderr in this format, from this level on; what is told is told at any level.

    Whatever else is written to sys.stderr goes the same way, so that a stderr that is not read stops nothing.
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
    logging.getLogger(TOLD).setLevel(logging.INFO)
    queued = QueuedStream(put, stream)
    sys.stderr = cast(TextIO, queued)
    _log = _Log(queue, handler, stream, queued)
    atexit.unregister(_end_log)
    atexit.register(_end_log)


def close_log() -> None:
    """Write what is queued, for FLUSH_S at most, and give sys.stderr back. Idempotent."""
    global _log
    if _log is not None:
        log, _log = _log, None
        log.queued.finish()
        sys.stderr = log.stream
        logging.getLogger().removeHandler(log.handler)
        log.queue.close()


def _end_log() -> None:
    """Write what is queued as the process ends. What a thread logs after that is dropped.

    sys.stderr is not given back: a thread that wrote there would hang in a stderr that is not read, with the lock that
    logging takes as the interpreter ends.
    """
    if _log is not None:
        _log.queued.finish()
        _log.queue.close()


def num_dropped_lines() -> int:
    """Return how many lines of this process's log were dropped."""
    return 0 if _log is None else _log.queue.num_dropped


def tell(line: str) -> None:
    """Write a line that people are to see to stderr, as the log is written."""
    root = logging.getLogger()
    if not any(isinstance(handler.formatter, JsonLines) for handler in root.handlers):
        print(line, file=sys.stderr, flush=True)
        return
    for word, level in (("error: ", logging.ERROR), ("warning: ", logging.WARNING)):
        if line.startswith(word):
            logging.getLogger(TOLD).log(level, "%s", line.removeprefix(word))
            return
    if line:
        logging.getLogger(TOLD).info("%s", line)
