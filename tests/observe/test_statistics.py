"""What the engine tells of its steps and requests: against sums of the scheduler's, and against a plain count."""

from __future__ import annotations

import csv
import io
import json
import logging
import random
from array import array
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from octavo.config import StatisticsConfig
from octavo.core.plan import Event, EventKind, Events, StepFailure, StepPlan, StepResult, WaitReason
from octavo.core.request import FinishReason, Request, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.engine import wire
from octavo.engine.client import Accepted
from octavo.errors import EngineError
from octavo.executors.pool_use import pool_use
from octavo.frontend.async_llm import AsyncEngine
from octavo.frontend.local_client import LocalClient
from octavo.frontend.sessions import Sessions
from octavo.observe import statistics
from octavo.observe.history import History, RequestFigures, WaitCounts, count_prefill
from octavo.observe.metrics.export import Table, records, save_json_lines, to_csv
from octavo.observe.series import FINE_SECONDS, PARTS, Histogram, StepTimes
from octavo.observe.statistics import Collector, StepTable, request_table
from tests.engine import fakes
from tests.engine.fakes import Harness, make_limits, make_request, make_text
from tests.observe.part_times import recent


class Watched(Harness):
    """A harness whose loop is watched."""

    def __init__(self, config: StatisticsConfig | None = None, **options: Any) -> None:
        super().__init__(statistics=config, **options)
        self.collector = self.observation.collector

    def serve(self, *requests: Request) -> None:
        """Submit them all and wait for their ends."""
        for request in requests:
            self.requests[request.request_id] = request
            assert isinstance(self.ask(self.loop.submit, request), Accepted)
        self.wait(lambda: all(self.inbox(request.request_id).ends for request in requests))

    def figures(self) -> Any:
        return self.ask(self.loop.control, "statistics", "")

    def tables(self) -> Any:
        return self.ask(self.loop.control, "export_statistics", "")

    def now(self) -> float:
        return self.loop.clock.now()


def column(table: Table, name: str) -> list[Any]:
    return [record[name] for record in records(table)]


# --- steps ---------------------------------------------------------------------------------------------


def test_T01_figures_of_steps_add_up_to_the_totals() -> None:
    engine = Watched(limits=make_limits(max_batch_tokens=16, num_blocks=(17,), max_sequences=4, headroom=0.0))
    for index in range(6):  # before it starts, so that they are there at once
        request = engine.requests[f"r{index}"] = make_request(f"r{index}", length=30, max_tokens=30)
        engine.loop.submit(request, lambda _: None)
    with engine:
        engine.wait(lambda: all(engine.inbox(name).ends for name in engine.requests))
        steps, totals = engine.tables()["steps"], engine.figures()["scheduler"]
    assert abs(len(steps["rows"]) - totals["num_steps"]) <= 1 and len(steps["rows"]) > 10
    for name, total in {
        "tokens": "num_computed_tokens",
        "output_tokens": "num_output_tokens",
        "preemptions": "num_preemptions",
        "queried_tokens": "prefix_queried_tokens",
        "hit_tokens": "prefix_hit_tokens",
    }.items():
        assert sum(column(steps, name)) == totals[total], name
    assert totals["num_preemptions"] > 0
    assert sum(column(steps, "new_sequences")) == totals["num_admitted"] + totals["num_preemptions"]
    assert totals["num_requeued"] == 0
    assert sum(column(steps, "prefill_tokens")) > sum(column(steps, "prefill_rows")) > 0
    assert max(column(steps, "running")) >= 2 and max(column(steps, "waiting")) >= 2
    assert 0 < max(column(steps, "blocks_used")) <= 17
    assert column(steps, "step") == sorted(column(steps, "step"))
    for record in records(steps):
        assert record["prefill_rows"] + record["fork_rows"] <= record["rows"]
        assert all(record[f"{part}_s"] is not None for part in PARTS), "the step's own times"


def test_T01_a_step_has_its_own_times() -> None:
    with Watched() as engine:
        engine.serve(make_request("a", max_tokens=4))
        engine.figures()  # behind the last step: its end is told before its times are noted
        measured = recent(engine.loop.step_times, "step")
        assert column(engine.tables()["steps"], "step_s")[:4] == measured[:4] and len(measured) >= 4


