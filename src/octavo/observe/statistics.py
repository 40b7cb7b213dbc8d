"""Statistics: what an engine tells of its steps, requests and memory while it runs.

Owns: the collector that watches the loop, its verbs (reset, export), the line in the log while busy.
Does not: decide, keep anything unbounded, or read a clock: every time is that of an event.
Invariant: without collection nothing is called by a step; the scheduler's totals never go back, also by a reset.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict

from octavo.config import StatisticsConfig
from octavo.core.plan import Event, Events, StepFailure, StepPlan, StepResult
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.errors import EngineError
from octavo.observe.metrics.export import Table
from octavo.observe.metrics.series import Histogram
from octavo.observe.pulse import PULSE_S, Pulse
from octavo.observe.request_records import RequestRecords
from octavo.observe.sink import WatchedLoop
from octavo.observe.step_records import StepRecords, Waits
from octavo.observe.step_times import StepTimes

_LOG = logging.getLogger(__name__)
MEMORY_RECORDS = 720  # an hour of them
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_OFF = "statistics are not collected; start the engine with --collect-statistics"


class Collector:
    """An EventSink that keeps the last steps and requests. All methods belong to the engine's thread."""

    def __init__(self, config: StatisticsConfig, scheduler: Scheduler, times: StepTimes) -> None:
        self._scheduler = scheduler
        self._steps = StepRecords(config.step_records, scheduler, times)
        self._requests = RequestRecords(config.request_records)
        self._waits = Waits()
        self._has_memory = config.memory_analysis
        self._memory: deque[tuple[float, Mapping[str, int | float]]] = deque(maxlen=MEMORY_RECORDS)
        self._step_tokens = Histogram(STEP_TOKENS)  # since the start, as every total
        self._pulse = Pulse()
        self._next_pulse: float | None = None
        self._last_time = 0.0

    # --- what the loop tells

    def admitted(self, request: Request) -> None:
        """A request was taken."""
        self._requests.admitted(request)

    def decided(self, decisions: tuple[Event, ...]) -> None:
        """Decisions, each exactly once."""
        self._waits.decided(decisions)
        self._requests.decided(decisions)

    def stepped(self, plan: StepPlan, outcome: StepResult | StepFailure, events: Events) -> None:
        """A plan was committed."""
        now = events.time
        if isinstance(outcome, StepResult):
            self._steps.add(plan, now, self._waits)
            self._step_tokens.observe(plan.num_query_tokens)
        if events.request_ids:
            self._requests.tokens(events.request_ids, now)
        self._requests.settle()
        if self._next_pulse is None or plan.now - self._last_time >= PULSE_S:  # the first step, or after a rest
            self._begin_pulse(now)
        elif now >= self._next_pulse:
            self._beat(now)
        self._last_time = now

    # --- what people ask

    def figures(self) -> Mapping[str, object]:
        """Requests' quantiles, ends of choices, and how much is kept."""
        return {
            "requests": self._requests.summary(),
            "choice_ends": dict(self._requests.choice_ends),
            "step_tokens": {"buckets": dict(self._step_tokens.cumulative()), "total": self._step_tokens.total},
            "num_step_records": len(self._steps),
            "num_request_records": len(self._requests),
        }

    def export(self) -> Mapping[str, Table]:
        """Everything kept, as tables: steps, requests, memory, and the totals since the start."""
        totals = asdict(self._scheduler.statistics())
        memory = [(time, *values.values()) for time, values in self._memory]
        names = tuple(self._memory[0][1]) if self._memory else ()
        return {
            "totals": {"columns": tuple(totals), "rows": [tuple(totals.values())]},
            "steps": self._steps.table(),
            "requests": self._requests.table(),
            "memory": {"columns": ("time_s", *names), "rows": memory},
        }

    def reset(self) -> bool:
        """Forget what is kept; totals since the start and open requests stay."""
        self._steps.reset()
        self._requests.reset()
        self._memory.clear()
        return True

    def _begin_pulse(self, now: float) -> None:
        self._next_pulse = now + PULSE_S
        if _LOG.isEnabledFor(logging.INFO):
            self._pulse.line({"scheduler": asdict(self._scheduler.statistics())}, now)

    def _beat(self, now: float) -> None:
        """Every few seconds while there are steps: a line in the log, and a look at the memory if wanted."""
        self._next_pulse = now + PULSE_S
        if _LOG.isEnabledFor(logging.INFO):
            line = self._pulse.line({"scheduler": asdict(self._scheduler.statistics())}, now)
            if line is not None:
                _LOG.info("%s", line)
        if self._has_memory:
            self._memory.append((now, asdict(self._scheduler.memory().total)))


def collect(loop: WatchedLoop, scheduler: Scheduler, config: StatisticsConfig) -> Collector | None:
    """Watch a loop as configured, and give it the verbs and sections for what is seen. Call before it starts."""
    collector: Collector | None = None
    if config.collect_statistics:
        loop.step_times = StepTimes(config.step_records)
        collector = Collector(config, scheduler, loop.step_times)
        loop.watch(collector)
        loop.sections["collected"] = _shielded(collector.figures)
    if config.memory_analysis:
        loop.sections["memory"] = _shielded(lambda: asdict(scheduler.memory()))
    loop.verbs["reset_statistics"] = _verb(collector.reset if collector is not None else None)
    loop.verbs["export_statistics"] = _verb(collector.export if collector is not None else None)
    return collector


def _verb(act: Callable[[], object] | None) -> Callable[[str], object]:
    if act is None:
        return lambda _: EngineError(_OFF)
    shielded = _shielded(act)

    def answer(_: str) -> object:
        value = shielded()
        failed = value.get("error") if isinstance(value, Mapping) else None
        return EngineError(str(failed)) if failed is not None else value

    return answer


def _shielded(read: Callable[[], object]) -> Callable[[], object]:
    """Reading figures must not end the engine: what went wrong is told as {"error": ...}."""

    def ask() -> object:
        try:
            return read()
        except Exception as error:  # the instrument shell
            _LOG.exception("statistics cannot be read")
            return {"error": f"statistics cannot be read: {type(error).__name__}: {error}"}

    return ask
