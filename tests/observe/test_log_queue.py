"""The log's way to stderr: nothing waits for a reader, what is dropped is counted and told, crashes end."""

import fcntl
import io
import json
import logging
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from octavo.observe import log as log_module
from octavo.observe.log import (
    MAX_BYTES,
    MAX_LINES,
    NOTICES,
    STATEMENT_LINES,
    LogQueue,
    QueuedStream,
    close_log,
    num_dropped_lines,
    print_notice,
    set_up_log,
    stderr_of_children,
    writer_of,
)

SRC = Path(__file__).resolve().parents[2] / "src"


class Pipe:
    """A pipe that holds one page, as a stream whose reader may be late."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        fcntl.fcntl(self.writing, fcntl.F_SETPIPE_SZ, 4096)
        self.stream = os.fdopen(self.writing, "w")

    def fill(self) -> None:
        os.set_blocking(self.writing, False)
        try:
            while True:
                os.write(self.writing, bytes(1))
        except BlockingIOError:
            os.set_blocking(self.writing, True)

    def read(self, until: str, timeout_s: float = 60.0) -> str:
        """Read until a text comes."""
        found, end = b"", time.monotonic() + timeout_s
        while until not in found.decode() and time.monotonic() < end:
            if select.select([self.reading], [], [], 0.1)[0]:
                found += os.read(self.reading, 65536)
        return found.replace(b"\0", b"").decode()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.stream.close()
    os.close(made.reading)


def queue_on(pipe: Pipe) -> LogQueue:
    return LogQueue(writer_of(pipe.stream), lambda number: f"{number} dropped")


def test_lines_of_several_threads_are_written_whole_and_in_order(pipe: Pipe) -> None:
    queue = queue_on(pipe)
    threads = [
        threading.Thread(target=lambda name=name: [queue.put(f"{name} {n}") for n in range(100)]) for name in "ab"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    queue.put("end")
    lines = pipe.read("end\n").splitlines()
    assert sorted(lines[:-1]) == sorted(f"{name} {n}" for name in "ab" for n in range(100))
    assert [line for line in lines if line.startswith("a")] == [f"a {n}" for n in range(100)]
    queue.close()


def test_a_stalled_reader_stops_nothing_and_what_was_dropped_is_told_behind_what_was_kept(pipe: Pipe) -> None:
    pipe.fill()
    queue = queue_on(pipe)
    queue.put("line 0")
    time.sleep(0.1)  # it is being written
    for number in range(1, 5 * MAX_LINES):
        queue.put(f"line {number}")
    kept = 5 * MAX_LINES - queue.num_dropped
    assert kept == MAX_LINES + 1
    lines = pipe.read("dropped\n").splitlines()
    assert lines[:kept] == [f"line {number}" for number in range(kept)]
    assert lines[kept] == f"{5 * MAX_LINES - kept} dropped"
    queue.put("goes on")
    assert pipe.read("on\n") == "goes on\n"
    queue.close()


def test_bytes_are_bounded_too(pipe: Pipe) -> None:
    pipe.fill()
    queue = queue_on(pipe)
    for _ in range(20):
        queue.put("x" * (MAX_BYTES // 10))
    assert 9 <= queue.num_dropped <= 11
    queue.put("y" * (2 * MAX_BYTES))
    assert queue.num_dropped >= 10
    queue.close(0.01)


def test_the_end_waits_for_a_reader_no_longer_than_it_may(pipe: Pipe) -> None:
    pipe.fill()
    queue = queue_on(pipe)
    queue.put("last words")
    begun = time.monotonic()
    queue.close(0.2)
    assert time.monotonic() - begun > 0.1
    queue.put("after the end")
    assert queue.num_dropped == 1


def test_the_end_waits_for_what_is_queued(pipe: Pipe) -> None:
    queue = queue_on(pipe)
    for number in range(100):
        queue.put(f"{number}")
    queue.drop()
    queue.close()
    lines = pipe.read("dropped\n").splitlines()
    assert lines == [*map(str, range(100)), "1 dropped"]


def wait_until(is_so: Callable[[], bool]) -> None:
    """Wait for what the queue's thread does, for ten seconds at most."""
    until = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.001)


