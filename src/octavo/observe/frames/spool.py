"""Spool: frames that are kept until all are there, as bytes, to be read once more in order.

Owns: the bytes. Does not: bound them (the sink's window does).
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from octavo.observe.frames.encode import Frame


class Spool:
    """Frames packed as JSON: a tenth of what they take as objects."""

    def __init__(self) -> None:
        self._packed: list[bytes] = []
        self._encoder = msgspec.json.Encoder()

    def __len__(self) -> int:
        return len(self._packed)

    def write(self, frame: Frame) -> None:
        """Keep a frame."""
        self._packed.append(self._encoder.encode(frame))

    def __iter__(self) -> Iterator[Frame]:
        """All frames, in order."""
        decoder = msgspec.json.Decoder(Frame)
        return map(decoder.decode, self._packed)
