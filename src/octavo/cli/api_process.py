"""`python -m octavo.cli.api_process`: the api process, a child of `octavo serve`, which owns HTTP and the ledger.

Owns: reading the task (a line of JSON on stdin; stdin closes when the parent ends); the order of starting: the engine
starts first, because that takes longest, and the other slow imports run at the same time.
Does not: open the socket, restart itself (frontend.api_supervisor), or know a route (cli.api_server). The supervisor
imports this module too, so importing it loads no slow module.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.artifacts.resolve import resolve_model
from octavo.cli.server_registry import run_folder
from octavo.config import Config
from octavo.engine.parent import end_with_parent
from octavo.errors import ConfigError, OctavoError
from octavo.fleet.front import FleetFront, num_started
from octavo.fleet.model_configs import ServedModelConfig
from octavo.fleet.served_models import ServedModels
from octavo.fleet.standby import FrontTerm
from octavo.frontend.engine_process import COMMAND as ENGINE_COMMAND
from octavo.frontend.engine_supervisor import EngineSupervisor
from octavo.frontend.journal import Journal, open_journal
from octavo.frontend.open_request import LedgerObserver
from octavo.machine import needing_memory
from octavo.observe.log import print_notice, set_up_log
from octavo.server.http.listener import new_event_loop

if TYPE_CHECKING:
    from octavo.assembly import InProcessEngine

    Engine = EngineSupervisor | InProcessEngine | ServedModels
    StartEngine = Callable[[Config, LedgerObserver | None], Awaitable[Any]]

COMMAND = (sys.executable, "-m", "octavo.cli.api_process")
EXIT_ERROR = 2  # the same status as for every command
EXIT_TERMINATED = 128 + signal.SIGTERM  # SIGTERM arrived before the process served


class ApiTask(msgspec.Struct, frozen=True):
    """The task of one run of the api process. Runs count from 1. The supervisor's pid is 0 if there is none.

    `is_fleet`: the engines are those of the settings in `config.fleet`, which `octavo serve` does not read.
    `models` are the models to load on demand, the default model first, which `config` is of. Without them, one engine
    of `config` always runs.
    """

    config: Config
    admin_socket: str
    run_number: int = 1
    supervisor_pid: int = 0
    is_quiet: bool = False
    is_fleet: bool = False
    models: tuple[ServedModelConfig, ...] = ()

    @property
    def configs(self) -> list[Config]:
        """The Config of each model."""
        return [each.config for each in self.models] or [self.config]

    def line(self) -> bytes:
        """Return the task as the line to write to the api process's stdin."""
        return msgspec.json.encode(self) + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> ApiTask:
        """Parse a line from stdin. Raises ConfigError."""
        try:
            return msgspec.json.decode(line, type=cls)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"the task on stdin cannot be read: {error}") from None


