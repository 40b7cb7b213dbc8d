"""Reads recordings: a folder with a segment for each life of an engine, each readable up to its last whole frame.

Owns: finding segments, and their calls. Does not: decode records (decoding), or replay them (replaying).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from octavo.observe.recording.calls import Call, Ended, Header
from octavo.observe.recording.decoding import Decoder
from octavo.observe.recording.errors import DamagedError, RecordingError
from octavo.observe.recording.segments import SUFFIX, read_header, read_records

CUT_OFF = "cut off"


@dataclass(slots=True)
class Segment:
    """One life of an engine. What stands below `header` is known once its calls have been read to their end.

    `is_whole`: it has its marker, whose reason `end_reason` is. Else it was cut off (a kill, a full disk), and what is
    there is right up to there. `ended_at` is the time of the last call, `num_bytes` the file's size.
    """

    path: Path
    header: Header
    num_bytes: int = 0
    end_reason: str = ""
    is_whole: bool = False
    ended_at: float | None = None

    def calls(self) -> Iterator[Call]:
        """The calls in order, the marker left out. May be asked again; each time from the start."""
        decoder = Decoder(self.header)
        self.is_whole, self.end_reason = False, CUT_OFF
        for record in read_records(self.path):
            try:
                call = decoder.decode(record)
            except DamagedError as error:
                raise RecordingError(
                    f"{self.path} holds {error}; its frames are whole, so it was written so: by another version?"
                ) from None
            self.ended_at = getattr(call, "now", self.ended_at)
            if isinstance(call, Ended):
                self.is_whole, self.end_reason = True, call.reason
                return
            yield call


@dataclass(frozen=True, slots=True)
class Recording:
    """A recording: its segments, oldest first. `empty` are files that were cut off before their header was whole."""

    path: Path
    segments: tuple[Segment, ...]
    empty: tuple[Path, ...] = ()

    @property
    def header(self) -> Header:
        """The first segment's."""
        return self.segments[0].header


def open_recording(path: Path | str) -> Recording:
    """Open a folder of segments, or one segment. Raises RecordingError with what is wrong and what to do."""
    path = Path(path)
    if path.is_dir():
        paths = sorted(path.glob(f"*{SUFFIX}"))
        if not paths:
            raise RecordingError(f"{path} holds no recording (*{SUFFIX}); octavo serve --record {path} makes one")
    elif path.exists():
        paths = [path]
    else:
        raise RecordingError(f"{path} does not exist; name the folder that was given to octavo serve --record")
    segments, empty = [], []
    for each in paths:
        header = read_header(each)
        if header is None:
            empty.append(each)
        else:
            segments.append(Segment(each, header, each.stat().st_size))
    if not segments:
        raise RecordingError(f"{path} was cut off before a header was whole: nothing was recorded in it")
    return Recording(path, tuple(segments), tuple(empty))
