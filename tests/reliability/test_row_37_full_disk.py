"""Row 37: a disk that is full under uploads, batches and recording: the cause is told, and nothing is half made."""

from __future__ import annotations

import json
import logging
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.observe.recording import recorder
from tests.fake_server import FakeServer
from tests.observe.recording.test_recorder import feed, make, some_items
from tests.reliability.scorecard import Score
from tests.reliability.test_row_21_no_room import limited

RULES = [{"contains": "slow", "say": "slowly", "delay_ms": 20}]
LARGE = 200_000  # bytes that a file may have in the first phase: the log has less, an upload more
WAIT_S = 60.0


class ScriptedServer(FakeServer):
    """The real program with a scripted model."""

    program = (sys.executable, "-m", "octavo")
    common = ("--port", "0")


class Client:
    """Asks, and counts what is answered wrongly: anything but JSON in the API's style, and a 500."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=60)
        self.num_refused = 0
        self.num_silent = 0
        self.num_without_cause = 0

    def ask(self, method: str, path: str, **options: Any) -> Any:
        answer = self._http.request(method, path, **options)
        is_json = answer.headers["content-type"].startswith("application/json")
        self.num_silent += answer.status_code == 500 or not is_json
        value = answer.json() if is_json else {}
        if answer.status_code in (503, 507):
            self.num_refused += 1
            self.num_without_cause += "File too large" not in value["error"]["message"]
            return None
        return value

    def close(self) -> None:
        self._http.close()

    def upload(self, data: bytes) -> Any:
        return self.ask("POST", "/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch"})

    def create(self, file_id: str) -> Any:
        body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        return self.ask("POST", "/v1/batches", json=body)

    def until(self, batch_id: str, is_so: Callable[[Any], bool]) -> Any:
        end = time.monotonic() + WAIT_S
        while not is_so(batch := self.ask("GET", f"/v1/batches/{batch_id}")):
            assert time.monotonic() < end, batch
            time.sleep(0.02)
        return batch


def asks(count: int, text: str) -> bytes:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 10}
    made = ({"custom_id": f"r{i}", "method": "POST", "url": "/v1/chat/completions", "body": body} for i in range(count))
    return b"".join(json.dumps(each).encode() + b"\n" for each in made)


def test_row_37_what_finds_no_room_is_refused_with_the_cause_and_leaves_nothing(tmp_path: Path, score: Score) -> None:
    count, num_asks = score.dose(5, 50), 60
    script, folder = tmp_path / "script.json", tmp_path / "batches"
    script.write_text(json.dumps(RULES))
    flags = ("--batch-dir", str(folder), "--batch-concurrency", "2")
    with ScriptedServer(f"scripted:{script}", tmp_path / "log", *flags) as server:
        client, pid = Client(server.url), server.pid("api")
        kept = {client.upload(asks(num_asks, "slow"))["id"]}
        running = client.create(next(iter(kept)))["id"]
        client.until(running, lambda batch: batch["request_counts"]["completed"] > 2)
        with limited(pid, resource.RLIMIT_FSIZE, LARGE):
            large = [client.upload(asks(2, "x" * LARGE)) for _ in range(count)]
            end = time.monotonic() + 60  # the log is written by a thread
            while (num_lines := server.text.count("File too large")) < count and time.monotonic() < end:
                time.sleep(0.05)
        with limited(pid, resource.RLIMIT_FSIZE, 1):
            small = [client.upload(asks(2, "x")) for _ in range(count)]
            batches = [client.create(next(iter(kept))) for _ in range(count)]
            waiting = client.until(running, lambda batch: batch["errors"])
            cancelled = client.ask("POST", f"/v1/batches/{running}/cancel")
            said = client.ask("POST", "/v1/completions", json={"prompt": "x", "max_tokens": 2})
        batch = client.until(running, lambda batch: batch["status"] not in ("in_progress", "finalizing"))
        content = httpx.get(f"{server.url}/v1/files/{batch['output_file_id']}/content", timeout=60).text
        kept.add(batch["output_file_id"])
        listed = {file["id"] for file in client.ask("GET", "/v1/files")["data"]}
        listed_batches = [each["id"] for each in client.ask("GET", "/v1/batches")["data"]]
        on_disk = {path.name.partition(".")[0] for path in folder.glob("*/*")}
        unfinished = [path.name for path in folder.glob("*/*.new")]
        client.close()
        assert server.end() == 0
    refused = [*large, *small, *batches, cancelled]
    assert "choices" in said and waiting["status"] == "in_progress"
    assert waiting["errors"]["data"][0]["code"] == "disk_full", waiting
    score.share("refused with 507 or 503", refused.count(None), len(refused))
    score.count("silent 500s", client.num_silent)
    score.count("refusals without the cause", client.num_without_cause)
    score.share("lines in the log for large uploads", num_lines, count)
    half_made = (listed ^ kept) | (on_disk ^ {*kept, running}) | {*unfinished, *listed_batches} - {running}
    score.count("half-made objects", len(half_made))
    answers = [json.loads(line)["custom_id"] for line in content.splitlines()]
    score.share("answers of the running batch", len(set(answers)), num_asks)
    score.count("answers twice", len(answers) - len(set(answers)))
    assert batch["status"] == "completed" and batch["errors"] is None


def test_row_37_a_recording_without_room_ends_with_one_line(
    tmp_path: Path, score: Score, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """/dev/full is written to, so that what is in a buffer fails once more when the file is closed."""
    fdopen = recorder.os.fdopen

    def full(fd: int, mode: str) -> Any:
        recorder.os.close(fd)
        return fdopen(recorder.os.open("/dev/full", recorder.os.O_WRONLY), mode)

    died: list[object] = []
    monkeypatch.setattr(recorder.os, "fdopen", full)
    monkeypatch.setattr(threading, "excepthook", died.append)
    writer = make(tmp_path)
    with caplog.at_level(logging.WARNING):
        feed(writer, some_items())
        writer.close()
    told = [record for record in caplog.records if "octavo" in record.name]
    score.count("lines besides the one with the cause", len(told) - 1)
    score.count("tracebacks", sum(record.exc_info is not None for record in told) + len(died))
    assert "No space left on device" in told[0].message and not writer.status()["is_recording"]
