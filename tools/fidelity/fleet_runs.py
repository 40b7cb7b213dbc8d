"""Recorded fleets of this engine, predicted from their own first part: front, router, network hops and engines.

Owns: making the runs, joining the front's routing log with the engines' recordings, a cost model for each engine and
the network hop from a part of them, the comparison with the rest, also of the router's choices. Does not: serve or
simulate (octavo does), or judge what neighbours explain (own_runs does).
A fleet is one front with engines that join over loopback, each as on a machine of its own, or with engines of its own.
Times are the front's: from a request's arrival there to its first token and its end there. The whole fleet is simulated
with the front's router from arrivals, lengths and block keys; no recorded choice is used. Two more predictions say
where errors are from: one with the recorded choices, in which the router is asked what it would have chosen with the
simulated loads after the recorded history, and one without the network hop.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tools.fidelity.neighbours import Neighbours
from tools.fidelity.own_runs import (
    LEARNT,
    Noise,
    NoiseMeter,
    Prediction,
    fit_steps,
    origin_of,
    part_of,
    record_beside_neighbours,
    samples_path,
    simulated_columns,
)

from octavo.bench.completion_client import CompletionClient, ProtocolError, Target
from octavo.bench.online import Arrivals, Objectives, OnlineLoad, make_online_report, measure_server
from octavo.bench.processes import ProcessTree, ServerProcess, free_port
from octavo.errors import EngineError
from octavo.fleet.fleet_router import DEFAULT_ROUTER
from octavo.fleet.routing import ROUTERS, RoutedRequest, Router, RouterTarget, create_router
from octavo.fleet.routing_log import (
    ChoiceRecord,
    EndRecord,
    LoggedTarget,
    PromptRecord,
    RoutingHeader,
    apply_choice,
    digest_of,
    read_routing_log,
    routing_logs,
)
from octavo.observe.recording.format import Header, RecordingError
from octavo.observe.recording.reader import SUFFIX, RecordedStep, open_recording, steps
from octavo.observe.recording.requests import RecordedRequest, arrivals
from octavo.simulator.closeness import Times
from octavo.simulator.cost_model import CostModel, ScaledCosts
from octavo.simulator.costs.fitted import WARM_UP_S, Fitted, begin_of
from octavo.simulator.network_hop import NetworkHop
from octavo.simulator.setup import ReplicaGroup, ReplicaSetup, Setup
from octavo.simulator.workloads.traces import routed_arrival

KINDS_OF_FLEET = ("machines", "replicas")
RECORDED = "recorded"  # the name of the router RecordedChoices while it is used
JOIN_S = 60.0  # for engines to join
BURST_SHARE, BURST_SIZE = 0.05, 5  # of arrivals, which are so many requests at once
NUM_GROUPS, PREFIX, OWN, OUTPUT = 12, 128, (16, 64), (16, 48)  # prompts: groups by Zipf's law, tokens shared and own
TOKENS = range(97, 123)  # letters for a script; ordinary ids for a model
# All steps take as long, which a fit can learn. A prompt that is not cached takes two, so that prefixes count.
SCRIPT = {"step_ms": 30, "rules": [{"say": "abcdefgh", "finish": "length"}]}
SCRIPTED = ("--max-num-seqs", "8", "--max-num-batched-tokens", "128")

# --- runs


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """How many engines, behind which router, get how many requests, how many a second, and the seed of the requests."""

    num_requests: int = 240
    rate: float = 4.0
    num_engines: int = 2
    router: str = DEFAULT_ROUTER
    seed: int = 0

    def prompts(self) -> list[tuple[array[int] | str, int]]:
        """Return prompts, which share prefixes, with their numbers of output tokens."""
        draw = random.Random(f"prompts {self.seed}")
        prefixes = [draw.choices(TOKENS, k=PREFIX) for _ in range(NUM_GROUPS)]
        weights = [1 / (rank + 1) for rank in range(NUM_GROUPS)]
        return [
            (array("i", prefix + draw.choices(TOKENS, k=draw.randint(*OWN))), draw.randint(*OUTPUT))
            for prefix in draw.choices(prefixes, weights, k=self.num_requests)
        ]


@dataclass(frozen=True, slots=True)
class BurstArrivals(Arrivals):
    """Poisson arrivals of which a share is several requests at once; the rate is that of all requests."""

    def times(self) -> Iterator[float]:
        """Yield arrival times in seconds, endlessly; the first is 0."""
        draw, now = random.Random(f"arrivals {self.seed}"), 0.0
        while True:
            yield from [now] * (BURST_SIZE if draw.random() < BURST_SHARE else 1)
            now += draw.expovariate(self.rate / (1 + BURST_SHARE * (BURST_SIZE - 1)))


def record_fleet(folder: Path, kind: str, number: int, settings: Sequence[str], spec: FleetSpec) -> Path:
    """Make one run of a kind of fleet, if its figures are not there; settings are those of octavo serve.

    Without settings, engines run a script. Raises EngineError.
    """
    path = folder / f"{kind}-{number}"
    if not settings:
        script = folder / "script.json"
        script.write_text(json.dumps(SCRIPT), encoding="utf-8")
        settings = [f"scripted:{script}", *SCRIPTED]
    record_beside_neighbours(path, lambda: asyncio.run(_run(path, kind, settings, spec)))
    return path


async def _run(path: Path, kind: str, settings: Sequence[str], spec: FleetSpec) -> str:
    """Serve requests by a fleet that records; return the client's figures as JSON."""
    command = [sys.executable, "-m", "octavo"]
    common = [*settings, "--speculate", "none"]
    online = OnlineLoad(BurstArrivals(spec.rate, seed=spec.seed))
    with ExitStack() as stack:
        run_folder = stack.enter_context(tempfile.TemporaryDirectory())
        env = {"OCTAVO_RUN_DIR": run_folder}
        where = ["--host", "127.0.0.1", "--port", "{port}", "--router", spec.router, "--record", str(path / "front")]
        join = f"127.0.0.1:{free_port()}"
        num_joining = spec.num_engines if kind == "machines" else 0
        own = ["--replicas", f"{spec.num_engines - num_joining}", *(["--fleet-address", join] if num_joining else [])]
        front = ServerProcess([*command, "fleet", *common, *own, *where], env)
        started: list[ProcessTree] = [front]
        stack.callback(front.end)
        for number in range(num_joining):
            record = ["--record", str(path / f"machine-{number}")]
            agent = ProcessTree([*command, "serve", *common, "--join", join, "--quiet", *record], env)
            stack.callback(agent.end)
            started.append(agent)
        await _wait_for_engines(front.base_url, started, spec.num_engines)
        target = Target(front.base_url, timeout_s=60.0)
        run, facts = await measure_server(target, spec.prompts(), online, 1, lambda _: None)
    report = make_online_report({**facts, "server": kind, "workload": "fleet"}, online, Objectives({}), run)
    if report["requests_failed"]:
        raise EngineError(f"{report['requests_failed']} requests failed: {run.first_errors()}")
    return json.dumps(report)


