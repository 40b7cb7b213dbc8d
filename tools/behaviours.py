"""Write docs/behaviours.md: the required behaviours, the tests named after each one, and what the tests reach.

Owns: reading docs/behaviours.toml, the tests' names and (from the source alone) what each test reaches; the page.
Does not: judge whether a test asserts what its name says, or run tests.

test_S07_... is named after row S07, test_S07_K01_... after both, test_bug_17_... after bug 17, test_R27_... and
test_row_27_... after row 27 of the scorecard. Skipped tests and expected failures count for nothing.
Usage: python tools/behaviours.py [--check]
"""

import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLAIM = re.compile(r"(?:bug_(\d{1,2})|row_(0[1-9]|[123]\d|4[0-2])|([SKEPLTXIR]\d\d))_")
SCORED = re.compile(r"^\| (R\d\d) \|[^|]*\| ([^|]+) \|", re.MULTILINE)
END_TO_END, INTERFACE, OPEN = "end to end", "scheduler's interface", "open"
# Names that show that a test is end to end: the torch executor, an HTTP application, a process behind a socket, the
# command line, a browser.
DOORS = (
    "octavo.LLM", "octavo.AsyncLLM", "octavo.assembly.build_local", "octavo.executors.torch_executor",
    "octavo.server.app.create_app", "octavo.cli.main", "octavo.frontend.engine_supervisor.EngineSupervisor",
    "octavo.frontend.socket_client.SocketClient", "tests.fake_server.FakeServer", "tests.fake_server.RealServer",
    "playwright.sync_api",
)  # fmt: skip
HEADING = """# Behaviours and their proofs

This page lists what the engine must do, and which tests prove each behaviour. `tools/behaviours.py` generates it from
`docs/behaviours.toml`, the names of the tests, and `docs/reliability.md` (`make docs`). The tests of a row are named
after it: `pytest -k S06` runs those of row S06, `-k bug_17` those of bug 17, `-k row_24` those of row R24. The tables
have their files, with the number of tests in each.

- **end to end**: a test of the row uses the executor that computes, the HTTP application, a socket to an engine
  process, the command line or a browser. It may show only a part of the row. The other tests show the rest.
- **scheduler's interface**: the tests of the row use a fake executor or none. They prove what the scheduler (or another
  part) decides, not that an engine acts on it.
- **open**: no test is named after the row, or its note says what is missing.
- **misses**, **in part**, **not run**: the state of a row R in the [scorecard](reliability.md), if it does not hold.

The column "of" names the systems that have the behaviour, or had the bug: HF transformers continuous batching, V1
vLLM V1, CF CacheFlow, MR mistral.rs, AS AstrAI. A + marks what goes beyond them.
"""
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Claim:
    """A test named after a row, as file:name; whether it uses one of DOORS."""

    test: str
    is_end_to_end: bool


class TestSources:
    """The tests' folder as a graph: the names that each definition uses, fixtures and other files' helpers included."""

    __test__ = False

    def __init__(self, folder: Path) -> None:
        self.trees: dict[str, ast.Module] = {}
        self._definitions: dict[str, dict[str, ast.stmt]] = {}
        self._imports: dict[str, dict[str, str]] = {}
        self._used: dict[tuple[str, str], set[tuple[str, str]]] = {}
        for path in sorted(folder.rglob("*.py")):
            name = ".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__")
            self.trees[name] = ast.parse(path.read_text(encoding="utf-8"))
            self._definitions[name] = dict(_definitions(self.trees[name]))
            self._imports[name] = dict(_imports(self.trees[name]))

    def reaches_door(self, module: str, name: str) -> bool:
        """Return True if a top-level definition uses one of DOORS, directly or indirectly."""
        seen, rest = set(), {(module, name)}
        while rest:
            place = rest.pop()
            if ".".join(place).startswith(DOORS):
                return True
            seen.add(place)
            if place not in self._used:
                self._used[place] = set(self._used_by(*place))
            rest |= self._used[place] - seen
        return False

    def _used_by(self, module: str, name: str) -> Iterator[tuple[str, str]]:
        if name in (own := self._definitions.get(module, {})):
            for node in ast.walk(own[name]):
                if isinstance(node, ast.Name):
                    yield module, node.id
                elif isinstance(node, ast.arg):  # perhaps a fixture
                    yield module, node.arg
        elif name in (imports := self._imports.get(module, {})):
            owner, _, leaf = imports[name].rpartition(".")
            yield owner, leaf
        elif module in self.trees and (fixture := self._conftest_of(module, name)):
            yield fixture, name

    def _conftest_of(self, module: str, name: str) -> str | None:
        parts = module.split(".")
        places = (".".join([*parts[:count], "conftest"]) for count in range(len(parts) - 1, 0, -1))
        return next((place for place in places if name in self._definitions.get(place, {})), None)


