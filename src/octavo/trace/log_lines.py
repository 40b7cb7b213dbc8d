"""How lines of the log look: text, or one JSON object a line.

Owns: the formatter, the levels, what a line told at start-up or while busy becomes. Does not: decide what is told.
Invariant: no line holds a body, a prompt or a key; those who log see to it (SERVING: no bodies in logs).
"""

from __future__ import annotations

import json
import logging
import sys
import time

TOLD = "octavo.told"  # the logger of lines that people see at start-up and while the server is busy
LEVELS = ("debug", "info", "warning", "error")


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


def set_up_log(log_format: str, level: str, process: str) -> None:
    """Send this process's log to stderr in this format, from this level on; what is told is told at any level."""
    handler = logging.StreamHandler(sys.stderr)
    is_json = log_format == "json"
    handler.setFormatter(JsonLines(process) if is_json else logging.Formatter("%(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.getLogger(TOLD).setLevel(logging.INFO)


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