async def _wait_for_engines(url: str, started: Sequence[ProcessTree], count: int) -> None:
    """Wait until the front has so many engines. Raises EngineError."""
    client, until = CompletionClient(Target(url, timeout_s=5.0)), time.monotonic() + JOIN_S
    while time.monotonic() < until:
        for process in started:
            if process.returncode is not None:
                raise EngineError(f"a process of the fleet ended before it served\n{process.last_lines()}")
        with suppress(OSError, ProtocolError, TimeoutError):
            status, body = await client.get("/health")
            if status == HTTPStatus.OK:
                states = [replica["state"] for replica in json.loads(body).get("replicas", ())]
                if states.count("ready") == count:
                    return
        await asyncio.sleep(0.1)
    raise EngineError(f"{count} engines have not joined within {JOIN_S:g} s\n{started[0].last_lines()}")


# --- recordings


@dataclass(frozen=True, slots=True)
class FrontRequest:
    """A request as the front saw it, in Unix seconds; the router saw `targets` and chose `replica`."""

    prompt: PromptRecord
    arrival: float
    chosen: float
    replica: int
    first_token: float
    end: float
    output_tokens: int
    targets: tuple[LoggedTarget, ...]


@dataclass(frozen=True, slots=True)
class Machine:
    """One engine's recording: its number at the router, its requests by the digest of their ids, its steps.

    Seconds on the front's clock are times of steps and `offset`, or times of requests and `origin`.
    """

    number: int
    header: Header
    requests: Mapping[bytes, RecordedRequest]
    steps: Sequence[RecordedStep]
    offset: float
    origin: float

    def between(self, begin: float, end: float) -> list[RecordedStep]:
        """Return the steps that were made between two times of the front."""
        return [
            step for step in self.steps if begin <= step.plan.now + self.offset and step.collected + self.offset <= end
        ]


