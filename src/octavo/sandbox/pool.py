"""Sandbox: run jobs in child processes. No input makes a job exceed its time limit.

Owns: the children, the queue of jobs and its order, each job's time limit, retries, and counters.
Does not: know what the jobs do.
Invariants: there are at most `num_processes` children. A child runs one job at a time, so killing it affects no other
job. A job whose child ended by itself is retried once in a new child. Every job ends with a value or a typed error.
With three children, one is reserved for rendering templates, and no tenant uses all children that are available to a
kind of job. Tenants with waiting jobs are served in turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field

from octavo.errors import EngineError, OctavoError, QueueFullError, TooComplexError, ToolUnavailableError
from octavo.sandbox import wire

COMMAND = (sys.executable, "-m", "octavo.sandbox.child")
# The environment variables that a child inherits: no keys, and no addresses of other services.
_VARIABLES = frozenset(("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "TZ", "TMPDIR", "SYSTEMROOT"))
_RETRY_START_S = 5.0  # from a failed start of a child to the next attempt
RENDER = "render_chat"  # the job for which one child is reserved
# The tenant of new jobs, by which the queue alternates; set once for each request.
current_tenant: ContextVar[str] = ContextVar("octavo_sandbox_tenant", default="")


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Limits of the children and of jobs. `max_waiting*` is per tenant; all together have four times as much."""

    num_processes: int = 3
    max_waiting: int = 1024
    max_waiting_bytes: int = 64 << 20
    job_s: float = 2.0
    start_s: float = 20.0
    memory_bytes: int = 1 << 30


@dataclass(slots=True)
class SandboxCounters:
    """Counts of events since the start."""

    jobs: int = 0
    refused: int = 0
    kills: int = 0
    deaths: int = 0
    starts: int = 0


class _ChildDiedError(Exception):
    """The child ended, or sent something that is not an answer."""


class _Child:
    """One running sandbox process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, command: Sequence[str], limits: SandboxLimits) -> _Child:
        """Start a child and wait until it is ready for orders. Raises OSError, TimeoutError, _ChildDiedError."""
        environment = {name: value for name, value in os.environ.items() if name in _VARIABLES}
        process = await asyncio.create_subprocess_exec(
            *command,
            "--memory-bytes",
            str(limits.memory_bytes),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment | {"LC_ALL": "C.UTF-8"},
            start_new_session=True,
        )
        child = cls(process)
        try:
            async with asyncio.timeout(limits.start_s):
                message = await child.receive()
            if message != wire.WorkerReady(wire.VERSION):
                raise _ChildDiedError
        except BaseException:
            await child.kill()
            raise
        return child

    async def call(self, order: bytes) -> wire.ToParent:
        """Send an order and wait for its answer. Raises _ChildDiedError."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(order)
            await self.process.stdin.drain()
        except (ConnectionError, RuntimeError):
            raise _ChildDiedError from None
        return await self.receive()

    async def receive(self) -> wire.ToParent:
        """Return the next message. Raises _ChildDiedError."""
        assert self.process.stdout is not None
        try:
            length = wire.length_of(await self.process.stdout.readexactly(wire.LENGTH.size))
            return wire.decode_to_parent(await self.process.stdout.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError, wire.FrameError):
            raise _ChildDiedError from None

    async def kill(self) -> None:
        """Kill the process and wait until it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        if self.process.stdin is not None:
            self.process.stdin.close()
        await self.process.wait()


class _Slot:
    """A place for one child. `start` is the task that starts the child. A busy slot belongs to the job that it runs."""

    def __init__(self) -> None:
        self.child: _Child | None = None
        self.start: asyncio.Task[None] | None = None
        self.is_busy = False


@dataclass(slots=True, eq=False)
class _Job:
    """One job, from the queue to its answer."""

    number: int
    tenant: str
    is_render: bool
    order: bytes
    limit_s: float
    done: asyncio.Future[object] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def end(self, value: object, error: BaseException | None = None) -> None:
        """Set the caller's value or error, unless the caller was cancelled."""
        if self.done.done():
            return
        if error is None:
            self.done.set_result(value)
        else:
            self.done.set_exception(error)