@pytest.mark.parametrize(
    ("counts", "drafts", "expected"),
    [
        ([1, 1, 1], [], (0, 0, 0)),
        ([1, 5, 0, 1, 7], [], (2, 1, 12)),
        ([4, 5, 1], [3, 0, 0], (1, 0, 5)),
        ([], [], (0, 0, 0)),
    ],
)
def test_T01_make_up_of_a_batch(counts: list[int], drafts: list[int], expected: tuple[int, int, int]) -> None:
    plan = StepPlan(0, 0.0, counts=array("i", counts), num_drafts=array("i", drafts), num_query_tokens=sum(counts))
    assert count_prefill(plan) == expected


def event(kind: EventKind, name: str, time: float = 0.0, **fields: Any) -> Event:
    return Event(kind, name, time, 0, **fields)


def test_T01_who_waits_for_what_follows_the_decisions() -> None:
    waits = WaitCounts()
    assert waits.by_reason() == {}
    waits.decided([event(EventKind.DEFERRED, name, reason=WaitReason.KV_BLOCKS) for name in "ab"])
    waits.decided([event(EventKind.DEFERRED, "c", reason=WaitReason.SEQUENCE_CAP)])
    assert waits.by_reason() == {"kv_blocks": 2, "sequence_cap": 1}
    assert waits.by_reason() is waits.by_reason(), "no work while nothing changes"
    waits.decided([event(EventKind.DEFERRED, "b", reason=WaitReason.HEADROOM), event(EventKind.ADMITTED, "a")])
    waits.decided([event(EventKind.CHUNKED, "b")])
    assert waits.by_reason() == {"headroom": 1, "sequence_cap": 1}
    waits.decided([event(EventKind.FINISHED, "b"), event(EventKind.RESUMED, "c")])
    assert waits.by_reason() == {}


class Steps:
    """A table of steps that a history is told of."""

    def __init__(self, size: int) -> None:
        self.scheduler = Scheduler(make_limits())
        self.history = History(self.scheduler)
        self.table = StepTable(size, self.scheduler.gauges(), StepTimes())
        self.history.add_reader(lambda record: self.table.add(record, self.history.waits.by_reason()))

    def add(self, plan: StepPlan, time: float) -> None:
        self.history.stepped(plan, StepResult(None), Events(plan.step, time))


def test_T01_swaps_and_copies_of_a_step_are_in_blocks() -> None:
    steps = Steps(4)
    plan = StepPlan(3, 0.0, copies=array("i", [0, 1, 2]), swap_outs=array("i", [0, 1, 2, 0, 3, 4]))
    steps.scheduler._state.totals.num_swapped_out_tokens += 7
    steps.add(plan, 1.5)
    steps.add(StepPlan(4, 0.0, host_loads=array("i", [0, 1, 2])), 2.5)
    table = steps.table.table()
    assert column(table, "blocks_copied") == [1, 0]
    assert column(table, "blocks_swapped_out") == [2, 0]
    assert column(table, "blocks_loaded") == [0, 1]
    assert column(table, "swapped_out_tokens") == [7, 0]
    assert (column(table, "time_s"), column(table, "step"), column(table, "step_s")) == ([1.5, 2.5], [3, 4], [None] * 2)


def test_T05_rings_keep_the_last_and_differences_stay_right() -> None:
    steps = Steps(4)
    for number in range(11):
        steps.scheduler._state.totals.num_output_tokens += number
        steps.add(StepPlan(number, 0.0), float(number))
        assert len(steps.table) == len(steps.table.table()["rows"]) == min(4, number + 1)
    assert column(steps.table.table(), "output_tokens") == [7, 8, 9, 10] == column(steps.table.table(), "step")
    steps.table.reset(steps.scheduler.gauges())
    assert steps.table.table()["rows"] == []
    steps.scheduler._state.totals.num_output_tokens += 3
    steps.add(StepPlan(11, 0.0), 11.0)
    assert column(steps.table.table(), "output_tokens") == [3]


