"""`octavo serve MODEL --nnodes N --node-rank K` with K above 0: this host only runs ranks of the engine on host 0.

Owns: this host's rank processes, one after another: each serves one epoch of the engine, then ends, and the next waits
for the next epoch. Does not: serve HTTP, connect to host 0, or load a model (the processes do).
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from types import FrameType

import msgspec

from octavo.config import Config
from octavo.observe.log import print_notice

COMMAND = (sys.executable, "-m", "octavo.assembly", "--rank")
LOOK_S = 0.1
SHORT_S = 1.0  # a process that ends sooner than this is replaced after PAUSE_S
PAUSE_S = 2.0


class RankHost:
    """Keeps this host's rank processes running until `stop`."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._num_ranks = config.parallel.num_ranks // config.parallel.nnodes
        self._running: dict[int, tuple[subprocess.Popen[bytes], float]] = {}
        self._start_at = [0.0] * self._num_ranks
        self._is_stopping = threading.Event()

    def run(self) -> int:
        """Run until `stop`; return the exit status."""
        sizes = self._config.parallel
        print_notice(
            f"octavo runs ranks {sizes.node_rank * self._num_ranks} to {(sizes.node_rank + 1) * self._num_ranks - 1} "
            f"of {sizes.num_ranks} for the engine at {sizes.master_addr}:{sizes.master_port}"
        )
        try:
            while not self._is_stopping.wait(LOOK_S):
                self._look(time.monotonic())
        finally:
            for process, _ in self._running.values():
                process.kill()
                process.wait()
                _close_stdin(process)
        return 0

    def stop(self, number: int = 0, frame: FrameType | None = None) -> None:
        """End the processes soon. Also a signal handler."""
        self._is_stopping.set()

    def _look(self, now: float) -> None:
        """Start the processes that are missing."""
        for index in range(self._num_ranks):
            process, started_at = self._running.get(index, (None, 0.0))
            if process is not None and process.poll() is not None:
                _close_stdin(process)
                del self._running[index]
                self._start_at[index] = now + PAUSE_S * (now - started_at < SHORT_S)
            if index not in self._running and now >= self._start_at[index]:
                self._running[index] = self._start(), now

    def _start(self) -> subprocess.Popen[bytes]:
        """Start a process with the settings on its stdin, which stays open while this process runs."""
        process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, start_new_session=True)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(self._config) + b"\n")
        process.stdin.flush()
        return process


def _close_stdin(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()


def run_rank_host(config: Config) -> int:
    """Run this host's ranks until SIGTERM or SIGINT; return the exit status."""
    host = RankHost(config)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, host.stop)
    return host.run()
