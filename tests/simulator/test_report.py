"""The report: one file that asks for nothing, says what was set, and holds whatever names users choose."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.simulator.test_summary import random_outcomes, run_of

from octavo.core.limits import Limits
from octavo.simulator.charts import RIGHT, TOP, WIDTH, Chart, Line, Mark, draw, draw_alone, short
from octavo.simulator.costs import Hardware, cost_model
from octavo.simulator.goals import read_goals
from octavo.simulator.report import TITLES, Case, advice_lines, page, seconds
from octavo.simulator.run import simulate
from octavo.simulator.saved import as_json, read_cases
from octavo.simulator.setup import Setup
from octavo.simulator.summary import summarise
from octavo.simulator.workloads import Shaping, open_workload

VOID = {"meta"}


class Structure(HTMLParser):
    """Tags that open and close."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def cases(count: int = 2) -> list[Case]:
    """Some runs."""
    made = []
    for seed in range(count):
        run = run_of(random_outcomes(seed, 150), steps=10, busy_s=3.0, num_blocks=100)
        made.append(Case.of(f"case{seed}", run, summarise(run, {"ttft": 1.0}, 2.0)))
    return made


@pytest.mark.parametrize("count", [1, 2, 6])
def test_a_page_is_whole_and_asks_for_nothing(count: int) -> None:
    text = page("A title", cases(count), {"workload": ["poisson:rate=1"]}, ["3 left out"], ["try <this>"])
    structure = Structure()
    structure.feed(text)
    assert structure.open == [] and "svg" in structure.seen
    assert not {"script", "link", "img", "iframe"} & {*structure.seen}
    assert not re.search(r"https?://|url\(|@import", text)
    assert "prefers-color-scheme:dark" in text and "3 left out" in text and "poisson:rate=1" in text
    assert '<ul class="advice">\n<li>try &lt;this&gt;</li>' in text


def test_names_of_users_are_text() -> None:
    [case] = cases(1)
    evil = "<script>alert(1)</script>"
    case.services = {evil: case.curves["waiting"]}
    case.facts["tenants"]["by_name"] = {evil: next(iter(case.facts["tenants"]["by_name"].values()))}
    case.label = evil
    case.bands = {"bounds": {evil: [(0.0, 1.0)]}, "waits": {evil: [(0.0, 1.0)]}}
    text = page(evil, [case, case], {evil: [evil]}, [evil], [evil])
    assert "<script" not in text and "&lt;script&gt;" in text


def test_the_best_of_a_row_stands_out_only_where_there_is_a_choice() -> None:
    one = cases(1)[0]
    assert "<b>" not in page("t", [one], {}, [], [])
    assert "<b>" not in page("t", [one, one], {}, [], [])
    assert "<b>" in page("t", cases(2), {}, [], [])


def simulated(label: str, max_sequences: int, replicas: int = 1) -> Case:
    """Return the case of a real run, with objectives."""
    arrivals = list(open_workload("poisson:rate=9,prompt=300,output=60,requests=200", Shaping(seed=2)))
    costs = cost_model("roofline", Hardware.of("llama-3.1-8b", "h100"))
    limits, goals = Limits(16, (9000,), 4096, 1000, 8192, max_sequences), read_goals("ttft=0.5,tpot_p95=0.05")
    run = simulate(arrivals, Setup(limits, costs, replicas=replicas, sample_s=1.0))
    return Case.of(label, run, summarise(run, goals.bounds), goals)


def test_plots_come_before_tables_and_settings_of_several_runs_have_a_column_each() -> None:
    runs = [simulated("few", 2), simulated("many", 64)]
    text = page("t", runs, {"policy": ["fcfs", "fair"], "seed": ["0", "1"]}, [], [])
    places = [
        text.index(words)
        for words in (">goodput<", ">Latencies<", ">What limits<", ">Over time<", "<table", ">Figures<")
    ]
    assert places[:4] == sorted(places[:4]) and places[3] < min(places[4:])
    assert "<th>setting</th><th>few</th><th>many</th>" in text and "<td>policy</td><td>fcfs</td><td>fair</td>" in text
    for title in (
        "Devices&#x27; time by what bounds it, few",
        "Requests that wait, by reason, few",
        "How full it is, many",
    ):
        assert f'aria-label="{title}"' in text


def test_objectives_are_drawn_with_what_was_reached() -> None:
    few, many = simulated("few", 2), simulated("many", 64)
    share = few.facts["goodput"]["met"]["ttft"]
    assert few.objectives[0][:4] == ("ttft", "", 0.5, share) and 0 < share < 1
    assert many.objectives[1].value == many.facts["tpot"]["p95"] and many.objectives[1].share > 0.95
    text = page("t", [few, many], {}, [], [])
    shown = dict(zip(TITLES, text.split("<svg")[1:], strict=False))
    assert "≤ 500 ms" in shown["ttft"] and f">{100 * share:.1f} %</text>" in shown["ttft"]
    assert "p95 ≤ 50 ms" in shown["tpot"] and 'class="mark"' in shown["tpot"]
    assert 'class="mark"' not in shown["e2e"]
    without = page("t", cases(1), {}, [], [])
    assert 'class="mark"' not in without


