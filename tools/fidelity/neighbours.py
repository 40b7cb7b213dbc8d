"""What other processes take of the machine while a command runs.

Owns: sampling /proc (Linux), the samples' file, cores taken in a span of time. Does not: judge what they explain.
Of each second: busy is all time that is neither idle nor waiting for a disk, own the time of this process and of its
descendants. Neighbours are busy less own; steal is what the machine's host took from it. A process that starts and ends
within a second counts as a neighbour.
"""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from octavo.simulator.closeness import Column

PERIOD_S = 1.0
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_COLUMNS = ("times", "processes", "steal", "own")
_IDLE, _WAITING, _STEAL = 3, 4, 7  # places in /proc/stat's first line


@dataclass(frozen=True, slots=True)
class Neighbours:
    """For each sampled period: its end in Unix seconds, and cores: of other processes, of the host, and of the run."""

    times: Column
    processes: Column
    steal: Column
    own: Column

    def save(self, path: Path) -> None:
        """Write the samples as JSON."""
        columns = {name: np.round(getattr(self, name), 4).tolist() for name in _COLUMNS}
        path.write_text(json.dumps(columns), encoding="utf-8")

    @staticmethod
    def load(path: Path) -> Neighbours:
        """Read what save wrote."""
        values = json.loads(path.read_text(encoding="utf-8"))
        return Neighbours(*(np.array(values[name], float) for name in _COLUMNS))

    def mean(self, begin: float, end: float) -> tuple[float, float]:
        """Return the mean cores of processes and of the host between two times."""
        first, last = np.minimum(np.searchsorted(self.times, [begin, end]), len(self.times) - 1)
        return float(self.processes[first : last + 1].mean()), float(self.steal[first : last + 1].mean())


class NeighbourSampler(threading.Thread):
    """Samples while this process waits for a command that it started. Call `finish` once."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._ended = threading.Event()
        self._samples: list[tuple[float, float, float, float]] = []
        self._last_own: dict[int, int] = {}

    def run(self) -> None:
        """Take a sample each period."""
        busy, steal, at = *_machine_ticks(), time.time()
        self._own_ticks()
        while not self._ended.wait(PERIOD_S):
            new_busy, new_steal, now = *_machine_ticks(), time.time()
            per_core = _TICKS * (now - at)
            own = self._own_ticks()
            others = max(0.0, (new_busy - busy - own) / per_core)
            self._samples.append((now, others, (new_steal - steal) / per_core, own / per_core))
            busy, steal, at = new_busy, new_steal, now

    def finish(self) -> Neighbours:
        """Stop, and return the samples."""
        self._ended.set()
        self.join()
        columns = zip(*self._samples, strict=True) if self._samples else [()] * 4
        return Neighbours(*(np.array(column, float) for column in columns))

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
