"""`octavo serve [MODEL]`: the engine in a process of its own, and the HTTP server in this one.

Owns: the order of starting and ending, the words at start-up, the pulse while busy.
Does not: import torch here (unless --in-process), or know a route.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from typing import Protocol

from octavo.assembly import find_files, load_text, open_engine
from octavo.cli.flags import add_settings, config_from
from octavo.cli.startup import call_report, startup_report
from octavo.cli.terminal import loading, say, warn_limits
from octavo.config import Config
from octavo.engine.client import EngineClient
from octavo.engine.local_client import LocalClient
from octavo.engine.loop import EngineLoop
from octavo.engine.process import EngineProcess
from octavo.engine.pulse import PULSE_S, Pulse
from octavo.engine.sessions import Sessions
from octavo.errors import EngineDeadError
from octavo.executors.protocol import Capacity
from octavo.server.app import create_app
from octavo.server.event_loop import new_event_loop
from octavo.server.lifecycle import Lifecycle, Phase
from octavo.server.listener import open_socket, url_of
from octavo.server.run import HttpServer

WATCH_S = 0.5  # how long a dead engine goes unnoticed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="what to serve [smollm2]")
    parser.add_argument("--quiet", "-q", action="store_true", help="nothing at start-up and while busy")
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal ends it; 0 after a clean drain."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_serve(config_from(args, model=args.model), args.quiet))


async def _serve(config: Config, is_quiet: bool) -> int:
    begun = time.perf_counter()
    listener = open_socket(config.serving)
    with contextlib.closing(listener):
        files = find_files(config)
        text = asyncio.create_task(asyncio.to_thread(load_text, config, files))
        try:
            with loading(files.name, is_quiet):
                engine = await _start(config)
        except BaseException:
            text.cancel()
            raise
        try:
            warn_limits(config, engine.capacity)
            sessions = Sessions(engine.client, await text, config.execution.seed, capacity=engine.capacity)
            lifecycle = Lifecycle()
            app = create_app(sessions, sessions.text, config, engine.client.statistics, lifecycle=lifecycle)
            server = HttpServer(app, listener, lifecycle, config.serving.drain_timeout_s)
            if not is_quiet:
                say(*startup_report(config, files, engine.capacity, time.perf_counter() - begun))
                say(*call_report(config, app.state.context.model, url_of(listener)))
            await _run_until_dead(server, engine, lifecycle, is_quiet)
        finally:
            await engine.close()
    return 0


async def _start(config: Config) -> Engine:
    if not config.serving.in_process:
        return await EngineProcess.start(config)
    return _InProcess(*await asyncio.to_thread(open_engine, config))


async def _run_until_dead(server: HttpServer, engine: Engine, lifecycle: Lifecycle, is_quiet: bool) -> None:
    """Serve until told to end. Raises EngineDeadError when the engine ends first."""
    serving = asyncio.create_task(server.run())
    pulse = asyncio.create_task(_beat(engine.client)) if not is_quiet else None
    try:
        while not serving.done():
            await asyncio.wait((serving,), timeout=WATCH_S)
            if engine.returncode is not None and not serving.done():
                lifecycle.phase = Phase.FAILED
                server.stop()
                await serving
                raise EngineDeadError(f"the engine ended ({engine.describe_exit()}); see the lines above")
        await serving
    finally:
        if pulse is not None:
            pulse.cancel()
            await asyncio.gather(pulse, return_exceptions=True)


async def _beat(client: EngineClient) -> None:
    """Say how busy the engine is, every few seconds while it is."""
    pulse = Pulse()
    while True:
        try:
            line = pulse.line(await client.statistics(), time.monotonic())
        except EngineDeadError:
            return
        if line is not None:
            say(line)
        await asyncio.sleep(PULSE_S)


class Engine(Protocol):
    """A running engine, wherever it is."""

    capacity: Capacity

    @property
    def client(self) -> EngineClient:
        """Talks to it."""
        ...

    @property
    def returncode(self) -> int | None:
        """Not None once it has ended."""
        ...

    def describe_exit(self) -> str:
        """How it ended, in words."""
        ...

    async def close(self) -> None:
        """Answer everyone, then end it."""
        ...


class _InProcess:
    """An engine loop of this process, seen as EngineProcess is."""

    def __init__(self, loop: EngineLoop, capacity: Capacity) -> None:
        self._loop = loop
        self.client = LocalClient(loop)
        self.capacity = capacity

    @property
    def returncode(self) -> int | None:
        return None if self._loop.is_alive else 1

    def describe_exit(self) -> str:
        return self._loop.failure or "it was stopped"

    async def close(self) -> None:
        await self.client.close()
