"""Row 6: an engine that cannot start says why, soon, and leaves no process and no file behind."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from octavo.config.sources import config_from_keywords
from octavo.errors import CapacityError, EngineDeadError, OctavoError, UnknownModelError
from octavo.frontend import engine_process as process
from octavo.frontend.engine_process import COMMAND
from octavo.frontend.engine_supervisor import EngineSupervisor
from tests.reliability.deaths import FAKE, config
from tests.reliability.scorecard import Score


def children() -> set[int]:
    """Processes whose parent is this one."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[1]) == os.getpid() and fields[0] != "Z":
                found.add(int(entry.name))
    return found


def descriptors() -> int:
    """Open files, connections and pages of this process."""
    return len(os.listdir("/proc/self/fd"))


async def descriptors_left(num_before: int) -> int:
    """More than before, once the event loop and the threads that wait for processes have had time to close theirs."""
    deadline = time.monotonic() + 30.0
    while (left := max(0, descriptors() - num_before)) and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    return left


HANGING = (sys.executable, "-c", "import time; time.sleep(600)")
ENDING = (sys.executable, "-c", "raise SystemExit(7)")
CASES: list[tuple[str, tuple[str, ...], type[OctavoError], str]] = [
    ("broken", FAKE, CapacityError, "the pool holds nothing"),
    ("crash", FAKE, EngineDeadError, "exit status 9"),
    ("x", ENDING, EngineDeadError, "exit status 7"),
    ("x", HANGING, EngineDeadError, "not get ready in time"),
    ("no_such.gguf", COMMAND, UnknownModelError, "no_such.gguf"),
]


@pytest.mark.skipif(sys.platform != "linux", reason="counts processes in /proc")
@pytest.mark.parametrize("case", range(len(CASES)))
async def test_row_06_a_failed_start_is_clean(score: Score, case: int, monkeypatch: pytest.MonkeyPatch) -> None:
    behaviour, command, error, words = CASES[case]
    if command is HANGING:  # the others begin or end by themselves, whenever a busy machine lets them
        monkeypatch.setattr(process, "BEGIN_LIMIT_S", score.dose(2.0, 20.0))
    before, num_open, begun = children(), descriptors(), time.monotonic()
    with pytest.raises(error, match=words):
        await EngineSupervisor.start(config(behaviour), command=command)
    taken = time.monotonic() - begun
    score.count("processes left", len(children() - before))
    score.count("descriptors left", await descriptors_left(num_open))
    score.time("seconds", taken, 60.0)


async def test_row_06_a_start_that_is_given_up_is_clean(score: Score) -> None:
    """Cancelled while the engine opens, at any moment."""
    before, num_open = children(), descriptors()
    for delay in score.dose((0.05, 0.6), (0.01, 0.05, 0.2, 0.4, 0.6, 0.8, 1.0, 1.5)):
        starting = asyncio.create_task(EngineSupervisor.start(config("fake"), command=FAKE))
        await asyncio.sleep(delay)
        starting.cancel()
        for keeper in await asyncio.gather(starting, return_exceptions=True):
            if isinstance(keeper, EngineSupervisor):
                await keeper.close()
    score.count("processes left", len(children() - before))
    score.count("descriptors left", await descriptors_left(num_open))


@pytest.mark.slow
async def test_row_06_a_pool_too_large_for_the_machine(score: Score) -> None:
    before, begun = children(), time.monotonic()
    with pytest.raises(OctavoError):
        await EngineSupervisor.start(config_from_keywords("smollm2", {"kv_cache_tokens": "100G"}), command=COMMAND)
    score.count("processes left", len(children() - before))
    score.time("seconds", time.monotonic() - begun, 60.0)
