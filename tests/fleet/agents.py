"""Agents in processes of their own, with fake engines."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

CHILD = Path(__file__).with_name("agent_child.py")


class AgentProcess:
    """An agent that joins fronts; `prefix` is the command that starts it, such as ip netns exec."""

    def __init__(
        self, token: bytes, fronts: Sequence[object], behaviour: str = "slow", prefix: Sequence[str] = ()
    ) -> None:
        words = [*prefix, sys.executable, str(CHILD), token.decode(), behaviour, *map(str, fronts)]
        self.lines: list[str] = []
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip())

    @property
    def pid(self) -> int:
        """The agent's process id."""
        return self._process.pid

    @property
    def engine_pid(self) -> int:
        """The engine's process id, as of the last line that has one; waits for the first."""
        end = time.monotonic() + 60
        while True:
            found = [match[1] for line in self.lines if (match := re.search(r"\(process (\d+)\)", line))]
            if found or time.monotonic() > end:
                return int(found[-1])
            time.sleep(0.01)

    def signal(self, number: int) -> None:
        """Signal the agent."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End the agent, and its engine with it (it ends with its parent), even if it is stopped."""
        self._process.kill()
        self._process.wait(30)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._reading.join(30)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def stop(self) -> int:
        """End the agent with SIGTERM; return its status."""
        self.signal(signal.SIGTERM)
        status = self._process.wait(30)
        self.kill()
        return status


@contextmanager
def agents(count: int, token: bytes, front: object, behaviour: str = "slow") -> Iterator[list[AgentProcess]]:
    """Run agents that join a front."""
    found = [AgentProcess(token, [front], behaviour) for _ in range(count)]
    try:
        yield found
    finally:
        for each in found:
            each.kill()
