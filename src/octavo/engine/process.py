"""The engine in a process of its own, seen from its parent.

Owns: starting it (config as a line of JSON on its stdin, which then stays open: its end tells the child that
the parent is gone), waiting until it is ready, ending it. Its stderr passes through.
Does not: restart it, or import torch.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from octavo.config import Config
from octavo.engine.socket_client import SocketClient
from octavo.errors import EngineDeadError
from octavo.executors.protocol import Capacity

COMMAND = (sys.executable, "-m", "octavo.assembly")
CONNECT_POLL_S = 0.02
STOP_TIMEOUT_S = 5.0


class EngineProcess:
    """A running engine process: `client` talks to it, `capacity` says what it has."""

    def __init__(self, process: asyncio.subprocess.Process, folder: tempfile.TemporaryDirectory[str]) -> None:
        self.client: SocketClient
        self.capacity: Capacity
        self._process = process
        self._folder = folder

    @classmethod
    async def start(cls, config: Config, *, epoch: int = 1, command: Sequence[str] = COMMAND) -> EngineProcess:
        """Start an engine and wait until it is ready. Raises what kept it from opening, or EngineDeadError."""
        folder = tempfile.TemporaryDirectory(prefix="octavo-")  # mode 0700
        path = Path(folder.name) / "engine.sock"
        process = await asyncio.create_subprocess_exec(
            *command,
            "--socket",
            str(path),
            "--epoch",
            str(epoch),
            stdin=subprocess.PIPE,
            start_new_session=True,  # signals of the terminal are the parent's to handle
        )
        engine = cls(process, folder)
        try:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(config) + b"\n")
            await engine._connect(path, epoch)
        except BaseException:
            await engine.close()
            raise
        return engine

    async def _connect(self, path: Path, epoch: int) -> None:
        while not path.exists():
            if self._process.returncode is not None:
                raise EngineDeadError(f"the engine process ended before it was ready: {self.describe_exit()}")
            await asyncio.sleep(CONNECT_POLL_S)
        self.client = await SocketClient.connect(path, epoch)
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
        if status is None:
            return "it still runs"
        return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"

    def kill(self) -> None:
        """End it at once (SIGKILL)."""
        if self._process.returncode is None:
            self._process.kill()

    async def close(self) -> None:
        """Let it answer everyone, and end it; by force after STOP_TIMEOUT_S. Idempotent."""
        client = getattr(self, "client", None)
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                if client is not None:
                    await client.close()
                else:
                    self._close_stdin()  # it may still wait for a client; this ends it at once
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()
        finally:
            self._close_stdin()
            self._folder.cleanup()

    def _close_stdin(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
