"""Supervisor: a small parent that keeps one child serving on an open socket.

Owns: starting the child (the socket by inheritance, its task as a line on stdin, a pipe on which it tells how it is),
forwarding signals, restarting what died after it was ready, the exit status.
Does not: know what the child does, accept a connection, or load anything heavy.
Invariants: the socket stays open from the first life to the last, so that connections wait instead of being refused;
a child that could not start is not started again; no child outlives `run`. The child's stdin never gets a second line:
its end means that the parent is gone.
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

from octavo.frontend.restarts import RestartBudget

EXIT_ENGINE_FAILED = 4  # the engine could not be kept alive
EXIT_GAVE_UP = 5  # the child died again and again
READY = b"r"  # the child serves
ANSWERED = b"a"  # it gave an answer: its life was of use
ALIVE = b"."  # its event loop turns; told every ALIVE_S
ALIVE_S = 5.0
STALL_S = 60.0  # without a word from a child that tells, until it is killed and replaced
LATE_S = 2 * ALIVE_S  # two looks that are further apart say that this process, or the machine, stood still
STOP_GRACE_S = 15.0  # beyond the drain time, before a child that does not end is killed
HURRY_S = 10.0  # the same, once told twice
_FINAL = frozenset({0, EXIT_ENGINE_FAILED})  # a child that ends so was told to, or has told why
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run. `make_line` gives the task of a life, by its number from 1; `passed` are signals that a child which
    is ready gets as they are, and that end nothing; `name` is for messages; `stderr` is the child's, None: as ours.

    `listener` is a file descriptor; the child gets it and its end of the pipe as --listener and --status.
    """

    command: Sequence[str]
    listener: int
    make_line: Callable[[int], bytes]
    drain_timeout_s: float
    passed: tuple[int, ...] = ()
    name: str = "the api process"
    stderr: int | None = None


@dataclass(slots=True)
class _Life:
    """One life of the child."""

    process: subprocess.Popen[bytes]
    status_fd: int
    begun: float
    is_ready: bool = False
    is_useful: bool = False
    is_open: bool = True  # the pipe
    heard_at: float | None = None  # the last ALIVE
    looked_at: float = 0.0

    def hear(self) -> bool:
        """Read what it tells; whether it became ready by that."""
        told = os.read(self.status_fd, 256)
        self.is_open = bool(told)
        was_ready = self.is_ready
        self.is_ready |= READY in told
        self.is_useful |= ANSWERED in told
        if ALIVE in told:
            self.heard_at = self.looked_at = time.monotonic()
        return self.is_ready and not was_ready

    def is_still(self, now: float) -> bool:
        """Whether a child that tells has been silent for too long, time in which nobody listened not counted."""
        if self.heard_at is None:
            return False
        if now - self.looked_at > LATE_S:
            self.heard_at = now
        self.looked_at = now
        return now > self.heard_at + STALL_S

    def end(self) -> None:
        """Close what belongs to it; by force, should it still run."""
        if self.process.returncode is None:
            self.process.kill()
            self.process.wait()
        os.close(self.status_fd)
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()


