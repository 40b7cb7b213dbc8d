"""EngineKeeper: one EngineClient over engine processes that follow each other.

Owns: which engine is in force, the end of one that stands still, the next one, when there shall be none.
Does not: start processes (succession), keep requests (custody), or judge (watchdog, restarts).
Invariants: while requests are open there is an engine, or one on its way, or everybody has been answered; an engine
that was given up is dead before the next one begins.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from enum import Enum
from typing import TypeVar

from octavo.config import Config
from octavo.core.plan import Events
from octavo.core.request import FinishReason, Request
from octavo.engine.client import Accepted, TokenOutput, Verb
from octavo.engine.heartbeat import Phase
from octavo.errors import EngineDeadError, OctavoError, QueueFullError
from octavo.executors.protocol import Capacity
from octavo.frontend.custody import Custody
from octavo.frontend.open_request import OpenRequest
from octavo.frontend.open_requests import LedgerObserver
from octavo.frontend.process import COMMAND, EngineProcess
from octavo.frontend.restarts import RestartBudget
from octavo.frontend.socket_client import SocketClient
from octavo.frontend.succession import Succession
from octavo.frontend.watchdog import LOOK_S, Watchdog

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")
STANDBY_DELAY_S = 1.0  # between looks whether all whom the last engine left have gone on: then the next misfortune
STANDBY_LATEST_S = 10.0  # then they share the machine with the standby that opens
MAX_GAPS = 256  # recoveries of which the report tells the seconds


class KeeperState(Enum):
    """Where the engine stands."""

    STARTING = "starting"
    READY = "ready"
    RECOVERING = "recovering"
    FAILED = "failed"


class EngineKeeper:
    """Keeps an engine running and its requests alive. Made by start(); lives in one event loop.

    `failed` is set when there will be no other engine, `failure` says why. `capacity` is the first engine's, and what
    every later one holds at least.
    """

    def __init__(self, config: Config, command: Sequence[str], observer: LedgerObserver | None) -> None:
        self.capacity: Capacity
        self.state = KeeperState.STARTING
        self.failed = asyncio.Event()
        self.failure = ""
        self.num_restarts = 0
        self.num_stalls = 0
        self._custody = Custody(observer)
        self._succession = Succession(config, command, self._deliver)
        self._has_standby = config.serving.standby
        self._budget = RestartBudget()
        self._engine: EngineProcess
        self._running: asyncio.Task[None] | None = None
        self._killed = ""  # why, when the engine is being killed on purpose
        self._died_at: float | None = None  # since when nobody got a token for want of an engine
        self._gaps: deque[float] = deque(maxlen=MAX_GAPS)
        self._orders: dict[Verb, bool] = {}  # pause, drain: whether the engine in force was told
        self._num_malformed = self._num_stale = 0  # frames of engines that ended
        self._is_closing = False

    @classmethod
    async def start(
        cls, config: Config, *, command: Sequence[str] = COMMAND, observer: LedgerObserver | None = None
    ) -> EngineKeeper:
        """Start the first engine. Raises what kept it from opening, or EngineDeadError; nothing is left then."""
        keeper = cls(config, command, observer)
        engine = await keeper._succession.next()
        keeper.capacity = engine.capacity
        keeper._begin(engine)
        keeper._running = asyncio.create_task(keeper._run(), name="octavo-keeper")
        return keeper

    # --- what people ask

    @property
    def epoch(self) -> int:
        """The number of the engine's life."""
        return self._custody.ledger.epoch

    @property
    def pid(self) -> int:
        """The process of the engine in force, or of the last one."""
        return self._engine.pid

    @property
    def standby_pid(self) -> int | None:
        """The process of the engine that waits to take over, if there is one."""
        return self._succession.standby_pid

    @property
    def num_open(self) -> int:
        """Requests without an end."""
        return len(self._custody.ledger)

    @property
    def is_stepping(self) -> bool:
        """Whether the engine is idle, or its steps come in time."""
        if self.state is not KeeperState.READY or not self._engine.client.is_alive:
            return False
        beat = self._engine.page.beat()
        return beat is None or beat.deadline is None or time.monotonic() <= beat.deadline

    def report(self) -> dict[str, object]:
        """What happened so far. Gaps are seconds from an engine's end to the next token, or engine if none is owed."""
        rejections, client = self._custody.ledger.rejections, self._engine.client
        is_current = self._custody.client is client  # else its frames are in the sums already
        return {
            "state": self.state.value,
            "epoch": self.epoch,
            "restarts": self.num_restarts,
            "open_requests": self.num_open,
            "unread_requests": self._custody.ledger.num_unread,
            "resumed_requests": self._custody.num_resumed,
            "stalls": self.num_stalls,
            "suspects_failed": self._custody.num_convicted,
            "dropped_frames": {
                "malformed": self._num_malformed + client.num_malformed * is_current,
                "stale": self._num_stale + client.num_stale * is_current + rejections.stale_epochs,
            },
            "dropped_ids": {name: getattr(rejections, name) for name in ("duplicates", "gaps", "late", "unknown")},
            "recovery_gaps_s": [round(gap, 3) for gap in self._gaps],
            "has_standby": self._succession.has_standby,
        }

    def kill(self, why: str) -> None:
        """End the engine's process at once, on purpose: no request is suspected for it. Nothing where there is none."""
        if self.state is KeeperState.READY:
            self._killed = why
            self._engine.kill()

    # --- EngineClient

    async def submit(self, request: Request) -> Accepted:
        """Hand a request over; waits while there is no engine. Raises RequestError, EngineDeadError."""
        self._check_usable()
        if "drain" in self._orders:
            raise QueueFullError("the engine is draining and takes no new requests; try another, or later")
        return await self._custody.submit(request)

    def outputs(self, request_id: str, final_only: bool = False) -> AsyncIterator[TokenOutput]:
        """Outputs of an accepted request, ending after the final one, across engines."""
        return self._custody.outputs(request_id, final_only)

    async def cancel(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.CANCELLED, choice: int | None = None
    ) -> None:
        """End requests, or one choice of them, in whatever state; at once where no engine has them."""
        self._custody.cancel(request_ids, reason, choice)

    async def statistics(self) -> Mapping[str, object]:
        """Counters and gauges of the engine in force, since it began. Raises EngineDeadError while there is none."""
        return await self._client_or_raise().statistics()

    async def control(self, verb: Verb, argument: str = "") -> object:
        """See EngineClient. What is paused or draining stays so in later engines; those paused admit nobody that they
        resume either."""
        ledger = self._custody.ledger
        if verb == "cancel_all":
            return self._custody.cancel([entry.request.request_id for entry in ledger], FinishReason.CANCELLED)
        if verb in ("pause", "drain", "resume"):
            self._check_usable()
            if verb == "resume":
                self._orders.clear()
                self._tell(verb)
            else:
                self._orders[verb] = False
                self._tell_orders()
            return True
        if verb == "explain":
            here = self._custody.explain(argument, self.state is KeeperState.READY)
            answer = await self._client_or_raise().control(verb, argument) if here is None else here
            return self._custody.with_epochs(answer)
        return await self._client_or_raise().control(verb, argument)

    def restore(self, entries: Iterable[OpenRequest]) -> None:
        """Put back requests of an earlier front end, ended ones too, and resume the others.

        Raises DuplicateRequestError, EngineDeadError.
        """
        self._check_usable()
        self._custody.restore(entries)

    async def close(self) -> None:
        """Let the engine answer everyone, end it and its standby. Idempotent."""
        if self._is_closing:
            return
        self._is_closing = True
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self._succession.close()
        await self._engine.close()
        self._custody.end_all(FinishReason.CANCELLED, EngineDeadError("the engine was stopped"))

    # --- an engine's life

    async def _run(self) -> None:
        while self.state is not KeeperState.FAILED:
            try:
                stall = await self._watch(self._engine)
                await self._recover(self._engine, stall)
            except Exception as error:  # the shell: without a keeper nobody would be answered
                _LOG.exception("the keeper of the engine failed")
                self._engine.kill()
                self._fail(f"{type(error).__name__}: {error}")

    async def _watch(self, engine: EngineProcess) -> str:
        """Wait until the engine has ended, or stands still: then say how."""
        watchdog = Watchdog(time.monotonic())
        while engine.client.is_alive and engine.returncode is None:
            await engine.client.ended(LOOK_S)
            now = time.monotonic()
            if self._custody.is_holding:
                self._custody.expire(now)
            elif self._orders:
                self._tell_orders()
            if self._died_at is not None and not self._custody.ledger:
                self._note_gap()
            stall = watchdog.look(now, engine.page.beat(), engine.client.asked_at)
            if stall is not None and engine.client.is_alive:
                self.num_stalls += 1
                _LOG.error("the engine (process %d) stands still: %s; its stacks follow", engine.pid, stall)
                await engine.dump()
                return stall
        return ""

    async def _recover(self, engine: EngineProcess, stall: str) -> None:
        """The engine ended, or has to: find out whose doing it may be, and go on with another."""
        self.state = KeeperState.RECOVERING
        self._died_at = self._died_at or time.monotonic()
        await engine.kill_and_wait()
        was_useful = self._examine(engine, self._killed or stall or engine.describe_exit())
        while (wait := self._budget.ended(time.monotonic(), random.random(), was_useful=was_useful)) is not None:
            try:
                await self._while_expiring(asyncio.sleep(wait))
                successor = await self._while_expiring(self._succession.next())
            except (OctavoError, OSError) as error:
                _LOG.error("the engine cannot be started again: %s", error)
                was_useful = False
                continue
            self.num_restarts += 1
            self._begin(successor)
            _LOG.warning("epoch %d began with %d open requests", self.epoch, self.num_open)
            return
        self._fail(
            f"the engine ended more than {self._budget.most} times within {self._budget.within_s:g} s before it did a "
            "step; see the lines above"
        )

    def _examine(self, engine: EngineProcess, what: str) -> bool:
        """Take from a dead engine what it left: counts, suspects. Whether it had done a step."""
        client, beat = engine.client, engine.page.beat()
        batch = tuple(name for name in client.unanswered if self._custody.has_grammar(name))  # built beside the steps
        if beat is not None and beat.phase is Phase.STEP:
            batch += engine.page.batch(beat.batch) or ()
        elif beat is not None and beat.phase is Phase.COMMANDS:
            batch = client.unanswered  # it died of taking one of them in
        engine.let_go()
        self._num_malformed += client.num_malformed
        self._num_stale += client.num_stale
        where = "before its first step" if beat is None else f"{beat.phase.name.lower()} {beat.step}"
        _LOG.warning("the engine of epoch %d ended (%s), %s, %d in its batch", client.epoch, what, where, len(batch))
        was_killed, self._killed = bool(self._killed), ""
        self._custody.bereave(() if was_killed else batch)
        for verb in self._orders:
            self._orders[verb] = False
        return was_killed or (beat is not None and beat.num_committed > 0)

    def _begin(self, engine: EngineProcess) -> None:
        self._engine = engine
        self.state = KeeperState.READY
        if "pause" in self._orders:  # first, or somebody would be admitted in between
            self._orders["pause"] = True
            self._tell("pause")
        if not self._custody.begin(engine.client):
            self._note_gap()
        self._tell_orders()
        if self._has_standby:
            heirs = list(self._custody.ledger)
            self._prepare_later(engine, heirs, asyncio.get_running_loop().time() + STANDBY_LATEST_S)

    def _prepare_later(self, engine: EngineProcess, heirs: list[OpenRequest], latest: float) -> None:
        """Open a standby once the heirs of the last engine have gone on: they need the whole machine first."""
        loop = asyncio.get_running_loop()

        def look() -> None:
            if self._engine is not engine or self.state is not KeeperState.READY or self._is_closing:
                return
            waiting = [heir for heir in heirs if not heir.has_progress and heir.end is None]
            if waiting and loop.time() < latest:
                self._prepare_later(engine, waiting, latest)
            else:
                self._succession.prepare()

        loop.call_later(STANDBY_DELAY_S, look)

    def _deliver(self, epoch: int, events: Events) -> None:
        self._custody.deliver(epoch, events)
        if self._died_at is not None and events.request_ids and epoch == self.epoch:
            self._note_gap()

    def _note_gap(self) -> None:
        if self._died_at is not None and self.state is KeeperState.READY:
            self._gaps.append(time.monotonic() - self._died_at)
            self._died_at = None

    def _fail(self, why: str) -> None:
        self.state = KeeperState.FAILED
        self.failure = why
        _LOG.error("the engine is given up: %s", why)
        self._custody.end_all(FinishReason.ERROR, EngineDeadError(why))
        self.failed.set()

    async def _while_expiring(self, awaitable: Awaitable[_T]) -> _T:
        """Wait, and meanwhile end the requests whose time is over: there is no engine that would."""
        task = asyncio.ensure_future(awaitable)
        try:
            while not task.done():
                await asyncio.wait((task,), timeout=LOOK_S)
                self._custody.expire(time.monotonic())
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    # --- orders

    def _tell_orders(self) -> None:
        """Pause or drain the engine in force; not before it has everybody that it resumes."""
        if self.state is KeeperState.READY and not self._custody.is_holding:
            for verb, is_told in tuple(self._orders.items()):
                if not is_told:
                    self._orders[verb] = True
                    self._tell(verb)

    def _tell(self, verb: Verb) -> None:
        if self.state is KeeperState.READY:
            self._engine.client.post_order(verb)

    def _client_or_raise(self) -> SocketClient:
        self._check_usable()
        if self.state is not KeeperState.READY:
            raise EngineDeadError("the engine is being restarted")
        return self._engine.client

    def _check_usable(self) -> None:
        if self._is_closing:
            raise EngineDeadError("the engine was stopped")
        if self.state is KeeperState.FAILED:
            raise EngineDeadError(self.failure)
