"""Record a scheduler: the tap of its calls, a bounded queue from the engine's thread, and a thread that writes.

Owns: the queue, the thread, the bound in bytes, and the end marker. Does not: know how a call is encoded (format), or
keep the last minutes only (flight).
Invariants: `called` never waits, copies nothing and raises nothing. A failed write ends the recording with a warning.
A segment begins with an engine's first request.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import math
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from octavo.config import RecordingConfig
from octavo.core.tap import AdmitCall, Call
from octavo.errors import ConfigError
from octavo.observe.recording.format import CallEncoder, EndMarker, Header, RecordedCall
from octavo.observe.recording.reader import SUFFIX, pack_header, pack_records, preamble

_LOG = logging.getLogger(__name__)
MAX_QUEUED = 16384  # calls that may wait for the writer; some minutes of a disk that hangs
FRAME_CALLS = 1024
FRAME_BYTES = 1 << 20  # unpacked, about
FLUSH_S = 1.0  # of calls that a kill may lose
_POLL_S = 0.05  # between checks of the queue while there are calls, so that no step has to wake the thread
_MARKER_BYTES = 1024  # reserved for the marker at the end
_CLOSED = "the engine was stopped"


def create_segment(folder: Path) -> tuple[Path, BinaryIO]:
    """Create the segment with the folder's next free number, for this user alone."""
    number = max((int(path.stem) for path in folder.glob(f"*{SUFFIX}") if path.stem.isdigit()), default=0)
    while True:
        number += 1
        path = folder / f"{number:04d}{SUFFIX}"
        with contextlib.suppress(FileExistsError):  # of another engine of the same server
            return path, os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def prepare_folder(folder: Path) -> None:
    """Make the folder of a recording and check that it can be written to. Raises ConfigError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as trial:
            trial.write(b"octavo")
    except OSError as error:
        raise ConfigError(
            f"--record {folder} cannot be written to ({(error.strerror or str(error)).lower()}); give another folder"
        ) from None


class CallWriter:
    """A call tap with a queue from the engine's thread, and a thread that encodes calls and hands them to a subclass.

    `clock` is the engine's. The subclass opens its file, adds records, flushes what is due, and ends.
    """

    flush_s = FLUSH_S  # of calls that a kill may lose

    def __init__(self, header: Header, clock: Callable[[], float]) -> None:
        self._encoder = CallEncoder(header.has_text)
        self._header = replace(header, limits=self._encoder.masked(header.limits))
        self._clock = clock
        self._queue: deque[RecordedCall] = deque()
        self._wake = threading.Event()
        self._is_resting = False
        self._is_over = False  # no more calls are taken
        self._is_orderly = False  # ended by close, not by a bound
        self._end_reason = ""
        self._num_calls = 0
        self._num_bytes = 0
        self._records: list[bytes] = []  # of the next frame
        self._num_packed = 0  # bytes of these
        self._oldest = 0.0  # when the first of these was packed
        self._thread: threading.Thread | None = None

    # --- the engine's thread --------------------------------------------------------------------------

    def called(self, call: Call) -> None:
        """Queue a call. If the queue is full the recording ends.

        The thread starts with the first request: plans before it are empty and change nothing.
        """
        if self._is_over:
            return
        if self._thread is None:
            if not isinstance(call, AdmitCall):
                return
            self._thread = threading.Thread(target=self._run, name="octavo-record", daemon=True)
            self._thread.start()
        if len(self._queue) >= MAX_QUEUED:
            self._end_reason = f"the writer had {MAX_QUEUED} calls to write; is the disk too slow?"
            self._is_over = True
        else:
            self._queue.append(RecordedCall(call, self._clock()))
        if self._is_resting:
            self._wake.set()

    def close(self, reason: str = _CLOSED) -> None:
        """End the recording with its marker, once all queued calls are written. Idempotent."""
        if not self._is_over:
            self._end_reason, self._is_orderly = reason, True
        self._is_over = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    # --- the writer's thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._open():
                self._write_calls()
                if not self._is_orderly:
                    _LOG.warning("recording ended: %s", self._end_reason)
                self._finish()
        except OSError as error:
            self._give_up(f"{self._place()} cannot be written: {error.strerror or error}")
        except Exception as error:  # the instrument shell
            _LOG.exception("recording failed")
            self._give_up(f"{type(error).__name__}: {error}")
        finally:
            self._is_over = True
            self._queue.clear()
            self._close_file()

    def _give_up(self, reason: str) -> None:
        self._is_over = True
        self._end_reason = reason
        _LOG.warning("recording ended: %s", reason)

    def _write_calls(self) -> None:
        """Write queued calls until the recording is over: a frame when it is full or old."""
        while self._queue or not self._is_over:
            while self._queue:
                self._add(self._queue.popleft())
                self._flush_if_due()
                time.sleep(0)  # yield the interpreter to the engine's thread
            self._flush_if_due()
            self._rest()
        if self._records:
            self._flush()

    def _rest(self) -> None:
        """Wait for the next call, or for a moment if there is a frame to write."""
        self._is_resting = not self._records
        if not self._queue and not self._is_over:
            self._wake.wait(_POLL_S if self._records else None)
        self._is_resting = False
        self._wake.clear()

    def _add(self, recorded: RecordedCall) -> None:
        """Encode a call for the next frame."""
        if not self._records:
            self._oldest = time.monotonic()
        self._records.append(self._encoder.encode(recorded))
        self._num_packed += len(self._records[-1])

    def _flush_if_due(self) -> None:
        is_full = len(self._records) >= FRAME_CALLS or self._num_packed >= FRAME_BYTES
        if self._records and (is_full or time.monotonic() - self._oldest >= self.flush_s):
            self._flush()

    def _place(self) -> str:
        raise NotImplementedError

    def _open(self) -> bool:
        raise NotImplementedError

    def _flush(self) -> None:
        raise NotImplementedError

    def _finish(self) -> None:
        raise NotImplementedError

    def _close_file(self) -> None:
        raise NotImplementedError


class Recorder(CallWriter):
    """The call tap of one engine's scheduler: records a segment in a folder of at most `max_bytes` of segments."""

    def __init__(self, folder: Path, max_bytes: int, header: Header, clock: Callable[[], float]) -> None:
        super().__init__(header, clock)
        self._folder = folder
        self._max_bytes = max_bytes
        self._room = 0  # bytes that the segment may take
        self._file: BinaryIO | None = None
        self._path: Path | None = None

    def status(self) -> Mapping[str, object]:
        """Return the section `recording` of the statistics."""
        return {
            "is_recording": not self._is_over,
            "path": self._place(),
            "calls": self._num_calls,
            "bytes": self._num_bytes,
            "queued": len(self._queue),
            "ended": self._end_reason,
        }

    def _place(self) -> str:
        return str(self._path or self._folder)

    def _open(self) -> bool:
        """Begin a segment with the next free number; return False if the folder is full."""
        paths = list(self._folder.glob(f"*{SUFFIX}"))
        num_bytes = sum(path.stat().st_size for path in paths)
        self._room = self._max_bytes - num_bytes - _MARKER_BYTES
        head = preamble() + pack_header(self._header)
        if self._room < len(head) + _MARKER_BYTES:
            self._give_up(
                f"{self._folder} holds {num_bytes} of at most {self._max_bytes} bytes already; "
                "name another folder, or raise --record-bytes"
            )
            return False
        self._path, self._file = create_segment(self._folder)
        self._write_bytes(head)
        return True

    def _flush(self) -> None:
        """Write a frame; if there is no room for it the recording is over."""
        records, self._records, self._num_packed = self._records, [], 0
        if self._write(records, self._room):
            self._num_calls += len(records)
            return
        self._is_over, self._is_orderly = True, False
        self._queue.clear()
        self._end_reason = (
            f"{self._folder} holds its bound of {self._max_bytes} bytes (--record-bytes); "
            "a recording begins with its engine, so the next begins when an engine starts next"
        )

    def _finish(self) -> None:
        self._write([self._encoder.encode(RecordedCall(EndMarker(self._clock(), self._end_reason)))])

    def _close_file(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # unwritten bytes are still in its buffer
                self._file.close()

    def _write(self, records: list[bytes], room: float = math.inf) -> bool:
        """Write a frame of records; return False if the segment would exceed `room`."""
        frame = pack_records(records)
        if self._num_bytes + len(frame) > room:
            return False
        self._write_bytes(frame)
        return True

    def _write_bytes(self, data: bytes) -> None:
        assert self._file is not None
        self._file.write(data)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._num_bytes += len(data)


def complete_header(header: Header, has_text: bool, clock: Callable[[], float]) -> Header:
    """Return the header with the time now, what is recorded, and the version of Octavo."""
    version = importlib.metadata.version("octavo")
    return replace(header, began=time.time(), clock=clock(), has_text=has_text, octavo=version)


def open_recorder(config: RecordingConfig, header: Header, clock: Callable[[], float]) -> Recorder:
    """Return a recorder as configured, and make its folder. Raises ConfigError if that cannot be written to."""
    assert config.record is not None
    folder = Path(config.record).expanduser().absolute()
    prepare_folder(folder)
    return Recorder(folder, config.record_bytes, complete_header(header, config.record_text, clock), clock)
