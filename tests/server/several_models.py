"""A real api process with several scripted models, each loaded on demand: real engine processes and a real socket."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec

from octavo.cli.api_process import ApiTask
from octavo.cli.servers import call_admin
from octavo.fleet.model_configs import served_models
from octavo.frontend.api_supervisor import READY
from tests.settings import load_config

SRC = Path(__file__).resolve().parents[2] / "src"
LONG_S = 60.0


def write_script(folder: Path, name: str, **rule: Any) -> str:
    """A model that says its own name and its prompt's last message."""
    path = folder / f"{name}.json"
    path.write_bytes(msgspec.json.encode({"rules": [{"say": f"I am {name}.", **rule}]}))
    return f"scripted:{path}"


class SeveralModels:
    """A running api process; `models` are the words of `octavo fleet MODEL ...`."""

    def __init__(self, folder: Path, models: tuple[str, ...], **settings: Any) -> None:
        self.folder = folder
        self.admin = str(folder / "admin")
        config = load_config({"kv_cache_tokens": 4096, "max_sequences": 8, "port": 0, **settings})
        served = served_models(config, models)
        task = ApiTask(served[0].config, self.admin, models=served, is_quiet=True)
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        reading, writing = os.pipe()
        command = [sys.executable, "-m", "octavo.cli.api_process", "--listener", str(listener.fileno())]
        self.log = folder / "log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--status", str(writing)],
                stdin=subprocess.PIPE,
                stderr=log,
                pass_fds=(listener.fileno(), writing),
                env={**os.environ, "PYTHONPATH": str(SRC)},
            )
        os.close(writing)
        listener.close()
        assert self.process.stdin is not None
        self.process.stdin.write(task.line())
        self.process.stdin.flush()
        seen = b""
        while READY not in seen:
            part = os.read(reading, 64)
            if not part:
                raise AssertionError(self.log.read_text())
            seen += part
        self._status = reading
        self.client = httpx.Client(base_url=self.url, timeout=LONG_S)
        self.closing = [self.client]  # closed with the server

    def post(self, path: str, body: Mapping[str, Any], **options: Any) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def chat(self, model: str | None, **fields: Any) -> httpx.Response:
        named = {} if model is None else {"model": model}
        return self.post("/v1/chat/completions", {**named, "messages": [{"role": "user", "content": "hi"}], **fields})

    def says(self, model: str | None, **fields: Any) -> str:
        answer = self.chat(model, **fields)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    def states(self) -> dict[str, str]:
        return {card["id"]: card["state"] for card in self.client.get("/v1/models").json()["data"]}

    def until_state(self, model: str, state: str) -> None:
        end = time.monotonic() + LONG_S
        while self.states()[model] != state:
            assert time.monotonic() < end, (self.states(), self.log.read_text())
            time.sleep(0.02)

    def verb(self, verb: str, argument: str = "") -> Any:
        return call_admin(self.admin, verb, argument)

    def kill(self) -> None:
        self.process.kill()
        self._end()

    def _end(self) -> None:
        self.process.communicate(timeout=LONG_S)
        for client in self.closing:
            client.close()
        os.close(self._status)

    def __enter__(self) -> SeveralModels:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(LONG_S)
            finally:
                self.kill()