def test_a_reader_that_is_gone_costs_lines(pipe: Pipe) -> None:
    os.close(pipe.reading)
    queue = queue_on(pipe)
    for number in range(10):
        queue.put(f"{number}")
    wait_until(lambda: queue.num_dropped >= 10)
    queue.close(60.0)
    assert not queue._thread.is_alive()
    pipe.reading = os.open(os.devnull, os.O_RDONLY)


def test_a_full_disk_costs_lines() -> None:
    with open("/dev/full", "w") as full:
        queue = LogQueue(writer_of(full), str)
        queue.put("lost")
        wait_until(lambda: queue.num_dropped == 1)
        queue.close()


def test_a_line_that_was_cut_ends_before_the_next(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real, calls = os.write, 0

    def short(descriptor: int, data: bytes) -> int:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(28, "No space left on device")
        return real(descriptor, bytes(data)[:3] if calls == 1 else data)

    with (tmp_path / "log").open("w") as file:
        write = writer_of(file)
        monkeypatch.setattr(os, "write", short)
        with pytest.raises(OSError, match="No space"):
            write(b"abcdef\n")
        write(b"next\n")
    assert (tmp_path / "log").read_text() == "abc\nnext\n"


def test_a_pipe_that_does_not_block_is_waited_for(pipe: Pipe) -> None:
    pipe.fill()
    os.set_blocking(pipe.writing, False)
    queue = queue_on(pipe)
    queue.put("late")
    time.sleep(0.05)
    assert pipe.read("late\n") == "late\n" and queue.num_dropped == 0
    queue.close()


def test_notices_come_at_intervals(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "NOTICE_S", 0.3)
    queue = queue_on(pipe)
    queue.drop()
    assert pipe.read("dropped\n") == "1 dropped\n"
    begun = time.monotonic()
    for _ in range(5):
        queue.drop()
    assert pipe.read("dropped\n") == "5 dropped\n" and time.monotonic() - begun > 0.2
    queue.close()


def test_a_signals_handler_may_log_while_a_line_is_added(tmp_path: Path) -> None:
    written: list[bytes] = []
    queue = LogQueue(written.append, str)
    before = signal.signal(signal.SIGALRM, lambda *_: queue.put("from the handler"))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        for number in range(20_000):
            queue.put(f"{number}")
            if number % 500 == 0:
                wait_until(lambda: not queue._lines)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    queue.close()
    assert b"from the handler\n" in written
    assert len([line for line in written if line[:1].isdigit()]) >= 20_000 - queue.num_dropped


def test_the_stream_passes_whole_lines_on() -> None:
    lines: list[str] = []
    stream = QueuedStream(lines.append, sys.__stderr__ or io.StringIO())
    print("one", file=stream, flush=True)
    stream.write("two\nthr")
    stream.write("ee\nrest")
    assert lines == ["one", "two", "three"]
    stream.finish()
    assert lines[3:] == ["rest"] and stream.writable() and not stream.closed


@pytest.fixture
def log() -> Iterator[None]:
    root, told = logging.getLogger(), logging.getLogger(NOTICES)
    kept = root.handlers[:], root.level, told.level
    root.handlers[:] = []
    yield
    close_log()
    root.handlers[:], root.level, told.level = kept[0], kept[1], kept[2]


@pytest.mark.usefixtures("log")
def test_a_statement_that_floods_is_cut_and_others_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_log("text", "info", "api")
    for number in range(5 * STATEMENT_LINES):
        logging.getLogger("octavo.x").info("flood %d", number)
    logging.getLogger("octavo.x").info("another")
    for _ in range(2 * STATEMENT_LINES):
        print_notice("told")
    assert num_dropped_lines() == 4 * STATEMENT_LINES
    close_log()
    said = capsys.readouterr().err
    lines = said.splitlines()
    assert sum("flood" in line for line in lines) == STATEMENT_LINES and lines.count("told") == 2 * STATEMENT_LINES
    assert "octavo.x: another" in lines
    assert sum(map(int, re.findall(r"(\d+) log lines dropped: too many", said))) == 4 * STATEMENT_LINES


@pytest.mark.usefixtures("log")
def test_a_share_is_had_anew(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "STATEMENT_S", 0.0)
    set_up_log("text", "info", "api")
    for _ in range(2 * STATEMENT_LINES):
        logging.getLogger("octavo.x").info("x")
    close_log()
    assert capsys.readouterr().err.count("x: x") == 2 * STATEMENT_LINES


@pytest.mark.usefixtures("log")
def test_what_libraries_write_to_stderr_is_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_log("json", "info", "api")
    print("from a library\n\nin lines", file=sys.stderr)
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        traceback.print_exc()
    close_log()
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["message"] for line in lines[:2]] == ["from a library", "in lines"]
    assert {line["logger"] for line in lines} == {"stderr"} and lines[-1]["message"] == "ZeroDivisionError"


