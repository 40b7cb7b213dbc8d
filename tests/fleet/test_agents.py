"""Agents in processes of their own: they and their engines are killed and stopped under load, and nothing is lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.engine.fakes import expected, make_request
from tests.fleet.agents import agents
from tests.fleet.fronts import TOKEN, Front, open_front, until
from tests.reliability.deaths import Load

from octavo.core.request import FinishReason


def check(load: Load) -> None:
    """Every stream is whole and equal to that of an engine that never died."""
    assert not load.errors
    for stream in load.streams:
        assert (stream.ids, stream.reason) == (expected(stream.request), FinishReason.LENGTH)
        assert not stream.num_misplaced


async def faulted(front: Front, fault: Callable[[], object], num_after: int) -> Load:
    """Apply a fault under 24 streams; `num_after` engines serve afterwards."""
    load = Load(front.supervisor, lambda number: make_request(f"r{number}", max_tokens=80), 24)
    await until(lambda: len(load.streams) > 24)
    epochs = {row["epoch"] for row in front.engines.report()}
    fault()
    await until(lambda: {row["epoch"] for row in front.engines.report()} != epochs)
    await until(lambda: front.engines.num_engines == num_after)
    num_begun = len(load.streams)
    await until(lambda: len(load.streams) > num_begun)
    await load.stop()
    check(load)
    return load


@pytest.mark.parametrize("fault", ["kill the agent", "kill the engine", "stop the agent", "end the agent"])
async def test_a_lost_machine_loses_no_request(tmp_path: Path, fault: str) -> None:
    async with open_front(tmp_path) as front:
        with agents(2, TOKEN, front.address) as (one, two):
            await until(lambda: front.engines.num_engines == 2)
            pid = one.engine_pid
            faults: dict[str, tuple[Callable[[], object], int]] = {
                "kill the agent": (one.kill, 1),
                "kill the engine": (lambda: os.kill(pid, signal.SIGKILL), 2),
                "stop the agent": (lambda: one.signal(signal.SIGSTOP), 1),
                "end the agent": (lambda: one.signal(signal.SIGTERM), 1),
            }
            await faulted(front, *faults[fault])
            if fault == "stop the agent":
                one.signal(signal.SIGCONT)  # its frames are of an epoch that is over; it joins again with its engine
                await until(lambda: front.engines.num_engines == 2)
                assert one.engine_pid == pid
                load = Load(front.supervisor, lambda number: make_request(f"s{number}", max_tokens=40), 12)
                await until(lambda: len(load.streams) > 24)
                await load.stop()
                check(load)
            assert two.lines


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder for sockets, whose paths may have some hundred characters; pytest's are too long."""
    with tempfile.TemporaryDirectory(prefix="octavo-") as folder:
        yield Path(folder)


async def test_a_command_joins_and_is_listed_and_stopped(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """octavo serve scripted:FILE --join, octavo ps, octavo stop."""
    monkeypatch.setenv("OCTAVO_RUN_DIR", str(short_path / "run"))
    script = short_path / "a.json"
    script.write_text('{"rules": [{"say": "yes"}]}')
    (short_path / "run").mkdir(mode=0o700)
    async with open_front(short_path / "run", token=None) as front:
        command = [sys.executable, "-m", "octavo"]
        words = [*command, "serve", f"scripted:{script}", "--join", str(front.address), "--served-model-name", "m"]
        process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        try:
            await until(lambda: front.engines.num_engines == 1 and hasattr(front.supervisor, "capacity"), 60.0)
            assert len(front.supervisor.capacity.fingerprint.text.split("/")) == 3

            async def run(*rest: str) -> str:
                done = await asyncio.to_thread(
                    subprocess.run, [*command, *rest], capture_output=True, text=True, timeout=60, check=True
                )
                return str(done.stdout)

            (row,) = json.loads(await run("ps", "--json"))
            assert row["url"] == f"join://{front.address}" and row["front"] == "127.0.0.1"
            assert row["pid"] == process.pid and row["engine"]["epoch"] == 1 and row["model"] == "m"
            assert "replica of 127.0.0.1" in await run("ps")
            await run("stop", "m")
            assert await asyncio.to_thread(process.wait, 30) == 0
            await until(lambda: not front.engines.report())
        finally:
            process.kill()
            process.communicate()
