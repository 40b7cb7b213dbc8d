"""`octavo serve MODEL` on a machine without HTTP: an engine for a front on another machine (`--join HOST:PORT` or
`--offer HOST:PORT`), or ranks of an engine on host 0 (`--nnodes N --node-rank K` with K above 0).

Owns: this process, its signals; an engine's record among the servers of this user and its admin socket (status, drain);
the rank processes, one after another: each serves one epoch of the engine, and the next waits for the next epoch.
Does not: serve HTTP (the front does), know the front's connection (fleet.agent does), or load a model.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType

import msgspec

from octavo.artifacts.resolve import resolve_model
from octavo.cli.server_registry import (
    ServerFolder,
    ServerRecord,
    find_servers,
    open_server_folder,
    process_start_ticks,
    run_folder,
)
from octavo.config import Config
from octavo.errors import ConfigError
from octavo.fleet.agent import Agent
from octavo.fleet.security import HostPort, LinkSecurity, parse_address
from octavo.observe.log import print_notice
from octavo.server.admin import AdminServer
from octavo.server.http.listener import new_event_loop

COMMAND = (sys.executable, "-m", "octavo.assembly", "--rank")
LOOK_S = 0.1
SHORT_S = 1.0  # a process that ends sooner than this is replaced after PAUSE_S
PAUSE_S = 2.0


def is_agent(config: Config) -> bool:
    """Return True if the settings ask for an engine without HTTP."""
    return bool(config.fleet.join or config.fleet.offer)


def run_agent(config: Config, *, is_quiet: bool) -> int:
    """Run an engine for a front until a signal; return 0. Raises ConfigError, and the error of the engine's opening."""
    fleet = config.fleet
    if fleet.join and fleet.offer:
        raise ConfigError("--join and --offer are both set; give --join to dial a front, or --offer to wait for one")
    fronts = [parse_address(part, "--join") for text in fleet.join for part in text.split(",") if part.strip()]
    offer = parse_address(fleet.offer, "--offer") if fleet.offer else None
    resolve_model(config.model.model, config.model.revision, config.model.offline)  # report a wrong name first
    with open_server_folder() as folder:
        find_servers()  # removes the folders of killed servers
        agent = Agent(config, LinkSecurity.of(config.link, run_folder()), _reporter(is_quiet))
        path = folder.admin_path(config.serving.admin_socket)
        publish = partial(_publish, folder, agent, path)
        with asyncio.Runner(loop_factory=new_event_loop) as runner, contextlib.suppress(asyncio.CancelledError):
            runner.run(_serve(agent, fronts, offer, path, publish))
    return 0


def _reporter(is_quiet: bool) -> Callable[[str], object]:
    return (lambda line: None) if is_quiet else print_notice


def _publish(folder: ServerFolder, agent: Agent, path: Path, url: str) -> None:
    pid = os.getpid()
    folder.publish(ServerRecord(pid, url, agent.model, str(path), time.time(), process_start_ticks(pid)))


async def _serve(
    agent: Agent, fronts: list[HostPort], offer: HostPort | None, path: Path, publish: Callable[[str], None]
) -> None:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)

    async def status(_: str) -> object:
        return _status(agent)

    async def drain(_: str) -> object:
        task.cancel()
        return True

    admin = AdminServer(path, {"status": status, "drain": drain})
    await admin.open()
    try:
        if offer is None:
            publish(f"join://{fronts[0]}")
            await agent.run_joining(fronts)
        else:
            await agent.run_offering(offer, lambda address: publish(f"offer://{address}"))
    finally:
        await admin.close()


def _status(agent: Agent) -> dict[str, object]:
    """Return what `octavo ps` and `octavo admin status` show of a replica."""
    phase = "starting" if not agent.processes else f"replica of {agent.front}" if agent.front else "waiting for a front"
    return {
        "phase": phase,
        "processes": agent.processes,
        "engine": {"epoch": agent.epoch, "restarts": agent.num_restarts},
        "front": agent.front or None,
        "term": agent.term,
    }


class RankHost:
    """Keeps this host's rank processes running until `stop`."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._num_ranks = config.parallel.num_ranks // config.parallel.nnodes
        self._running: dict[int, tuple[subprocess.Popen[bytes], float]] = {}
        self._start_at = [0.0] * self._num_ranks
        self._is_stopping = threading.Event()

    def run(self) -> int:
        """Run until `stop`; return the exit status."""
        sizes = self._config.parallel
        print_notice(
            f"octavo runs ranks {sizes.node_rank * self._num_ranks} to {(sizes.node_rank + 1) * self._num_ranks - 1} "
            f"of {sizes.num_ranks} for the engine at {sizes.master_addr}:{sizes.master_port}"
        )
        try:
            while not self._is_stopping.wait(LOOK_S):
                self._look(time.monotonic())
        finally:
            for process, _ in self._running.values():
                process.kill()
                process.wait()
                _close_stdin(process)
        return 0

    def stop(self, number: int = 0, frame: FrameType | None = None) -> None:
        """End the processes soon. Also a signal handler."""
        self._is_stopping.set()

    def _look(self, now: float) -> None:
        """Start the processes that are missing."""
        for index in range(self._num_ranks):
            process, started_at = self._running.get(index, (None, 0.0))
            if process is not None and process.poll() is not None:
                _close_stdin(process)
                del self._running[index]
                self._start_at[index] = now + PAUSE_S * (now - started_at < SHORT_S)
            if index not in self._running and now >= self._start_at[index]:
                self._running[index] = self._start(), now

    def _start(self) -> subprocess.Popen[bytes]:
        """Start a process with the settings on its stdin, which stays open while this process runs."""
        process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, start_new_session=True)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(self._config) + b"\n")
        process.stdin.flush()
        return process


def _close_stdin(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()


def run_rank_host(config: Config) -> int:
    """Run this host's ranks until SIGTERM or SIGINT; return the exit status."""
    host = RankHost(config)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, host.stop)
    return host.run()