def _definitions(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    for node in tree.body:
        if isinstance(node, Definition):
            yield node.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                yield from ((part.id, node) for part in ast.walk(target) if isinstance(part, ast.Name))


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.asname or alias.name, alias.name) for alias in node.names)


def claims_by_row(folder: Path) -> dict[str, list[Claim]]:
    """Map each row ("S07") and bug ("bug 17") to the tests named after it, in order."""
    found: dict[str, list[Claim]] = {}
    sources = TestSources(folder)
    for module, tree in sources.trees.items():
        if not module.rpartition(".")[2].startswith("test_"):
            continue
        for top, name in _live_tests(tree.body):
            for row in rows_of(name):
                claim = Claim(f"{module.replace('.', '/')}.py:{name}", sources.reaches_door(module, top))
                found.setdefault(row, []).append(claim)
    return found


def rows_of(test_name: str) -> list[str]:
    """Return the rows and bugs that a test's name lists after `test_`."""
    rows, rest = [], test_name.removeprefix("test_")
    while claim := CLAIM.match(rest):
        bug, scorecard_row, row = claim.groups()
        rows.append(f"bug {int(bug):02}" if bug else row or f"R{scorecard_row}")
        rest = rest[claim.end() :]
    return rows


def _live_tests(body: list[ast.stmt], top: str = "") -> Iterator[tuple[str, str]]:
    """Yield (top-level name, test's name) for each test; the top-level name is its class or itself."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not _is_muted(node):
            yield from _live_tests(node.body, top or node.name)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield from [] if _is_muted(node) else [(top or node.name, node.name)]


def _is_muted(node: Definition) -> bool:
    marks = (ast.unparse(decorator) for decorator in node.decorator_list)
    return any(re.match(r"pytest\.mark\.(skip\b|xfail\b)", mark) for mark in marks)


def state_of(note: str, claims: list[Claim], scored: str) -> str:
    """Return a row's state: from its note if there is one, else from the scorecard if the row does not hold there."""
    for state in (OPEN, INTERFACE):
        if note.startswith(f"{state}:"):
            return state if claims else OPEN
    if not claims:
        return OPEN
    if scored and scored != "holds":
        return scored
    is_whole = note.startswith(f"{END_TO_END}:") or any(claim.is_end_to_end for claim in claims)
    return END_TO_END if is_whole else INTERFACE


def render(
    table: dict[str, dict[str, list[str]]], claims: dict[str, list[Claim]], scored: dict[str, str] | None = None
) -> str:
    """Return the page. Raises ValueError for a test named after a row that does not exist."""
    known = {f"bug {row}" if section == "bugs" else row for section, rows in table.items() for row in rows}
    if strangers := sorted(set(claims) - known):
        tests = ", ".join(claim.test for stranger in strangers for claim in claims[stranger])
        raise ValueError(f"tests are named after rows that do not exist ({', '.join(strangers)}): {tests}")
    parts, states = [], []
    for section, rows in table.items():
        prefix = "bug " if section == "bugs" else ""
        title = "Bugs that must be impossible" if prefix else section.capitalize()
        parts.append(f"## {title}\n\n| id | what | of | state | tests end to end | other tests |\n{'|---' * 6}|")
        for row, (what, whose, *notes) in rows.items():
            found, note = claims.get(prefix + row, []), "".join(notes)
            states.append(state := state_of(note, found, (scored or {}).get(row, "")))
            shown = f"{state}{note and ': ' + note.partition(': ')[2]}"
            parts.append(f"| {row} | {what} | {whose} | {shown} | {_files(found, True)} | {_files(found, False)} |")
        parts.append("")
    rest = sorted(set(states) - {END_TO_END, INTERFACE})
    counts = ", ".join(f"{state} {states.count(state)}" for state in (END_TO_END, INTERFACE, *rest))
    return "\n".join([HEADING, f"Of {len(known)} rows: {counts}.\n", *parts])


def _files(claims: list[Claim], is_end_to_end: bool) -> str:
    counts = Counter(claim.test.partition(":")[0] for claim in claims if claim.is_end_to_end is is_end_to_end)
    return "<br>".join(f"`{path}` {count}" for path, count in counts.items())


@cache
def page() -> str:
    """Return the page for this source tree."""
    table = tomllib.loads((ROOT / "docs" / "behaviours.toml").read_text(encoding="utf-8"))
    scored = dict(SCORED.findall((ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")))
    return render(table, claims_by_row(ROOT / "tests"), {row: state.partition(":")[0] for row, state in scored.items()})


def main(arguments: list[str]) -> int:
    """Write the page; with --check only compare, and return 1 if the page is out of date."""
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