class _JobQueue:
    """Waiting jobs; tenants are served in turn. Bounded per tenant and in total."""

    def __init__(self, limits: SandboxLimits) -> None:
        self._limits = limits
        self._waiting: OrderedDict[tuple[str, bool], deque[_Job]] = OrderedDict()
        self._num_bytes: Counter[str] = Counter()  # bytes of waiting jobs, by tenant
        self._running: list[_Job] = []

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, job: _Job) -> None:
        """Add a job. Raises QueueFullError."""
        num = sum(len(jobs) for (tenant, _), jobs in self._waiting.items() if tenant == job.tenant)
        num_bytes, size = self._num_bytes[job.tenant], len(job.order)
        is_full = num >= self._limits.max_waiting or len(self) >= 4 * self._limits.max_waiting
        max_bytes = self._limits.max_waiting_bytes
        if is_full or (num > 0 and num_bytes + size > max_bytes) or self._num_bytes.total() > 4 * max_bytes:
            raise QueueFullError(f"{num} inputs of {num_bytes} bytes are already waiting; try again later")
        self._num_bytes[job.tenant] += size
        self._waiting.setdefault((job.tenant, job.is_render), deque()).append(job)

    def take(self) -> _Job | None:
        """Return the next job that may run now, and count it as running."""
        for key in list(self._waiting):
            jobs = self._waiting[key]
            while jobs and jobs[0].done.done():  # the job's caller was cancelled
                self._dequeued(jobs.popleft())
            if jobs and self._can_run(*key):
                job = self._dequeued(jobs.popleft())
                self._running.append(job)
                if jobs:
                    self._waiting.move_to_end(key)
                else:
                    del self._waiting[key]
                return job
            if not jobs:
                del self._waiting[key]
        return None

    def _dequeued(self, job: _Job) -> _Job:
        self._num_bytes[job.tenant] -= len(job.order)
        if not self._num_bytes[job.tenant]:
            del self._num_bytes[job.tenant]
        return job

    def _can_run(self, tenant: str, is_render: bool) -> bool:
        """Return True if a job may run. One child is reserved for renders, and one of each kind for other tenants.
        Jobs without a tenant have no bound per tenant.
        """
        unreserved = self._limits.num_processes - 1
        own = [job.is_render for job in self._running if job.tenant == tenant and tenant]
        checks = [job for job in self._running if not job.is_render]
        if is_render:
            return len(own) < max(1, unreserved)
        return (
            len(checks) < max(1, unreserved)
            and own.count(False) < max(1, unreserved - 1)
            and len(own) < max(1, unreserved)
        )

    def finish(self, job: _Job) -> None:
        """Remove a job from the running ones."""
        self._running.remove(job)

    def clear(self, error: OctavoError) -> None:
        """Fail every waiting job."""
        jobs = [job for waiting in self._waiting.values() for job in waiting]
        self._waiting.clear()
        self._num_bytes.clear()
        for job in jobs:
            job.end(None, error)


