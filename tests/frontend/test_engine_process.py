"""The engine in a child process: ready, at work, killed, orphaned. Each child costs a few hundred milliseconds."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.engine.direct_client import start_engine
from tests.engine.fakes import expected, make_request

from octavo.config import Config, ModelConfig
from octavo.core.request import FinishError, FinishReason
from octavo.engine.client import Accepted
from octavo.errors import CapacityError, EngineDeadError, ErrorKind
from octavo.frontend import engine_process as process
from octavo.frontend.engine_process import EngineProcess

COMMAND = (sys.executable, str(Path(__file__).with_name("fake_engine.py")))


def config(behaviour: str) -> Config:
    return Config(model=ModelConfig(model=behaviour))


@asynccontextmanager
async def engine(behaviour: str) -> AsyncIterator[EngineProcess]:
    child = await start_engine(config(behaviour), epoch=5, command=COMMAND)
    try:
        yield child
    finally:
        await child.close()
    assert child.returncode is not None


async def finish(child: EngineProcess, name: str) -> tuple[list[int], FinishReason | None, FinishError | None]:
    ids: list[int] = []
    async for output in child.client.outputs(name):
        ids += output.token_ids
    return ids, output.finish_reason, output.error


async def test_a_child_serves_and_ends_cleanly() -> None:
    async with engine("fake") as child:
        assert child.capacity.vocab_size == 97 and child.client.epoch == 5
        request = make_request("a", max_tokens=9)
        await child.client.submit(request)
        assert await finish(child, "a") == (expected(request), FinishReason.LENGTH, None)
    assert child.returncode == 0
    await child.close()


async def test_a_killed_child_gives_errors_not_hangs() -> None:
    async with engine("gated") as child:
        await child.client.submit(make_request("r0", max_tokens=60))
        others = [asyncio.create_task(child.client.submit(make_request(f"r{i}", max_tokens=60))) for i in range(1, 8)]
        await asyncio.sleep(0.05)
        child.kill()
        answers = await asyncio.gather(*others, return_exceptions=True)
        taken = ["r0", *(answer.request_id for answer in answers if isinstance(answer, Accepted))]
        assert all(isinstance(answer, (Accepted, EngineDeadError)) for answer in answers)
        for name in taken:
            _, reason, error = await finish(child, name)
            assert reason is FinishReason.ERROR and error is not None and error.kind is ErrorKind.ENGINE_DEAD
        with pytest.raises(EngineDeadError):
            await child.client.submit(make_request("late"))
    assert child.describe_exit() == "killed by SIGKILL"


async def test_a_child_whose_engine_dies_exits_and_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    async with engine("dying") as child:
        await child.client.submit(make_request("a", max_tokens=60))
        ids, reason, error = await finish(child, "a")
        assert ids and reason is FinishReason.ERROR and error is not None and "the device is gone" in error.message
    assert child.describe_exit() == "exit status 1"
    assert "the device is gone" in capfd.readouterr().err  # its stderr passes through


async def test_reliability_6_a_child_that_cannot_open_raises_its_own_error() -> None:
    with pytest.raises(CapacityError, match="the pool holds nothing"):
        await start_engine(config("broken"), command=COMMAND)
    with pytest.raises(EngineDeadError, match="exit status 9"):
        await start_engine(config("crash"), command=COMMAND)
    with pytest.raises(EngineDeadError, match="exit status 7"):
        await start_engine(config("x"), command=(sys.executable, "-c", "raise SystemExit(7)"))


async def test_a_hung_child_is_ended_by_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "STOP_TIMEOUT_S", 0.3)
    async with engine("gated") as child:
        await child.client.submit(make_request("a", max_tokens=60))
        async for output in child.client.outputs("a"):
            if output.position + len(output.token_ids) == 3:  # it hangs in the fourth step
                break
    assert child.describe_exit() == "killed by SIGKILL"


def test_a_child_notices_its_parents_death() -> None:
    """The parent is killed without a chance to say goodbye; the child, in the middle of a step, is gone at once."""
    script = textwrap.dedent(
        f"""
        import asyncio, os, signal, sys
        sys.path[:0] = {[str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "src")]!r}
        from tests.frontend.test_engine_process import COMMAND, config
        from tests.engine.fakes import make_request
        from tests.engine.direct_client import start_engine
        from octavo.frontend.engine_process import EngineProcess

        async def main():
            child = await start_engine(config("gated"), command=COMMAND)
            await child.client.submit(make_request("a", max_tokens=60))
            print(child.pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

        asyncio.run(main())
        """
    )
    parent = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert parent.returncode == -9, parent.stderr
    pid = int(parent.stdout)
    for _ in range(200):
        if not is_alive(pid):
            return
        asyncio.run(asyncio.sleep(0.05))
    os.kill(pid, 9)
    pytest.fail("the child outlived its parent")


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
