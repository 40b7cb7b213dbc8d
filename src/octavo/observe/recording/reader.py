"""Read the files of recordings: a recording is a folder with one segment file for each start of an engine.

Owns: framing with compression and checksums; finding segments; reading calls, and steps with their times; fewer garbage
collections. Does not: know records (format), or replay (replaying).
A segment is MARK, the version (uint16, little-endian), and frames. A frame is three uint32 (stored bytes, unpacked
bytes, CRC-32 of the stored bytes) and zlib's output. The first frame is the header as JSON; each other frame is a
msgpack array of records. Invariant: a file that is cut off or damaged is read up to the last whole frame before that.
"""

from __future__ import annotations

import gc
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from octavo.core.plan import StepFailure, StepPlan, StepResult
from octavo.core.tap import CommitCall, PlanCall
from octavo.errors import ConfigError
from octavo.observe.recording.format import (
    DAMAGE,
    END,
    READABLE,
    VERSION,
    CallDecoder,
    Header,
    RecordedCall,
    RecordingError,
    StateRecord,
)

MARK = b"octavo-rec\n"
SUFFIX = ".octrec"
MAX_FRAME_BYTES = 256 << 20  # unpacked; a writer makes frames of some hundred KB, or of one long prompt
CUT_OFF = "cut off"
YOUNG_OBJECTS = 100_000  # allocations between garbage collections; Python's 700 made a simulation a fifth slower
_FRAME = struct.Struct("<III")
_VERSION = struct.Struct("<H")
PREAMBLE_BYTES = len(MARK) + _VERSION.size


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect garbage less often: records and simulations make many objects, and hardly a cycle."""
    before = gc.get_threshold()
    if before[0]:  # 0: the caller has disabled garbage collection
        gc.set_threshold(max(before[0], YOUNG_OBJECTS), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def preamble() -> bytes:
    """Return a segment's first bytes."""
    return MARK + _VERSION.pack(VERSION)


def pack_frame(data: bytes) -> bytes:
    """Return a frame with its compression and checksum."""
    stored = zlib.compress(data, 1)
    return _FRAME.pack(len(stored), len(data), zlib.crc32(stored)) + stored


def pack_header(header: Header) -> bytes:
    """Return the frame of a header."""
    return pack_frame(msgspec.json.encode(header))


def pack_records(records: Iterable[bytes]) -> bytes:
    """Return the frame of some packed records."""
    return pack_frame(msgspec.msgpack.encode([msgspec.Raw(record) for record in records]))


def read_header(path: Path) -> Header | None:
    """Read a segment's header; None if the file was cut off before its end. Raises RecordingError."""
    try:
        with path.open("rb") as file:
            first = file.read(PREAMBLE_BYTES)
            if len(first) < PREAMBLE_BYTES and preamble().startswith(first):
                return None
            _check_version(path, first)
            body = read_frame(file)
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error.strerror or error}") from None
    if body is None:
        return None
    try:
        return msgspec.json.decode(body, type=Header)
    except (msgspec.MsgspecError, ConfigError) as error:
        raise RecordingError(f"{path} has a header that cannot be ({error}); it was not written by Octavo") from None


def read_records(path: Path) -> Iterator[list[Any]]:
    """Read the records of a segment, frame by frame, up to its last whole frame."""
    with path.open("rb") as file:
        file.seek(PREAMBLE_BYTES)
        if read_frame(file) is None:
            return
        while (body := read_frame(file)) is not None:
            try:
                records = msgspec.msgpack.decode(body, type=list)
            except msgspec.MsgspecError:
                return
            yield records


def _check_version(path: Path, first: bytes) -> None:
    if not first.startswith(MARK) or len(first) < PREAMBLE_BYTES:
        raise RecordingError(f"{path} is no recording: it does not begin as one; name the folder given to --record")
    (version,) = _VERSION.unpack(first[len(MARK) :])
    if version not in READABLE:
        raise RecordingError(
            f"{path} is of format {version}, this Octavo reads {READABLE[0]} to {VERSION}: "
            "read it with the version that wrote it"
        )


def read_frame(file: BinaryIO) -> bytes | None:
    """Return the next frame unpacked; None if there is no whole one."""
    head = file.read(_FRAME.size)
    if len(head) < _FRAME.size:
        return None
    num_stored, num_unpacked, checksum = _FRAME.unpack(head)
    if num_stored > MAX_FRAME_BYTES or num_unpacked > MAX_FRAME_BYTES:
        return None
    stored = file.read(num_stored)
    if len(stored) < num_stored or zlib.crc32(stored) != checksum:
        return None
    unpacker = zlib.decompressobj()
    try:
        body = unpacker.decompress(stored, num_unpacked + 1)
    except zlib.error:
        return None
    return body if len(body) == num_unpacked and unpacker.eof else None


def frames_of(data: bytes) -> Iterator[bytes]:
    """Yield the frames of a segment's bytes as they are stored, up to the last whole one."""
    begin = PREAMBLE_BYTES
    while begin + _FRAME.size <= len(data):
        num_stored, _, checksum = _FRAME.unpack_from(data, begin)
        end = begin + _FRAME.size + num_stored
        if end > len(data) or zlib.crc32(data[begin + _FRAME.size : end]) != checksum:
            return
        yield data[begin:end]
        begin = end


