"""Journal: requests with an Idempotency-Key and every id generated for them, on disk, for the next server process.

Owns: when records are written, synced, compacted and dropped; suspending the journal if its disk fails.
Does not: serve a request, know the file format (journal_files does), or combine records (journal_state does).
Belongs to one event loop's thread.
Invariants: a record is written before its data is sent; `synced` returns only when all records written so far are as
durable as `--journal-sync` promises, or the journal is suspended; no disk error ever fails a request.
While suspended, the requests stay in memory; a new snapshot then brings the folder up to date.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Protocol

import msgspec

from octavo.config import Config
from octavo.core.plan import Events
from octavo.errors import ConfigError
from octavo.frontend.journal_files import (
    VERSION,
    Began,
    BootClock,
    Disk,
    Forgotten,
    Head,
    JournalSegment,
    Record,
    RecordTooLargeError,
    lock_folder,
    packed,
    segment_path,
    sync_folder,
    write_snapshot,
)
from octavo.frontend.journal_state import JournaledRequest, JournaledRun, recover
from octavo.frontend.open_request import OpenRequest

SYNC_S = 0.010  # minimum time between two syncs
RETRY_S = 5.0  # from a disk error to the next attempt
MAX_RESTARTS = 3  # restarts in a row without a token for a run, which may be the cause of the server's crashes
COMPACT_BYTES = 4 << 20  # smaller journals are not compacted
COPY_BYTES = 256 << 10  # of a copy that are sent before other work is done
_log = logging.getLogger(__name__)


def journal_name(config: Config, *, has_several: bool = False) -> str:
    """Return what a journal's heads name: the model. With several models, each run names its own (AnswerSpec.files)."""
    return "several models" if has_several else f"{config.model.model}@{config.model.revision or ''}"


def open_journal(config: Config, *, has_several: bool = False) -> Journal | None:
    """Open the journal of the settings, if any. Blocks while it reads the folder. Raises ConfigError."""
    retry = config.retry
    if retry.journal is None:
        return None
    if config.serving.in_process:
        raise ConfigError("--journal needs an engine in a process of its own; leave --in-process out")
    return Journal(
        Path(retry.journal),
        journal_name(config, has_several=has_several),
        is_synced=retry.journal_sync == "group",
        waits_for_followers=retry.journal_sync == "standby",
    )


class JournalFollower(Protocol):
    """Gets a copy of a journal: `copy_starts`, a head, all runs, `copy_complete`; and every record as it is written."""

    def copy_starts(self) -> None:
        """Drop what is left of an earlier copy."""

    def take(self, data: bytes) -> None:
        """Take whole records, without waiting."""

    def copy_complete(self) -> None:
        """Handle that all runs were sent."""

    async def held(self) -> None:
        """Wait until everything taken so far is held elsewhere, or this follower has given up."""


