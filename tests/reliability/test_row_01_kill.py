"""Row 1: kill -9 of the engine process, at random moments, under 32 streams.

The quick dose uses a fake model whose text shows every lost, doubled or foreign token; the whole dose the default
model too, against its own run without a fault.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.config.sources import config_from_keywords
from octavo.core.request import FinishReason, Request, SamplingParams
from octavo.frontend.engine_supervisor import EngineState, EngineSupervisor
from tests.engine.fakes import expected, make_request
from tests.reliability.deaths import Load, Stream, follow, keeping, quantile, until
from tests.reliability.scorecard import IS_WHOLE, Score
from tests.tiny_models import make_tiny_model

WIDTH = 32


async def kill_under(
    keeper: EngineSupervisor,
    make: Callable[[int], Request],
    kills: int,
    rng: random.Random,
    pause_s: float,
    is_settled: bool = False,
) -> tuple[list[Stream], list[BaseException], list[float]]:
    """Kill so many engines while WIDTH streams run; the streams, what submits raised, and the streams' gaps.

    With `is_settled` each kill waits until everybody has got over the one before, so that a gap is that of one death.
    """
    load, moments = Load(keeper, make, WIDTH), []
    has_standby = bool(keeper.report()["has_standby"])
    for _ in range(kills):
        epoch = keeper.epoch
        await until(lambda: keeper.state is EngineState.READY and len(keeper.requests) > WIDTH // 2)
        await until(lambda: not is_settled or is_quiet(keeper, has_standby), 120.0)
        await asyncio.sleep(rng.uniform(0.0, pause_s))
        moments.append(asyncio.get_running_loop().time())
        os.kill(keeper.processes["engine"], signal.SIGKILL)
        await until(lambda epoch=epoch: keeper.epoch > epoch)
        await asyncio.sleep(rng.uniform(0.1, 0.6))
    await load.stop()
    gaps = [gap for stream in load.streams for at in moments if (gap := stream.gap_over(at)) is not None]
    return load.streams, load.errors, gaps


def is_quiet(keeper: EngineSupervisor, wants_standby: bool) -> bool:
    """Whether every open request has a token of this engine, and the standby, if wanted, is there."""
    has_standby = bool(keeper.report()["has_standby"]) or not wants_standby
    return has_standby and all(entry.has_progress for entry in keeper.requests)


def judge(
    score: Score, streams: list[Stream], errors: list[BaseException], wanted: Callable[[Stream], list[int]]
) -> None:
    score.count("lost", len(errors) + sum(stream.reason is not FinishReason.LENGTH for stream in streams))
    score.count("outputs at a wrong position", sum(stream.num_misplaced for stream in streams))
    score.share("byte-equal to the run without a fault", sum(s.ids == wanted(s) for s in streams), len(streams))


def tell(score: Score, keeper: EngineSupervisor, gaps: list[float], most: float) -> None:
    report = keeper.report()
    ids, frames = report["dropped_ids"], report["dropped_frames"]
    score.tell(
        "restarts, resumed, dropped ids, dropped frames",
        f"{keeper.num_restarts}, {report['resumed_requests']}, {ids}, {frames}",
    )
    score.time("gap p95 s", quantile(gaps, 0.95), most)


async def test_row_01_streams_go_on_over_killed_engines(score: Score) -> None:
    score.of("fixed-time engine, cold")
    async with keeping("slow") as keeper:
        streams, errors, gaps = await kill_under(
            keeper, lambda n: make_request(f"r{n}", max_tokens=80), score.dose(2, 20), random.Random(1), 0.2
        )
        judge(score, streams, errors, lambda stream: expected(stream.request))
        tell(score, keeper, gaps, 6.0)
        statistics: Any = await keeper.statistics()
        score.count("blocks used at the end", statistics["scheduler"]["num_blocks_used"])
        assert keeper.num_restarts >= score.dose(2, 20) and len(streams) >= WIDTH


async def test_row_01_a_standby_takes_over(score: Score, monkeypatch: pytest.MonkeyPatch) -> None:
    score.of("fixed-time engine, standby")
    async with keeping("slow", standby=True) as keeper:
        await until(lambda: bool(keeper.report()["has_standby"]))
        streams, errors, gaps = await kill_under(
            keeper,
            lambda n: make_request(f"r{n}", max_tokens=80),
            score.dose(1, 10),
            random.Random(2),
            score.dose(0.2, 3.0),
        )
        judge(score, streams, errors, lambda stream: expected(stream.request))
        tell(score, keeper, gaps, 1.5)


SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "mirostat": {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.5},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.01},
    "sigma": {"top_n_sigma": 1.0},
    "ngrams": {"no_repeat_ngram_size": 2, "temperature": 0.3},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    "dry": {"dry_multiplier": 2.0, "temperature": 0.2},
    "typical": {"typical_p": 0.6, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
}


async def test_row_01_every_sampler_of_a_real_engine_goes_on(score: Score, tmp_path: Path) -> None:
    """What a sampler keeps of earlier tokens is made again from the ids, or (mirostat) by the same draws again."""
    score.of("tiny model, every sampler")
    folder = make_tiny_model("smollm2", tmp_path / "model")
    values = {"dtype": "float32", "threads": 1, "kv_cache_tokens": 8192}
    params = {name: SamplingParams(max_tokens=160, seed=5, ignore_eos=True, **more) for name, more in SAMPLERS.items()}
    async with keeping(config_from_keywords(str(folder), values)) as keeper:

        def start(turn: str) -> list[asyncio.Task[Stream]]:
            prompt = array("i", range(40, 60))
            requests = [Request(f"{name} {turn}", prompt, each) for name, each in params.items()]
            return [asyncio.create_task(follow(keeper, request)) for request in requests]

        whole = await asyncio.gather(*start("whole"))
        right = {stream.request.params: stream.ids for stream in whole}
        assert len({tuple(ids) for ids in right.values()}) == len(SAMPLERS)
        reading = start("killed")
        for _ in range(2):
            epoch = keeper.epoch
            await until(lambda: all(state.has_progress for state in keeper.requests) and bool(keeper.requests))
            os.kill(keeper.processes["engine"], signal.SIGKILL)
            await until(lambda epoch=epoch: keeper.epoch > epoch)
        judge(score, await asyncio.gather(*reading), [], lambda stream: right[stream.request.params])
        assert keeper.report()["resumed_requests"] >= len(SAMPLERS)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("standby", [False, True])
async def test_row_01_the_default_model(score: Score, standby: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy, 32 streams, byte-equal to what the same engine says without a fault. It has the machine's threads when
    times are judged: the gap is mostly the time to compute again what 32 streams had."""
    if IS_WHOLE:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    score.of(f"default model, {'standby' if standby else 'cold'}")
    values = {"max_model_len": 512, "kv_cache_tokens": 32768, "standby": standby}
    params = SamplingParams(max_tokens=48, temperature=0.0, seed=1, ignore_eos=True)
    rng = random.Random(3)
    prompts = [array("i", [rng.randrange(100, 40_000) for _ in range(rng.randrange(4, 24))]) for _ in range(64)]

    def make(number: int) -> Request:
        return Request(f"r{number}", prompts[number % len(prompts)], params, arrival=asyncio.get_running_loop().time())

    async with keeping(config_from_keywords("smollm2", values)) as keeper:
        if standby:
            await until(lambda: bool(keeper.report()["has_standby"]))
        whole = await asyncio.gather(*(follow(keeper, make(number)) for number in range(len(prompts))))
        right = {bytes(stream.request.prompt_token_ids or b""): stream.ids for stream in whole}
        assert keeper.num_restarts == 0
        streams, errors, gaps = await kill_under(keeper, make_again(make), score.dose(3, 20), rng, 2.0, True)
        judge(score, streams, errors, lambda stream: right[bytes(stream.request.prompt_token_ids or b"")])
        tell(score, keeper, gaps, 1.5 if standby else 6.0)


def make_again(make: Callable[[int], Request]) -> Callable[[int], Request]:
    """The same requests under other names."""
    return lambda number: make(number + 1000)