@dataclass(slots=True)
class Segment:
    """The recording of one engine process, in one file of `num_bytes`.

    `end_reason` is known once its calls have been read: that of its end marker, or CUT_OFF (a kill, a full disk).
    """

    path: Path
    header: Header
    num_bytes: int = 0
    end_reason: str = ""

    def read(self, *takers: Callable[[list[Any]], object]) -> None:
        """Read the records in order, without the end marker, giving those of a frame to every taker.

        Raises RecordingError.
        """
        with rare_collections(), self._checked():
            for records in self._frames():
                for take in takers:
                    take(records)

    def calls(self) -> Iterator[RecordedCall]:
        """Read the calls in order, without the end marker; each time from the start. Raises RecordingError."""
        decode = CallDecoder(self.header).decode
        with self._checked():
            for records in self._frames():
                yield from map(decode, records)

    def _frames(self) -> Iterator[list[Any]]:
        """Read the records of each frame, without the end marker. Raises one of DAMAGE."""
        self.end_reason = CUT_OFF
        for records in read_records(self.path):
            kinds = [record[0] for record in records]
            if END in kinds:
                last = kinds.index(END)
                self.end_reason = str(records[last][2])
                yield records[:last]
                return
            yield records

    @contextmanager
    def _checked(self) -> Iterator[None]:
        """Raise RecordingError for a record that CallEncoder did not write."""
        try:
            yield
        except DAMAGE as error:
            raise RecordingError(
                f"{self.path} holds a record that cannot be ({type(error).__name__}: {error}); its frames are "
                "whole, so it was written so: by another version?"
            ) from None


@dataclass(frozen=True, slots=True)
class Recording:
    """A recording: its segments, oldest first, without files that were cut off before their header was whole."""

    path: Path
    segments: tuple[Segment, ...]

    @property
    def header(self) -> Header:
        """The header of the first segment."""
        return self.segments[0].header


def open_recording(path: Path | str) -> Recording:
    """Open a folder of segments, or one segment. Raises RecordingError with the fault and the remedy."""
    path = Path(path)
    if path.is_dir():
        paths = sorted(path.glob(f"*{SUFFIX}"))
        if not paths:
            raise RecordingError(f"{path} holds no recording (*{SUFFIX}); octavo serve --record {path} makes one")
    elif path.exists():
        paths = [path]
    else:
        raise RecordingError(f"{path} does not exist; name the folder that was given to octavo serve --record")
    headers = [(each, read_header(each)) for each in paths]
    segments = [Segment(each, header, each.stat().st_size) for each, header in headers if header is not None]
    if not segments:
        raise RecordingError(f"{path} was cut off before a header was whole: nothing was recorded in it")
    return Recording(path, tuple(segments))


@dataclass(slots=True)
class RecordedStep:
    """One step: `plan` has the columns but not the sequences' ids; `outcome` has the timings.

    Times are seconds on the engine's clock. Planning began at `plan.now` and ended at `planned`. The result was
    collected at `collected` and committed at `committed`. `free_from` is when the previous step was collected (None for
    a segment's first step). `next_plan` is when the first planning after the commit began (None for the last step).
    """

    segment_index: int
    plan: StepPlan
    outcome: StepResult | StepFailure
    planned: float
    collected: float
    committed: float
    free_from: float | None = None
    next_plan: float | None = None

    @property
    def has_failed(self) -> bool:
        """Return True if it has no result."""
        return isinstance(self.outcome, StepFailure)

    def seconds(self, result: StepResult) -> tuple[float, ...]:
        """Return its seconds by PARTS, given its result; if the end of its delivery is not known, up to its commit."""
        end = self.committed if self.next_plan is None else self.next_plan
        schedule_s, parts = self.planned - self.plan.now + self.committed - self.collected, result.timings
        return schedule_s, parts.prepare_s, parts.forward_s, parts.sample_s, end - self.committed, end - self.plan.now


class StepPairs:
    """Matcher of a segment's plans with their outcomes; plans discarded after a failure are left out."""

    def __init__(self, segment_index: int = 0) -> None:
        self._segment_index = segment_index
        self._last: RecordedStep | None = None  # until it is known when the next plan was begun
        self._flight: deque[tuple[StepPlan, float]] = deque()
        self._free_from: float | None = None
        self._has_begun = False

    def take(self, recorded: RecordedCall) -> RecordedStep | None:
        """Add the next call; return the step that ended before it."""
        call, ended = recorded.call, None
        if isinstance(call, PlanCall):
            ended = self.end(call.now)
            if recorded.digest:
                self._flight.append((call.plan, recorded.done))
        elif isinstance(call, CommitCall) and self._flight:
            ended = self.end()
            plan, planned = self._flight.popleft()
            times = planned, call.now, recorded.done, self._free_from
            self._last = RecordedStep(self._segment_index, plan, call.outcome, *times)
            self._free_from = call.now
            if isinstance(call.outcome, StepFailure):
                self._flight.clear()
        elif isinstance(call, StateRecord) and call.saved is not None and not self._has_begun:
            self._flight.extend((plan, plan.now) for plan in call.saved.plans)
        self._has_begun = True
        return ended

    def end(self, next_plan: float | None = None) -> RecordedStep | None:
        """Return the last step, if it was not returned yet."""
        last, self._last = self._last, None
        if last is not None:
            last.next_plan = next_plan
        return last


def steps(recording: Recording) -> Iterator[RecordedStep]:
    """Yield the committed steps of all segments, in order."""
    for index, segment in enumerate(recording.segments):
        pairs = StepPairs(index)
        for recorded in segment.calls():
            if (ended := pairs.take(recorded)) is not None:
                yield ended
        if (ended := pairs.end()) is not None:
            yield ended
