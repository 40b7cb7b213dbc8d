"""Write docs/reliability.md from the figures of a run of the scorecard.

Owns: the page. Does not: run tests or judge figures (tests/reliability/scorecard.py does).
Usage: python tools/reliability.py FIGURES.jsonl "MACHINE, AND HOW IT WAS RUN"
"""

import json
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reliability.md"
HEAD = """# Reliability

An accepted request gets one answer; each token position is delivered once; an engine's death is a pause; one bad
request ends alone; nothing grows without a bound; nobody gets in without a key. How: [design](design.md).

## Scorecard
`make reliability` runs every row and writes this table; `make test` runs small doses of most. A count or a share that
misses its goal fails the run; so does a time, under `make reliability` only.
"""


def render(figures: list[dict[str, object]], machine: str) -> str:
    """The page. A row without a figure is open."""
    rows = tomllib.loads((ROOT / "docs" / "behaviours.toml").read_text(encoding="utf-8"))["reliability"]
    by_row: dict[str, list[dict[str, object]]] = defaultdict(list)
    for figure in figures:
        by_row[str(figure["row"])].append(figure)
    held = sum(state_of(by_row[row]) == "holds" for row in rows)
    lines = [HEAD, f"{machine}\n", f"Rows that hold: {held} of {len(rows)}.\n"]
    lines.append("| row | what | state | figures (goal) |\n|---|---|---|---|")
    for row, (what, _) in rows.items():
        shown = "<br>".join(_shown(figure) for figure in by_row[row])
        lines.append(f"| {row} | {what} | {state_of(by_row[row])} | {shown} |")
    return "\n".join(lines) + "\n"


def state_of(figures: list[dict[str, object]]) -> str:
    """holds, misses, in part (holds where shown, and something is said to be missing) or open."""
    judged = [figure["holds"] for figure in figures if figure["holds"] is not None]
    if not judged:
        return "open"
    if not all(judged):
        return "misses"
    return "in part" if any(figure["name"] == "open" for figure in figures) else "holds"


def _shown(figure: dict[str, object]) -> str:
    if figure["name"] == "open":
        return f"open: {figure['value']}"
    goal = f" ({figure['goal']})" if figure["goal"] else ""
    return f"{figure['name']}: {figure['value']}{goal}{'' if figure['holds'] is not False else ' **misses**'}"


def main() -> int:
    """Read the figures, keep what stands below the table, write the page."""
    figures = [json.loads(line) for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()]
    old = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    _, mark, rest = old.partition("\n## Beside others\n")
    PAGE.write_text(render(figures, sys.argv[2]) + mark + rest, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
