"""Records a scheduler: a tap on its calls, a bounded queue from the engine's thread, and a thread that writes.

Owns: the tap, the queue, the thread, the bound in bytes, the end. Does not: know how a call is encoded (format).
Invariants: `called` never waits, copies nothing and raises nothing; what cannot be kept ends the recording, with a
marker where one can still be written, and a line in the log; a segment begins with an engine's first request.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from octavo.config import RecordingConfig
from octavo.core.tap import AdmitCall, Call
from octavo.errors import ConfigError
from octavo.observe.recording.format import CallEncoder, EndMarker, Header, RecordedCall
from octavo.observe.recording.reader import SUFFIX, pack_header, pack_records, preamble

_LOG = logging.getLogger(__name__)
MAX_QUEUED = 16384  # calls that the writer may be behind; some minutes of a disk that hangs
FRAME_CALLS = 1024
FRAME_BYTES = 1 << 20  # unpacked, about
FLUSH_S = 1.0  # how much a kill may cost
_POLL_S = 0.05  # between looks while there are calls, so that no step has to wake anybody
_MARKER_BYTES = 1024  # kept for the marker at the end
_CLOSED = "the engine was stopped"


def prepare_folder(folder: Path) -> None:
    """Make the folder of a recording, and see that it can be written to. Raises ConfigError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as trial:
            trial.write(b"octavo")
    except OSError as error:
        raise ConfigError(
            f"--record {folder} cannot be written to ({(error.strerror or str(error)).lower()}); give another folder"
        ) from None


def num_bytes_in(folder: Path) -> int:
    """Bytes of the segments that a folder holds."""
    return sum(path.stat().st_size for path in folder.glob(f"*{SUFFIX}"))


