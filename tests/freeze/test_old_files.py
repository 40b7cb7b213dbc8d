"""Files that the version before the rebuild wrote are read, or refused by their version; nothing of them is skipped.

tests/data/old has a recording, a journal that was cut by a kill with a request open, and a folder of batches.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.freeze.old_files import CHAT, CHOICES, FOLDER, OPEN, group
from tests.freeze.pair_calls import Call, Runner, Server

ANSWERS = json.loads((FOLDER / "answers.json").read_text())
RECORD = struct.Struct("<II")  # length, and the checksum of length and body


def write_again_now(segment: Path) -> None:
    """Let a segment of the journal say that it was begun a minute ago, else its answers are too old to be kept."""
    data = segment.read_bytes()
    length, _ = RECORD.unpack_from(data)
    head = msgspec.msgpack.decode(data[RECORD.size : RECORD.size + length])
    _, _, _, _, _, mono, _, model = head  # tag, version, number, what it supersedes, boot, clocks, model
    head[4:] = ["another boot", mono, time.time() - 60.0, model]
    body = msgspec.msgpack.encode(head)
    size = struct.pack("<I", len(body))
    checksum = struct.pack("<I", zlib.crc32(size + body))
    segment.write_bytes(size + checksum + body + data[RECORD.size + length :])


@pytest.fixture
def served() -> Iterator[tuple[Server, Runner]]:
    """A server over copies of the journal and the batches, in a folder with a path short enough for its socket."""
    keep = ("--batch-keep", "1000000000")  # else they are too old to be kept
    with tempfile.TemporaryDirectory(prefix="octavo-") as name:
        folder = Path(name)
        for part in ("journal", "batches"):
            shutil.copytree(FOLDER / part, folder / part)
            for path in (folder / part, *(folder / part).rglob("*")):
                path.chmod(0o700 if path.is_dir() else 0o600)
        for segment in (folder / "journal").glob("*.seg"):
            write_again_now(segment)
        server = Server(group("--journal", "journal", "--batch-dir", "batches", *keep), folder)
        try:
            server.wait()
            yield server, Runner(server)
        finally:
            server.stop()


def test_an_old_journal_answers_retries_or_is_refused_by_its_version(served: tuple[Server, Runner]) -> None:
    server, runner = served
    assert runner.run(Call("health", "GET", "/health"))["body"]["journal"]["state"] == "on"
    if "journal-" in server.log and "version" in server.log:
        return  # told, and left out
    for call in (CHAT, CHOICES):
        old, new = ANSWERS[call.name], runner.whole(call)
        assert {**new, "timings": None} == {**old, "timings": None}, "the answer that was given then"
    ended = runner.run(OPEN)
    texts = [event["data"]["choices"][0]["text"] for event in ended["events"]["list"] if event["data"] != "[DONE]"]
    assert "".join(texts) == "one two three four five six se", "the open request went on"


def test_an_old_folder_of_batches_is_served(served: tuple[Server, Runner]) -> None:
    _, runner = served
    runner.saved |= ANSWERS["saved"]
    batch = runner.run(Call("over", "GET", "/v1/batches/$batch$"))
    assert batch["status"] == 200 and batch["body"]["status"] == "completed"
    assert batch["body"]["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    output = runner.run(Call("output", "GET", "/v1/files/$output$/content"))
    assert [(line["custom_id"], line["response"]["status_code"]) for line in output["lines"]] == [
        ("a", 200),
        ("c", 200),
    ]
    assert runner.run(Call("input", "GET", "/v1/files/$file$/content"))["status"] == 200


@pytest.mark.parametrize("command", ["replay", "trace"])
def test_an_old_recording_is_read_or_refused_by_its_format(command: str, tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "recording", tmp_path / "recording")
    flags = ["--perfetto", "trace.json"] if command == "trace" else []
    words = [sys.executable, "-m", "octavo", command, "recording", *flags]
    env = {**os.environ, "OCTAVO_RUN_DIR": str(tmp_path / "run")}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    said = done.stdout + done.stderr
    assert "Traceback" not in said
    if done.returncode == 2:
        assert "is of format 1, this Octavo reads" in said
        return
    assert done.returncode == 0, said
    if command == "trace":
        assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_another_format_of_a_recording_is_refused_by_its_number(tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "recording", tmp_path / "recording")
    [segment] = (tmp_path / "recording").glob("*.octrec")
    data = segment.read_bytes()
    mark = data.index(struct.pack("<H", 1))
    segment.write_bytes(data[:mark] + struct.pack("<H", 99) + data[mark + 2 :])
    words = [sys.executable, "-m", "octavo", "replay", "recording"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "is of format 99, this Octavo reads" in done.stderr
