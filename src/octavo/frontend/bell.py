"""A bell in an event loop: rung from any thread, answered in the loop's.

Owns: a pipe that the loop watches. Does not: carry anything.
Invariant: to ring keeps the interpreter's lock. asyncio's own wake-up releases it, whereupon the woken thread takes it
and may keep it for a whole switch interval: 5 ms of a step that takes 10, while the step thread waits to go on.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import weakref
from collections.abc import Callable


class Bell:
    """Calls `answer` in the loop's thread after any number of rings. It moves to another loop with `listen`."""

    def __init__(self, answer: Callable[[], None]) -> None:
        self._answer = answer
        self._reading, self._writing = os.pipe()
        for end in (self._reading, self._writing):
            os.set_blocking(end, False)
        self._write = ctypes.PyDLL(None).write  # PyDLL keeps the lock; the pipe's end never blocks
        self._write.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
        self._close = weakref.finalize(self, _close, self._reading, self._writing)

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Be answered in this loop, whose thread calls this."""
        loop.add_reader(self._reading, self._heard)

    def leave(self, loop: asyncio.AbstractEventLoop) -> None:
        """Be answered no more. Idempotent."""
        loop.remove_reader(self._reading)

    def ring(self) -> None:
        """Wake the loop. A full pipe has woken it already."""
        self._write(self._writing, b"!", 1)

    def _heard(self) -> None:
        os.read(self._reading, 4096)
        self._answer()


def _close(*ends: int) -> None:
    for end in ends:
        os.close(end)
