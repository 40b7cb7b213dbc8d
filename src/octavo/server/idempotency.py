"""IdempotentRequests: requests with an Idempotency-Key, each executed once for all its retries.

Owns: the table from (tenant, key) to a run; the table's bounds in number, bytes and age; running a request
independently of the connections that read its answer; cancelling a run without readers.
Does not: submit requests or restore an earlier server's runs (reply does both), write files, or define which tenant
loses a run above the bounds (limits does).
Invariants: while a run that is active or succeeded is in the table, no retry starts it again. A failure that may be
retried is not kept. A run's end is journaled before a client sees the end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from msgspec import msgpack
from starlette.requests import Request

from octavo.errors import OctavoError
from octavo.frontend.journal_files import Began
from octavo.server.encoding import ENCODERS, AnswerSpec
from octavo.server.http.errors import ApiError, bad_field, draining_error, from_exception, internal_error
from octavo.server.http.limits import Shares, largest_user
from octavo.server.resumable_stream import Position, ResumableStream, TokenLog

if TYPE_CHECKING:
    from octavo.config import RetryConfig
    from octavo.frontend.journal import Journal
    from octavo.frontend.outputs import TextDelta
    from octavo.server.encoding import Pieces

KEY_HEADER = b"idempotency-key"
EVENT_HEADER = b"last-event-id"
MAX_KEY = 255
SWEEP_S = 1.0
RETRY_FULL_S = 5
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RetryKey:
    """What identifies a retry (tenant, Idempotency-Key, body's hash), and the last event that the client has.

    `is_lasting`: the journal, if there is one, restores the run after a restart.
    """

    tenant: str
    key: str
    body_hash: bytes
    last_event: str | None = None
    is_lasting: bool = True

    @property
    def name(self) -> tuple[str, str]:
        """The run's key in the table of runs."""
        return self.tenant, self.key


def key_of(request: Request) -> tuple[str | None, str | None]:
    """Return the Idempotency-Key and the Last-Event-ID of a request. Raises ApiError."""
    key = _only(request, KEY_HEADER, "Idempotency-Key")
    event = _only(request, EVENT_HEADER, "Last-Event-ID")
    if event is not None and key is None:
        message = "Last-Event-ID goes with the Idempotency-Key of the stream that it belongs to; give both"
        raise bad_field("Last-Event-ID", message, "missing_idempotency_key")
    return key, event


def _only(request: Request, header: bytes, spelled: str) -> str | None:
    values: list[bytes] = [value for name, value in request.scope["headers"] if name == header]
    if not values:
        return None
    most = MAX_KEY if header == KEY_HEADER else 1024
    if len(values) > 1 or not 1 <= len(values[0]) <= most or not all(0x21 <= byte < 0x7F for byte in values[0]):
        raise bad_field(spelled, f"{spelled}: give one value of 1 to {most} visible ASCII characters, without spaces")
    return values[0].decode()


class GenerationSource(Protocol):
    """A run's source of deltas. `close` is always called at the end."""

    def deltas(self) -> AsyncIterator[tuple[int, TextDelta]]:
        """Yield (choice index, delta) until every choice has ended. Raises ApiError."""

    async def close(self) -> None:
        """Cancel the requests that have not ended. Idempotent."""


@dataclass(frozen=True, slots=True)
class StartedRun:
    """A submitted request: its source of deltas, its AnswerSpec, the number of choices, and its model's Pieces."""

    source: GenerationSource
    spec: AnswerSpec
    num_choices: int
    pieces: Pieces


class IdempotentRequest:
    """One run: a request that is executed once, and its answer so far in `log`.

    `started` is set once the engine has accepted the request.
    """

    def __init__(self, key: RetryKey) -> None:
        self.key = key
        self.started: asyncio.Future[StartedRun] = asyncio.get_running_loop().create_future()
        self.log: TokenLog | None = None
        self.num_readers = 0
        self.ended_at: float | None = None
        self.num_bytes = 0
        self.orphaned: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[None] | None = None
        self.number: int | None = None  # the run's number in the journal
        self.why: ApiError | None = None  # why the run was cancelled; None if the server shuts down
        self.restore_source: Callable[[], StartedRun] | None = (
            None  # of an earlier server's result: makes the StartedRun for the first reader
        )

    @property
    def is_ended(self) -> bool:
        """True once the run has ended."""
        return self.ended_at is not None


BeginRun = Callable[[IdempotentRequest], Awaitable[StartedRun]]


class IdempotentRequests:
    """The table of all runs of this server."""

    def __init__(self, config: RetryConfig, shares: Shares) -> None:
        self.journal: Journal | None = None  # set before anything is served
        self.num_attached = 0
        self.num_conflicts = 0
        self.num_orphaned = 0
        self._config = config
        self._shares = shares
        self._runs: OrderedDict[tuple[str, str], IdempotentRequest] = OrderedDict()  # least recently requested first
        self._num_runs: Counter[str] = Counter()  # by tenant
        self._num_running: Counter[str] = Counter()  # runs that have not ended, by tenant
        self._kept_bytes: Counter[str] = Counter()  # bytes of ended runs, by tenant
        self._sweeper: asyncio.Task[None] | None = None
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def num_bytes(self) -> int:
        """The approximate bytes of all runs in memory."""
        running = (run.log.num_bytes for run in self._runs.values() if run.log is not None and not run.is_ended)
        return self._kept_bytes.total() + sum(running)

    def report(self) -> dict[str, object]:
        """Return the counts and the journal's state, for /health and /metrics."""
        running = sum(not run.is_ended for run in self._runs.values())
        return {
            "kept": len(self._runs) - running,
            "running": running,
            "bytes": self.num_bytes,
            "attached": self.num_attached,
            "conflicts": self.num_conflicts,
            "orphaned": self.num_orphaned,
            "journal": {"state": "off"} if self.journal is None else self.journal.report(),
        }

    async def replay(self, key: RetryKey, begin: BeginRun) -> ResumableStream:
        """Return a reader of this key's run; start a run if the key has none. Raises ApiError."""
        run = self._runs.get(key.name)
        if run is None:
            run = await self._begin(key, begin)
        else:
            self._check_same(run, key)
            self._runs.move_to_end(key.name)
            self.num_attached += 1
            await self._wait_started(run)
        if self.journal is not None:
            await self.journal.synced()
        return self._read(run, key)

    async def _begin(self, key: RetryKey, begin: BeginRun) -> IdempotentRequest:
        if key.last_event is not None:
            message = "nothing is kept under this Idempotency-Key; ask again without Last-Event-ID to start anew"
            raise ApiError(409, message, code="nothing_to_resume", param="Last-Event-ID")
        self._check_running(key.tenant)
        self.start_sweeping()
        run = IdempotentRequest(key)
        self._put(run)
        self._make_room()
        try:
            started = await begin(run)
        except BaseException as error:
            self._drop(run)
            run.started.set_exception(error if isinstance(error, ApiError) else draining_error())
            run.started.exception()  # mark the exception as retrieved: there may be no waiter
            raise
        self.start(run, started)
        return run

    def has(self, key: RetryKey) -> bool:
        """Return True if the table has a run of this key."""
        return key.name in self._runs

    def announce(self, run: IdempotentRequest, spec: AnswerSpec, request_ids: Sequence[str]) -> None:
        """Write a run and its engine ids to the journal, before the request is submitted."""
        key = run.key
        if self.journal is not None and key.is_lasting:
            began = Began(
                0, key.tenant, key.key, key.body_hash, msgpack.encode(spec), len(request_ids), time.monotonic()
            )
            run.number = self.journal.begin(began, request_ids)

    def give_up(self, key: RetryKey, why: ApiError) -> None:
        """Cancel this key's run if it has not ended. Its readers get `why`."""
        run = self._runs.get(key.name)
        if run is not None and not run.is_ended and run.task is not None:
            run.why = why
            self._drop(run)
            # Cancel in the next iteration: a task cancelled before its start would not inform its readers.
            asyncio.get_running_loop().call_soon(run.task.cancel)

    def start(self, run: IdempotentRequest, started: StartedRun) -> None:
        """Start the task that copies the run's deltas to its log, independent of any connection."""
        run.log = TokenLog(started.num_choices)
        run.started.set_result(started)
        run.task = asyncio.create_task(self._pump(run, started, run.log))

    def keep(self, run: IdempotentRequest) -> None:
        """Add a run of an earlier server process."""
        self.start_sweeping()
        self._put(run)
        if run.is_ended:
            self._make_room()
        else:
            self._await_reader(run)

    async def close(self) -> None:
        """Cancel all runs. Runs in the journal stay open there, for the next server. Idempotent."""
        self._is_closed = True
        if self.journal is not None:
            self.journal.close()
        tasks = [run.task for run in self._runs.values() if run.task is not None]
        tasks += [self._sweeper] if self._sweeper is not None else []
        for run in self._runs.values():
            if run.orphaned is not None:
                run.orphaned.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _check_same(self, run: IdempotentRequest, key: RetryKey) -> None:
        if run.key.body_hash != key.body_hash:
            self.num_conflicts += 1
            message = "this Idempotency-Key was used with another body; a new request needs a new key"
            raise ApiError(409, message, code="idempotency_key_reused", param="Idempotency-Key")

    async def _wait_started(self, run: IdempotentRequest) -> None:
        if run.restore_source is not None:
            restore_source, run.restore_source = run.restore_source, None
            try:
                started = restore_source()
            except BaseException:
                self._drop(run)
                raise
            self.start(run, started)
        await asyncio.shield(run.started)

    def _read(self, run: IdempotentRequest, key: RetryKey) -> ResumableStream:
        assert run.log is not None
        started = run.started.result()
        spec = started.spec
        seen = None if key.last_event is None else Position.parse(key.last_event, len(run.log.choices))
        if seen is not None and not run.log.has_position(seen):
            message = "Last-Event-ID is beyond the end of this stream"
            raise bad_field("Last-Event-ID", message, "invalid_event_id")
        run.num_readers += 1
        if run.orphaned is not None:
            run.orphaned.cancel()
            run.orphaned = None
        encoder = ENCODERS[spec.kind](spec, started.pieces)
        return ResumableStream(run.log, encoder, spec.identity[0], seen, lambda: self._leave(run))

    def _leave(self, run: IdempotentRequest) -> None:
        run.num_readers -= 1
        if run.num_readers == 0 and not run.is_ended:
            self._await_reader(run)

    def _await_reader(self, run: IdempotentRequest) -> None:
        """Cancel the run after orphan_timeout_s without readers: its client may reconnect until then."""
        loop = asyncio.get_running_loop()
        run.orphaned = loop.call_later(self._config.orphan_timeout_s, self._give_up, run)

    def _give_up(self, run: IdempotentRequest) -> None:
        run.orphaned = None
        if run.num_readers == 0 and not run.is_ended and run.task is not None:
            self.num_orphaned += 1
            self._drop(run)
            run.task.cancel()

    async def _pump(self, run: IdempotentRequest, started: StartedRun, log: TokenLog) -> None:
        """Copy all deltas from the source to the TokenLog."""
        failure: ApiError | None = internal_error()
        try:
            async for index, delta in started.source.deltas():
                if delta.finish_reason is not None and self.journal is not None:
                    await self.journal.synced()
                log.add(index, delta)
            failure = None
        except (ApiError, OctavoError) as error:
            failure = from_exception(error)
        except asyncio.CancelledError:
            failure = run.why or draining_error()
        except Exception:  # one failure ends only this run: its readers get an error, the log has the details
            _log.exception("request %s failed", started.spec.identity[0])
        finally:
            with suppress(OctavoError):
                await started.source.close()
            self._end(run, log, failure)

    def _end(self, run: IdempotentRequest, log: TokenLog, failure: ApiError | None) -> None:
        is_kept = self._runs.get(run.key.name) is run
        if is_kept:
            self._count(run, -1)  # counted again below with its new state
        run.ended_at = time.monotonic() if run.ended_at is None else run.ended_at
        run.num_bytes = log.num_bytes
        if is_kept:
            self._count(run, 1)
        if run.orphaned is not None:
            run.orphaned.cancel()
            run.orphaned = None
        if failure is not None and not failure.is_final:
            if failure.code == "engine_unavailable":
                run.number = None  # keep the run in the journal, for a server with a working engine
            self._drop(run)
        log.finish(failure)
        self._make_room()

    def _put(self, run: IdempotentRequest) -> None:
        self._runs[run.key.name] = run
        self._count(run, 1)

    def _count(self, run: IdempotentRequest, sign: int) -> None:
        """Add a run to its tenant's counts (`sign` 1), or subtract it (`sign` -1)."""
        tenant = run.key.tenant
        changes = ((self._num_runs, 1), (self._num_running, int(not run.is_ended)),
                   (self._kept_bytes, run.num_bytes if run.is_ended else 0))  # fmt: skip
        for counter, amount in changes:
            counter[tenant] += sign * amount
            if not counter[tenant]:
                del counter[tenant]

    def _drop(self, run: IdempotentRequest) -> None:
        if self._runs.get(run.key.name) is run:
            del self._runs[run.key.name]
            self._count(run, -1)
        if run.number is not None and self.journal is not None and not self.journal.is_closed:
            self.journal.forget(run.number)

    def _check_running(self, tenant: str) -> None:
        """Refuse another run if its tenant's share of active runs is used up. Raises ApiError."""
        running, most = self._num_running, self._config.max_kept
        if running.total() >= most // 2 and self._shares.free(tenant, running, most) < 1:
            message = (
                f"{running[tenant]} of your requests with an Idempotency-Key go on, and there is no room for another "
                f"(--max-kept-requests is {most}); wait for one to end"
            )
            raise ApiError(429, message, code="too_many_idempotency_keys", retry_after_s=RETRY_FULL_S)

    def _make_room(self) -> None:
        """Drop ended runs beyond the bounds; the tenant that keeps most loses its least recently used run first."""
        config = self._config
        while len(self._runs) > config.max_kept:
            tenants = [tenant for tenant, number in self._num_runs.items() if number > self._num_running[tenant]]
            if not tenants:
                return
            self._drop_oldest(largest_user(self._num_runs, tenants))
        while self._kept_bytes.total() > config.max_kept_bytes:
            self._drop_oldest(largest_user(self._kept_bytes))

    def _drop_oldest(self, tenant: str) -> None:
        self._drop(next(run for run in self._runs.values() if run.is_ended and run.key.tenant == tenant))

    def start_sweeping(self) -> None:
        """Start the task that drops old runs and calls the journal's `tick`, about once a second. Idempotent."""
        if self._sweeper is None and not self._is_closed:
            self._sweeper = asyncio.create_task(self._sweep())

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            oldest = time.monotonic() - self._config.keep_s
            for run in [r for r in self._runs.values() if r.ended_at is not None and r.ended_at < oldest]:
                self._drop(run)
            if self.journal is not None:
                self.journal.tick()
