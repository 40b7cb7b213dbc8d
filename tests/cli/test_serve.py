"""`octavo serve` as a process, on a tiny model: it answers, drains on a signal, and tells when its engine dies."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request

import psutil
import pytest
from tests.tiny_models import make_tiny_model

from octavo import cli

COMMON = ["--threads", "1", "--dtype", "float32", "--kv-cache-tokens", "1K", "-np", "4", "--port", "0"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(make_tiny_model("smollm2", tmp_path_factory.mktemp("serve") / "tiny"))


class Server:
    def __init__(self, model: str, *flags: str) -> None:
        command = [sys.executable, "-m", "octavo", "serve", model, *COMMON, *flags]
        environ = {**os.environ, "PYTHONPATH": "src", "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ)
        self.lines: list[str] = []
        for line in self.process.stderr:
            self.lines.append(line)
            if line.startswith("try "):
                break
        else:
            raise AssertionError("".join(self.lines))
        self.url = re.search(r"http://[^/]+", "".join(self.lines))[0]

    def post(self, path: str, body: object) -> dict:
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def end(self, number: int) -> tuple[int, str]:
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        rest = self.process.communicate(timeout=30)[1]
        return self.process.returncode, rest

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=30)


@pytest.mark.parametrize("flags", [(), ("--in-process",)])
def test_it_answers_and_drains(model, flags) -> None:
    with Server(model, *flags) as server:
        body = {"model": "tiny", "prompt": "the cat", "max_tokens": 3, "temperature": 0}
        answer = server.post("/v1/completions", body)
        assert answer["usage"]["completion_tokens"] <= 3
        several = server.post("/v1/completions", {**body, "n": 3, "temperature": 1, "seed": 4})
        assert [choice["index"] for choice in several["choices"]] == [0, 1, 2]
        assert answer["usage"]["prompt_tokens"] == several["usage"]["prompt_tokens"]
        code, rest = server.end(signal.SIGTERM)
    assert code == 0, rest
    assert "Traceback" not in rest
    assert "KV pool   1,024 tokens" in "".join(server.lines)
    shown = ["model", "KV", *(["off"] if flags else []), "serving", "open", "stop", "try"]
    assert [line.split()[0] for line in server.lines] == shown


@pytest.mark.slow  # two engines with torch; tests/cli/test_serve_lives.py has the quick twin
def test_a_dead_engine_is_replaced(model) -> None:
    with Server(model) as server:
        body = {"model": "tiny", "prompt": "the cat", "max_tokens": 8, "temperature": 0}
        before = server.post("/v1/completions", body)["choices"]
        (api,) = psutil.Process(server.process.pid).children()
        (engine,) = (child for child in api.children() if "octavo.assembly" in child.cmdline())
        engine.kill()
        assert server.post("/v1/completions", body)["choices"] == before
        code, rest = server.end(signal.SIGTERM)
    assert code == 0
    assert "the engine of epoch 1 ended (killed by SIGKILL, idle after step " in rest and "Traceback" not in rest


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--served-model-name", "mine", "smollm2"], "MODEL is missing; give it first: octavo serve MODEL "),
        (["--host", "1.2.3.4"], "--host is '1.2.3.4' and there is no key"),
        (["--host", "1.2.3.4", "--api-key", "a"], "an --api-key has 1 characters, and can be guessed, while --host is"),
        (["--host", "1.2.3.4", "--api-key", " "], "--api-key is empty; give a key"),
        (["nosuch"], "unknown model 'nosuch'; give a name from octavo list"),
    ],
)
def test_mistakes_are_told_in_one_line(capfd, words, message) -> None:
    assert cli.main(["serve", "--port", "0", *words]) == 2
    assert capfd.readouterr().err.startswith(f"error: {message}")


def test_an_engine_that_cannot_open_is_one_line(model, capfd) -> None:
    words = ["serve", model, "--threads", "1", "--dtype", "float32", "--kv-cache-tokens", "5", "--port", "0"]
    assert cli.main(words) == 2
    err = capfd.readouterr().err
    assert err.startswith("error: --kv-cache-tokens 5 holds no KV block of 16 tokens")
    assert err.count("\n") == 1


def test_the_supervisor_and_the_api_process_start_without_what_is_heavy() -> None:
    code = (
        "import sys, octavo.cli.serve, octavo.cli.api_process\n"
        "sys.exit(' '.join({'torch', 'numpy', 'starlette', 'uvicorn', 'jinja2'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