@dataclass(frozen=True, slots=True)
class RecordedFleet:
    """A front's log, joined with the recordings of its engines; requests in order of their choices."""

    header: RoutingHeader
    requests: Sequence[FrontRequest]
    machines: Sequence[Machine]

    def engine_s(self, one: FrontRequest) -> tuple[float, float, float]:
        """Return the times of the front at which a request's engine took it, made its first token, and ended it."""
        machine = self.machines[one.replica]
        own, origin = machine.requests[one.prompt.name], machine.origin
        return origin + own.taken, origin + (own.first_token or 0.0), origin + (own.end or 0.0)


def read_fleet(path: Path) -> RecordedFleet:
    """Read what a fleet recorded. Raises RecordingError if the log and the recordings are not of one run."""
    logs = [log for folder in (path, path / "front") for log in routing_logs(folder)]
    if not logs:
        raise RecordingError(f"{path} has no routing log")
    header, requests = _read_front(logs[-1])
    found = [_read_machine(file, requests) for file in sorted(path.rglob(f"*{SUFFIX}"))]
    machines = sorted((machine for machine in found if machine is not None), key=lambda machine: machine.number)
    if [machine.number for machine in machines] != list(range(len(machines))):
        raise RecordingError(f"{path} has replicas {[machine.number for machine in machines]}; a whole fleet is needed")
    for one in requests:
        if not any(one.prompt.name in machine.requests and machine.number == one.replica for machine in machines):
            raise RecordingError(f"{path} has no recording of a request that replica {one.replica} served")
    return _aligned(RecordedFleet(header, requests, machines))


def _aligned(fleet: RecordedFleet) -> RecordedFleet:
    """Set the machines' clocks by the front's: the shortest ways to and from an engine count as equal, as in NTP."""
    machines = []
    for machine in fleet.machines:
        own = [(one, fleet.engine_s(one)) for one in fleet.requests if one.replica == machine.number]
        there = min(taken - one.arrival for one, (taken, _, _) in own)
        back = min(one.first_token - first for one, (_, first, _) in own)
        shift = (back - there) / 2
        machines.append(replace(machine, offset=machine.offset + shift, origin=machine.origin + shift))
    return replace(fleet, machines=machines)


def _read_front(log: Path) -> tuple[RoutingHeader, list[FrontRequest]]:
    """Return the log's header, and its requests. Raises RecordingError for moved requests, and those without an end."""
    header, records = read_routing_log(log)
    choices: dict[int, tuple[ChoiceRecord, tuple[LoggedTarget, ...]]] = {}
    targets: dict[int, LoggedTarget] = {}
    found = []
    for record in records:
        if isinstance(record, ChoiceRecord):
            apply_choice(targets, record)
            if record.request in choices:
                raise RecordingError(f"{log} has a request that was routed again; only calm fleets are predicted")
            choices[record.request] = record, tuple(targets[number] for number in sorted(targets))
        elif isinstance(record, EndRecord) and record.first_token is not None:
            choice, seen = choices.pop(record.request)
            assert choice.prompt is not None
            first, end, chosen = (header.began + at for at in (record.first_token, record.time, choice.time))
            arrival = chosen - choice.prompt.waited_s
            count = record.output_tokens
            found.append(FrontRequest(choice.prompt, arrival, chosen, choice.chosen, first, end, count, seen))
    if choices:
        raise RecordingError(f"{log} has {len(choices)} requests without a token or an end")
    return header, sorted(found, key=lambda one: one.chosen)


def _read_machine(file: Path, requests: Sequence[FrontRequest]) -> Machine | None:
    """Return the engine of a recording; None if it served none of these requests."""
    recording = open_recording(file)
    named = {digest_of(one.name): one for one in arrivals(recording)}
    numbers = {one.replica for one in requests if one.prompt.name in named}
    if not numbers:
        return None
    if len(numbers) > 1:
        raise RecordingError(f"{file} has requests that the front sent to replicas {sorted(numbers)}")
    offset = recording.header.began - recording.header.clock
    recorded = list(steps(recording))
    return Machine(numbers.pop(), recording.header, named, recorded, offset, origin_of(recording) + offset)


# --- predictions


