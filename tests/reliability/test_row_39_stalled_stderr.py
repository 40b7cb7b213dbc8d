"""Row 39: a stderr that is not read, full or gone stops nothing; floods of log lines cost lines, and no answers."""

import contextlib
import http.client
import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from octavo.cli.server_registry import ServerRecord, find_servers
from octavo.cli.servers import call_admin
from tests.fake_server import COMMON, FakeServer
from tests.reliability.load import quantile
from tests.reliability.scorecard import Score
from tests.tiny_models import make_tiny_model

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with an RST
LINES = 500  # a second
BODY = {"prompt": "hello", "max_tokens": 20, "ignore_eos": True}


class Stderr:
    """A pipe that is full from the start, and read when asked."""

    def __init__(self) -> None:
        self._reading, self.writing = os.pipe()
        os.set_blocking(self.writing, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(self.writing, bytes(4096))
        os.set_blocking(self.writing, True)

    def read(self, until: str, timeout_s: float = 30.0) -> str:
        """Read until a text comes, or the end."""
        found, end = "", time.monotonic() + timeout_s
        while until not in found and time.monotonic() < end:
            if select.select([self._reading], [], [], 0.1)[0]:
                data = os.read(self._reading, 1 << 16)
                if not data:
                    break
                found += data.replace(b"\0", b"").decode()
        return found

    def close(self) -> None:
        os.close(self._reading)


@contextlib.contextmanager
def serving(
    model: str, stderr: int, program: tuple[str, ...] = FakeServer.program, num_lines: int = 0
) -> Iterator[tuple[subprocess.Popen[bytes], ServerRecord]]:
    """Run a server whose stderr cannot tell where it serves."""
    command = [*program, "serve", model, *COMMON, "--log-level", "debug"]
    with tempfile.TemporaryDirectory(prefix="octavo-") as short, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_RUN_DIR", short)
        patch.setenv("FAKE_LINES", str(num_lines))
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=stderr)
        try:
            yield process, _ready(process)
        finally:
            process.kill()
            process.wait(30)


def _ready(process: subprocess.Popen[bytes]) -> ServerRecord:
    end = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < end:
        for record in find_servers():
            with contextlib.suppress(OSError):
                if get(record, "/readyz")[0] == 200:
                    return record
        time.sleep(0.05)
    raise AssertionError(f"not ready; exit status {process.poll()}")


def get(record: ServerRecord, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(urlsplit(record.url).netloc, timeout=60)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def generate(record: ServerRecord) -> dict[str, Any]:
    connection = http.client.HTTPConnection(urlsplit(record.url).netloc, timeout=60)
    try:
        connection.request("POST", "/v1/completions", json.dumps(BODY), {"Content-Type": "application/json"})
        found: dict[str, Any] = json.loads(connection.getresponse().read())
        return found
    finally:
        connection.close()


def reset_often(record: ServerRecord, until: float) -> int:
    """Break streams off with an RST, each after its first bytes; every one is a line at this level of the log."""
    place, count = urlsplit(record.url), 0
    body = json.dumps({**BODY, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: %d\r\n\r\n" % len(body)
    while time.monotonic() < until:
        with socket.create_connection((place.hostname or "", place.port or 0), timeout=60) as client:
            client.sendall(head + body)
            client.recv(64)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        count += 1
    return count


def look(record: ServerRecord, until: float) -> tuple[list[float], int]:
    """Ask for /livez again and again: the seconds each took, and how many were not 200."""
    times, failed = [], 0
    while time.monotonic() < until:
        begun = time.perf_counter()
        failed += get(record, "/livez")[0] != 200
        times.append(time.perf_counter() - begun)
        time.sleep(0.01)
    return times, failed


def dropped(record: ServerRecord) -> int:
    found = re.search(r'^octavo_log_lines_dropped_total\{process="api"\} ([\d.e+]+)$', get(record, "/metrics")[1], re.M)
    assert found is not None
    return int(float(found[1]))


@pytest.mark.timeout(300)
def test_row_39_a_stalled_stderr_stops_nothing(tmp_path: Path, score: Score) -> None:
    model = str(make_tiny_model("smollm2", tmp_path / "tiny"))
    seconds = score.dose(3.0, 30.0)
    stderr = Stderr()
    with serving(model, stderr.writing, num_lines=LINES) as (process, record):
        until, counts = time.monotonic() + seconds, [0, 0]

        def flood(index: int) -> None:
            counts[index] = reset_often(record, until)

        floods = [threading.Thread(target=flood, args=(index,)) for index in range(2)]
        for thread in floods:
            thread.start()
        times, failed = look(record, until)
        for thread in floods:
            thread.join()
        answers = [generate(record)["usage"]["completion_tokens"] for _ in range(10)]
        call_admin(record.admin, "kill_engine")
        answers += [generate(record)["usage"]["completion_tokens"] for _ in range(10)]
        num_dropped = dropped(record)
        os.close(stderr.writing)
        said = stderr.read("log lines dropped")
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        status = process.wait(60)
        end_s = time.monotonic() - begun
    stderr.close()
    score.tell("streams cut by a reset", sum(counts))
    score.count("/livez not answered with 200", failed)
    score.share("requests answered in full, with a crash of the engine", answers.count(BODY["max_tokens"]), 20)
    score.least("log lines dropped", num_dropped, 1)
    score.share("the count of dropped lines is logged once stderr is read", int("log lines dropped" in said), 1)
    score.count("exit status", status)
    score.time("the server ends in s", end_s, 5.0)
    score.time("/livez p99, ms", 1000 * quantile(times, 0.99), 50.0)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", ["full", "gone", "closed"])
def test_row_39_a_stderr_that_cannot_be_written_ends_nothing(tmp_path: Path, score: Score, kind: str) -> None:
    model = str(make_tiny_model("smollm2", tmp_path / "tiny"))
    reading, writing = os.pipe()
    if kind == "full":
        os.close(writing)
        writing = os.open("/dev/full", os.O_WRONLY)
    os.close(reading)
    program = ("sh", "-c", 'exec "$@" 2>&-', "sh") if kind == "closed" else ()
    with serving(model, writing, (*program, *FakeServer.program), LINES) as (process, record):
        answered = [generate(record)["usage"]["completion_tokens"] for _ in range(3)]
        call_admin(record.admin, "kill_engine")
        answered.append(generate(record)["usage"]["completion_tokens"])
        process.send_signal(signal.SIGTERM)
        status = process.wait(60)
    os.close(writing)
    score.share(f"stderr {kind}: requests answered", answered.count(BODY["max_tokens"]), 4)
    score.count(f"stderr {kind}: exit status", status)


def test_row_39_a_start_that_fails_ends_though_nobody_reads_why(tmp_path: Path, score: Score) -> None:
    stderr = Stderr()
    command = [sys.executable, "-m", "octavo", "serve", "scripted:/none", "--port", "0"]
    begun = time.monotonic()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=stderr.writing)
    status = process.wait(60)
    seconds = time.monotonic() - begun
    os.close(stderr.writing)
    stderr.close()
    again = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=60)
    score.share("exit status 2, read or not", [status, again.returncode].count(2), 2)
    score.count("fatal errors that a reader does not get", int("error: " not in again.stderr))
    score.time("seconds until a failing start ends, with stderr unread", seconds, 8.0)