@dataclass(frozen=True, slots=True)
class ApiProcess:
    """This process: its task, the open listening socket, and the pipe that reports its state to the supervisor."""

    task: ApiTask
    listener: socket.socket
    report: Callable[[bytes], object]
    front: FleetFront | None = None  # of `octavo fleet`

    def run(self, start_engine: StartEngine) -> int:
        """Serve in a new event loop; return the exit status. Raises OctavoError."""
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            try:
                return runner.run(self._serve(start_engine))
            except asyncio.CancelledError:
                return EXIT_TERMINATED

    async def _serve(self, start_engine: StartEngine) -> int:
        started_at = time.perf_counter()
        config = self.task.config
        for each in self.task.configs:
            resolve_model(each.model.model, each.model.revision, each.model.offline)  # report a wrong name first
        this_task = asyncio.current_task()
        assert this_task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this_task.cancel)  # until this process serves
        await self._take_term()
        journal = await asyncio.to_thread(open_journal, config, has_several=len(self.task.models) > 1)
        if self.front is not None and journal is not None:
            await self.front.feed_standbys(journal, config)
        starting = asyncio.ensure_future(self._start(start_engine, journal))
        loading = asyncio.ensure_future(asyncio.to_thread(self._load))
        try:
            async with self._unready():
                await asyncio.wait((starting, loading), return_when=asyncio.FIRST_EXCEPTION)
            server, loaded = await loading
            engine = await starting
        except BaseException:
            if self.front is not None:
                await self.front.close()
            await _undo(starting, loading)
            raise
        try:
            status: int = await server.serve(self, engine, journal, loaded, started_at)
        finally:
            if self.front is not None:
                await self.front.close()
            await engine.close()
        return status

    def _unready(self) -> AbstractAsyncContextManager[None]:
        """Return a context in which a fleet of engines that join, which waits for the first one, answers 503."""
        if self.front is None or num_started(self.task.config.fleet) > 0:
            return contextlib.nullcontext()
        lifecycle = importlib.import_module("octavo.server.http.lifecycle")
        answering: AbstractAsyncContextManager[None] = lifecycle.answering_unready(
            self.listener, "no_replica", "no replica has joined yet"
        )
        return answering

    async def _take_term(self) -> None:
        """Set the front's term. A standby first follows another front until that is gone. Raises ConfigError."""
        config = self.task.config
        if self.front is None or config.retry.journal is None:
            return
        own = FrontTerm.read(Path(config.retry.journal))
        took_over = own.is_front and self.task.run_number > 1  # and its api process was started anew
        if config.fleet.standby_of is None or took_over:
            self.front.term = own.term
        else:
            self.front.term = await importlib.import_module("octavo.cli.standby").follow_front(self)

    async def _start(self, start_engine: StartEngine, journal: Journal | None) -> Engine:
        """Start the engine; of models that are loaded on demand, the default one's."""
        if not self.task.models:
            engine: Engine = await start_engine(_engine_config(self.task.config), journal)
            return engine
        configs = [replace(each, config=_engine_config(each.config)) for each in self.task.models]
        models = ServedModels(configs, start_engine, journal)
        try:
            await models.start_default()
        except BaseException:
            await models.close()
            raise
        return models

    def _load(self) -> tuple[Any, Any]:
        """Import slow modules and load tokenizers and templates, in a thread while the engine starts."""
        server = importlib.import_module("octavo.cli.api_server")
        return server, [server.load(config) for config in self.task.configs]


def _engine_config(config: Config) -> Config:
    """Return the settings for the engine, with the tenant weights from the key file."""
    if config.serving.api_key_file is None:
        return config
    from octavo.server.http.keys import with_key_weights  # a slow import

    return with_key_weights(config)


async def _undo(starting: asyncio.Future[Engine], loading: asyncio.Future[Any]) -> None:
    """Cancel both futures; close the engine if it has started."""
    starting.cancel()
    loading.cancel()
    await asyncio.gather(starting, loading, return_exceptions=True)
    if not starting.cancelled() and starting.exception() is None:
        await starting.result().close()


def main(arguments: Sequence[str] | None = None, command: Sequence[str] = ENGINE_COMMAND) -> int:
    """Read the task from stdin and serve with engines that this command starts; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m octavo.cli.api_process", description="the api of octavo serve")
    parser.add_argument("--listener", type=int, required=True, help="descriptor of the listening socket")
    parser.add_argument("--status", type=int, required=True, help="descriptor to which its state is reported")
    args = parser.parse_args(arguments)
    for fd in (args.listener, args.status):
        os.set_inheritable(fd, False)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the API server installs its handler
    os.set_blocking(args.status, False)  # a full pipe to a stopped supervisor must not block
    try:
        task = ApiTask.from_line(sys.stdin.buffer.readline())
        set_up_log(task.config.telemetry.log_format, task.config.telemetry.log_level, "api")
        end_with_parent()
        listener = socket.socket(fileno=args.listener)
        front = FleetFront(command, run_folder()) if task.is_fleet else None
        start_engine = partial(EngineSupervisor.start, command=command) if front is None else front.start
        with needing_memory("octavo serve", 0):
            return ApiProcess(task, listener, lambda report: _write(args.status, report), front).run(start_engine)
    except OctavoError as error:
        print_notice(f"error: {error}")
        return EXIT_ERROR


def _write(fd: int, report: bytes) -> None:
    with contextlib.suppress(OSError):  # the supervisor is ending
        os.write(fd, report)


if __name__ == "__main__":
    sys.exit(main())
