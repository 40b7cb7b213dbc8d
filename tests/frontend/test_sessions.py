"""Sessions over a LocalClient: text in and out, stopping, cancelling, memory."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from tests.engine.fakes import EOS, VOCAB_SIZE, GatedExecutor, ScriptedExecutor, make_limits, make_text, running

from octavo.core.plan import Events
from octavo.core.request import FinishReason, SamplingParams
from octavo.errors import (
    AdmissionError,
    DuplicateRequestError,
    EngineDeadError,
    InvalidRequestError,
    RequestError,
)
from octavo.frontend.async_llm import AsyncEngine
from octavo.frontend.local_client import LocalClient
from octavo.frontend.sessions import Session, Sessions, TextDelta

TEXT = make_text()


def ids_of(text: str) -> list[int]:
    return TEXT.tokenizer.encode(text)


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, **options)


async def open_session(sessions: Sessions, name: str, **options: Any) -> Session:
    return await sessions.submit(ids_of("Say:"), greedy(**options), request_id=name)


async def collect(session: Session) -> tuple[str, list[int], TextDelta]:
    deltas = [delta async for delta in session]
    assert [delta.finish_reason is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    return "".join(d.text for d in deltas), [i for d in deltas for i in d.token_ids], deltas[-1]


async def test_L01_text_streams_and_ends_with_usage() -> None:
    async with running(ScriptedExecutor({"a": ids_of("Hello, wörld"[:7])})) as sessions:
        session = await open_session(sessions, "a", max_tokens=40)
        assert session.accepted.max_tokens == 40 and not session.accepted.capped
        text, ids, last = await collect(session)
    assert text == "Hello, " and ids == [*ids_of("Hello, "), EOS]
    assert last.finish_reason is FinishReason.STOP and last.stop_reason is None
    usage = last.usage
    assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == (4, 8)
    assert 0 <= usage.queue_s <= usage.ttft_s <= usage.e2e_s


@pytest.mark.parametrize("depth", [1, 3])
async def test_P05_a_stop_string_cuts_text_ids_and_usage_and_frees_the_engine(depth: int) -> None:
    executor = ScriptedExecutor({"a": ids_of("one two END three four five")}, lazy=depth > 1)
    async with running(executor, depth=depth) as sessions:
        session = await open_session(sessions, "a", max_tokens=100, stop=("END", "five"))
        text, ids, last = await collect(session)
        statistics: Any = await sessions.client.statistics()
    assert text == "one two " and ids == ids_of("one two END")
    assert last.finish_reason is FinishReason.STOP and last.stop_reason == "END"
    assert last.usage is not None and last.usage.completion_tokens == len(ids)
    assert statistics["scheduler"]["finished"]["stop"] == 1
    assert statistics["scheduler"]["num_blocks_used"] == 0


async def test_P05_a_stop_id_is_the_stop_reason() -> None:
    async with running(ScriptedExecutor({"a": ids_of("ab.c")})) as sessions:
        stop = ids_of(".")[0]
        text, ids, last = await collect(await open_session(sessions, "a", max_tokens=40, stop_token_ids=(stop,)))
    assert (text, ids, last.stop_reason) == ("ab", ids_of("ab."), stop)


async def test_P05_a_stop_string_completed_by_the_last_token_beats_length() -> None:
    async with running(ScriptedExecutor({"a": ids_of("abc")})) as sessions:
        text, _, last = await collect(await open_session(sessions, "a", max_tokens=3, stop=("bc",)))
    assert text == "a" and last.finish_reason is FinishReason.STOP and last.stop_reason == "bc"


async def test_L03_stream_then_cancel() -> None:
    executor = ScriptedExecutor({"a": ids_of("a" * 100)})
    executor.shut_after = 5
    async with running(executor) as sessions:
        session = await open_session(sessions, "a", max_tokens=100)
        first = await anext(session)
        await session.cancel()
        await session.cancel()
        executor.gate.set()
        rest = [delta async for delta in session]
        assert first.text and rest[-1].finish_reason is FinishReason.CANCELLED
        assert [d async for d in session] == []
        statistics: Any = await sessions.client.statistics()
        assert statistics["scheduler"]["num_blocks_used"] == 0


async def test_L03_leaving_a_stream_cancels() -> None:
    executor = ScriptedExecutor({"a": ids_of("a" * 100)})
    executor.shut_after = 5
    async with running(executor) as sessions:
        engine = AsyncEngine(sessions)
        stream = engine.stream("Say:", greedy(max_tokens=100), request_id="a")
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        executor.gate.set()
        statistics: Any = await engine.statistics()
        assert statistics["loop"]["open_requests"] == 0
        assert statistics["scheduler"]["finished"]["cancelled"] == 1


async def test_generate_gives_the_answer_so_far_as_vllms_does() -> None:
    async with running() as sessions:
        engine = AsyncEngine(sessions)
        params = greedy(max_tokens=6, ignore_eos=True, n=2, logprobs=0, seed=3)
        whole = await engine.complete([5, 6, 7], params)
        seen = [output async for output in engine.generate([5, 6, 7], params, "mine")]
        assert {output.request_id for output in seen} == {"mine"} and len(seen) >= 2
        assert [output.finished for output in seen] == [False] * (len(seen) - 1) + [True]
        assert seen[-1].outputs == whole.outputs and seen[-1].prompt_token_ids == [5, 6, 7]
        assert seen[0].metrics is None and seen[-1].metrics is not None
        for before, after in pairwise(seen):
            for old, new in zip(before.outputs, after.outputs, strict=True):
                assert new.token_ids[: len(old.token_ids)] == old.token_ids and new.text.startswith(old.text)
        (best,) = [output async for output in engine.generate([5], greedy(max_tokens=3, best_of=2))]
        assert best.finished and len(best.outputs) == 1


async def test_leaving_generate_cancels_the_request() -> None:
    executor = GatedExecutor()
    executor.shut_after = 3  # or a busy machine lets the request end before its first output is read
    async with running(executor) as sessions:
        engine = AsyncEngine(sessions)
        outputs = engine.generate("Say:", {"max_tokens": 100, "ignore_eos": True})
        assert not (await anext(outputs)).finished
        await outputs.aclose()
        executor.shut_after = 0
        executor.gate.set()
        statistics: Any = await engine.statistics()
        assert statistics["loop"]["open_requests"] == 0
        assert statistics["scheduler"]["finished"]["cancelled"] == 1


async def test_a_cancelled_task_cancels_its_request() -> None:
    executor = GatedExecutor()
    executor.gate.clear()
    async with running(executor) as sessions:
        engine = AsyncEngine(sessions)
        task = asyncio.create_task(engine.complete("Say:", greedy(max_tokens=100)))
        await asyncio.to_thread(executor.reached.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        executor.gate.set()
        statistics: Any = await engine.statistics()
        assert statistics["loop"]["open_requests"] == 0


async def test_a_submit_cancelled_while_it_waits_leaves_nothing() -> None:
    executor = GatedExecutor()
    executor.gate.clear()
    async with running(executor) as sessions:
        first = await open_session(sessions, "first", max_tokens=100)
        await asyncio.to_thread(executor.reached.wait, 20)
        task = asyncio.create_task(open_session(sessions, "second", max_tokens=100))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await first.cancel()
        executor.gate.set()
        statistics: Any = await sessions.client.statistics()
        assert statistics["loop"]["open_requests"] == 0


async def test_S21_a_timeout_ends_the_request() -> None:
    executor = GatedExecutor()
    executor.gate.clear()
    async with running(executor) as sessions:
        session = await sessions.submit(ids_of("Say:"), greedy(max_tokens=100), timeout_s=0.01)
        await asyncio.sleep(0.05)
        executor.gate.set()
        _, _, last = await collect(session)
        assert last.finish_reason is FinishReason.TIMEOUT and "deadline" in (last.message or "")


async def test_bad_requests_never_reach_the_engine() -> None:
    async with running() as sessions:
        bad = [
            ([], {}, "prompt"),
            ([VOCAB_SIZE], {}, "prompt"),
            ([-1], {}, "prompt"),
            ([1.5], {}, "prompt"),
            ([2**40], {}, "prompt"),
            ([3], {"stop_token_ids": (VOCAB_SIZE,)}, "stop_token_ids"),
            ([3], {"logit_bias": ((VOCAB_SIZE, 1.0),)}, "logit_bias"),
        ]
        for ids, options, param in bad:
            with pytest.raises(InvalidRequestError) as caught:
                await sessions.submit(ids, greedy(**options))
            assert caught.value.param == param
        with pytest.raises(InvalidRequestError, match="timeout"):
            await sessions.submit([3], greedy(), timeout_s=0.0)
        assert not sessions.client._engine.step_times.num_steps  # type: ignore[attr-defined]


async def test_refusals_of_the_engine_are_raised() -> None:
    executor = GatedExecutor()
    async with running(executor) as sessions:
        with pytest.raises(AdmissionError, match="128"):
            await sessions.submit([3] * 200, greedy())
        executor.gate.clear()
        await open_session(sessions, "a", max_tokens=50)
        with pytest.raises(DuplicateRequestError):
            await open_session(sessions, "a")
        executor.gate.set()


async def test_P02_seeds_are_drawn_from_the_session_seed() -> None:
    seeds = []
    for _ in range(2):
        async with running() as sessions:
            opened = [await sessions.submit([3], SamplingParams(max_tokens=2)) for _ in range(3)]
            seeds.append([session.params.seed for session in opened])
            kept = await sessions.submit([3], SamplingParams(max_tokens=2, seed=7))
            assert kept.params.seed == 7
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 3 and None not in seeds[0]


async def test_bug_8_a_second_batch_on_a_live_engine_loses_nothing() -> None:
    async with running(limits=make_limits(max_sequences=3)) as sessions:
        engine = AsyncEngine(sessions)
        for _ in range(2):
            params = greedy(max_tokens=6, ignore_eos=True)
            outputs = await asyncio.gather(*(engine.complete([3 + i, 5], params) for i in range(8)))
            assert all(len(o.outputs[0].token_ids) == 6 and o.finished for o in outputs)


async def test_one_wake_up_per_step_not_per_token(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as sessions:
        loop = asyncio.get_running_loop()
        wakes = 0
        threadsafe = loop.call_soon_threadsafe

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal wakes
            wakes += 1
            return threadsafe(*args, **kwargs)

        opened = [await sessions.submit([3 + i], greedy(max_tokens=20)) for i in range(16)]
        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        await asyncio.gather(*(session.collect() for session in opened))
        steps = sessions.client._engine.step_times.num_steps  # type: ignore[attr-defined]
        assert wakes <= steps + 4


async def test_a_slow_reader_costs_one_pending_output() -> None:
    """While nobody reads, nothing is queued: the next read is one output with everything."""
    async with running() as sessions:
        slow = await sessions.submit([3], greedy(max_tokens=40, ignore_eos=True))
        for _ in range(3):  # each ends later than the one before began
            await (await sessions.submit([4], greedy(max_tokens=40, ignore_eos=True))).collect()
        deltas = [delta async for delta in slow]
        assert [len(delta.token_ids) for delta in deltas] == [40]


async def test_collect_wakes_once_at_the_end() -> None:
    async with running() as sessions:
        session = await sessions.submit([3], greedy(max_tokens=50, ignore_eos=True))
        deltas = await session.collect()
        assert len(deltas) == 1 and len(deltas[0].token_ids) == 50
        usage = deltas[0].usage
        assert usage is not None and usage.ttft_s <= usage.e2e_s


async def test_ended_and_unknown_requests_have_no_outputs() -> None:
    async with running() as sessions:
        session = await open_session(sessions, "a", max_tokens=2)
        await session.collect()
        for name in ("a", "unknown"):
            with pytest.raises(RequestError, match="no request"):
                sessions.client.outputs(name)
        sessions.client.cancel(["a", "unknown"])


async def test_L04_close_answers_open_streams() -> None:
    executor = GatedExecutor()
    async with running(executor) as sessions:
        executor.gate.clear()
        session = await open_session(sessions, "a", max_tokens=100, ignore_eos=True)
        reading = asyncio.create_task(collect(session))
        closing = asyncio.create_task(sessions.client.close())
        await asyncio.sleep(0.01)
        executor.gate.set()
        await closing
        _, _, last = await reading
        assert last.finish_reason is FinishReason.CANCELLED
        await sessions.client.close()
        with pytest.raises(EngineDeadError):
            await open_session(sessions, "b")


async def test_an_engine_that_dies_ends_streams_with_an_error() -> None:
    executor = GatedExecutor()
    executor.shut_after = 5
    async with running(executor) as sessions:
        session = await open_session(sessions, "a", max_tokens=100, ignore_eos=True)
        executor.fail = lambda plan, owners: EngineDeadError("the device is gone")
        executor.gate.set()
        _, _, last = await collect(session)
        assert last.finish_reason is FinishReason.ERROR and "the device is gone" in (last.message or "")
        with pytest.raises(EngineDeadError, match="device"):
            await open_session(sessions, "b")


async def test_L01_a_callback_that_raises_ends_only_its_request() -> None:
    async with running() as sessions:
        engine = AsyncEngine(sessions)

        def burst(delta: TextDelta) -> None:
            raise KeyError("mine")

        bad, good = await asyncio.gather(
            engine.complete([3, 4], greedy(max_tokens=40, ignore_eos=True), on_delta=burst),
            engine.complete([5, 6], greedy(max_tokens=40, ignore_eos=True), on_delta=lambda delta: None),
        )
        assert bad.outputs[0].finish_reason == "error" and "KeyError" in (bad.outputs[0].message or "")
        assert good.outputs[0].finish_reason == "length" and len(good.outputs[0].token_ids) == 40


def test_a_client_outlives_its_event_loop() -> None:
    """Notebooks run asyncio.run again and again on one engine."""
    from tests.engine.fakes import make_sessions

    sessions = make_sessions()
    engine = AsyncEngine(sessions)
    for _ in range(3):
        output = asyncio.run(engine.complete([3], greedy(max_tokens=4)))
        assert len(output.outputs[0].token_ids) == 4

    async def abandon() -> None:
        await sessions.submit([3], greedy(max_tokens=100), request_id="left")

    asyncio.run(abandon())
    output = asyncio.run(engine.complete([3], greedy(max_tokens=4)))
    assert len(output.outputs[0].token_ids) == 4
    asyncio.run(engine.close())


async def test_logprobs_and_prompt_logprobs_reach_the_answer() -> None:
    async with running() as sessions:
        engine = AsyncEngine(sessions)
        output = await engine.complete(ids_of("Hello"), greedy(max_tokens=3, prompt_logprobs=1))
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        assert [entry.token_id for entry in output.prompt_logprobs[1:] if entry] == ids_of("Hello")[1:]


async def test_a_client_ignores_deliveries_of_no_request() -> None:
    async with running() as sessions:
        client = sessions.client
        assert isinstance(client, LocalClient)
        client.requests.accept(1, Events(1, 0.0, ["ghost"], *(_column(0) for _ in range(3))))
        assert client.requests.rejections.unknown == 1


def _column(value: int) -> Any:
    from array import array

    return array("i", [value])
