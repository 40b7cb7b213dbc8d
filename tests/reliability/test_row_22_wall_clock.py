"""Row 22: the wall clock jumps by an hour, to and fro, in every process of a server; no time-out is early or late."""

from __future__ import annotations

import ast
import asyncio
import os
import sys
import time
from pathlib import Path

import httpx

from tests.fake_server import FakeServer
from tests.reliability.scorecard import Score
from tests.source_tree import dotted, modules
from tests.tiny_models import make_tiny_model

# Runs in each Python process before anything else. A fourth of all looks at the clock see the other hour.
JUMPING = """
import random, time
_real, _draw = time.time, random.Random(22)
time.time = lambda: _real() + _draw.choice((-3600.0, 0.0, 0.0, 3600.0))
time.time_ns = lambda: int(time.time() * 1e9)
"""
TIMEOUT_S = 1.0
LATE_S = 60.0  # on however busy a machine; a time-out by the wall clock would be an hour late
# Where the time of day is shown to people, or compared with that of files (a journal's is older than any process).
SHOWN = {
    "octavo.artifacts.cache_folder", "octavo.frontend.journal_files", "octavo.server.context",
    "octavo.server.generation",
    "octavo.server.api.embeddings", "octavo.server.api.ollama.endpoints", "octavo.server.api.responses.mcp",
    "octavo.text.chat_template",
    # files and batches outlive a server, and their clients are told when they expire, by the calendar
    "octavo.server.api.batches.service", "octavo.server.api.batches.store", "octavo.server.api.batches.endpoints",
    "octavo.engine.observation",  # a dashboard shows when its engine began
}  # fmt: skip
CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.datetime.now", "time.localtime"}
SERVING = ("octavo.core", "octavo.engine", "octavo.server", "octavo.sandbox", "octavo.text", "octavo.artifacts")


async def ask(client: httpx.AsyncClient, number: int, max_tokens: int, timeout_s: float) -> tuple[int, float]:
    """Status and seconds of a request with a time-out."""
    body = {"prompt": f"prompt {number}", "max_tokens": max_tokens, "timeout": timeout_s, "ignore_eos": True}
    begun = time.perf_counter()
    response = await client.post("/v1/completions", json=body)
    return response.status_code, time.perf_counter() - begun


async def load(url: str) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """Requests that have the time they need, and requests that have not."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        easy = [ask(client, number, 20, 30.0) for number in range(8)]
        hard = [ask(client, number, 200, TIMEOUT_S) for number in range(8, 16)]
        done = await asyncio.gather(*easy, *hard)
    return done[:8], done[8:]


def test_row_22_a_jumping_wall_clock_moves_no_time_out(tmp_path: Path, score: Score) -> None:
    model = str(make_tiny_model("smollm2", tmp_path / "tiny"))
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(JUMPING)
    inherited = [path for path in sys.path if path]
    env = {"PYTHONPATH": os.pathsep.join([str(folder), *inherited]), "FAKE_STEP_S": "0.02"}
    with FakeServer(model, tmp_path / "log", env=env) as server:
        easy, hard = asyncio.run(load(server.url))
        report = server.status()["engine"]
        code = server.end()
    statuses = [status for status, _ in hard]
    early = sum(status != 200 for status, _ in easy) + sum(seconds < TIMEOUT_S for _, seconds in hard)
    late = sum(status != 408 or seconds > LATE_S for status, seconds in hard)
    score.count("early time-outs", early)
    score.count("late time-outs", late)
    score.count("false alarms of the watchdog", report["stalls"] + report["restarts"])
    assert code == 0 and set(statuses) == {408}, server.text


def test_row_22_the_wall_clock_is_for_people_only() -> None:
    found = {
        (module.name, dotted(node.func))
        for module in modules()
        if module.name.startswith(SERVING)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and dotted(node.func) in CLOCKS
    }
    assert {name for name, _ in found} <= SHOWN, sorted(found)
