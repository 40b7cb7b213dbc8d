"""Batches of a server: accepted, run beside interactive requests, and ended; and the slots for uploads.

Owns: which batches run (one per tenant, oldest first); their states; their end by cancellation, expiry or a failure;
how many uploads of a tenant are read at once.
Does not: write files (store does) or send requests (run does).
Invariants: a batch that is pending when the server ends continues at the next start, with the answers that it has. An
upload of one tenant never waits for another tenant's upload.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
from starlette.types import ASGIApp

from octavo.config import BatchConfig
from octavo.server.api.batches.run import (
    BatchLine,
    BatchRun,
    InnerCall,
    InnerResponse,
    RunOptions,
    append,
    inner_call,
    not_answered,
    read_finished,
    read_lines,
    usage_in,
)
from octavo.server.api.batches.store import BatchRecord, BatchStore, LineError
from octavo.server.http.errors import ApiError, is_disk_full
from octavo.server.http.keys import ANONYMOUS, KeyInfo, KeyRing
from octavo.server.http.limits import Shares

MAX_UPLOADS = 4  # per tenant, read at once: their bodies are in temporary files
MAX_WAITING_UPLOADS = 16  # per tenant, each with an unread body
MAX_UPLOAD_WAIT_S = 10.0  # maximum wait for a slot


@dataclass(slots=True)
class _TenantSlots:
    """One tenant's upload slots, and the number of its uploads that have a slot or wait for one."""

    semaphore: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_UPLOADS))
    num_users: int = 0


class UploadSlots:
    """Slots for uploads: MAX_UPLOADS per tenant."""

    def __init__(self) -> None:
        self._tenants: dict[str, _TenantSlots] = {}

    @asynccontextmanager
    async def take(self, tenant: str) -> AsyncIterator[None]:
        """Hold a slot while the body is read. Raises ApiError (429) if none is free in time."""
        slots = self._tenants.setdefault(tenant, _TenantSlots())
        if slots.num_users >= MAX_UPLOADS + MAX_WAITING_UPLOADS:
            raise _refusal()
        slots.num_users += 1
        try:
            try:
                async with asyncio.timeout(MAX_UPLOAD_WAIT_S):
                    await slots.semaphore.acquire()
            except TimeoutError:
                raise _refusal() from None
            try:
                yield
            finally:
                slots.semaphore.release()
        finally:
            slots.num_users -= 1
            if not slots.num_users:
                del self._tenants[tenant]


def _refusal() -> ApiError:
    message = f"{MAX_UPLOADS} of your uploads are open, the most there may be, and others wait; finish one first"
    return ApiError(429, message, code="too_many_uploads", retry_after_s=1)


BATCH_PRIORITY = 10  # below interactive requests: refused first in a busy queue, run later under --policy priority
MAX_LINE_ERRORS = 100
_MAX_OPEN = 128  # open requests of all batches, unless --batch-concurrency is set
_TIDY_S = 600.0
_RETRY_S = 1.0  # wait after a write that found the disk full; doubles up to _MAX_RETRY_S
_MAX_RETRY_S = 30.0
_log = logging.getLogger(__name__)


class _KeyGoneError(Exception):
    """The batch's tenant no longer has an API key."""


