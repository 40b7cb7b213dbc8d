"""ApiSupervisor: a small parent process that keeps one child serving on an open socket.

Owns: starting the child (it inherits the socket, reads its task from stdin, and reports its state through a pipe);
forwarding signals; restarting a child that died after it was ready; the exit status.
Does not: know what the child does, accept a connection, or load anything heavy.
Invariants: the socket stays open from the first child to the last, so that connections wait instead of being refused.
If the first child could not start, no other is started. No child outlives `run`. The parent writes one line to the
child's stdin and keeps stdin open, so that its end shows the child that the parent has ended.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from octavo.restarts import RestartBudget, describe_status

EXIT_ENGINE_FAILED = 4  # the engine could not be kept alive
EXIT_GAVE_UP = 5  # the child died too often
READY = b"r"  # the child serves
ANSWERED = b"a"  # the child sent an answer, and so was useful
ALIVE = b"."  # the child's event loop runs; sent every ALIVE_S
ALIVE_S = 5.0
STALL_S = 60.0  # a child that has sent ALIVE is killed and replaced after this long without another
LATE_S = 2 * ALIVE_S  # checks further apart than this mean that this process, or the machine, was stopped
STOP_GRACE_S = 15.0  # time after the drain time, before a child that does not end is killed
HURRY_S = 10.0  # time after a second signal, before a child that does not end is killed
_FINAL = frozenset({0, EXIT_ENGINE_FAILED})  # statuses after which no child is started
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """The child to run. `make_line(n)` returns the task of the nth child, from 1.

    `listener` is the socket's file descriptor; the child gets it as --listener, and its end of the pipe as --status.
    Signals in `passed` are forwarded to a ready child and do not end it. `name` appears in messages. `stderr` is the
    child's; None means inherited.
    """

    command: Sequence[str]
    listener: int
    make_line: Callable[[int], bytes]
    drain_timeout_s: float
    passed: tuple[int, ...] = ()
    name: str = "the api process"
    stderr: int | None = None


@dataclass(slots=True)
class _Child:
    """One child process and its reports."""

    process: subprocess.Popen[bytes]
    status_fd: int
    started_at: float
    is_ready: bool = False
    is_useful: bool = False
    is_open: bool = True  # the pipe
    alive_at: float | None = None  # the last ALIVE
    checked_at: float = 0.0

    def read_status(self) -> bool:
        """Read the child's report; return True if it became ready."""
        report = os.read(self.status_fd, 256)
        self.is_open = bool(report)
        was_ready = self.is_ready
        self.is_ready |= READY in report
        self.is_useful |= ANSWERED in report
        if ALIVE in report:
            self.alive_at = self.checked_at = time.monotonic()
        return self.is_ready and not was_ready

    def check_stalled(self, now: float) -> bool:
        """Return True if no ALIVE arrived for STALL_S; time in which this process did not run is not counted."""
        if self.alive_at is None:
            return False
        if now - self.checked_at > LATE_S:
            self.alive_at = now
        self.checked_at = now
        return now > self.alive_at + STALL_S

    def close(self) -> None:
        """Kill the child if it still runs, and close its pipes."""
        if self.process.returncode is None:
            self.process.kill()
            self.process.wait()
        os.close(self.status_fd)
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()


