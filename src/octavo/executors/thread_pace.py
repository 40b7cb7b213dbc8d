"""The number of threads that compute a step on a CPU: fewer while other programs take the cores.

Owns: measuring how much processor time steps get, and choosing the number for the following steps.
Does not: change any result. The kernels give a row the same bits with any number of threads.
The threads of a step wait for each other, so one that has lost its core for a time slice holds up the others. Beside
a program that keeps one of two cores busy, two threads get less done than one alone on the other core.
"""

from __future__ import annotations

import time

import torch

try:
    import resource
except ImportError:  # Windows has none: the number never changes there
    HAS_USAGE = False
else:
    HAS_USAGE = True

WINDOW_S = 0.06  # of steps, between decisions: several time slices of the operating system
MIN_STEPS = 3
SLICE_S = 0.02  # threads that lose their cores less often than this are not disturbed
MARGIN = 0.2  # cores that n threads must get beyond n - 1
MIN_WAIT_S, MAX_WAIT_S = 1.0, 16.0  # until one thread more is tried; doubled after each trial that fails


class ThreadPace:
    """Chooses the number of threads, up to torch's at its creation. Call both methods in the executor's thread."""

    def __init__(self) -> None:
        self._most = torch.get_num_threads()
        self._wait_s, self._retry_at = MIN_WAIT_S, 0.0
        self._is_trial = False
        self._restart()

    def begin(self) -> None:
        """Record that a step begins."""
        self._began = time.perf_counter(), time.process_time()

    def end(self) -> None:
        """Record that the step ended; perhaps choose another number, for torch too."""
        if self._most == 1 or not HAS_USAGE:
            return
        wall, cpu = self._began
        self._wall_s += time.perf_counter() - wall
        self._cpu_s += time.process_time() - cpu
        self._num_steps += 1
        if self._wall_s >= WINDOW_S and self._num_steps >= MIN_STEPS:
            self._choose()
            self._restart()

    def _choose(self) -> None:
        now, count = time.monotonic(), torch.get_num_threads()  # a draft model's executor may have changed it
        is_preempted = (_preemptions() - self._preemptions) * SLICE_S > self._wall_s
        if count > 1 and is_preempted and self._cpu_s / self._wall_s < count - 1 + MARGIN:
            self._wait_s = min(2 * self._wait_s, MAX_WAIT_S) if self._is_trial else MIN_WAIT_S
            self._retry_at = now + self._wait_s
            torch.set_num_threads(count - 1)
        elif count < self._most and now >= self._retry_at:
            torch.set_num_threads(count + 1)
            self._is_trial = True
            return
        self._is_trial = False

    def _restart(self) -> None:
        self._wall_s = self._cpu_s = 0.0
        self._num_steps = 0
        self._preemptions = _preemptions()


def _preemptions() -> int:
    """Return how often threads of this process have lost their cores to others."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw if HAS_USAGE else 0
