"""A process started for a measurement, and its descendants: their memory, and their end.

Owns: the session's processes (as /proc lists them), peaks, freezing and thawing, ending all of them.
Does not: start anything but a session leader. Without /proc, memory is unknown.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

PROC = Path("/proc")
END_TIMEOUT_S = 15.0


class ProcessTree:
    """A command in its own session, so that its descendants can be found and ended."""

    def __init__(
        self, command: Sequence[str], log: IO[bytes], env: Mapping[str, str] | None = None, is_talking: bool = False
    ) -> None:
        self.begun = time.perf_counter()
        pipe = subprocess.PIPE if is_talking else subprocess.DEVNULL
        self.process = subprocess.Popen(
            list(command),
            stdin=pipe,
            stdout=pipe if is_talking else log,
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
        found = {pid for pid, parent, session in table if root in (pid, session)}
        size = 0
        while len(found) > size:  # a child may lead a session of its own
            size = len(found)
            found |= {pid for pid, parent, _ in table if parent in found}
        return sorted(found)

    def peak_bytes(self) -> int:
        """Return the sum of its processes' greatest resident sizes; 0 if unknown. Shared pages count twice."""
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
        found = self.members() or ([self.process.pid] if self.returncode is None else [])
        orphans = {pid for pid, parent, _ in _processes() if parent == 1} if known else set()
        for pid in sorted({*found, *(orphans & set(known))}):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


@contextlib.contextmanager
def ending_with_this() -> Iterator[None]:
    """Let SIGTERM unwind this process as Ctrl-C does, so that the processes it started are ended, frozen or not."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
