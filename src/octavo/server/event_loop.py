"""The event loop of a server."""

from __future__ import annotations

import asyncio
import sys


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return uvloop's event loop, or asyncio's on Windows; for asyncio.Runner(loop_factory=...)."""
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop  # not on every platform

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
