"""Engine processes as seen by their parent: EngineProcess is one process; EngineSpawner starts one after another.

Owns: starting a process, waiting until it is ready, watching and ending it; what it did at its end; the standby; the
budget of restarts. A process inherits its connection, its heartbeat page and stderr, and reads its config as a line of
JSON from stdin, which the parent keeps open, so that its end shows that the parent has ended.
Does not: decide whether an engine is replaced, or import torch.
Invariants: epochs grow in the order in which engines are returned. Later engines have at least the first's capacity,
so that a request that was admitted once can be admitted again. No process is left after close(). An engine is reported
as stalled only if its deadline has passed, or if it left a call unanswered for ANSWER_S without a new beat. Time in
which this process did not look does not count: after a late look the engine gets the full time again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from octavo.config import Config
from octavo.engine.heartbeat import Beat, HeartbeatPage, Phase, page_file
from octavo.engine.parent import DUMP_SIGNAL
from octavo.errors import EngineDeadError, OctavoError
from octavo.executors.protocol import Capacity
from octavo.frontend.engine_source import EngineDeath
from octavo.frontend.flight_recordings import FlightRecordings
from octavo.frontend.socket_client import Receive, SocketClient
from octavo.restarts import RestartBudget, describe_status

COMMAND = (sys.executable, "-m", "octavo.assembly")
BEGIN_LIMIT_S = 60.0  # time to import
OPEN_LIMIT_S = 600.0  # time to load a model and run the warm-up steps
STOP_TIMEOUT_S = 5.0
LATER_OPEN_S = 120.0  # time for a later engine to open, or OPEN_MARGIN times the first engine's time if that is longer
OPEN_MARGIN = 10.0
STANDBY_DELAY_S = 1.0  # between checks whether the resumed requests, which need the whole machine, have progress
STANDBY_LATEST_S = 10.0  # a standby is opened after this time in any case
STANDBY_PAUSES_S = (1.0, 5.0, 30.0)  # wait before another standby after one died or did not open
KILL_LIMIT_S = 15.0  # time for a killed process to end
DUMP_S = 0.3  # time to write the stacks
LOOK_S = 0.1  # time between two looks at the heartbeat
LATE_S = 0.5  # two looks further apart than this mean that this process, or the machine, was stopped
CONFIRM_S = 0.3  # an overdue beat must stay the newest for this long
ANSWER_S = 5.0  # how long an idle engine may leave a call unanswered

_LOG = logging.getLogger(__name__)


class Watchdog:
    """Finds out whether one engine stalls. Times are seconds on the monotonic clock."""

    def __init__(self, now: float) -> None:
        self._looked_at = now
        self._number = -1  # number of the last beat seen
        self._moved_at = now
        self._overdue_since: float | None = None

    def look(self, now: float, beat: Beat | None, oldest_call_at: float | None) -> str | None:
        """Return a description of the stall, or None. `oldest_call_at` is when the oldest unanswered call was sent."""
        late = now - self._looked_at
        self._looked_at = now
        number = 0 if beat is None else beat.number
        if number != self._number or late > LATE_S:
            self._number, self._moved_at, self._overdue_since = number, now, None
            return None
        if beat is not None and beat.deadline is not None:
            return self._judge_deadline(now, beat, beat.deadline)
        since = self._moved_at if oldest_call_at is None else max(oldest_call_at, self._moved_at)
        if oldest_call_at is not None and now - since > ANSWER_S:
            return f"a call has been without an answer for {now - oldest_call_at:.1f} s"
        return None

    def _judge_deadline(self, now: float, beat: Beat, deadline: float) -> str | None:
        if now <= deadline:
            return None
        if self._overdue_since is None:
            self._overdue_since = now
        if now - self._overdue_since < CONFIRM_S:
            return None
        still_s, late_s = now - self._moved_at, now - deadline
        return f"{beat.where}: nothing has moved for {still_s:.1f} s, the limit was {late_s:.1f} s ago"


class EngineProcess:
    """A running engine process: its `client`, its `capacity`, its heartbeat's `page`, and its recorder's `flight`."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        page: HeartbeatPage,
        client: SocketClient,
        flight: FlightRecordings | None = None,
    ) -> None:
        self.capacity: Capacity
        self.page = page
        self.client = client
        self.flight = flight
        self._process = process

    @classmethod
    async def start(
        cls,
        config: Config,
        *,
        epoch: int = 1,
        command: Sequence[str] = COMMAND,
        receive: Receive,
        open_limit_s: float = OPEN_LIMIT_S,
    ) -> EngineProcess:
        """Start an engine and wait until it is ready. Raises the error of its opening, or EngineDeadError.

        `receive` is called with its events.
        """
        ours, theirs = socket.socketpair()
        with theirs, page_file() as page_descriptor, contextlib.ExitStack() as undo:  # this may be cancelled anywhere
            undo.callback(ours.close)
            client = await SocketClient.over(ours, epoch, receive)
            undo.pop_all()
            undo.callback(client.abandon)
            page = HeartbeatPage(page_descriptor)
            flight = FlightRecordings.of(config.flight)
            flown = () if flight is None else flight.descriptors
            if flight is not None:
                undo.callback(flight.close)
            process = await asyncio.create_subprocess_exec(
                *command,
                *("--socket", str(theirs.fileno()), "--page", str(page_descriptor), "--epoch", str(epoch)),
                *(("--flight", ",".join(map(str, flown))) if flown else ()),
                stdin=subprocess.PIPE,
                pass_fds=(theirs.fileno(), page_descriptor, *flown),
                start_new_session=True,  # so that the terminal signals only the parent
            )
            undo.pop_all()
        engine = cls(process, page, client, flight)
        try:
            await engine._open(config, open_limit_s)
        except BaseException as error:
            if not isinstance(error, OctavoError):  # after an OctavoError the process ends by itself
                engine.kill()
            await engine.close()
            if isinstance(error, TimeoutError):
                raise EngineDeadError("the engine process did not get ready in time and was killed") from None
            raise
        return engine

    async def _open(self, config: Config, limit_s: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(config) + b"\n")
        async with asyncio.timeout(BEGIN_LIMIT_S):
            await self.client.has_begun.wait()
        try:
            async with asyncio.timeout(limit_s):
                self.capacity = await self.client.ready()
        except EngineDeadError:
            await self._process.wait()
            raise EngineDeadError(f"the engine process ended before it was ready: {self.describe_exit()}") from None

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status; negative for a signal; None while it runs."""
        return self._process.returncode

    def describe_exit(self) -> str:
        """Return how the process ended, in words."""
        status = self._process.returncode
        return "it still runs" if status is None else describe_status(status)

    def kill(self) -> None:
        """Kill the process (SIGKILL)."""
        self._signal(signal.SIGKILL)

    async def dump(self) -> None:
        """Make the process write its threads' stacks to stderr, even if it is stopped or hangs."""
        if self._process.returncode is None:
            self._signal(DUMP_SIGNAL)
            self._signal(signal.SIGCONT)
            await asyncio.sleep(DUMP_S)

    def _signal(self, number: int) -> None:
        """Send a signal with os.kill; subprocess's method may reap the process, so that asyncio misses its status."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    async def kill_and_wait(self) -> None:
        """Kill the process, and wait until all its messages are read; the page stays open. Idempotent."""
        if not await self._killed():
            self.client.abandon()
        await self.client.ended()

    async def _killed(self) -> bool:
        """Kill the process and wait for its end; return False if it hangs in the kernel, on a device."""
        self.kill()
        try:
            async with asyncio.timeout(KILL_LIMIT_S):
                await self._process.wait()
        except TimeoutError:
            _LOG.error("process %d does not end although it was killed; it is left alone", self.pid)
            return False
        return True

    def trouble(self) -> str | None:
        """Return why the engine makes no progress now, None if it is idle or its steps are in time."""
        beat = self.page.beat()
        is_late = beat is not None and beat.deadline is not None and time.monotonic() > beat.deadline
        return "the engine makes no steps" if is_late or not self.client.is_alive else None

    async def watch(self) -> EngineDeath:
        """Wait until the process has ended; if it stalls, write its stacks and kill it. Close its files."""
        watchdog, stall = Watchdog(time.monotonic()), None
        while stall is None and self.client.is_alive and self.returncode is None:
            await self.client.ended(LOOK_S)
            stall = watchdog.look(time.monotonic(), self.page.beat(), self.client.oldest_call_at)
            if stall is not None and self.client.is_alive:
                _LOG.error("the engine (process %d) does not respond: %s; its stacks follow", self.pid, stall)
                await self.dump()
        ended_at = time.monotonic()
        await self.kill_and_wait()
        return self._examine(ended_at, stall)

    def _examine(self, ended_at: float, stall: str | None) -> EngineDeath:
        """Read from the last beat what the engine did when it ended."""
        client, beat = self.client, self.page.beat()
        batch: tuple[str, ...] = ()
        if beat is not None and beat.phase is Phase.STEP:
            batch = self.page.batch(beat.batch) or ()
        elif beat is not None and beat.phase is Phase.COMMANDS:
            batch = client.unanswered  # the engine may have died while it admitted one of them
        where = "before its first step" if beat is None else beat.where
        what = f"{stall or client.failure or self.describe_exit()}, {where}"
        if self.flight is not None:
            self.flight.crashed(what)
        self.close_files()
        return EngineDeath(
            what,
            ended_at,
            batch,
            client.unanswered,
            was_useful=beat is not None and beat.num_committed > 0,
            stalled=stall is not None,
            in_commands=beat is not None and beat.phase is Phase.COMMANDS,
            num_malformed=client.num_malformed,
            num_stale=client.num_stale,
        )

    async def kill_and_close(self) -> None:
        """Kill the process, and close its page and stdin. Idempotent."""
        await self.kill_and_wait()
        self.close_files()

    def close_files(self) -> None:
        """Close the page and stdin of a process that has ended. Idempotent."""
        self.page.close()
        if self.flight is not None:
            self.flight.close()
        if self._process.stdin is not None:
            self._process.stdin.close()

    async def close(self) -> None:
        """Let the engine end its requests and itself; kill it after STOP_TIMEOUT_S. Idempotent."""
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self.client.close()
                await self._process.wait()
        except TimeoutError:
            await self._killed()
        finally:
            self.close_files()


class EngineSpawner:
    """Starts engines with one configuration and command; `receive` is called with their events.

    `epochs` has the numbers of the next engines of all sources.
    """

    is_lasting = True

    def __init__(self, config: Config, command: Sequence[str], receive: Receive, epochs: Iterator[int]) -> None:
        self._config = config
        self._command = tuple(command)
        self._receive = receive
        self.budget = RestartBudget()
        self._epochs = epochs
        self._capacity: Capacity | None = None
        self._open_limit_s = OPEN_LIMIT_S
        self._standby: asyncio.Task[EngineProcess] | None = None  # done once the standby is open
        self._keeping: asyncio.Task[None] | None = None  # opens standbys until one is needed

    @property
    def standby(self) -> EngineProcess | None:
        """The standby, if one is open."""
        task = self._standby
        has_opened = task is not None and task.done() and not task.cancelled() and task.exception() is None
        return task.result() if task is not None and has_opened else None

    async def replace(self, was_useful: bool) -> EngineProcess:
        """Start the next engine after one died. Raises EngineDeadError if too many died before they were useful."""
        while (wait_s := self.budget.ended(time.monotonic(), random.random(), was_useful=was_useful)) is not None:
            await asyncio.sleep(wait_s)
            try:
                return await self.next()
            except (OctavoError, OSError) as error:
                _LOG.error("the engine cannot be started again: %s", error)
                was_useful = False
        raise EngineDeadError(
            f"the engine ended more than {self.budget.max_useless} times within {self.budget.within_s:g} s before it "
            "did a step; see the lines above"
        )

    async def next(self) -> EngineProcess:
        """Return the standby, once it is open, or a new engine. Raises the error of its opening.

        An engine that cannot hold every request of the first one is refused (EngineDeadError).
        """
        if self._keeping is not None:
            self._keeping.cancel()
            self._keeping = None
        standby, self._standby = self._standby, None
        if standby is not None:
            with contextlib.suppress(OctavoError, OSError):
                engine = await standby
                if engine.client.is_alive:
                    return engine
                await engine.kill_and_close()
        return await self._start()

    def prepare(self, is_settled: Callable[[], bool]) -> None:
        """With --standby, open one once `is_settled` returns True, or after STANDBY_LATEST_S; replace it if it dies.

        Weights on a device are not shared between processes, so the next engine there opens after the last has ended.
        """
        is_shared = self._capacity is not None and self._capacity.device == "cpu"
        if self._config.serving.standby and is_shared and self._keeping is None:
            self._keeping = asyncio.create_task(self._keep(is_settled), name="octavo-standby")

    async def close(self) -> None:
        """End the standby, even while it opens. Idempotent."""
        tasks = [task for task in (self._keeping, self._standby) if task is not None]
        self._keeping = self._standby = None
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, EngineProcess):
                await outcome.close()

    async def _start(self) -> EngineProcess:
        started_at = time.monotonic()
        engine = await EngineProcess.start(
            self._config,
            epoch=next(self._epochs),
            command=self._command,
            receive=self._receive,
            open_limit_s=self._open_limit_s,
        )
        if self._capacity is None:
            self._open_limit_s = min(OPEN_LIMIT_S, max(LATER_OPEN_S, OPEN_MARGIN * (time.monotonic() - started_at)))
            self._capacity = engine.capacity
            unset: dict[str, Any] = dict.fromkeys(("kv_cache_bytes", "kv_cache_tokens", "memory_fraction"))
            cache = replace(self._config.cache, num_blocks=engine.capacity.num_blocks[0], **unset)
            self._config = replace(self._config, cache=cache)
        elif lack := engine.capacity.describe_lack(self._capacity):
            await engine.close()
            raise EngineDeadError(f"the new engine cannot replace the former one: {lack}")
        return engine

    async def _keep(self, is_settled: Callable[[], bool]) -> None:
        """Keep a standby open. Requests do not depend on the standby, so a failure only delays the next attempt."""
        latest = time.monotonic() + STANDBY_LATEST_S
        await asyncio.sleep(STANDBY_DELAY_S)
        while not is_settled() and time.monotonic() < latest:
            await asyncio.sleep(STANDBY_DELAY_S)
        num_failures = 0
        while True:
            self._standby = asyncio.create_task(self._start(), name="octavo-opening")
            try:
                engine = await asyncio.shield(self._standby)
                num_failures = 0
                await engine.client.ended()
                _LOG.warning("the standby engine ended (%s)", engine.describe_exit())
                await engine.kill_and_close()
            except (OctavoError, OSError) as error:
                _LOG.warning("the standby engine cannot be opened: %s", error)
            self._standby = None
            await asyncio.sleep(STANDBY_PAUSES_S[min(num_failures, len(STANDBY_PAUSES_S) - 1)])
            num_failures += 1
