"""Count lines, cycles and names of the source tree: `python -m tools.house [PACKAGE ..] [--json]`.

Owns: lines of code, import cycles, imports inside functions, class and file names that occur twice, and touches of the
scheduler's state from outside octavo.core. Does not: judge; tests/test_architecture.py has the bounds.
A line of code holds more than blanks, comments and docstrings. Imports are those in the text, also under TYPE_CHECKING
and in functions; a package is not taken to be imported with its modules. The rule of a touch is at state_touches.
With packages named, their files, repeated names and places are listed too.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import PurePosixPath

from tests.source_tree import Function, Module, dotted, imports, modules

_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip
# What of octavo.core others may import: the verbs, what crosses them, and the descriptions that others make for them.
DOOR = {
    "explain", "kv.prefix", "limits", "plan", "policy", "proposals", "repeat", "request",
    "request_state", "saved_state", "scheduler", "snapshots", "tap",
}  # fmt: skip
_STATE = {"state", "_state"}


def package_of(module: Module) -> str:
    """The package right under octavo, or the module's own name where it is in none."""
    return [*module.name.split("."), ""][1]


# --- lines ------------------------------------------------------------------------------------------


@cache
def code_lines(module: Module) -> int:
    """Lines without blanks, comments and docstrings."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type not in _NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            found.difference_update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return len(found)


def lines_by_package(tree: Iterable[Module]) -> dict[str, tuple[int, int]]:
    """(lines of code, files) of each package."""
    counts: dict[str, tuple[int, int]] = {}
    for module in tree:
        lines, files = counts.get(package_of(module), (0, 0))
        counts[package_of(module)] = lines + code_lines(module), files + 1
    return counts


# --- imports ----------------------------------------------------------------------------------------


def import_graph(tree: Iterable[Module]) -> dict[str, list[str]]:
    """Return the octavo modules that each module imports."""
    tree = list(tree)
    names = {module.name for module in tree}
    return {
        module.name: sorted({name for _, name in imports(module) if name in names and name != module.name})
        for module in tree
    }


def cycles(graph: dict[str, list[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others; the largest first."""
    reached = {name: _reachable(graph, name) for name in graph}
    found: list[list[str]] = []
    grouped: set[str] = set()
    for name in sorted(graph):
        if name not in grouped and name in reached[name]:
            group = [other for other in sorted(reached[name]) if name in reached[other]]
            grouped.update(group)
            found.append(group)
    return sorted(found, key=lambda group: (-len(group), group))


def _reachable(graph: dict[str, list[str]], start: str) -> set[str]:
    """Return the modules that a module imports, directly or through others."""
    found: set[str] = set()
    pending = list(graph[start])
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending += graph[name]
    return found


