"""The scorecard's own rules: what is judged, and what the page says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tools import reliability
from tools.reliability import render, shown, state_of

from tests.reliability import scorecard
from tests.reliability.scorecard import Score


@pytest.fixture(autouse=True)
def no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is noted here is nobody's figure."""
    monkeypatch.setattr(scorecard, "_FILE", None)


def test_counts_are_always_judged_and_times_in_the_whole_run_only(monkeypatch: pytest.MonkeyPatch) -> None:
    score = Score(["R07"], "here")
    with pytest.raises(AssertionError, match="lost: 1, at most 0"):
        score.count("lost", 1)
    with pytest.raises(AssertionError, match="equal: 3 of 4"):
        score.share("equal", 3, 4)
    monkeypatch.setattr(scorecard, "IS_WHOLE", False)
    score.time("gap", 2.0, most=1.0)
    monkeypatch.setattr(scorecard, "IS_WHOLE", True)
    with pytest.raises(AssertionError, match="gap: 2, at most 1"):
        score.time("gap", 2.0, most=1.0)
    assert [figure.holds for figure in score.figures] == [False] * 4


RUN = {"date": "2026-01-02 03:04 UTC", "commit": "abc + changes", "cores": 2, "cpu": "A processor", "load": 0.5}


def test_a_row_holds_only_when_all_of_it_does() -> None:
    held = {"name": "lost", "holds": True, "value": "0"}
    missed = {"name": "gap", "holds": False, "value": "9"}
    said = {"name": "open", "holds": None, "value": "soaked 60 s of 1,800 s"}
    told = {"name": "requests", "holds": None, "value": "12"}
    rows = ([], [said], [held, told], [held, missed], [held, said], [missed, said])
    assert [state_of(row) for row in rows] == [
        "not run", "not run", "holds", "misses", "in part: soaked 60 s of 1,800 s", "misses",
    ]  # fmt: skip
    assert state_of([], is_tested=False) == "open"


def test_of_the_same_figure_measured_several_times_the_worst_is_shown() -> None:
    def figure(name: str, value: str, goal: str, what: str = "", holds: bool | None = True) -> dict[str, object]:
        return {"row": "R01", "name": name, "value": value, "goal": goal, "what": what, "holds": holds}

    figures = [
        figure("gap s", "0.7", "<= 6", "cold"),
        figure("gap s", "5.1", "<= 6", "cold"),
        figure("gap s", "1.77", "<= 1.5", "standby", False),
        figure("equal", "384 of 384", "all"),
        figure("equal", "9 of 10", "all", holds=False),
        figure("steps", "2e+06", ">= 1e+06"),
        figure("steps", "1e+06", ">= 1e+06"),
        figure("kills", "20", "", holds=None),
        figure("kills", "10", "", holds=None),
    ]
    assert shown(figures) == [
        "**cold**",
        "gap s: 5.1 (<= 6, the worst of 2)",
        "**standby**",
        "gap s: 1.77 (<= 1.5) **misses**",
        "**otherwise**",
        "equal: 9 of 10 (all, the worst of 2) **misses**",
        "steps: 1e+06 (>= 1e+06, the worst of 2)",
        "kills: 20; 10",
    ]


def test_the_page_names_its_run_and_every_row_and_marks_what_misses() -> None:
    score = Score(["R07"], "here")
    score.of("default model")
    score.count("leaked blocks", 0)
    score.time("p95 s", 9.0, most=6.0) if not scorecard.IS_WHOLE else score.tell("p95 s", 9.0)
    page = render([figure.__dict__ for figure in score.figures], RUN, {"R07", "R08"})
    assert "begun 2026-01-02 03:04 UTC, commit abc + changes, 2 cores (A processor),\nload average 0.5" in page
    assert "**default model**<br>leaked blocks: 0 (0)" in page and all(f"| R{row:02} |" in page for row in range(1, 33))
    states = dict(re.findall(r"^\| (R\d\d) \|[^|]*\| ([^|]+) \|", page, re.MULTILINE))
    assert (states["R08"], states["R32"]) == ("not run", "open")
    if not scorecard.IS_WHOLE:
        assert "p95 s: 9 (<= 6) **misses**" in page and states["R07"] == "misses"


