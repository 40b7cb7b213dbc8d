"""What a row of the reliability scorecard measured: figures, their goals, and whether they hold.

Owns: the figures of one test, judging them, one line of JSON each. Does not: know any row.
Counts and bytes are always judged. Times are judged under `make reliability` (RELIABILITY=1) only: on a shared
machine they say more of the neighbours.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
IS_WHOLE = os.environ.get("RELIABILITY") == "1"
_FILE = os.environ.get("SCORECARD_FILE")  # lines of JSON are added to this file


@dataclass(frozen=True)
class Figure:
    """One measured value of a row, and of what, where a row measures the same of several things.

    `holds` is None where it is only told, or what is missing was said.
    """

    row: str
    test: str
    name: str
    value: str
    goal: str
    holds: bool | None
    what: str = ""


def figures_in_file() -> list[Figure]:
    """Those written so far, by every process of this run; none where no file was named."""
    if _FILE is None or not Path(_FILE).exists():
        return []
    lines = [json.loads(line) for line in Path(_FILE).read_text(encoding="utf-8").splitlines()]
    return [Figure(**line) for line in lines if "run" not in line]  # the first is about the run


class Score:
    """The figures of one test; `rows` are those that its name claims."""

    def __init__(self, rows: list[str], test: str) -> None:
        self.figures: list[Figure] = []
        self._rows = rows
        self._test = test
        self._what = ""

    def of(self, what: str) -> None:
        """Say what the figures from here on are of, such as "default model, standby"."""
        self._what = what

    def count(self, name: str, value: int, most: int = 0) -> None:
        """A count that must not be above `most`."""
        self._note(name, str(value), f"<= {most}" if most else "0", value <= most)
        assert value <= most, f"{name}: {value}, at most {most}"

    def least(self, name: str, value: float, least: float) -> None:
        """A value that must not be below `least`."""
        self._note(name, f"{value:g}", f">= {least:g}", value >= least)
        assert value >= least, f"{name}: {value}, at least {least}"

    def share(self, name: str, part: int, whole: int) -> None:
        """A part that must be the whole."""
        self._note(name, f"{part} of {whole}", "all", part == whole)
        assert part == whole, f"{name}: {part} of {whole}"

    def time(self, name: str, value: float, most: float) -> None:
        """A time, or a ratio of times, that should not be above `most`."""
        self._note(name, f"{value:.3g}", f"<= {most:g}", value <= most)
        assert value <= most or not IS_WHOLE, f"{name}: {value:.3g}, at most {most:g}"

    def tell(self, name: str, value: object) -> None:
        """A value that has no goal."""
        self._note(name, str(value), "", None)

    def open(self, what: str) -> None:
        """Something of the row that is not shown, and why."""
        self._note("open", what, "", None)

    def failed(self, reason: str) -> None:
        """The test ended with an error that is no figure: the row misses."""
        if all(figure.holds is not False for figure in self.figures):
            self._note("failed", reason, "", False)

    def not_run(self, reason: str) -> None:
        """The test was skipped."""
        self._note("not run", reason, "", None)

    def dose(self, quick: T, whole: T) -> T:
        """How much is done: little in `make test`, all in `make reliability`."""
        return whole if IS_WHOLE else quick

    def _note(self, name: str, value: str, goal: str, holds: bool | None) -> None:
        for row in self._rows or ["-"]:
            figure = Figure(row, self._test, name, value, goal, holds, self._what)
            self.figures.append(figure)
            if _FILE is not None:
                with Path(_FILE).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(figure)) + "\n")
