"""simulate: a workload through one engine or a fleet, on a virtual clock.

Owns: what is asked (Setup), what came of it (Run, ReplicaTotals, Samples). Does not: move time (fleet, replica),
judge the outcome (summary) or know a device (costs).
Invariant: equal workload and setup give an equal Run, with fast_forward or without.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from octavo.core.limits import Limits
from octavo.core.scheduler import Scheduler
from octavo.errors import ConfigError
from octavo.simulator.arrival import Arrival
from octavo.simulator.cost_model import CostModel
from octavo.simulator.outcomes import Outcomes
from octavo.simulator.tally import Tally
from octavo.trace.sink import EventSink

MakeSink = Callable[[Scheduler], EventSink]
GiveUp = Callable[[Tally, float], bool]


@dataclass(frozen=True, slots=True)
class Failure:
    """A replica dies at `time` and is back, empty, `restart_s` later (None: never). Seconds of the simulation."""

    replica: int
    time: float
    restart_s: float | None = 30.0


@dataclass(frozen=True, slots=True)
class ReplicaSetup:
    """One replica that differs from the others."""

    limits: Limits
    costs: CostModel


@dataclass(frozen=True, slots=True)
class Setup:
    """What serves a workload.

    `depth` plans are in flight in each replica, `max_waiting` requests wait at most (0: no bound). `router` is a name
    of routers.ROUTERS; `others` are replicas by number that differ from `limits` and `costs`. `make_sink` is called for
    each scheduler made, and makes every step be planned by itself; else `fast_forward` computes unchanged decode steps
    together, with the same outcome. `sample_s`: seconds between samples of each replica (0: none). With `own_keys`
    prompts without keys get keys of their own, so that a request that was preempted finds what is left of its blocks.
    `give_up` is asked now and then with what came of the requests and the time: True ends the run there.
    """

    limits: Limits
    costs: CostModel
    depth: int = 1
    replicas: int = 1
    router: str = "round_robin"
    failures: tuple[Failure, ...] = ()
    others: tuple[tuple[int, ReplicaSetup], ...] = ()
    max_waiting: int = 0
    make_sink: MakeSink | None = None
    fast_forward: bool = True
    sample_s: float = 0.0
    own_keys: bool = False
    seed: int = 0
    give_up: GiveUp | None = None

    def __post_init__(self) -> None:
        for name, least in (("depth", 1), ("replicas", 1), ("max_waiting", 0), ("sample_s", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; give at least {least}")
        if self.depth > 2:
            raise ConfigError(f"depth is {self.depth}; an engine has 1 or 2 plans in flight")
        for failure in self.failures:
            _check_failure(failure, self.replicas)
        for number, _ in self.others:
            if not 0 <= number < self.replicas:
                raise ConfigError(f"others names replica {number}; there are 0 to {self.replicas - 1}")

    def of(self, number: int) -> ReplicaSetup:
        """What a replica is made of."""
        for other, setup in self.others:
            if other == number:
                return setup
        return ReplicaSetup(self.limits, self.costs)


def _check_failure(failure: Failure, replicas: int) -> None:
    if not 0 <= failure.replica < replicas:
        raise ConfigError(f"a failure names replica {failure.replica}; there are 0 to {replicas - 1}")
    if failure.time < 0 or (failure.restart_s is not None and failure.restart_s < 0):
        raise ConfigError(f"a failure is at {failure.time} s, back after {failure.restart_s} s; give 0 or more")


@dataclass(slots=True)
class ReplicaTotals:
    """What one replica did, over all its lives. Seconds, tokens and counts.

    `busy_s`: the device computed; `host_s`: scheduling and delivery. `queried_tokens` of those admitted were looked up
    in the prefix cache, `hit_tokens` found. `forwarded_steps` of the steps were computed together with others.
    `max_blocks_used` is the most that running requests held of `num_blocks`, seen where a plan was made by itself.
    """

    requests: int = 0
    steps: int = 0
    forwarded_steps: int = 0
    busy_s: float = 0.0
    host_s: float = 0.0
    computed_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    rejected: int = 0
    failures: int = 0
    num_blocks: int = 0
    max_blocks_used: int = 0
    down_s: float = 0.0


class Samples:
    """Columns of samples, at the first turn of a replica after each `sample_s`, in order of time.

    `running` and `waiting` are requests, `used` and `cached` blocks of the leading cache group: held by running
    requests, and kept for their prefix alone. `steps` and `tokens` (computed) are of the replica's life so far.
    """

    def __init__(self) -> None:
        self.times = array("d")
        self.replicas = array("i")
        self.running = array("i")
        self.waiting = array("i")
        self.used = array("i")
        self.cached = array("i")
        self.steps = array("q")
        self.tokens = array("q")

    def __len__(self) -> int:
        return len(self.times)


@dataclass(slots=True)
class Run:
    """What came of a simulation: each request's outcome, each replica's totals, the time of the last end (seconds).

    With `gave_up` the requests that were open, and those to come, are not among the outcomes.
    """

    outcomes: Outcomes
    replicas: list[ReplicaTotals]
    duration: float
    samples: Samples = field(default_factory=Samples)
    gave_up: bool = False


def simulate(workload: Iterable[Arrival] | Sequence[Arrival], setup: Setup) -> Run:
    """Serve a workload to its end.

    `workload` is in order of time. Requests that follow another have their place anywhere in a sequence; in an iterator
    behind that, in the order of when they can come at the earliest. Raises ConfigError where it is not so.
    """
    from octavo.simulator.fleet import Fleet  # which stands on this module's types

    return Fleet(workload, setup).run()
