"""Row 5: one request that kills the engine in every step that it has a part in, among 31 good ones."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from octavo.core.request import FinishError, FinishReason, SamplingParams
from octavo.errors import ErrorKind
from octavo.server.generation import failure_of
from tests.engine.fakes import expected, make_request
from tests.reliability.deaths import Stream, follow, keeping
from tests.reliability.scorecard import Score


async def run(names: list[str]) -> tuple[list[Stream], dict[str, object]]:
    async with keeping("slow") as keeper:
        streams = await asyncio.gather(*(follow(keeper, make_request(name, max_tokens=50)) for name in names))
        report = keeper.report()
        after = await follow(keeper, make_request("after", max_tokens=5))
        assert after.ids == expected(after.request)
        return streams, report


async def test_row_05_one_killer_among_31_good(score: Score) -> None:
    """All at once: it is in the first batch, when nobody has a token that clears him."""
    names = [f"r{i}" for i in range(31)]
    names.insert(score.dose(12, 3), "poison")
    streams, report = await run(names)
    bad = next(stream for stream in streams if stream.request.request_id == "poison")
    good = [stream for stream in streams if stream is not bad]
    lost = [s for s in good if s.ids != expected(s.request) or s.reason is not FinishReason.LENGTH]
    score.count("other requests lost", len(lost))
    score.count("restarts", int(str(report["restarts"])), most=3)
    assert bad.reason is FinishReason.ERROR and bad.error is not None and bad.error.kind is ErrorKind.STEP_FAILED
    assert report["suspects_failed"] == 1
    score.tell("answer to the crashing request", failure_code(bad.error))


def failure_code(error: FinishError | None) -> str:
    """What the client of a failed request is told."""
    failure = failure_of(FinishReason.ERROR, error)
    assert (failure.status, failure.code) == (500, "engine_crash_suspect")
    return f"{failure.status} {failure.code}"


async def test_row_05_it_comes_when_the_good_are_under_way(score: Score) -> None:
    async with keeping("slow") as keeper:
        following = [asyncio.create_task(follow(keeper, make_request(f"r{i}", max_tokens=90))) for i in range(31)]
        await asyncio.sleep(0.3)
        bad = await follow(keeper, make_request("poison", max_tokens=50))
        good = await asyncio.gather(*following)
        lost = [s for s in good if s.ids != expected(s.request) or s.reason is not FinishReason.LENGTH]
        score.count("other requests lost", len(lost))
        score.count("restarts", keeper.num_restarts, most=3)
        assert bad.error is not None and bad.error.kind is ErrorKind.STEP_FAILED and bad.ids == []


async def test_row_05_one_that_kills_while_its_grammar_is_built(score: Score) -> None:
    """No step has a part in it, so nobody's batch names it: it is accused because it is not taken yet."""
    venom = replace(make_request("venom"), params=SamplingParams(max_tokens=5, seed=1, grammar="venom"))
    async with keeping("slow") as keeper:
        following = [asyncio.create_task(follow(keeper, make_request(f"r{i}", max_tokens=90))) for i in range(5)]
        bad = await follow(keeper, venom)
        good = await asyncio.gather(*following)
        lost = [s for s in good if s.ids != expected(s.request) or s.reason is not FinishReason.LENGTH]
        score.count("other requests lost beside a crashing grammar", len(lost))
        score.count("restarts for a crashing grammar", keeper.num_restarts, most=3)
        assert bad.error is not None and bad.error.kind is ErrorKind.STEP_FAILED and bad.ids == []
