"""Starts and ends processes for a measurement, and waits until a server is ready.

Owns: a command in its own session; freezing, thawing and ending the command and its descendants; a server's log, port
and readiness; a busy process. Does not: know which server it starts, send requests. Without /proc, memory is unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from octavo.bench.completion_client import CompletionClient, ProtocolError, Target
from octavo.errors import EngineError

PROC = Path("/proc")
END_TIMEOUT_S = 15.0
POLL_S = 0.05
LAST_LINES = 12


class ProcessTree:
    """A command in its own session, so that its descendants can be found and ended. A log holds its output.

    Raises EngineError if the command cannot be started. With `has_pipes`, its stdin and stdout are pipes.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None, has_pipes: bool = False) -> None:
        self.started = time.perf_counter()
        self._peak_bytes = 0
        self._log = tempfile.TemporaryFile(prefix="octavo-bench-")  # noqa: SIM115 (closed by end)
        pipe = subprocess.PIPE if has_pipes else subprocess.DEVNULL
        try:
            self.process = subprocess.Popen(
                list(command),
                stdin=pipe,
                stdout=pipe if has_pipes else self._log,
                stderr=self._log,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        except OSError as error:
            self._log.close()
            raise EngineError(f"{command[0]} cannot be started: {error.strerror}") from None

    @property
    def returncode(self) -> int | None:
        """Return the command's exit status; None while it runs."""
        return self.process.poll()

    def members(self) -> list[int]:
        """Return the pids of the command's session and of all its descendants, including the running command."""
        root, table = self.process.pid, list(_processes())
        pids = {pid for pid, parent, session in table if root in (pid, session)}
        size = 0
        while len(pids) > size:  # a child may lead its own session
            size = len(pids)
            pids |= {pid for pid, parent, _ in table if parent in pids}
        return sorted(pids)

    def output(self) -> str:
        """Return the command's output so far. Call before end()."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode("utf-8", "replace")

    def last_lines(self) -> str:
        """Return the last lines of the command's output. Call before end()."""
        return "\n".join(self.output().splitlines()[-LAST_LINES:])

    def freeze(self) -> None:
        """Pause all processes of the tree (SIGSTOP), so that an idle peer uses no processor time."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Continue all processes of the tree (SIGCONT)."""
        self._signal(signal.SIGCONT)

    def end(self) -> int:
        """Terminate the command, then kill it and its descendants. Idempotent.

        Returns the sum of the processes' peak resident sizes in bytes, 0 if unknown. Each process counts shared pages.
        """
        members = self.members()
        self._peak_bytes = max(self._peak_bytes, sum(map(_peak_of, members)))
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
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
        self._log.close()
        return self._peak_bytes

    def _signal(self, number: signal.Signals, known: Sequence[int] = ()) -> None:
        """Signal the tree's members, and each pid of `known` that still runs and has lost its parent."""
        pids = self.members() or ([self.process.pid] if self.returncode is None else [])
        orphans = {pid for pid, parent, _ in _processes() if parent == 1} if known else set()
        for pid in sorted({*pids, *(orphans & set(known))}):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


class BusyNeighbour(ProcessTree):
    """A process that keeps one core busy while it is thawed: the highest core that this process may use, on Linux."""

    def __init__(self) -> None:
        super().__init__([sys.executable, "-S", "-c", "while True: pass"])
        self.freeze()
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(self.process.pid, {max(os.sched_getaffinity(0))})


class ServerProcess(ProcessTree):
    """A server on loopback, with `base_url` and `startup_s` (the seconds until the server was ready).

    In `command`, `{port}` is replaced by a free port.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        port = str(free_port())
        super().__init__([word.replace("{port}", port) for word in command], env)
        self.base_url = f"http://127.0.0.1:{port}"
        self.startup_s = 0.0

    @classmethod
    async def start(cls, command: Sequence[str], timeout_s: float = 600.0) -> ServerProcess:
        """Start a server and wait until it is healthy. Raises EngineError."""
        server = cls(command)
        try:
            await server.wait_ready(timeout_s)
        except BaseException:
            server.end()
            raise
        return server

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until /health answers with 200. Raises EngineError."""
        client = CompletionClient(Target(self.base_url, timeout_s=5.0))
        while time.perf_counter() < self.started + timeout_s:
            if self.returncode is not None:
                raise EngineError(
                    f"the server ended with status {self.returncode} before it was ready\n{self.last_lines()}"
                )
            with contextlib.suppress(OSError, ProtocolError, TimeoutError):
                if (await client.get("/health"))[0] == 200:
                    self.startup_s = time.perf_counter() - self.started
                    return
            await asyncio.sleep(POLL_S)
        raise EngineError(f"the server was not ready within {timeout_s:g} s\n{self.last_lines()}")


@contextlib.contextmanager
def ending_with_this() -> Iterator[None]:
    """Make SIGTERM raise as Ctrl-C does, so that this process ends the processes that it started, frozen or not."""
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
    """Yield (pid, parent's pid, session) of every process, from /proc."""
    if not PROC.is_dir():
        return
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            try:
                # The name in brackets may contain brackets; state, parent, group and session follow the last one.
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