class ApiSupervisor:
    """Runs one child at a time, and starts another after each death. Use it once, from the main thread."""

    def __init__(
        self,
        spec: ChildSpec,
        budget: RestartBudget,
        report: Callable[[str], None],
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._spec = spec
        self._budget = budget
        self._report = report
        self._on_ready = on_ready
        self._stops: list[int] = []  # signals to stop that arrived, in order
        self._deadline: float | None = None
        self._num_started = 0

    def run(self) -> int:
        """Keep a child running until a signal to stop, or until none can be started; return the exit status."""
        with _wakeups() as wakeups:
            while True:
                child = self._start()
                try:
                    status = self._watch(child, wakeups)
                finally:
                    child.close()
                delay_s = self._delay_s(child, status)
                if delay_s is None:
                    return self._exit_status(child, status)
                self._pause(delay_s, wakeups)
                if self._stops:
                    return 0

    def _start(self) -> _Child:
        self._num_started += 1
        reading, writing = os.pipe()
        spec = self._spec
        try:
            process = subprocess.Popen(
                [*spec.command, "--listener", str(spec.listener), "--status", str(writing)],
                stdin=subprocess.PIPE,
                stderr=spec.stderr,
                pass_fds=(spec.listener, writing),
                start_new_session=True,  # so that the terminal signals only this process, which forwards once
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once; its exit status has the reason
            process.stdin.write(spec.make_line(self._num_started))
            process.stdin.flush()
        return _Child(process, reading, time.monotonic())

    def _watch(self, child: _Child, wakeups: int) -> int:
        """Wait for the child's end, forwarding signals; return its exit status."""
        while (status := child.process.poll()) is None:
            for fd in self._wait(child, wakeups):
                if fd == wakeups:
                    self._forward(child, _stops_in(os.read(wakeups, 256)))
                elif child.read_status():
                    self._on_ready()
            _reap_orphans(child.process.pid)
            now = time.monotonic()
            if self._deadline is not None and now > self._deadline:
                self._report(f"{self._spec.name} does not end; it is killed")
                child.process.kill()
                self._deadline = None
            elif child.check_stalled(now):
                self._report(f"{self._spec.name} did not respond for {STALL_S:g} s; it is killed")
                child.process.kill()
                child.alive_at = None
        while child.is_open and select.select((child.status_fd,), (), (), 0.0)[0]:
            child.read_status()  # reports written before it ended
        return status

    def _wait(self, child: _Child, wakeups: int) -> list[int]:
        """Wait for input; return the readable descriptors, or none once the next deadline or check is due."""
        moments = [self._deadline] if self._deadline is not None else []
        moments += [child.checked_at + ALIVE_S, child.alive_at + STALL_S] if child.alive_at is not None else []
        timeout_s = max(0.0, min(moments) - time.monotonic()) + 0.01 if moments else None
        fds = [wakeups, child.status_fd] if child.is_open else [wakeups]
        return select.select(fds, (), (), timeout_s)[0]

    def _forward(self, child: _Child, stops: Sequence[int]) -> None:
        """Forward signals: the first one to stop begins a drain, the second shortens it, the third kills."""
        process = child.process
        for number in stops:
            if number in self._spec.passed:
                if child.is_ready:
                    process.send_signal(number)
                continue
            self._stops.append(number)
            now, count = time.monotonic(), len(self._stops)
            if count > 2:
                process.kill()
                continue
            process.terminate()
            allowed_s = HURRY_S if count == 2 else self._spec.drain_timeout_s + STOP_GRACE_S
            self._deadline = min(now + allowed_s, self._deadline or now + allowed_s)

    def _pause(self, delay_s: float, wakeups: int) -> None:
        """Wait before the next child; a signal to stop ends the wait."""
        end = time.monotonic() + delay_s
        while not self._stops and (left_s := end - time.monotonic()) > 0:
            if select.select((wakeups,), (), (), left_s)[0]:
                received = _stops_in(os.read(wakeups, 256))
                self._stops += [number for number in received if number not in self._spec.passed]

    def _delay_s(self, child: _Child, status: int) -> float | None:
        """Return the seconds until the next child starts, or None if none does; report why this child ended."""
        could_not_start = not child.is_ready and self._num_started == 1
        if self._stops or status in _FINAL or could_not_start:
            return None
        ran_s = time.monotonic() - child.started_at
        ending = f"{self._spec.name} ended ({describe_status(status)}) after {ran_s:.1f} s"
        delay_s = self._budget.ended(time.monotonic(), random.random(), was_useful=child.is_useful)
        if delay_s is None:
            self._report(f"error: {ending}, as others before it; giving up")
        else:
            self._report(f"{ending}; starting another in {delay_s:.1f} s")
        return delay_s

    def _exit_status(self, child: _Child, status: int) -> int:
        if self._stops and not child.is_ready and self._num_started == 1:
            return 128 + self._stops[0]  # ended while starting; the status is a shell's
        if self._stops or status in _FINAL:
            return 128 - status if status < 0 else status
        if child.is_ready or self._num_started > 1:
            return EXIT_GAVE_UP
        if status < 0:
            self._report(f"error: {self._spec.name} was {describe_status(status)} before it was ready")
            return 128 - status
        return status


def _reap_orphans(own_pid: int) -> None:
    """Reap orphans that the kernel made children of this process, if it is the first process of a container."""
    if os.getpid() != 1:
        return
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and found.si_pid != own_pid:
            os.waitpid(found.si_pid, os.WNOHANG)


def _stops_in(numbers: bytes) -> list[int]:
    return [number for number in numbers if number in _STOPS]


@contextlib.contextmanager
def _wakeups() -> Iterator[int]:
    """Yield a descriptor from which the numbers of arriving stop signals and SIGCHLD are read."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    # An ignored signal stays ignored: nohup relies on it.
    numbers = [number for number in _STOPS if signal.getsignal(number) is not signal.SIG_IGN]
    numbers.append(signal.SIGCHLD)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    wakeup_before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield reading
    finally:
        signal.set_wakeup_fd(wakeup_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reading)
        os.close(writing)
