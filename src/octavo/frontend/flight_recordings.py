"""Saves what the flight recorder of one engine process kept: when the engine dies, or a request misses an objective.

Owns: the recorder's files, the folder of saved recordings and its bounds, and which objectives a request has missed.
Does not: record (observe.recording does), or decide that an engine is dead.
Invariants: a folder holds at most MAX_SAVED recordings, the newest. Misses are saved at most once in MISS_PAUSE_S.
Saving never delays or fails what led to it: it happens in a thread, and its errors are logged.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile

from octavo.config import FlightConfig
from octavo.core.plan import Event
from octavo.core.request import Request
from octavo.engine.heartbeat import memory_folder

_LOG = logging.getLogger(__name__)
NUM_FILES = 3  # one is written to, and the two others have the time that was asked for
MAX_SAVED = 8
MISS_PAUSE_S = 60.0
_NAME = re.compile(r"\d{8}-\d{6}-\d{3}-(crash|miss)")


def default_folder() -> Path:
    """Return octavo/recordings in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "octavo" / "recordings"


class FlightRecordings:
    """The flight recorder of one engine process, as its parent sees it."""

    def __init__(self, config: FlightConfig) -> None:
        with ExitStack() as undo:
            files = [undo.enter_context(TemporaryFile(dir=memory_folder(), buffering=0)) for _ in range(NUM_FILES)]
            undo.pop_all()
        self._files = files
        self._folder = Path(config.flight_recordings).expanduser() if config.flight_recordings else default_folder()
        self._next_miss = 0.0  # on the monotonic clock

    @classmethod
    def of(cls, config: FlightConfig) -> FlightRecordings | None:
        """Return the recorder's files as configured; None without a flight recorder."""
        return cls(config) if config.flight_recorder > 0 else None

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The descriptors of the files, for the engine to inherit. Raises ValueError once they are closed."""
        return tuple(file.fileno() for file in self._files)

    def read(self, reason: str, last_s: float | None = None) -> tuple[bytes, float] | None:
        """Return the last seconds, or all, as a segment with its seconds; None if there is no call yet.

        Raises ValueError once the files are closed, and OSError.
        """
        from octavo.observe.recording.flight import read_flight  # not at the start of a server

        return read_flight(self.descriptors, reason, last_s)

    @staticmethod
    def write(folder: Path, segment: bytes) -> None:
        """Write a segment to a folder of its own. Raises OSError."""
        from octavo.observe.recording.flight import write_recording

        write_recording(folder, segment)

    def crashed(self, what: str) -> None:
        """Save the recording of an engine that has ended."""
        self._save("crash", f"the engine ended ({what})")

    def missed(self, what: str) -> None:
        """Save the recording because a request missed an objective, unless another did so lately."""
        now = time.monotonic()
        if now >= self._next_miss:
            self._next_miss = now + MISS_PAUSE_S
            self._save("miss", what)

    def close(self) -> None:
        """Close the files, which deletes them. What was read from them is still saved. Idempotent."""
        for file in self._files:
            file.close()

    def _save(self, kind: str, reason: str) -> None:
        try:
            found = self.read(reason)
        except (OSError, ValueError) as error:
            _LOG.warning("the flight recorder cannot be read: %s", error)
            return
        if found is not None:
            threading.Thread(target=self._write, args=(kind, found[0]), name="octavo-save").start()

    def _write(self, kind: str, segment: bytes) -> None:
        now = time.time()
        name = f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{int(now * 1000) % 1000:03d}-{kind}"
        try:
            self.write(self._folder / name, segment)
            remove_oldest(self._folder)
        except OSError as error:
            _LOG.warning("no recording can be saved in %s: %s", self._folder, error.strerror or error)
        else:
            _LOG.warning("the last minutes are saved: octavo replay %s", self._folder / name)


def remove_oldest(folder: Path) -> None:
    """Remove the oldest saved recordings of a folder until MAX_SAVED are left; leave all else alone."""
    saved = sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name) and not path.is_symlink())
    for path in saved[:-MAX_SAVED]:
        shutil.rmtree(path, ignore_errors=True)


def find_miss(request: Request, end: Event, first_at: float | None) -> str | None:
    """Return which objective a request has missed when it ended, with the numbers; None if it missed none.

    `first_at` is when its first token arrived. A request without one has missed its ttft objective if it ended later.
    """
    first = end.time if first_at is None else first_at
    ttft, num_gaps = first - request.arrival, end.num_tokens - 1
    if request.ttft_objective is not None and ttft > request.ttft_objective:
        return f"request {end.request_id} missed its ttft objective: {ttft:.3f} s, not {request.ttft_objective:g} s"
    if request.tpot_objective is None or request.params.num_sequences > 1 or num_gaps < 1:
        return None
    tpot = (end.time - first) / num_gaps
    if tpot <= request.tpot_objective:
        return None
    return f"request {end.request_id} missed its tpot objective: {tpot:.4f} s, not {request.tpot_objective:g} s"
