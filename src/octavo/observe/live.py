"""What observes a live engine: its history, and what reads it, wired to the loop.

Owns: the wiring: sections of the statistics, and the verbs explain, forecast, frames, export_statistics and
reset_statistics.
Does not: fold, collect or draw.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import asdict, dataclass

from octavo.config import StatisticsConfig
from octavo.core.scheduler import Scheduler
from octavo.errors import EngineError
from octavo.observe.explainer import Explainer
from octavo.observe.frames.encode import FrameSource
from octavo.observe.frames.streams import FrameRing
from octavo.observe.guards import guarded_reader, guarded_section, guarded_verb
from octavo.observe.history import History, RequestFigures
from octavo.observe.sink import WatchedLoop
from octavo.observe.statistics import Collector
from octavo.observe.step_times import StepTimes

_OFF = "statistics are not collected; start the engine with --collect-statistics"


@dataclass(frozen=True, slots=True)
class Observation:
    """What observes one engine; `collector` is None where statistics are not collected."""

    history: History
    explainer: Explainer
    frames: FrameRing
    collector: Collector | None


def observe_engine(
    loop: WatchedLoop, scheduler: Scheduler, config: StatisticsConfig, model: str = "", device: str = ""
) -> Observation:
    """Observe a loop as configured, and give it the sections and verbs. Call before it starts."""
    figures = None
    if config.collect_statistics:
        loop.step_times = StepTimes(config.step_records)
        figures = RequestFigures(config.request_records)
    now = loop.clock.now
    history = History(
        scheduler,
        loop.step_times,
        now=now,
        max_ended=config.explain_kept,
        max_age_s=config.explain_kept_s,
        figures=figures,
    )
    loop.watch(history)
    collector = _collect(loop, history, config)
    explainer = Explainer(history, now)
    loop.verbs["explain"] = guarded_verb("explain", explainer.answer)
    forecaster = explainer.forecaster
    loop.verbs["forecast"] = guarded_verb("forecast", lambda argument: forecaster.new_request(argument == "model"))
    ring = FrameRing(history, FrameSource("live", model, time.time() - now(), secrets.token_hex(4), device), now)
    history.add_reader(guarded_reader("frames", ring.add))
    loop.verbs["frames"] = guarded_verb("frames", lambda cursor: ring.poll(cursor))
    return Observation(history, explainer, ring, collector)


def _collect(loop: WatchedLoop, history: History, config: StatisticsConfig) -> Collector | None:
    if config.memory_analysis:
        loop.sections["memory"] = guarded_section(lambda: asdict(history.scheduler.memory()))
    if history.figures is None:
        loop.verbs["reset_statistics"] = loop.verbs["export_statistics"] = lambda _: EngineError(_OFF)
        return None
    collector = Collector(config, history, loop.step_times)
    history.add_reader(guarded_reader("statistics", collector.read))
    loop.sections["collected"] = guarded_section(collector.figures)
    loop.verbs["reset_statistics"] = guarded_verb("reset_statistics", lambda _: collector.reset())
    loop.verbs["export_statistics"] = guarded_verb("export_statistics", lambda _: collector.export())
    return collector
