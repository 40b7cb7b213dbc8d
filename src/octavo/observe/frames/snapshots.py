"""The queue and the KV pool at one moment, as frames.

Owns: how much of them is shown, and at what cost: a look takes at most a millisecond, however large they are.
Does not: say when (ring, sink). A block's owner is found by reading tables, up to so many entries a look, and noted; so
a large pool's owners are complete after some looks, and blocks that just changed hands may show the old one until then.
"""

from __future__ import annotations

import sys
from array import array
from base64 import b64encode

from octavo.core.explaining import find_barrier, reason_of, shortage_of
from octavo.core.kv.effects import NO_BLOCK
from octavo.core.kv.pool import BlockPool
from octavo.core.request import RequestState, Sequence
from octavo.core.state import State
from octavo.observe.frames.encode import Frame
from octavo.observe.frames.records import Waiting

MAX_TOP = 50  # waiting requests shown
MAX_CELLS = 4096  # cells of all groups together
MAX_READ = 8192  # table entries read in one look
NOBODY = 0xFFFF
_SEVERAL, _CACHED = 2, 3
# From numbers of references, and from whether there is a key, to what a cell shows: done over all cells at once, by
# bits, for a list of 4,096 takes a tenth of a millisecond each time it is gone through.
_HELD = bytes([0, 1]) + bytes([_SEVERAL]) * 254
_FREE = bytes([_CACHED]) + bytes(255)
_KEYED = bytes([0, _CACHED]) + bytes(254)
_Read = dict[int, tuple[Sequence, int, int]]


def queue_frame(state: State, waiting: Waiting, now: float) -> Frame:
    """Who waits, for what."""
    num_waiting, barrier = len(state.waiting), find_barrier(state)
    return {
        "k": "queue",
        "t": round(now, 6),
        "total": num_waiting,
        "reasons": waiting.by_reason(num_waiting),
        "top": [_waiter(state, entry, barrier, now) for entry in state.waiting.first(MAX_TOP)],
    }


def _waiter(state: State, entry: RequestState, barrier: RequestState | None, now: float) -> list[object]:
    asked, short = entry.request, shortage_of(state, entry)
    reason = reason_of(state, entry, barrier)
    numbers = (short.needed, short.available) if short is not None and short.reason == reason else (0, 0)
    known = max([sequence.num_known for sequence in entry.sequences], default=asked.num_prompt_tokens)
    waited = round(max(0.0, now - asked.arrival), 3)
    return [entry.name, asked.tenant, reason.name.lower(), *numbers, waited, known]


class BlockMap:
    """Draws the pools of one scheduler."""

    def __init__(self, state: State) -> None:
        self._state = state
        num_groups = len(state.cache.pools)
        most = max(1, MAX_CELLS // num_groups)
        self._per = [-(-pool.num_blocks // most) for pool in state.cache.pools]
        self._owners = [array("H", [NOBODY]) * pool.num_blocks for pool in state.cache.pools]
        self._read: list[_Read] = [{} for _ in range(num_groups)]  # slot -> who, how far, last
        self._next = 0  # the slot to begin with, so that nobody is always the last

    def frame(self, now: float) -> Frame:
        """The pools as they are now."""
        self._find_owners()
        pools, host = self._state.cache.pools, self._state.cache.host
        groups = [
            self._cells(pool, owners, per) for pool, owners, per in zip(pools, self._owners, self._per, strict=True)
        ]
        frame: Frame = {"k": "blocks", "t": round(now, 6), "groups": groups}
        if host.pools:
            frame["host"] = [host.num_used, sum(pool.num_blocks for pool in host.pools)]
        return frame

    def _cells(self, pool: BlockPool, owners: array[int], per: int) -> Frame:
        references, owned = pool.references[::per], owners[::per]
        try:
            counts = bytes(references)
        except ValueError:  # a block that more than 255 hold
            counts = bytes([min(count, _SEVERAL) for count in references])
        keyed = bytes([key is not None for key in pool.key_of[::per]])
        cached = int.from_bytes(counts.translate(_FREE)) & int.from_bytes(keyed.translate(_KEYED))
        cells = (int.from_bytes(counts.translate(_HELD)) | cached).to_bytes(len(counts))
        if sys.byteorder == "big":
            owned.byteswap()
        return {
            "n": pool.num_blocks,
            "per": per,
            "cells": b64encode(cells).decode(),
            "owner": b64encode(owned.tobytes()).decode(),
        }

    def _find_owners(self) -> None:
        """Read what tables have got since the last look, and what of them is not read yet."""
        owners_of, left = self._state.slot_owner, MAX_READ
        num_slots = len(owners_of)
        for slot in (*range(self._next, num_slots), *range(self._next)):
            sequence = owners_of[slot]
            if sequence is None:
                continue
            for group, read in enumerate(self._read):
                left -= self._read_table(sequence, group, read, left)
            if left <= 0:
                self._next = slot
                return

    def _read_table(self, sequence: Sequence, group: int, read: _Read, most: int) -> int:
        """Note the owner of at most so many blocks of a table; gives how many were read."""
        table, owners, slot = sequence.tables[group], self._owners[group], sequence.slot
        known, at, last = read.get(slot, (None, 0, NO_BLOCK))
        if known is not sequence or at > len(table) or (at and table[at - 1] != last):
            at = sequence.first_live[group]  # another's slot before, or put back and come again
        end = min(len(table), at + max(0, most))
        for block in table[at:end]:
            if block != NO_BLOCK:
                owners[block] = slot
        read[slot] = (sequence, end, table[end - 1] if end else NO_BLOCK)
        return end - at