class Recorder:
    """The call tap of one engine's scheduler: records a segment in a folder that holds at most `max_bytes` of them.

    `clock` is the engine's.
    """

    def __init__(self, folder: Path, max_bytes: int, header: Header, clock: Callable[[], float]) -> None:
        self._folder = folder
        self._encoder = CallEncoder(header.has_text)
        self._header = replace(header, limits=self._encoder.masked(header.limits))
        self._clock = clock
        self._max_bytes = max_bytes
        self._queue: deque[RecordedCall] = deque()
        self._records: list[tuple[Any, ...]] = []
        self._wake = threading.Event()
        self._is_resting = False
        self._is_orderly = False  # ended by close, not by a bound
        self._is_over = False  # nothing is taken any more
        self._end_reason = ""
        self._num_calls = 0
        self._num_bytes = 0
        self._weight = 0  # bytes in prompts and keys that are not written yet
        self._room = 0  # bytes that may still be written
        self._file: BinaryIO | None = None
        self._path: Path | None = None
        self._flushed_at = 0.0
        self._thread: threading.Thread | None = None

    # --- the engine's thread --------------------------------------------------------------------------

    def called(self, call: Call) -> None:
        """Take a call in. Costs a queue's append; where the queue is full the recording ends."""
        if self._is_over:
            return
        if self._thread is None and not self._start(call):
            return
        if len(self._queue) >= MAX_QUEUED:
            self._is_over = True
            self._end_reason = f"the writer was {MAX_QUEUED} calls behind; is the disk too slow?"
        else:
            self._queue.append(RecordedCall(call, self._clock()))
        if self._is_resting:
            self._wake.set()

    def _start(self, call: Call) -> bool:
        """The thread starts with the first request: plans before it are empty and change nothing."""
        if not isinstance(call, AdmitCall):
            return False
        self._thread = threading.Thread(target=self._run, name="octavo-record", daemon=True)
        self._thread.start()
        return True

    def close(self, reason: str = _CLOSED) -> None:
        """End the recording with its marker, once all that was taken is written. Idempotent."""
        if not self._is_over:
            self._end_reason, self._is_orderly = reason, True
        self._is_over = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def status(self) -> Mapping[str, object]:
        """What is told of it in the statistics."""
        return {
            "is_recording": not self._is_over,
            "path": str(self._path or self._folder),
            "calls": self._num_calls,
            "bytes": self._num_bytes,
            "queued": len(self._queue),
            "ended": self._end_reason,
        }

    # --- the writer's thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if not self._open():
                return
            self._flushed_at = time.monotonic()
            while self._turn():
                pass
        except OSError as error:
            self._give_up(f"{self._path or self._folder} cannot be written: {error.strerror or error}")
        except Exception as error:  # the instrument shell
            _LOG.exception("recording failed")
            self._give_up(f"{type(error).__name__}: {error}")
        finally:
            self._is_over = True
            self._queue.clear()
            if self._file is not None:
                with contextlib.suppress(OSError):  # what could not be written is in its buffer still
                    self._file.close()

    def _give_up(self, reason: str) -> None:
        self._is_over = True
        self._end_reason = reason
        _LOG.warning("recording ended: %s", reason)

    def _turn(self) -> bool:
        """Take what is queued, write when it is time; False at the end."""
        while self._queue:
            self._take(self._queue.popleft())
            time.sleep(0)  # let the engine's thread have the interpreter
        if self._is_over:
            self._finish()
            return False
        self._flush_if_due()
        if not self._is_over:
            self._rest()
        return True

    def _take(self, recorded: RecordedCall) -> None:
        self._records.append(self._encoder.encode(recorded))
        call = recorded.call
        if isinstance(call, AdmitCall):
            num_ids = call.request.num_prompt_tokens if self._header.has_text else 0
            self._weight += 5 * num_ids + 10 * sum(len(run.keys) for run in call.keys)
        self._flush_if_due()

    def _flush_if_due(self) -> None:
        is_due = time.monotonic() - self._flushed_at >= FLUSH_S
        if self._records and (is_due or len(self._records) >= FRAME_CALLS or self._weight >= FRAME_BYTES):
            self._flush()

    def _rest(self) -> None:
        """Wait: a moment while something is to be written, else for the next call."""
        if self._records:
            self._wake.wait(_POLL_S)
        else:
            self._is_resting = True
            if not self._queue and not self._is_over:
                self._wake.wait()
            self._is_resting = False
            self._flushed_at = time.monotonic()
        self._wake.clear()

    def _open(self) -> bool:
        """Begin a segment under the next free number; False where the folder is full."""
        self._room = self._max_bytes - num_bytes_in(self._folder)
        data = preamble() + pack_header(self._header)
        if self._room < len(data) + 2 * _MARKER_BYTES:
            self._give_up(
                f"{self._folder} holds {self._max_bytes - self._room} of at most {self._max_bytes} bytes already; "
                "name another folder, or raise --record-bytes"
            )
            return False
        numbers = [int(path.stem) for path in self._folder.glob(f"*{SUFFIX}") if path.stem.isdigit()]
        number = max(numbers, default=0) + 1
        while True:
            path = self._folder / f"{number:04d}{SUFFIX}"
            try:
                self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
            except FileExistsError:  # another engine of the same server
                number += 1
                continue
            self._path = path
            break
        self._write(data)
        return True

    def _write(self, data: bytes) -> None:
        assert self._file is not None
        self._file.write(data)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._num_bytes += len(data)

    def _flush(self) -> None:
        """Write what is encoded as one frame; where there is no room for it the recording is over."""
        records, self._records, self._weight = self._records, [], 0
        self._flushed_at = time.monotonic()
        frame = pack_records(records)
        if self._num_bytes + len(frame) + _MARKER_BYTES <= self._room:
            self._write(frame)
            self._num_calls += len(records)
            return
        self._is_over, self._is_orderly = True, False
        self._queue.clear()
        self._end_reason = (
            f"{self._folder} holds its bound of {self._max_bytes} bytes (--record-bytes); "
            "a recording begins with its engine, so the next begins when an engine starts next"
        )

    def _finish(self) -> None:
        """Write the rest, and the marker."""
        if self._records:
            self._flush()
        if not self._is_orderly:
            _LOG.warning("recording ended: %s", self._end_reason)
        self._write(pack_records([self._encoder.encode(RecordedCall(EndMarker(self._clock(), self._end_reason)))]))


def open_recorder(config: RecordingConfig, header: Header, clock: Callable[[], float]) -> Recorder:
    """A recorder as configured, whose folder is there. Raises ConfigError when it cannot be written to."""
    assert config.record is not None
    folder = Path(config.record).expanduser().absolute()
    prepare_folder(folder)
    header = replace(
        header,
        began=time.time(),
        clock=clock(),
        has_text=config.record_text,
        octavo=importlib.metadata.version("octavo"),
    )
    return Recorder(folder, config.record_bytes, header, clock)
