"""HTTP over the real Sessions, client, loop and scheduler; only the model's arithmetic is played."""

import asyncio
import random
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from octavo.core.limits import Limits
from octavo.core.request import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.engine.loop import EngineLoop
from octavo.executors.protocol import ExecutorSpec
from octavo.frontend.local_client import LocalClient
from tests.beam_reference import beam_reference
from tests.core import invariants
from tests.fake_model import FakeExecutor, oracle
from tests.server.fakes import EOS, Harness, Wire, events, make_text

VOCAB = 258
SEED = 3
LIMITS = Limits(block_size=16, num_blocks=(64,), max_model_len=512, vocab_size=VOCAB, max_batch_tokens=256)


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Harness, EngineLoop]]:
    """An app over an engine in this process; leaving it checks that nothing leaked."""
    executor = FakeExecutor(vocab_size=VOCAB, max_model_len=512)
    executor.open(ExecutorSpec(LIMITS.max_sequences, LIMITS.max_batch_tokens, 16, num_blocks=64))
    scheduler = Scheduler(LIMITS)
    loop = EngineLoop(scheduler, executor)
    client = LocalClient(loop)
    harness = Harness(engine=client)  # type: ignore[arg-type]
    try:
        yield harness, loop
    finally:
        await client.close()
    assert loop.failure is None
    invariants.check_no_leaks(scheduler)


def expected(prompt: str, max_tokens: int) -> tuple[list[int], str]:
    """Ids and shown text of the answer under SEED."""
    tokenizer = make_text().tokenizer
    ids = oracle(tokenizer.encode(prompt), max_tokens, VOCAB, (EOS,), SamplingParams(seed=SEED))
    shown = ids[:-1] if ids[-1] == EOS else ids
    return ids, tokenizer.decode(array("i", shown))


async def test_the_answers_are_the_oracles_whole_and_streamed() -> None:
    async with served() as (harness, _):
        for length in (1, 5, 40):
            fields: dict[str, Any] = {"prompt": f"prompt {length}", "seed": SEED, "max_tokens": length}
            ids, text = expected(fields["prompt"], length)
            body = (await harness.complete(**fields)).json()
            assert body["choices"][0]["text"] == text
            assert body["usage"]["completion_tokens"] == len(ids)
            chunks = events((await harness.complete(stream=True, **fields)).text)[:-1]
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
            assert body["timings"]["total_s"] > 0


async def test_many_at_once_with_clients_that_leave_lose_nothing() -> None:
    rng = random.Random(7)
    async with served() as (harness, _):
        stayers = [
            asyncio.create_task(harness.complete(prompt=f"stay {i}", seed=SEED, max_tokens=20 + i, stream=bool(i % 2)))
            for i in range(12)
        ]
        leavers = [
            Wire(harness.app, "/v1/completions", {"prompt": f"leave {i}", "max_tokens": 400, "stream": bool(i % 2)})
            for i in range(8)
        ]
        tasks = [wire.start() for wire in leavers]
        for wire in leavers:
            await asyncio.sleep(rng.random() * 0.01)
            wire.leave()
        for i, response in enumerate(await asyncio.gather(*stayers)):
            text = expected(f"stay {i}", 20 + i)[1]
            if i % 2:
                got = "".join(chunk["choices"][0]["text"] for chunk in events(response.text)[:-1])
            else:
                got = response.json()["choices"][0]["text"]
            assert got == text
        await asyncio.gather(*tasks)
        async with asyncio.timeout(60):
            while (await harness.engine.statistics())["loop"]["open_requests"]:  # type: ignore[index]
                await asyncio.sleep(0.005)


async def test_P03_choices_and_beams_are_the_oracles_whole_and_streamed() -> None:
    tokenizer, prompt = make_text().tokenizer, "several of them"
    params = SamplingParams(seed=SEED, n=3)
    said = []
    for choice in range(3):
        ids = oracle(tokenizer.encode(prompt), 20, VOCAB, (EOS,), params, choice=choice)
        said.append((ids, tokenizer.decode(array("i", ids[:-1] if ids[-1] == EOS else ids))))
    async with served() as (harness, _):
        fields: dict[str, Any] = {"prompt": prompt, "seed": SEED, "max_tokens": 20, "n": 3}
        body = (await harness.complete(**fields)).json()
        assert [choice["text"] for choice in body["choices"]] == [text for _, text in said]
        assert body["usage"]["completion_tokens"] == sum(len(ids) for ids, _ in said)
        texts = ["", "", ""]
        for chunk in events((await harness.complete(stream=True, **fields)).text)[:-1]:
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert texts == [text for _, text in said]
        stop = said[1][1][3:5]
        cut = (await harness.complete(stop=stop, **fields)).json()
        assert [choice["text"] for choice in cut["choices"]] == [text.split(stop)[0] for _, text in said]
        beams = (await harness.complete(prompt=prompt, use_beam_search=True, n=3, max_tokens=12)).json()
        wanted = beam_reference(tokenizer.encode(prompt), 12, VOCAB, (EOS,), SamplingParams(n=3, beam_width=3))
        assert beams["usage"]["completion_tokens"] == sum(map(len, wanted))
        shown = [tokenizer.decode(array("i", ids[:-1] if ids[-1] == EOS else ids)) for ids in wanted]
        assert [choice["text"] for choice in beams["choices"]] == shown


async def test_L03_clients_of_several_choices_that_leave_free_all_of_them() -> None:
    async with served() as (harness, _):
        bodies = [
            {"prompt": f"go {i}", "max_tokens": 200, "ignore_eos": True, "n": 1 + i % 4, "stream": True}
            for i in range(6)
        ]
        leavers = [Wire(harness.app, "/v1/completions", body) for body in bodies]
        tasks = [wire.start() for wire in leavers]
        for wire in leavers:
            await wire.until(lambda wire=wire: wire.text.count("data:") > 1)  # an event may hold many tokens
            wire.leave()
        await asyncio.gather(*tasks)
        async with asyncio.timeout(60):
            while (await harness.engine.statistics())["loop"]["open_requests"]:  # type: ignore[index]
                await asyncio.sleep(0.005)


async def test_cached_tokens_and_the_engines_series_are_shown() -> None:
    async with served() as (harness, _):
        fields: dict[str, Any] = {"prompt": "a" * 40, "max_tokens": 4}
        assert (await harness.complete(**fields)).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        assert (await harness.complete(**fields)).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}
        salted = await harness.complete(cache_salt="x", **fields)
        assert salted.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        text = (await harness.get("/metrics")).text
        assert 'vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 32.0' in text
        assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0' in text
        assert (await harness.get("/readyz")).status_code == 200


async def test_S11_S21_what_the_engine_refuses_is_a_400_and_what_is_given_up_a_408() -> None:
    async with served() as (harness, _):
        response = await harness.complete(prompt="a" * 600)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "prompt"), error
        assert "512" in error["message"]
        response = await harness.complete(prompt="a", max_tokens=500, ignore_eos=True, timeout=0.001)
        assert (response.status_code, response.json()["error"]["code"]) == (408, "timeout")


async def test_a_dead_engine_is_503_everywhere() -> None:
    async with served() as (harness, loop):
        loop.stop()
        await asyncio.to_thread(loop.join)
        for response in (await harness.complete(), await harness.chat(stream=True), await harness.get("/readyz")):
            assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")
        assert (await harness.get("/livez")).status_code == 200
        assert isinstance(response, httpx.Response)
