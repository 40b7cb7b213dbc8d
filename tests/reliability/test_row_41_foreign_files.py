"""Row 41: files and folders that Octavo did not make stay as they are beside its own, whatever is run there."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.artifacts.cache_folder import make_room
from octavo.cli import main
from octavo.cli.server_registry import process_start_ticks
from tests.fake_server import FakeServer
from tests.reliability.scorecard import Score
from tests.tiny_models import make_tiny_model

TEXT = "my thesis"
COMMANDS = (
    ["ps"], ["ps", "--json"], ["top", "--once"], ["admin", "status"], ["admin", "statistics"], ["explain"],
    ["stop", "--all", "--timeout", "0.2"], ["stop", "--now", "--all", "--timeout", "0.2"],
    ["chaos", "--yes", "--streams", "1", "--duration", "1s"],
)  # fmt: skip
NAMES = {
    "journal": ["journal-00000001.seg", "journal-00000007.tmp", "journal-old.tmp", "notes.txt"],
    "batches": ["notes.txt", "files/notes.txt", "files/thesis.data", "files/thesis.new", "batches/thesis.json"],
    "recordings": ["0001.octrec", ".trial-1", "notes.txt"],
    "weights": ["thesis.octavo", "thesis.unfinished", f"{'a' * 32}.thesis.octavo", "notes.txt"],
}


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="octavo-") as short:  # pytest's are too long for a socket
        root = Path(short)
        monkeypatch.setenv("OCTAVO_RUN_DIR", str(root / "run"))
        monkeypatch.setenv("OCTAVO_CACHE_DIR", str(root / "weights"))
        monkeypatch.setenv("OCTAVO_SCRATCH_DIR", str(root / "scratch"))
        yield root


def _write(path: Path, text: str = TEXT) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (time.time() - 7200,) * 2)


def _make_foreign(root: Path, bystander: subprocess.Popen[bytes]) -> None:
    """Fill the folders: names that look like Octavo's, records that prove nothing, links to files elsewhere."""
    run, scratch = root / "run", root / "scratch"
    run.mkdir(mode=0o700)
    told = {"pid": bystander.pid, "url": "http://127.0.0.1:9", "model": "x", "admin": "/none", "begun": 1.0}
    records = ["", "{}", "[]", "\x00", json.dumps(told), json.dumps({"made": {}, "server": told})]
    made = {"format": "octavo-server-1", "name": "app-6", "inode": 1, "scratch": str(scratch / "octavo-mine"),
            "scratch_inode": 1}  # fmt: skip
    records += [json.dumps({"made": made, "server": {**told, "started": process_start_ticks(bystander.pid)}})]
    for number, record in enumerate(records):
        folder = run / f"app-{number}"
        _write(folder / "server.json", record)
        _write(folder / "thesis")
        _write(folder / "deep" / "thesis")
        (folder / "scratch").symlink_to(root / "elsewhere" / "octavo-x")
    _write(root / "elsewhere" / "octavo-x" / "thesis")
    _write(scratch / "octavo-mine" / "heartbeat")
    _write(scratch / "octavo-ab12cd_9" / "engine.sock")
    (run / "linked").symlink_to(root / "elsewhere")
    _write(run / "server.json")
    os.mkfifo(run / "app-0" / "pipe")
    for place, names in NAMES.items():
        for name in names:
            _write(root / place / name)


def _state(root: Path) -> dict[str, tuple[object, ...]]:
    """Return mode, inode, time and contents of every file and folder; a folder's time counts its own files."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        time_ns = 0 if path.is_dir() and not path.is_symlink() else status.st_mtime_ns
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found[str(path)] = (oct(status.st_mode), status.st_ino, time_ns, content)
    return found


def _serve(root: Path, model: str, flags: list[str]) -> None:
    """Serve and end well; serve and be killed; serve where the dead one was."""
    for number, is_killed in enumerate((False, True, False)):
        with FakeServer(model, root / f"log-{number}", *flags) as server:
            assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200
            if not is_killed:
                for words in COMMANDS:
                    main(list(words))
                server.process.wait(30)


def test_row_41_foreign_files_are_neither_deleted_nor_changed(
    places: Path, score: Score, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(make_tiny_model("smollm2", places / "tiny"))
    flags = [f"--{flag}={places / place}" for flag, place in
             (("journal", "journal"), ("batch-dir", "batches"), ("record", "recordings"))]  # fmt: skip
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]) as bystander:
        _make_foreign(places, bystander)
        before = _state(places)
        for words in COMMANDS:
            main(list(words))
        _serve(places, model, flags)
        make_room(places / "weights", 0, keep=places / "none")
        main(["ps"])
        after = _state(places)
        num_ended = int(bystander.poll() is not None)
        bystander.kill()
    capsys.readouterr()
    changed = [name for name, state in before.items() if after.get(name) != state]
    print("\n".join(changed))
    score.tell("files and folders of others", len(before))
    score.tell("commands run among them", 3 * len(COMMANDS) + 4)
    score.count("files and folders of others deleted or changed", len(changed))
    score.count("processes of others ended", num_ended)
    left = [path for path in (places / "run").iterdir() if str(path) not in before]
    score.count("own folders left by servers that were killed", len(left))


def test_row_41_a_folder_that_others_may_enter_is_refused(
    places: Path, score: Score, capsys: pytest.CaptureFixture[str]
) -> None:
    modes = (0o755, 0o711, 0o770, 0o1777)
    refused = changed = 0
    for mode in modes:
        run = places / "run"
        run.mkdir()
        run.chmod(mode)
        is_refused = main(["serve", "scripted:none", "--port", "0"]) == 2
        refused += is_refused and f"mode {mode:04o}" in capsys.readouterr().err
        changed += run.stat().st_mode & 0o7777 != mode
        shutil.rmtree(run)
    score.share("refused folders that others may enter", refused, len(modes))
    score.count("modes changed", changed)


def test_row_41_a_foreign_path_of_the_admin_socket_is_refused(places: Path, score: Score) -> None:
    model = str(make_tiny_model("smollm2", places / "tiny"))
    paths = [places / name for name in ("file", "live.sock")]
    _write(paths[0])
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(paths[1]))
        listener.listen(1)
        before, refused = _state(places), 0
        for path in paths:
            with pytest.raises(AssertionError, match="--admin-socket"):
                FakeServer(model, places / "log", "--admin-socket", str(path))
            refused += 1
        after = _state(places)
    score.share("paths of others refused", refused, len(paths))
    score.count("paths of others changed", sum(after.get(name) != state for name, state in before.items()))
