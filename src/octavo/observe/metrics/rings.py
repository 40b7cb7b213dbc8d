"""RecordRing: the last so many records of numbers, packed in one buffer.

Owns: the buffer and the order. Does not: know what the numbers mean.
Invariants: memory is fixed when the ring is made; adding is O(fields) and makes no object that stays.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator


class RecordRing:
    """`size` records of one layout (a `struct` format without padding, as "<dqi"); the oldest makes room."""

    __slots__ = ("_buffer", "_layout", "_pack", "num_added", "size")

    def __init__(self, layout: str, size: int) -> None:
        self._layout = struct.Struct(layout)
        self._buffer = bytearray(self._layout.size * size)
        self._pack = self._layout.pack_into
        self.size = size
        self.num_added = 0  # since the start or the last reset

    def __len__(self) -> int:
        return min(self.num_added, self.size)

    def add(self, *values: float) -> int:
        """Keep a record; returns its place, from 0 to size - 1. Raises struct.error when a value does not fit."""
        place = self.num_added % self.size
        self._pack(self._buffer, place * self._layout.size, *values)
        self.num_added += 1
        return place

    def get(self, number: int) -> tuple[float, ...] | None:
        """The record added as `number` (from 0), or None when it is gone or not there yet."""
        if not self.num_added - len(self) <= number < self.num_added:
            return None
        return self._layout.unpack_from(self._buffer, number % self.size * self._layout.size)

    def __iter__(self) -> Iterator[tuple[float, ...]]:
        """Records, oldest first."""
        for number in range(self.num_added - len(self), self.num_added):
            yield self._layout.unpack_from(self._buffer, number % self.size * self._layout.size)

    def reset(self) -> None:
        """Forget all records."""
        self.num_added = 0
