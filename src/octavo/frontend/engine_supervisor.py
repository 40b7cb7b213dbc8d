"""EngineSupervisor: one EngineClient over the engines of one or more replicas, each of which is replaced when it ends.

Owns: which replicas there are and their states; adding, draining and removing them; `pause` and `drain`, which later
engines must follow too; which engine answers a verb. Does not: start processes (engine_process), keep requests
(open_requests), choose engines (an EngineRouter does), decide how many replicas there are, or know other machines.
Invariants: while requests are open, every replica that is not drained has an engine or one is being started. An engine
is dead before the next one of its replica begins. A replica gets no request before it is ready, and is not stopped
while it has one. The first engine's capacity is what every later engine holds, and its tokenizer is theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from octavo.config import Config
from octavo.core.plan import EventKind, Events
from octavo.core.request import FinishReason, Request
from octavo.engine.client import Accepted, Verb
from octavo.errors import CapacityError, ConfigError, EngineDeadError, QueueFullError
from octavo.executors.protocol import Capacity
from octavo.frontend.engine_process import COMMAND, LOOK_S, EngineSpawner
from octavo.frontend.engine_source import EngineDeath, EngineReplica, EngineSource, EngineState, RunningEngine
from octavo.frontend.flight_recordings import FlightRecordings, find_miss
from octavo.frontend.open_request import EngineRouter, LedgerObserver, OpenRequest
from octavo.frontend.open_requests import OpenRequests
from octavo.media.item import MediaItem
from octavo.observe.merging import merge_answers

_LOG = logging.getLogger(__name__)
MAX_GAPS = 256  # recoveries whose seconds are in the report


class EngineSupervisor:
    """Restarts engines that die or stall, and resumes their requests. For one event loop.

    `failed` is set when no engine runs and none will be started, unless `awaits_replicas` is set: another may be added.
    `failure` is the reason. `on_capacity` is called with the slots and KV tokens of all ready replicas when they
    change. `term` is greater than that of every former supervisor of the same engines.
    """

    def __init__(
        self,
        observer: LedgerObserver | None = None,
        *,
        router: EngineRouter | None = None,
        awaits_replicas: bool = False,
        term: int = 0,
    ) -> None:
        self.capacity: Capacity  # of the first engine; every other engine holds at least as much
        self.failed = asyncio.Event()
        self.failure = ""
        self.num_restarts = 0
        self.num_stalls = 0
        self.requests = OpenRequests(observer=observer, router=router)
        self.outputs, self.cancel = self.requests.outputs, self.requests.cancel
        self.adapters: dict[int, str] = {}  # orders of load_adapter, which every engine gets first
        self.epochs = itertools.count((term << 32) + 1)
        self.awaits_replicas = awaits_replicas
        self.on_capacity: Callable[[int, int], object] | None = None
        self._replicas: dict[int, EngineReplica] = {}
        self._next_number = 0
        self._ticking: asyncio.Task[None] | None = None
        self._recoveries: list[tuple[float, int, list[OpenRequest]]] = []  # time, replica and requests of lost engines
        self._gaps: deque[float] = deque(maxlen=MAX_GAPS)
        self._orders: set[Verb] = set()  # pause, drain
        self._num_malformed = self._num_stale = 0  # frames of engines that ended
        self.is_closed = False
        self._records_misses = False

    @classmethod
    async def start(
        cls, config: Config, observer: LedgerObserver | None = None, command: Sequence[str] = COMMAND
    ) -> EngineSupervisor:
        """Start one replica. Raises the error of its opening, or EngineDeadError, and leaves no process then."""
        supervisor = cls(observer)
        await supervisor.add(supervisor.spawner(config, command), "engine")
        return supervisor

    def spawner(self, config: Config, command: Sequence[str] = COMMAND) -> EngineSpawner:
        """Return a source of engine processes on this machine for this supervisor."""
        self._records_misses |= config.flight.record_on_miss
        return EngineSpawner(config, command, self.receive, self.epochs)

    # --- figures

    @property
    def epoch(self) -> int:
        """The greatest number of an engine so far."""
        return self.requests.epoch

    @property
    def replicas(self) -> tuple[EngineReplica, ...]:
        """All replicas, oldest first."""
        return tuple(self._replicas.values())

    @property
    def state(self) -> EngineState:
        """The state of all replicas together."""
        none = EngineState.RECOVERING if self.awaits_replicas else EngineState.STOPPED
        states = {replica.state for replica in self._replicas.values()}
        return EngineState.FAILED if self.failure else min(states, key=list(EngineState).index, default=none)

    @property
    def processes(self) -> dict[str, int]:
        """The pids of the current engines and of the standbys, by role."""
        pids = {each.name: each.engine.pid for each in self._replicas.values() if each.engine is not None}
        for replica in self._replicas.values():
            if replica.source.standby is not None:
                pids["standby" if replica.name == "engine" else f"{replica.name} standby"] = replica.source.standby.pid
        return pids

    def trouble(self) -> str | None:
        """Return why no engine makes progress now, None if one is idle or its steps are in time."""
        away = "the engine is being restarted" if self._replicas else "no replica has joined yet"
        found = "the engine failed" if self.failure else away
        if self.state is EngineState.STOPPED:
            return None  # no model is loaded, and the next request loads it
        for replica in self._ready():
            assert replica.engine is not None
            trouble = replica.engine.trouble()
            if trouble is None:
                return None
            found = trouble
        return found

    def report(self) -> dict[str, object]:
        """Return the state, and counts since the start.

        A gap is the time from an engine's end to the next token of one of its requests, or to the replica's next engine
        if it had no request.
        """
        requests, rejections = self.requests, self.requests.rejections
        clients = [replica.engine.client for replica in self._replicas.values() if replica.bound and replica.engine]
        return {
            "state": self.state.value,
            "epoch": self.epoch,
            "restarts": self.num_restarts,
            "open_requests": len(requests),
            "unread_requests": requests.num_unread,
            "resumed_requests": requests.num_resumed,
            "moved_requests": requests.num_moved,
            "inexact_requests": requests.num_inexact,
            "stalls": self.num_stalls,
            "suspects_failed": requests.num_failed_suspects,
            "dropped_frames": {
                "malformed": self._num_malformed + sum(client.num_malformed for client in clients),
                "stale": self._num_stale + sum(client.num_stale for client in clients) + rejections.stale_epochs,
            },
            "dropped_ids": {
                name: getattr(rejections, name) for name in ("duplicates", "gaps", "late", "unknown", "moved")
            },
            "recovery_gaps_s": [round(gap, 3) for gap in self._gaps],
            "has_standby": any(replica.source.standby is not None for replica in self._replicas.values()),
            "replicas": [replica.report() for replica in self._replicas.values()],
        }

    def total_capacity(self) -> tuple[int, int]:
        """Return the slots and the KV tokens of all replicas that get requests; those of one if there is none now."""
        sizes = [replica.engine.capacity for replica in self._ready() if replica.engine is not None] or [self.capacity]
        return sum(size.num_slots for size in sizes), sum(size.num_blocks[0] * size.block_size for size in sizes)

    # --- replicas are added and removed

    async def add(self, source: EngineSource, name: str = "") -> int:
        """Add a replica and return its number once its engine is ready. Raises the error of its opening.

        An engine that holds less than the first one, or has another tokenizer, is refused (CapacityError).
        """
        self._check_usable()
        number = self._next_number
        self._next_number += 1
        replica = self._replicas[number] = EngineReplica(number, name or f"replica-{number}", source)
        replica.opening = asyncio.ensure_future(source.next())
        try:
            await self._begin(replica, await replica.opening)
        except BaseException:
            self._replicas.pop(number, None)
            await source.close()
            self._check_usable()  # close() and remove() cancel the opening
            raise
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick(), name="octavo-supervisor")
        replica.running = asyncio.create_task(self._run(replica), name=f"octavo-{replica.name}")
        return number

    async def drain(self, number: int) -> None:
        """Send no new request to a replica, wait until its requests have ended, and stop it. Raises ConfigError."""
        replica = self.replica(number)
        if replica.state is EngineState.READY:
            replica.state = EngineState.DRAINING
            self._capacity_changed()
        while replica.bound is not None and replica.bound.requests:
            if replica.bound.is_open:
                self.requests.set_open(replica.bound, False)
            await asyncio.sleep(LOOK_S / 2)
        await self._stop(replica)

    async def remove(self, number: int) -> None:
        """Stop a replica now; its requests go on at others, or wait for one."""
        replica = self.replica(number)
        if replica.bound is not None:
            self.requests.set_open(replica.bound, False)
            self.requests.move_requests(replica.bound)
        await self._stop(replica)

    def kill(self, why: str, number: int | None = None) -> None:
        """Kill an engine on purpose (None: the first): no request becomes a suspect. Do nothing if there is none."""
        ready = self._ready() if number is None else [self.replica(number)]
        if ready and ready[0].engine is not None:
            ready[0].killed = why
            ready[0].engine.kill()

    async def close(self) -> None:
        """End all engines and their requests, then all requests that are still open. Idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        replicas = tuple(self._replicas.values())
        await _cancel(self._ticking, *(task for each in replicas for task in (each.opening, each.running)))
        await asyncio.gather(*(replica.source.close() for replica in replicas))
        engines = [replica.engine for replica in replicas if replica.engine is not None]
        await asyncio.gather(*(engine.close() for engine in engines))
        self.requests.end_all(FinishReason.CANCELLED, EngineDeadError("the engine was stopped"))

    # --- EngineClient

    async def submit(self, request: Request, media: tuple[MediaItem, ...] = ()) -> Accepted:
        """Submit a request; waits while there is no engine. Raises RequestError, EngineDeadError."""
        self._check_usable()
        if "drain" in self._orders:
            raise QueueFullError("the engine is draining and takes no new requests; try another, or later")
        return await self.requests.submit(request, media)

    async def statistics(self) -> Mapping[str, object]:
        """Return counters and gauges of the current engines, since they began. Raises EngineDeadError without one."""
        return cast(Mapping[str, object], await self.control("statistics"))

    async def control(self, verb: Verb, argument: str = "", *, replica: int | None = None) -> object:
        """See EngineClient. `pause` and `drain` hold for later engines too; a paused one admits no resumed request.

        `frames` and the tables of `export_statistics` are those of one replica, by default the first; a cursor may
        begin with a replica's number, as in 2/CURSOR. The answers of other verbs are merged (see merging); `replica`
        requests the answer of one.
        """
        if verb == "cancel_all":
            return self.requests.cancel([state.request.request_id for state in self.requests])
        if verb in ("pause", "drain", "resume"):
            self._check_usable()
            if verb == "resume":
                self._orders.clear()
                for each in self._replicas.values():
                    each.orders.clear()
                    self._post(each, verb)
            else:
                self._orders.add(verb)
                self._post_orders()
            return True
        if verb == "explain" and argument:
            return await self._explain(argument)
        if verb in ("load_adapter", "unload_adapter"):
            return await self._change_adapters(verb, argument)
        if verb == "frames" and "/" in argument:
            replica, argument = int(argument.split("/")[0]), argument.split("/")[1]
        return await self._ask(verb, argument, replica)

    def restore(self, requests: Iterable[OpenRequest]) -> None:
        """Add the requests of an earlier front end, and resume those that have not ended.

        Raises DuplicateRequestError, EngineDeadError.
        """
        self._check_usable()
        for state in requests:
            self.requests.restore(state)

    async def _ask(self, verb: Verb, argument: str, number: int | None) -> object:
        """Return the answer of one replica, or the merged answers of all that are ready. Raises EngineDeadError."""
        self._check_usable()
        replicas = self._live() if number is None else [self.replica(number)]
        clients = {replica.name: replica.engine.client for replica in replicas if replica.engine is not None}
        if not clients:
            raise EngineDeadError("the engine is being restarted")
        is_alone = len(self._replicas) == 1 and not (verb == "statistics" and self.capacity.ranks)
        if is_alone or number is not None or verb in ("frames", "export_statistics"):
            return await next(iter(clients.values())).control(verb, argument)
        calls = (client.control(verb, argument) for client in clients.values())
        answers = dict(zip(clients, await asyncio.gather(*calls, return_exceptions=True), strict=True))
        found = {name: answer for name, answer in answers.items() if not isinstance(answer, BaseException)}
        if not found:
            raise cast(BaseException, next(iter(answers.values())))
        return merge_answers(verb, found, self.report())

    async def _change_adapters(self, verb: Verb, argument: str) -> bool:
        """Load or unload an adapter in every engine; wait while all are being restarted. Raises the first error."""
        while True:
            self._check_usable()
            engines = [replica.engine for replica in self._live() if replica.engine is not None]
            with contextlib.suppress(EngineDeadError):  # its successor gets the order again
                await asyncio.gather(*(engine.client.control(verb, argument) for engine in engines))
                if engines:
                    return True
            await asyncio.sleep(LOOK_S)

    # --- the engines of a replica, one after another

    async def _run(self, replica: EngineReplica) -> None:
        try:
            while replica.engine is not None:
                was_useful = self._lose(replica, await replica.engine.watch())
                if replica.state is EngineState.DRAINING:
                    return  # drain() stops it
                await self._begin(replica, await replica.source.replace(was_useful))
                replica.num_restarts += 1
                self.num_restarts += 1
                _LOG.warning("epoch %d began with %d open requests", self.epoch, len(self.requests))
        except (EngineDeadError, CapacityError) as error:
            self._give_up(replica, str(error))
        except Exception as error:  # the shell: without a supervisor no request would be answered
            _LOG.exception("the supervisor of %s failed", replica.name)
            if replica.engine is not None:
                replica.engine.kill()
            self._give_up(replica, f"{type(error).__name__}: {error}")

    async def _begin(self, replica: EngineReplica, engine: RunningEngine) -> None:
        """Give a replica its next engine.

        Raises CapacityError, and closes the engine, if it holds too little or has another tokenizer.
        """
        self.capacity = getattr(self, "capacity", engine.capacity)
        lack = engine.capacity.describe_lack(self.capacity)
        if lack:
            await engine.close()
            raise CapacityError(f"{replica.name} is refused: {lack}")
        replica.engine = engine
        if "pause" in self._orders:  # first, or a request would be admitted in between
            replica.orders.add("pause")
            engine.client.post_control("pause")
        for order in self.adapters.values():
            engine.client.post_control("load_adapter", order)
        if replica.state is not EngineState.DRAINING:
            replica.state = EngineState.READY
        replica.bound = self.requests.begin_epoch(engine.client, replica.number, engine.capacity.fingerprint)
        self._note_gaps()
        self._post_orders()
        self._capacity_changed()
        resumed = list(replica.bound.requests.values())
        replica.source.prepare(lambda: all(state.has_progress or state.end is not None for state in resumed))

    def _lose(self, replica: EngineReplica, death: EngineDeath) -> bool:
        """Handle the end of a replica's engine: its requests go on at others, or wait. Return True if it was useful."""
        engine, what = replica.engine, replica.killed or death.what
        assert engine is not None
        epoch, get = engine.client.epoch, self.requests.get_open
        # Requests whose grammar was being built when the engine died; a build may crash outside steps.
        built = (
            state for name in death.unanswered if (state := get(name)) is not None and state.request.params.grammar
        )
        batch = (*(state.request.request_id for state in built), *death.batch)
        _LOG.warning("the engine of epoch %d ended (%s), %d in its batch", epoch, what, len(batch))
        if replica.state is EngineState.READY:
            replica.state = EngineState.RECOVERING
        was_killed, replica.killed, replica.engine, replica.bound = bool(replica.killed), "", None, None
        replica.orders.clear()
        replica.num_stalls += death.stalled
        self.num_stalls += death.stalled
        self._num_malformed += death.num_malformed
        self._num_stale += death.num_stale
        lost = self.requests.lose_engine(() if was_killed else batch, epoch)
        self._recoveries.append((death.at, replica.number, lost))
        self._capacity_changed()
        return was_killed or death.was_useful

    async def _stop(self, replica: EngineReplica) -> None:
        """Stop a replica whose requests have ended or were moved, and forget it."""
        replica.state = EngineState.STOPPED
        await _cancel(replica.opening, replica.running)
        if replica.bound is not None:
            self.requests.lose_engine((), replica.bound.epoch)
            replica.bound = None
        await replica.source.close()
        if replica.engine is not None:
            await replica.engine.close()
        self._forget(replica)

    def _forget(self, replica: EngineReplica) -> None:
        self._replicas.pop(replica.number, None)
        self._capacity_changed()

    def _give_up(self, replica: EngineReplica, why: str) -> None:
        """Handle a replica that gets no other engine. Without any other replica, all requests end."""
        replica.state, replica.failure = EngineState.FAILED, why
        _LOG.error("%s is given up: %s", replica.name, why)
        if not replica.source.is_lasting:
            self._forget(replica)
        if not self.awaits_replicas and all(each.state is EngineState.FAILED for each in self._replicas.values()):
            self.failure = why
            self.requests.end_all(FinishReason.ERROR, EngineDeadError(why))
            self.failed.set()

    # --- every LOOK_S, and after events

    def receive(self, epoch: int, events: Events) -> None:
        """Handle events of an engine; a source calls this."""
        self.requests.accept(epoch, events)
        if self._recoveries and events.request_ids:
            self._note_gaps()
        if self._records_misses and events.decisions:
            self._save_misses(epoch, events)

    def _save_misses(self, epoch: int, events: Events) -> None:
        """Have the last minutes of an engine saved if a request that ended missed one of its objectives."""
        found = (each.engine for each in self._live() if each.bound is not None and each.bound.epoch == epoch)
        engine = next(found, None)
        if engine is None or engine.flight is None:
            return
        for event in events.decisions:
            state = self.requests.get(event.request_id) if event.kind is EventKind.FINISHED else None
            if state is not None and (miss := find_miss(state.request, event, state.first_at)) is not None:
                engine.flight.missed(miss)

    def flights(self) -> dict[str, FlightRecordings]:
        """Return what the flight recorder of each engine on this machine keeps, by replica."""
        flights = {each.name: each.engine.flight for each in self._live() if each.engine is not None}
        return {name: flight for name, flight in flights.items() if flight is not None}

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if self.requests.num_held:
                now = time.monotonic()
                self.requests.expire(now)
                self.requests.place_suspects(now)
            self._post_orders()
            self._note_gaps()

    def _note_gaps(self) -> None:
        """Note the recoveries that are complete."""
        now, waiting = time.monotonic(), []
        for ended_at, number, lost in self._recoveries:
            replica = self._replicas.get(number)
            is_idle = all(state.end is not None for state in lost) and (replica is None or replica.bound is not None)
            if is_idle or any(state.has_progress for state in lost):
                self._gaps.append(now - ended_at)
            else:
                waiting.append((ended_at, number, lost))
        self._recoveries = waiting[-MAX_GAPS:]

    def _post_orders(self) -> None:
        """Pause or drain the current engines, each once all suspects have been sent to it."""
        for replica in self._live():
            assert replica.bound is not None
            if replica.bound.suspect is None:
                for verb in sorted(self._orders - replica.orders):
                    replica.orders.add(verb)
                    self._post(replica, verb)

    def _post(self, replica: EngineReplica, verb: Verb) -> None:
        if replica.engine is not None and replica.bound is not None:
            replica.engine.client.post_control(verb)

    def _capacity_changed(self) -> None:
        if self.on_capacity is not None and self._ready():
            self.on_capacity(*self.total_capacity())

    # --- replicas by state

    def _live(self) -> list[EngineReplica]:
        """Return the replicas with a current engine, oldest first."""
        return [replica for replica in self._replicas.values() if replica.bound is not None]

    def _ready(self) -> list[EngineReplica]:
        """Return the replicas that get new requests, oldest first."""
        return [replica for replica in self._live() if replica.state is EngineState.READY]

    def replica(self, number: int) -> EngineReplica:
        """Return a replica. Raises ConfigError."""
        if number not in self._replicas:
            known = ", ".join(map(str, self._replicas)) or "none"
            raise ConfigError(f"there is no replica {number}; there are: {known}")
        return self._replicas[number]

    def _check_usable(self) -> None:
        if self.is_closed:
            raise EngineDeadError("the engine was stopped")
        if self.failure:
            raise EngineDeadError(self.failure)

    # --- explanations

    async def _explain(self, name: str) -> object:
        """Explain one request: by the engine that it is bound to, or by any that remembers its end."""
        self._check_usable()
        state, engine = self.requests.get_open(name), None
        if state is not None:
            engine = state.engine
            answer = self._explain_held(state) if engine is None else await self._ask("explain", name, engine.number)
        else:
            answer = await self._ask("explain", name, None)
        return self._with_epochs(answer, self.epoch if engine is None else engine.epoch)

    def _explain_held(self, state: OpenRequest) -> dict[str, object]:
        """Explain an open request that no engine has."""
        name, why = state.request.request_id, "the engine is being restarted"
        if self._ready():
            why = "an engine died, and what may have been the cause is tried alone first"
        outputs = sum(len(page.ids) for page in state.pages.values())
        answer = {"id": name, "state": "held", "tenant": state.request.tenant, "num_outputs": outputs}
        return {**answer, "text": f"{name} waits: {why}", "public_text": f"waits: {why}"}

    def _with_epochs(self, answer: object, epoch: int) -> object:
        """Add the engine's epoch, and the epoch of the request's arrival, to an explanation."""
        if not isinstance(answer, dict) or "text" not in answer:
            return answer
        state = self.requests.get(answer["id"])
        arrived_in = None if state is None else state.epoch
        answer |= {
            "epoch": epoch,
            "begun_in_epoch": arrived_in,
            "num_resumes": None if state is None else max(0, state.num_sends - (state.epoch > 0)),
        }
        if state is None:
            return answer
        notes = ""
        if arrived_in != epoch and answer["state"] != "held":
            where = f"arrived in epoch {arrived_in}" if arrived_in else "arrived before this server's process began"
            notes = f"; resumed by the engine of epoch {epoch}, it {where}"
        if state.engine is not None and len(self._replicas) > 1:
            answer["replica"] = self._replicas[state.engine.number].name
            notes += f"; on {answer['replica']}"
        if not state.is_exact:
            answer["is_exact"] = False
            notes += "; an engine with another model, tokenizer or numerics generated its first tokens"
        return answer | {key: f"{answer[key]}{notes}" for key in ("text", "public_text")}


async def _cancel(*tasks: asyncio.Future[Any] | None) -> None:
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
