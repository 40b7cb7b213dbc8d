"""`octavo serve MODEL --join HOST:PORT` or `--offer HOST:PORT`: an engine for a front on another machine.

Owns: this process, its record among the servers of this user, its admin socket (status, drain), its signals.
Does not: serve HTTP (the front does), or know the connection (fleet.agent does).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

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
