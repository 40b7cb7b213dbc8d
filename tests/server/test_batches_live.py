"""Batches of a real server: large uploads over a socket, a server that is killed, an engine that is."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fake_server import FakeServer

RULES = [{"contains": "slow", "say": "slowly", "delay_ms": 10}]


class ScriptedServer(FakeServer):
    """The real program with a scripted model."""

    program = (sys.executable, "-m", "octavo")
    common = ("--port", "0")


@pytest.fixture
def start(tmp_path: Path) -> Callable[[], ScriptedServer]:
    script = tmp_path / "script.json"
    script.write_text(json.dumps(RULES))

    def start() -> ScriptedServer:
        flags = ("--batch-dir", str(tmp_path / "batches"), "--batch-concurrency", "2", "--max-upload-bytes", "12M")
        return ScriptedServer(f"scripted:{script}", tmp_path / "log", *flags)

    return start


def lines(count: int, text: str) -> bytes:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 10}
    asks = ({"custom_id": f"r{i}", "method": "POST", "url": "/v1/chat/completions", "body": body} for i in range(count))
    return b"".join(json.dumps(ask).encode() + b"\n" for ask in asks)


def upload(server: ScriptedServer, data: bytes) -> httpx.Response:
    form: dict[str, Any] = {"files": {"file": ("in.jsonl", data)}, "data": {"purpose": "batch"}}
    return httpx.post(f"{server.url}/v1/files", timeout=60, **form)


def create(server: ScriptedServer, data: bytes) -> str:
    file_id = upload(server, data).json()["id"]
    body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch_id: str = server.post("/v1/batches", body)[2]["id"]
    return batch_id


def until(server: ScriptedServer, batch_id: str, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    end = time.monotonic() + 60
    while not is_so(batch := server.get(f"/v1/batches/{batch_id}")[2]):
        assert time.monotonic() < end, batch
        time.sleep(0.02)
    return batch


def custom_ids(server: ScriptedServer, file_id: str) -> list[str]:
    text = httpx.get(f"{server.url}/v1/files/{file_id}/content", timeout=60).text
    return sorted(json.loads(line)["custom_id"] for line in text.splitlines())


def test_a_file_larger_than_a_body_is_taken_and_a_larger_one_refused(start: Callable[[], ScriptedServer]) -> None:
    with start() as server:
        data = lines(2, "x" * (5 << 20))
        answer = upload(server, data)
        assert answer.status_code == 200 and answer.json()["bytes"] == len(data) > 8 << 20
        assert httpx.get(f"{server.url}/v1/files/{answer.json()['id']}/content", timeout=60).content == data
        try:
            answer = upload(server, b"x" * (13 << 20))
            assert answer.status_code == 413
        except httpx.TransportError:
            pass  # it was told so, and cut, before it read the answer
        assert server.get("/livez")[0] == 200
        assert server.end() == 0


def test_I07_a_batch_goes_on_after_its_engine_and_its_server_were_killed(start: Callable[[], ScriptedServer]) -> None:
    count = 40
    with start() as server:
        batch_id = create(server, lines(count, "slow"))
        until(server, batch_id, lambda batch: batch["request_counts"]["completed"] >= 4)
        os.kill(server.pid("engine"), signal.SIGKILL)
        until(server, batch_id, lambda batch: batch["request_counts"]["completed"] >= 10)
        os.kill(server.pid("api"), signal.SIGKILL)  # its parent starts another
        batch = until(server, batch_id, lambda batch: batch["request_counts"]["completed"] >= 16)
        assert batch["status"] == "in_progress"
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(30)
    with start() as server:
        batch = until(server, batch_id, lambda batch: batch["status"] == "completed")
        assert batch["request_counts"] == {"total": count, "completed": count, "failed": 0}
        assert custom_ids(server, batch["output_file_id"]) == sorted(f"r{i}" for i in range(count))
        assert batch["error_file_id"] is None
        assert server.end() == 0
