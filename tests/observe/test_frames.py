"""Frames: what a reader makes of them is what the scheduler did, however they were asked for."""

from __future__ import annotations

import json
import random
from array import array
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.assembly import open_engine
from octavo.config.sources import config_from_keywords
from octavo.core.limits import GroupKind, GroupSpec
from octavo.core.plan import Event, EventKind, Events, StepFailure, StepPlan, StepResult
from octavo.core.request import Request, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.errors import EngineError
from octavo.observe import frames as frames_module
from octavo.observe.frames import (
    NO_OWNER,
    Frame,
    FrameRing,
    FrameSource,
    FrameWriter,
    PoolFrames,
    Window,
    queue_frame,
)
from octavo.observe.history import History, WaitCounts
from tests.engine.fakes import GatedExecutor, Harness, make_limits, make_request
from tests.observe.frame_reader import FrameReader, Row


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stalled machine must not end an answer early; one test sets its own bound of time."""
    monkeypatch.setattr(frames_module, "MAX_POLL_S", 60.0)


class Plain:
    """An EventSink that copies every row with its owner, the slow way, and lets others look at each step."""

    def __init__(self, scheduler: Scheduler, look: Callable[[], None] | None = None) -> None:
        self.scheduler, self.look = scheduler, look
        self.slots: dict[int, tuple[str, int]] = {}
        self.steps: list[tuple[int, list[Row]]] = []
        self.decisions: list[tuple[str, str]] = []
        self.num_tokens = 0

    def admitted(self, request: Request) -> None:
        pass

    def decided(self, decisions: tuple[Event, ...]) -> None:
        told = [event for event in decisions if event.kind != EventKind.CHUNKED]
        self.decisions += [(event.kind.name.lower(), event.request_id) for event in told]

    def stepped(self, plan: StepPlan, outcome: StepResult | StepFailure, events: Events) -> None:
        for slot in plan.freed_slots:
            self.slots.pop(slot, None)
        for new in plan.new_sequences:
            self.slots[new.slot] = new.request_id, new.choice
        self.steps.append((plan.step, [(*self.slots[row.slot], row.start, row.count) for row in plan.rows()]))
        self.num_tokens += len(events.token_ids)
        if self.look is not None:
            self.look()


class TieredExecutor(GatedExecutor):
    """With a host tier."""

    def make_pool(self, block_size: int, num_blocks: Any, host_blocks: Any = ()) -> None:
        super().make_pool(block_size, num_blocks, (40,))


class Shown(Harness):
    """A harness whose loop is shown, and watched by a FrameWriter and plainly."""

    def __init__(self, look: Callable[[], None] | None = None, **options: Any) -> None:
        limits = options["limits"] if "limits" in options else make_limits()
        options.setdefault("executor", TieredExecutor() if limits.host_blocks else GatedExecutor())
        super().__init__(**options)
        self.ring, history = self.observation.frames, self.observation.history
        self.plain = Plain(self.scheduler, look)
        self.written: list[Frame] = []
        self.writer = FrameWriter(history, self.written.append, FrameSource("recording", "fake"))
        history.add_reader(self.writer.read)
        self.loop.watch(self.plain)

    def poll(self, cursor: str) -> Any:
        return self.ask(self.loop.control, "frames", cursor)

    def read_all(self, reader: FrameReader, cursor: str = "") -> str:
        """Poll until nothing is left; what comes is JSON."""
        while True:
            answer = json.loads(json.dumps(self.poll(cursor)))
            reader.read(answer["frames"])
            cursor = answer["cursor"]
            if not answer["more"]:
                return cursor


def requests(count: int, **options: Any) -> list[Request]:
    return [make_request(f"r{index}", length=5 + index % 23, max_tokens=12, **options) for index in range(count)]


LOADS: dict[str, dict[str, Any]] = {
    "easy": {},
    "preempting": {"num_blocks": (24,), "headroom": 0.0, "max_sequences": 8},
    "swapping": {
        "num_blocks": (24,), "headroom": 0.0, "max_sequences": 8, "preemption": "swap", "host_blocks": (40,),
    },
    "chunks": {"max_batch_tokens": 8, "max_sequences": 6},
    "drafts": {"max_draft_tokens": 3, "num_blocks": (40,)},
}  # fmt: skip


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("load", LOADS)
def test_what_frames_tell_is_what_the_scheduler_did(load: str, depth: int) -> None:
    reader, cursor = FrameReader(), ""
    with Shown(limits=make_limits(**LOADS[load]), depth=depth) as engine:
        several = make_request("n3", 9, params=SamplingParams(max_tokens=9, n=3, seed=1))
        engine.ask(engine.loop.control, "pause", "")
        for request in (*requests(16), several):
            engine.post(request)
            cursor = engine.read_all(reader, cursor)
        engine.ask(engine.loop.control, "resume", "")
        for request_id in tuple(engine.requests):
            cursor = engine.read_all(reader, cursor)
            engine.end(request_id)
        engine.read_all(reader, cursor)
    plain, told = engine.plain, FrameReader()
    engine.writer.end()
    told.read(engine.written)
    for seen in (reader, told):
        assert seen.steps == plain.steps[: len(seen.steps)]
        assert len(plain.steps) - len(seen.steps) <= 1  # the slots of the last to end may be freed behind the poll
        assert [(kind, name) for kind, name, _ in seen.decisions] == plain.decisions
        assert not seen.open
        assert seen.num_heads == 1
    assert sum(frame["tok"][4] for frame in engine.written if frame["k"] == "step") == plain.num_tokens
    if load == "preempting":
        assert any(kind == "preempted" for kind, *_ in told.decisions)
    if load == "swapping":
        assert any(frame.get("swapped") for frame in engine.written)


def last_totals(frames: list[Frame]) -> Any:
    return next(frame["totals"] for frame in reversed(frames) if "totals" in frame)


@pytest.mark.parametrize("load", ["easy", "preempting"])
def test_totals_are_the_schedulers_wherever_a_reader_begins(load: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames_module, "MAX_STEPS", 8)
    with Shown(limits=make_limits(**LOADS[load])) as engine:
        for request in requests(12):
            engine.post(request)
        engine.ends()
        engine.post(make_request("again", length=9, max_tokens=3))
        engine.end("again")
        whole, late = engine.poll("")["frames"], engine.poll("now")["frames"]
        found = engine.scheduler.statistics()
    engine.writer.end()
    assert sum(frame["k"] == "step" for frame in whole) <= 8 < found.num_steps, "most steps are not kept"
    assert late[0]["totals"] == last_totals(whole) == last_totals(engine.written)
    assert late[0]["totals"] == {
        "finished": sum(found.finished.values()),
        "preempted": found.num_preemptions,
        "looked_up": found.prefix_queried_tokens,
        "found": found.prefix_hit_tokens,
    }
    assert late[0]["totals"]["finished"] == 13 and (found.num_preemptions > 0) == (load == "preempting")
    assert engine.written[0]["totals"]["finished"] == 0


def test_a_failed_step_is_told_and_its_rows_come_again() -> None:
    executor = GatedExecutor()
    executor.fail = lambda plan, names: RuntimeError("broken") if plan.step == 3 else None
    reader = FrameReader()
    with Shown(executor=executor) as engine:
        for request in requests(4):
            engine.post(request)
        engine.ends()
        answer = engine.poll("")
        reader.read(answer["frames"])
    assert [frame["n"] for frame in answer["frames"] if "fail" in frame] == [3]
    assert reader.steps == engine.plain.steps[: len(reader.steps)]


def test_cursors(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was lost is counted and begins with a head; an unknown cursor begins anew; "now" has no past."""
    monkeypatch.setattr(frames_module, "MAX_STEPS", 8)
    with Shown() as engine:
        first = engine.poll("")
        assert first["lost"] == 0 and first["frames"][0]["k"] == "head"
        for request in requests(3):
            engine.post(request)
        engine.ends()
        second = engine.poll(first["cursor"])
        assert second["lost"] > 0
        reader = FrameReader()
        reader.read(second["frames"])
        engine.read_all(reader, second["cursor"])
        assert reader.num_heads == 1 and len(reader.steps) > 4
        first_kept = [number for number, _ in engine.plain.steps].index(reader.steps[0][0])
        assert reader.steps == engine.plain.steps[first_kept:][: len(reader.steps)]
        assert engine.poll(second["cursor"])["lost"] == 0
        for unknown in ("other:3", "x", f"{first['cursor'].split(':')[0]}:999999", ":", "5"):
            assert engine.poll(unknown)["frames"][0]["k"] == "head"
        now = engine.poll("now")
        assert [frame["k"] for frame in now["frames"]] == ["head"]
        assert engine.poll(now["cursor"])["frames"] == []


