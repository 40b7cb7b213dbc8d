"""The report: one file that asks for nothing, says what was set, and holds whatever names users choose."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from tests.simulator.test_summary import random_outcomes, run_of

from octavo.simulator.charts import Chart, Line, draw, draw_alone, short
from octavo.simulator.report import Case, page, seconds
from octavo.simulator.summary import summarise

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
    text = page("A title", cases(count), {"workload": "poisson:rate=1"}, ["3 left out"])
    structure = Structure()
    structure.feed(text)
    assert structure.open == [] and "svg" in structure.seen
    assert not {"script", "link", "img", "iframe"} & {*structure.seen}
    assert not re.search(r"https?://|url\(|@import", text)
    assert "prefers-color-scheme:dark" in text and "3 left out" in text and "poisson:rate=1" in text


def test_names_of_users_are_text() -> None:
    [case] = cases(1)
    evil = "<script>alert(1)</script>"
    case.services = {evil: case.curves["waiting"]}
    case.facts["tenants"]["by_name"] = {evil: next(iter(case.facts["tenants"]["by_name"].values()))}
    case.label = evil
    text = page(evil, [case], {evil: evil}, [evil])
    assert "<script" not in text and "&lt;script&gt;" in text


def test_the_best_of_a_row_stands_out_only_where_there_is_a_choice() -> None:
    one = cases(1)[0]
    assert "<b>" not in page("t", [one], {}, [])
    assert "<b>" not in page("t", [one, one], {}, [])
    assert "<b>" in page("t", cases(2), {}, [])


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
