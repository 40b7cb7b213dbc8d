"""octavo stop: the server meant ends, once its open requests are done."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fake_server import FakeServer
from tests.tiny_models import make_tiny_model

from octavo.cli import main
from octavo.cli.flags import UsageError
from octavo.cli.server_registry import ServerRecord
from octavo.cli.servers import choose

SERVERS = [
    ServerRecord(11, "http://127.0.0.1:8000", "one", "/a", 0.0),
    ServerRecord(12, "http://127.0.0.1:8001", "two", "/b", 1.0),
    ServerRecord(13, "http://127.0.0.1:8002", "two", "/c", 2.0),
]


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="octavo-") as short:  # pytest's are too long for a socket
        monkeypatch.setenv("OCTAVO_RUN_DIR", short)
        yield


@pytest.mark.parametrize(("which", "pid"), [("one", 11), ("12", 12), ("8002", 13), ("http://127.0.0.1:8001", 12)])
def test_a_server_is_known_by_name_process_and_port(which: str, pid: int) -> None:
    assert choose(SERVERS, which).pid == pid


def test_what_is_not_clear_is_asked_back() -> None:
    assert choose(SERVERS[:1], None).pid == 11
    for servers, which, said in (
        (SERVERS, None, "3 servers run here; give a PORT"),
        (SERVERS, "two", "2 servers have that name; give a PORT: two"),
        (SERVERS, "three", r"unknown server 'three'; running: one \(pid 11, port 8000\), two"),
        ([], None, "no server of this user runs here"),
    ):
        with pytest.raises(UsageError, match=said):
            choose(servers, which)


def test_I05_a_server_is_stopped_behind_its_open_requests(tmp_path: Path, capsys: Any) -> None:
    model = make_tiny_model("smollm2", tmp_path / "tiny")
    with FakeServer(str(model), tmp_path / "log", env={"FAKE_STEP_S": "0.02"}) as server:
        port = server.url.rpartition(":")[2]
        answers: list[Any] = []
        body = {"prompt": "hello", "max_tokens": 40, "ignore_eos": True}
        asking = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", body)))
        asking.start()
        while server.status()["open_requests"] < 1 and asking.is_alive():
            pass
        assert main(["stop", port]) == 0
        asking.join(30)
        assert answers[0][0] == 200 and answers[0][2]["usage"]["completion_tokens"] == 40
        assert server.process.wait(30) == 0
        assert f"(process {server.process.pid}) ended" in capsys.readouterr().err
    assert main(["stop", port]) == 2
    assert "no server of this user runs here" in capsys.readouterr().err


def test_now_takes_the_time_from_open_requests(tmp_path: Path, capsys: Any) -> None:
    model = make_tiny_model("smollm2", tmp_path / "tiny")
    with FakeServer(str(model), tmp_path / "log", env={"FAKE_STEP_S": "0.5"}) as server:
        answers: list[Any] = []
        body = {"prompt": "hello", "max_tokens": 200, "ignore_eos": True}
        asking = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", body)))
        asking.start()
        while server.status()["open_requests"] < 1 and asking.is_alive():
            pass
        assert main(["stop", "--timeout", "0"]) == 1
        assert "still draining" in capsys.readouterr().err
        assert main(["stop", "--now", str(server.process.pid)]) == 0
        asking.join(30)
        assert answers[0][0] == 503
    assert main(["stop", "--all"]) == 0
    assert main(["stop", "--all", "x"]) == 2
