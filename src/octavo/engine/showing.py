"""Frames of a live engine: the ring that watches its loop, and the verb that answers whoever draws.

Owns: the wiring. Does not: make frames (trace.frames), or let one that cannot be made end the engine.
"""

from __future__ import annotations

import secrets
import time

from octavo.core.scheduler import Scheduler
from octavo.engine.loop import EngineLoop
from octavo.engine.verbs import guarded
from octavo.trace.frames.encode import Source
from octavo.trace.frames.ring import FrameRing


def show(loop: EngineLoop, scheduler: Scheduler, model: str, device: str = "") -> FrameRing:
    """Watch a loop, and give it the verb `frames`. Call before it starts, and behind statistics.collect."""
    began = time.time() - loop.clock.now()
    ring = FrameRing(
        scheduler, Source("live", model, began, secrets.token_hex(4), device), loop.clock.now, loop.step_times
    )

    loop.watch(ring)
    loop.verbs["frames"] = guarded("frames", lambda cursor: ring.poll(cursor))
    return ring
