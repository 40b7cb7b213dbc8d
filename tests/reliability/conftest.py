"""The `score` of each test, printed when the run ends."""

from collections.abc import Iterator

import pytest
from tools.behaviours import rows_of

from tests.reliability.scorecard import Figure, Score, figures_in_file

_FIGURES: list[Figure] = []


@pytest.fixture
def score(request: pytest.FixtureRequest) -> Iterator[Score]:
    """Where a row's figures go; the rows are read from the test's name: test_row_07_..."""
    name = request.node.originalname
    card = Score(rows_of(name), f"{request.node.path.name}:{name}")
    yield card
    _FIGURES.extend(card.figures)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print every figure: of this process, or of all that wrote to the file."""
    figures = figures_in_file() or _FIGURES
    if figures:
        terminalreporter.section("reliability")
        for figure in sorted(figures, key=lambda figure: figure.row):
            mark = {True: "ok", False: "NOT", None: ""}[figure.holds]
            goal = f" ({figure.goal})" if figure.goal else ""
            terminalreporter.write_line(f"{figure.row} {figure.name}: {figure.value}{goal} {mark}".rstrip())
