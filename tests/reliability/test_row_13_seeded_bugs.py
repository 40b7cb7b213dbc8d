"""Row 13: bugs planted in the scheduler, one at a time, are noticed by row 11's driver or by a test made for them.

`make test` runs each as a test of its own (tests/core/test_seeded_bugs.py, which also shows that nothing is noticed
without the bug); here they are counted.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core.test_seeded_bugs import MAX_SEEDS, MUTANTS, package, plant, search
from tests.reliability.scorecard import IS_WHOLE, Score

__all__ = ["package"]
NAMED = (  # of the twenty that the row asks for, those it names
    "a free is skipped", "a block too many at a boundary", "a second reference is not counted",
    "a fork drops a reference", "a late result is accepted", "results of void rows are taken",
)  # fmt: skip


def test_row_13_there_are_enough_bugs_of_the_kinds_asked_for(score: Score) -> None:
    score.least("bugs planted", len(MUTANTS), 20)
    assert set(NAMED) <= set(MUTANTS)


@pytest.mark.skipif(not IS_WHOLE, reason="`make test` has a test for each bug")
def test_row_13_planted_bugs_are_caught(package: Path, score: Score) -> None:
    missed, by_driver = [], 0
    for name, mutant in MUTANTS.items():
        path = package / "octavo/core" / mutant.file
        source = path.read_text()
        path.write_text(plant(source, mutant))
        found = search(package, mutant.limits, 0, MAX_SEEDS)
        path.write_text(source)
        missed += [] if found.returncode == 3 else [name]
        by_driver += found.returncode == 3 and not isinstance(mutant.limits, str)
    caught = len(MUTANTS) - len(missed)
    score.tell("caught by the random driver, the rest by their own tests", by_driver)
    score.least(f"caught of {len(MUTANTS)}", caught, -(-19 * len(MUTANTS) // 20))
    assert not missed, missed
