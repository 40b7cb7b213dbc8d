"""Flags, variables, keys, exit codes, routes, error codes, entry points and public names are the frozen ones."""

from typing import Any

import pytest

from tests.freeze.surface import differences, read_surface, surface


def test_what_is_reached_by_name_is_the_frozen_surface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    told = differences(read_surface(), surface())
    assert not told, "\n".join(told)


@pytest.mark.parametrize("path", ["commands.serve.--port", "octavo.LLM.generate", "errors.BusyError", "exit codes.ps"])
def test_what_goes_is_found(path: str) -> None:
    found = read_surface()
    place: Any = found
    *parts, last = path.split(".")
    for part in parts:
        place = place[part]
    del place[last]
    [line] = differences(read_surface(), found)
    assert line.startswith(f".{path} was ") and line.endswith('is "(absent)"')
