"""The journal: what was asked with a key, and every id that came of it, kept on disk across the server's own death.

Owns: when records are written, synced, compacted and forgotten, and going on without a disk that fails.
Does not: serve a request, or read files by itself (journal_files does). Lives in one event loop's thread.
Invariants: a record is written before anybody is told of what it holds; `synced` returns only when all written so far
is as durable as `--journal-sync` promises, or the journal is suspended; no disk error ever reaches a request.
While suspended the state goes on in memory; a fresh snapshot brings the folder up to date again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from octavo.config import Config
from octavo.core.plan import Events
from octavo.core.request import Request
from octavo.engine.wire import Submit
from octavo.errors import ConfigError
from octavo.frontend.journal_files import (
    Clock,
    Disk,
    Segment,
    lock_folder,
    recover,
    segment_path,
    sync_folder,
    write_snapshot,
)
from octavo.frontend.journal_records import (
    VERSION,
    Began,
    Forgotten,
    Head,
    Opened,
    Record,
    RecordTooLargeError,
    packed,
)
from octavo.frontend.journal_rows import to_record
from octavo.frontend.journal_state import HeldRequest, HeldRun

SYNC_S = 0.010  # least time between two syncs
RETRY_S = 5.0  # how long a failed disk is left alone
MAX_LIVES = 3  # that may take over a request without a token: perhaps it is what ends them
COMPACT_BYTES = 4 << 20  # below this nothing is compacted
_log = logging.getLogger(__name__)


def open_journal(config: Config) -> Journal | None:
    """Open the journal that the settings ask for, if any. Blocks while it reads what is there. Raises ConfigError."""
    retry, model = config.retry, config.model
    if retry.journal is None:
        return None
    if config.serving.in_process:
        raise ConfigError("--journal needs an engine in a process of its own; leave --in-process out")
    name = f"{model.model}@{model.revision or ''}"
    return Journal(Path(retry.journal), name, is_synced=retry.journal_sync == "group")


class Journal:
    """An open journal: a LedgerObserver, and the runs found at the start in `recovered`."""

    def __init__(
        self,
        folder: Path,
        model: str,
        *,
        is_synced: bool = False,
        disk: Disk | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Lock the folder, read what is there and start anew from a snapshot of it. Raises ConfigError."""
        self.folder = folder
        self.trouble: str | None = None
        self.num_suspensions = 0
        self.num_compactions = 0
        self._model = model
        self._is_synced = is_synced
        self._disk = disk or Disk()
        self._now = now
        self._lock = lock_folder(folder)
        try:
            found = recover(folder, model, Clock.now())
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
        self._open = {h.request.request_id: h for h in self.state.requests.values() if h.end is None}
        self._expected: dict[str, tuple[int, int]] = {}
        self._segment: Segment | None = None
        self._num_bytes = 0  # in all segments that count
        self._retry_at = 0.0
        self._num_written = self._num_durable = 0  # records
        self._is_syncing = False
        self._syncs = asyncio.Lock()  # of one segment before those of the next
        self._waiters: list[asyncio.Future[None]] = []
        self._synced_at = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_renewing = False
        self._renew_now()

    @property
    def recovered(self) -> Sequence[HeldRun]:
        """Every run held, oldest first; at the start, those of the life before."""
        return tuple(self.state.runs.values())

    @property
    def is_closed(self) -> bool:
        """Whether nothing is written any more, for good."""
        return self._lock < 0

    def report(self) -> dict[str, object]:
        """What /health and /metrics tell of it."""
        return {
            "state": "suspended" if self.trouble else "on",
            "trouble": self.trouble,
            "runs": len(self.state.runs),
            "bytes": self._num_bytes,
            "suspensions": self.num_suspensions,
            "compactions": self.num_compactions,
        }

    def begin(self, began: Began, request_ids: Sequence[str]) -> int:
        """Record a run; its requests will be opened under these ids. Give its number (`began.run` is not looked at)."""
        number = self._next_run
        self._next_run += 1
        record = Began(number, *(getattr(began, name) for name in began.__struct_fields__[1:]))
        self._write(record)
        for index, request_id in enumerate(request_ids):
            self._expected[request_id] = (number, index)
        return number

    def forget(self, run: int) -> None:
        """A run is of no use any more. Idempotent."""
        for request_id in [name for name, (number, _) in self._expected.items() if number == run]:
            del self._expected[request_id]
        held = self.state.runs.get(run)
        if held is None:
            return
        for each in held.requests.values():
            self._open.pop(each.request.request_id, None)
        self._write(Forgotten(run))

    def opened(self, request: Request) -> None:
        """The ledger has a request; only those that were announced by begin() are kept."""
        if not self._expected or (place := self._expected.pop(request.request_id, None)) is None:
            return
        (run, index), number = place, self._next_request
        if run not in self.state.runs:
            return
        self._next_request += 1
        # The keys of its blocks follow from its ids, and take more room than they do.
        held = HeldRequest(run, index, number, replace(request, block_keys=None))
        self.state.add(held)
        self._open[request.request_id] = held
        self._put(Opened(run, index, number, Submit.of(0, held.request)))

    def appended(self, events: Events) -> None:
        """The ledger accepted tokens and ends: one record, one write."""
        if not self._open:
            return
        record = to_record(events, self._open, self.state, self._now())
        if record is not None:
            self._put(record)

    def forgotten(self, request_id: str) -> None:
        """The ledger dropped a request; one that had not ended was refused."""
        self._expected.pop(request_id, None)
        held = self._open.get(request_id)
        if held is not None:
            self.forget(held.run)

    async def synced(self) -> None:
        """Wait until what was written so far is as durable as promised."""
        target = self._num_written
        while self._is_synced and self._segment is not None and self._num_durable < target:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            if not self._is_syncing:
                self._is_syncing = True
                self._spawn(self._sync_group())
            await waiter

    def tick(self) -> None:
        """Look after it, about once a second: take a failed disk up again, compact."""
        if self.is_closed or self._is_renewing:
            return
        is_loose = self._num_bytes > max(COMPACT_BYTES, 2 * self.state.num_bytes)
        if (is_loose or self.trouble is not None) and self._now() >= self._retry_at:
            self._spawn(self._renew())

    def close(self) -> None:
        """Write no more; what is open stays open in the folder, for the next life. Idempotent."""
        if self.is_closed:
            return
        if self._segment is not None:
            with contextlib.suppress(OSError):
                self._segment.sync()
            self._segment.close()
            self._segment = None
        self._open.clear()
        self._expected.clear()
        self._release()
        os.close(self._lock)
        self._lock = -1

    def _drop_unusable(self) -> None:
        """Runs that were cut off while they were being opened: nobody had an answer of them. The others go on."""
        for run in [number for number, run in self.state.runs.items() if not run.is_whole]:
            self.state.drop(run)
        for run in self.state.outlive(MAX_LIVES):
            _log.error(
                "journal: run %d is given up: %d lives of the server took it over and got no token", run, MAX_LIVES
            )
            self.state.drop(run)
        self.state.begin_life()
        for held in self.state.requests.values():
            held.is_cut = False

    def _write(self, record: Record) -> None:
        self.state.apply(record)
        self._put(record)

    def _put(self, record: Record) -> None:
        """Write a record that the state has already."""
        if self._segment is None:
            return
        try:
            data = packed(record)
            self._segment.add(data)
        except RecordTooLargeError as error:  # it is served, but the next life will not know it
            _log.warning("journal: left out: %s", error)
            return
        except OSError as error:
            self._suspend(error)
            return
        self._num_bytes += len(data)
        self._num_written += 1

    def _suspend(self, error: OSError) -> None:
        """Go on without the disk; tick() tries again."""
        reason = error.strerror or str(error) or type(error).__name__
        if self.trouble is None:
            self.num_suspensions += 1
            _log.warning(
                "journal: suspended, %s: %s; requests go on, but what is asked now would not outlive this process",
                self.folder,
                reason,
            )
        self.trouble = reason
        self._retry_at = self._now() + RETRY_S
        if self._segment is not None:
            self._segment.close()
            self._segment = None
        self._release()

    def _release(self) -> None:
        """Nobody waits for a sync that will not come."""
        waiters, self._waiters = self._waiters, []
        _wake(waiters)

    async def _sync_group(self) -> None:
        """One sync for everybody who waits, and again while somebody does."""
        try:
            while self._waiters and self._segment is not None:
                await asyncio.sleep(max(0.0, self._synced_at + SYNC_S - self._now()))
                async with self._syncs:
                    await self._sync()
                self._synced_at = self._now()
        finally:
            self._is_syncing = False
            self._release()

    async def _sync(self) -> None:
        segment, num_written = self._segment, self._num_written
        waiters, self._waiters = self._waiters, []
        try:
            if segment is not None:
                await asyncio.to_thread(segment.sync)
                self._num_durable = num_written
        except OSError as error:
            if self._segment is segment:
                self._suspend(error)
        finally:
            _wake(waiters)

    def _fresh(self) -> tuple[Head, Segment]:
        """The head of the next snapshot, and the segment behind it, which takes all records from now on."""
        clock = Clock.now()
        snapshot, live = self._next_number, self._next_number + 1
        self._next_number += 2
        segment = Segment(segment_path(self.folder, live), self._disk)
        try:
            segment.add(packed(Head(VERSION, live, 0, clock.boot, clock.mono, clock.wall, self._model)))
        except OSError:
            _discard(segment)
            raise
        return Head(VERSION, snapshot, snapshot, clock.boot, clock.mono, clock.wall, self._model), segment

    def _renew_now(self) -> None:
        """Start from a snapshot, before anybody is served."""
        try:
            head, segment = self._fresh()
            try:
                size = write_snapshot(self.folder, head, _records(self.recovered), self._disk)
            except BaseException:
                _discard(segment)
                raise
        except OSError as error:
            self._suspend(error)
            return
        self._segment, self._num_bytes = segment, size + segment.num_bytes

    async def _renew(self) -> None:
        """Write what is held as a snapshot, beside the running requests; older segments then go."""
        self._is_renewing = True
        was_suspended, is_settled = self.trouble is not None, True
        segment: Segment | None = None
        try:
            async with self._syncs:
                head, segment = self._fresh()
                # From here to the next await nothing changes, so the copies and the new segment meet without a gap.
                runs = [run if run.is_ended else run.copied() for run in self.state.runs.values()]
                old, self._segment, is_settled = self._segment, segment, False
                await asyncio.to_thread(_settle, self.folder, old)
                is_settled = True
            size = await asyncio.to_thread(write_snapshot, self.folder, head, _records(runs), self._disk)
        except OSError as error:
            self._retry_at = self._now() + RETRY_S
            if was_suspended:
                self._suspend(error)
                _discard(segment)
            elif not is_settled:
                self._suspend(error)
            else:  # the segments that there are still tell all
                _log.warning("journal: not compacted, %s: %s", self.folder, error.strerror or error)
            return
        finally:
            self._is_renewing = False
        if self._segment is segment:
            self._num_bytes = size + segment.num_bytes
            self.num_compactions += 1
            if was_suspended:
                self.trouble = None
                _log.warning("journal: taken up again, %s", self.folder)

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _records(runs: Iterable[HeldRun]) -> Iterable[Record]:
    return (record for run in runs for record in run.records())


def _settle(folder: Path, old: Segment | None) -> None:
    """Make durable what was written before a new segment, and the new one's name."""
    if old is not None:
        try:
            old.sync()
        finally:
            old.close()
    sync_folder(folder)


def _wake(waiters: Iterable[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)


def _discard(segment: Segment | None) -> None:
    """Remove a segment that holds nothing of use."""
    if segment is not None:
        segment.close()
        with contextlib.suppress(OSError):
            segment.path.unlink()
