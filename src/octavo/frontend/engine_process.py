"""The parent's side of an engine process.

Owns: starting it (it inherits a connection and its heartbeat page, and reads its config as a line of JSON from its
stdin, which then stays open: its end means that the parent has ended), waiting until it is ready, ending it. It
inherits stderr. Does not: judge, restart it, or import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from octavo.config import Config
from octavo.engine.heartbeat import HeartbeatPage, page_file
from octavo.engine.parent import DUMP_SIGNAL
from octavo.errors import EngineDeadError, OctavoError
from octavo.executors.protocol import Capacity
from octavo.frontend.restarts import describe_status
from octavo.frontend.socket_client import Receive, SocketClient

COMMAND = (sys.executable, "-m", "octavo.assembly")
BEGIN_LIMIT_S = 60.0  # to import
OPEN_LIMIT_S = 600.0  # to load a model and run a step of each kind
STOP_TIMEOUT_S = 5.0
KILL_LIMIT_S = 15.0  # for a killed process to end
DUMP_S = 0.3  # for the stacks to be written

_LOG = logging.getLogger(__name__)


class EngineProcess:
    """A running engine process: its `client`, its `capacity`, and the `page` of its heartbeat."""

    def __init__(self, process: asyncio.subprocess.Process, page: HeartbeatPage, client: SocketClient) -> None:
        self.capacity: Capacity
        self.page = page
        self.client = client
        self._process = process

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
        """Start an engine and wait until it is ready. Raises the error of its opening, or EngineDeadError.

        `receive` is called with its events.
        """
        ours, theirs = socket.socketpair()
        client = await SocketClient.over(ours, epoch, receive)
        with theirs, page_file() as page_descriptor:
            page = HeartbeatPage(page_descriptor)
            inherited = {"--socket": theirs.fileno(), "--page": page_descriptor}
            process = await asyncio.create_subprocess_exec(
                *command,
                *(str(word) for pair in inherited.items() for word in pair),
                "--epoch",
                str(epoch),
                stdin=subprocess.PIPE,
                pass_fds=tuple(inherited.values()),
                start_new_session=True,  # signals of the terminal are the parent's to handle
            )
        engine = cls(process, page, client)
        try:
            await engine._open(config, open_limit_s)
        except BaseException as error:
            if not isinstance(error, OctavoError):  # else it has sent the reason, and ends by itself
                engine.kill()
            await engine.close()
            if isinstance(error, TimeoutError):
                raise EngineDeadError("the engine process did not get ready in time and was killed") from None
            raise
        return engine

    async def _open(self, config: Config, limit_s: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(config) + b"\n")
        async with asyncio.timeout(BEGIN_LIMIT_S):
            await self.client.has_begun.wait()
        try:
            async with asyncio.timeout(limit_s):
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
        """Return how the process ended, in words."""
        status = self._process.returncode
        return "it still runs" if status is None else describe_status(status)

    def kill(self) -> None:
        """Kill the process (SIGKILL)."""
        self._signal(signal.SIGKILL)

    async def dump(self) -> None:
        """Make the process write its threads' stacks to stderr, even if it is stopped or hangs."""
        if self._process.returncode is None:
            self._signal(DUMP_SIGNAL)
            self._signal(signal.SIGCONT)
            await asyncio.sleep(DUMP_S)

    def _signal(self, number: int) -> None:
        """Send a signal, not by subprocess's method, which may reap the process, so that asyncio misses its status."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    async def kill_and_wait(self) -> None:
        """Kill the process, and wait until all its messages were read. Its page can still be read. Idempotent."""
        if not await self._killed():
            self.client.abandon()
        await self.client.ended()

    async def _killed(self) -> bool:
        """Kill the process and wait for its end; return False if it hangs in the kernel, on a device."""
        self.kill()
        try:
            async with asyncio.timeout(KILL_LIMIT_S):
                await self._process.wait()
        except TimeoutError:
            _LOG.error("process %d does not end although it was killed; it is left alone", self.pid)
            return False
        return True

    async def kill_and_close(self) -> None:
        """Kill the process, and close its page and stdin. Idempotent."""
        await self.kill_and_wait()
        self.close_files()

    def close_files(self) -> None:
        """Close the page and stdin of a process that has ended. Idempotent."""
        self.page.close()
        if self._process.stdin is not None:
            self._process.stdin.close()

    async def close(self) -> None:
        """Let the engine end its requests and itself; kill it after STOP_TIMEOUT_S. Idempotent."""
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self.client.close()
                await self._process.wait()
        except TimeoutError:
            await self._killed()
        finally:
            self.close_files()