def test_an_answer_is_bounded_and_says_that_there_is_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames_module, "MAX_POLL", 3)
    with Shown() as engine:
        for request in requests(5):
            engine.post(request)
        engine.ends()
        answer = engine.poll("")
        assert answer["more"] and sum(frame["k"] == "step" for frame in answer["frames"]) == 3
        reader = FrameReader()
        engine.read_all(reader)
        assert reader.steps == engine.plain.steps[: len(reader.steps)]


def test_an_answer_without_time_has_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames_module, "MAX_POLL_S", 0.0)
    monkeypatch.setattr(frames_module, "MIN_STEPS_S", 0.0)
    with Shown() as engine:
        for request in requests(5):
            engine.post(request)
        engine.ends()
        answer = engine.poll("")
        assert answer["more"] and sum(frame["k"] == "step" for frame in answer["frames"]) == 1
        reader = FrameReader()
        engine.read_all(reader)
        assert len(reader.steps) > 5 and reader.steps == engine.plain.steps[: len(reader.steps)]


def test_decisions_without_steps_are_a_note() -> None:
    executor = GatedExecutor()
    with Shown(executor=executor) as engine:
        engine.ask(engine.loop.control, "pause", "")
        cursor = engine.poll("now")["cursor"]
        engine.submit_all(requests(2))
        engine.loop.cancel(["r0"])
        engine.end("r0")
        engine.ring._looked_at = None  # as if a quarter of a second had passed
        frames = engine.poll(cursor)["frames"]
        assert [frame["k"] for frame in frames] == ["note", "queue", "blocks"]
        assert [entry[0] for entry in frames[0]["in"]] == ["r0", "r1"]
        assert ["finished", "r0"] in [event[:2] for event in frames[0]["ev"]]
        assert frames[1]["total"] == 1 and frames[1]["top"][0][0] == "r1"
        engine.ask(engine.loop.control, "resume", "")
        engine.end("r1")