def test_T05_the_times_of_steps_are_bounded() -> None:
    times = StepTimes(3)
    assert (times.num_steps, recent(times, "step"), times.get(0)) == (0, [], None)
    for number in range(5):
        times.add([number / 2] * len(PARTS))
    assert recent(times, "step") == [1.0, 1.5, 2.0]
    assert (times.get(1), times.get(2), times.get(5)) == (None, (1.0,) * len(PARTS), None)
    assert times.summary() == {
        "num_steps": 5,
        "total_s": dict.fromkeys(PARTS, 5.0),
        "median_s": dict.fromkeys(PARTS, 1.5),
    }


# --- requests ------------------------------------------------------------------------------------------


class Requests:
    """A history with figures that is told of decisions and tokens."""

    def __init__(self, size: int) -> None:
        self.figures = RequestFigures(size)
        self.history = History(Scheduler(make_limits()), figures=self.figures)
        self.admitted = self.history.admitted

    def decided(self, decisions: list[Event]) -> None:
        self.history.decided(tuple(decisions))

    def tokens(self, ids: list[str], now: float) -> None:
        self.history.stepped(StepPlan(0, now), StepResult(None), Events(0, now, request_ids=ids))

    def table(self) -> Table:
        self.history.settle()
        return request_table(self.history)

    @property
    def num_open(self) -> int:
        self.history.settle()
        return len(self.history.open)


