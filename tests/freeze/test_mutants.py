"""Every bug that was planted when the behaviour was frozen is still planted, under its name, in code that is there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.core.test_seeded_bugs import MUTANTS, ROOT, plant

NAMES = Path(__file__).with_name("mutant_names.txt").read_text().splitlines()


def test_no_planted_bug_is_gone() -> None:
    assert len(NAMES) == len(set(NAMES)) == 85
    assert not [name for name in NAMES if name not in MUTANTS]


@pytest.mark.parametrize("name", NAMES)
def test_each_bug_changes_code_that_is_there(name: str) -> None:
    """Cheap; test_seeded_bugs runs each."""
    mutant = MUTANTS[name]
    source = (ROOT / "src/octavo/core" / mutant.file).read_text()
    planted = plant(source, mutant)
    assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(source))
