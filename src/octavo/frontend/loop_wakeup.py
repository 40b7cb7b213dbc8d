"""LoopWakeup: wake an event loop from any thread, without releasing the interpreter's lock.

Owns: a pipe that the loop watches. Does not: carry data.
asyncio's own wake-up releases the lock: the woken thread takes it and may keep it for a whole switch interval, which is
5 ms of a step that takes 10, while the step thread waits to go on.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import weakref
from collections.abc import Callable


class LoopWakeup:
    """Calls `callback` in the loop's thread after any number of wakes. `attach` moves it to another loop."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._reading, self._writing = os.pipe()
        for end in (self._reading, self._writing):
            os.set_blocking(end, False)
        self._write = ctypes.PyDLL(None).write  # PyDLL keeps the lock; the pipe's end never blocks
        self._write.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
        self._close = weakref.finalize(self, _close, self._reading, self._writing)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Call back in this loop, whose thread calls this."""
        loop.add_reader(self._reading, self._readable)

    def detach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Call back no more. Idempotent."""
        loop.remove_reader(self._reading)

    def wake(self) -> None:
        """Wake the loop. A full pipe has woken it already."""
        self._write(self._writing, b"!", 1)

    def _readable(self) -> None:
        os.read(self._reading, 4096)
        self._callback()


def _close(*ends: int) -> None:
    for end in ends:
        os.close(end)
