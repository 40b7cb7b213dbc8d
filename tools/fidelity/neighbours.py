"""What other processes take of the machine while a command runs, and how fast the machine is.

Owns: sampling /proc (Linux), timing fixed work, the samples' file, means in a span of time. Does not: judge what they
explain.
Of each second: busy is all time that is neither idle nor waiting for a disk, own the time of this process and of its
descendants. Neighbours are busy less own; steal is what the machine's host took from it. A process that starts and ends
within a second counts as a neighbour. Other machines of the same host also slow this one where they share its memory
and its clock, which /proc does not show: so the CPU times of reading 32 MiB and of a short loop are taken a few times a
second, some 15 ms in all.
"""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from octavo.simulator.closeness import Column

PERIOD_S = 1.0
NUM_TIMED = 5  # in a period
READ_BYTES = 32 << 20  # more than most caches that a core has for itself
LOOP_TURNS = 20_000
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_COLUMNS = ("times", "processes", "steal", "own", "read_s", "loop_s")
_IDLE, _WAITING, _STEAL = 3, 4, 7  # places in /proc/stat's first line


@dataclass(frozen=True, slots=True)
class Neighbours:
    """For each sampled period: its end in Unix seconds, and cores: of other processes, of the host, and of the run.

    `read_s` and `loop_s` are the median CPU seconds of reading READ_BYTES and of LOOP_TURNS turns of a loop.
    """

    times: Column
    processes: Column
    steal: Column
    own: Column
    read_s: Column
    loop_s: Column

    def save(self, path: Path) -> None:
        """Write the samples as JSON."""
        columns = {name: np.round(getattr(self, name), 6).tolist() for name in _COLUMNS}
        path.write_text(json.dumps(columns), encoding="utf-8")

    @staticmethod
    def load(path: Path) -> Neighbours:
        """Read what save wrote."""
        values = json.loads(path.read_text(encoding="utf-8"))
        return Neighbours(*(np.array(values[name], float) for name in _COLUMNS))

    @property
    def causes(self) -> npt.NDArray[np.float64]:
        """Return what may slow a step, [periods, 3]: cores taken, and the logarithms of read_s and loop_s."""
        return np.column_stack([self.processes + self.steal, np.log(self.read_s), np.log(self.loop_s)])

    def between(self, begin: float, end: float) -> slice:
        """Return the periods between two times."""
        first, last = np.minimum(np.searchsorted(self.times, [begin, end]), len(self.times) - 1).tolist()
        return slice(first, last + 1)


class NeighbourSampler(threading.Thread):
    """Samples while this process waits for a command that it started. Call `finish` once."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._ended = threading.Event()
        self._samples: list[tuple[float, ...]] = []
        self._memory = bytearray(READ_BYTES)
        self._last_own: dict[int, int] = {}

    def run(self) -> None:
        """Take a sample each period."""
        busy, steal, at = *_machine_ticks(), time.time()
        self._own_ticks()
        timed: list[tuple[float, float]] = []
        while not self._ended.wait(PERIOD_S / NUM_TIMED):
            timed.append(self._timed())
            if len(timed) < NUM_TIMED:
                continue
            new_busy, new_steal, now = *_machine_ticks(), time.time()
            per_core = _TICKS * (now - at)
            own = self._own_ticks()
            others = max(0.0, (new_busy - busy - own) / per_core)
            speeds = np.median(timed, axis=0).tolist()
            self._samples.append((now, others, (new_steal - steal) / per_core, own / per_core, *speeds))
            busy, steal, at, timed = new_busy, new_steal, now, []

    def finish(self) -> Neighbours:
        """Stop, and return the samples."""
        self._ended.set()
        self.join()
        columns = zip(*self._samples, strict=True) if self._samples else [()] * len(_COLUMNS)
        return Neighbours(*(np.array(column, float) for column in columns))

    def _timed(self) -> tuple[float, float]:
        """Return this thread's CPU seconds of reading READ_BYTES, and of LOOP_TURNS turns of a loop."""
        begin = time.thread_time()
        self._memory.find(b"x")
        middle = time.thread_time()
        for _ in range(LOOP_TURNS):
            pass
        return middle - begin, time.thread_time() - middle

    def _own_ticks(self) -> int:
        """Return the ticks of this process and its descendants since the last call."""
        ticks, parents = _process_ticks()
        own = {os.getpid()}
        for process in ticks:
            line, at = [], process
            while at and at not in own:
                line.append(at)
                at = parents.get(at, 0)
            own |= {*line} if at else set()
        used = {process: ticks[process] for process in own if process in ticks}
        added = sum(count - self._last_own.get(process, 0) for process, count in used.items())
        self._last_own = used
        return added


def _machine_ticks() -> tuple[int, int]:
    """Return the machine's busy ticks and its stolen ticks since it started."""
    counts = list(map(int, Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]))
    return sum(counts) - counts[_IDLE] - counts[_WAITING] - counts[_STEAL], counts[_STEAL]


def _process_ticks() -> tuple[dict[int, int], dict[int, int]]:
    """Return the ticks and the parent of each process."""
    ticks, parents = {}, {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                fields = (
                    Path(entry.path, "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
                )
            except OSError:
                continue  # it has ended
            parents[int(entry.name)] = int(fields[1])
            ticks[int(entry.name)] = int(fields[11]) + int(fields[12])
    return ticks, parents
