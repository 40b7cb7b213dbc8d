"""The engine in a process of its own, seen from its parent.

Owns: starting it (config as a line of JSON on its stdin, which then stays open: its end tells the child that
the parent is gone), waiting until it is ready, its heartbeat page, ending it. Its stderr passes through.
Does not: judge, restart it, or import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from octavo.config import Config
from octavo.engine.heartbeat import HeartbeatPage
from octavo.engine.process_side import DUMP_SIGNAL
from octavo.engine.scratch import PAGE_NAME, PREFIX, SOCKET_NAME, scratch_root
from octavo.errors import EngineDeadError, OctavoError
from octavo.executors.protocol import Capacity
from octavo.frontend.restarts import describe_status
from octavo.frontend.socket_client import Receive, SocketClient

COMMAND = (sys.executable, "-m", "octavo.assembly")
CONNECT_POLL_S = 0.02
CONNECT_LIMIT_S = 60.0  # to import and listen
OPEN_LIMIT_S = 600.0  # to load a model and run a step of each kind
STOP_TIMEOUT_S = 5.0
KILL_LIMIT_S = 15.0  # for a killed process to be gone
DUMP_S = 0.3  # for the stacks to be written

_LOG = logging.getLogger(__name__)


class EngineProcess:
    """A running engine process: `client` talks to it, `capacity` says what it has, `page` what it does."""

    def __init__(
        self, process: asyncio.subprocess.Process, folder: tempfile.TemporaryDirectory[str], page: HeartbeatPage
    ) -> None:
        self.client: SocketClient
        self.capacity: Capacity
        self.page = page
        self._process = process
        self._folder = folder

    @classmethod
    async def start(
        cls,
        config: Config,
        *,
        epoch: int = 1,
        command: Sequence[str] = COMMAND,
        receive: Receive,
        open_limit_s: float = OPEN_LIMIT_S,
    ) -> EngineProcess:
        """Start an engine and wait until it is ready. Raises what kept it from opening, or EngineDeadError.

        `receive` gets its events.
        """
        folder = tempfile.TemporaryDirectory(prefix=PREFIX, dir=scratch_root())  # mode 0700
        path = Path(folder.name) / SOCKET_NAME
        page = HeartbeatPage(path.with_name(PAGE_NAME), create=True)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                "--socket",
                str(path),
                "--epoch",
                str(epoch),
                stdin=subprocess.PIPE,
                start_new_session=True,  # signals of the terminal are the parent's to handle
            )
        except BaseException:  # out of descriptors or processes
            page.close()
            folder.cleanup()
            raise
        engine = cls(process, folder, page)
        try:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(config) + b"\n")
            async with asyncio.timeout(CONNECT_LIMIT_S):
                await engine._listens(path)
            async with asyncio.timeout(open_limit_s):
                await engine._connect(path, epoch, receive)
        except BaseException as error:
            if not isinstance(error, OctavoError):  # else it has said its last word and ends by itself
                engine.kill()
            await engine.close()
            if isinstance(error, TimeoutError):
                raise EngineDeadError("the engine process did not get ready in time and was killed") from None
            raise
        return engine

    async def _listens(self, path: Path) -> None:
        while not path.exists():
            if self._process.returncode is not None:
                raise EngineDeadError(f"the engine process ended before it was ready: {self.describe_exit()}")
            await asyncio.sleep(CONNECT_POLL_S)

    async def _connect(self, path: Path, epoch: int, receive: Receive) -> None:
        self.client = await SocketClient.connect(path, epoch, receive)
        try:
            self.capacity = await self.client.ready()
        except EngineDeadError:
            await self._process.wait()
            raise EngineDeadError(f"the engine process ended before it was ready: {self.describe_exit()}") from None

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status; negative for a signal; None while it runs."""
        return self._process.returncode

    def describe_exit(self) -> str:
        """How it ended, in words."""
        status = self._process.returncode
        return "it still runs" if status is None else describe_status(status)

    def kill(self) -> None:
        """End it at once (SIGKILL)."""
        self._signal(signal.SIGKILL)

    async def dump(self) -> None:
        """Have it write its threads' stacks to stderr, stopped or hung as it may be."""
        if self._process.returncode is None:
            self._signal(DUMP_SIGNAL)
            self._signal(signal.SIGCONT)
            await asyncio.sleep(DUMP_S)

    def _signal(self, number: int) -> None:
        """Not by subprocess's own method: that one may reap the process, and asyncio then never learns its status."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    async def kill_and_wait(self) -> None:
        """Kill it, and wait until everything that it had sent was read. Its page can still be read. Idempotent."""
        if not await self._killed():
            self.client.abandon()
        await self.client.ended()

    async def _killed(self) -> bool:
        """Kill it and wait for its end; False when it does not come: in the kernel, with a device that is gone."""
        self.kill()
        try:
            async with asyncio.timeout(KILL_LIMIT_S):
                await self._process.wait()
        except TimeoutError:
            _LOG.error("process %d does not end although it was killed; it is left alone", self.pid)
            return False
        return True

    async def reap(self) -> None:
        """Kill it, and let go of what belongs to it. Idempotent."""
        await self.kill_and_wait()
        self.let_go()

    def let_go(self) -> None:
        """Remove its page and folder; it has ended. Idempotent."""
        self._close_stdin()
        self.page.close()
        self._folder.cleanup()

    async def close(self) -> None:
        """Let it answer its requests, and end it; by force after STOP_TIMEOUT_S. Idempotent."""
        client = getattr(self, "client", None)
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                if client is not None:
                    await client.close()
                else:
                    self._close_stdin()  # it may still wait for a client; this ends it at once
                await self._process.wait()
        except TimeoutError:
            await self._killed()
        finally:
            self.let_go()

    def _close_stdin(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
