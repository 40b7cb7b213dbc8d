"""The supervisor over a child that behaves as told: lives, signals, statuses, orphans."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from octavo.cli.serve import NOTIFY_SOCKET, notify_systemd
from octavo.frontend import api_supervisor
from octavo.frontend.api_supervisor import EXIT_ENGINE_FAILED, EXIT_GAVE_UP, ApiSupervisor, ChildSpec, _Child
from octavo.restarts import RestartBudget

HERE = Path(__file__).resolve()
CHILD = (sys.executable, str(HERE.with_name("fake_child.py")))
WAIT_S = 60.0


def run(says: list[str], most: int = 2, grace_s: float = 0.5, passed: int = 0) -> int:
    """What the supervisor process of these tests does."""
    api_supervisor.STOP_GRACE_S = grace_s
    api_supervisor.STALL_S = 0.5
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)

        def make_line(life: int) -> bytes:
            return json.dumps({"says": says, "life": life}).encode() + b"\n"

        spec = ChildSpec(CHILD, listener.fileno(), make_line, 0.2, (passed,) if passed else ())
        budget = RestartBudget(most, 60.0, first_s=0.02)
        return ApiSupervisor(spec, budget, lambda line: print(line, file=sys.stderr, flush=True)).run()


@dataclass
class Parent:
    """A supervisor in a process of its own."""

    process: subprocess.Popen[str]
    port: int

    def ask(self) -> tuple[int, int]:
        """The life and pid of whoever answers a connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S) as connection:
            life, pid = connection.recv(100).split()
            return int(life), int(pid)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> tuple[int, str]:
        errors = self.process.communicate(timeout=WAIT_S)[1]
        return self.process.returncode, errors


@contextmanager
def parent(*says: str, **options: float) -> Iterator[Parent]:
    options = {name: int(value) if name == "passed" else value for name, value in options.items()}
    script = (
        f"import sys; from tests.frontend.test_api_supervisor import run; sys.exit(run({list(says)!r}, **{options!r}))"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (HERE.parents[2], HERE.parents[2] / "src")))}
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
    )
    try:
        assert process.stdout is not None
        yield Parent(process, int(process.stdout.readline()))
    finally:
        process.kill()
        process.communicate(timeout=WAIT_S)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone_within(pid: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while is_alive(pid):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_child_and_the_status_is_0(number: int) -> None:
    with parent("serve") as server:
        life, pid = server.ask()
        assert life == 1
        server.signal(number)
        assert server.wait() == (0, "")
        assert not is_alive(pid)


def test_a_child_that_dies_is_replaced_and_the_port_stays_open() -> None:
    with parent("serve") as server:
        for expected in (1, 2):
            life, pid = server.ask()
            assert life == expected
            os.kill(pid, signal.SIGKILL)
            assert gone_within(pid, WAIT_S)  # else it may still take the next connection, and with it to its grave
        assert server.ask()[0] == 3, "a connection made between two lives waits for the next"
        server.signal(signal.SIGTERM)
        code, errors = server.wait()
    assert code == 0
    assert errors.count("the api process ended (killed by SIGKILL)") == 2


def test_useless_lives_are_bounded() -> None:
    with parent("crash") as server:
        code, errors = server.wait()
    assert code == EXIT_GAVE_UP
    assert errors.count("starting another") == 2 and "giving up" in errors


def test_useful_lives_are_not() -> None:
    with parent("useful") as server:
        assert [server.ask()[0] for _ in range(5)] == [1, 2, 3, 4, 5]


def test_a_child_that_cannot_start_is_not_started_again() -> None:
    with parent("exit 2") as server:
        assert server.wait() == (2, "")
    with parent("serve", "exit 7", "exit 7", "serve", most=5) as server:  # but one behind it is, within the budget
        pid = server.ask()[1]
        os.kill(pid, signal.SIGKILL)
        assert gone_within(pid, WAIT_S)
        assert server.ask()[0] == 4


def test_a_failed_engine_is_final() -> None:
    with parent("fail") as server:
        assert server.wait() == (EXIT_ENGINE_FAILED, "")


def test_a_third_signal_kills() -> None:
    with parent("hang", grace_s=60.0) as server:
        pid = server.ask()[1]
        for _ in range(3):
            server.signal(signal.SIGTERM)
            time.sleep(0.1)
        assert server.wait()[0] == 128 + signal.SIGKILL
        assert not is_alive(pid)


def test_a_child_that_does_not_end_is_killed() -> None:
    with parent("hang") as server:
        server.ask()
        server.signal(signal.SIGTERM)
        code, errors = server.wait()
    assert code == 128 + signal.SIGKILL
    assert errors == "the api process does not end; it is killed\n"


def test_a_child_that_stands_still_is_replaced() -> None:
    with parent("still", "serve") as server:
        assert server.ask()[0] == 1
        time.sleep(1.0)
        assert server.ask()[0] == 2
        server.signal(signal.SIGTERM)
        code, errors = server.wait()
    assert code == 0 and "did not respond for 0.5 s; it is killed" in errors


def test_a_signal_that_is_passed_on_ends_nothing() -> None:
    with parent("serve", passed=signal.SIGHUP) as server:
        life, pid = server.ask()
        server.signal(signal.SIGHUP)  # the child takes it for a reason to say so
        time.sleep(0.3)
        assert server.ask() == (life, pid)
        server.signal(signal.SIGTERM)
        code, errors = server.wait()
    assert (code, errors) == (0, "the child got SIGHUP\n")


def test_time_in_which_the_supervisor_was_stopped_is_not_counted() -> None:
    child = _Child(subprocess.Popen([sys.executable, "-c", ""]), os.open(os.devnull, os.O_RDONLY), 0.0)
    child.process.wait(WAIT_S)
    assert not child.check_stalled(1e6), "it never sent ALIVE"
    child.alive_at = child.checked_at = 100.0
    looks = [100.0 + 5 * i for i in range(1, 12)]  # up to 155
    assert not any(child.check_stalled(now) for now in looks)
    assert not child.check_stalled(1000.0), "it was not checked meanwhile"
    assert [child.check_stalled(1000.0 + 6 * i) for i in range(1, 12)].index(True) == 10
    child.close()


def test_whoever_asks_is_told_when_it_is_ready(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        monkeypatch.setenv(NOTIFY_SOCKET, str(tmp_path / "notify"))
        notify_systemd("READY=1")
        assert manager.recv(100) == b"READY=1"
    notify_systemd("READY=1")  # gone: nothing happens
    told = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        spec = ChildSpec(CHILD, listener.fileno(), lambda life: b'{"says": ["fail"], "life": 1}\n', 1.0)
        assert (
            ApiSupervisor(spec, RestartBudget(), told.append, lambda: told.append("ready")).run() == EXIT_ENGINE_FAILED
        )
    assert told == ["ready"]


@pytest.mark.parametrize("is_stopped", [False, True])
def test_no_child_outlives_a_killed_supervisor(is_stopped: bool) -> None:
    with parent("hang") as server:
        pid = server.ask()[1]
        if is_stopped:
            os.kill(pid, signal.SIGSTOP)
        server.signal(signal.SIGKILL)
        server.process.wait(WAIT_S)
        assert gone_within(pid, 30.0)


def test_the_terminals_signals_do_not_reach_the_child() -> None:
    with parent("serve") as server:
        assert os.getsid(server.ask()[1]) != os.getsid(server.process.pid)
