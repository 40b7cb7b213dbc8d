"""A fleet that serves in virtual time: the front end's ledger, FleetRouter, and engine loops with prompts of token ids.

Everything but the device and the time is what `octavo fleet` runs: keys are digests of ids, requests are bound by the
ledger, each engine is an EngineLoop in a thread of its own with the real scheduler and cache. A step takes a cost
model's time. One thread runs at a time, the one whose time is next, so a run is the same on every machine.
"""

from __future__ import annotations

import asyncio
import random
import threading
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from typing import Any

from octavo.core.kv.prefix import prompt_keys
from octavo.core.plan import ROW_SAMPLE, Events, StepFailure, StepPlan, StepResult
from octavo.core.request import FinishReason, Request, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.tap import CallTap
from octavo.engine.client import Accepted
from octavo.engine.loop import Clock, EngineLoop
from octavo.fleet.fleet_router import FleetRouter
from octavo.frontend.open_request import settle
from octavo.frontend.open_requests import OpenRequests
from octavo.observe.history import EventSink
from octavo.simulator.arrival import Arrival
from octavo.simulator.cost_model import shape_of
from octavo.simulator.setup import ReplicaFailure, Setup

OUTPUT_ID = 7  # which every engine samples
_FAILURE, _ARRIVAL, _ENGINE = 0, 1, 2  # in the simulator's order at equal times


def prompt_of(arrival: Arrival, index: int, vocab_size: int) -> array[int]:
    """Return ids that are equal where the arrival's keys are equal, and of this request alone after them."""
    ids = array("i")
    for key in arrival.keys:
        ids.extend(random.Random(f"key {key!r}").choices(range(vocab_size), k=arrival.key_tokens))
    return ids + array("i", random.Random(index).choices(range(vocab_size), k=arrival.prompt_tokens - len(ids)))


def live_request(index: int, arrival: Arrival, block_size: int, vocab_size: int) -> Request:
    """Return the request as the front end submits it, with the keys of its blocks."""
    params = SamplingParams(max_tokens=arrival.output_tokens, ignore_eos=True, temperature=0.0, seed=0)
    ids = prompt_of(arrival, index, vocab_size)
    request = Request(f"r{index}", ids, params, arrival.time, tenant=arrival.tenant, session=arrival.session)
    return replace(request, block_keys=prompt_keys(request, block_size))


class LiveEngine(Clock, EventSink):
    """One engine: its loop's clock and executor, its link to the ledger, and the time that it waits for."""

    def __init__(self, number: int, epoch: int, fleet: LiveFleet) -> None:
        self.number, self.epoch = number, epoch
        self.serial = 0  # of the current wait
        self.is_idle = False
        self.go, self.yielded = threading.Semaphore(0), threading.Semaphore(0)
        self._fleet, self._costs, self._free_at = fleet, fleet.setup.costs, 0.0
        self._rng = random.Random(f"jitter {number}")
        self.scheduler = Scheduler(fleet.setup.limits, fleet.make_tap(number))
        self.loop = EngineLoop(self.scheduler, self, clock=self, depth=fleet.setup.depth)  # type: ignore[arg-type]
        self.loop.attach(partial(fleet.post, fleet.ledger.accept, epoch))
        self.loop.watch(self)

    # the loop's clock

    def now(self) -> float:  # type: ignore[override]
        return self._fleet.now

    def wait(self, condition: threading.Condition, until: float | None) -> None:
        condition.release()
        self.is_idle = True
        self._fleet.block(self, until)
        self.is_idle = False
        condition.acquire()

    # the loop's executor

    def submit(self, plan: StepPlan) -> tuple[float, int]:
        step_s = self._costs.step_s(shape_of(plan)) if plan.slots else 0.0
        step_s *= 1 + self._fleet.jitter * self._rng.uniform(-1, 1)
        self._free_at = max(self._fleet.now, self._free_at) + step_s
        return self._free_at, sum(flag & ROW_SAMPLE for flag in plan.flags)

    def collect(self, ticket: tuple[float, int]) -> StepResult:
        self._fleet.block(self, ticket[0])
        return StepResult(array("i", [OUTPUT_ID]) * ticket[1])

    def close(self) -> None:
        pass

    # the loop's sink: what the host does after a commit takes its time

    def stepped(self, plan: StepPlan, outcome: StepResult | StepFailure, events: Events) -> None:
        self._fleet.block(self, self._fleet.now + self._costs.host_s(shape_of(plan)))

    def admitted(self, request: Request) -> None:
        pass

    def decided(self, decisions: tuple[Any, ...]) -> None:
        pass

    # the ledger's link

    def send(self, request: Request, media: Any = ()) -> asyncio.Future[Accepted]:
        answer: asyncio.Future[Accepted] = asyncio.get_running_loop().create_future()
        self.loop.submit(request, partial(self._fleet.post, settle, answer))
        self._wake()
        return answer

    def post_cancel(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.CANCELLED, choice: int | None = None
    ) -> None:
        self.loop.cancel(request_ids, reason, choice)
        self._wake()

    def _wake(self) -> None:
        if self.is_idle:
            self._fleet.wake_at(self, self._fleet.now)


