"""Autoscaling: how many replicas a group should have, which of them start and drain, and when each was there.

Owns: ScalingRule; the decision, which is that of Kubernetes' horizontal pod autoscaler; the status and the lifetimes
of a group's replicas. Does not: measure the load, or start, drain and stop an engine (run).
Invariants: a group never has more than `max_replicas` replicas; those that drain count, because their devices are held.
As in a live fleet, the newest replica is drained first; it gets no new request, and stops after its last one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from math import ceil, inf

from octavo.errors import ConfigError

METRICS = ("requests", "kv")


@dataclass(frozen=True, slots=True)
class ScalingRule:
    """When a group starts and drains replicas. Times are in seconds.

    The load of a replica is its number of open requests (`requests`), or the share of its KV pool that they hold
    (`kv`). Every `every_s` seconds the group wants as many replicas as bring the mean load to `target`, but no change
    while the load differs from the target by at most the share `tolerance`. It starts replicas once it has wanted more
    for `up_s`, and drains some once it has wanted fewer for `down_s`. A replica takes `start_s` to start.
    """

    metric: str = METRICS[0]
    target: float = 16.0
    every_s: float = 5.0
    start_s: float = 60.0
    up_s: float = 0.0
    down_s: float = 60.0
    tolerance: float = 0.1

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise ConfigError(f"a scaling rule has the metric {self.metric!r}; give one of {', '.join(METRICS)}")
        if not 0 < self.target < (1.0001 if self.metric == "kv" else inf):
            remedy = "a share of the KV pool up to 1" if self.metric == "kv" else "a number of requests above 0"
            raise ConfigError(f"a scaling rule has the target {self.target:g}; give {remedy}")
        if not 0 < self.every_s < inf:
            raise ConfigError(f"every_s of a scaling rule is {self.every_s:g}; give seconds above 0")
        for name in ("start_s", "up_s", "down_s", "tolerance"):
            if not 0 <= getattr(self, name) < inf:
                raise ConfigError(f"{name} of a scaling rule is {getattr(self, name):g}; give 0 or more")


class Autoscaler:
    """Decides how many replicas a group should have, from `least` to `most`."""

    def __init__(self, rule: ScalingRule, least: int, most: int) -> None:
        self._rule = rule
        self._least, self._most = least, most
        self._recent: deque[tuple[float, int]] = deque()  # earlier results of the rule, without its delays

    def wanted(self, now: float, load: float, current: int) -> int:
        """Return how many replicas the group should have. `load` is in replicas at their target."""
        count = current if abs(load - current) <= self._rule.tolerance * current else ceil(load)
        count = min(max(count, self._least), self._most)
        self._recent.append((now, count))
        while self._recent[0][0] < now - max(self._rule.up_s, self._rule.down_s):
            self._recent.popleft()
        up = min(count for time, count in self._recent if time >= now - self._rule.up_s)
        down = max(count for time, count in self._recent if time >= now - self._rule.down_s)
        return min(max(current, up), down)


class ReplicaStatus(IntEnum):
    """What a replica of a scaled group does. READY alone gets requests."""

    STOPPED = 0
    STARTING = 1
    READY = 2
    DRAINING = 3


_ACTIVE = (ReplicaStatus.STARTING, ReplicaStatus.READY)


@dataclass(slots=True)
class ReplicaLifetime:
    """One life of a replica: its devices are held in [begin, end), and it gets requests in [ready, drained)."""

    group: str
    replica: int
    num_engines: int
    begin: float
    ready: float
    drained: float = inf
    end: float = inf


class ScaledGroup:
    """The replicas of a scaled group, numbered from `first` on. At 0 s the `least` first ones are ready."""

    def __init__(self, name: str, rule: ScalingRule, numbers: range, least: int, num_engines: int) -> None:
        self.name = name
        self.rule = rule
        self.numbers = numbers
        self.lifetimes: list[ReplicaLifetime] = []
        self._num_engines = num_engines
        self._status = dict.fromkeys(numbers, ReplicaStatus.STOPPED)
        self._life: dict[int, ReplicaLifetime] = {}  # the last of each replica
        self._scaler = Autoscaler(rule, least, len(numbers))
        for number in numbers[:least]:
            self._begin(number, 0.0, 0.0)
            self._status[number] = ReplicaStatus.READY

    def with_status(self, status: ReplicaStatus) -> list[int]:
        """Return the replicas with this status, by number."""
        return [number for number in self.numbers if self._status[number] == status]

    def decide(self, now: float, load: float) -> tuple[list[int], list[int]]:
        """Return the replicas that start now, and those that drain from now on. A start may also be given up."""
        active = [number for number in self.numbers if self._status[number] in _ACTIVE]
        wanted = self._scaler.wanted(now, load, len(active))
        started = self.with_status(ReplicaStatus.STOPPED)[: max(0, wanted - len(active))]
        for number in started:
            self._begin(number, now, now + self.rule.start_s)
        drained = []
        newest_first = sorted(active, key=lambda number: (-self._life[number].begin, -number))
        for number in newest_first[: max(0, len(active) - wanted)]:
            self._life[number].drained = now
            if self._status[number] == ReplicaStatus.STARTING:
                self.stop(number, now)
            else:
                self._status[number] = ReplicaStatus.DRAINING
                drained.append(number)
        return started, drained

    def make_ready(self, number: int, now: float) -> bool:
        """Make a replica ready whose start ends now. Return False if the start was given up."""
        is_due = self._status[number] == ReplicaStatus.STARTING and self._life[number].ready == now
        if is_due:
            self._status[number] = ReplicaStatus.READY
        return is_due

    def stop(self, number: int, now: float) -> None:
        """Note that a replica's devices are given back."""
        self._status[number] = ReplicaStatus.STOPPED
        life = self._life[number]
        life.end, life.drained = now, min(life.drained, now)

    def fail(self, number: int, now: float, restart_s: float | None) -> bool:
        """Note a failure; return True if the replica restarts, which one that drained does not."""
        may_restart = self._status[number] == ReplicaStatus.READY and restart_s is not None
        self.stop(number, now)
        if may_restart and restart_s is not None:
            self._begin(number, now, now + restart_s)
        return may_restart

    def _begin(self, number: int, now: float, ready: float) -> None:
        self._status[number] = ReplicaStatus.STARTING
        self._life[number] = ReplicaLifetime(self.name, number, self._num_engines, now, ready)
        self.lifetimes.append(self._life[number])
