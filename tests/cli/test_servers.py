"""The records of running servers: found while they live, whoever held the process's number before."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo import cli
from octavo.cli import servers
from octavo.cli.servers import Record, find_servers, own_home
from octavo.errors import ConfigError


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="octavo-") as short:  # pytest's are too long for a socket
        monkeypatch.setenv(servers.RUN_DIR, str(Path(short) / "run"))
        yield Path(short) / "run"


def record(url: str = "http://127.0.0.1:1", begun: float = 1.0, admin: str = "/none/admin.sock") -> Record:
    return Record(os.getpid(), url, "tiny", admin, begun)


def test_a_server_is_found_while_it_lives(folder: Path) -> None:
    assert find_servers() == []
    with own_home() as first, own_home() as second:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and stat.S_IMODE(first.path.stat().st_mode) == 0o700
        assert find_servers() == [], "one that has not told yet"
        second.record(record(begun=2.0))
        first.record(record("http://127.0.0.1:2"))
        assert [found.begun for found in find_servers()] == [1.0, 2.0]
    assert find_servers() == [] and list(folder.iterdir()) == []


def test_what_a_killed_server_left_is_removed(folder: Path) -> None:
    script = (
        "import os\nfrom octavo.cli.servers import Record, own_home\nwith own_home() as home:\n"
        "    (home.scratch / 'engine').mkdir()\n    print(home.scratch)\n"
        f"    home.record(Record({os.getpid()}, 'http://127.0.0.1:1', 'tiny', '/x', 1.0))\n    os.kill(os.getpid(), 9)"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-uc", script], stdout=subprocess.PIPE, text=True, env=environ)
    scratch = Path(done.stdout.strip())
    assert len(list(folder.iterdir())) == 1 and (scratch / "engine").is_dir()
    assert find_servers() == [], "although a process of that number lives"
    assert list(folder.iterdir()) == [] and not scratch.exists()


def test_what_a_killed_process_left_is_removed() -> None:
    with own_home() as home:
        (home.scratch / "octavo-x").mkdir()
        home.clear_scratch()
        assert list(home.scratch.iterdir()) == []
    assert not home.scratch.exists()


def test_a_folder_that_cannot_be_used_is_told(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(servers.RUN_DIR, str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=servers.RUN_DIR), own_home():
        pass
    monkeypatch.setenv(servers.RUN_DIR, str(folder))
    with own_home() as home:
        assert home.admin_path(None).parent == home.path
        with pytest.raises(ConfigError, match="--admin-socket"):
            home.admin_path("/" + "x" * 200)


def test_ps_shows_one_that_does_not_answer_yet(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ps"]) == 0
    assert "no server" in capsys.readouterr().out
    with own_home() as home:
        home.record(record(begun=time.time() - 3700))
        assert cli.main(["ps", "--json"]) == 0
        (shown,) = json.loads(capsys.readouterr().out)
        assert (shown["model"], shown["phase"]) == ("tiny", "starting")
        assert cli.main(["ps"]) == 0
        header, row = capsys.readouterr().out.splitlines()
        assert header.split()[:3] == ["PID", "URL", "MODEL"] and "starting" in row and "1 h 1 m" in row


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["admin", "status"], "no server of this user runs here"),
        (["admin", "fly"], "unknown verb 'fly'; give one of status, statistics"),
        (["admin", "status", "--socket", "/none"], "no answer on the admin socket /none"),
        (["chaos"], "no server of this user runs here"),
        (["chaos", "--url", "http://192.0.2.1:8000"], "--url is 'http://192.0.2.1:8000'"),
        (["chaos", "--url", "http://example.org"], "--url is 'http://example.org'"),
        (["chaos", "--kill-engine", "each", "5s"], "--kill-engine is 'each 5s'"),
        (["chaos", "--kill-engine", "every", "0.1s"], "--kill-engine is every 0.1 s"),
        (["chaos", "--stop-engine", "often"], "--stop-engine is 'often'"),
        (["chaos", "--streams", "0"], "--streams is 0; give 1 to 256"),
        (["chaos", "--duration", "2h"], "--duration is '2h'"),
        (["chaos", "--duration", "31m"], "--duration is 1860; give 1 to 1800"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {message}") and err.count("\n") == 1


def test_several_servers_must_be_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    with own_home() as first, own_home() as second:
        first.record(record())
        second.record(record("http://127.0.0.1:2", 2.0))
        assert cli.main(["admin", "status"]) == 2
    pid = os.getpid()
    known = f"tiny (pid {pid}, port 1), tiny (pid {pid}, port 2)"
    assert capsys.readouterr().err == f"error: 2 servers run here; give a PORT: {known}\n"
