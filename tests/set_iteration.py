"""Finds iteration over sets by reading code: its order differs from run to run and rank to rank.

Best effort: a name or attribute counts as a set where the file annotates it so or assigns a set to it.
Membership, len, sorted and building another set are fine.
"""

import ast
from collections.abc import Iterator

from tests.source_tree import Module

SET_TYPES = {"set", "frozenset", "AbstractSet", "MutableSet", "Set"}
ORDERED_USES = {"list", "tuple", "iter", "enumerate", "map", "filter", "zip", "next", "deque", "array", "chain"}


def iterated_sets(module: Module, names: frozenset[str] = frozenset()) -> list[tuple[int, str]]:
    """(line, source) of each iteration over what looks like a set; `names` adds set names of other files."""
    known = names | set_names(module)
    found = [(node.lineno, ast.unparse(node)) for node in _iterated(module.tree) if _is_set(node, known)]
    return sorted(set(found))


def set_names(module: Module) -> frozenset[str]:
    """Names and attributes that the file annotates as a set, or assigns one to."""
    found: dict[str, None] = {}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.AnnAssign) and _is_set_type(node.annotation):
            found[_last_name(node.target)] = None
        elif isinstance(node, ast.arg) and node.annotation is not None and _is_set_type(node.annotation):
            found[node.arg] = None
        elif isinstance(node, ast.Assign) and _is_set(node.value, frozenset()):
            found.update((_last_name(target), None) for target in node.targets)
    return frozenset(found) - {""}


def other_names(module: Module) -> frozenset[str]:
    """Attributes that the file annotates as something else: not to be taken for a set of that name elsewhere."""
    nodes = (node for node in ast.walk(module.tree) if isinstance(node, ast.AnnAssign))
    return frozenset(_last_name(node.target) for node in nodes if not _is_set_type(node.annotation))


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def _is_set_type(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):  # set[int] | None
        return _is_set_type(node.left) or _is_set_type(node.right)
    return _last_name(node.value if isinstance(node, ast.Subscript) else node) in SET_TYPES


def _is_set(node: ast.expr, names: frozenset[str]) -> bool:
    if isinstance(node, (ast.Set, ast.SetComp)):
        return True
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in ("set", "frozenset")
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr, ast.Sub, ast.BitXor)):
        return _is_set(node.left, names) or _is_set(node.right, names)
    return _last_name(node) in names


def _iterated(tree: ast.Module) -> Iterator[ast.expr]:
    """Expressions whose order of iteration reaches a result."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.For, ast.AsyncFor)):
            yield node.iter
        elif isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.DictComp)):
            yield from (generator.iter for generator in node.generators)
        elif isinstance(node, ast.Starred):
            yield node.value
        elif isinstance(node, ast.Call):
            yield from _iterated_by_call(node)


def _iterated_by_call(call: ast.Call) -> Iterator[ast.expr]:
    if isinstance(call.func, ast.Name) and call.func.id in ORDERED_USES:
        yield from call.args
    if isinstance(call.func, ast.Attribute):
        if call.func.attr in ("extend", "join", "appendleft", "from_iterable"):
            yield from call.args
        if call.func.attr == "pop" and not call.args:
            yield call.func.value
