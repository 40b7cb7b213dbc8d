"""The records of running servers: found while they live, whoever held the process's number before."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import cli
from octavo.cli.server_registry import (
    RUN_DIR,
    ServerRecord,
    find_servers,
    open_server_folder,
    process_start_ticks,
    send_signal,
)
from octavo.errors import ConfigError


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="octavo-") as short:  # pytest's are too long for a socket
        monkeypatch.setenv(RUN_DIR, str(Path(short) / "run"))
        yield Path(short) / "run"


def record(url: str = "http://127.0.0.1:1", started_at: float = 1.0, admin: str = "/none/admin.sock") -> ServerRecord:
    return ServerRecord(os.getpid(), url, "tiny", admin, started_at)


def test_a_server_is_found_while_it_lives(folder: Path) -> None:
    assert find_servers() == []
    with open_server_folder() as first, open_server_folder() as second:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and stat.S_IMODE(first.path.stat().st_mode) == 0o700
        assert find_servers() == [], "one that has not told yet"
        second.publish(record(started_at=2.0))
        first.publish(record("http://127.0.0.1:2"))
        assert [found.started_at for found in find_servers()] == [1.0, 2.0]
    assert find_servers() == [] and list(folder.iterdir()) == []


def kill_a_server() -> Path:
    """Make a server that is killed while it runs; return its folder."""
    script = (
        "import os\nfrom octavo.cli.server_registry import ServerRecord, open_server_folder\n"
        "with open_server_folder() as home:\n    print(home.path)\n"
        f"    home.publish(ServerRecord({os.getpid()}, 'http://127.0.0.1:1', 'tiny', '/x', 1.0))\n"
        "    os.kill(os.getpid(), 9)"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-uc", script], stdout=subprocess.PIPE, text=True, env=environ)
    return Path(done.stdout.strip())


def test_what_a_killed_server_left_is_removed(folder: Path) -> None:
    path = kill_a_server()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path / "admin.sock"))
    assert list(folder.iterdir()) == [path]
    assert find_servers() == [], "although a process of that number lives"
    assert list(folder.iterdir()) == []


def test_files_of_others_in_a_dead_servers_folder_stay(folder: Path, tmp_path: Path) -> None:
    path = kill_a_server()
    others = [path / "thesis", path / "notes" / "thesis", tmp_path / "thesis"]
    for other in others:
        other.parent.mkdir(exist_ok=True)
        other.write_text("mine")
    (path / "admin.sock").symlink_to(tmp_path / "thesis")
    assert find_servers() == []
    assert [other.read_text() for other in others] == ["mine"] * 3
    assert (path / "admin.sock").is_symlink() and not (path / "server.json").exists()


def test_the_record_of_an_older_version_proves_its_folder(folder: Path) -> None:
    """It named a second folder too, in which its engines had theirs."""
    path = kill_a_server()
    write_proof(path, scratch="/dev/shm/octavo-thesis", scratch_inode=1)
    assert find_servers() == [] and not path.exists()


def proof_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "server.json").read_text())
    return found


def write_proof(path: Path, **changes: object) -> None:
    proof = proof_of(path)
    proof["made"].update(changes)
    (path / "server.json").write_text(json.dumps(proof))


def _copied(path: Path) -> None:
    """As a backup has it: the name is the same, and the folder is another one."""
    aside = path.with_name("aside")
    path.rename(aside)
    shutil.copytree(aside, path, symlinks=True)
    path.chmod(0o700)
    shutil.rmtree(aside)


def _linked(path: Path) -> None:
    real = path.with_name("real")
    path.rename(real)
    path.symlink_to(real)


def _record_is_a_link(path: Path) -> None:
    (path / "server.json").rename(path / "other.json")
    (path / "server.json").symlink_to(path / "other.json")


UNPROVEN: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: (path / "server.json").write_text(""),
    "no record": lambda path: (path / "server.json").write_text('{"pid": 1}'),
    "of another format": lambda path: write_proof(path, format="octavo-server-0"),
    "of another name": lambda path: write_proof(path, name="x"),
    "of another inode": lambda path: write_proof(path, inode=1),
    "renamed": lambda path: path.rename(path.with_name("app")),
    "open to others": lambda path: path.chmod(0o755),
    "a pipe": lambda path: ((path / "server.json").unlink(), os.mkfifo(path / "server.json")),
    "a folder": lambda path: ((path / "server.json").unlink(), (path / "server.json").mkdir()),
    "a copy": _copied,
    "a link to a folder": _linked,
    "a link to a record": _record_is_a_link,
}


@pytest.mark.parametrize("kind", UNPROVEN)
def test_a_folder_without_proof_stays(folder: Path, kind: str) -> None:
    path = kill_a_server()
    (path / "thesis").write_text("mine")
    UNPROVEN[kind](path)
    before = sorted(folder.rglob("*"))
    assert find_servers() == []
    assert sorted(folder.rglob("*")) == before


def test_a_folder_of_the_user_is_refused_and_not_changed(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with (
        pytest.raises(ConfigError, match=rf"{folder}, is open to other users \(mode 0755\); chmod 700 it"),
        open_server_folder(),
    ):
        pass
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755 and list(folder.iterdir()) == []


def test_a_full_disk_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(ConfigError, match="No space left"), open_server_folder():
        pass
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="processes are told apart by /proc")
def test_a_process_that_has_a_servers_number_is_not_signalled(capsys: pytest.CaptureFixture[str]) -> None:
    """A record that a container, or a backup that is locked, shows to this machine."""
    with (
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as innocent,
        open_server_folder() as home,
    ):
        home.publish(ServerRecord(innocent.pid, "http://127.0.0.1:1", "tiny", "/none/admin.sock", 1.0, "17"))
        assert cli.main(["stop", "--timeout", "0.1"]) == 1
        assert f"process {innocent.pid} is not tiny at http://127.0.0.1:1" in capsys.readouterr().err
        assert innocent.poll() is None
        innocent.kill()


def test_only_the_process_that_is_meant_is_signalled() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        server = ServerRecord(process.pid, "", "", "", 0.0, process_start_ticks(process.pid))
        assert send_signal(server, signal.SIGTERM)
        assert process.wait(30) == -signal.SIGTERM
    assert not send_signal(server, signal.SIGTERM)


def test_a_folder_that_cannot_be_used_is_told(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(RUN_DIR, str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=RUN_DIR), open_server_folder():
        pass
    monkeypatch.setenv(RUN_DIR, str(folder))
    with open_server_folder() as home:
        assert home.admin_path(None).parent == home.path
        with pytest.raises(ConfigError, match="--admin-socket"):
            home.admin_path("/" + "x" * 200)


def test_ps_shows_one_that_does_not_answer_yet(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ps"]) == 0
    assert "no server" in capsys.readouterr().out
    with open_server_folder() as home:
        home.publish(record(started_at=time.time() - 3700))
        assert cli.main(["ps", "--json"]) == 0
        (shown,) = json.loads(capsys.readouterr().out)
        assert (shown["model"], shown["phase"]) == ("tiny", "starting")
        assert cli.main(["ps"]) == 0
        header, row = capsys.readouterr().out.splitlines()
        assert header.split()[:3] == ["PID", "URL", "MODEL"] and "starting" in row and "1 h 01 m" in row


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
        (["chaos", "--streams", "0"], "--streams is 0; give a whole number from 1 to 256"),
        (["chaos", "--duration", "2h"], "--duration is 7200 s; give 1 to 1800 s"),
        (["chaos", "--duration", "31m"], "--duration is 1860 s; give 1 to 1800 s"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {message}") and err.count("\n") == 1


def test_several_servers_must_be_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    with open_server_folder() as first, open_server_folder() as second:
        first.publish(record())
        second.publish(record("http://127.0.0.1:2", 2.0))
        assert cli.main(["admin", "status"]) == 2
    pid = os.getpid()
    known = f"tiny (pid {pid}, port 1), tiny (pid {pid}, port 2)"
    assert capsys.readouterr().err == f"error: 2 servers run here; give a PORT: {known}\n"