@dataclass(frozen=True, slots=True)
class Routes:
    """The replica of each request, and the prompt tokens that it found in the cache, as served or as simulated."""

    replicas: npt.NDArray[np.int64]
    cached: npt.NDArray[np.int64]

    def counts(self) -> str:
        """Return the requests of each replica."""
        return " + ".join(f"{count}" for count in np.unique(self.replicas, return_counts=True)[1])


@dataclass(frozen=True, slots=True)
class FleetPrediction:
    """The rest of a fleet's run, and all choices: as served and as simulated.

    `rest` tells the requests that no fit saw. `routed` is predicted with the recorded choices, after which the router
    would have made those of `asked`; `direct` is predicted without a hop. `front_s` is the mean time from arrival to
    choice.
    """

    times: Prediction
    routed: Times
    direct: Times
    hop: NetworkHop
    front_s: float
    served: Routes
    simulated: Routes
    asked: npt.NDArray[np.int64]
    rest: npt.NDArray[np.bool_]

    def same(self, replicas: npt.NDArray[np.int64]) -> float:
        """Return the share of the rest that was sent to these replicas."""
        return float(np.mean((self.served.replicas == replicas)[self.rest]))


def predict_fleet(path: Path, warm_up_s: float = WARM_UP_S) -> FleetPrediction:
    """Predict a fleet from the first third of its requests, without the warm-up at its beginning."""
    fleet = read_fleet(path)
    learnt = int(LEARNT * len(fleet.requests))
    begin, cut = fleet.requests[0].arrival, fleet.requests[learnt].arrival
    seen = [machine.between(begin + warm_up_s, cut) for machine in fleet.machines]
    fits = [
        fit_steps(part, f"{path.name}, replica {machine.number}")
        for part, machine in zip(seen, fleet.machines, strict=True)
    ]
    costs = [Fitted(fit) for fit in fits]
    hop = measured_hop(fleet, fleet.requests[:learnt])
    simulation = _Simulation(fleet, np.arange(len(fleet.requests)) >= learnt)
    predicted, routes = simulation.whole(costs, hop)
    noises: tuple[Noise, ...] = ()
    stretched = levelled = None
    if samples_path(path).is_file():
        neighbours = Neighbours.load(samples_path(path))
        noises = tuple(
            NoiseMeter(neighbours, machine.header, fit, machine.steps).noise(part, machine.between(cut, np.inf))
            for machine, fit, part in zip(fleet.machines, costs, seen, strict=True)
        )
        stretched, levelled = (
            simulation.whole([ScaledCosts(*pair) for pair in zip(costs, factors, strict=True)], hop)[0]
            for factors in ([noise.stretch for noise in noises], [noise.level for noise in noises])
        )
    front_s = float(np.mean([one.chosen - one.arrival for one in fleet.requests]))
    routed, asked = simulation.routed(costs, hop)
    return FleetPrediction(
        Prediction(tuple(fits), simulation.measured(), predicted, noises, stretched, levelled),
        routed, simulation.whole(costs, None)[0], hop, front_s, _served(fleet), routes, asked, simulation.rest,
    )  # fmt: skip


def measured_hop(fleet: RecordedFleet, seen: Sequence[FrontRequest]) -> NetworkHop:
    """Return the hop of these requests: the mean of the ways to and from engines, in which offsets of clocks cancel.

    The way to an engine is known of requests that it took while it had no step; it begins at the arrival, so that it
    includes the front's own work.
    """
    ways: tuple[list[float], list[float]] = [], []
    for one in seen:
        taken, first, end = fleet.engine_s(one)
        machine = fleet.machines[one.replica]
        ways[1].extend((one.first_token - first, one.end - end))
        if not any(
            begin_of(step) + machine.offset < taken and step.committed + machine.offset > one.arrival
            for step in machine.steps
        ):
            ways[0].append(taken - one.arrival)
    both = [way for way in ways if way]
    mean = round(float(np.mean([np.mean(way) for way in both])), 7)
    spread = round(float(np.sqrt(np.mean([np.var(way) for way in both]))), 7)
    return NetworkHop(mean, spread) if mean > 0 else NetworkHop(0.0)


