"""Processes started for a measurement: their descendants, memory and end; and servers, until they are ready.

Owns: a command in a session of its own, freezing and thawing it, ending all of it; a server's log, port and readiness.
Does not: know which server, or send requests. Without /proc, memory is unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from octavo.bench.completion_client import CompletionClient, ProtocolError, Target
from octavo.errors import EngineError

PROC = Path("/proc")
END_TIMEOUT_S = 15.0
POLL_S = 0.05
LAST_LINES = 12


class ProcessTree:
    """A command in its own session, so that its descendants can be found and ended."""

    def __init__(
        self, command: Sequence[str], log: IO[bytes], env: Mapping[str, str] | None = None, has_pipes: bool = False
    ) -> None:
        self.started = time.perf_counter()
        pipe = subprocess.PIPE if has_pipes else subprocess.DEVNULL
        self.process = subprocess.Popen(
            list(command),
            stdin=pipe,
            stdout=pipe if has_pipes else log,
            stderr=log,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )

    @property
    def returncode(self) -> int | None:
        """Return its exit status; None while it runs."""
        return self.process.poll()

    def members(self) -> list[int]:
        """Return the pids of its session and of all descendants, its own included while it runs."""
        root, table = self.process.pid, list(_processes())
        pids = {pid for pid, parent, session in table if root in (pid, session)}
        size = 0
        while len(pids) > size:  # a child may lead a session of its own
            size = len(pids)
            pids |= {pid for pid, parent, _ in table if parent in pids}
        return sorted(pids)

    def peak_bytes(self) -> int:
        """Return the sum of its processes' peak resident sizes; 0 if unknown. Shared pages count twice."""
        return sum(_peak_of(pid) for pid in self.members())

    def freeze(self) -> None:
        """Stop all its processes, so that an idle peer uses no processor time."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Continue its processes."""
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        """Terminate the command, then kill it and its descendants. Idempotent."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        members = self.members()
        if self.returncode is None:
            self.thaw()
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_TIMEOUT_S)
        self._signal(signal.SIGKILL, members)
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def _signal(self, number: signal.Signals, known: Sequence[int] = ()) -> None:
        """Signal its members, and of the known pids those that still run and have lost their parent."""
        pids = self.members() or ([self.process.pid] if self.returncode is None else [])
        orphans = {pid for pid, parent, _ in _processes() if parent == 1} if known else set()
        for pid in sorted({*pids, *(orphans & set(known))}):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


class ServerProcess:
    """A running server on loopback: `base_url`, and `startup_s`, the seconds until it was ready."""

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
        words = [word.replace("{port}", str(port)) for word in command]
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

    def search_log(self, pattern: str) -> re.Match[str] | None:
        """Return the first match of a pattern in its output."""
        return re.search(pattern, self._log_text(), re.MULTILINE)

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
                    f"the server ended with status {self.tree.returncode} before it was ready\n{self._last_lines()}"
                )
            try:
                if (await client.get(health))[0] == 200:
                    self.startup_s = time.perf_counter() - self.tree.started
                    return
            except (OSError, ProtocolError, TimeoutError):
                pass
            await asyncio.sleep(POLL_S)
        raise EngineError(f"the server was not ready within {timeout_s:g} s\n{self._last_lines()}")

    def _log_text(self) -> str:
        with open(self._log.name, encoding="utf-8", errors="replace") as log:
            return log.read()

    def _last_lines(self) -> str:
        return "\n".join(self._log_text().splitlines()[-LAST_LINES:])


@contextlib.contextmanager
def ending_with_this() -> Iterator[None]:
    """Let SIGTERM unwind this process as Ctrl-C does, so that the processes it started are ended, frozen or not."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def free_port() -> int:
    """Return a port of loopback that is free now; another process may take it before the caller does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _processes() -> Iterator[tuple[int, int, int]]:
    """Yield every process with its parent and its session, from /proc."""
    if not PROC.is_dir():
        return
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            try:
                # The name in brackets may hold anything; state, parent, group and session follow the last bracket.
                words = (entry / "stat").read_text().rpartition(")")[2].split()
                yield int(entry.name), int(words[1]), int(words[3])
            except (OSError, IndexError, ValueError):
                continue


def _peak_of(pid: int) -> int:
    try:
        lines = (PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
