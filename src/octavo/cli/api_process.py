"""`python -m octavo.cli.api_process`: the process that owns HTTP and the ledger, child of `octavo serve`.

Owns: reading its task (a line on stdin, which closes when the parent ends), the order of starting: the engine first,
as it takes longest; the other heavy imports load meanwhile.
Does not: open the socket, restart itself (frontend.api_supervisor), or know a route (cli.api_server).
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
from dataclasses import dataclass
from typing import Any

from octavo.artifacts.resolve import resolve_model
from octavo.cli.api_task import ApiTask
from octavo.cli.engines import Engine, KeptEngine
from octavo.config import Config
from octavo.engine.parent import end_with_parent
from octavo.errors import OctavoError
from octavo.frontend.journal import open_journal
from octavo.frontend.open_requests import LedgerObserver
from octavo.machine import needing_memory
from octavo.observe.log import print_notice, set_up_log
from octavo.server.http.server import new_event_loop

EXIT_ERROR = 2  # as every command's
EXIT_TOLD = 128 + signal.SIGTERM  # SIGTERM came before it served

StartEngine = Callable[[Config, LedgerObserver | None], Awaitable[Engine]]


@dataclass(frozen=True, slots=True)
class Place:
    """The open listening socket, and how to write to the supervisor's status pipe (see frontend.api_supervisor)."""

    listener: socket.socket
    tell: Callable[[bytes], object]


def main(arguments: Sequence[str] | None = None, start_engine: StartEngine = KeptEngine.start) -> int:
    """Serve the task read from stdin; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m octavo.cli.api_process", description="the api of octavo serve")
    parser.add_argument("--listener", type=int, required=True, help="descriptor of the listening socket")
    parser.add_argument("--status", type=int, required=True, help="descriptor on which to tell how it is")
    args = parser.parse_args(arguments)
    for fd in (args.listener, args.status):
        os.set_inheritable(fd, False)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the API server installs its handler
    os.set_blocking(args.status, False)  # a supervisor that is stopped must not stop us
    try:
        task = ApiTask.of_line(sys.stdin.buffer.readline())
        set_up_log(task.config.telemetry.log_format, task.config.telemetry.log_level, "api")
        end_with_parent()
        listener = socket.socket(fileno=args.listener)
        with needing_memory("octavo serve", 0):
            return run(task, Place(listener, lambda word: _tell(args.status, word)), start_engine)
    except OctavoError as error:
        print_notice(f"error: {error}")
        return EXIT_ERROR


def run(task: ApiTask, place: Place, start_engine: StartEngine) -> int:
    """Serve in a new event loop; return the exit status. Raises OctavoError."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        try:
            return runner.run(_serve(task, place, start_engine))
        except asyncio.CancelledError:
            return EXIT_TOLD


async def _serve(task: ApiTask, place: Place, start_engine: StartEngine) -> int:
    begun = time.perf_counter()
    model = task.config.model
    resolve_model(model.model, model.revision, model.offline)  # report a wrong name before anything starts
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)  # until it serves
    journal = await asyncio.to_thread(open_journal, task.config)
    starting = asyncio.ensure_future(start_engine(_engine_config(task.config), journal))
    loading = asyncio.ensure_future(asyncio.to_thread(_load, task))
    try:
        await asyncio.wait((starting, loading), return_when=asyncio.FIRST_EXCEPTION)
        server, loaded = await loading
        engine = await starting
    except BaseException:
        await _undo(starting, loading)
        raise
    try:
        code: int = await server.serve(task, place, (engine, journal), loaded, begun)
    finally:
        await engine.close()
    return code


def _engine_config(config: Config) -> Config:
    """Return the engine's settings: the tenant weights of the key file are added."""
    if config.serving.api_key_file is None:
        return config
    from octavo.server.http.keys import with_key_weights  # reading the file takes a heavy library

    return with_key_weights(config)


def _load(task: ApiTask) -> tuple[Any, Any]:
    """Import the heavy modules and load the model's text side, in a thread while the engine starts."""
    server = importlib.import_module("octavo.cli.api_server")
    return server, server.load(task)


async def _undo(starting: asyncio.Future[Engine], loading: asyncio.Future[Any]) -> None:
    """Cancel what was begun; close the engine if it has started."""
    starting.cancel()
    loading.cancel()
    await asyncio.gather(starting, loading, return_exceptions=True)
    if not starting.cancelled() and starting.exception() is None:
        await starting.result().close()


def _tell(fd: int, word: bytes) -> None:
    with contextlib.suppress(OSError):  # the supervisor is ending
        os.write(fd, word)


if __name__ == "__main__":
    sys.exit(main())
