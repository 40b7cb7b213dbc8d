"""Replicas on a Ray that each test starts: placing, restarting, removing; who can reach it; what is missing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

import psutil
import pytest
from tests.ports import free_port

from octavo.errors import ConfigError, EngineDeadError
from octavo.fleet.providers import ray as provider_module
from octavo.fleet.providers.ray import RayProvider
from octavo.fleet.providers.ray_agent import ReplicaSpec

pytest.importorskip("ray", reason="ray is not installed: pip install -e '.[ray]'")
pytestmark = pytest.mark.timeout(300)
LIMIT_S = 90.0


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition. Fails after LIMIT_S."""
    try:
        async with asyncio.timeout(LIMIT_S):
            while not await asyncio.to_thread(condition):
                await asyncio.sleep(0.1)
    except TimeoutError:
        pytest.fail(f"not within {LIMIT_S:g} s: {what}")


def serves(port: int) -> bool:
    with (
        suppress(OSError, HTTPException),
        urllib.request.urlopen(f"http://127.0.0.1:{port}/livez", timeout=5) as answer,
    ):
        return bool(answer.status == 200)
    return False


def below(pid: int) -> list[psutil.Process]:
    """All processes below one, Ray's and the agents'."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def has_ended(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    return True


def words_of(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):  # a zombie too
        return " ".join(process.cmdline())
    return ""


def actors(provider: RayProvider) -> list[psutil.Process]:
    return [process for process in below(provider.pid) if words_of(process).startswith("ray::AgentRunner")]


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "answers.yaml"
    path.write_text("rules:\n  - {say: hello}\n")
    return f"scripted:{path}"


@pytest.fixture
def make_spec(script: str) -> Callable[..., ReplicaSpec]:
    """A spec whose agent is a whole server: what a provider sees of an agent is a process that runs."""

    def make(port: int, **needs: float) -> ReplicaSpec:
        return ReplicaSpec(("serve", script, "--port", str(port), "--quiet"), "t" * 32, num_cpus=0.1, **needs)

    return make


@pytest.fixture
async def notices() -> list[str]:
    return []


@pytest.fixture
async def provider(notices: list[str]) -> AsyncIterator[RayProvider]:
    provider = await RayProvider.connect("test", "local", notices.append, wait_s=15.0)
    yield provider
    processes = below(provider.pid)
    await provider.close()
    await until(lambda: all(has_ended(process) for process in processes), "no process is left")
    assert not Path(provider._folder).exists()


async def test_replicas_start_and_come_back_and_stop(
    provider: RayProvider, notices: list[str], make_spec: Callable[..., ReplicaSpec]
) -> None:
    ports = [free_port(), free_port()]
    placed = await asyncio.gather(*(provider.start(n, make_spec(ports[n])) for n in (0, 1)))
    assert [placement.host for placement in placed] == ["127.0.0.1"] * 2 and provider.host == "127.0.0.1"
    await until(lambda: all(map(serves, ports)), "both agents serve")
    victim, _ = sorted(actors(provider), key=lambda a: not any(str(ports[0]) in words_of(c) for c in a.children(True)))
    agents = victim.children(recursive=True)
    victim.kill()
    await until(lambda: all(has_ended(agent) for agent in agents), "an agent ends with its actor")
    await until(lambda: len(actors(provider)) == 2 and serves(ports[0]), "Ray starts the actor again, and it the agent")
    assert serves(ports[1]) and (await provider.address(0)).host == "127.0.0.1"

    await provider.stop(1)
    await until(lambda: len(actors(provider)) == 1 and not serves(ports[1]), "the second replica is removed")
    assert serves(ports[0])
    with pytest.raises(EngineDeadError, match="replica 1 is not placed"):
        await provider.address(1)
    await provider.stop(1)  # again: nothing to do


async def test_a_local_ray_listens_on_loopback_with_a_token(
    provider: RayProvider, notices: list[str], make_spec: Callable[..., ReplicaSpec]
) -> None:
    await provider.start(0, make_spec(free_port()))
    processes = [psutil.Process(provider.pid), *below(provider.pid)]
    listening = [c.laddr for p in processes for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert len(listening) >= 5
    assert {address.ip for address in listening} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert notices == [notices[0]] and "loopback only, with a token of its own" in notices[0]
    assert not [process for process in processes if "t" * 32 in words_of(process)], "the fleet's token"


@pytest.mark.slow
async def test_a_local_ray_refuses_programs_without_its_token(provider: RayProvider, tmp_path: Path) -> None:
    gcs = next(word for p in below(provider.pid) for word in p.cmdline() if word.startswith("--gcs-address="))
    code = f"import ray; ray.init({gcs.partition('=')[2]!r}, log_to_driver=False)"
    stranger = {
        **os.environ,
        **provider_module.LOCAL_VARIABLES,
        "RAY_AUTH_MODE": "disabled",
        "HOME": str(tmp_path),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code], env=stranger, capture_output=True, text=True, timeout=100
    )
    assert done.returncode != 0 and "uthenticat" in done.stderr


@pytest.mark.slow
async def test_what_has_no_room_is_refused_with_the_numbers(
    provider: RayProvider, notices: list[str], make_spec: Callable[..., ReplicaSpec]
) -> None:
    with pytest.raises(
        EngineDeadError, match=r"replica 3 needs 0\.2 CPU and 4 GPU on one machine; .*no room within 15 s"
    ):
        await provider.start(3, make_spec(1, num_gpus=2.0, num_ranks=2))
    assert any("waiting up to 15 s" in notice for notice in notices)
    assert actors(provider) == []
    # Two ranks that have room.
    port = free_port()
    await provider.start(4, make_spec(port, num_ranks=2))
    await until(lambda: serves(port), "the agent of two ranks serves")


@pytest.mark.slow
async def test_an_agent_that_cannot_start_is_reported_with_its_last_lines(provider: RayProvider) -> None:
    await provider.start(0, ReplicaSpec(("serve", "scripted:/no/such.yaml", "--port", "0"), num_cpus=0.1))
    message = ""
    async with asyncio.timeout(LIMIT_S):
        while "no/such.yaml" not in message:
            try:
                await provider.address(0)
            except EngineDeadError as error:
                message = str(error)
            await asyncio.sleep(0.2)
    assert "replica 0 at 127.0.0.1: the agent ended 6 times (exit status 2)" in message


@pytest.mark.slow
async def test_a_killed_ray_process_is_started_again_with_its_replicas(
    provider: RayProvider, make_spec: Callable[..., ReplicaSpec]
) -> None:
    port = free_port()
    await provider.start(0, make_spec(port))
    await until(lambda: serves(port), "the agent serves")
    old, processes = provider.pid, below(provider.pid)
    os.kill(old, signal.SIGKILL)
    # Ray's own agents of the dashboard and of environments look for their raylet at long intervals.
    working = [p for p in processes if p.name() not in ("ray::DashboardAgent", "ray::RuntimeEnvAgent")]
    await until(lambda: all(has_ended(process) for process in working), "a local Ray ends with its process")
    for process in set(processes) - set(working):
        process.kill()
    await until(lambda: provider.pid != old and serves(port), "Ray and the replica are started again")


async def test_without_ray_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ray.py").write_text("raise ModuleNotFoundError(\"No module named 'ray'\", name='ray')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(ConfigError, match=r"pip install 'octavo\[ray\]'"):
        await RayProvider.connect("test", "local", print)


async def test_a_cluster_that_does_not_answer_is_named() -> None:
    with pytest.raises(ConfigError, match=r"ray://127\.0\.0\.1:1: Ray's client protocol is not used"):
        await RayProvider.connect("test", "ray://127.0.0.1:1", print)


def test_the_api_process_does_not_import_ray() -> None:
    code = f"import sys, {provider_module.__name__}; assert 'ray' not in sys.modules and 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 0
