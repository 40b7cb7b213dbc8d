"""The flight recorder: the last minutes of a scheduler's calls, in nameless files that outlive the engine's process.

Owns: how the files are used in turn, a segment in each; when the next segment begins; reading them as one recording;
opening all recorders of an engine (EngineRecorders), of which --record's is another.
Does not: create the files or decide when a recording is saved (the front end does), or know how a call is encoded.
Invariants: every segment but an engine's first begins with the scheduler's state, so a recording may begin with any.
Numbers of segments are consecutive where no call is missing between them. The files together keep to their bound. When
the oldest file is used again, the others cover the time that was asked for, unless their bytes were the tighter bound.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec

from octavo.config import SETTINGS, Config, FlightConfig
from octavo.core.saved_state import SavedState
from octavo.core.tap import Call, CallTap, FanOutTap
from octavo.errors import ConfigError
from octavo.observe.recording.format import CallEncoder, EndMarker, Header, RecordedCall, StateRecord
from octavo.observe.recording.reader import frames_of, pack_header, pack_records, preamble, read_frame
from octavo.observe.recording.recorder import CallWriter, Recorder, complete_header, create_segment, open_recorder

_LOG = logging.getLogger(__name__)
FULL = 0.75  # share of a file's bytes after which the next segment is begun; the rest is for calls until then
READ_ATTEMPTS = 4  # a file may be begun anew while it is read


class _FileContents(NamedTuple):
    """The segment in one file: its header, and its frames as they are stored."""

    header: Header
    frames: list[bytes]

    @classmethod
    def read(cls, file: int) -> _FileContents | None:
        """Read a file; None if it has no whole header."""
        frames = list(frames_of(os.pread(file, os.fstat(file).st_size, 0)))
        body = read_frame(BytesIO(frames[0])) if frames else None
        return None if body is None else cls(msgspec.json.decode(body, type=Header), frames)


def read_flight(files: Sequence[int], reason: str, last_s: float | None = None) -> tuple[bytes, float] | None:
    """Return the last seconds, or all, as one segment that ends for `reason`, and the seconds that it has.

    It begins with the newest segment that covers `last_s`, or else with the oldest. None if there is no call yet.
    The files may be written to meanwhile, and their engine may have ended.
    """
    now, segments = time.monotonic(), _continuous(files)
    if not segments:
        return None
    first = 0
    for index, segment in enumerate(segments):
        if last_s is not None and segment.header.start <= now - last_s:
            first = index
    chosen = segments[first:]
    end = CallEncoder(False).encode(RecordedCall(EndMarker(now, reason)))
    frames = [frame for segment in chosen for frame in segment.frames[1:]]
    recorded = b"".join((preamble(), chosen[0].frames[0], *frames, pack_records([end])))
    return recorded, now - chosen[0].header.start


def _continuous(files: Sequence[int]) -> list[_FileContents]:
    """Return the last segments between which no call is missing, oldest first.

    Files are read until no segment was begun since the last time: then all segments but the newest are whole.
    """
    numbers = list[int]()
    for _ in range(READ_ATTEMPTS):
        found = [each for file in files if (each := _FileContents.read(file)) is not None]
        before, numbers = numbers, [each.header.number for each in found]
        if before == numbers:
            break
    found.sort(key=lambda each: each.header.number)
    for index, (earlier, later) in reversed(list(enumerate(pairwise(found), start=1))):
        if later.header.number != earlier.header.number + 1:
            return found[index:]
    return found


def write_recording(folder: Path, segment: bytes) -> Path:
    """Write a segment to a folder of its own, for this user alone; return its path. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path, file = create_segment(folder)
    with file:
        file.write(segment)
        file.flush()
        os.fsync(file.fileno())
    return path


