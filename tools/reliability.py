"""Write docs/reliability.md from the figures of one run of the scorecard.

Owns: the page, and the line about the run: its date, commit and machine. Does not: run tests or judge figures
(tests/reliability/scorecard.py does).
Usage: python tools/reliability.py --begin FIGURES.jsonl, the run, python tools/reliability.py FIGURES.jsonl
With --update before the last FIGURES.jsonl, only the rows that were run are replaced, and the page names their run.
"""

import json
import os
import platform
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reliability.md"
MISSING = ("open", "not run")  # names of notes about what a row lacks
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
HEAD = """# Reliability

This page has the scorecard of the faults that Octavo is tested with, from one measured run, and a comparison with other
servers. It shows these promises: an accepted request gets one answer, each token position is delivered once, a crash of
the engine is a pause, a request that crashes the engine is isolated, everything is bounded, and a server with keys
answers only clients with a key. [Design](design.md) explains how.

## Scorecard
`make reliability` runs every row and writes this table from that run. `make test` runs small doses of most rows. A
count or a share that misses its goal fails the run. A time that misses its goal fails it under `make reliability` only.
If a row measures a figure several times, the table has the worst, with the number of measurements.
"""
ROW = re.compile(r"\| R\d\d \|")
Figure = dict[str, Any]


def run_facts() -> Figure:
    """When, of which commit and on which machine a run begins."""
    return {
        "date": datetime.now(UTC).strftime("%F %H:%M UTC"),
        "commit": commit(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu": _cpu_name(),
        "load": round(os.getloadavg()[0], 2),
    }


def commit() -> str:
    """The commit that is checked out, "+ changes" where tracked files differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + (
        " + changes" if git("diff", "HEAD", "--stat") else ""
    )


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return f"{found[1]}, {platform.machine()}" if found else platform.machine()


def render(figures: list[Figure], run: Figure, tested: set[str]) -> str:
    """Return the page. Rows in `tested` have tests: without a figure they were not run. The others are open."""
    rows = tomllib.loads((ROOT / "docs" / "behaviours.toml").read_text(encoding="utf-8"))["reliability"]
    by_row: dict[str, list[Figure]] = defaultdict(list)
    for figure in figures:
        by_row[str(figure["row"])].append(figure)
    states = {row: state_of(by_row[row], row in tested) for row in rows}
    held = list(states.values()).count("holds")
    lines = [HEAD, f"One run, {_facts(run)}.\n"]
    lines.append(f"Rows that hold: {held} of {len(rows)}.\n")
    lines.append("| row | what | state | figures (goal) |\n|---|---|---|---|")
    for row, (what, *_) in rows.items():
        lines.append(f"| {row} | {what} | {states[row]} | {'<br>'.join(shown(by_row[row]))} |")
    return "\n".join(lines) + "\n"


def _facts(run: Figure) -> str:
    return (
        f"begun {run['date']}, commit {run['commit']}, {run['cores']} cores ({run['cpu']}),\n"
        f"load average {run['load']} at its start{run.get('note', '')}"
    )


def update(page: str, figures: list[Figure], run: Figure) -> str:
    """Return the page with the rows of these figures in the place of earlier ones, and with a line about their run."""
    names = sorted({str(figure["row"]) for figure in figures})
    fresh = {line[2:5]: line for line in render(figures, run, set()).splitlines() if ROW.match(line)}
    lines = [fresh[line[2:5]] if ROW.match(line) and line[2:5] in names else line for line in page.splitlines()]
    found = [line for line in lines if ROW.match(line)]
    held = sum(line.split(" | ")[2] == "holds" for line in found)
    count = next(index for index, line in enumerate(lines) if line.startswith("Rows that hold: "))
    lines[count] = f"Rows that hold: {held} of {len(found)}."
    lines[count:count] = [f"{', '.join(names)}: a later run, {_facts(run)}.", ""]
    return "\n".join(lines) + "\n"


def state_of(figures: list[Figure], is_tested: bool = True) -> str:
    """holds, misses, in part and what is missing (the rest holds), not run, or open."""
    judged = [figure["holds"] for figure in figures if figure["holds"] is not None]
    missing = list(dict.fromkeys(figure["value"] for figure in figures if figure["name"] in MISSING))
    if not judged:
        return "not run" if is_tested else "open"
    if not all(judged):
        return "misses"
    return f"in part: {'; '.join(missing)}" if missing else "holds"


def shown(figures: list[Figure]) -> list[str]:
    """The row's figures by what was run, one for each name and goal: of several the worst."""
    groups: dict[tuple[str, str, str], list[Figure]] = defaultdict(list)
    for figure in figures:
        if figure["name"] not in MISSING:
            groups[(figure.get("what", ""), figure["name"], figure["goal"])].append(figure)
    lines, last = [], ""
    for (what, name, goal), group in groups.items():
        if what != last:
            lines.append(f"**{what or 'otherwise'}**")
            last = what
        value, count = worst(group), len(group)
        several = f", the worst of {count}" if goal and count > 1 else ""
        missed = " **misses**" if any(figure["holds"] is False for figure in group) else ""
        lines.append(f"{name}: {value}{f' ({goal}{several})' if goal else ''}{missed}")
    return lines


def worst(group: list[Figure]) -> str:
    """The value furthest from the goal; values without a goal are all given."""
    goal = group[0]["goal"]
    if not goal:
        return "; ".join(dict.fromkeys(figure["value"] for figure in group))
    is_better_more = goal == "all" or goal.startswith(">=")
    return str((min if is_better_more else max)(group, key=lambda figure: _measure(figure["value"]))["value"])


def _measure(value: str) -> float:
    numbers = [float(number) for number in NUMBER.findall(value)]
    if " of " in value and len(numbers) == 2:
        return numbers[0] / numbers[1] if numbers[1] else 1.0
    return numbers[0] if numbers else 0.0


def tested_rows(folder: Path) -> set[str]:
    """Rows that tests of the scorecard are named after."""
    texts = (path.read_text(encoding="utf-8") for path in folder.glob("test_row_*.py"))
    names = [name for text in texts for name in re.findall(r"def test_(row_\w+)\(", text)]
    return {f"R{number}" for name in names for number in re.findall(r"row_(\d\d)_", name)}


def main(arguments: list[str]) -> int:
    """Note the begin of a run; or read its figures, keep what follows the table, and write the page."""
    if arguments[0] == "--begin":
        Path(arguments[1]).write_text(json.dumps({"run": run_facts()}) + "\n", encoding="utf-8")
        return 0
    first, *figures = [json.loads(line) for line in Path(arguments[-1]).read_text(encoding="utf-8").splitlines()]
    run = first["run"]
    if (now := commit()) != run["commit"]:
        run["note"] = f"; during the run the tree changed to {now}"
    old = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    if arguments[0] == "--update":
        PAGE.write_text(update(old, figures, run), encoding="utf-8")
        return 0
    _, mark, rest = old.partition("\n## Beside others\n")
    page = render(figures, run, tested_rows(ROOT / "tests" / "reliability"))
    PAGE.write_text(page + mark + rest, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
