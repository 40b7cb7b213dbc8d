"""The queue and the KV pool at one moment, as frames.

Owns: how much of them is shown: a look takes at most a millisecond, however large they are.
Does not: say when (ring, sink), or read the scheduler's state (core.views).
"""

from __future__ import annotations

import sys
from base64 import b64encode

from octavo.core.scheduler import Scheduler
from octavo.core.views import GroupCells, WaitingRequest
from octavo.observe.frames.encode import Frame
from octavo.observe.frames.records import Waiting

MAX_TOP = 50  # waiting requests shown
MAX_CELLS = 4096  # cells of all groups together
MAX_READ = 8192  # table entries read in one look


def queue_frame(scheduler: Scheduler, waiting: Waiting, now: float) -> Frame:
    """Which requests wait, for what."""
    num_waiting = scheduler.num_waiting
    return {
        "k": "queue",
        "t": round(now, 6),
        "total": num_waiting,
        "reasons": waiting.by_reason(num_waiting),
        "top": [_values(entry, now) for entry in scheduler.first_waiting(MAX_TOP)],
    }


def _values(entry: WaitingRequest, now: float) -> list[object]:
    waited = round(max(0.0, now - entry.arrival), 3)
    numbers = entry.needed, entry.available, waited, entry.num_known
    return [entry.name, entry.tenant, entry.reason.name.lower(), *numbers]


class PoolFrames:
    """Frames of the pools of one scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._map = scheduler.block_map(MAX_CELLS, MAX_READ)

    def frame(self, now: float) -> Frame:
        """The pools as they are now."""
        frame: Frame = {"k": "blocks", "t": round(now, 6), "groups": [_group(each) for each in self._map.look()]}
        num_host = sum(self._scheduler.limits.host_blocks)
        if num_host:
            frame["host"] = [self._scheduler.gauges().host_blocks_used, num_host]
        return frame


def _group(group: GroupCells) -> Frame:
    if sys.byteorder == "big":
        group.owners.byteswap()
    return {
        "n": group.num_blocks,
        "per": group.per,
        "cells": b64encode(group.cells).decode(),
        "owner": b64encode(group.owners.tobytes()).decode(),
    }