class FlightRecorder(CallWriter):
    """The call tap that keeps the last `keep_s` seconds in at most `max_bytes` of files.

    `save` returns the scheduler's state; set it, and attach the files, before the first call.
    """

    flush_s = 0.1

    def __init__(self, header: Header, clock: Callable[[], float], keep_s: float, max_bytes: int) -> None:
        super().__init__(header, clock)
        self.save: Callable[[], SavedState]
        self._keep_s = keep_s
        self._max_bytes = max_bytes
        self._period_s = 0.0  # between two segments
        self._room = 0  # bytes of each file
        self._files: tuple[int, ...] = ()
        self._is_state_due = False  # set by the writer's thread, reset by the engine's
        self._awaits_state = False
        self._is_broken = False  # the file is full, and calls are lost until the next state
        self._number = 0
        self._writing = 0  # index of the file of the current segment
        self._starts: list[float] = []  # of the segments in the files
        self._size = 0
        self._save_s = 0.0
        self._fault = ""

    def attach(self, files: Sequence[int]) -> None:
        """Set the descriptors of at least two files. Without files nothing is recorded."""
        self._files = tuple(files)
        self._period_s, self._room = self._keep_s / (len(files) - 1), self._max_bytes // len(files)

    def called(self, call: Call) -> None:
        """Queue a call, and the state after it if the next segment is due."""
        if not self._files:
            return
        super().called(call)
        if self._is_state_due and not self._is_over:
            self._is_state_due = False
            self._save_state(getattr(call, "now", None))

    def _save_state(self, now: float | None) -> None:
        began = self._clock()
        try:
            record = StateRecord(began if now is None else now, self.save())
        except Exception as error:  # the instrument shell; a ConfigError: the policy cannot save its state
            self._fault = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            _LOG.warning("the flight recorder ends when it is full: %s", self._fault)
        else:
            self._save_s = self._clock() - began
            self._queue.append(RecordedCall(record))

    def status(self) -> Mapping[str, object]:
        """Return the section `flight_recorder` of the statistics."""
        return {
            "is_recording": bool(self._files) and not self._is_over,
            "seconds": round(self._clock() - self._starts[0], 3) if self._starts else 0.0,
            "bytes": sum(os.fstat(each).st_size for each in self._files),
            "segments": self._number,
            "save_s": round(self._save_s, 6),
            "ended": self._end_reason or self._fault,
        }

    # --- the writer's thread --------------------------------------------------------------------------

    def _place(self) -> str:
        return "the flight recorder"

    def _open(self) -> bool:
        return self._begin(self._clock(), b"")

    def _add(self, recorded: RecordedCall) -> None:
        if isinstance(recorded.call, StateRecord):
            if self._records:
                self._flush()
            self._begin(recorded.call.now, pack_records([self._encoder.encode(recorded)]))
        elif self._is_broken:
            self._encoder.encode(recorded)  # later calls are relative to it
            if self._fault:
                self._give_up(self._fault)
        else:
            super()._add(recorded)

    def _begin(self, now: float, state: bytes) -> bool:
        """Begin the next segment in the oldest file; return False if the file cannot hold the state."""
        self._number += 1
        header = replace(self._header, has_state=bool(state), start=now, number=self._number)
        head = preamble() + pack_header(header) + state
        if len(head) > FULL * self._room:
            self._give_up(
                f"the scheduler's state takes {len(head)} bytes of the {self._room} of one file; "
                "raise --flight-recorder-bytes"
            )
            return False
        self._writing = (self._writing + 1) % len(self._files)
        os.ftruncate(self._files[self._writing], 0)
        os.pwrite(self._files[self._writing], head, 0)
        self._starts = [now] if self._is_broken else [*self._starts, now][-len(self._files) :]
        self._size, self._is_broken, self._awaits_state = len(head), False, False
        return True

    def _flush(self) -> None:
        """Write a frame, and ask for the state if the next segment is due."""
        records, self._records, self._num_packed = self._records, [], 0
        frame = pack_records(records)
        if self._size + len(frame) > self._room:
            self._number += 1  # what follows is not continuous
            self._is_broken = True
        else:
            os.pwrite(self._files[self._writing], frame, self._size)
            self._size += len(frame)
            self._num_calls += len(records)
        is_old = self._clock() - self._starts[-1] >= self._period_s
        if (is_old or self._size > FULL * self._room or self._is_broken) and not (self._awaits_state or self._fault):
            self._awaits_state = self._is_state_due = True

    def _finish(self) -> None:
        pass  # who saves the recording says why it ends

    def _close_file(self) -> None:
        pass  # the files are read after the engine's end


def open_flight_recorder(
    config: FlightConfig, header: Header, has_text: bool, clock: Callable[[], float]
) -> FlightRecorder:
    """Return a flight recorder as configured."""
    completed = complete_header(header, has_text, clock)
    return FlightRecorder(completed, clock, config.flight_recorder, config.flight_recorder_bytes)


__all__ = ["EngineRecorders", "Header", "open_recorders", "recorded_settings"]
_RECORDED = ("cache", "scheduling", "execution", "speculation")  # sections of the settings that a header has


@dataclass(frozen=True, slots=True)
class EngineRecorders:
    """What records one engine; at least one of both."""

    recorder: Recorder | None
    flight: FlightRecorder | None

    @property
    def tap(self) -> CallTap:
        """The tap for the scheduler."""
        taps = [tap for tap in (self.recorder, self.flight) if tap is not None]
        return FanOutTap(taps) if len(taps) > 1 else taps[0]

    def join(
        self,
        save: Callable[[], SavedState],
        sections: dict[str, Callable[[], object]],
        closers: list[Callable[[], object]],
    ) -> None:
        """Give the flight recorder the scheduler's state; add sections to an engine's statistics, and what ends it."""
        if self.recorder is not None:
            closers.append(self.recorder.close)
            sections["recording"] = self.recorder.status
        if self.flight is not None:
            self.flight.save = save
            closers.append(self.flight.close)
            sections["flight_recorder"] = self.flight.status

    def attach(self, files: Sequence[int]) -> None:
        """Give the flight recorder its files."""
        if self.flight is not None:
            self.flight.attach(files)


def recorded_settings(config: Config) -> Mapping[str, object]:
    """Return the engine's settings by flag, for a header."""
    values = {
        setting.key: getattr(getattr(config, setting.section), setting.name)
        for setting in SETTINGS
        if setting.section in _RECORDED
    }
    return {key: value for key, value in values.items() if value is not None}


def open_recorders(
    config: Config, header: Header, clock: Callable[[], float], has_flight: bool
) -> EngineRecorders | None:
    """Open what is configured; None if nothing is. Raises ConfigError if the folder cannot be written to."""
    recorder = None if config.recording.record is None else open_recorder(config.recording, header, clock)
    flight = None
    if has_flight and config.flight.flight_recorder > 0:
        flight = open_flight_recorder(config.flight, header, config.recording.record_text, clock)
    return None if recorder is None and flight is None else EngineRecorders(recorder, flight)
