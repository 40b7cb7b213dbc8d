"""tools/peer_drills.py counts what it says, on a server around a fake executor."""

import json
import socket
import subprocess
import sys

import pytest

from tests.source_tree import ROOT
from tests.tiny_models import make_tiny_model


@pytest.mark.timeout(90)
def test_the_drills_of_a_server_that_survives_them(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_STEP_S", "0.03")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    model = str(make_tiny_model("smollm2", tmp_path / "tiny"))
    server = [sys.executable, "tests/fake_server.py", "serve", model, "--port", port, "--max-model-len", "256"]
    words = ["--url", f"http://127.0.0.1:{port}", "--model", "tiny", "--computes", "fake_server.py engine"]
    words += ["--rows", "1,7,14,20", "--log", str(tmp_path / "log"), "--tokens", "16", "--aborts", "16", "--fuzz", "50"]
    words += ["--abort-within", "0.1"]
    command = [sys.executable, "-m", "tools.peer_drills", *words, "--", *server]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=80, check=False)
    assert done.returncode == 0, done.stderr
    kill, aborts, fuzz, drain = (json.loads(line) for line in done.stdout.splitlines())
    assert kill["streams"] == {"whole": 16} and kill["open at the kill"] == 16
    assert sum(aborts["requests"].values()) == 16 and not any(aborts["in use afterwards"].values())
    assert fuzz["sent"] == 50 and "5xx" not in fuzz["answers"]
    assert drain["streams"] == {"whole": 16} and drain["exit status"] == 0