class Supervisor:
    """Runs one child, life after life. Use from the main thread, once."""

    def __init__(
        self,
        spec: ChildSpec,
        budget: RestartBudget,
        say: Callable[[str], None],
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._spec = spec
        self._budget = budget
        self._say = say
        self._on_ready = on_ready
        self._stops: list[int] = []  # signals that told us to end, in order
        self._deadline: float | None = None
        self._num_lives = 0

    def run(self) -> int:
        """Keep the child alive until told to end, or until it cannot be; give the exit status."""
        with _wakeups() as wakeups:
            while True:
                life = self._start()
                try:
                    status = self._watch(life, wakeups)
                finally:
                    life.end()
                delay_s = self._delay_s(life, status)
                if delay_s is None:
                    return self._exit_status(life, status)
                self._pause(delay_s, wakeups)
                if self._stops:
                    return 0

    def _start(self) -> _Life:
        self._num_lives += 1
        reading, writing = os.pipe()
        spec = self._spec
        try:
            process = subprocess.Popen(
                [*spec.command, "--listener", str(spec.listener), "--status", str(writing)],
                stdin=subprocess.PIPE,
                stderr=spec.stderr,
                pass_fds=(spec.listener, writing),
                start_new_session=True,  # the terminal's signals come here, and go on from here once each
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once; its status tells
            process.stdin.write(spec.make_line(self._num_lives))
            process.stdin.flush()
        return _Life(process, reading, time.monotonic())

    def _watch(self, life: _Life, wakeups: int) -> int:
        """Wait for the child's end, forwarding signals; give its status."""
        while (status := life.process.poll()) is None:
            for fd in self._wait(life, wakeups):
                if fd == wakeups:
                    self._forward(life, _stops_in(os.read(wakeups, 256)))
                elif life.hear():
                    self._on_ready()
            _reap_strangers(life.process.pid)
            now = time.monotonic()
            if self._deadline is not None and now > self._deadline:
                self._say(f"{self._spec.name} does not end; it is killed")
                life.process.kill()
                self._deadline = None
            elif life.is_still(now):
                self._say(f"{self._spec.name} stands still for {STALL_S:g} s; it is killed")
                life.process.kill()
                life.heard_at = None
        while life.is_open and select.select((life.status_fd,), (), (), 0.0)[0]:
            life.hear()  # its last words
        return status

    def _wait(self, life: _Life, wakeups: int) -> list[int]:
        """Wait for something to read, or until it is time to look at the clock."""
        moments = [self._deadline] if self._deadline is not None else []
        moments += [life.looked_at + ALIVE_S, life.heard_at + STALL_S] if life.heard_at is not None else []
        timeout_s = max(0.0, min(moments) - time.monotonic()) + 0.01 if moments else None
        fds = [wakeups, life.status_fd] if life.is_open else [wakeups]
        return select.select(fds, (), (), timeout_s)[0]

    def _forward(self, life: _Life, stops: Sequence[int]) -> None:
        """The first that is not merely passed on asks for a drain, the second hurries it, the third kills."""
        process = life.process
        for number in stops:
            if number in self._spec.passed:
                if life.is_ready:
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
        """Wait before the next life, unless told to end."""
        end = time.monotonic() + delay_s
        while not self._stops and (left_s := end - time.monotonic()) > 0:
            if select.select((wakeups,), (), (), left_s)[0]:
                heard = _stops_in(os.read(wakeups, 256))
                self._stops += [number for number in heard if number not in self._spec.passed]

    def _delay_s(self, life: _Life, status: int) -> float | None:
        """Seconds until the next life, None when this was the last; say what happened."""
        could_not_start = not life.is_ready and self._num_lives == 1
        if self._stops or status in _FINAL or could_not_start:
            return None
        lived_s = time.monotonic() - life.begun
        ending = f"{self._spec.name} ended ({describe(status)}) after {lived_s:.1f} s"
        delay_s = self._budget.ended(time.monotonic(), random.random(), was_useful=life.is_useful)
        if delay_s is None:
            self._say(f"error: {ending}, as others before it; giving up")
        else:
            self._say(f"{ending}; starting another in {delay_s:.1f} s")
        return delay_s

    def _exit_status(self, life: _Life, status: int) -> int:
        if self._stops and not life.is_ready and self._num_lives == 1:
            return 128 + self._stops[0]  # ended while starting, as a shell has it
        if self._stops or status in _FINAL:
            return 128 - status if status < 0 else status
        if life.is_ready or self._num_lives > 1:
            return EXIT_GAVE_UP
        if status < 0:
            self._say(f"error: {self._spec.name} was {describe(status)} before it was ready")
            return 128 - status
        return status


def describe(status: int) -> str:
    """An exit status in words."""
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def _reap_strangers(own_pid: int) -> None:
    """As the first process of a container, take the status of orphans that were handed to us."""
    if os.getpid() != 1:
        return
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and found.si_pid != own_pid:
            os.waitpid(found.si_pid, os.WNOHANG)


def _stops_in(numbers: bytes) -> list[int]:
    return [number for number in numbers if number in _STOPS]


@contextlib.contextmanager
def _wakeups() -> Iterator[int]:
    """A descriptor that gives the number of every signal that matters here, a child's end among them."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    # One that is ignored stays so: nohup asks for that.
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