class Journal:
    """An open journal, which is a LedgerObserver. `recovered` has the runs found at the start."""

    def __init__(
        self,
        folder: Path,
        model: str,
        *,
        is_synced: bool = False,
        waits_for_followers: bool = False,
        disk: Disk | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Lock the folder, read its journal, and write a snapshot of the runs. Raises ConfigError."""
        self.folder = folder
        self.trouble: str | None = None
        self.num_suspensions = 0
        self.num_compactions = 0
        self.model = model
        self._is_synced = is_synced
        self._waits_for_followers = waits_for_followers
        self._followers: dict[JournalFollower, int] = {}  # -> bytes since the begin of its copy
        self._copying: set[JournalFollower] = set()  # those whose copy is not complete
        self._disk = disk or Disk()
        self._now = now
        self._lock = lock_folder(folder, "--journal")
        try:
            found = recover(folder, model, BootClock.now())
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(f"--journal {str(folder)!r} cannot be read ({error.strerror or error})") from None
        for warning in found.warnings:
            _log.warning("journal: %s", warning)
        self.state = found.state
        self.warnings = tuple(found.warnings)
        self._next_number = found.next_number
        self._drop_unusable()
        self._next_run = max(self.state.runs, default=0) + 1
        self._next_request = max(self.state.requests, default=0) + 1
        self._expected: dict[str, tuple[int, int]] = {}  # id of a request that will be opened -> its run and index
        self._segment: JournalSegment | None = None
        self._num_bytes = 0  # in the snapshot and the current segment
        self._retry_at = 0.0
        self._num_written = self._num_durable = 0  # records
        self._syncs = asyncio.Lock()  # one sync at a time; all syncs of a segment precede those of the next
        self._synced_at = 0.0
        self._renewal: asyncio.Task[None] | None = None
        self._begin()

    @property
    def recovered(self) -> Sequence[JournaledRun]:
        """Every run, oldest first. At the start these are the runs of the former server process."""
        return tuple(self.state.runs.values())

    @property
    def is_closed(self) -> bool:
        """True if the journal is closed and writes no more records."""
        return self._lock < 0

    def report(self) -> dict[str, object]:
        """Return the figures for /health and /metrics."""
        return {
            "state": "suspended" if self.trouble else "on",
            "trouble": self.trouble,
            "runs": len(self.state.runs),
            "bytes": self._num_bytes,
            "suspensions": self.num_suspensions,
            "compactions": self.num_compactions,
            "standbys": len(self._followers),
        }

    def begin(self, began: Began, request_ids: Sequence[str]) -> int:
        """Record a run whose requests will have these ids; return the run's number, which replaces `began.run`."""
        number = self._next_run
        self._next_run += 1
        self._write(msgspec.structs.replace(began, run=number))
        for index, request_id in enumerate(request_ids):
            self._expected[request_id] = (number, index)
        return number

    def forget(self, run: int) -> None:
        """Drop a run. Idempotent."""
        for request_id in [name for name, (number, _) in self._expected.items() if number == run]:
            del self._expected[request_id]
        if run in self.state.runs:
            self._write(Forgotten(run))

    def opened(self, state: OpenRequest) -> None:
        """Record a request, if it was announced by begin()."""
        if not self._expected or (place := self._expected.pop(state.request.request_id, None)) is None:
            return
        run, index = place
        if run in self.state.runs:
            request = JournaledRequest(run, index, self._next_request, state)
            self._next_request += 1
            self.state.add(request)
            self._put(next(request.records()))

    def appended(self, events: Events) -> None:
        """Record accepted tokens and ends: one record, one write."""
        if not self.state.open:
            return
        record = self.state.record_of(events, self._now())
        if record is not None:
            self._put(record)

    def forgotten(self, request_id: str) -> None:
        """Drop the run of a request that was dropped without an end, because the engine refused it."""
        self._expected.pop(request_id, None)
        request = self.state.open.get(request_id)
        if request is not None:
            self.forget(request.run)

    async def follow(self, follower: JournalFollower) -> None:
        """Send a follower a copy of all runs, and from now on every record. For a follower already there: a new copy.

        Unfinished runs are sent at once, ended ones in parts, between which records of other runs may be sent.
        """
        clock = BootClock.now()
        follower.copy_starts()
        follower.take(packed(Head(VERSION, 0, 0, clock.boot, clock.mono, clock.wall, self.model)))
        ended = [run for run in self.state.runs.values() if run.is_ended]
        self._followers[follower] = 0
        self._copying.add(follower)
        try:
            self._send(follower, _packed_runs(run for run in self.state.runs.values() if not run.is_ended))
            part: list[bytes] = []
            for run in ended:
                if run.began.run in self.state.runs:  # it was not forgotten while others were sent
                    part += _packed_runs((run,))
                if sum(map(len, part)) >= COPY_BYTES:
                    self._send(follower, part)
                    part = []
                    await asyncio.sleep(0)
            self._send(follower, part)
            if follower in self._followers:
                follower.copy_complete()
        finally:
            self._copying.discard(follower)

    def _send(self, follower: JournalFollower, records: Iterable[bytes]) -> None:
        """Send records to a follower that has not been removed."""
        data = b"".join(records)
        if data and follower in self._followers:
            self._followers[follower] += len(data)
            follower.take(data)

    def unfollow(self, follower: JournalFollower) -> None:
        """Send this follower nothing more. Idempotent."""
        self._followers.pop(follower, None)

    async def synced(self) -> None:
        """Wait until all records written so far are as durable as promised."""
        if self._waits_for_followers:
            await asyncio.gather(*(follower.held() for follower in tuple(self._followers)))
        target = self._num_written
        while self._is_synced and self._segment is not None and self._num_durable < target:
            async with self._syncs:
                if self._num_durable < target:  # otherwise the sync that held the lock included these records
                    await asyncio.sleep(max(0.0, self._synced_at + SYNC_S - self._now()))
                    await self._sync()

    def tick(self) -> None:
        """Write a new snapshot if the disk failed before or compaction is due. Call about once a second."""
        if self.is_closed or (self._renewal is not None and not self._renewal.done()) or self._now() < self._retry_at:
            return
        if self.trouble is not None or self._needs_compaction(self._num_bytes):
            self._renewal = asyncio.get_running_loop().create_task(self._renew())
        for follower, num_bytes in tuple(self._followers.items()):
            if self._needs_compaction(num_bytes) and follower not in self._copying:
                self._renewal = asyncio.get_running_loop().create_task(self.follow(follower))

    def close(self) -> None:
        """Sync and close. Open requests stay open in the folder, for the next server process. Idempotent."""
        if self.is_closed:
            return
        if self._segment is not None:
            with contextlib.suppress(OSError):
                self._segment.sync()
            self._segment.close()
            self._segment = None
        self.state.open.clear()
        self._expected.clear()
        os.close(self._lock)
        self._lock = -1

    def _drop_unusable(self) -> None:
        """Drop runs of which some request was never opened, and runs without a token for MAX_RESTARTS restarts.

        No client has an answer of a run that is not whole.
        """
        for run in [number for number, run in self.state.runs.items() if not run.is_whole]:
            self.state.drop(run)
        for run in self.state.count_restart(MAX_RESTARTS):
            _log.error("journal: run %d is given up: %d restarts of the server got no token for it", run, MAX_RESTARTS)
            self.state.drop(run)
        self.state.begin_process()
        for request in self.state.requests.values():
            request.has_gap = False

    def _needs_compaction(self, num_bytes: int) -> bool:
        """Return True if more than half of these bytes, which have every run, are obsolete."""
        return num_bytes > COMPACT_BYTES and num_bytes > 2 * self.state.num_bytes

    def _write(self, record: Record) -> None:
        self.state.apply(record)
        self._put(record)

    def _put(self, record: Record) -> None:
        """Write a record that is already applied to the state."""
        try:
            data = packed(record)
        except RecordTooLargeError as error:  # the request is served, but the next server process will not know it
            _log.warning("journal: left out: %s", error)
            return
        for follower in tuple(self._followers):
            self._send(follower, (data,))
        if self._segment is None:
            return
        try:
            self._segment.add(data)
        except OSError as error:
            self._suspend(error)
            return
        self._num_bytes += len(data)
        self._num_written += 1

    def _suspend(self, error: OSError) -> None:
        """Close the segment after a disk error; tick() tries to write a new one later."""
        reason = error.strerror or str(error) or type(error).__name__
        if self.trouble is None:
            self.num_suspensions += 1
            _log.warning(
                "journal: suspended, %s: %s; new requests would not survive a restart of this process",
                self.folder,
                reason,
            )
        self.trouble = reason
        self._retry_at = self._now() + RETRY_S
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    async def _sync(self) -> None:
        """Sync the segment in another thread."""
        segment, num_written = self._segment, self._num_written
        if segment is None:
            return
        try:
            await asyncio.to_thread(segment.sync)
        except OSError as error:
            if self._segment is segment:
                self._suspend(error)
        else:
            self._num_durable = num_written
        self._synced_at = self._now()

    def _next_segment(self) -> tuple[Head, JournalSegment]:
        """Return the head of the next snapshot, and a new segment for all records from now on."""
        clock, snapshot = BootClock.now(), self._next_number
        self._next_number += 2
        head = Head(VERSION, snapshot + 1, 0, clock.boot, clock.mono, clock.wall, self.model)
        segment = JournalSegment(segment_path(self.folder, snapshot + 1), head, self._disk)
        return msgspec.structs.replace(head, number=snapshot, supersedes=snapshot), segment

    def _begin(self) -> None:
        """Write a snapshot before the first request."""
        segment = None
        try:
            head, segment = self._next_segment()
            size = write_snapshot(self.folder, head, _records(self.recovered), self._disk)
        except OSError as error:
            if segment is not None:
                segment.discard()
            self._suspend(error)
            return
        self._segment, self._num_bytes = segment, size + segment.num_bytes

    async def _renew(self) -> None:
        """Write all runs as a snapshot while requests run; then delete older segments."""
        was_suspended, is_synced = self.trouble is not None, True
        segment: JournalSegment | None = None
        try:
            async with self._syncs:
                head, segment = self._next_segment()
                # Nothing changes before the next await, so there is no gap between the snapshot and the new segment.
                unfinished = [run for run in self.state.runs.values() if not run.is_ended]
                ended = [run for run in self.state.runs.values() if run.is_ended]
                records = chain(tuple(_records(unfinished)), _records(ended))
                old, self._segment, is_synced = self._segment, segment, False
                await asyncio.to_thread(_sync_and_close, self.folder, old)
                is_synced = True
            size = await asyncio.to_thread(write_snapshot, self.folder, head, records, self._disk)
        except OSError as error:
            self._retry_at = self._now() + RETRY_S
            if was_suspended or not is_synced:
                self._suspend(error)
            else:  # the present segments still have every record
                _log.warning("journal: not compacted, %s: %s", self.folder, error.strerror or error)
            if was_suspended and segment is not None:
                segment.discard()
            return
        if self._segment is segment:
            self._num_bytes = size + segment.num_bytes
            self.num_compactions += 1
            if was_suspended:
                self.trouble = None
                _log.warning("journal: taken up again, %s", self.folder)


def _packed_runs(runs: Iterable[JournaledRun]) -> Iterator[bytes]:
    """Yield the records of runs as bytes, without those that are over the size cap."""
    for record in _records(runs):
        with contextlib.suppress(RecordTooLargeError):
            yield packed(record)


def _records(runs: Iterable[JournaledRun]) -> Iterable[Record]:
    return (record for run in runs for record in run.records())


def _sync_and_close(folder: Path, old: JournalSegment | None) -> None:
    """Make the old segment and the new segment's name durable, and close the old segment."""
    if old is not None:
        try:
            old.sync()
        finally:
            old.close()
    sync_folder(folder)
