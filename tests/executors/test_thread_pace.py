"""The number of threads follows the processor time that steps get; clocks and preemptions are scripted."""

from __future__ import annotations

import pytest

from octavo.executors import thread_pace
from octavo.executors.thread_pace import MAX_WAIT_S, ThreadPace


class Clocks:
    """Wall time, processor time and preemptions of a process whose steps get `cores` cores."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
        self.wall = self.cpu = 0.0
        self.preemptions = 0
        self.threads = threads
        monkeypatch.setattr(thread_pace.time, "perf_counter", lambda: self.wall)
        monkeypatch.setattr(thread_pace.time, "monotonic", lambda: self.wall)
        monkeypatch.setattr(thread_pace.time, "process_time", lambda: self.cpu)
        monkeypatch.setattr(thread_pace, "_preemptions", lambda: self.preemptions)
        monkeypatch.setattr(thread_pace.torch, "get_num_threads", lambda: self.threads)
        monkeypatch.setattr(thread_pace.torch, "set_num_threads", self._set)
        self.pace = ThreadPace()

    def _set(self, threads: int) -> None:
        self.threads = threads

    def steps(self, seconds: float, cores: float, preemptions_per_s: float, step_s: float = 0.01) -> list[int]:
        """Run steps; return the number of threads of each."""
        found = []
        for _ in range(round(seconds / step_s)):
            found.append(self.threads)
            self.pace.begin()
            self.wall += step_s
            self.cpu += step_s * min(cores, self.threads)
            self.preemptions += round(step_s * preemptions_per_s)
            self.pace.end()
        return found


def test_undisturbed_threads_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch, 2)
    assert set(clocks.steps(30, 1.9, 0)) == {2}
    assert set(clocks.steps(30, 1.0, 0)) == {2}, "threads that wait for memory or each other were not preempted"
    assert set(clocks.steps(30, 1.6, 300)) == {2}, "two threads still get more than one would"


def test_a_busy_neighbour_costs_one_thread_until_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch, 2)
    busy = clocks.steps(60, 1.05, 300)
    assert busy[0] == 2 and busy[7] == 1, "one window decides"
    assert sum(count == 2 for count in busy) * 0.01 < 1.0, "trials are rare"
    quiet = clocks.steps(MAX_WAIT_S + 1, 1.95, 0)
    assert quiet[-1] == 2
    assert set(clocks.steps(30, 1.95, 0)) == {2}


def test_each_neighbour_costs_one_of_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch, 8)
    assert clocks.steps(1, 6.0, 900)[-1] == 6


def test_one_thread_is_never_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch, 1)
    assert set(clocks.steps(5, 0.3, 900)) == {1}
