"""Row 31: a soak with a fault every ten seconds: nothing is lost, and nothing grows.

60 seconds by default, half an hour under RELIABILITY=1; SOAK_S sets another time, and the row says so.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.completion_client import CompletionClient, Target
from octavo.bench.report import percentile
from octavo.cli.chaos import Drill, DrillResult, DrillRun, process_of
from tests.fake_server import FakeServer
from tests.reliability.scorecard import IS_WHOLE, Score
from tests.tiny_models import make_tiny_model

WHOLE_S = 1800.0
SOAK_S = min(WHOLE_S, float(os.environ.get("SOAK_S", WHOLE_S if IS_WHOLE else 60.0)))
WARM_UP_S = 8.0  # with a fault of each kind, so that what is made once is there before anything is counted
FAULT_S = 10.0
SETTLED_S = 20.0
MB_PER_HOUR = 20


def drill(server: FakeServer, duration_s: float, every_s: dict[str, float]) -> DrillResult:
    client = CompletionClient(Target(server.url, "tiny", timeout_s=120), keeps_texts=True)
    made = DrillRun(Drill(every_s, 16, 48, duration_s), client, lambda role: process_of(server.admin, role))
    return asyncio.run(made.run())


def settled(server: FakeServer) -> dict[str, Any]:
    """The counts that must not grow, once nobody asks for anything."""
    end = time.monotonic() + SETTLED_S
    while True:
        status = server.status()
        engine, api = status["engine"], status["api"]
        if (status["open_requests"], engine["open_requests"], status["trouble"]) == (
            0,
            0,
            None,
        ) or time.monotonic() > end:
            counts = {"fds": api["fds"], "tasks": api["tasks"]}
            return {
                **counts,
                "records": engine["open_requests"] + engine["unread_requests"],
                "rss": api["rss_bytes"],
            }
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 240)
def test_row_31_a_soak_with_faults_loses_and_leaks_nothing(tmp_path: Path, score: Score) -> None:
    model = str(make_tiny_model("smollm2", tmp_path / "tiny"))
    with FakeServer(model, tmp_path / "log") as server:
        drill(server, WARM_UP_S, {"kill_engine": 3.0, "stop_engine": 6.0})
        before = settled(server)
        begun = time.monotonic()
        outcome = drill(server, SOAK_S, {"kill_engine": FAULT_S, "stop_engine": 2.5 * FAULT_S})
        after = settled(server)
        hours = (time.monotonic() - begun) / 3600
        report = server.status()
        code = server.end()
    kinds = [kind for kind, _, _ in outcome.faults]
    score.tell(
        "soak", f"{SOAK_S:g} s, {kinds.count('kill_engine')} kills, {kinds.count('stop_engine')} stops, 16 streams"
    )
    score.tell("streams, tokens", f"{outcome.num_finished}, {outcome.num_tokens}")
    if outcome.errors:
        print(dict(outcome.errors), server.text)
    score.count("lost", outcome.num_lost + sum(outcome.errors.values()))
    score.count("duplicated or other tokens", outcome.num_duplicated)
    for name in ("fds", "tasks", "records"):
        score.count(f"growth in {name}", max(0, after[name] - before[name]))
    grown_mb = (after["rss"] - before["rss"]) / 2**20
    score.tell("api memory", f"{grown_mb:+.1f} MB in {hours * 60:.1f} min")
    if SOAK_S >= WHOLE_S:
        score.time("api memory MB/h", max(0.0, grown_mb / hours), most=MB_PER_HOUR)
    else:
        score.open(f"soaked {SOAK_S:g} s of {WHOLE_S:,g} s, so that growth of memory was not judged")
    score.tell("gap at a fault, p95 s", round(percentile(outcome.fault_gaps, 95), 2))  # a stop takes 5 s to be found
    assert outcome.faults and report["api_restarts"] == 0 and code == 0, server.text
