"""Setup: the engines that serve a simulated workload.

Owns: engines, their number, router, deaths, and what is observed; checks. Does not: know a device (costs does).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.core.limits import Limits
from octavo.core.scheduler import Scheduler
from octavo.errors import ConfigError
from octavo.observe.sink import EventSink
from octavo.simulator.cost_model import CostModel
from octavo.simulator.tally import Tally

MakeSink = Callable[[Scheduler], EventSink | None]
GiveUp = Callable[[Tally, float], bool]


@dataclass(frozen=True, slots=True)
class ReplicaFailure:
    """A replica dies at `time` and is back, empty, `restart_s` later (None: never). Seconds of the simulation."""

    replica: int
    time: float
    restart_s: float | None = 30.0


@dataclass(frozen=True, slots=True)
class ReplicaSetup:
    """The engine of one replica."""

    limits: Limits
    costs: CostModel


@dataclass(frozen=True, slots=True)
class Setup:
    """The engines of a simulation and how they are driven.

    `depth` plans are in flight in each replica, `max_waiting` requests wait at most (0: no bound). `router` is a name
    of routers.ROUTERS; `others` are replicas by number that differ from `limits` and `costs`. `make_sink` is called for
    each scheduler made, and makes every step be planned by itself; otherwise `fast_forward` computes unchanged decode
    steps together, with the same outcome. `sample_s`: seconds between samples of each replica (0: none). With
    `own_keys` prompts without keys get unique keys, so that a preempted request finds what is left of its blocks.
    `give_up` is called from time to time with the tally and the time: True ends the run.
    """

    limits: Limits
    costs: CostModel
    depth: int = 1
    replicas: int = 1
    router: str = "round_robin"
    failures: tuple[ReplicaFailure, ...] = ()
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
        """Return the engine of a replica."""
        for other, setup in self.others:
            if other == number:
                return setup
        return ReplicaSetup(self.limits, self.costs)


def _check_failure(failure: ReplicaFailure, replicas: int) -> None:
    if not 0 <= failure.replica < replicas:
        raise ConfigError(f"a failure names replica {failure.replica}; there are 0 to {replicas - 1}")
    if failure.time < 0 or (failure.restart_s is not None and failure.restart_s < 0):
        raise ConfigError(f"a failure is at {failure.time} s, back after {failure.restart_s} s; give 0 or more")
