"""octavo top: against a real server with a scripted model, in a real terminal of this process's making."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.fake_server import ROOT, FakeServer
from tools.sample_frames import Stream

from octavo.cli import main, top
from octavo.cli.servers import AdminError
from octavo.cli.top import Figures
from octavo.cli.top_screen import ORDERS, Keyboard, View, bar, plain, screen, sparkline

WAIT_S = 60.0
SCRIPT = '{"rules": [{"say": "All is well. ", "finish": "length", "delay_ms": 5}]}'


class ScriptedServer(FakeServer):
    """A real one."""

    program = (sys.executable, "-m", "octavo")
    common = ("--port", "0")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="octavo-") as short:  # pytest's are too long for a socket
        (Path(short) / "script.json").write_text(SCRIPT)
        yield Path(short)


@pytest.fixture(autouse=True)
def run_dir(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_RUN_DIR", str(folder))


def start(folder: Path, name: str) -> ScriptedServer:
    flags = ("--max-num-seqs", "2", "--served-model-name", name)
    environment = {"OCTAVO_RUN_DIR": str(folder)}
    return ScriptedServer(f"scripted:{folder}/script.json", folder / f"{name}.log", *flags, env=environment)


def load(server: FakeServer, count: int, max_tokens: int = 20_000) -> None:
    """So many requests that go on until the server ends."""

    def ask() -> None:
        with contextlib.suppress(OSError):
            server.post("/v1/completions", {"prompt": "hello", "max_tokens": max_tokens})

    for _ in range(count):
        threading.Thread(target=ask, daemon=True).start()
    end = time.monotonic() + WAIT_S
    while server.status()["open_requests"] < count:
        assert time.monotonic() < end


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[FakeServer]:
    with start(folder, "loaded") as running:
        load(running, 5)
        yield running
        running.process.kill()


class Terminal:
    """A terminal with `octavo top` in it."""

    def __init__(self, *words: str, size: tuple[int, int] = (30, 120)) -> None:
        self.host, self.device = pty.openpty()
        fcntl.ioctl(self.host, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        self.before = termios.tcgetattr(self.device)
        environ = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "octavo", "top", *words],
            stdin=self.device, stdout=self.device, stderr=self.device, cwd=ROOT, env={**environ, "TERM": "xterm"},
        )  # fmt: skip
        self.seen = ""

    def wait_for(self, pattern: str) -> str:
        """Read on until what came since the last call has this; what came."""
        end = time.monotonic() + WAIT_S
        fresh = ""
        while not re.search(pattern, fresh, re.DOTALL):
            assert time.monotonic() < end, fresh[-4000:]
            if select.select([self.host], [], [], 0.2)[0]:
                fresh += os.read(self.host, 1 << 16).decode(errors="replace")
            else:
                assert self.process.poll() is None, fresh[-4000:]
        self.seen += fresh
        return fresh

    def press(self, keys: bytes) -> None:
        os.write(self.host, keys)

    def end(self) -> int:
        """Wait for its end; its status."""
        end = time.monotonic() + WAIT_S
        while (code := self.process.poll()) is None or select.select([self.host], [], [], 0)[0]:
            assert time.monotonic() < end, self.seen[-4000:]
            if select.select([self.host], [], [], 0.05)[0]:
                self.seen += os.read(self.host, 1 << 16).decode(errors="replace")
        assert termios.tcgetattr(self.device) == self.before
        os.close(self.host)
        os.close(self.device)
        return code


def test_everything_shown_is_there_as_json(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    deadline = time.monotonic() + WAIT_S
    shown: dict[str, Any] = {}
    while not (shown.get("waiting") and len(shown["running"]) == 2 and len(shown["history"]["output"]) > 2):
        assert time.monotonic() < deadline, shown
        assert main(["top", "loaded", "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
    assert shown["server"]["model"] == "loaded" and shown["server"]["state"] == "ready"
    assert shown["server"]["max_sequences"] == 2 and shown["server"]["policy"] == "fcfs"
    assert shown["requests"]["running"] == 2 and shown["requests"]["waiting"] == 3
    assert {row["phase"] for row in shown["running"]} <= {"prefill", "decode"}
    assert all(row["max_tokens"] == 20_000 for row in shown["running"])
    assert shown["waiting"][0]["reason"] == "sequence_cap" and len(shown["waiting"]) == 3
    assert shown["rates"]["output_tokens_per_s"] > 0 and 0 < shown["rates"]["busy"] <= 1
    assert shown["pool"]["held"] > 0 and shown["latency"]["ttft_s"]["count"] >= 2
    assert max(shown["history"]["waiting"]) == 3


def test_once_is_plain_text(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--socket", server.admin]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "loaded" in out and "sequences" in out and "2 of 2" in out
    assert "waiting, first of 3" in out and "sequence cap: needs 1, 0 available" in out
    assert "running, by age" in out and "20,000" in out


def test_the_terminal_shows_the_load_and_is_given_back(server: FakeServer) -> None:
    terminal = Terminal("loaded", "--interval", "0.1")
    first = terminal.wait_for("q quit")
    assert "\x1b[?1049h" in first and "loaded" in first and "2 of 2" in first
    terminal.press(b"s")
    terminal.wait_for("running, by outputs.*q quit")
    terminal.press(b"p")
    terminal.wait_for("PAUSED.*q quit  p go on")
    terminal.press(b"p\x1b[B\x1b[6~")
    terminal.wait_for("p pause")
    terminal.press(b"q")
    assert terminal.end() == 0
    assert terminal.seen.rstrip().endswith("\x1b[?1049l") and "\x1b[?25h" in terminal.seen


def test_it_follows_a_restart_of_the_engine_and_says_when_the_server_ended(folder: Path) -> None:
    with start(folder, "dying") as server:
        load(server, 2)
        terminal = Terminal("dying", "--interval", "0.1")
        terminal.wait_for("epoch 1.*q quit")
        assert main(["admin", "kill_engine", "--socket", server.admin]) == 0
        terminal.wait_for(r"epoch 2.*restarts: engine 1.*2 of 2")
        assert main(["stop", "dying", "--now"]) == 0
        assert terminal.end() == 1
    tail = terminal.seen[terminal.seen.rindex("\x1b[?1049l") :]
    assert re.search(r"dying at http://\S+ \(process \d+\) ended", tail)


def test_a_server_that_does_not_answer_but_runs_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    source = top.WatchedServer("/none", "the server", lambda: True)
    with pytest.raises(AdminError, match="no answer on the admin socket /none"):
        source.poll()
    assert source.last_figures("no answer")["server"]["state"] == "no answer"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--interval", "0"], "--interval is 0; give a number from 0.1 to 60"),
        (["--interval", "nan"], "--interval is 'nan'; give a number from 0.1 to 60"),
        (["x", "--socket", "/y"], "--socket /y and x each name a server; give one of them"),
        (["--socket", "/none", "--once"], "no answer on the admin socket /none"),
        (["nobody"], "unknown server 'nobody'; running: "),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {message}") and err.count("\n") == 1


# --- figures and the screen, without a server --------------------------------------------------------------


def sampled(steps: int = 200) -> tuple[Stream, Figures, dict[str, Any]]:
    """A made-up load, and the figures of it."""
    figures = Figures()
    stream = Stream(32, 100, lambda frame: figures.read([frame]), 10_000)
    for _ in range(steps):
        stream.step()
    stream.writer.end()
    status = {"model": "m", "url": "http://127.0.0.1:1", "phase": "ready", "uptime_s": 5000.0, "engine": {"epoch": 1}}
    scheduler = stream.scheduler.statistics()
    values = {name: getattr(scheduler, name) for name in (field.name for field in fields(scheduler))}
    return stream, figures, figures.snapshot({"status": status, "statistics": {"scheduler": values}})


def test_figures_are_those_of_the_scheduler() -> None:
    stream, figures, shown = sampled()
    state = stream.scheduler._state
    expected = {}
    for request in state.running.requests:
        for sequence in request.sequences:
            expected[request.name] = (sequence.num_computed, sequence.num_outputs, sequence.num_computed >= 1)
    rows = {row["name"]: row for row in shown["running"]}
    assert rows.keys() <= expected.keys() and len(rows) >= len(expected) - 8  # the last may not have their slots yet
    for name, row in rows.items():
        computed, outputs, _ = expected[name]
        assert row["computed"] == computed
        if row["phase"] == "decode":
            assert row["outputs"] == outputs
    assert sum(step.output for step in figures.steps) == state.totals.num_output_tokens
    complete = [step for step in figures.steps if int(step.end) < int(figures.now)]
    assert sum(shown["history"]["output"]) == sum(step.output for step in complete) > 0
    assert shown["requests"]["preemptions"] == state.totals.num_preemptions
    recent = [step for step in figures.steps if step.end >= figures.now - 5.0]
    assert shown["rates"]["steps_per_s"] == pytest.approx(len(recent) / min(5.0, figures.now - figures.complete_from))


def test_ends_and_cache_hits_are_since_the_start_as_on_the_dashboard() -> None:
    stream, _, shown = sampled()
    totals, requests = stream.scheduler.statistics(), shown["requests"]
    assert sum(requests["finished"].values()) == sum(totals.finished.values()) > 0
    hits = totals.prefix_hit_tokens / totals.prefix_queried_tokens
    assert requests["hit_share"] == pytest.approx(hits)
    console = Console(width=200, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(screen(shown, View(is_live=False), 200, 50))
    since = capture.get().partition("since start: ended: ")[2].split("\n")[0]
    assert f"preemptions {totals.num_preemptions:,}, cache hits {100 * hits:.0f}%" in since


@pytest.mark.parametrize("size", [(60, 14), (80, 24), (116, 30), (200, 70), (30, 8)])
def test_a_screen_fits_its_terminal(size: tuple[int, int]) -> None:
    _, _, shown = sampled(60)
    width, height = size
    console = Console(width=width, height=height, force_terminal=True, color_system=None)
    for order in ORDERS:
        view = View(order=order, first=1 << 30)
        with console.capture() as capture:
            console.print(screen(shown, view, width, height))
        lines = capture.get().splitlines()
        assert all(len(line) <= width for line in lines)
        if height >= 24:
            assert len(lines) <= height and any(line.startswith("q quit") for line in lines)
            assert any(f"running, by {order}" in line for line in lines)


def test_names_from_outside_cannot_move_the_cursor() -> None:
    _, _, shown = sampled(20)
    shown["running"][0]["name"] = "evil\x1b[2J\rname\u202e"
    shown["server"]["model"] = "m\x1b]0;title\x07"
    console = Console(width=160, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(screen(shown, View(is_live=False), 160, 50))
    assert "\x1b" not in capture.get() and "\r" not in capture.get() and "evil?[2J?name?" in capture.get()


def test_small_pictures() -> None:
    assert bar(0.5, 4) == "██░░" and bar(7.0, 4) == "████" and bar(-1.0, 2) == "░░"
    assert sparkline([], 4) == "    " and sparkline([0, 0], 4) == "    " and sparkline([1, 8, 4], 3) == "▂█▅"
    assert plain("a\tb\n") == "a?b?"


def test_the_orders_come_round() -> None:
    view = View()
    seen = []
    for _ in ORDERS:
        seen.append(view.order)
        view.press("s")
    assert seen == list(ORDERS) and view.order == "age"


def test_keys_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    host, device = pty.openpty()
    monkeypatch.setattr(sys, "stdin", os.fdopen(device, "r", closefd=False))
    before = termios.tcgetattr(device)
    with Keyboard() as keyboard:
        assert keyboard.wait(0.0) is None
        for sent, name in (
            (b"q", "q"), (b"\x1b[A", "up"), (b"\x1bOB", "down"), (b"\x1b[5~", "page up"), (b"\x1b", "escape"),
            (b"\x1b[H", "home"), (b" ", " "),
        ):  # fmt: skip
            os.write(host, sent)
            assert keyboard.wait(WAIT_S) == name
        os.write(host, b"\x1b[99;5u")  # nothing known: swallowed
        assert keyboard.wait(0.2) is None
    assert termios.tcgetattr(device) == before
    os.close(host)
    os.close(device)
