"""The observers of a live engine: its history and the history's readers, wired to the loop.

Owns: the wiring of the statistics' sections, and of the verbs explain, forecast, frames, export_statistics and
reset_statistics. An observer never ends an engine: a verb or section that raises is answered with the error.
Does not: fold events, collect figures or make frames.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec

from octavo.config import StatisticsConfig
from octavo.core.scheduler import Scheduler
from octavo.engine.loop import EngineLoop
from octavo.errors import EngineError
from octavo.observe.explainer import Explainer
from octavo.observe.frames import FrameRing, FrameSource
from octavo.observe.history import History, RequestFigures, guarded_reader
from octavo.observe.series import StepTimes
from octavo.observe.statistics import Collector, ReadPools

_LOG = logging.getLogger(__name__)
P = ParamSpec("P")
_OFF = "statistics are not collected; start the engine with --collect-statistics"


@dataclass(frozen=True, slots=True)
class Observation:
    """The observers of one engine; `collector` is None if statistics are not collected."""

    history: History
    frames: FrameRing
    collector: Collector | None


def observe_engine(
    loop: EngineLoop,
    scheduler: Scheduler,
    config: StatisticsConfig,
    model: str = "",
    device: str = "",
    read_pools: ReadPools | None = None,
) -> Observation:
    """Observe a loop as configured, and add the sections and verbs to it. Call before it starts.

    `read_pools` analyses the use of the KV pool.
    """
    now, figures = loop.clock.now, RequestFigures()
    if config.collect_statistics:
        loop.step_times = StepTimes(config.step_records)
        figures = RequestFigures(config.request_records)
    most, age_s = config.explain_kept, config.explain_kept_s
    history = History(scheduler, loop.step_times, now=now, max_ended=most, max_age_s=age_s, figures=figures)
    loop.watch(history)
    collector = Collector(config, history, loop.step_times, read_pools) if config.collect_statistics else None
    explainer = Explainer(history, now)
    frames = FrameRing(history, FrameSource("live", model, time.time() - now(), secrets.token_hex(4), device), now)
    verbs: dict[str, Callable[[str], object]] = {
        "explain": explainer.answer,
        "forecast": lambda argument: explainer.forecaster.new_request(argument == "model"),
        "frames": lambda cursor: frames.poll(cursor),
    }
    sections: dict[str, Callable[[], object]] = {} if read_pools is None else {"memory": read_pools}
    if collector is None:
        loop.verbs["reset_statistics"] = loop.verbs["export_statistics"] = lambda _: EngineError(_OFF)
    else:
        history.add_reader(guarded_reader("statistics", collector.read))
        sections["collected"] = collector.figures
        verbs["reset_statistics"] = lambda _: collector.reset()
        verbs["export_statistics"] = lambda _: collector.export()
    history.add_reader(guarded_reader("frames", frames.add))
    loop.verbs.update((name, guarded(name, act, EngineError)) for name, act in verbs.items())
    loop.sections.update((name, guarded(name, read, lambda text: {"error": text})) for name, read in sections.items())
    return Observation(history, frames, collector)


def guarded(name: str, act: Callable[P, object], answer: Callable[[str], object]) -> Callable[P, object]:
    """Return a function that returns the result of `act` or, if that raises, `answer` of the error's text."""

    def run(*args: P.args, **kwargs: P.kwargs) -> object:
        try:
            return act(*args, **kwargs)
        except Exception as error:  # the instrument shell
            _LOG.exception("%s failed", name)
            return answer(f"{name} failed: {type(error).__name__}: {error}")

    return run