class _Simulation:
    """Simulations of a recorded fleet, with the columns of its requests in order of their choices."""

    def __init__(self, fleet: RecordedFleet, rest: npt.NDArray[np.bool_]) -> None:
        self.fleet, self.rest = fleet, rest
        asked = fleet.requests
        times = np.maximum.accumulate([one.arrival - asked[0].arrival for one in asked])  # in order of the choices
        self._workload = [
            routed_arrival(one.prompt, one.output_tokens, float(time), fleet.header.key_tokens)
            for one, time in zip(asked, times, strict=True)
        ]

    def measured(self) -> Times:
        """Return the front's times."""
        asked = self.fleet.requests
        rows = [(one.arrival, one.first_token, one.end, one.output_tokens) for one in asked]
        return part_of(tuple(np.array(column, float) for column in zip(*rows, strict=True)), self.rest)

    def routed(self, costs: Sequence[CostModel], hop: NetworkHop) -> tuple[Times, npt.NDArray[np.int64]]:
        """Return the times with the recorded choices, and what the router would have chosen."""
        logged = dict(zip(map(id, self._workload), self.fleet.requests, strict=True))
        router = RecordedChoices(create_router(self.fleet.header.router, self.fleet.header.seed), logged)
        ROUTERS[RECORDED] = lambda _: router
        try:
            times = self.whole(costs, hop, RECORDED)[0]
        finally:
            del ROUTERS[RECORDED]
        return times, np.array([router.asked[id(one)] for one in self._workload])

    def whole(self, costs: Sequence[CostModel], hop: NetworkHop | None, router: str = "") -> tuple[Times, Routes]:
        """Return the times and the routes of the fleet with its router, or with another one."""
        machines = self.fleet.machines
        groups = tuple(
            ReplicaGroup(f"replica {machine.number}", ReplicaSetup(machine.header.limits, own))
            for machine, own in zip(machines, costs, strict=True)
        )
        header, first = self.fleet.header, machines[0].header
        setup = Setup(
            first.limits, costs[0], first.depth, router=router or header.router, seed=header.seed, groups=groups,
            hop=hop,
        )  # fmt: skip
        columns, outcomes = simulated_columns(self._workload, setup)
        order = np.argsort(np.array(outcomes.indices))
        routes = Routes(*(np.array(column, int)[order] for column in (outcomes.replicas, outcomes.cached)))
        return part_of(columns, self.rest), routes


class RecordedChoices:
    """A router that makes the recorded choices. `asked` are those that another router would have made, by request.

    The other router is shown the simulated loads, after the recorded history. Requests are known by their id().
    """

    def __init__(self, router: Router, logged: Mapping[int, FrontRequest]) -> None:
        self.asked: dict[int, int] = {}
        self._router, self._logged = router, logged

    def choose(self, request: RoutedRequest, targets: Sequence[RouterTarget]) -> RouterTarget:
        """Return the recorded replica."""
        logged = self._logged[id(request)]
        self.asked[id(request)] = deepcopy(self._router).choose(request, targets).number
        self._router.choose(request, logged.targets)  # the recorded choice, so that it remembers what the front's did
        return next(target for target in targets if target.number == logged.replica)


def _served(fleet: RecordedFleet) -> Routes:
    named = {name: one for machine in fleet.machines for name, one in machine.requests.items()}
    cached = [named[one.prompt.name].cached_tokens for one in fleet.requests]
    return Routes(np.array([one.replica for one in fleet.requests]), np.array(cached))


# --- words


def fleet_verdict(named: Mapping[str, FleetPrediction]) -> str:
    """Each run's choices and hop, and the errors of the means with the recorded choices and without the hop."""
    lines = [
        "| run | hop (in the front) | requests of each replica: served, simulated | same replica, after equal history "
        "| prompt tokens cached: served, simulated | with the recorded choices: ttft, tpot, e2e | without a hop |",
        "|---" * 7 + "|",
    ]
    for name, one in named.items():
        total = [int(routes.cached.sum()) for routes in (one.served, one.simulated)]
        same = [f"{100 * one.same(replicas):.1f} %" for replicas in (one.simulated.replicas, one.asked)]
        errors = [_means(times, one.times.measured) for times in (one.routed, one.direct)]
        lines.append(
            f"| {name} | {one.hop} ({one.front_s * 1e3:.2g} ms) | {one.served.counts()}, {one.simulated.counts()} | "
            f"{', '.join(same)} | {total[0]:,}, {total[1]:,} | {' | '.join(errors)} |"
        )
    return "\n".join(lines)


def _means(predicted: Times, measured: Times) -> str:
    return ", ".join(f"{100 * errors['mean'].value:+.1f} %" for errors in predicted.errors(measured).values())