@pytest.mark.parametrize("is_read", [False, True])
def test_a_process_ends_though_a_thread_logs_to_an_unread_stderr(pipe: Pipe, is_read: bool) -> None:
    """Once the queue had closed the thread wrote to the real stderr, holding the lock that logging takes at the end."""
    program = (
        "import logging, threading\n"
        "from octavo.observe.log import set_up_log\n"
        "set_up_log('text', 'info', 'api')\n"
        "log, begun = logging.getLogger('octavo.x'), threading.Event()\n"
        "def flood():\n"
        "    while True:\n"
        "        log.error('flood')\n"
        "        begun.set()\n"
        "threading.Thread(target=flood, daemon=True).start()\n"
        "begun.wait()\n"
        "log.error('the last words')\n"
    )
    if not is_read:
        pipe.fill()
    environ = {**os.environ, "PYTHONPATH": str(SRC)}
    with subprocess.Popen([sys.executable, "-c", program], stderr=pipe.writing, env=environ) as process:
        try:
            said = pipe.read("the last words") if is_read else ""
            assert process.wait(20) == 0
        finally:
            process.kill()
    assert is_read == ("the last words" in said)


CRASH = "import faulthandler, os; faulthandler.enable(); os.kill(os.getpid(), 11)"


@pytest.mark.skipif(sys.platform != "linux", reason="a pipe is opened anew by /proc")
def test_a_child_that_crashes_ends_though_nobody_reads_its_stacks(pipe: Pipe) -> None:
    program = (
        "import os, subprocess, sys\n"
        "from octavo.observe.log import stderr_of_children\n"
        f"child = subprocess.Popen([sys.executable, '-c', {CRASH!r}], stderr=stderr_of_children())\n"
        "print(child.wait(20), os.get_blocking(2))"
    )
    pipe.fill()
    environ = {**os.environ, "PYTHONPATH": str(SRC)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=pipe.writing, env=environ, timeout=60)
    assert done.stdout.split() == [b"-11", b"True"]


@pytest.mark.parametrize("closed", ["2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_standard_streams_that_are_closed_are_opened_on_nothing(closed: str) -> None:
    program = (
        "import os, sys; from octavo.observe.log import open_missing_streams; open_missing_streams(); "
        "print('unseen', file=sys.stderr); sys.exit(os.open('/dev/null', 0) < 3 or os.fstat(2).st_rdev == 0)"
    )
    command = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, program]
    assert subprocess.run(command, env={**os.environ, "PYTHONPATH": str(SRC)}, timeout=60).returncode == 0


def test_no_pipe_is_opened_where_stderr_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        monkeypatch.setattr(log_module, "_STDERR", file.fileno())
        assert stderr_of_children() is None
