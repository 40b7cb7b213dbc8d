"""Make the files of tests/data/old: `python -m tests.freeze.old_files`, once, at the commit whose formats are kept.

Owns: a recording, a journal with an open request, and a batch folder, each written by a real server, with the answers
that were given. Does not: read them (test_old_files does).
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.freeze.pair_calls import Call, Group, Runner, Server
from tests.freeze.pair_cases import BATCH, FORM, JSON_TYPE, LINES, form, leaving, lines, post

FOLDER = Path(__file__).resolve().parents[1] / "data" / "old"
RULES = [
    {"contains": "choices", "say": ["alpha", "beta", "gamma"]},
    {"contains": "slow", "say": "one two three four five six seven eight", "delay_ms": 50},
]
MODEL = ("scripted:script.json",)
CHAT = post("chat", "kept", headers={"idempotency-key": "kept"})
CHOICES = post("completions", "kept_choices", "choices", headers={"idempotency-key": "choices"}, n=2)
OPEN = post("completions", "open", "slow", headers={"idempotency-key": "open"}, stream=True, max_tokens=30)
BATCH_CALLS = (
    Call("upload", path="/v1/files", headers=FORM, body=form(lines(*LINES)), save={"file": "id"}),
    Call(
        "batch",
        path="/v1/batches",
        headers=JSON_TYPE,
        body={**BATCH, "input_file_id": "$file$"},
        save={"batch": "id"},
    ),
    Call(
        "over",
        "GET",
        "/v1/batches/$batch$",
        until=("status", ("completed", "failed")),
        save={"output": "output_file_id"},
    ),
    Call("output", "GET", "/v1/files/$output$/content"),
)


def group(*flags: str) -> Group:
    """A server in a folder of its own, whose model has the same name in every folder."""
    return Group("old", (*MODEL, *flags), (), {"script.json": json.dumps(RULES)})


def main() -> int:
    """Write the three, and what was answered."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        server = Server(group("--record", "recording"), folder)
        server.wait()
        runner = Runner(server)
        for call in (CHAT, CHOICES, post("embeddings", "vector")):
            runner.run(call)
        assert server.end() in (0, 143), server.log
        shutil.copytree(folder / "recording", FOLDER / "recording")
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        server = Server(group("--journal", "journal", "--batch-dir", "batches"), folder)
        server.wait()
        runner = Runner(server)
        for call in BATCH_CALLS:
            runner.run(call)
        answers = {call.name: runner.whole(call) for call in (CHAT, CHOICES)}
        runner.run(OPEN | leaving())
        time.sleep(0.1)
        server.stop()
        for name in ("journal", "batches"):
            shutil.copytree(folder / name, FOLDER / name)
    (FOLDER / "answers.json").write_text(json.dumps({**answers, "saved": runner.saved}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
