"""The source tree as parsed modules, for the tests that read code instead of running it.

Owns: finding files, parsing each once, module names, imports, function lengths. Does not: judge.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One Python file: its path from the root, its dotted name ("" outside src) and its syntax tree."""

    path: str
    name: str
    text: str
    tree: ast.Module

    @classmethod
    def parse(cls, text: str, name: str = "", path: str = "<text>") -> "Module":
        """Parse source given as text: for tests of the checks themselves."""
        return cls(path, name, text, ast.parse(text))


@cache
def modules(folder: str = "src/octavo") -> tuple[Module, ...]:
    """Every Python file under a folder, in order."""
    return tuple(_read(path) for path in sorted((ROOT / folder).rglob("*.py")))


def _read(path: Path) -> Module:
    name = ""
    if path.is_relative_to(SRC):
        parts = path.relative_to(SRC).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return Module.parse(path.read_text(encoding="utf-8"), name, path.relative_to(ROOT).as_posix())


def imports(module: Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import, also those inside functions and under TYPE_CHECKING.

    `from octavo.core import plan` gives octavo.core.plan where that is a module, else octavo.core.
    """
    known = {other.name for other in modules()}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = "." * node.level + (node.module or "")
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                yield node.lineno, inner if inner in known else source


def functions(module: Module) -> Iterator[tuple[str, Function]]:
    """(qualified name, node) of each function and method, nested ones too."""

    def visit(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
        for child in ast.iter_child_nodes(node):
            name = getattr(child, "name", None)
            inner = f"{prefix}.{name}".lstrip(".") if name else prefix
            if isinstance(child, Function):
                yield inner, child
            is_scope = isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            yield from visit(child, inner if is_scope else prefix)

    yield from visit(module.tree, "")


def num_lines(node: ast.stmt) -> int:
    """Lines from the def to the end, decorators left out."""
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def num_parameters(function: Function, is_method: bool) -> int:
    """Parameters that a caller gives, self and cls left out, *args and **kwargs too."""
    arguments = function.args
    return len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs) - is_method


def dotted(node: ast.expr) -> str:
    """`a.b.c` of a name or attribute chain, else ""."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""
