"""Engines of several rank processes under an EngineSupervisor: the same ids as one process, whatever is killed.

The model is scripted: its ranks exchange no tensors, so that these tests are of processes, connections and digests.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.config import Config
from octavo.config.sources import config_from_keywords
from octavo.core.request import FinishReason, Request
from octavo.errors import CapacityError
from octavo.frontend.engine_supervisor import EngineSupervisor
from tests.reliability.deaths import Stream, follow, keeping, until

ENGINE = str(Path(__file__).with_name("ranked_engine.py"))
STEP_MS = 4


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "script.json"
    path.write_text(json.dumps({"step_ms": STEP_MS, "rules": []}))
    return path


def config(script: Path, ranks: int, **changes: Any) -> Config:
    return config_from_keywords(f"scripted:{script}", {"tensor_parallel_size": ranks, "max_num_seqs": 64, **changes})


def request(number: int, num_tokens: int = 40) -> Request:
    """Return a request whose answer repeats its prompt."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0, seed=0)
    return Request(f"r{number}", array("i", [36 + (number * 7 + index) % 90 for index in range(9)]), params)


def expected(stream: Stream) -> list[int]:
    prompt = list(stream.request.prompt_token_ids or ())
    length = stream.request.params.max_tokens or 0
    return [prompt[index % len(prompt)] for index in range(length)]


def check(streams: Sequence[Stream]) -> None:
    for stream in streams:
        assert (stream.reason, stream.num_misplaced) == (FinishReason.LENGTH, 0)
        assert stream.ids == expected(stream), stream.request.request_id


async def ranks_of(supervisor: EngineSupervisor) -> list[dict[str, Any]]:
    found: Any = (await supervisor.statistics())["ranks"]
    return list(found.values())


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # gone, or gone while it was read
        return False
    return state != "Z"


@asynccontextmanager
async def engines(of: Config, kind: str = "", file: Path | None = None) -> AsyncIterator[EngineSupervisor]:
    async with keeping(of, (sys.executable, ENGINE, kind, str(file)) if kind else None) as supervisor:
        yield supervisor


@pytest.mark.parametrize("ranks", [2, 4])
async def test_S18_ids_are_those_of_one_process(script: Path, ranks: int) -> None:
    async with engines(config(script, ranks)) as supervisor:
        check(await asyncio.gather(*(follow(supervisor, request(number)) for number in range(200))))
        rows = await ranks_of(supervisor)
        assert [row["rank"] for row in rows] == list(range(ranks))
        assert {row["state"] for row in rows} == {"running"} and len({row["pid"] for row in rows}) == ranks
        assert [place.pid for place in supervisor.capacity.ranks] == [row["pid"] for row in rows]
        listed = supervisor.replicas[0].report()["ranks"]
        assert isinstance(listed, list) and [row["pid"] for row in listed] == [row["pid"] for row in rows]
    await until(lambda: not any(is_running(row["pid"]) for row in rows))


async def test_streams_go_on_over_killed_ranks(script: Path) -> None:
    rng = random.Random(5)
    async with engines(config(script, 3)) as supervisor:
        streams = [asyncio.create_task(follow(supervisor, request(number, 700))) for number in range(24)]
        for _ in range(3):
            epoch = supervisor.epoch
            await until(lambda: all(state.has_progress for state in supervisor.requests))
            pids = [row["pid"] for row in await ranks_of(supervisor)]
            os.kill(rng.choice(pids), signal.SIGKILL)
            await until(lambda epoch=epoch: supervisor.epoch > epoch)
            await until(lambda pids=pids: not any(map(is_running, pids)))
        check(await asyncio.gather(*streams))
        assert supervisor.num_restarts == 3


async def test_an_idle_engine_notices_a_killed_rank(script: Path) -> None:
    async with engines(config(script, 2)) as supervisor:
        check([await follow(supervisor, request(0))])
        os.kill((await ranks_of(supervisor))[1]["pid"], signal.SIGKILL)
        await until(lambda: supervisor.epoch == 2)
        check([await follow(supervisor, request(1))])


async def test_a_stopped_rank_is_noticed(script: Path) -> None:
    """By its silence (2 s), before the watchdog sees a stalled step (5 s)."""
    async with engines(config(script, 2)) as supervisor:
        stream = asyncio.create_task(follow(supervisor, request(0, 900)))
        await until(lambda: any(state.has_progress for state in supervisor.requests))
        pids = [row["pid"] for row in await ranks_of(supervisor)]
        os.kill(pids[1], signal.SIGSTOP)
        await until(lambda: not any(map(is_running, pids)))
        check([await stream])
        assert supervisor.num_stalls == 0


async def test_S18_an_unequal_digest_ends_the_epoch(
    script: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with engines(config(script, 2), "tampered", tmp_path / "once") as supervisor:
        check(await asyncio.gather(*(follow(supervisor, request(number, 60)) for number in range(8))))
        assert supervisor.num_restarts == 1
    assert "executed another step than rank 0: step 30" in capfd.readouterr().err


async def test_one_ranks_refusal_is_the_error(script: Path, tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match=r"rank 1 \(process \d+ on localhost\): the pool holds nothing"):
        async with engines(config(script, 2), "refused", tmp_path / "once"):
            raise AssertionError("it opened")


def test_the_library_runs_ranks_too(script: Path) -> None:
    with LLM(f"scripted:{script}", tensor_parallel_size=2) as llm:
        assert (
            llm.generate("abc", SamplingParams(max_tokens=5, temperature=0, ignore_eos=True))[0].outputs[0].text
            == "abcab"
        )
