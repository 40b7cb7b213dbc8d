"""Ranks on two hosts: two network namespaces where this user may make them, else loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM
from octavo.config import ParallelConfig
from octavo.config.sources import config_from_keywords
from octavo.errors import ConfigError
from octavo.executors.ranks.hosts import RankHosts
from tests.executors.ranks.test_rank_processes import check, is_running, ranks_of, request
from tests.ports import free_port
from tests.reliability.deaths import follow, keeping, until

TOKEN = "a token of these tests 0123"
NAME = "octranks"  # of the namespace and of the interfaces


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "script.json"
    path.write_text(json.dumps({"step_ms": 4, "rules": []}))
    return path


@contextlib.contextmanager
def rank_host(
    script: Path, address: str, port: int, *, token: str = TOKEN, namespace: str = ""
) -> Iterator[subprocess.Popen[bytes]]:
    """Run the ranks of host 1."""
    words = [sys.executable, "-m", "octavo", "serve", f"scripted:{script}", "--tensor-parallel-size=2", "--nnodes=2"]
    words += ["--node-rank=1", f"--master-addr={address}", f"--master-port={port}"]
    inside = ["ip", "netns", "exec", namespace] if namespace else []
    with subprocess.Popen([*inside, *words], env={**os.environ, "OCTAVO_FLEET_TOKEN": token}) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0


def config(script: Path, address: str, port: int) -> Any:
    values = {"tensor_parallel_size": 2, "nnodes": 2, "master_addr": address, "master_port": port}
    return config_from_keywords(f"scripted:{script}", {**values, "fleet_token": TOKEN, "max_num_seqs": 32})


async def serve_over_a_kill(script: Path, address: str, port: int) -> None:
    async with keeping(config(script, address, port)) as supervisor:
        streams = [asyncio.create_task(follow(supervisor, request(number, 300))) for number in range(8)]
        await until(lambda: len(supervisor.requests) == 8 and all(one.has_progress for one in supervisor.requests))
        rows = await ranks_of(supervisor)
        assert rows[1]["where"] == socket.gethostname()
        os.kill(rows[1]["pid"], signal.SIGKILL)
        check([await stream for stream in streams])
        assert supervisor.num_restarts == 1
        left = [row["pid"] for row in await ranks_of(supervisor)]
    await until(lambda: not any(map(is_running, left)))


async def test_two_hosts_on_loopback(script: Path) -> None:
    port = free_port()
    with rank_host(script, "127.0.0.1", port):
        await serve_over_a_kill(script, "127.0.0.1", port)


@pytest.fixture
def namespace() -> Iterator[str]:
    """A namespace with the address 10.97.5.2, reached from 10.97.5.1 here."""
    commands = (
        f"ip netns add {NAME}",
        f"ip link add {NAME}0 type veth peer name {NAME}1 netns {NAME}",
        f"ip addr add 10.97.5.1/24 dev {NAME}0",
        f"ip link set {NAME}0 up",
        f"ip netns exec {NAME} ip addr add 10.97.5.2/24 dev {NAME}1",
        f"ip netns exec {NAME} ip link set {NAME}1 up",
        f"ip netns exec {NAME} ip link set lo up",
    )
    try:
        for command in commands:
            try:
                subprocess.run(command.split(), check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(f"network namespaces need root and iproute2 ({error})")
        yield NAME
    finally:
        with contextlib.suppress(OSError):
            subprocess.run(["ip", "link", "del", f"{NAME}0"], check=False, capture_output=True)
            subprocess.run(["ip", "netns", "del", NAME], check=False, capture_output=True)


async def test_two_hosts_in_two_namespaces(script: Path, namespace: str) -> None:
    """A rank is killed, then the link is cut: no packet tells either side, and both notice by the silence."""
    port = free_port("10.97.5.1")
    with rank_host(script, "10.97.5.1", port, namespace=namespace):
        await serve_over_a_kill(script, "10.97.5.1", port)
        async with keeping(config(script, "10.97.5.1", port)) as supervisor:
            stream = asyncio.create_task(follow(supervisor, request(1, 600)))
            await until(lambda: any(one.has_progress for one in supervisor.requests))
            pid = (await ranks_of(supervisor))[1]["pid"]
            subprocess.run(["ip", "link", "set", f"{NAME}0", "down"], check=True)
            await until(lambda: supervisor.trouble() is not None)
            assert supervisor.num_stalls == 0, "a rank that is silent is noticed before a stalled step is"
            await until(lambda: not is_running(pid))
            subprocess.run(["ip", "link", "set", f"{NAME}0", "up"], check=True)
            check([await stream])


async def test_other_hosts_need_the_token(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    with rank_host(script, "127.0.0.1", port, token="another token of 20 bytes"):
        starting = asyncio.create_task(keeping(config(script, "127.0.0.1", port)).__aenter__())
        said = ""
        async with asyncio.timeout(60.0):
            while "the other side has another token" not in said:
                await asyncio.sleep(0.1)
                said += capfd.readouterr().err
        assert not starting.done()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)


def test_other_files_of_the_model_and_other_hosts_are_refused() -> None:
    here = RankHosts(ParallelConfig(tensor_parallel_size=2, nnodes=2), TOKEN.encode(), "model a", "1.0")
    hello = here.hello(b"key", is_control=False)
    here.check(hello_of(hello, node_rank=1), {1: []})
    for change, message in (
        ({"version": "0.9"}, "runs octavo 0.9, this host 1.0"),
        ({"fingerprint": "model b"}, "has other files of the model"),
        ({"node_rank": 7}, "is no missing host of --nnodes 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            here.check(hello_of(hello, **{"node_rank": 1, **change}), {1: []})


def hello_of(hello: Any, **changes: Any) -> Any:
    return type(hello)(**{name: changes.get(name, getattr(hello, name)) for name in hello.__struct_fields__})


def test_several_hosts_need_a_token(script: Path) -> None:
    with pytest.raises(ConfigError, match="--nnodes needs a token that all hosts share"):
        LLM(f"scripted:{script}", tensor_parallel_size=2, nnodes=2)
