"""`octavo serve` as its operator sees it: what dies is replaced, what is told to end ends, nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.fake_server import FakeServer
from tests.tiny_models import make_tiny_model

from octavo import cli
from octavo.frontend.api_supervisor import EXIT_ENGINE_FAILED

ORPHANS_S = 30.0  # for what is usually gone in a few hundredths
BODY = {"prompt": "the cat", "max_tokens": 5, "temperature": 0, "seed": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model("smollm2", tmp_path_factory.mktemp("lives") / "tiny"))


@pytest.fixture
def server(model: str, tmp_path: Path) -> Iterator[FakeServer]:
    with FakeServer(model, tmp_path / "log") as server:
        yield server


def children(server: FakeServer) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, ORPHANS_S)
    left = [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    for process in left:
        process.kill()
    assert not left


def test_a_killed_api_is_replaced_on_the_same_port(server: FakeServer) -> None:
    before = server.post("/v1/completions", BODY)[2]["choices"]
    pids = {role: server.pid(role) for role in ("supervisor", "api", "engine")}
    engine = [psutil.Process(pids["engine"])]
    os.kill(pids["api"], signal.SIGKILL)
    assert server.post("/v1/completions", BODY)[2]["choices"] == before, "a connection between two lives waits"
    status = server.status()
    assert status["api_restarts"] == 1 and status["processes"]["supervisor"] == pids["supervisor"]
    (home,) = Path(os.environ["OCTAVO_RUN_DIR"]).glob(f"{server.process.pid}-*")
    assert_gone(engine)
    assert status["processes"]["engine"] != pids["engine"]
    assert server.end() == 0
    assert not home.exists()
    assert "the api process ended (killed by SIGKILL)" in server.text


def test_nothing_outlives_a_killed_supervisor(model: str, tmp_path: Path) -> None:
    with FakeServer(model, tmp_path / "log", "--standby") as server:
        while not server.status()["engine"]["has_standby"]:
            time.sleep(0.05)
        processes = children(server)
        assert len(processes) >= 3  # the api, two engines, and sandbox processes
        server.end(signal.SIGKILL)
        assert_gone(processes)


def test_not_even_what_is_stopped_outlives_a_killed_supervisor(server: FakeServer) -> None:
    processes = children(server)
    for pid in [server.pid(role) for role in ("engine", "api")]:
        os.kill(pid, signal.SIGSTOP)
    server.end(signal.SIGKILL)
    assert_gone(processes)


def test_nothing_outlives_a_third_signal(server: FakeServer) -> None:
    os.kill(server.pid("engine"), signal.SIGSTOP)
    processes = children(server)

    def ask() -> None:
        with contextlib.suppress(OSError, HTTPException):
            server.post("/v1/completions", BODY)

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.3)
    for number in (signal.SIGTERM, signal.SIGTERM):
        server.process.send_signal(number)
        time.sleep(0.1)
    assert server.end() == 128 + signal.SIGKILL
    asking.join(30)
    assert_gone(processes)


def test_a_signal_while_it_loads_ends_it_soon(model: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "octavo", "serve", model, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while not psutil.Process(process.pid).children():
            time.sleep(0.01)
        time.sleep(0.3)
        processes = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
        assert process.stderr is not None and process.stderr.read() == ""
    assert_gone(processes)


def test_SIGHUP_reads_the_key_file_again(model: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "one"\nkey = "secret-of-one"\n')
    with FakeServer(model, tmp_path / "log", "--api-key-file", str(keys)) as server:
        keys.write_text('[[keys]]\nname = "two"\nkey = "secret-of-two"\n')
        server.process.send_signal(signal.SIGHUP)
        while "1 added, 1 removed" not in server.text:
            time.sleep(0.01)
        keys.write_text("nothing of use")
        server.process.send_signal(signal.SIGHUP)
        while "the keys are unchanged" not in server.text:
            time.sleep(0.01)
        assert server.end() == 0


def test_a_request_is_cancelled_by_its_clients_name(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "admin", "pause") is True
    answers: list[tuple[int, dict[str, str], Any]] = []
    asking = threading.Thread(
        target=lambda: answers.append(server.post("/v1/completions", BODY, headers={"X-Request-Id": "mine"}))
    )
    asking.start()
    while run(capsys, "admin", "status")["engine"]["open_requests"] == 0:
        time.sleep(0.01)
    told = run(capsys, "admin", "explain", "mine")["explanations"]
    assert [(one["state"], one["reason"]) for one in told] == [("waiting", "paused")]
    (name,) = run(capsys, "admin", "cancel", "mine")
    assert name.startswith("mine")
    asking.join(30)
    assert [(status, body["error"]["code"]) for status, _, body in answers] == [(499, "cancelled")]


@pytest.mark.slow
def test_an_engine_that_cannot_live_ends_the_server_with_its_status(model: str, tmp_path: Path) -> None:
    env = {"FAKE_ENGINE": "broken", "FAKE_FILE": str(tmp_path / "broken")}
    with FakeServer(model, tmp_path / "log", env=env) as server:
        (tmp_path / "broken").touch()
        os.kill(server.pid("engine"), signal.SIGKILL)
        time.sleep(0.2)
        ready, headers, body = server.get("/readyz")
        assert (ready, body["error"]["code"]) == (503, "engine_unavailable") and headers["retry-after"]
        assert server.get("/livez")[0] == 200
        status, headers, body = server.post("/v1/completions", BODY, timeout_s=60)
        assert (status, body["error"]["code"]) == (503, "engine_unavailable") and headers["retry-after"]
        assert server.process.wait(60) == EXIT_ENGINE_FAILED
        assert "error: the engine ended more than 5 times" in server.text and "Traceback" not in server.text


def run(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert cli.main(list(words)) == 0
    return json.loads(capsys.readouterr().out)


def test_ps_and_admin_and_the_end(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    (shown,) = run(capsys, "ps", "--json")
    assert (shown["url"], shown["model"], shown["phase"], shown["open_requests"]) == (server.url, "tiny", "ready", 0)
    assert shown["processes"]["supervisor"] == server.process.pid and shown["engine"]["epoch"] == 1
    assert run(capsys, "admin", "status", "--socket", server.admin)["url"] == server.url
    assert run(capsys, "admin", "kill_engine") == {"engine": shown["processes"]["engine"]}
    assert server.post("/v1/completions", BODY)[0] == 200
    assert run(capsys, "admin", "status")["engine"]["epoch"] == 2
    assert run(capsys, "admin", "pause") is True
    waiting = threading.Thread(target=server.post, args=("/v1/completions", BODY))
    waiting.start()
    while run(capsys, "admin", "status")["engine"]["open_requests"] == 0:
        time.sleep(0.01)
    assert run(capsys, "admin", "resume") is True
    waiting.join(30)
    assert run(capsys, "admin", "cancel", "none") == []
    assert run(capsys, "admin", "cancel_all") == 0
    assert cli.main(["admin", "cancel"]) == 2 and "needs the id" in capsys.readouterr().err
    assert cli.main(["admin", "reload_keys"]) == 2 and "--api-key-file" in capsys.readouterr().err
    assert "open_requests" in run(capsys, "admin", "drain")
    assert server.process.wait(30) == 0, server.text
    assert cli.main(["ps"]) == 0 and "no server" in capsys.readouterr().out


def test_chaos_counts_what_a_kill_costs(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--kill-engine", "every", "1.5s", "--streams", "4", "--max-tokens", "24", "--duration", "2500ms"]
    assert cli.main(["chaos", *words, "--url", server.url, "--json", "--yes"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["lost"], report["duplicated"], report["errors"]) == (0, 0, {})
    assert report["faults"]["kill_engine"] == report["restarts"]["engine"] == 1 and report["finished"] >= 8
    assert report["gap_s"]["max"] > 0
    assert cli.main(["chaos", "--duration", "1s", "--max-tokens", "4", "--server", str(server.process.pid), "-y"]) == 0
    table = capsys.readouterr().out
    assert "lost tokens" in table and "{" not in table


@pytest.mark.slow
def test_chaos_goes_on_behind_a_killed_api(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(model, tmp_path / "log", "--journal", str(tmp_path / "journal")) as server:
        words = ["--kill-api", "every", "3s", "--kill-engine", "2s", "--streams", "8", "--duration", "8s"]
        assert cli.main(["chaos", *words, "--socket", server.admin, "--json", "--yes"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["lost"], report["duplicated"], report["errors"]) == (0, 0, {})
        assert report["faults"]["kill_api"] == report["restarts"]["api"] >= 1
        assert server.end() == 0