@dataclass
class LiveRun:
    """The replica of each choice, in order, and the tokens looked up and found in the prefix caches."""

    choices: list[tuple[str, int]]
    queried_tokens: int = 0
    hit_tokens: int = 0
    num_outputs: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.queried_tokens


class NotedRouter:
    """A FleetRouter whose choices are noted."""

    def __init__(self, router: FleetRouter, choices: list[tuple[str, int]]) -> None:
        self._router, self._choices = router, choices
        self.ended = router.ended

    def choose(self, request: Request, targets: Any) -> Any:
        chosen = self._router.choose(request, targets)
        self._choices.append((request.request_id, chosen.number))
        return chosen


class LiveFleet:
    """Serves requests in virtual time. `jitter` is the largest part by which a step is shorter or longer.

    `make_tap` returns what records the engine of a replica.
    """

    def __init__(
        self,
        setup: Setup,
        router: FleetRouter,
        jitter: float = 0.0,
        make_tap: Callable[[int], CallTap | None] = lambda number: None,
    ) -> None:
        self.setup, self.jitter, self.now, self.make_tap = setup, jitter, 0.0, make_tap
        self.run = LiveRun([])
        self.ledger = OpenRequests(router=NotedRouter(router, self.run.choices), now=lambda: self.now)
        self._heap: list[tuple[float, int, int, int, int]] = []  # time, kind, number, epoch, serial
        self._pending: list[Callable[[], object]] = []  # calls of engines for the event loop
        self._engines: dict[int, LiveEngine] = {}
        self._num_epochs = 0

    def block(self, engine: LiveEngine, until: float | None) -> None:
        """Let others run until this time; without one, until the engine is woken. In the engine's thread."""
        engine.serial += 1
        if until is not None:
            self.wake_at(engine, until)
        engine.yielded.release()
        engine.go.acquire()

    def wake_at(self, engine: LiveEngine, at: float) -> None:
        heappush(self._heap, (max(at, self.now), _ENGINE, engine.number, engine.epoch, engine.serial))

    def post(self, action: Callable[..., object], *arguments: object) -> None:
        self._pending.append(partial(action, *arguments))

    async def serve(self, requests: list[Request], failures: tuple[ReplicaFailure, ...] = ()) -> LiveRun:
        """Serve all requests to their ends."""
        for number in range(self.setup.replicas):
            self._begin(number)
        self._heap += [(one.arrival, _ARRIVAL, index, 0, 0) for index, one in enumerate(requests)]
        self._heap += [(one.time, _FAILURE, index, 0, 0) for index, one in enumerate(failures)]
        self._heap.sort()
        tasks: list[asyncio.Task[int]] = []
        while len(tasks) < len(requests) or not all(task.done() for task in tasks):
            self.now, kind, number, epoch, serial = heappop(self._heap)
            if kind == _ARRIVAL:
                tasks.append(asyncio.create_task(self._submit(requests[number])))
                await asyncio.sleep(0)
            elif kind == _ENGINE:
                self._resume(number, epoch, serial)
            else:
                self._fail(failures[number], number, is_restart=bool(serial))
            while self._pending:
                self._pending.pop(0)()
                await asyncio.sleep(0)
        self.run.num_outputs = sum(task.result() for task in tasks)
        for number in list(self._engines):
            self._end(number)
        return self.run

    async def _submit(self, request: Request) -> int:
        await self.ledger.submit(request)
        return sum([len(one.token_ids) async for one in self.ledger.outputs(request.request_id, final_only=True)])

    def _begin(self, number: int) -> None:
        self._num_epochs += 1
        engine = self._engines[number] = LiveEngine(number, self._num_epochs, self)
        engine.loop.start()
        engine.yielded.acquire()
        self.ledger.begin_epoch(engine, number)

    def _resume(self, number: int, epoch: int, serial: int) -> None:
        engine = self._engines.get(number)
        if engine is not None and (engine.epoch, engine.serial) == (epoch, serial):
            engine.serial += 1
            engine.go.release()
            engine.yielded.acquire()

    def _fail(self, failure: ReplicaFailure, number: int, is_restart: bool) -> None:
        """Lose an engine with its cache and its requests, or begin the next one of its replica."""
        if is_restart:
            self._begin(failure.replica)
            return
        epoch = self._engines[failure.replica].epoch
        self._end(failure.replica)
        self.ledger.lose_engine((), epoch)
        if failure.restart_s is not None:
            heappush(self._heap, (self.now + failure.restart_s, _FAILURE, number, 0, 1))

    def _end(self, number: int) -> None:
        engine = self._engines.pop(number)
        counted = engine.scheduler.statistics()
        self.run.queried_tokens += counted.prefix_queried_tokens
        self.run.hit_tokens += counted.prefix_hit_tokens
        engine.loop.attach(lambda events: None)
        engine.loop.stop()
        while not engine.loop.join(0.001):
            engine.go.release()
        self._pending.clear()