def test_frames_that_cannot_be_made_do_not_end_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: FrameRing, cursor: str) -> None:
        raise ValueError("broken")

    with Shown() as engine:
        monkeypatch.setattr(FrameRing, "poll", fail)
        answer = engine.poll("")
        assert isinstance(answer, EngineError) and "broken" in str(answer)
        engine.submit_all(requests(1))
        engine.ends()


def test_a_stream_has_a_window_and_a_bound() -> None:
    scheduler = Scheduler(make_limits())
    written: dict[str, list[Frame]] = {"all": [], "some": [], "few": []}
    windows = {"all": Window(), "some": Window(begin=10.0, end=20.0), "few": Window(max_steps=4)}
    history = History(scheduler)
    writers = [
        FrameWriter(history, written[name].append, FrameSource("simulation"), window)
        for name, window in windows.items()
    ]
    for writer in writers:
        history.add_reader(writer.read)
    for request in requests(3):
        scheduler.admit(request, 0.0)
        history.admitted(request)
    now = 0.0
    while not (plan := scheduler.plan(now)).is_empty:
        result = StepResult(array("i", [5] * sum(flag & 1 for flag in plan.flags)))
        now += 2.0
        events = scheduler.commit(plan, result, now)
        history.decided((*plan.events, *events.decisions))
        history.stepped(plan, result, events)
    for writer in writers:
        writer.end()
        writer.end()
    steps = {name: [frame for frame in frames if frame["k"] == "step"] for name, frames in written.items()}
    assert [frame["t"] for frame in steps["some"]] == [10.0, 12.0, 14.0, 16.0, 18.0]
    assert {name: len(frames) for name, frames in steps.items()} == {"all": 13, "some": 5, "few": 4}
    assert written["few"][-1] == {"k": "end", "t": now, "cut": 9}
    reader = FrameReader()
    reader.read(written["some"])
    assert reader.head["slots"] == [[0, "r0", 0, 5], [1, "r1", 0, 6], [2, "r2", 0, 7]]
    assert [entry[0] for entry in reader.head["open"]] == ["r0", "r1", "r2"]
    assert all(frame["idle"] == 0.0 for frame in steps["all"])


# --- looks -----------------------------------------------------------------------------------------------


def cells(group: dict[str, Any]) -> tuple[bytes, list[int]]:
    owners = b64decode(group["owner"])
    return b64decode(group["cells"]), [int.from_bytes(owners[i : i + 2], "little") for i in range(0, len(owners), 2)]


def expected_cells(scheduler: Scheduler, group: int) -> bytes:
    pool = scheduler._state.cache.pools[group]
    named = bytes(
        min(2, count) if count else 3 * (key is not None)
        for count, key in zip(pool.references, pool.key_of, strict=True)
    )
    return named.ljust(pool.num_blocks, b"\0")  # the others were never used


