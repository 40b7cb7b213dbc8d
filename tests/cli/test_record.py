"""octavo record: the last minutes of a real server, of one whose engine was killed, and of a request that came late."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fake_server import RealServer

from octavo import cli
from octavo.observe.recording import arrivals, open_recording, replay

SCRIPT = '{"rules": [{"say": "All is well. ", "finish": "length", "delay_ms": 4}]}'
KEPT_S = 1.0


class Load:
    """Requests of some tokens each, one after another in several threads, until it is stopped."""

    def __init__(self, server: RealServer, num_threads: int = 3) -> None:
        self.server, self.is_over = server, threading.Event()
        self.threads = [threading.Thread(target=self.ask, args=(number,)) for number in range(num_threads)]

    def ask(self, number: int) -> None:
        while not self.is_over.is_set():
            body = {"prompt": f"Hello {number}", "max_tokens": 40, "n": 1 + number % 2}
            self.server.post("/v1/completions", body)

    def __enter__(self) -> Load:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        for thread in self.threads:
            thread.join(30)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="octavo-") as short:  # pytest's are too long for a socket
        (Path(short) / "script.json").write_text(SCRIPT)
        yield Path(short)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RealServer]:
    words = ("--flight-recorder", str(KEPT_S), "--flight-recordings", str(folder / "saved"), "--record-on-miss")
    with RealServer(
        f"scripted:{folder}/script.json", folder / "log", *words, env={"OCTAVO_RUN_DIR": str(folder)}
    ) as running:
        yield running
        assert running.end() == 0, running.text
        assert "Traceback" not in running.text


@pytest.fixture(autouse=True)
def run_dir(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_RUN_DIR", str(folder))


def wait_for(found: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    end = time.monotonic() + timeout_s
    while not (value := found()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return value


def saved(folder: Path, kind: str) -> list[Path]:
    return sorted(folder.glob(f"saved/*-{kind}/*.octrec"))


def test_nothing_is_written_before_a_request_or_to_a_used_folder(server: RealServer, folder: Path, capsys: Any) -> None:
    assert cli.main(["record", "--output", str(folder / "none")]) == 2
    assert "nothing to record yet" in capsys.readouterr().err
    assert cli.main(["record", "--last", "soon"]) == 2
    assert "give a time such as 90s, 5m or 1h" in capsys.readouterr().err
    server.post("/v1/completions", {"prompt": "Hello", "max_tokens": 2})
    assert cli.main(["record", "--output", str(folder / "first")]) == 0
    assert cli.main(["record", "--output", str(folder / "first")]) == 2
    assert "holds a recording already" in capsys.readouterr().err


def test_the_last_seconds_replay_and_are_a_workload(server: RealServer, folder: Path, capsys: Any) -> None:
    """They begin in the middle of the engine's life, while requests are open, and its first ones are not in them."""
    with Load(server):
        time.sleep(3 * KEPT_S)
        assert cli.main(["record", "--last", "500ms", "--output", str(folder / "last")]) == 0
    path = folder / "last"
    assert f"octavo replay {path}" in capsys.readouterr().out
    recording = open_recording(path)
    report = replay(recording)
    assert report.difference is None and report.num_plans == report.num_equal > 50
    assert recording.header.has_state and report.num_open and report.seconds >= 0.5
    assert report.ends == ["taken by octavo record"]
    assert path.stat().st_mode & 0o777 == 0o700 and recording.segments[0].path.stat().st_mode & 0o777 == 0o600
    requests = arrivals(recording)
    assert any(one.is_resumed for one in requests) and any(not one.is_resumed and one.end for one in requests)
    words = ["replay", str(path), "--what-if", "max_num_seqs=2", "--json", "--page", str(folder / "page.html")]
    assert cli.main(words) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["is_equal"] and facts["runs"]["simulated"] and any("were open" in text for text in facts["remarks"])
    assert cli.main(["trace", str(path), "--perfetto", str(folder / "trace.json.gz")]) == 0
    figures = server.get("/statistics")[2] if server.get("/statistics")[0] == 200 else {}
    assert figures.get("flight_recorder", {"is_recording": True})["is_recording"]


def test_a_killed_engine_leaves_its_last_minutes(server: RealServer, folder: Path) -> None:
    with Load(server):
        time.sleep(1.5 * KEPT_S)
        os.kill(server.pid("engine"), signal.SIGKILL)
        (path,) = wait_for(lambda: saved(folder, "crash"))
        wait_for(lambda: "octavo replay" in server.text)
    report = replay(open_recording(path))
    assert report.difference is None and report.num_equal > 50
    assert "the engine ended (killed by SIGKILL, step " in report.ends[0]
    assert server.post("/v1/completions", {"prompt": "Hello", "max_tokens": 2})[0] == 200


def test_a_missed_objective_is_saved_once_in_a_while(server: RealServer, folder: Path) -> None:
    for objective in ({"ttft_objective": 60.0}, {"ttft_objective": 1e-6}, {"tpot_objective": 1e-6}):
        assert server.post("/v1/completions", {"prompt": "Hello", "max_tokens": 5, **objective})[0] == 200
    (path,) = wait_for(lambda: saved(folder, "miss"))
    assert "missed its ttft objective: 0." in replay(open_recording(path)).ends[0]
    time.sleep(0.3)
    assert len(saved(folder, "miss")) == 1


def test_without_a_flight_recorder_there_is_nothing_to_write(folder: Path, capsys: Any) -> None:
    words = ("--flight-recorder", "0", "--served-model-name", "off")
    script = f"scripted:{folder}/script.json"
    with RealServer(script, folder / "off.log", *words, env={"OCTAVO_RUN_DIR": str(folder)}) as running:
        running.post("/v1/completions", {"prompt": "Hello", "max_tokens": 2})
        assert cli.main(["record", "--server", "off", "--output", str(folder / "off")]) == 2
        assert "has no flight recorder; start it with --flight-recorder" in capsys.readouterr().err
