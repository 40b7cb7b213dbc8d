"""Frames of a live engine: the ring that watches its loop, and the verb that answers whoever draws.

Owns: the wiring. Does not: make frames (trace.frames), or let one that cannot be made end the engine.
"""

from __future__ import annotations

import secrets
import time

from octavo.core.scheduler import Scheduler
from octavo.observe.frames.encode import Source
from octavo.observe.frames.ring import FrameRing
from octavo.observe.sink import WatchedLoop
from octavo.observe.verbs import guarded


def show(loop: WatchedLoop, scheduler: Scheduler, model: str, device: str = "") -> FrameRing:
    """Watch a loop, and give it the verb `frames`. Call before it starts, and behind statistics.collect."""
    began = time.time() - loop.clock.now()
    ring = FrameRing(
        scheduler, Source("live", model, began, secrets.token_hex(4), device), loop.clock.now, loop.step_times
    )

    loop.watch(ring)
    loop.verbs["frames"] = guarded("frames", lambda cursor: ring.poll(cursor))
    return ring