class Sandbox:
    """Runs jobs in child processes. Belongs to one event loop; starts no child before the first job."""

    def __init__(self, limits: SandboxLimits | None = None, command: Sequence[str] = COMMAND) -> None:
        self.limits = limits or SandboxLimits()
        self.counters = SandboxCounters()
        self._command = command
        self._numbers = itertools.count(1)
        self._slots = [_Slot() for _ in range(self.limits.num_processes)]
        self._idle: list[_Slot] = []  # children without a job; the most recently used (warm) child is last
        self._queue = _JobQueue(self.limits)
        self._serving: set[asyncio.Task[None]] = set()
        self._not_before = 0.0  # the earliest time of the next attempt to start a child
        self._is_closed = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the children."""
        return [slot.child.process.pid for slot in self._slots if slot.child is not None]

    def statistics(self) -> dict[str, int]:
        """Return the counters, with the current numbers of children and waiting jobs."""
        return {**asdict(self.counters), "processes": len(self.pids), "waiting": len(self._queue)}

    async def run(self, job: str, argument: wire.Argument, limit_s: float | None = None) -> object:
        """Run a job for the current tenant. `limit_s` bounds the job's time in a child.

        Raises the job's errors, TooComplexError if the job takes too much time or memory, QueueFullError, EngineError,
        ToolUnavailableError. If the caller is cancelled, a running job still ends within its time limit.
        """
        limit_s = self.limits.job_s if limit_s is None else limit_s
        number = next(self._numbers)
        order = wire.frame(wire.Order(number, job, limit_s, wire.pack(argument)))
        if self._is_closed:
            raise ToolUnavailableError("the sandbox processes were closed")
        entry = _Job(number, current_tenant.get(), job == RENDER, order, limit_s)
        self._queue.put(entry)
        self._dispatch()
        return await entry.done

    def _dispatch(self) -> None:
        """Assign waiting jobs to idle children, and start one more child if jobs still wait."""
        while self._idle and (job := self._queue.take()) is not None:
            slot = self._idle.pop()
            slot.is_busy = True
            self._serving.add(task := asyncio.create_task(self._serve(slot, job)))
            task.add_done_callback(self._serving.discard)
        if self._idle or not len(self._queue) or any(slot.start is not None for slot in self._slots):
            return
        unused = next((slot for slot in self._slots if slot.child is None and not slot.is_busy), None)
        if unused is None:
            return
        if time.monotonic() >= self._not_before:
            unused.start = asyncio.create_task(self._start(unused))
            unused.start.add_done_callback(lambda _: self._started(unused))
        elif not self.pids:
            self._queue.clear(ToolUnavailableError("a sandbox process could not be started a moment ago"))

    async def _start(self, slot: _Slot) -> None:
        """Start the slot's child; if the start fails and there is no other child, fail the waiting jobs."""
        try:
            slot.child = await _Child.start(self._command, self.limits)
        except (OSError, TimeoutError, _ChildDiedError) as error:
            self._not_before = time.monotonic() + _RETRY_START_S
            if not self.pids:
                message = f"a sandbox process cannot be started ({type(error).__name__})"
                self._queue.clear(ToolUnavailableError(message))
        else:
            self.counters.starts += 1

    def _started(self, slot: _Slot) -> None:
        slot.start = None
        if slot.child is not None:
            self._idle.append(slot)
        if not self._is_closed:
            self._dispatch()

    async def _serve(self, slot: _Slot, job: _Job) -> None:
        """Run one job, then release its slot."""
        self.counters.jobs += 1
        try:
            message = await self._answer(slot, job)
            if isinstance(message, wire.WorkerReady) or message.number != job.number:
                await self._lose(slot)
                raise EngineError("a sandbox process answered another job")
            if isinstance(message, wire.Refusal):
                self.counters.refused += 1
                raise message.error()
            job.end(message.value)
        except OctavoError as error:
            job.end(None, error)
        except asyncio.CancelledError:
            job.end(None, ToolUnavailableError("the sandbox processes were closed"))
            raise
        finally:
            self._queue.finish(job)
            self._release(slot)

    def _release(self, slot: _Slot) -> None:
        slot.is_busy = False
        if self._is_closed:
            return
        if slot.child is not None:
            self._idle.append(slot)
        elif time.monotonic() >= self._not_before:  # start the next child before a job needs it
            slot.start = asyncio.create_task(self._start(slot))
            slot.start.add_done_callback(lambda _: self._started(slot))
        self._dispatch()

    async def _answer(self, slot: _Slot, job: _Job) -> wire.ToParent:
        deadline = time.monotonic() + job.limit_s
        for is_retry in (False, True):
            if slot.child is None:
                await self._start(slot)
            if slot.child is None:
                raise ToolUnavailableError("a sandbox process cannot be started again")
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    return await slot.child.call(job.order)
            except TimeoutError:
                self.counters.kills += 1
                await self._lose(slot)
                raise TooComplexError(f"this takes longer than {job.limit_s:g} s to check") from None
            except _ChildDiedError:
                self.counters.deaths += 1
                await self._lose(slot)
                if is_retry:
                    break
            except asyncio.CancelledError:  # the sandbox closes: the child may be in the middle of an answer
                await self._lose(slot)
                raise
        raise TooComplexError("this takes more memory or processor time than is allowed")

    async def _lose(self, slot: _Slot) -> None:
        """Kill the slot's child."""
        child, slot.child = slot.child, None
        if child is not None:
            await child.kill()

    async def close(self) -> None:
        """End the children, and fail open jobs. Idempotent."""
        self._is_closed = True
        self._queue.clear(ToolUnavailableError("the sandbox processes were closed"))
        tasks = [*self._serving, *(slot.start for slot in self._slots if slot.start is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for slot in self._slots:
            await self._lose(slot)
