"""Row 13 of the reliability scorecard: bugs planted in the scheduler, one at a time, are noticed by the random driver.

Each is a change of source text in a copy of the package. When a text is gone, plant the same bug in what replaced it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_SEEDS = 200

# name: (file of octavo/core, text, text with the bug)
BUGS = {
    "a block too many at a boundary": (
        "kv/cache.py",
        "return -(-num_tokens // self.block_size)",
        "return num_tokens // self.block_size + 1",
    ),
    "a table entry is not freed": (
        "kv/cache.py",
        "pool.release(table.pop())",
        "pool.release(table.pop())\n                table[:] = table[:-1]",
    ),
    "a copy reads what its own step writes": ("kv/cache.py", "if not written_now and self", "if self"),
    "a full hit shares the block it writes": (
        "kv/cache.py",
        "if num_tokens >= sequence.num_known:",
        "if num_tokens > sequence.num_known:",
    ),
    "a second reference is not counted": (
        "kv/pool.py",
        "self.references[block] += 1",
        "self.references[block] += self.references[block] != 1",
    ),
    "an evicted block keeps its key": ("kv/pool.py", "        if is_cached:\n            self._forget(block)\n", ""),
    "a withdrawn block is still found": ("kv/pool.py", "        del self.block_of[key]\n", ""),
    "keys forget their parents": (
        "kv/keys.py",
        "blake2b(parent, digest_size=KEY_BYTES)",
        'blake2b(b"", digest_size=KEY_BYTES)',
    ),
    "a failed plan's blocks stay published": (
        "committing.py",
        "            state.cache.unpublish(flight.published, flight.plan.step)\n",
        "",
    ),
    "a failed row's blocks stay published": ("committing.py", "self._poison(flight.rows[index])", "pass"),
    "results of void rows are taken": (
        "committing.py",
        "sequence.stale = sequence.in_flight\n",
        "sequence.stale = 0\n",
    ),
    "length is reported before a stop": (
        "committing.py",
        "            token in request.stop_ids\n",
        "            sequence.num_committed < sequence.limit and token in request.stop_ids\n",
    ),
    "a token too many": (
        "committing.py",
        "elif sequence.num_committed >= sequence.limit:",
        "elif sequence.num_committed > sequence.limit:",
    ),
    "a failure forgets tokens in flight": (
        "committing.py",
        "= sequence.stale = sequence.num_pending = 0",
        "= sequence.stale = 0",
    ),
    "a late token counts as computed": (
        "committing.py",
        "        if request.status == Status.RUNNING:\n            sequence.num_computed +=",
        "        if True:\n            sequence.num_computed +=",
    ),
    "readmitted before its late token": ("intake.py", "if request.in_flight:", "if False:"),
    "headroom also for an empty batch": ("intake.py", "if has_company and room < spare:", "if room < spare:"),
    "a victim's table edits are sent": (
        "planning.py",
        '        self.edits = array("i", [flat[i + k] for i in kept for k in range(4)])\n',
        "",
    ),
    "the oldest is preempted": ("planning.py", "victim = max(self", "victim = min(self"),
    "a length stop is not foreseen": (
        "planning.py",
        "if known >= sequence.limit and request",
        "if known > sequence.limit and request",
    ),
    "a partly written block is published": (
        "planning.py",
        "min(end, sequence.num_prompt)",
        "min(end + 1, sequence.num_prompt)",
    ),
    "an id still on the device is not carried": (
        "planning.py",
        "flag = ROW_CARRY if start >= sequence.num_committed else 0",
        "flag = 0",
    ),
    "a freed slot is not told": ("state.py", "            self.freed_slots.append(sequence.slot)\n", ""),
    "a preempted request keeps its blocks": ("state.py", "            self.cache.release(sequence)\n", ""),
    "the cap is not given back": ("state.py", "self.sequence_budget.give_back(len(request.sequences))", "pass"),
}

SEARCH = """
import sys
from tests.core.random_driver import Driver
for seed in range({seeds}):
    try:
        Driver(seed).drive(100)
    except BaseException as error:
        print(seed, type(error).__name__, str(error)[:80])
        sys.exit(3)
"""


def search(package: Path) -> subprocess.CompletedProcess[str]:
    """Drive the package found first on the path until something is noticed: exit code 3."""
    command = [sys.executable, "-c", SEARCH.format(seeds=MAX_SEEDS)]
    environment = {"PYTHONPATH": f"{package}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=package, env=environment, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name in ("__init__.py", "errors.py", "executors/__init__.py", "executors/protocol.py"):
        (tmp_path / "octavo" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "src/octavo" / name, tmp_path / "octavo" / name)
    shutil.copytree(ROOT / "src/octavo/core", tmp_path / "octavo/core", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_noticed(name: str, package: Path) -> None:
    file, text, planted = BUGS[name]
    path = package / "octavo/core" / file
    source = path.read_text()
    assert source.count(text) >= 1, f"{file} no longer holds {text!r}"
    path.write_text(source.replace(text, planted, 1))
    found = search(package)
    assert found.returncode == 3, f"not noticed in {MAX_SEEDS} seeds: {found.stdout}{found.stderr}"


def test_without_a_planted_bug_nothing_is_noticed(package: Path) -> None:
    found = search(package)
    assert found.returncode == 0, found.stdout + found.stderr