def local_imports(module: Module) -> list[str]:
    """Imports of octavo inside functions, with their places."""
    found = []

    def visit(node: ast.AST, is_inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if is_inside and isinstance(child, ast.Import | ast.ImportFrom):
                is_from = isinstance(child, ast.ImportFrom)
                names = [child.module or ""] if is_from else [alias.name for alias in child.names]
                found.extend(f"{module.path}:{child.lineno} {name}" for name in names if name.split(".")[0] == "octavo")
            visit(child, is_inside or isinstance(child, Function))

    visit(module.tree, False)
    return found


# --- names ------------------------------------------------------------------------------------------


def repeated_classes(tree: Iterable[Module]) -> dict[str, list[str]]:
    """Public classes whose name more than one class has, with their places."""
    places = defaultdict(list)
    for module in tree:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{module.path}:{node.lineno}")
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def repeated_files(tree: Iterable[Module]) -> dict[str, list[str]]:
    """File names that more than one module has; for information."""
    places = defaultdict(list)
    for module in tree:
        places[PurePosixPath(module.path).name].append(module.path)
    return {name: found for name, found in sorted(places.items()) if len(found) > 1 and name != "__init__.py"}


# --- the closed door --------------------------------------------------------------------------------


def state_touches(module: Module) -> list[str]:
    """Return the places outside octavo.core that use more than the scheduler's public methods.

    Counted is each: use of `state`, or of an attribute with a leading underscore, of something whose name ends in
    "scheduler"; attribute of such a thing that is assigned; class derived from Scheduler, and each `self.state` or
    `self._state` in it; import from a module of octavo.core that DOOR does not name, or of a name with an underscore.
    """
    if package_of(module) == "core":
        return []
    found = [(line, f"imports {name}") for line, name in _private_imports(module)]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and _is_scheduler(node.value):
            if node.attr == "state" or node.attr.startswith("_"):
                found.append((node.lineno, f"uses {dotted(node)}"))
            elif isinstance(node.ctx, ast.Store | ast.Del):
                found.append((node.lineno, f"sets {dotted(node)}"))
        elif isinstance(node, ast.ClassDef) and any(dotted(base).split(".")[-1] == "Scheduler" for base in node.bases):
            found.append((node.lineno, f"derives {node.name} from Scheduler"))
            found += [
                (inner.lineno, f"uses {dotted(inner)}")
                for inner in ast.walk(node)
                if isinstance(inner, ast.Attribute) and inner.attr in _STATE and dotted(inner.value) == "self"
            ]
    return [f"{module.path}:{line} {what}" for line, what in sorted(found)]


def _is_scheduler(node: ast.expr) -> bool:
    return dotted(node).split(".")[-1].lower().endswith("scheduler")


@cache
def _core_modules() -> frozenset[str]:
    return frozenset(module.name for module in modules() if package_of(module) == "core")


def _private_imports(module: Module) -> Iterator[tuple[int, str]]:
    """(line, name) of what is imported from inside the core."""
    known = _core_modules()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[:2] == ["octavo", "core"]:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                source = inner if inner in known else node.module or ""
                if source.removeprefix("octavo.core").strip(".") not in DOOR or alias.name.startswith("_"):
                    yield node.lineno, inner
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("octavo.core.") and alias.name.removeprefix("octavo.core.") not in DOOR:
                    yield node.lineno, alias.name


# --- the command ------------------------------------------------------------------------------------


def count(tree: tuple[Module, ...]) -> dict[str, object]:
    """All figures as plain values."""
    return {
        "packages": {name: {"lines": lines, "files": files} for name, (lines, files) in lines_by_package(tree).items()},
        "cycles": cycles(import_graph(tree)),
        "local_imports": [place for module in tree for place in local_imports(module)],
        "repeated_classes": repeated_classes(tree),
        "repeated_files": repeated_files(tree),
        "state_touches": [place for module in tree for place in state_touches(module)],
    }


def print_packages(tree: tuple[Module, ...], named: list[str]) -> None:
    """A line per package, the largest first; of those named also one per file."""
    counts = lines_by_package(tree)
    for package, (lines, files) in sorted(counts.items(), key=lambda item: -item[1][0]):
        print(f"{lines:7,} lines of code in {files:3} files  {package or 'octavo'}")
        for module in tree:
            if package_of(module) == package and package in named:
                print(f"{code_lines(module):14,}  {module.path}")
    print(f"{sum(lines for lines, _ in counts.values()):7,} lines of code in {len(tree):3} files")


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="python -m tools.house", description=__doc__.split("\n")[0])
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help="list what is in these too, such as core")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    tree = modules()
    if given.json:
        print(json.dumps(count(tree)))
        return 0
    print_packages(tree, given.packages)
    found = cycles(import_graph(tree))
    print(f"\n{len(found)} import cycles" + "".join(f"\n  {len(group)}: {', '.join(group)}" for group in found))
    for title, places in (
        ("imports inside functions", [place for module in tree for place in local_imports(module)]),
        ("public class names twice", [f"{name}: {', '.join(at)}" for name, at in repeated_classes(tree).items()]),
        ("file names twice", [f"{name}: {', '.join(at)}" for name, at in repeated_files(tree).items()]),
        ("touches of scheduler state", [place for module in tree for place in state_touches(module)]),
    ):
        print(f"\n{len(places)} {title}")
        if title.startswith("touches") or given.packages:
            shown = [place for place in places if not given.packages or any(f"/{p}/" in place for p in given.packages)]
            print("".join(f"  {place}\n" for place in shown), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
