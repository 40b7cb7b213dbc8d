"""AgentRunner: the actor of one replica on its Ray node. It runs one agent and ends it, nothing else.

Owns: the agent's process, its restarts within a budget, and its last lines. Does not: import ray (ray_process makes the
actor of this class), watch the engine (the agent does), or see a request.
Invariants: the agent ends with the actor's process, even if that is killed. The fleet's token is in the agent's
environment only, on no command line and in none of Ray's descriptions of actors.
`python -m octavo.fleet.providers.ray_agent PARENT WORDS...` becomes `octavo WORDS...`, which ends with its parent.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress

import msgspec

from octavo.restarts import RestartBudget, describe_status

TOKEN_VARIABLE = "OCTAVO_FLEET_TOKEN"
NUM_LINES = 8  # of stderr that are kept for the message of a failure
MAX_LINE = 400
USEFUL_S = 60.0  # an agent that ran for so long does not count against the budget
STOP_S = 10.0  # what an agent may take to end after SIGTERM
_PR_SET_PDEATHSIG = 1


class ReplicaSpec(msgspec.Struct, frozen=True):
    """What a replica runs, and what it needs. With several ranks, the resources are those of one rank.

    `num_gpus` None: one if the cluster has any.
    """

    words: tuple[str, ...]  # after `octavo`: serve MODEL --join FRONT:PORT ...
    token: str = ""
    num_cpus: float = 1.0
    num_gpus: float | None = 0.0
    num_ranks: int = 1


class Placement(msgspec.Struct, frozen=True):
    """Where a replica runs. `agent` is its agent's name at the front; another one after a restart."""

    host: str
    agent: str


class AgentState(msgspec.Struct, frozen=True):
    """What an AgentRunner reports. `failure` is why no agent runs and none will be started, or empty."""

    name: str  # as the agent calls itself at its front; empty before the first start
    num_restarts: int
    failure: str


class AgentRunner:
    """Runs the agent of a spec (JSON of a ReplicaSpec) until stop()."""

    def __init__(self, spec: bytes) -> None:
        self._encoded = spec
        self._spec = msgspec.json.decode(spec, type=ReplicaSpec)
        self._process: subprocess.Popen[bytes] | None = None
        self._num_restarts = 0
        self._failure = ""
        self._is_stopping = threading.Event()
        self._lock = threading.Lock()  # around starting: stop() must see every process
        # The kernel ends the agent when the thread that started it ends: this thread ends with the process.
        self._thread = threading.Thread(target=self._run, name="octavo-agent", daemon=True)
        self._thread.start()

    def spec(self) -> bytes:
        """Return the spec as it was given."""
        return self._encoded

    def state(self) -> bytes:
        """Return the AgentState as JSON."""
        name = "" if self._process is None else f"{socket.gethostname()}:{self._process.pid}"
        return msgspec.json.encode(AgentState(name, self._num_restarts, self._failure))

    def stop(self) -> None:
        """End the agent: SIGTERM, then SIGKILL after STOP_S. Idempotent."""
        with self._lock:
            self._is_stopping.set()
        if self._process is not None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
            self._process.kill()
        self._thread.join()

    def _run(self) -> None:
        budget = RestartBudget()
        while True:
            with self._lock:
                if self._is_stopping.is_set():
                    return
                process = self._process = self._start()
            began_at = time.monotonic()
            lines = self._copy_stderr(process)
            status = process.wait()
            if self._is_stopping.is_set():
                return
            end = "; ".join(lines) or "it wrote no message"
            now = time.monotonic()
            wait_s = budget.ended(now, random.random(), was_useful=now - began_at > USEFUL_S)
            if wait_s is None:
                self._failure = f"the agent ended {budget.num_useless(now)} times ({describe_status(status)}): {end}"
                return
            self._is_stopping.wait(wait_s)
            self._num_restarts += 1

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, TOKEN_VARIABLE: self._spec.token} if self._spec.token else None
        command = [sys.executable, "-m", __name__, str(os.getpid()), *self._spec.words]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)

    def _copy_stderr(self, process: subprocess.Popen[bytes]) -> deque[str]:
        """Copy the agent's stderr to Ray's log until it ends; return its last lines."""
        lines: deque[str] = deque(maxlen=NUM_LINES)
        assert process.stderr is not None
        with process.stderr as stream:
            while line := stream.readline(1 << 16):
                lines.append(line.decode("utf-8", "replace").strip()[:MAX_LINE])
                with suppress(OSError):
                    os.write(2, line)
        return lines


def main(words: list[str]) -> None:
    """Become `octavo WORDS...`, which the kernel ends when the process PARENT ends."""
    parent, *rest = words
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # it ended before the line above
        sys.exit(0)
    os.execv(sys.executable, [sys.executable, "-m", "octavo", *rest])


if __name__ == "__main__":
    main(sys.argv[1:])