class BatchService:
    """The files and batches of a server. Without --batch-dir, both are refused."""

    def __init__(self, config: BatchConfig, keys: KeyRing, num_slots: int) -> None:
        """Open the folder. Raises ConfigError."""
        self.config = config
        self._keys = keys
        self._store = None
        if config.batch_dir is not None:
            self._store = BatchStore(config, Path(config.batch_dir).expanduser(), Shares(keys))
        self._num_open = config.batch_concurrency or min(_MAX_OPEN, max(1, num_slots // 2))
        self._room = asyncio.Semaphore(self._num_open)
        self.uploads = UploadSlots()
        self._app: ASGIApp | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self._is_closing = False

    @property
    def store(self) -> BatchStore:
        """The store. Raises ApiError without --batch-dir."""
        if self._store is None:
            message = "files and batches are off here; start the server with --batch-dir FOLDER"
            raise ApiError(400, message, code="batches_off")
        return self._store

    def connect(self, app: ASGIApp) -> None:
        """Set the application that answers the batches' requests."""
        self._app = app

    async def add(self, batch: BatchRecord, holder: KeyInfo) -> None:
        """Accept a batch of the key `holder`. Raises ApiError."""
        await asyncio.to_thread(self.store.add_batch, batch, holder)
        self._wake.set()

    async def cancel(self, batch: BatchRecord) -> None:
        """Cancel a batch; its answers are kept. Raises ApiError if it has ended, OSError if the disk fails."""
        if not batch.is_pending:
            message = f"batch {batch.id} is {batch.status}; only one that is not over can be cancelled"
            raise ApiError(409, message, code="batch_is_over")
        if batch.status != "cancelling":
            was, times = batch.status, dict(batch.times)
            batch.status = "cancelling"
            batch.times["cancelling"] = int(time.time())
            try:
                await asyncio.to_thread(self.store.save, batch)
            except OSError:
                if batch.status == "cancelling":
                    batch.status, batch.times = was, times
                raise
            task = self._tasks.get(batch.id)
            if task is not None:
                task.cancel()
            self._wake.set()

    async def run(self) -> None:
        """Run batches until this task is cancelled."""
        if self._store is None:
            return
        try:
            while True:
                try:
                    await asyncio.to_thread(self._store.expire, time.time())
                except OSError:
                    _log.exception("old files could not be removed")
                self._begin_tasks(self._store)
                self._wake.clear()
                try:
                    async with asyncio.timeout(_TIDY_S):
                        await self._wake.wait()
                except TimeoutError:
                    pass
        finally:
            self._is_closing = True
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            self._store.close()

    def _begin_tasks(self, store: BatchStore) -> None:
        busy = {store.batches[name].tenant for name in self._tasks}
        for batch in store.batches.values():
            if batch.is_pending and batch.tenant not in busy and batch.id not in self._tasks:
                busy.add(batch.tenant)
                task = asyncio.create_task(self._run_to_end(store, batch), name=f"octavo-{batch.id}")
                self._tasks[batch.id] = task
                task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks = {name: other for name, other in self._tasks.items() if other is not task}
        if not task.cancelled() and task.exception() is not None:  # the batch's end could not be written
            _log.error("%s stays as it is until a restart", task.get_name(), exc_info=task.exception())
        self._wake.set()

    async def _run_to_end(self, store: BatchStore, batch: BatchRecord) -> None:
        """Run one batch to its end."""
        batch.paused = None
        try:
            if batch.status == "cancelling":
                await self._finish(store, batch, "cancelled")
                return
            async with asyncio.timeout(max(0.0, batch.expires_at - time.time())):
                if batch.status == "validating" and not await self._validate(store, batch):
                    return
                await self._run(store, batch)
            await self._finish(store, batch, "completed")
        except TimeoutError:
            await self._write(batch, partial(_write_expired, store, batch))
            await self._finish(store, batch, "expired")
        except asyncio.CancelledError:
            if batch.status == "cancelling":  # else the server shuts down, and the next one continues the batch
                await self._finish(store, batch, "cancelled")
            else:
                raise
        except _KeyGoneError:
            batch.errors = [LineError("invalid_api_key", "the key of this batch is no longer known")]
            await self._finish(store, batch, "failed")
        except Exception as error:  # one failure must not stop later batches
            if self._is_closing:
                raise
            _log.exception("batch %s failed", batch.id)
            cause = f": its files cannot be read or written ({error.strerror})" if isinstance(error, OSError) else ""
            batch.errors = [LineError("internal_error", f"the server met an internal error in this batch{cause}")]
            await self._finish(store, batch, "failed")

    async def _validate(self, store: BatchStore, batch: BatchRecord) -> bool:
        batch.total, batch.errors = await asyncio.to_thread(self._check_input, store, batch)
        if batch.errors:
            await self._move(batch, "failed")
            return False
        batch.times.setdefault("in_progress", int(time.time()))
        await self._move(batch, "in_progress")
        return True

    def _check_input(self, store: BatchStore, batch: BatchRecord) -> tuple[int, list[LineError]]:
        """Return the number of requests, and the errors for which the batch is refused."""
        holder = self._holder(batch)
        if holder is not None:  # else the run fails the batch
            try:
                store.check_output_room(holder)
            except ApiError as error:
                return 0, [LineError(error.code, str(error), param=error.param)]
        errors: list[LineError] = []
        total = 0
        least_priority = None if holder is None else holder.priority
        for entry in read_lines(store.path(batch.input_id), batch.endpoint, least_priority):
            total += 1
            if total > self.config.max_batch_requests:
                message = f"the file has more than {self.config.max_batch_requests} requests"
                return total, [LineError("too_many_requests", message)]
            if not isinstance(entry, BatchLine):
                errors.append(LineError(entry.code, entry.message, entry.line, entry.param))
                if len(errors) == MAX_LINE_ERRORS:
                    break
        return total, errors or ([] if total else [LineError("empty_file", "the file has no requests")])

    async def _run(self, store: BatchStore, batch: BatchRecord) -> None:
        holder = self._holder(batch)
        if holder is None:
            raise _KeyGoneError
        options = RunOptions(self._num_open, 0, batch.endpoint, holder.priority)
        run = BatchRun(self._bounded(holder), store.paths(batch), options, batch.count, partial(self._write, batch))
        try:
            await run.run()
        finally:
            batch.count(run.counts)
            with suppress(OSError):  # the files of answers contain the counts too
                await asyncio.shield(asyncio.to_thread(store.save, batch))

    def _bounded(self, holder: KeyInfo) -> InnerCall:
        """Return an InnerCall that waits for one of the slots that all batches share."""
        assert self._app is not None, "connect() comes first"
        call = inner_call(self._app, holder)

        async def bounded(path: str, body: bytes) -> InnerResponse:
            async with self._room:
                return await call(path, body)

        return bounded

    def _holder(self, batch: BatchRecord) -> KeyInfo | None:
        """Return the batch's key, or another key of its tenant, with a batch's priority; None if there is none."""
        known = {info.name: info for info in self._keys.keys if info.tenant == batch.tenant}
        info = known.get(batch.holder) or next(iter(known.values()), None)
        if info is None and not self._keys.keys:
            info = msgspec.structs.replace(ANONYMOUS, tenant=batch.tenant)
        return None if info is None else msgspec.structs.replace(info, priority=max(info.priority, BATCH_PRIORITY))

    async def _finish(self, store: BatchStore, batch: BatchRecord, status: str) -> None:
        """Make a batch's outputs files of its tenant, and write the batch's final status."""
        if status == "completed":
            await self._move(batch, "finalizing")

        def adopt() -> None:
            finished = read_finished(store.path(batch.output_id), store.path(batch.error_id))
            batch.num_completed, batch.num_failed = finished.num_completed, finished.num_failed
            batch.input_tokens, batch.output_tokens = usage_in(store.path(batch.output_id))
            batch.has_output = store.adopt(batch.output_id, batch, f"{batch.id}_output.jsonl")
            batch.has_errors = store.adopt(batch.error_id, batch, f"{batch.id}_error.jsonl")

        await self._write(batch, adopt)
        await self._move(batch, status)

    async def _move(self, batch: BatchRecord, status: str) -> None:
        batch.status = status
        batch.times[status] = int(time.time())
        await self._write(batch, partial(self.store.save, batch))

    async def _write(self, batch: BatchRecord, work: Callable[[], object]) -> None:
        """Do work that writes to the disk. While the disk is full, show this in the batch and retry."""
        wait_s = _RETRY_S
        while True:
            try:
                await asyncio.to_thread(work)
                batch.paused = None
                return
            except OSError as error:
                if not is_disk_full(error) or self._is_closing:
                    raise
                if batch.paused is None:
                    _log.error("%s waits until there is room on the disk: %s", batch.id, error)
                message = f"the server's disk is full ({error.strerror}); the batch continues when there is room"
                batch.paused = LineError("disk_full", message)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _MAX_RETRY_S)


def _write_expired(store: BatchStore, batch: BatchRecord) -> None:
    """Write an error "batch_expired" for each request without an answer."""
    paths = store.paths(batch)
    finished = read_finished(paths.output, paths.errors)
    message = "this request could not be made before the completion window expired"
    left = (entry for entry in read_lines(paths.requests, batch.endpoint) if not finished.has(entry))
    append(
        paths.errors, b"".join(not_answered(entry.line, entry.custom_id, "batch_expired", message) for entry in left)
    )
