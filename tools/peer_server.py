"""Starts, observes and ends a server under test for tools/peer_drills.py.

Owns: the server's processes and its log. Does not: send requests that are judged.
Invariant: what was started is ended by its process id, descendants included.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from octavo.bench.completion_client import CompletionClient, ProtocolError

POLL_S = 0.1
# In use, not caused by a request that still runs: what is left of these after a drill has leaked.
GAUGES = re.compile(
    r"^((?:octavo_(?:sequences_running|requests_waiting|kv_blocks_used)"
    r"|llamacpp:requests_(?:processing|deferred)|vllm:(?:num_requests_(?:running|waiting)|kv_cache_usage_perc))"
    r")(?:\{[^}]*\})? (\S+)$",
    re.MULTILINE,
)


class PeerServer:
    """A server. `computes` is a part of the computing process's command line; empty: the started process computes."""

    def __init__(self, command: Sequence[str], client: CompletionClient, computes: str, log: Path) -> None:
        self._command, self._client, self._computes, self._log = list(command), client, computes, log
        self._seen: dict[int, str] = {}  # when each of its processes began
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def is_alive(self) -> bool:
        """True if the started process still runs."""
        return self.process is not None and self.process.poll() is None

    async def start(self, within_s: float) -> float:
        """Start the server; return the seconds until it answers a completion. Raises RuntimeError if it does not."""
        begun = time.perf_counter()
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, start_new_session=True)
        if await self.answers_within(within_s) is None:
            raise RuntimeError(f"no answer in {time.perf_counter() - begun:.0f} s; see {self._log}")
        return time.perf_counter() - begun

    async def answers_within(self, seconds: float) -> float | None:
        """Return the seconds until a completion of one token succeeds; None if none succeeds in time."""
        begun = time.perf_counter()
        while time.perf_counter() - begun < seconds and self.is_alive:
            answer = await self._client.send(self._client.body("Hello", 1))
            if not answer.has_failed:
                return time.perf_counter() - begun
            await asyncio.sleep(POLL_S)
        return None

    def processes(self) -> dict[int, str]:
        """Command lines of the process started and of its descendants, by id."""
        parents, lines, begun = dict[int, int](), dict[int, str](), dict[int, str]()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError, IndexError, ValueError):
                    pid, words = int(entry.name), (entry / "stat").read_text().rpartition(")")[2].split()
                    parents[pid], begun[pid] = int(words[1]), words[19]
                    lines[pid] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        found = {self.process.pid} if self.process else set()
        while more := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= more
        self._seen |= {pid: begun[pid] for pid in found if pid in begun}
        return {pid: lines[pid] for pid in found if pid in lines}

    def computing_pid(self) -> int:
        """Return the pid of the process that computes."""
        assert self.process is not None
        if not self._computes:
            return self.process.pid
        return next(pid for pid, line in self.processes().items() if self._computes in line)

    def num_fds(self) -> int:
        """Open descriptors of all its processes."""
        count = 0
        for pid in self.processes():
            with suppress(OSError):
                count += len(os.listdir(f"/proc/{pid}/fd"))
        return count

    async def gauges(self) -> dict[str, float]:
        """Return the server's gauges of resources in use."""
        try:
            _, text = await self._client.get("/metrics")
        except (OSError, ProtocolError, TimeoutError):
            return {}
        found = {name: float(value) for name, value in GAUGES.findall(text.decode("utf-8", "replace"))}
        own = {name: value for name, value in found.items() if name.startswith("octavo")}
        return own or found

    async def wait(self, seconds: float) -> float | None:
        """Return the seconds until the started process has ended; None if it does not end in time."""
        begun = time.perf_counter()
        while self.is_alive:
            if time.perf_counter() - begun > seconds:
                return None
            await asyncio.sleep(POLL_S / 2)
        return time.perf_counter() - begun

    async def end(self) -> None:
        """Send SIGTERM, and after a timeout SIGKILL to the processes that still run."""
        if self.process is None:
            return
        self.processes()
        if self.is_alive:
            self.process.terminate()
            await self.wait(10)
        for pid, begun in self._seen.items():
            with suppress(OSError, IndexError):
                words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                if words[19] == begun:  # else another process has the pid
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.process = None
        self._seen.clear()
