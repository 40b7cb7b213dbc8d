"""ToolProcess: jobs done in child processes, each within its time, whatever it was asked.

Owns: the children, the wait for a free one, the time of each job, retrying, counting.
Does not: know what the jobs do.
Invariants: at most `num_processes` children; a child does one job at a time, so that killing it disturbs no other; a
job whose child ended by itself is done once more in a new one; every job ends with a value or a typed error.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from octavo.errors import EngineError, QueueFullError, TooComplexError, ToolUnavailableError
from octavo.tool import wire

COMMAND = (sys.executable, "-m", "octavo.tool")
# What a child inherits: no key of ours, and nothing that says where other things are.
_VARIABLES = frozenset(("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "TZ", "TMPDIR", "SYSTEMROOT"))
_RETRY_START_S = 5.0  # after a child that could not be started, before the next try


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """Bounds of the children and their jobs."""

    num_processes: int = 2
    max_waiting: int = 64
    job_s: float = 2.0
    start_s: float = 20.0
    memory_bytes: int = 1 << 30


@dataclass(slots=True)
class ToolCounters:
    """What happened so far."""

    jobs: int = 0
    refused: int = 0
    kills: int = 0
    deaths: int = 0
    starts: int = 0


class _DeathError(Exception):
    """The child ended, or said what is no answer."""


class _Child:
    """One running tool process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, command: Sequence[str], limits: ToolLimits) -> _Child:
        """Start one and wait until it takes orders. Raises OSError, TimeoutError, _DeathError."""
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
            if message != wire.Ready(wire.VERSION):
                raise _DeathError
        except BaseException:
            await child.kill()
            raise
        return child

    async def ask(self, order: bytes) -> wire.ToParent:
        """Send an order and wait for its answer. Raises _DeathError."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(order)
            await self.process.stdin.drain()
        except (ConnectionError, RuntimeError):
            raise _DeathError from None
        return await self.receive()

    async def receive(self) -> wire.ToParent:
        """The next message. Raises _DeathError."""
        assert self.process.stdout is not None
        try:
            length = wire.length_of(await self.process.stdout.readexactly(wire.LENGTH.size))
            return wire.decode_to_parent(await self.process.stdout.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError, wire.WireError):
            raise _DeathError from None

    async def kill(self) -> None:
        """End it at once, and wait for its end."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        if self.process.stdin is not None:
            self.process.stdin.close()
        await self.process.wait()


class _Slot:
    """A place for one child, started when it is first needed."""

    def __init__(self) -> None:
        self.child: _Child | None = None
        self.restart: asyncio.Task[None] | None = None


class ToolProcess:
    """Does jobs. Lives in one event loop; starts nothing before its first job."""

    def __init__(self, limits: ToolLimits | None = None, command: Sequence[str] = COMMAND) -> None:
        self.limits = limits or ToolLimits()
        self.counters = ToolCounters()
        self._command = command
        self._numbers = itertools.count(1)
        self._slots = [_Slot() for _ in range(self.limits.num_processes)]
        self._free: asyncio.LifoQueue[_Slot] = asyncio.LifoQueue()  # the last one used is warm
        for slot in self._slots:
            self._free.put_nowait(slot)
        self._num_waiting = 0
        self._serving: set[asyncio.Task[object]] = set()
        self._not_before = 0.0  # when a start may be tried again
        self._is_closed = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the children."""
        return [slot.child.process.pid for slot in self._slots if slot.child is not None]

    def statistics(self) -> dict[str, int]:
        """Counters, and how much there is now."""
        return {**asdict(self.counters), "processes": len(self.pids), "waiting": self._num_waiting}

    async def run(self, job: str, argument: wire.Argument, limit_s: float | None = None) -> object:
        """Do a job. `limit_s` is its time once a child has it.

        Raises what the job raises, TooComplexError when it takes too long or too much, QueueFullError, EngineError,
        ToolUnavailableError. When the caller is cancelled, the job ends by itself, within its time.
        """
        limit_s = self.limits.job_s if limit_s is None else limit_s
        number = next(self._numbers)
        order = wire.frame(wire.Order(number, job, limit_s, wire.pack(argument)))
        if self._num_waiting >= self.limits.max_waiting:
            raise QueueFullError(f"{self._num_waiting} large inputs wait already; try again later")
        self._num_waiting += 1
        try:
            slot = await self._free.get()
        finally:
            self._num_waiting -= 1
        if self._is_closed:
            raise ToolUnavailableError("the tool processes were closed")
        task = asyncio.create_task(self._serve(slot, number, order, limit_s))
        self._serving.add(task)
        task.add_done_callback(self._served)
        return await asyncio.shield(task)

    def _served(self, task: asyncio.Task[object]) -> None:
        self._serving.discard(task)
        if not task.cancelled():
            task.exception()  # somebody has it, or nobody waits for it any more

    async def _serve(self, slot: _Slot, number: int, order: bytes, limit_s: float) -> object:
        self.counters.jobs += 1
        try:
            message = await self._answer(slot, order, limit_s)
            if isinstance(message, wire.Ready) or message.number != number:
                await self._lose(slot)
                raise EngineError("a tool process gave the answer to another question")
        finally:
            self._free.put_nowait(slot)
        if isinstance(message, wire.Refusal):
            self.counters.refused += 1
            raise message.error()
        return message.value

    async def _answer(self, slot: _Slot, order: bytes, limit_s: float) -> wire.ToParent:
        deadline: float | None = None
        while True:
            child = await self._child_of(slot)
            is_retry, deadline = deadline is not None, deadline or time.monotonic() + limit_s
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    return await child.ask(order)
            except TimeoutError:
                self.counters.kills += 1
                await self._lose(slot)
                raise TooComplexError(f"this takes longer than {limit_s:g} s to look at") from None
            except _DeathError:
                self.counters.deaths += 1
                await self._lose(slot)
                if is_retry:
                    raise TooComplexError("this takes more than the process that looks at it may use") from None
            except asyncio.CancelledError:  # closing: the child may be in the middle of an answer
                await self._lose(slot, is_final=True)
                raise

    async def _child_of(self, slot: _Slot) -> _Child:
        if slot.restart is not None:
            await slot.restart
            slot.restart = None
        if slot.child is None:
            await self._start(slot)
        assert slot.child is not None
        return slot.child

    async def _start(self, slot: _Slot) -> None:
        if time.monotonic() < self._not_before:
            raise ToolUnavailableError("a tool process could not be started a moment ago")
        try:
            slot.child = await _Child.start(self._command, self.limits)
        except (OSError, TimeoutError, _DeathError) as error:
            self._not_before = time.monotonic() + _RETRY_START_S
            raise ToolUnavailableError(f"a tool process cannot be started ({type(error).__name__})") from None
        self.counters.starts += 1

    async def _lose(self, slot: _Slot, is_final: bool = False) -> None:
        """Kill the slot's child, and start the next before anybody asks for it."""
        child, slot.child = slot.child, None
        if child is not None:
            await child.kill()
        if not is_final and not self._is_closed:
            slot.restart = asyncio.create_task(self._restart(slot))

    async def _restart(self, slot: _Slot) -> None:
        with contextlib.suppress(ToolUnavailableError):  # the next job tries again, and tells
            await self._start(slot)

    async def close(self) -> None:
        """End the children; open jobs fail. Idempotent."""
        self._is_closed = True
        tasks = [*self._serving, *(slot.restart for slot in self._slots if slot.restart is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for slot in self._slots:
            await self._lose(slot, is_final=True)
