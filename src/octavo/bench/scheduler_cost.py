"""The cost of a scheduler alone: plan and commit of a step, and admission.

Owns: the medians, the targets, and a bare Python loop over as many rows. Does not: set loads up.
Invariant: several schedulers under one load are stepped in turn, so that they see the same machine.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from octavo.bench.scheduler_loads import SPARE_STEPS, LoadSetting, StepTime
from octavo.errors import ConfigError

RUNNING = (32, 256, 1024)
WAITING = (0, 100_000)
TARGET_US = {256: 300.0, 1024: 1000.0}  # plan and commit of a decode step
ADMIT_TARGET_US = 30.0  # without the keys of the prompt
WARM_UP = 4


class Subject(Protocol):
    """A scheduler under a load."""

    name: str
    setting: LoadSetting
    admit_s: list[float]

    def step(self) -> StepTime:
        """Plan and commit one step."""
        ...


@dataclass(frozen=True, slots=True)
class Cost:
    """Medians in microseconds of a step's plan and commit, and of one admission.

    `bare_us`: a bare loop over as many rows in the same process. `target_us`: of the whole step, where there is one.
    """

    scheduler: str
    load: str
    policy: str
    running: int
    waiting: int
    plan_us: float
    commit_us: float
    step_us: float
    step_p99_us: float
    admit_us: float
    bare_us: float
    target_us: float | None

    @property
    def is_met(self) -> bool | None:
        """True if the step is within its target; None without one."""
        return None if self.target_us is None else self.step_us <= self.target_us

    def as_dict(self) -> dict[str, object]:
        """Return plain values, for JSON."""
        return asdict(self)


def measure(subjects: Sequence[Subject]) -> list[Cost]:
    """Step all of them in turn, until each has its steps, and sum up; all have the same setting.

    Raises ConfigError when a scheduler makes no steps of the load's kind.
    """
    setting = subjects[0].setting
    taken: list[list[StepTime]] = [[] for _ in subjects]
    bare, bare_s = BareLoop(setting.num_rows), []
    for _ in range(setting.steps + SPARE_STEPS):
        bare_s.append(bare.time())
        for subject, times in zip(subjects, taken, strict=True):
            if len(times) < setting.steps + WARM_UP and (one := subject.step()).is_typical:
                times.append(one)
    for subject, times in zip(subjects, taken, strict=True):
        if len(times) < setting.steps + WARM_UP:
            raise ConfigError(
                f"{subject.name} under {setting.policy} made {len(times)} steps of load {setting.load.name}, not "
                f"{setting.steps + WARM_UP}; measure this load under fcfs"
            )
    bare_us = _us(statistics.median(bare_s))
    return [_sum_up(subject, times[WARM_UP:], bare_us) for subject, times in zip(subjects, taken, strict=True)]


def _sum_up(subject: Subject, times: list[StepTime], bare_us: float) -> Cost:
    setting = subject.setting
    totals = sorted(one.plan_s + one.commit_s for one in times)
    return Cost(
        scheduler=subject.name,
        load=setting.load.name,
        policy=setting.policy,
        running=setting.num_rows,
        waiting=setting.waiting,
        plan_us=_us(statistics.median(one.plan_s for one in times)),
        commit_us=_us(statistics.median(one.commit_s for one in times)),
        step_us=_us(statistics.median(totals)),
        step_p99_us=_us(totals[min(len(totals) - 1, len(totals) * 99 // 100)]),
        admit_us=_us(statistics.median(subject.admit_s)),
        bare_us=bare_us,
        target_us=TARGET_US.get(setting.num_rows) if setting.load.name == "decode" else None,
    )


class _Counters:
    __slots__ = ("computed", "known", "scheduled")

    def __init__(self) -> None:
        self.computed = self.known = self.scheduled = 0


class BareLoop:
    """The least work of a plan and a commit in plain Python: visit each row, fill four columns, count, take one id."""

    def __init__(self, num_rows: int) -> None:
        self._rows = [_Counters() for _ in range(num_rows)]

    def time(self) -> float:
        """Visit all rows once; return seconds."""
        start = time.perf_counter()
        slots, starts, counts, flags = [], [], [], []
        for index, row in enumerate(self._rows):
            slots.append(index)
            starts.append(row.scheduled)
            counts.append(1)
            flags.append(1)
            row.scheduled += 1
        columns = array("i", slots), array("i", starts), array("i", counts), array("i", flags)
        ids, positions = array("i"), array("i")
        for row, token in zip(self._rows, columns[2], strict=True):
            row.computed += 1
            row.known += 1
            ids.append(token)
            positions.append(row.known)
        return time.perf_counter() - start


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
