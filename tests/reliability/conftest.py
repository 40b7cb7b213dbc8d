"""The `score` of each test, printed when the run ends."""

from collections.abc import Iterator

import pytest
from tools.behaviours import rows_of

from tests.reliability.scorecard import Figure, Score, figures_in_file

_FIGURES: list[Figure] = []
_MAX_REASON = 160


@pytest.fixture
def score(request: pytest.FixtureRequest) -> Iterator[Score]:
    """Where a row's figures go; the rows are read from the test's name: test_row_07_..."""
    name = request.node.originalname
    card = Score(rows_of(name), f"{request.node.path.name}:{name}")
    yield card
    _FIGURES.extend(card.figures)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A row whose test fails, or is skipped, does not hold, whatever was measured before."""
    report: pytest.TestReport = (yield).get_result()  # type: ignore[misc]
    rows = rows_of(getattr(item, "originalname", item.name))
    if not rows or report.passed:
        return
    score = getattr(item, "funcargs", {}).get("score") or Score(rows, f"{item.path.name}:{item.name}")
    known = len(score.figures)
    if report.skipped:
        score.not_run(str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr))
    else:
        text = str(call.excinfo.value if call.excinfo is not None else "").partition("\n")[0]
        score.failed(f"{item.name}: {text or report.when}"[:_MAX_REASON].replace("|", "/"))
    if not hasattr(item, "funcargs") or item.funcargs.get("score") is not score:
        _FIGURES.extend(score.figures[known:])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print every figure: of this process, or of all that wrote to the file."""
    figures = figures_in_file() or _FIGURES
    if figures:
        terminalreporter.section("reliability")
        for figure in sorted(figures, key=lambda figure: figure.row):
            mark = {True: "ok", False: "NOT", None: ""}[figure.holds]
            goal = f" ({figure.goal})" if figure.goal else ""
            terminalreporter.write_line(f"{figure.row} {figure.name}: {figure.value}{goal} {mark}".rstrip())
