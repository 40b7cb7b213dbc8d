"""Traces: what the Trace Event Format asks for, and the times of the events that they were made from."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from octavo.core.plan import Event, EventKind, Events, StepFailure, StepPlan, StepResult
from octavo.core.request import Request, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.observe.history import History
from octavo.observe.perfetto import ENGINE, PARTS, REQUESTS, STEPS, PerfettoWriter, TraceClip, TraceFile
from octavo.observe.series import StepTimes
from tests.engine.fakes import GatedExecutor, Harness, make_limits, make_request
from tests.observe.part_times import recent
from tests.observe.test_frames import LOADS, TieredExecutor

NEEDED = {  # fields of each phase, beside ph
    "X": {"name", "pid", "tid", "ts", "dur"},
    "C": {"name", "pid", "ts", "args"},
    "i": {"name", "pid", "tid", "ts", "s"},
    "s": {"name", "pid", "tid", "ts", "id", "cat"},
    "f": {"name", "pid", "tid", "ts", "id", "cat", "bp"},
    "M": {"name", "pid", "args"},
}
SLACK = 1e-3  # microseconds: times are whole nanoseconds


class Kept:
    """An EventSink that keeps what it is told."""

    def __init__(self) -> None:
        self.decisions: list[Event] = []
        self.steps: list[tuple[StepPlan, StepResult | StepFailure, Events]] = []

    def admitted(self, request: Request) -> None:
        pass

    def decided(self, decisions: tuple[Event, ...]) -> None:
        self.decisions.extend(decisions)

    def stepped(self, plan: StepPlan, outcome: StepResult | StepFailure, events: Events) -> None:
        self.steps.append((plan, outcome, events))


def check_format(events: list[dict[str, Any]]) -> None:
    """Fields, times, nesting on each track in the order written, arrows with both ends in slices."""
    last: dict[tuple[int, int], float] = defaultdict(float)
    open_slices: dict[tuple[int, int], list[float]] = defaultdict(list)
    slices: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    arrows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        kind = event["ph"]
        assert event.keys() >= NEEDED[kind], event
        if kind == "M":
            continue
        assert event["ts"] >= 0 and isinstance(event["ts"], float)
        track = event["pid"], event.get("tid", 0)
        if kind == "X":
            assert event["dur"] >= 0
            assert event["ts"] >= last[track] - SLACK, "slices are written in order"
            last[track] = event["ts"]
            while open_slices[track] and open_slices[track][-1] <= event["ts"] + SLACK:
                open_slices[track].pop()
            end = event["ts"] + event["dur"]
            assert not open_slices[track] or end <= open_slices[track][-1] + SLACK, ("slices overlap", event)
            open_slices[track].append(end)
            slices[track].append(event)
        elif kind in "sf":
            arrows[event["id"]].append(event)
    for ends in arrows.values():
        assert [event["ph"] for event in ends] == ["s", "f"] and ends[0]["ts"] <= ends[1]["ts"]
        for event in ends:
            around = slices[event["pid"], event["tid"]]
            assert any(one["ts"] <= event["ts"] <= one["ts"] + one["dur"] for one in around), event


def traced(load: str, depth: int = 1, fail_at: int = -1) -> tuple[list[dict[str, Any]], Kept, StepTimes]:
    limits = make_limits(**LOADS[load])
    executor = TieredExecutor() if limits.host_blocks else GatedExecutor()
    executor.fail = lambda plan, names: RuntimeError("broken") if plan.step == fail_at else None
    engine, events, kept = Harness(executor, limits=limits, depth=depth), list[dict[str, Any]](), Kept()
    history = engine.observation.history
    writer = PerfettoWriter(history, events.append)
    history.add_reader(writer.read)
    engine.loop.watch(kept)
    for index in range(16):
        engine.post(make_request(f"r{index}", 5 + index, max_tokens=12, arrival=engine.loop.clock.now()))
    engine.post(make_request("n2", 9, params=SamplingParams(max_tokens=9, n=2, seed=1), tenant="t"))
    with engine:
        engine.ends()
    writer.end()
    writer.end()
    return events, kept, engine.loop.step_times


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("load", LOADS)
def test_a_trace_keeps_the_rules_of_its_format(load: str, depth: int) -> None:
    events, kept, _ = traced(load, depth)
    check_format(events)
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {"steps", "n2", *(f"r{index}" for index in range(16))}
    ends = [event["name"] for event in events if event["ph"] == "i" and event["name"].startswith("finished")]
    assert ends == ["finished: length"] * 17
    waits = sum(event.kind == EventKind.PREEMPTED for event in kept.decisions)
    swaps = sum(event.kind == EventKind.SWAPPED for event in kept.decisions)
    shown = [event["name"] for event in events if event["ph"] == "X" and event["pid"] == REQUESTS]
    assert shown.count("preempted") + shown.count("swapped out") == waits
    assert shown.count("swapped out") == swaps
    if load == "preempting":
        assert waits and any(event["ph"] == "s" for event in events)
    if load == "swapping":
        assert swaps


def test_times_add_up_to_those_of_the_events() -> None:
    events, kept, times = traced("easy", fail_at=5)
    steps = [event for event in events if event["ph"] == "X" and event["tid"] == STEPS and event["pid"] == ENGINE]
    whole = [event for event in steps if event["name"] not in PARTS]
    assert [event["name"] for event in whole] == [f"step {plan.step}" for plan, _, _ in kept.steps]
    assert [event["args"].get("failed") for event in whole if "failed" in event["args"]] == ["RuntimeError: broken"]
    emitted = sum(recent(times, "emit"))
    seconds = sum(told.time - plan.now for plan, _, told in kept.steps)
    slack, shown = 1e-8 * len(whole), sum(event["dur"] for event in whole) / 1e6
    assert seconds + emitted - slack <= shown <= seconds + emitted + sum(recent(times, "schedule")) + slack
    for part in PARTS:
        dur = sum(event["dur"] for event in steps if event["name"] == part) / 1e6
        assert dur == pytest.approx(sum(recent(times, part)), abs=slack), part
    rows = [event for event in events if event["ph"] == "X" and event["pid"] == REQUESTS and "tokens" in event["args"]]
    computed = sum(event["args"]["tokens"] for event in rows if event["name"] in ("prefill", "decode"))
    assert computed == sum(plan.num_query_tokens for plan, _, _ in kept.steps)
    tokens = [event["args"]["value"] for event in events if event["ph"] == "C" and event["name"] == "tokens in a step"]
    assert tokens[0] == kept.steps[0][0].num_query_tokens


def test_requests_without_a_track_are_counted() -> None:
    scheduler, events = Scheduler(make_limits()), list[dict[str, Any]]()
    history = History(scheduler)
    clip = TraceClip(events.append, max_tracks=2)
    writer = PerfettoWriter(history, clip.write)
    history.add_reader(writer.read)
    for index in range(5):
        request = make_request(f"r{index}")
        scheduler.admit(request, 0.0)
        history.admitted(request)
    history.decided(scheduler.plan(1.0).events)
    writer.end()
    assert clip.num_undrawn == 3
    assert [event["args"]["name"] for event in events if event["name"] == "thread_name"] == ["r0", "r1"]
    check_format(events)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_file_is_json_and_compressed_by_its_name(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    file = TraceFile(path)
    for index in range(3):
        file.write({"ph": "i", "name": f"e{index}"})
    file.about["undrawn"] = 2
    file.close()
    file.close()
    data = path.read_bytes()
    text = gzip.decompress(data) if name.endswith(".gz") else data
    parsed = json.loads(text)
    assert [event["name"] for event in parsed["traceEvents"]] == ["e0", "e1", "e2"]
    assert parsed["otherData"] == {"undrawn": 2}
