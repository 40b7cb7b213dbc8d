"""Reads recordings: a folder with a segment for each life of an engine, each readable up to its last whole frame.

Owns: finding and checking segments. Does not: decode records (decoding), or replay them (replaying).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from octavo.trace.recording.calls import Call, Header


@dataclass(slots=True)
class Segment:
    """One life of an engine. `end_reason`, and `is_whole`, are known once its calls have been read to their end.

    `is_whole`: it ended as the engine did, with a marker; else it was cut off (a kill, a full disk, a bound), and what
    is there is right up to there.
    """

    path: Path
    header: Header
    end_reason: str = ""
    is_whole: bool = False
    ended_at: float | None = None

    def calls(self) -> Iterator[Call]:
        """The calls in order. May be asked again; each time from the start."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Recording:
    """A recording: its segments, oldest first."""

    path: Path
    segments: tuple[Segment, ...]

    @property
    def header(self) -> Header:
        """The first segment's."""
        return self.segments[0].header


def open_recording(path: Path | str) -> Recording:
    """Open a folder of segments, or one segment. Raises RecordingError with what is wrong and what to do."""
    raise NotImplementedError
