"""One taxonomy: every code that is raised anywhere is in the table, and the table's page is current."""

import ast
from collections.abc import Iterator

import pytest
from tools.errors import PAGE, render

from octavo import errors
from octavo.server.http.errors import CODES, from_exception
from tests.source_tree import dotted, modules


def codes_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Codes that are spelled in calls of ApiError and bad_field."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and dotted(node.func) in ("ApiError", "bad_field", "faults.ApiError"):
            given = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
            if dotted(node.func) == "bad_field":
                given += node.args[2:3]
            for value in given:
                if isinstance(value, ast.Constant):
                    yield node.lineno, value.value


def test_every_code_that_is_raised_is_in_the_table() -> None:
    found = [
        (f"{module.path}:{line}", code)
        for module in modules()
        if module.name.startswith(("octavo.server", "octavo.cli"))
        for line, code in codes_in(module.tree)
    ]
    assert len(found) > 15
    missing = [entry for entry in found if entry[1] not in CODES]
    assert not missing, f"give these codes a row in server/http/errors.py: {missing}"


def kinds() -> list[type[errors.OctavoError]]:
    every = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.RequestError)]
    return every + [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.EngineError)
    ]


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_every_exception_has_its_own_code_and_status(kind: type[errors.OctavoError]) -> None:
    refusal = from_exception(kind("inside 0x7f"))
    entry = CODES[refusal.code]
    assert entry.raised is kind, f"{kind.__name__} is answered as {refusal.code}, which is {entry.raised}'s"
    assert refusal.status in entry.statuses
    if issubclass(kind, errors.EngineError):
        assert "0x7f" not in refusal.message, "nothing of the inside is told"
    if refusal.status in (429, 503):
        assert refusal.headers()["retry-after"]


def test_codes_are_words_and_meanings_are_given() -> None:
    for code, entry in CODES.items():
        assert code.replace("_", "").isalpha() and code.islower() and len(entry.meaning) > 10


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run `make docs`"
