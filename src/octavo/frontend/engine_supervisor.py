"""EngineSupervisor: one EngineClient over successive engine processes, and the Watchdog that finds stalled ones.

Owns: which engine is current; killing an engine that stalls; the change to the next engine; `pause` and `drain`, which
later engines must follow too. Does not: start processes (engine_process), or keep requests (open_requests).
Invariants: while requests are open, an engine runs or is being started. An engine is dead before the next one begins.
An engine is reported as stalled only if its deadline has passed, or if it left a call unanswered for ANSWER_S without a
new beat. Time in which this process did not look does not count: after a late look the engine gets the full time again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from enum import Enum
from typing import TypeVar, cast

from octavo.config import Config
from octavo.core.plan import Events
from octavo.core.request import FinishReason, Request
from octavo.engine.client import Accepted, Verb
from octavo.engine.heartbeat import Beat, Phase
from octavo.errors import EngineDeadError, QueueFullError
from octavo.executors.protocol import Capacity
from octavo.frontend.engine_process import COMMAND, EngineProcess, EngineSpawner
from octavo.frontend.open_request import OpenRequest
from octavo.frontend.open_requests import LedgerObserver, OpenRequests
from octavo.frontend.socket_client import SocketClient

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")
MAX_GAPS = 256  # recoveries whose seconds are in the report
LOOK_S = 0.1  # time between two looks at the heartbeat
LATE_S = 0.5  # two looks further apart than this mean that this process, or the machine, was stopped
CONFIRM_S = 0.3  # an overdue beat must stay the newest for this long
ANSWER_S = 5.0  # how long an idle engine may leave a call unanswered


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
        return (
            f"{beat.phase.name.lower()} {beat.step}: nothing has moved for {now - self._moved_at:.1f} s, the limit was "
            f"{now - deadline:.1f} s ago"
        )


class EngineState(Enum):
    """The state of the current engine."""

    STARTING = "starting"
    READY = "ready"
    RECOVERING = "recovering"
    FAILED = "failed"


class EngineSupervisor:
    """Restarts an engine that dies or stalls, and resumes its requests. Made by start(), for one event loop.

    `failed` is set when no other engine will be started; `failure` is the reason. `capacity` is the first engine's;
    every later engine has at least that capacity.
    """

    def __init__(self, config: Config, command: Sequence[str], observer: LedgerObserver | None) -> None:
        self.capacity: Capacity
        self.state = EngineState.STARTING
        self.failed = asyncio.Event()
        self.failure = ""
        self.num_restarts = 0
        self.num_stalls = 0
        self.requests = OpenRequests(observer=observer)
        self.outputs, self.cancel = self.requests.outputs, self.requests.cancel
        self.spawner = EngineSpawner(config, command, self._receive)
        self._has_standby = config.serving.standby
        self._engine: EngineProcess
        self._running: asyncio.Task[None] | None = None
        self._killed = ""  # the reason, while the engine is being killed on purpose
        self._died_at: float | None = None  # when the engine died, until a request gets a token again
        self._gaps: deque[float] = deque(maxlen=MAX_GAPS)
        self._orders: dict[Verb, bool] = {}  # pause, drain -> True if the order was sent to the current engine
        self._num_malformed = self._num_stale = 0  # frames of engines that ended
        self._is_closing = False

    @classmethod
    async def start(
        cls, config: Config, observer: LedgerObserver | None = None, command: Sequence[str] = COMMAND
    ) -> EngineSupervisor:
        """Start the first engine. Raises the error of its opening, or EngineDeadError, and leaves no process then."""
        supervisor = cls(config, command, observer)
        engine = await supervisor.spawner.next()
        supervisor.capacity = engine.capacity
        supervisor._begin(engine)
        supervisor._running = asyncio.create_task(supervisor._run(), name="octavo-supervisor")
        return supervisor

    @property
    def epoch(self) -> int:
        """The number of the current engine, or of the last one."""
        return self.requests.epoch

    @property
    def processes(self) -> dict[str, int]:
        """The pids of the current engine, or of the last one, and of the standby, by role."""
        standby = self.spawner.standby
        return {"engine": self._engine.pid} | ({"standby": standby.pid} if standby is not None else {})

    def trouble(self) -> str | None:
        """Return why the engine makes no progress now, None if it is idle or its steps are in time."""
        if self.state is not EngineState.READY:
            return "the engine failed" if self.state is EngineState.FAILED else "the engine is being restarted"
        beat = self._engine.page.beat()
        is_late = beat is not None and beat.deadline is not None and time.monotonic() > beat.deadline
        return "the engine makes no steps" if is_late or not self._engine.client.is_alive else None

    def report(self) -> dict[str, object]:
        """Return the state, and counts since the start.

        A gap is the time from an engine's end to the next token, or to the next engine if no request is open.
        """
        rejections, client = self.requests.rejections, self._engine.client
        is_current = self.requests.engine is client  # otherwise the sums already include its dropped frames
        return {
            "state": self.state.value,
            "epoch": self.epoch,
            "restarts": self.num_restarts,
            "open_requests": len(self.requests),
            "unread_requests": self.requests.num_unread,
            "resumed_requests": self.requests.num_resumed,
            "stalls": self.num_stalls,
            "suspects_failed": self.requests.num_failed_suspects,
            "dropped_frames": {
                "malformed": self._num_malformed + client.num_malformed * is_current,
                "stale": self._num_stale + client.num_stale * is_current + rejections.stale_epochs,
            },
            "dropped_ids": {name: getattr(rejections, name) for name in ("duplicates", "gaps", "late", "unknown")},
            "recovery_gaps_s": [round(gap, 3) for gap in self._gaps],
            "has_standby": self.spawner.standby is not None and self.spawner.standby.client.is_alive,
        }

    def kill(self, why: str) -> None:
        """Kill the engine's process on purpose: no request becomes a suspect. Do nothing if there is no engine."""
        if self.state is EngineState.READY:
            self._killed = why
            self._engine.kill()

    # --- EngineClient

    async def submit(self, request: Request) -> Accepted:
        """Submit a request; waits while there is no engine. Raises RequestError, EngineDeadError."""
        self._check_usable()
        if "drain" in self._orders:
            raise QueueFullError("the engine is draining and takes no new requests; try another, or later")
        return await self.requests.submit(request)

    async def statistics(self) -> Mapping[str, object]:
        """Return counters and gauges of the current engine, since it began. Raises EngineDeadError without one."""
        return cast(Mapping[str, object], await self.control("statistics"))

    async def control(self, verb: Verb, argument: str = "") -> object:
        """See EngineClient. `pause` and `drain` hold for later engines too; a paused one admits no resumed request."""
        if verb == "cancel_all":
            return self.requests.cancel([state.request.request_id for state in self.requests])
        if verb in ("pause", "drain", "resume"):
            self._check_usable()
            if verb == "resume":
                self._orders.clear()
                self._post(verb)
            else:
                self._orders[verb] = False
                self._post_orders()
            return True
        if verb == "explain":
            held = self._explain_held(argument)
            answer = await self._client_or_raise().control(verb, argument) if held is None else held
            return self._with_epochs(answer)
        return await self._client_or_raise().control(verb, argument)

    def restore(self, requests: Iterable[OpenRequest]) -> None:
        """Add the requests of an earlier front end, and resume those that have not ended.

        Raises DuplicateRequestError, EngineDeadError.
        """
        self._check_usable()
        for state in requests:
            self.requests.restore(state)

    async def close(self) -> None:
        """End the standby, then the engine and its requests, then all requests that are still open. Idempotent."""
        if self._is_closing:
            return
        self._is_closing = True
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self.spawner.close()
        await self._engine.close()
        self.requests.end_all(FinishReason.CANCELLED, EngineDeadError("the engine was stopped"))

    # --- one engine after another

    async def _run(self) -> None:
        while self.state is not EngineState.FAILED:
            try:
                stall = await self._watch(self._engine)
                await self._recover(self._engine, stall)
            except Exception as error:  # the shell: without a supervisor no request would be answered
                _LOG.exception("the supervisor of the engine failed")
                self._engine.kill()
                self._fail(f"{type(error).__name__}: {error}")

    async def _watch(self, engine: EngineProcess) -> str:
        """Wait until the engine has ended or stalls; return a description of the stall, or "" if the engine ended."""
        watchdog = Watchdog(time.monotonic())
        while engine.client.is_alive and engine.returncode is None:
            await engine.client.ended(LOOK_S)
            now = time.monotonic()
            if self.requests.is_holding:
                self.requests.expire(now)
            elif self._orders:
                self._post_orders()
            if self._died_at is not None and not self.requests:
                self._note_gap()
            stall = watchdog.look(now, engine.page.beat(), engine.client.oldest_call_at)
            if stall is not None and engine.client.is_alive:
                self.num_stalls += 1
                _LOG.error("the engine (process %d) does not respond: %s; its stacks follow", engine.pid, stall)
                await engine.dump()
                return stall
        return ""

    async def _recover(self, engine: EngineProcess, stall: str) -> None:
        """Kill the engine if it has not ended, record which requests may be the cause, and start another engine."""
        self.state = EngineState.RECOVERING
        self._died_at = self._died_at or time.monotonic()
        await engine.kill_and_wait()
        was_useful = self._examine(engine, self._killed or stall or engine.describe_exit())
        try:
            successor = await self._while_expiring(self.spawner.replace(was_useful))
        except EngineDeadError as error:
            self._fail(str(error))
            return
        self.num_restarts += 1
        self._begin(successor)
        _LOG.warning("epoch %d began with %d open requests", self.epoch, len(self.requests))

    def _examine(self, engine: EngineProcess, what: str) -> bool:
        """Read counts and suspects from a dead engine; return True if it committed a step or was killed on purpose."""
        client, beat = engine.client, engine.page.beat()
        unanswered = [state for name in client.unanswered if (state := self.requests.get_open(name)) is not None]
        # Requests whose grammar was being built when the engine died; a build may crash outside steps.
        batch = tuple(state.request.request_id for state in unanswered if state.request.params.grammar)
        if beat is not None and beat.phase is Phase.STEP:
            batch += engine.page.batch(beat.batch) or ()
        elif beat is not None and beat.phase is Phase.COMMANDS:
            batch = client.unanswered  # the engine may have died while it admitted one of them
        engine.close_files()
        self._num_malformed += client.num_malformed
        self._num_stale += client.num_stale
        where = "before its first step" if beat is None else f"{beat.phase.name.lower()} {beat.step}"
        _LOG.warning("the engine of epoch %d ended (%s), %s, %d in its batch", client.epoch, what, where, len(batch))
        was_killed, self._killed = bool(self._killed), ""
        self.requests.lose_engine(() if was_killed else batch)
        for verb in self._orders:
            self._orders[verb] = False
        return was_killed or (beat is not None and beat.num_committed > 0)

    def _begin(self, engine: EngineProcess) -> None:
        self._engine = engine
        self.state = EngineState.READY
        if "pause" in self._orders:  # first, or a request would be admitted in between
            self._orders["pause"] = True
            self._post("pause")
        if not self.requests.begin_epoch(engine.client):
            self._note_gap()
        self._post_orders()
        if self._has_standby:
            resumed = list(self.requests)
            self.spawner.prepare(lambda: all(state.has_progress or state.end is not None for state in resumed))

    def _receive(self, epoch: int, events: Events) -> None:
        self.requests.accept(epoch, events)
        if self._died_at is not None and events.request_ids and epoch == self.epoch:
            self._note_gap()

    def _note_gap(self) -> None:
        if self._died_at is not None and self.state is EngineState.READY:
            self._gaps.append(time.monotonic() - self._died_at)
            self._died_at = None

    def _fail(self, why: str) -> None:
        self.state = EngineState.FAILED
        self.failure = why
        _LOG.error("the engine is given up: %s", why)
        self.requests.end_all(FinishReason.ERROR, EngineDeadError(why))
        self.failed.set()

    async def _while_expiring(self, awaitable: Awaitable[_T]) -> _T:
        """Await a result; meanwhile end the requests whose deadline or queue timeout passes, as no engine does."""
        task = asyncio.ensure_future(awaitable)
        try:
            while not task.done():
                await asyncio.wait((task,), timeout=LOOK_S)
                self.requests.expire(time.monotonic())
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    # --- orders and explanations

    def _post_orders(self) -> None:
        """Pause or drain the current engine, once all resumed requests have been sent to it."""
        if not self.requests.is_holding:
            for verb, is_posted in tuple(self._orders.items()):
                if not is_posted and self.state is EngineState.READY:
                    self._orders[verb] = True
                    self._post(verb)

    def _post(self, verb: Verb) -> None:
        if self.state is EngineState.READY:
            self._engine.client.post_control(verb)

    def _client_or_raise(self) -> SocketClient:
        self._check_usable()
        if self.state is not EngineState.READY:
            raise EngineDeadError("the engine is being restarted")
        return self._engine.client

    def _check_usable(self) -> None:
        if self._is_closing:
            raise EngineDeadError("the engine was stopped")
        if self.state is EngineState.FAILED:
            raise EngineDeadError(self.failure)

    def _explain_held(self, name: str) -> dict[str, object] | None:
        """Explain an open request that no engine has; return None for any other request."""
        is_ready, state = self.state is EngineState.READY, self.requests.get_open(name)
        if state is None or (is_ready and self.requests.has_engine(name)):
            return None
        why = "the engine is being restarted"
        if is_ready:
            why = "an engine died, and what may have been the cause is tried alone first"
        outputs = sum(len(page.ids) for page in state.pages.values())
        answer = {"id": name, "state": "held", "tenant": state.request.tenant, "num_outputs": outputs}
        return {**answer, "text": f"{name} waits: {why}", "public_text": f"waits: {why}"}

    def _with_epochs(self, answer: object) -> object:
        """Add the engine's epoch, and the epoch of the request's arrival, to an explanation."""
        if not isinstance(answer, dict) or "text" not in answer:
            return answer
        epoch, state = self.epoch, self.requests.get(answer["id"])
        arrived_in = None if state is None else state.epoch
        epochs = {
            "epoch": epoch,
            "begun_in_epoch": arrived_in,
            "num_resumes": None if arrived_in is None else epoch - arrived_in,
        }
        if arrived_in is None or arrived_in == epoch or answer["state"] == "held":
            return answer | epochs
        where = f"it arrived in epoch {arrived_in}" if arrived_in else "it arrived before this server's process began"
        resumed = f"; resumed by the engine of epoch {epoch}, {where}"
        return answer | epochs | {key: f"{answer[key]}{resumed}" for key in ("text", "public_text")}
