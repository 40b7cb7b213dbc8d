"""The rank processes of one epoch as seen by rank 0: starting, watching and ending them.

Owns: the processes on this host, the connections to all ranks, the heartbeat, and why the epoch was lost.
Does not: run plans (executor does), or start processes on other hosts (they wait there and connect to rank 0).
Invariants: a rank that ends, or is silent for SILENT_S, loses the epoch: every process of the group is killed, and
`lost` is called once, in the watching thread. Time in which this process itself did not look does not count.
The watching thread starts the processes, so that on Linux the kernel ends them with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from octavo.errors import EngineDeadError, EngineError
from octavo.executors.ranks import frames
from octavo.executors.ranks.frames import Channel, Kind

COMMAND = (sys.executable, "-m", "octavo.assembly", "--rank")
SILENT_S = 2.0
OPEN_SILENT_S = 60.0  # while a rank imports and loads, which may hold the interpreter's lock for long
PING_S = 0.25
LATE_S = 0.75  # two looks further apart than this: this process, or the machine, was stopped
REASON_S = 0.75  # time for the watching thread to notice the end of a rank whose connection broke
CLOSE_S = 5.0
EXIT_S = 1.0  # time for the engine to end by itself; a collective over a broken network may never return
EXIT_FAILED = 1  # as engine.process_side's
_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class RankPeer:
    """One rank other than 0: its connections, its process if it is on this host, and what is known of it."""

    rank: int
    host: str
    pid: int
    plans: Channel
    pings: Channel
    process: subprocess.Popen[bytes] | None = None
    device: str = ""
    is_open: bool = False
    heard_at: float = 0.0
    step: int = -1
    step_s: float = 0.0

    @property
    def name(self) -> str:
        """Return the rank's name for messages."""
        return f"rank {self.rank} (process {self.pid} on {self.host})"


class RankGroup:
    """The other ranks of one epoch, by rank. `lost` is called with the reason when the epoch is lost."""

    def __init__(self, num_local: int, command: Sequence[str] = COMMAND, *, may_exit: bool = False) -> None:
        self.peers: list[RankPeer] = []
        self.lost: Callable[[str], object] = _LOG.error
        self.failure: str | None = None
        self._command = tuple(command)
        self._num_local = num_local  # ranks to start on this host beside rank 0
        self._may_exit = may_exit  # this process is the engine's own
        self._lock = threading.Lock()
        self._started = threading.Event()
        self._start_error: OSError | None = None
        self._is_closing = threading.Event()
        self._has_lost = threading.Event()
        self._watcher = threading.Thread(target=self._run, name="octavo-ranks", daemon=True)

    def start(self, others: Iterable[RankPeer] = ()) -> None:
        """Start this host's processes, and watch them and the ranks of other hosts. Raises OSError."""
        self._watcher.start()
        self._started.wait()
        if self._start_error is not None:
            raise self._start_error
        self.peers += others

    def check(self) -> None:
        """Raise EngineDeadError if the epoch is lost."""
        if self.failure is not None:
            raise EngineDeadError(self.failure)

    def lose(self, why: str) -> EngineDeadError:
        """Record why the epoch is lost, kill its processes, and end its connections; return the first reason's error.

        From any thread.
        """
        with self._lock:
            is_first = self.failure is None
            if self.failure is None:
                self.failure = why
        if is_first:
            self._has_lost.set()
            self._kill()
        return EngineDeadError(self.failure)

    def lose_after(self, why: str) -> EngineDeadError:
        """Do the same as `lose`, but first wait for the watching thread, which may know a better reason."""
        self._has_lost.wait(REASON_S)
        return self.lose(why)

    def close(self) -> None:
        """End all rank processes and wait for those of this host. Idempotent."""
        self._is_closing.set()
        for peer in self.peers:
            peer.plans.shutdown()
            peer.pings.shutdown()
        deadline = time.monotonic() + CLOSE_S
        for peer in self.peers:
            if peer.process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    peer.process.wait(max(0.0, deadline - time.monotonic()))
        self._kill()
        for peer in self.peers:
            if peer.process is not None:
                peer.process.wait()
                assert peer.process.stdin is not None
                peer.process.stdin.close()
            peer.plans.close()
        if self._watcher.is_alive() and self._watcher is not threading.current_thread():
            self._watcher.join()

    def _kill(self) -> None:
        """Kill this host's processes, and end all connections, at which the processes of other hosts end."""
        for peer in self.peers:
            if peer.process is not None and peer.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(peer.pid, signal.SIGKILL)
            peer.plans.shutdown()

    # --- the watching thread

    def _run(self) -> None:
        try:
            for index in range(self._num_local):
                self.peers.append(self._spawn(index + 1))
        except OSError as error:
            self._start_error = error
            return
        finally:
            self._started.set()
        why = self._watch()
        if not self._is_closing.is_set():
            reason = str(self.lose(why))
            _LOG.error("the epoch ends: %s", reason)
            self.lost(reason)
            if not self._is_closing.wait(EXIT_S) and self._may_exit:
                os._exit(EXIT_FAILED)
        for peer in self.peers:
            peer.pings.close()

    def _spawn(self, rank: int) -> RankPeer:
        pairs = [socket.socketpair() for _ in range(2)]
        (plans, their_plans), (pings, their_pings) = pairs
        descriptors = their_plans.fileno(), their_pings.fileno()
        with their_plans, their_pings:
            process = subprocess.Popen(
                (*self._command, *map(str, descriptors)), stdin=subprocess.PIPE, pass_fds=descriptors
            )
        channels = Channel(plans), Channel(pings)
        return RankPeer(rank, "localhost", process.pid, *channels, process=process, heard_at=time.monotonic())

    def _watch(self) -> str:
        """Send and read pings until a rank is lost or the group is closed; return why it is lost."""
        looked_at, number = time.monotonic(), 0
        while not self._is_closing.wait(PING_S):
            now = time.monotonic()
            if now - looked_at > LATE_S:
                for peer in self.peers:
                    peer.heard_at += now - looked_at
            looked_at, number = now, number + 1
            if self.failure is not None:
                return self.failure
            for peer in self.peers:
                if (why := self._look(peer, now, number)) is not None:
                    return why
        return ""

    def _look(self, peer: RankPeer, now: float, number: int) -> str | None:
        """Read a rank's answers and send the next ping; return why the rank is lost, or None."""
        try:
            while _is_readable(peer.pings):
                _, step, step_s = frames.PONG.unpack(peer.pings.expect(Kind.PONG))
                peer.heard_at, peer.step, peer.step_s = now, step, step_s
            peer.pings.send(Kind.PING, number.to_bytes(8, "little"))
        except (EOFError, OSError, EngineError) as error:
            return f"{peer.name} ended: {self._describe_end(peer, error)}"
        limit = SILENT_S if peer.is_open else OPEN_SILENT_S
        if now - peer.heard_at > limit:
            return f"{peer.name} does not answer: no sign of life for {now - peer.heard_at:.1f} s"
        return None

    def _describe_end(self, peer: RankPeer, error: Exception) -> str:
        if peer.process is None:
            return f"its connection broke ({error})"
        with contextlib.suppress(subprocess.TimeoutExpired):
            peer.process.wait(1.0)
        status = peer.process.returncode
        if status is None:
            return "its connection ended"
        return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def _is_readable(channel: Channel) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        return bool(selector.select(0))
