"""Write docs/behaviours.md: what the engine must do, and which test proves each row.

Owns: reading docs/behaviours.toml, finding tests by name without running them, and the page.
Does not: judge whether a test proves what its name says, or run tests.

A test named test_S07_... proves row S07, test_S07_K01_... both; test_bug_17_... guards against bug 17;
test_R27_... and test_row_27_... prove row 27 of the reliability scorecard.
Tests that are skipped outright or expected to fail prove nothing. Usage: python tools/behaviours.py [--check]
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLAIM = re.compile(r"(?:bug_(\d{1,2})|row_(0[1-9]|[12]\d|3[0-2])|([SKEPLTXIR]\d\d))_")
HEADING = """# Behaviours and their proofs

Made by `tools/behaviours.py` from `docs/behaviours.toml` and the names of the tests; `make docs` makes it again.
A row is proven when a test is named after it. "Whose" names the systems that do it: HF transformers continuous
batching, V1 vLLM V1, CF CacheFlow, MR mistral.rs, AS AstrAI; + marks what goes beyond them.
"""


def tests_by_row(folder: Path) -> dict[str, list[str]]:
    """Map each row ("S07") and bug ("bug 17") to the tests named after it, as file:name, in order."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for name in _live_tests(tree.body):
            for row in rows_of(name):
                found.setdefault(row, []).append(f"{path.relative_to(folder.parent).as_posix()}:{name}")
    return found


def rows_of(test_name: str) -> list[str]:
    """Rows and bugs that a test's name claims, one after the other behind `test_`."""
    rows, rest = [], test_name.removeprefix("test_")
    while claim := CLAIM.match(rest):
        bug, scorecard_row, row = claim.groups()
        rows.append(f"bug {int(bug):02}" if bug else row or f"R{scorecard_row}")
        rest = rest[claim.end() :]
    return rows


def _live_tests(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef) and not _is_muted(node):
            yield from _live_tests(node.body)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
            yield from [] if _is_muted(node) else [node.name]


def _is_muted(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    marks = (ast.unparse(decorator) for decorator in node.decorator_list)
    return any(re.match(r"pytest\.mark\.(skip\b|xfail\b)", mark) for mark in marks)


def render(table: dict[str, dict[str, list[str]]], tests: dict[str, list[str]]) -> str:
    """The page. Raises ValueError for a test named after a row that does not exist."""
    known = {f"bug {row}" if section == "bugs" else row for section, rows in table.items() for row in rows}
    if strangers := sorted(set(tests) - known):
        raise ValueError(f"tests are named after rows that do not exist: {', '.join(strangers)}: {tests[strangers[0]]}")
    proven = len(tests)
    parts = [HEADING, f"Proven: {proven} of {len(known)}.\n"]
    for section, rows in table.items():
        prefix = "bug " if section == "bugs" else ""
        title = "Bugs that must be impossible" if prefix else section.capitalize()
        parts.append(f"## {title}\n\n| id | what | whose | state | tests |\n|---|---|---|---|---|")
        for row, (what, whose) in rows.items():
            names = tests.get(prefix + row, [])
            shown = "<br>".join(f"`{name}`" for name in names)
            parts.append(f"| {row} | {what} | {whose} | {'proven' if names else 'open'} | {shown} |")
        parts.append("")
    return "\n".join(parts)


def page() -> str:
    """The page as this tree makes it."""
    table = tomllib.loads((ROOT / "docs" / "behaviours.toml").read_text(encoding="utf-8"))
    return render(table, tests_by_row(ROOT / "tests"))


def main(arguments: list[str]) -> int:
    """Write the page; with --check only compare, and return 1 where it is out of date."""
    target = ROOT / "docs" / "behaviours.md"
    text = page()
    if arguments == ["--check"]:
        is_current = target.exists() and target.read_text(encoding="utf-8") == text
        print("docs/behaviours.md is current" if is_current else "docs/behaviours.md is out of date: run `make docs`")
        return 0 if is_current else 1
    target.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
