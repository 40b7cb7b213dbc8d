"""The scorecard's own rules: what is judged, and what the page says."""

import pytest
from tools.reliability import render, state_of

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


def test_a_row_holds_only_when_all_of_it_does() -> None:
    held, missed = {"name": "lost", "holds": True}, {"name": "gap", "holds": False}
    said = {"name": "open", "holds": None}
    assert [state_of(row) for row in ([], [said], [held], [held, missed], [held, said])] == [
        "open", "open", "holds", "misses", "in part",
    ]  # fmt: skip


def test_the_page_names_every_row_and_marks_what_misses() -> None:
    score = Score(["R07"], "here")
    score.count("leaked blocks", 0)
    score.time("p95 s", 9.0, most=6.0) if not scorecard.IS_WHOLE else score.tell("p95 s", 9.0)
    page = render([figure.__dict__ for figure in score.figures], "A machine.")
    assert "leaked blocks: 0 (0)" in page and all(f"| R{row:02} |" in page for row in range(1, 33))
    if not scorecard.IS_WHOLE:
        assert "p95 s: 9 (<= 6) **misses**" in page and "| R07 " in page