def test_what_limits_is_divided_into_shares_of_time_and_reasons() -> None:
    case = simulated("few", 2, replicas=2)
    bounds, waits, use = case.bands["bounds"], case.bands["waits"], case.bands["use"]
    assert {"compute", "memory bandwidth", "fixed costs", "host"} <= {*bounds} and {*waits} == {"sequence_cap"}
    for level in zip(*bounds.values(), strict=True):
        assert 0 <= sum(y for _, y in level) <= 100.5
    mean = {name: sum(y for _, y in points) / len(points) for name, points in (bounds | use).items()}
    busy = case.facts["replicas"]["busy_share"] * 100
    assert sum(mean[name] for name in bounds if name != "host") == pytest.approx(busy, rel=0.05)
    assert mean["device busy"] == pytest.approx(busy, rel=0.05) and mean["memory bandwidth"] > 2 * mean["compute"] > 0
    assert max(y for _, y in use["slots"]) == pytest.approx(100, abs=2) and mean["KV pool"] < 5
    assert mean["compute"] < 15 and mean["step tokens"] < 5
    idle = simulated("many", 64)
    assert idle.bands["waits"] == {} and "nothing to show" not in page("t", [idle], {}, [], []).split("Over time")[0]


def test_advice_of_several_cases_is_said_once_or_names_its_cases() -> None:
    one, two = cases(2)
    one.advice, two.advice = ["both", "first"], ["both", "second"]
    assert advice_lines([one, two]) == ["both", "case0: first", "case1: second"]
    assert advice_lines([one]) == ["both", "first"]


def test_saved_cases_are_read_back_as_they_were(tmp_path: Path) -> None:
    case = simulated("fcfs", 2)
    facts = {"settings": {"model": "m"}, "runs": {"fcfs": case.facts}}
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(as_json(facts, [case]))
    read, settings = read_cases([str(tmp_path / "a.json"), str(tmp_path / "b.json")])
    assert [one.label for one in read] == ["a", "b"] and settings == {"model": ["m", "m"], "policy": ["fcfs", "fcfs"]}
    case.label = "a"
    assert page("t", [read[0]], {}, [], []) == page("t", [case], {}, [], [])


def test_bands_lie_on_each_other_and_marks_far_above_do_not_flatten_the_lines() -> None:
    lines = [Line("low", [(0.0, 1.0), (4.0, 1.0)]), Line("high", [(0.0, 3.0), (4.0, 3.0)], 1)]
    stacked = draw(Chart("t", "s", "%", lines, is_stacked=True))
    low, high = re.findall(r'<path d="M([^"]*)Z" class="band"', stacked)
    edge = [[tuple(map(float, point.split())) for point in path.split("L")] for path in (low, high)]
    assert edge[0][:2] == edge[1][:1:-1] and edge[1][0][1] < edge[0][0][1] < edge[0][-1][1]
    assert edge[1][0][1] == TOP, "the two together reach the top of the axis, 4"
    near, far = (draw(Chart("t", "s", "s", lines, marks=[Mark(value, [("bound", None)])])) for value in (9.0, 900.0))
    assert 'class="mark"' in near and 'class="mark"' not in far and ">bound</text>" in far
    upright = draw(Chart("t", "s", "s", lines, marks=[Mark(8.0, [("a & b", None), ("5 %", 1)], is_upright=True)]))
    assert (
        f'd="M{WIDTH - RIGHT}.0 {TOP}V' in upright
        and "a &amp; b" in upright
        and 'text-anchor="end" class="note"' in upright
    )


@pytest.mark.parametrize("is_log", [False, True])
@pytest.mark.parametrize(
    "points",
    [[], [(0.0, 0.0)], [(1.0, 5.0)], [(0.001, 1.0), (1000.0, 3.0)], [(5.0, 0.0), (5.0, 0.0)], [(0.0, 1.0), (9.0, 2.0)]],
)
def test_any_points_make_a_chart(points: list[tuple[float, float]], is_log: bool) -> None:
    chart = Chart("a & b", "s", "%", [Line("one", points), Line("two", points, 1, True, True)], is_log=is_log)
    assert "nan" not in draw(chart) and "inf" not in draw(chart)
    root = ET.fromstring(draw_alone([chart, chart, chart]))
    assert root.tag.endswith("svg") and draw(chart) == draw(chart)


def test_numbers_in_few_letters() -> None:
    assert [short(value) for value in (0, 0.05, 5, 1234, 12_345, 3.4e6, 2e9)] == [
        "0", "0.05", "5", "1234", "12.35k", "3.4M", "2G",
    ]  # fmt: skip
    assert [seconds(value) for value in (0, 2e-5, 0.0123, 12.5, 12345)] == [
        "0", "20 us", "12.3 ms", "12.5 s", "12,345 s",
    ]  # fmt: skip
