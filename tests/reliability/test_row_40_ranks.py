"""Row 40, ranks: kill -9 of random ranks under 200 streams, and a rank that is stopped.

The whole dose kills ranks of a scripted model 50 times, and of a tiny model with a standby.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from octavo.config.sources import config_from_keywords
from octavo.core.request import FinishReason, Request
from octavo.frontend.engine_supervisor import EngineSupervisor
from tests.executors.ranks import test_torch_ranks as torch_ranks
from tests.executors.ranks.test_rank_processes import expected, is_running, ranks_of, request
from tests.reliability.deaths import Load, Stream, follow, keeping, quantile, until
from tests.reliability.scorecard import Score
from tests.tiny_models import make_tiny_model

WIDTH = 200


async def kill_ranks(supervisor: EngineSupervisor, load: Load, kills: int, rng: random.Random) -> list[float]:
    """Kill a random rank so many times; return the gaps in the streams."""
    moments = []
    for _ in range(kills):
        epoch = supervisor.epoch
        await until(lambda: len(supervisor.requests) > WIDTH // 2)
        await until(lambda: all(state.has_progress for state in supervisor.requests), 120.0)
        pids = [row["pid"] for row in await ranks_of(supervisor)]
        moments.append(time.monotonic())
        os.kill(rng.choice(pids), signal.SIGKILL)
        await until(lambda epoch=epoch: supervisor.epoch > epoch)
        await until(lambda pids=pids: not any(map(is_running, pids)))
    await load.stop()
    return [gap for stream in load.streams for at in moments if (gap := stream.gap_over(at)) is not None]


def judge(score: Score, load: Load, wanted: dict[str, list[int]]) -> None:
    streams = load.streams
    score.count("lost", len(load.errors) + sum(stream.reason is not FinishReason.LENGTH for stream in streams))
    score.count("outputs at a wrong position", sum(stream.num_misplaced for stream in streams))
    equal = sum(stream.ids == wanted[stream.request.request_id] for stream in streams)
    score.share("equal to the run without a fault", equal, len(streams))


@pytest.mark.timeout(1800)
async def test_row_40_streams_go_on_over_killed_ranks(score: Score, tmp_path: Path) -> None:
    score.of("scripted model, 3 ranks, cold")
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"step_ms": 10, "rules": []}))
    values = {"tensor_parallel_size": 3, "max_num_seqs": WIDTH}
    async with keeping(config_from_keywords(f"scripted:{script}", values)) as supervisor:
        load = Load(supervisor, lambda number: request(number, 120), WIDTH)
        gaps = await kill_ranks(supervisor, load, score.dose(2, 50), random.Random(40))
        judge(score, load, {stream.request.request_id: expected(stream) for stream in load.streams})
        score.tell("restarts", supervisor.num_restarts)
        score.time("gap p95 s", quantile(gaps, 0.95), 3.0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_row_40_a_tiny_model_with_a_standby(score: Score, tmp_path: Path) -> None:
    score.of("tiny model, 2 ranks, standby")
    model = make_tiny_model("llama3", tmp_path / "model")
    of = torch_ranks.config(model, tensor_parallel_size=2, standby=True, max_num_seqs=64)

    def make(number: int) -> Request:
        one = torch_ranks.request(5 * (number % 40))  # greedy ones
        return Request(f"r{number}", one.prompt_token_ids, one.params)

    async with keeping(of) as supervisor:
        whole: list[Stream] = await asyncio.gather(*(follow(supervisor, make(number)) for number in range(40)))
        load = Load(supervisor, lambda number: make(number + 40), 64)
        rng, gaps = random.Random(41), []
        for _ in range(score.dose(2, 20)):
            epoch = supervisor.epoch
            await until(lambda: bool(supervisor.report()["has_standby"]) and len(supervisor.requests) > 32, 120.0)
            pids = [row["pid"] for row in await ranks_of(supervisor)]
            os.kill(rng.choice(pids), signal.SIGKILL)
            await until(lambda epoch=epoch: supervisor.epoch > epoch)
        await load.stop()
        report: Any = supervisor.report()
        gaps = report["recovery_gaps_s"]
        wanted = {f"r{number}": whole[number % 40].ids for number in range(40, 40 + len(load.streams) + 1)}
        judge(score, load, wanted)
        score.time("recovery p95 s", quantile(gaps, 0.95), 3.0)


async def test_row_40_a_stopped_rank_is_noticed(score: Score, tmp_path: Path) -> None:
    score.of("scripted model, 2 ranks, SIGSTOP")
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"step_ms": 10, "rules": []}))
    async with keeping(config_from_keywords(f"scripted:{script}", {"tensor_parallel_size": 2})) as supervisor:
        stream = asyncio.create_task(follow(supervisor, request(0, 600)))
        await until(lambda: any(state.has_progress for state in supervisor.requests))
        pids = [row["pid"] for row in await ranks_of(supervisor)]
        os.kill(pids[1], signal.SIGSTOP)
        stopped_at = time.monotonic()
        await until(lambda: not any(map(is_running, pids)))
        score.time("noticed after s", time.monotonic() - stopped_at, 2.5)
        found = await stream
        score.share("equal to the run without a fault", int(found.ids == expected(found)), 1)
