"""Keys of a terminal, one by one, without echo; the terminal's mode is always restored.

Owns: the terminal's mode and the few key sequences that are known. Does not: draw.
"""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from types import TracebackType
from typing import Any

_KEYS = {
    b"\x1b[A": "up", b"\x1bOA": "up", b"\x1b[B": "down", b"\x1bOB": "down", b"\x1b[5~": "page up",
    b"\x1b[6~": "page down", b"\x1b[H": "home", b"\x1bOH": "home", b"\x1b[1~": "home", b"\x1b[F": "end",
    b"\x1bOF": "end", b"\x1b[4~": "end", b"\x1b": "escape", b"\x03": "ctrl-c",
}  # fmt: skip
_ESCAPE_S = 0.05  # within which the rest of a sequence arrives


class Keyboard:
    """The keys of standard input, which must be a terminal. Use as a context manager."""

    def __init__(self) -> None:
        self._fd = sys.stdin.fileno()
        self._before: list[Any] = []

    def __enter__(self) -> Keyboard:
        self._before = termios.tcgetattr(self._fd)
        tty.setcbreak(self._fd)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def wait(self, timeout_s: float) -> str | None:
        """Return the next key within the time, as its name or letter; None if none was pressed.

        Returns "end of input" when the input is closed.
        """
        until = time.monotonic() + timeout_s
        if not self._is_ready(max(0.0, timeout_s)):
            return None
        data = os.read(self._fd, 1)
        if not data:
            return "end of input"
        while data[:1] == b"\x1b" and len(data) < 8 and (data == b"\x1b" or data not in _KEYS):
            if not self._is_ready(_ESCAPE_S):
                break
            data += os.read(self._fd, 1)
        if data in _KEYS:
            return _KEYS[data]
        text = data.decode(errors="replace")
        return text if len(text) == 1 else self.wait(until - time.monotonic())

    def _is_ready(self, timeout_s: float) -> bool:
        return bool(select.select([self._fd], [], [], timeout_s)[0])