class Plain:
    """The same figures by keeping every time of every request."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}

    def gaps(self, name: str) -> list[float]:
        times = self.times.get(name, [])
        return sorted(new - old for old, new in pairwise(times))


@pytest.mark.parametrize("seed", range(25))
def test_T03_gaps_agree_with_a_plain_count(seed: int) -> None:
    rng, plain, found = random.Random(seed), Plain(), Requests(1000)
    live: dict[str, float] = {}
    used: list[str] = []
    now, ended = 0.0, []
    for step in range(120):
        now += rng.choice((0.25, 0.5, 2.0))
        if rng.random() < 0.4:
            name = f"r{rng.randrange(12)}" if rng.random() < 0.3 else f"s{step}"
            if name not in used:
                used.append(name)
                found.admitted(Request(name, array("i", [1, 2]), arrival=now - 0.125))
                live[name] = now - 0.125
        ids = [name for name in live if rng.random() < rng.choice((0.5, 1.0, 1.0))]
        ids += [name for name in ids if rng.random() < 0.1]  # a second choice, or a draft that held
        ends = [name for name in live if rng.random() < 0.05]
        found.decided([event(EventKind.FINISHED, name, now, finish_reason=FinishReason.STOP) for name in ends])
        if ids:
            found.tokens(ids, now)
        found.history.settle()
        for name in dict.fromkeys(ids):
            plain.times.setdefault(name, []).append(now)
        for name in ends:
            ended.append((name, now - live.pop(name)))
    table = list(records(found.table()))
    assert [(record["request_id"], record["e2e_s"]) for record in table] == ended and len(ended) > 10
    for record in table:
        gaps, times = plain.gaps(str(record["request_id"])), plain.times.get(str(record["request_id"]), [])
        assert record["ttft_s"] == (times[0] - float(str(record["arrival_s"])) if times else None)
        assert record["gap_mean_s"] == (pytest.approx(sum(gaps) / len(gaps)) if gaps else None)
        assert record["gap_max_s"] == (gaps[-1] if gaps else None)
        assert record["gap_p50_s"] == (gaps[len(gaps) // 2] if gaps else None)
    all_gaps = [gap for name in plain.times for gap in plain.gaps(name)]
    histogram = found.figures.gap_s
    assert sum(histogram.counts) == len(all_gaps) and histogram.total == pytest.approx(sum(all_gaps))


def test_T03_figures_of_one_request() -> None:
    found = Requests(8)
    found.admitted(Request("a", array("i", [1, 2, 3]), arrival=10.0))
    found.decided([event(EventKind.ADMITTED, "a", 12.0)])
    found.tokens(["a"], 13.0)
    found.decided([event(EventKind.PREEMPTED, "a", 13.0, by="b"), event(EventKind.SWAPPED, "a", 13.0)])
    found.decided([event(EventKind.RESUMED, "a", 14.0)])
    found.tokens(["b"], 15.0)
    found.tokens(["a"], 16.0)
    end = event(EventKind.FINISHED, "a", 17.0, finish_reason=FinishReason.LENGTH, num_tokens=3, cached_tokens=2)
    found.decided([end])
    found.tokens(["a"], 17.0)  # the loop tells decisions before the step they came with
    assert found.num_open == 0
    (record,) = records(found.table())
    assert record == {
        "request_id": "a", "finish_reason": "length", "arrival_s": 10.0, "queue_s": 2.0, "ttft_s": 3.0, "e2e_s": 7.0,
        "prompt_tokens": 3, "output_tokens": 3, "cached_tokens": 2, "preemptions": 1,
        "gap_mean_s": 2.0, "gap_p50_s": 3.0, "gap_p90_s": 3.0, "gap_p99_s": 3.0, "gap_max_s": 3.0,
    }  # fmt: skip


def test_T03_an_id_used_again_begins_anew() -> None:
    found = Requests(8)
    for arrival in (0.0, 10.0):
        found.admitted(Request("a", array("i", [1]), arrival=arrival))
        found.tokens(["a"], arrival + 1)
        found.tokens(["a"], arrival + 2)
        found.decided([event(EventKind.FINISHED, "a", arrival + 2, finish_reason=FinishReason.STOP)])
    table = found.table()
    assert column(table, "ttft_s") == [1.0, 1.0] and column(table, "gap_max_s") == [1.0, 1.0]
    assert sum(found.figures.gap_s.counts) == 2, "the time between the two is no gap"


def test_T03_a_request_that_never_ran_has_no_times_of_tokens() -> None:
    found = Requests(8)
    found.admitted(Request("a", array("i", [1]), arrival=1.0))
    found.decided([event(EventKind.FINISHED, "a", 4.0, finish_reason=FinishReason.TIMEOUT)])
    (record,) = records(found.table())
    assert (record["queue_s"], record["ttft_s"], record["gap_mean_s"], record["e2e_s"]) == (None, None, None, 3.0)
    assert found.figures.ttft_s.summary() == {"count": 0, **dict.fromkeys(("mean", "p50", "p90", "p99", "max"))}


def test_T03_through_the_loop() -> None:
    with Watched() as engine:
        engine.serve(*(make_request(f"r{index}", max_tokens=5, arrival=engine.now()) for index in range(3)))
        tables, figures = engine.tables(), engine.figures()["collected"]
    requests = tables["requests"]
    assert sorted(column(requests, "request_id")) == ["r0", "r1", "r2"]
    assert column(requests, "output_tokens") == [5, 5, 5] and column(requests, "finish_reason") == ["length"] * 3
    for record in records(requests):
        assert 0 <= record["queue_s"] <= record["ttft_s"] <= record["e2e_s"]  # type: ignore[operator]
        assert 0 <= record["gap_mean_s"] <= record["gap_max_s"]  # type: ignore[operator]
    assert figures["requests"]["num_ended"] == 3 and figures["requests"]["num_open"] == 0
    assert figures["requests"]["gap_s"]["count"] == 3 * 4
    assert (figures["num_request_records"], figures["num_step_records"]) == (3, len(tables["steps"]["rows"]))


def test_T03_ends_of_choices_are_counted() -> None:
    found = Requests(4)
    found.admitted(Request("a", array("i", [1])))
    found.decided([event(EventKind.CHOICE_FINISHED, "a", choice=n, finish_reason=FinishReason.STOP) for n in (0, 1)])
    assert found.figures.choice_ends == {"stop": 2}


def test_T05_ended_requests_are_bounded_and_open_ones_survive_a_reset() -> None:
    found = Requests(3)
    for index in range(5):
        found.admitted(Request(f"r{index}", array("i", [1])))
        found.decided([event(EventKind.FINISHED, f"r{index}", finish_reason=FinishReason.STOP)])
    found.admitted(Request("open", array("i", [1]), arrival=1.0))
    found.tokens(["open"], 2.0)
    assert column(found.table(), "request_id") == ["r2", "r3", "r4"] and found.figures.num_ended == 5
    found.figures.reset()
    assert (found.table()["rows"], found.figures.num_ended, found.num_open) == ([], 0, 1)
    found.decided([event(EventKind.FINISHED, "open", 3.0, finish_reason=FinishReason.STOP)])
    assert column(found.table(), "ttft_s") == [1.0]


# --- the line ------------------------------------------------------------------------------------------


class Beats:
    """A collector that is told of one-token steps, on a clock of its own."""

    def __init__(self, config: StatisticsConfig | None = None) -> None:
        self.scheduler = Scheduler(make_limits())
        self.history = History(self.scheduler, figures=RequestFigures(8))
        read_pools = partial(pool_use, self.scheduler) if config is not None and config.memory_analysis else None
        self.collector = Collector(config or StatisticsConfig(), self.history, StepTimes(), read_pools)
        self.history.add_reader(self.collector.read)
        self.now = 0.0

    def step(self, seconds: float, rest: float = 0.0) -> None:
        plan = StepPlan(0, self.now + rest, num_query_tokens=1)
        self.now += rest + seconds
        self.scheduler._state.totals.num_computed_tokens += 10
        self.scheduler._state.totals.num_output_tokens += 4
        self.history.stepped(plan, StepResult(None), Events(0, self.now))


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == statistics.__name__]


def test_T04_a_line_every_five_seconds_while_busy(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, statistics.__name__)
    beats = Beats()
    for _ in range(104):  # 13 s
        beats.step(0.125)
    assert len(lines(caplog)) == 2
    assert lines(caplog)[0].startswith("48 prompt + 32 output tokens/s, 0 running, 0 waiting, KV 0%")


def test_T04_a_rest_is_not_averaged_in_and_makes_no_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, statistics.__name__)
    beats = Beats()
    beats.step(0.5)
    beats.step(0.5, rest=60.0)
    assert lines(caplog) == []
    for _ in range(10):
        beats.step(0.5)
    assert len(lines(caplog)) == 1 and lines(caplog)[0].startswith("12 prompt + 8 output")
    beats.step(30.0)
    assert len(lines(caplog)) == 2, "one slow step is no rest"


def test_T04_nothing_is_made_up_when_nobody_listens(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, statistics.__name__)
    beats = Beats()
    beats.scheduler._state.requests = None  # type: ignore[assignment]  # a snapshot would fail on it
    for _ in range(50):
        beats.step(1.0)
    assert lines(caplog) == []


# --- keeping, forgetting, switches ---------------------------------------------------------------------


def test_T05_tables_as_csv_and_as_lines_of_json(tmp_path: Path) -> None:
    with Watched() as engine:
        engine.serve(*(make_request(f"r{index}", arrival=engine.now()) for index in range(2)))
        tables = engine.tables()
    rows = list(csv.DictReader(io.StringIO(to_csv(tables["steps"]))))
    assert [int(row["tokens"]) for row in rows] == column(tables["steps"], "tokens")
    path = tmp_path / "figures.jsonl"
    path.write_text("what was there before")
    save_json_lines(path, tables)
    read = [json.loads(line) for line in path.read_text().splitlines()]
    kinds = [record.pop("table") for record in read]
    assert kinds.count("totals") == 1 and kinds.count("requests") == 2
    steps = [record for kind, record in zip(kinds, read, strict=True) if kind == "steps"]
    assert steps == [json.loads(json.dumps(record)) for record in records(tables["steps"])]
    assert list(tmp_path.iterdir()) == [path], "nothing is left beside it"


def test_T05_a_file_that_cannot_be_written_whole_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    path.write_text("before")
    with pytest.raises(ValueError):
        save_json_lines(path, {"bad": {"columns": ["x"], "rows": [[1.0], [float("nan")]]}})
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_T05_reset_forgets_records_but_no_total() -> None:
    with Watched() as engine:
        engine.serve(make_request("a", arrival=engine.now()))
        before = engine.figures()
        assert engine.ask(engine.loop.control, "reset_statistics", "") is True
        tables, after = engine.tables(), engine.figures()
        assert tables["steps"]["rows"] == tables["requests"]["rows"] == []
        assert after["scheduler"] == before["scheduler"]
        assert after["collected"]["requests"]["gap_s"]["count"] == 0 < before["collected"]["requests"]["gap_s"]["count"]
        engine.serve(make_request("b", arrival=engine.now(), max_tokens=3))
        assert column(engine.tables()["steps"], "output_tokens")[:3] == [1, 1, 1]


def test_T06_statistics_are_plain_json() -> None:
    with Watched(StatisticsConfig(memory_analysis=True)) as engine:
        engine.serve(make_request("a", arrival=engine.now()))
        values = json.loads(json.dumps(engine.figures(), allow_nan=False))
        assert json.loads(json.dumps(engine.tables(), allow_nan=False))["totals"]["rows"]
    assert values["scheduler"]["num_requests"] == 1 and values["scheduler"]["num_output_tokens"] == 5
    assert values["memory"]["total"]["num_blocks"] == 512


def test_T06_without_collection_nothing_is_called_and_totals_are_there() -> None:
    with Watched(StatisticsConfig(collect_statistics=False)) as engine:
        assert engine.collector is None and engine.loop._sinks == [engine.observation.history]
        assert len(engine.observation.history._readers) == 1, "the frames alone"
        engine.serve(make_request("a"))
        figures = engine.figures()
        assert "collected" not in figures and "memory" not in figures
        assert figures["scheduler"]["num_output_tokens"] == 5
        for verb in ("export_statistics", "reset_statistics"):
            answer = engine.ask(engine.loop.control, verb, "")
            assert isinstance(answer, EngineError) and "--collect-statistics" in str(answer)


def test_T06_memory_is_looked_at_when_asked_for_and_now_and_then() -> None:
    beats = Beats(StatisticsConfig(memory_analysis=True))
    for _ in range(24):
        beats.step(0.5)
    memory = beats.collector.export()["memory"]
    assert column(memory, "time_s") == [5.5, 10.5] and column(memory, "num_blocks") == [512, 512]
    beats.collector.reset()
    assert beats.collector.export()["memory"]["rows"] == []
    assert Beats().collector.export()["memory"]["rows"] == []


def test_T06_reading_that_fails_is_told_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(scheduler: object) -> object:
        raise RuntimeError("no")

    monkeypatch.setattr(fakes, "pool_use", broken)
    with Watched(StatisticsConfig(memory_analysis=True)) as engine:
        assert "RuntimeError: no" in engine.figures()["memory"]["error"]
        engine.serve(make_request("a"))


def test_T06_a_failed_step_is_a_total_and_no_record() -> None:
    beats = Beats()
    beats.history.stepped(StepPlan(0, 0.0), StepFailure("no"), Events(0, 1.0))
    assert beats.collector.export()["steps"]["rows"] == []


@pytest.mark.parametrize("seed", range(5))
def test_T03_quantiles_of_a_histogram_are_near(seed: int) -> None:
    rng, histogram = random.Random(seed), Histogram(FINE_SECONDS)
    values = sorted(rng.lognormvariate(-3, 1) for _ in range(999))
    for value in values:
        histogram.observe(value)
    for share in (0.5, 0.9, 0.99):
        assert histogram.quantile(share) == pytest.approx(values[int(share * 999)], rel=0.2)
    assert histogram.summary()["max"] == values[-1] and Histogram(FINE_SECONDS).quantile(0.5) is None


async def test_T05_an_engine_is_asked_saved_and_reset_through_its_client(tmp_path: Path) -> None:
    engine = Watched()
    async with AsyncEngine(Sessions(LocalClient(engine.loop), make_text())) as llm:
        await llm.complete([5, 6, 7], SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))
        figures: Any = await llm.statistics()
        assert figures["collected"]["requests"]["num_ended"] == 1
        await llm.save_statistics(tmp_path / "figures.jsonl")
        read = [json.loads(line) for line in (tmp_path / "figures.jsonl").read_text().splitlines()]
        assert [record["output_tokens"] for record in read if record["table"] == "requests"] == [3]
        await llm.reset_statistics()
        assert (await llm.export_statistics())["requests"]["rows"] == []
    off = Watched(StatisticsConfig(collect_statistics=False))
    async with AsyncEngine(Sessions(LocalClient(off.loop), make_text())) as llm:
        with pytest.raises(EngineError, match="--collect-statistics"):
            await llm.save_statistics(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_T05_tables_cross_the_wire_as_they_are() -> None:
    with Watched() as engine:
        engine.serve(make_request("a", arrival=engine.now()))
        tables = engine.tables()
    sent = wire.frame(wire.ControlReply(1, 7, tables))
    (body,) = wire.FrameSplitter().feed(sent)
    got: Any = wire.decode_from_engine(body)
    assert json.dumps(got.value) == json.dumps(tables)