@pytest.mark.parametrize("load", ["easy", "preempting", "swapping", "windows"])
def test_the_map_is_what_pools_and_tables_say(load: str) -> None:
    options = LOADS.get(load) or {
        "num_blocks": (64, 30),
        "groups": (GroupSpec(), GroupSpec(GroupKind.SLIDING, window=8)),
    }
    seen: set[int] = set()

    def look() -> None:
        state = engine.scheduler._state
        frame = blocks.frame(1.0)
        for index, (pool, group) in enumerate(zip(state.cache.pools, frame["groups"], strict=True)):
            values, owners = cells(group)
            assert group["per"] == 1 and group["n"] == pool.num_blocks
            assert values == expected_cells(engine.scheduler, index)
            seen.update(values)
            for block, (value, owner) in enumerate(zip(values, owners, strict=True)):
                sequence = state.slot_owner[owner] if value in (1, 2) else None
                if sequence is not None:
                    assert block in sequence.tables[index]

    engine = Shown(look, limits=make_limits(**options), executor=GatedExecutor(groups=make_limits(**options).groups))
    blocks = PoolFrames(engine.scheduler)
    shared = array("i", range(3, 23))
    with engine:
        for index in range(12):
            ids = shared + array("i", [3 + index, 4 + index, 5])
            request = Request(f"s{index}", ids, SamplingParams(max_tokens=10, temperature=0.0), 0.0)
            engine.post(request)
        engine.ends()
    assert {0, 1, 3} <= seen and (load == "windows" or 2 in seen)


def test_large_pools_are_shown_in_fewer_cells_and_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames_module, "MAX_CELLS", 100)
    monkeypatch.setattr(frames_module, "MAX_READ", 150)
    scheduler = Scheduler(make_limits(num_blocks=(1001,), max_batch_tokens=4096, max_model_len=1000))
    for index in range(4):
        params = SamplingParams(max_tokens=4)
        scheduler.admit(Request(f"r{index}", None, params, num_prompt_tokens=400), 0.0)
    scheduler.plan(0.0)
    blocks, known = PoolFrames(scheduler), []
    for _ in range(4):
        group = blocks.frame(0.0)["groups"][0]
        values, owners = cells(group)
        assert (len(values), len(owners), group["per"]) == (91, 91, 11)
        assert values == expected_cells(scheduler, 0)[::11]
        known.append(sum(owner != NO_OWNER for owner in owners))
    assert known == sorted(known) and known[0] < known[-1] == sum(map(bool, values))


def test_the_queue_is_told_in_order_with_reasons_and_numbers() -> None:
    scheduler, waiting = Scheduler(make_limits(num_blocks=(24,), max_sequences=4)), WaitCounts()
    for index in range(70):
        request = make_request(f"r{index}", 20, arrival=0.5, tenant=f"t{index % 3}")
        scheduler.admit(request, 0.5)
    plan = scheduler.plan(1.0)
    waiting.decided(plan.events)
    frame = queue_frame(scheduler, waiting, 2.0)
    order = [entry.name for entry in scheduler._state.waiting.in_order()]
    assert frame["total"] == len(order) == 70 - plan.num_rows
    assert [entry[0] for entry in frame["top"]] == order[:50]
    statistics = scheduler.statistics()
    assert frame["reasons"] == statistics.waiting_by_reason
    told = next(event for event in plan.events if event.kind == EventKind.DEFERRED)
    assert told.reason is not None
    assert frame["top"][0][1:] == [
        f"t{plan.num_rows % 3}", told.reason.name.lower(), told.needed, told.available, 1.5, 20,
    ]  # fmt: skip


def test_the_first_of_a_queue_are_those_of_the_whole_order() -> None:
    draw = random.Random(3)
    for policy in ("fcfs", "fair", "priority"):
        scheduler = Scheduler(make_limits(policy=policy, max_sequences=1))
        names = [f"r{index}" for index in range(200)]
        for name in names:
            options = {"tenant": f"t{draw.randrange(5)}", "priority": draw.randrange(4)}
            scheduler.admit(make_request(name, arrival=draw.random(), **options), 1.0)
        scheduler.cancel(draw.sample(names, 60), 1.0)
        order = scheduler._state.waiting.in_order()
        for count in (0, 1, 7, 50, 500):
            assert scheduler._state.waiting.first(count) == order[:count]


def test_a_ring_is_bounded_by_what_it_holds_on_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames_module, "MAX_WEIGHT", 30)
    scheduler = Scheduler(make_limits())
    history = History(scheduler)
    ring = FrameRing(history, FrameSource("live", stream_id="x"), lambda: 0.0)
    history.add_reader(ring.add)
    for request in requests(100):
        history.admitted(request)
        ring._looked_at = None
        ring.poll("")
    assert len(ring._ring) <= 2 * 30
    assert len(ring._tail.open) > 60


def test_an_engine_calls_its_model_as_clients_do(tmp_path: Path) -> None:
    path = tmp_path / "answers.json"
    path.write_text('{"rules": [{"say": "hello"}]}')
    for settings, name in (({}, "answers"), ({"served_model_name": "mine"}, "mine")):
        loop, _ = open_engine(config_from_keywords(f"scripted:{path}", settings))
        head: Any = loop.verbs["frames"]("now")
        assert head["frames"][0]["model"] == name and str(tmp_path) not in json.dumps(head)
        loop.stop()
