"""Tool processes: whatever a job does, its caller has an answer in time and the next job a process."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import copy_context
from pathlib import Path

import psutil
import pytest

from octavo.errors import (
    EngineError,
    InvalidRequestError,
    OctavoError,
    QueueFullError,
    TooComplexError,
    ToolUnavailableError,
)
from octavo.sandbox.pool import Sandbox, SandboxLimits, current_tenant
from octavo.sandbox.wire import CheckRegex, RenderChat

NASTY = (sys.executable, str(Path(__file__).with_name("nasty_child.py")))
ONE = SandboxLimits(num_processes=1, job_s=1.0, memory_bytes=512 << 20)


@asynccontextmanager
async def tools(limits: SandboxLimits = ONE, command: tuple[str, ...] = NASTY) -> AsyncIterator[Sandbox]:
    tool = Sandbox(limits, command)
    try:
        yield tool
    finally:
        await tool.close()
        assert not [pid for pid in tool.pids if psutil.pid_exists(pid)]


async def fails(work: Awaitable[object], kind: type[OctavoError]) -> None:
    with pytest.raises(kind):
        await work


async def test_the_command_that_is_shipped_does_the_jobs_that_are_shipped() -> None:
    async with tools(command=Sandbox(ONE)._command) as tool:
        assert await tool.run("check_regex", CheckRegex("a+b")) == 3
        chat = RenderChat("{{ bos }}{{ messages[0].content }}{{ mood }}", {"bos": "<s>"}, [{"content": "é"}])
        assert await tool.run("render_chat", chat) == "<s>é"
        named = RenderChat("{{ mood }}{{ raise_exception('no') }}", {}, [{"content": ""}], variables={"mood": "x"})
        with pytest.raises(InvalidRequestError, match="no"):
            await tool.run("render_chat", named)


async def test_nothing_is_started_before_the_first_job() -> None:
    async with tools() as tool:
        assert tool.pids == [] and tool.statistics()["starts"] == 0
        assert await tool.run("echo", {"value": [1, "two", None]}) == [1, "two", None]
        assert len(tool.pids) == 1


@pytest.mark.parametrize("job", ["spin", "lock", "sleep"])
async def test_a_job_without_an_end_is_killed_and_the_next_one_is_done(job: str) -> None:
    async with tools() as tool:
        await tool.run("echo", {})
        [first] = tool.pids
        await fails(tool.run(job, {"value": 1000}, limit_s=0.3), TooComplexError)
        assert await tool.run("echo", {"value": "next"}) == "next"
        assert tool.pids != [first] and not psutil.pid_exists(first)
        assert (tool.counters.kills, tool.counters.starts) == (1, 2)


async def test_memory_is_bounded_and_the_process_lives_on() -> None:
    async with tools() as tool:
        await tool.run("echo", {})
        pids = tool.pids
        await fails(tool.run("memory", {"value": 1 << 30}), TooComplexError)
        await fails(tool.run("recurse", {}), TooComplexError)
        assert await tool.run("memory", {"value": 1 << 20}) == 1 << 20
        assert tool.pids == pids


async def test_a_job_whose_process_ends_is_done_once_more() -> None:
    async with tools(SandboxLimits(num_processes=1, job_s=5.0)) as tool:
        await tool.run("echo", {})
        work = asyncio.create_task(tool.run("sleep", {"value": 0.3}))
        await asyncio.sleep(0.1)
        os.kill(tool.pids[0], signal.SIGKILL)
        assert await work is None
        assert (tool.counters.deaths, tool.counters.starts, tool.counters.kills) == (1, 2, 0)


async def test_a_job_that_ends_its_process_twice_is_refused() -> None:
    async with tools(SandboxLimits(num_processes=1, job_s=5.0)) as tool:
        await fails(tool.run("exit", {"value": 0}), TooComplexError)
        assert tool.counters.deaths == 2
        assert await tool.run("echo", {"value": 1}) == 1


async def test_a_kill_disturbs_no_other_job() -> None:
    async with tools(SandboxLimits(num_processes=2, job_s=1.0)) as tool:
        bomb = asyncio.create_task(tool.run("spin", {}, limit_s=0.4))
        await asyncio.sleep(0)
        for number in range(20):
            assert await tool.run("echo", {"value": number}) == number
        await fails(bomb, TooComplexError)
        assert tool.counters.kills == 1


async def test_errors_keep_their_class_and_field_and_others_tell_nothing() -> None:
    async with tools() as tool:
        with pytest.raises(InvalidRequestError, match="no such thing") as caught:
            await tool.run("refuse", {})
        assert caught.value.param == "thing"
        with pytest.raises(EngineError, match=r"^the job failed \(ZeroDivisionError\)$"):
            await tool.run("fail", {})
        with pytest.raises(EngineError, match="no job"):
            await tool.run("nothing", {})
        with pytest.raises(EngineError):
            await tool.run("check_regex", {"wrong": 1})
        assert await tool.run("print", {}) == "printed", "what a job prints is not taken for a frame"
        assert tool.counters.deaths == 0


async def test_an_answer_or_an_argument_over_the_cap_is_refused() -> None:
    async with tools(SandboxLimits(num_processes=1, job_s=5.0)) as tool:
        await fails(tool.run("long", {"value": 70 << 20}), EngineError)
        await fails(tool.run("echo", {"value": "x" * (70 << 20)}), EngineError)
        for value in (1 << 70, "\ud800", object()):
            await fails(tool.run("echo", {"value": value}), InvalidRequestError)
        assert await tool.run("echo", {"value": 1}) == 1


async def test_the_process_opens_no_files_and_no_sockets_and_knows_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    async with tools() as tool:
        for job in ("open", "socket"):
            with pytest.raises(EngineError, match="OSError"):
                await tool.run(job, {})
        names = await tool.run("environment", {})
        assert isinstance(names, list) and not {"OCTAVO_API_KEY", "HF_TOKEN"} & set(names)


async def test_the_queue_has_a_bound() -> None:
    async with tools(SandboxLimits(num_processes=1, max_waiting=2, job_s=5.0)) as tool:
        await tool.run("echo", {})
        work = [asyncio.create_task(tool.run("sleep", {"value": 0.2})) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert tool.statistics()["waiting"] == 2
        await fails(tool.run("echo", {}), QueueFullError)
        await asyncio.gather(*work)
        assert await tool.run("echo", {"value": 1}) == 1


async def test_the_queue_has_a_bound_in_bytes() -> None:
    limits = SandboxLimits(num_processes=1, max_waiting=8, max_waiting_bytes=10_000, job_s=5.0)
    async with tools(limits) as tool:
        await tool.run("echo", {})
        work = [asyncio.create_task(tool.run("sleep", {"value": 0.3}))]
        await asyncio.sleep(0.05)
        work += [asyncio.create_task(tool.run("echo", {"value": "x" * 4500})) for _ in range(2)]
        await asyncio.sleep(0.02)
        await fails(tool.run("echo", {"value": "x" * 4500}), QueueFullError)
        await asyncio.gather(*work)
        assert len(str(await tool.run("echo", {"value": "x" * 50_000}))) == 50_000, "one alone is taken at any size"
        assert tool._queue._num_bytes.total() == 0


async def test_a_caller_who_leaves_disturbs_nobody() -> None:
    async with tools(SandboxLimits(num_processes=1, job_s=5.0)) as tool:
        await tool.run("echo", {})
        gone = asyncio.create_task(tool.run("sleep", {"value": 0.2}))
        waits = asyncio.create_task(tool.run("echo", {"value": "never"}))
        await asyncio.sleep(0.05)
        for task in (gone, waits):
            task.cancel()
        await asyncio.gather(gone, waits, return_exceptions=True)
        assert gone.cancelled() and waits.cancelled()
        assert await tool.run("echo", {"value": 2}) == 2
        assert (tool.counters.kills, tool.counters.deaths) == (0, 0)


def as_tenant(name: str, work: Awaitable[object]) -> asyncio.Task[object]:
    """A task that does a job for a tenant."""

    async def done() -> object:
        return await work

    context = copy_context()
    context.run(current_tenant.set, name)
    return asyncio.create_task(done(), context=context)


THREE = SandboxLimits(num_processes=3, max_waiting=8, job_s=60.0)


async def start_all(tool: Sandbox) -> None:
    """Wait until every process is there."""
    while len(tool.pids) < tool.limits.num_processes:
        await asyncio.gather(*(as_tenant(name, tool.run("sleep", {"value": 0.1})) for name in "abc"))


async def test_one_tenant_never_holds_every_process() -> None:
    async with tools(THREE) as tool:
        await start_all(tool)
        slow = [as_tenant("a", tool.run("spin", {})) for _ in range(6)]
        await asyncio.sleep(0.1)
        assert await as_tenant("b", tool.run("echo", {"value": 1})) == 1
        assert await as_tenant("b", tool.run("echo", {"value": 2})) == 2
        assert not any(task.done() for task in slow), "a process of its own, though six jobs came before"
        assert tool.counters.kills == 0
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)


async def test_one_process_is_left_for_templates() -> None:
    """Whatever other jobs of however many tenants take their time."""
    chat = RenderChat("{{ messages[0].content }}", {}, [{"content": "x"}])
    async with tools(THREE) as tool:
        await start_all(tool)
        slow = [as_tenant(name, tool.run("spin", {})) for name in "aabbcc"]
        await asyncio.sleep(0.05)
        for _ in range(3):
            assert await as_tenant("a", tool.run("render_chat", chat)) == "x"
        assert not any(task.done() for task in slow)
        assert tool.counters.kills == 0
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)


async def test_tenants_take_turns_and_fill_queues_of_their_own() -> None:
    ended: list[str] = []
    async with tools(SandboxLimits(num_processes=1, max_waiting=4, job_s=5.0)) as tool:
        await tool.run("echo", {})
        many = [as_tenant("a", tool.run("sleep", {"value": 0.05})) for _ in range(5)]
        for task in many:
            task.add_done_callback(lambda _: ended.append("a"))
        await asyncio.sleep(0.02)
        await fails(as_tenant("a", tool.run("echo", {})), QueueFullError)
        assert not ended, "it was refused at once"
        other = as_tenant("b", tool.run("echo", {"value": "b"}))
        other.add_done_callback(lambda _: ended.append("b"))
        assert await other == "b"
        await asyncio.gather(*many)
        assert ended.index("b") <= 2, ended
        crowd = [as_tenant(f"t{number}", tool.run("sleep", {"value": 0.01})) for number in range(18)]
        found = await asyncio.gather(*crowd, return_exceptions=True)
        assert sum(isinstance(one, QueueFullError) for one in found) >= 1, "of all tenants four times as many"


async def test_a_job_takes_a_process_that_is_free_before_the_one_that_starts() -> None:
    async with tools(THREE) as tool:
        await tool.run("echo", {})
        await asyncio.gather(*(tool.run("echo", {"value": number}) for number in range(8)))
        jobs = [tool.run("sleep", {"value": 0.001}) for _ in range(8)]
        await asyncio.gather(*jobs)
        assert tool.statistics()["waiting"] == 0
        assert tool.counters.starts <= 2


@pytest.mark.parametrize("command", [("/nonexistent",), (sys.executable, "-c", "pass"), ("/bin/echo", "GGGGGGGG")])
async def test_a_process_that_cannot_be_started_is_told_and_not_tried_at_every_job(command: tuple[str, ...]) -> None:
    async with tools(command=command) as tool:
        await fails(tool.run("echo", {}), ToolUnavailableError)
        tried = tool.counters.starts
        await fails(tool.run("echo", {}), ToolUnavailableError)
        assert tool.counters.starts == tried


async def test_closing_ends_the_processes_and_the_open_jobs() -> None:
    tool = Sandbox(SandboxLimits(num_processes=2, job_s=30.0), NASTY)
    work = [asyncio.create_task(tool.run("spin", {})) for _ in range(3)]
    while len(tool.pids) < 2:
        await asyncio.sleep(0.01)
    pids = tool.pids
    await tool.close()
    await tool.close()
    done = await asyncio.gather(*work, return_exceptions=True)
    assert all(isinstance(error, asyncio.CancelledError | ToolUnavailableError) for error in done)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def wait_until(condition: Callable[[], bool], limit_s: float = 60.0) -> bool:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("job", ["", "spin"], ids=["idle", "busy"])
def test_the_process_ends_when_its_parent_is_killed(job: str) -> None:
    """Idle it sees the end of its stdin; busy the kernel ends it, or its alarm, a while after the job's time."""
    code = (
        "import asyncio\n"
        "from octavo.sandbox.pool import SandboxLimits, Sandbox\n"
        "async def main():\n"
        f"    tool = Sandbox(SandboxLimits(num_processes=1), {NASTY!r})\n"
        "    await tool.run('echo', {})\n"
        "    print(tool.pids[0], flush=True)\n"
        f"    await (tool.run({job!r}, {{}}, limit_s=0.5) if {job!r} else asyncio.sleep(60))\n"
        "asyncio.run(main())\n"
    )
    import subprocess

    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        time.sleep(0.1)
        parent.kill()
    child = psutil.Process(pid) if psutil.pid_exists(pid) else None
    assert wait_until(lambda: child is None or not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
