"""A recording of a real loop over a fake executor, and what watched it live."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.core.request import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.engine.loop import EngineLoop
from octavo.observe.history import EventSink
from octavo.observe.recording.format import Header
from tests.engine.fakes import GatedExecutor, Harness, make_limits, make_request
from tests.observe.recording.driving import ListTap, write_segment


class RecordedHarness(Harness):
    """A harness whose scheduler hands its calls to `items`."""

    def __init__(self, executor: GatedExecutor, depth: int = 1, **limits: Any) -> None:
        super().__init__(executor, limits=make_limits(**limits), depth=depth)
        clock = self.loop.clock
        tap = ListTap(clock.now)
        self.items = tap.items
        self.scheduler = Scheduler(self.limits, tap)
        self.loop = EngineLoop(self.scheduler, self.executor, depth=depth, clock=clock)
        self.loop.attach(self.receive)


def record(
    path: Path,
    executor: GatedExecutor,
    make_sink: Callable[[Scheduler], EventSink] | None = None,
    depth: int = 1,
    **limits: Any,
) -> RecordedHarness:
    """Serve some requests, one of them cancelled, and write the segment to `path`."""
    engine = RecordedHarness(executor, depth, **limits)
    if make_sink is not None:
        engine.loop.watch(make_sink(engine.scheduler))
    began = engine.loop.clock.now()
    for index in range(14):
        engine.post(make_request(f"r{index}", 5 + 2 * index, max_tokens=12, arrival=began, tenant=f"t{index % 2}"))
    engine.post(make_request("n2", 9, params=SamplingParams(max_tokens=9, n=2, seed=1), arrival=began))
    engine.post(make_request("gone", 9, max_tokens=60, arrival=began))
    engine.loop.cancel(["gone"])
    with engine:
        engine.ends()
    header = Header("fake", engine.limits, depth, device="cpu", began=1000.0, clock=began)
    write_segment(path, header, engine.items)
    return engine
