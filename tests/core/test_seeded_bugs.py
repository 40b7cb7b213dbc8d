"""Row 13 of the reliability scorecard: bugs planted in the scheduler, one at a time, are noticed.

Each is a change of source text in a copy of the package, and is found by a check with a name, not by a crash alone: by
the random driver, or by a test that arranges what is too rare for it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.quick import one_in

ROOT = Path(__file__).resolve().parents[2]
MAX_SEEDS = 100  # each bug is found long before; the runs without a bug see the same seeds


class Mutant(NamedTuple):
    """`file` of octavo/core, the text, the same with the bug; limits under which it shows sooner, or a test."""

    file: str
    text: str
    planted: str
    limits: dict[str, Any] | str


def read_mutants() -> dict[str, Mutant]:
    """The bugs of mutants.txt, by name."""
    found = {}
    for part in (ROOT / "tests/core/mutants.txt").read_text().split("\n== ")[1:]:
        head, *lines = part.split("\n")
        name, file, limits = head.split(" | ")
        text, planted = ("\n".join(line[1:] for line in lines if line[:1] == mark) for mark in "-+")
        found[name] = Mutant(file, text, planted, json.loads(limits))
    return found


def plant(source: str, mutant: Mutant) -> str:
    """The source with the bug."""
    assert source.count(mutant.text) >= 1, f"{mutant.file} no longer holds {mutant.text!r}"
    return source.replace(mutant.text, mutant.planted, 1)


MUTANTS = read_mutants()
SEARCH = """
import json, sys, traceback
from tests.core.random_driver import Driver
from octavo.errors import InvariantError
for seed in range(int(sys.argv[2]), int(sys.argv[3])):
    try:
        Driver(seed, **json.loads(sys.argv[1])).drive(100)
    except (AssertionError, InvariantError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        if frame.name == "_require":
            frame = traceback.extract_tb(error.__traceback__)[-2]
        if isinstance(error, (AssertionError, InvariantError)) and str(error):
            print(seed, frame.filename.rsplit("/", 1)[-1][:-3] + "." + frame.name, str(error)[:90])
            sys.exit(3)
"""


ARRANGED = """
import importlib, sys
from octavo.errors import InvariantError
module, name = sys.argv[1].split(".")
test = getattr(importlib.import_module("tests.core." + module), name)
try:
    test(*map(int, sys.argv[2:]))
except (AssertionError, InvariantError):
    print(name)
    sys.exit(3)
"""


def search(package: Path, limits: dict[str, Any] | str, first: int, end: int) -> subprocess.CompletedProcess[str]:
    """Drive `package` with these seeds, or run one test on it; exit code 3 when a check notices something."""
    if isinstance(limits, str):
        command = [sys.executable, "-c", ARRANGED, *limits.split()]
    else:
        command = [sys.executable, "-c", SEARCH, json.dumps(limits), str(first), str(end)]
    environment = {
        "PYTHONPATH": f"{package}:{ROOT}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
    }
    return subprocess.run(
        command, cwd=package, env=environment, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.fixture
def package(tmp_path: Path) -> Path:
    names = ("executors/__init__.py", "executors/protocol.py", "media/__init__.py", "media/item.py")
    for name in ("__init__.py", "errors.py", *names):
        (tmp_path / "octavo" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "src/octavo" / name, tmp_path / "octavo" / name)
    shutil.copytree(ROOT / "src/octavo/core", tmp_path / "octavo/core", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.mark.parametrize("name", one_in(4, MUTANTS))
def test_R13_a_planted_bug_is_found_by_a_named_check(name: str, package: Path) -> None:
    mutant = MUTANTS[name]
    path = package / "octavo/core" / mutant.file
    path.write_text(plant(path.read_text(), mutant))
    found = search(package, mutant.limits, 0, MAX_SEEDS)
    assert found.returncode == 3, f"not noticed: {found.stdout}{found.stderr}"
    print(found.stdout.strip())
    seed = 0 if isinstance(mutant.limits, str) else int(found.stdout.split()[0])
    sound = search(ROOT / "src", mutant.limits, seed, seed + 1)
    assert sound.returncode == 0, f"noticed without the bug too: {sound.stdout}{sound.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize("limits", sorted({json.dumps(mutant.limits) for mutant in MUTANTS.values()}))
def test_R13_without_a_planted_bug_nothing_is_noticed(limits: str, package: Path) -> None:
    found = search(package, json.loads(limits), 0, MAX_SEEDS)
    assert found.returncode == 0, found.stdout + found.stderr


def test_R13_there_are_enough_bugs() -> None:
    assert len(MUTANTS) >= 26 and len({mutant.file for mutant in MUTANTS.values()}) >= 10