def test_rows_of_a_later_run_replace_the_earlier_ones_and_name_their_run() -> None:
    def figure(row: str, value: str, holds: bool) -> dict[str, object]:
        return {"row": row, "name": "lost", "value": value, "goal": "0", "what": "", "holds": holds}

    before = render([figure("R01", "3", False), figure("R02", "0", True)], RUN, {"R40"})
    later = RUN | {"date": "2026-02-03 04:05 UTC", "commit": "def"}
    page = reliability.update(before, [figure("R01", "0", True), figure("R40", "0", True)], later)
    rows = {line[2:5]: line for line in page.splitlines() if line.startswith("| R")}
    assert all("| holds | " in rows[row] for row in ("R01", "R02", "R40"))
    assert "R01, R40: a later run, begun 2026-02-03 04:05 UTC, commit def," in page
    assert "One run, begun 2026-01-02 03:04 UTC" in page and "Rows that hold: 3 of " in page
    unchanged = [line for line in before.splitlines() if line[2:5] not in ("R01", "R40")]
    assert [line for line in unchanged if line not in page.splitlines()] == [
        line for line in unchanged if line.startswith("Rows that hold")
    ]


def test_a_page_is_of_one_run_whose_commit_is_noted_at_its_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures, page = tmp_path / "figures.jsonl", tmp_path / "page.md"
    monkeypatch.setattr(reliability, "PAGE", page)
    page.write_text("# Old\n\nby hand\n\n## Beside others\nof another day\n")
    assert reliability.main(["--begin", str(figures)]) == 0
    monkeypatch.setattr(scorecard, "_FILE", str(figures))
    Score(["R09"], "here").count("lost", 0)
    assert [figure.name for figure in scorecard.figures_in_file()] == ["lost"]
    assert reliability.main([str(figures)]) == 0
    text = page.read_text()
    assert "lost: 0 (0)" in text and text.endswith("\n## Beside others\nof another day\n") and "by hand" not in text
    assert f"commit {reliability.commit()}" in text and "tree changed" not in text
    monkeypatch.setattr(reliability, "commit", lambda: "another")
    assert reliability.main([str(figures)]) == 0
    assert "; during the run the tree changed to another." in page.read_text()


FAILING = """
import pytest
from tests.reliability.scorecard import Score


def test_row_05_breaks(score: Score) -> None:
    score.count("lost", 0)
    raise RuntimeError("no engine | came")


def test_row_06_breaks_before_it_begins(score: Score, missing) -> None: ...


@pytest.mark.skip(reason="no such file")
def test_row_07_skipped(score: Score) -> None: ...


def test_row_08_misses(score: Score) -> None:
    score.count("lost", 3)


def test_row_09_holds(score: Score) -> None:
    score.count("lost", 0)
"""


def test_a_test_that_breaks_or_is_skipped_does_not_let_its_row_hold(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.reliability.conftest import *\n")
    (tmp_path / "test_row_05.py").write_text(FAILING)
    figures = tmp_path / "figures.jsonl"
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "SCORECARD_FILE": str(figures), "PYTHONPATH": f"{root}{os.pathsep}{root}/src"}
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert "3 failed" in done.stdout or "2 failed, 1 passed, 1 skipped, 1 error" in done.stdout, done.stdout
    lines = [json.loads(line) for line in figures.read_text().splitlines()]
    states = {f"R0{row}": state_of([line for line in lines if line["row"] == f"R0{row}"]) for row in range(5, 10)}
    assert states == {"R05": "misses", "R06": "misses", "R07": "not run", "R08": "misses", "R09": "holds"}
    reasons = {line["row"]: line["value"] for line in lines if line["name"] in ("failed", "not run")}
    assert reasons["R05"] == "test_row_05_breaks: no engine / came" and "no such file" in reasons["R07"]
    assert "R08" not in reasons
