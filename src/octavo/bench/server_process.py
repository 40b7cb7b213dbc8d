"""A server started for a measurement, on loopback: its readiness, its output, and its end.

Owns: the log, waiting for health, finding the address. Does not: know which server, or send requests.
"""

from __future__ import annotations

import asyncio
import re
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence

from octavo.bench.completion_client import CompletionClient, Target
from octavo.bench.event_parser import ProtocolError
from octavo.bench.process_tree import ProcessTree
from octavo.errors import EngineError

POLL_S = 0.05
LAST_LINES = 12
_PORT = "{port}"


class ServerProcess:
    """A running server: `base_url`, and `startup_s`, the seconds until it was ready."""

    def __init__(self, tree: ProcessTree, log: tempfile._TemporaryFileWrapper[bytes], base_url: str) -> None:
        self.tree = tree
        self.base_url = base_url
        self.startup_s = 0.0
        self._log = log

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        health: str = "/health",
        env: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
    ) -> ServerProcess:
        """Start a command, in which `{port}` becomes a free port, and wait until it is healthy. Raises EngineError."""
        port = free_port()
        words = [word.replace(_PORT, str(port)) for word in command]
        log = tempfile.NamedTemporaryFile(prefix="octavo-bench-", suffix=".log")  # noqa: SIM115 (ended with the server)
        try:
            tree = ProcessTree(words, log, env)
        except OSError as error:
            log.close()
            raise EngineError(f"{words[0]} cannot be started: {error.strerror}") from None
        server = cls(tree, log, f"http://127.0.0.1:{port}")
        try:
            await server._wait(health, timeout_s)
        except BaseException:
            server.end()
            raise
        return server

    def said(self, pattern: str) -> re.Match[str] | None:
        """Return the first match of a pattern in its output."""
        return re.search(pattern, self._text(), re.MULTILINE)

    def end(self) -> int:
        """End the server; return the peak of its memory in bytes (0: unknown). Idempotent."""
        peak = self.tree.peak_bytes()
        self.tree.end()
        self._log.close()
        return peak

    async def _wait(self, health: str, timeout_s: float) -> None:
        client = CompletionClient(Target(self.base_url, timeout_s=5.0))
        end = time.perf_counter() + timeout_s
        while time.perf_counter() < end:
            if self.tree.returncode is not None:
                raise EngineError(
                    f"the server ended with status {self.tree.returncode} before it was ready\n{self._tail()}"
                )
            try:
                if (await client.get(health))[0] == 200:
                    self.startup_s = time.perf_counter() - self.tree.begun
                    return
            except (OSError, ProtocolError, TimeoutError):
                pass
            await asyncio.sleep(POLL_S)
        raise EngineError(f"the server was not ready within {timeout_s:g} s\n{self._tail()}")

    def _text(self) -> str:
        with open(self._log.name, encoding="utf-8", errors="replace") as log:
            return log.read()

    def _tail(self) -> str:
        return "\n".join(self._text().splitlines()[-LAST_LINES:])


def free_port() -> int:
    """Return a port of loopback that is free now; another process may take it before the caller does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
