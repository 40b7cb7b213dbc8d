"""Several choices from the engine to the text: each ends once, alone, with its own ids."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from tests.beam_reference import beam_reference
from tests.engine.fakes import (
    EOS,
    VOCAB_SIZE,
    GatedExecutor,
    ScriptedExecutor,
    make_limits,
    make_sessions,
    make_text,
    running,
)
from tests.fake_model import oracle

from octavo.core.kv import prefix
from octavo.core.request import FinishReason, Request, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.errors import AdmissionError, InvalidRequestError
from octavo.frontend.async_llm import AsyncEngine
from octavo.frontend.offline import OfflineEngine
from octavo.frontend.outputs import RequestOutput
from octavo.frontend.sessions import TextDelta

TEXT = make_text()
DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])


def ids_of(text: str) -> list[int]:
    ids: list[int] = TEXT.tokenizer.encode(text)
    return ids


def sampled(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": 11, "max_tokens": 12, "ignore_eos": True, **options})


def lazy(depth: int) -> GatedExecutor:
    return GatedExecutor(lazy=depth > 1)


def ends_of(deltas: list[TextDelta]) -> dict[int, list[FinishReason]]:
    found: dict[int, list[FinishReason]] = {}
    for delta in deltas:
        if delta.finish_reason is not None:
            found.setdefault(delta.choice, []).append(delta.finish_reason)
    return found


# --- sessions and answers


@DEPTHS
async def test_P03_each_choice_is_its_own_oracles(depth: int) -> None:
    async with running(lazy(depth), depth=depth) as sessions:
        output = await AsyncEngine(sessions).complete([5, 6, 7], sampled(n=4))
    assert [choice.index for choice in output.outputs] == [0, 1, 2, 3] and output.finished
    for choice in output.outputs:
        wanted = oracle([5, 6, 7], 12, VOCAB_SIZE, (), sampled(n=4), choice=choice.index)
        assert choice.token_ids == wanted and choice.finish_reason == "length"
    assert len({tuple(choice.token_ids) for choice in output.outputs}) == 4
    assert output.metrics is not None and output.metrics.completion_tokens == 48


@DEPTHS
async def test_P03_a_stream_ends_each_choice_once_and_the_usage_comes_last(depth: int) -> None:
    lengths = {0: 3, 1: 9, 2: 6}
    executor = ScriptedExecutor({f"a/{c}": ids_of("x" * n) for c, n in lengths.items()}, lazy=depth > 1)
    async with running(executor, depth=depth) as sessions:
        session = await sessions.submit(ids_of("Say:"), sampled(n=3, max_tokens=40, ignore_eos=False), request_id="a")
        deltas = [delta async for delta in session]
        statistics: Any = await sessions.client.statistics()
    assert ends_of(deltas) == {choice: [FinishReason.STOP] for choice in lengths}
    for choice, length in lengths.items():
        mine = [delta for delta in deltas if delta.choice == choice]
        assert "".join(delta.text for delta in mine) == "x" * length and mine[-1].finish_reason is not None
    assert [delta.usage is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert deltas[-1].usage is not None and deltas[-1].usage.completion_tokens == sum(lengths.values()) + 3
    assert statistics["scheduler"]["num_blocks_used"] == 0


@DEPTHS
async def test_P05_a_stop_string_cuts_one_choice_and_frees_it(depth: int) -> None:
    script = {"a/0": ids_of("one END two" + "z" * 40), "a/1": ids_of("it goes on and on"), "a/2": ids_of("the END")}
    executor = ScriptedExecutor(script, lazy=depth > 1)
    async with running(executor, depth=depth) as sessions:
        params = sampled(n=3, max_tokens=60, ignore_eos=False, stop=("END",))
        session = await sessions.submit(ids_of("Say:"), params, request_id="a")
        deltas = [delta async for delta in session]
        statistics: Any = await sessions.client.statistics()
    texts = ["".join(delta.text for delta in deltas if delta.choice == choice) for choice in range(3)]
    assert texts == ["one ", "it goes on and on", "the "]
    assert ends_of(deltas) == {choice: [FinishReason.STOP] for choice in range(3)}
    reasons = {delta.choice: delta.stop_reason for delta in deltas if delta.finish_reason is not None}
    assert reasons == {0: "END", 1: None, 2: "END"}
    assert (
        deltas[-1].usage is not None
        and deltas[-1].usage.completion_tokens == len("one ENDit goes on and onthe END") + 1
    )
    assert statistics["scheduler"]["num_blocks_used"] == 0 and statistics["loop"]["open_requests"] == 0


async def test_P03_best_of_returns_the_n_of_highest_mean_logprob() -> None:
    async with running() as sessions:
        engine = AsyncEngine(sessions)
        every = await engine.complete([5, 6, 7], sampled(n=5, best_of=5, logprobs=0))
        best = await engine.complete([5, 6, 7], sampled(n=2, best_of=5))
        shown = await engine.complete([5, 6, 7], sampled(n=2, best_of=5, logprobs=2))

    def mean(choice: Any) -> float:
        return sum(entry.logprob for entry in choice.logprobs) / len(choice.token_ids)

    ranked = sorted(every.outputs, key=mean, reverse=True)
    assert [choice.token_ids for choice in best.outputs] == [choice.token_ids for choice in ranked[:2]]
    assert [choice.index for choice in best.outputs] == [0, 1]
    assert [choice.logprobs for choice in best.outputs] == [None, None]
    assert best.outputs[0].cumulative_logprob == pytest.approx(12 * mean(ranked[0]))
    assert best.metrics is not None and best.metrics.completion_tokens == 60
    logprobs = shown.outputs[0].logprobs
    assert logprobs is not None and [entry.token_id for entry in logprobs if entry] == ranked[0].token_ids


async def test_P03_best_of_is_not_streamed() -> None:
    async with running() as sessions:
        engine = AsyncEngine(sessions)
        with pytest.raises(InvalidRequestError, match="stream") as caught:
            await anext(engine.stream([5], sampled(n=1, best_of=2)))
        assert caught.value.param == "best_of"
        with pytest.raises(InvalidRequestError, match="stream"):
            await engine.complete([5], sampled(n=1, best_of=2), on_delta=lambda delta: None)
        deltas = [delta async for delta in engine.stream([5], sampled(n=2, best_of=2))]
        assert set(ends_of(deltas)) == {0, 1}


@DEPTHS
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
async def test_P04_beams_are_the_oracles_and_stream_at_the_end(depth: int, early_stopping: bool | str) -> None:
    params = sampled(
        n=2, beam_width=3, temperature=0.0, ignore_eos=False, early_stopping=early_stopping, length_penalty=0.7
    )
    async with running(lazy(depth), depth=depth) as sessions:
        engine = AsyncEngine(sessions)
        output = await engine.complete([5, 6, 7], params)
        deltas = [delta async for delta in engine.stream([5, 6, 7], params)]
        statistics: Any = await sessions.client.statistics()
    wanted = beam_reference([5, 6, 7], 12, VOCAB_SIZE, (EOS,), params)
    assert [choice.token_ids for choice in output.outputs] == wanted and output.finished
    assert output.outputs[0].cumulative_logprob is None and output.outputs[0].logprobs is None
    assert [list(delta.token_ids) for delta in deltas] == wanted
    assert set(ends_of(deltas)) == {0, 1} and deltas[-1].usage is not None
    assert statistics["scheduler"]["num_blocks_used"] == 0


async def test_L03_a_cancelled_request_ends_all_its_choices_and_keeps_what_came() -> None:
    executor = GatedExecutor()
    executor.shut_after = 4
    async with running(executor) as sessions:
        session = await sessions.submit([5, 6], sampled(n=3, max_tokens=90))
        first = await anext(session)
        await session.cancel()
        await session.cancel()
        executor.gate.set()
        deltas = [first] + [delta async for delta in session]
    assert session.is_cancelled
    assert ends_of(deltas) == {choice: [FinishReason.CANCELLED] for choice in range(3)}
    for choice in range(3):
        got = [token for delta in deltas if delta.choice == choice for token in delta.token_ids]
        wanted = oracle([5, 6], 90, VOCAB_SIZE, (), sampled(n=3, max_tokens=90), choice=choice)
        assert got and got == wanted[: len(got)]


async def test_L01_a_callback_that_raises_ends_all_choices_of_its_request() -> None:
    async with running() as sessions:
        engine = AsyncEngine(sessions)
        output = await engine.complete([5], sampled(n=2), on_delta=lambda delta: {}[delta.choice])
    assert [choice.finish_reason for choice in output.outputs] == ["error", "error"]
    assert all("KeyError" in (choice.message or "") for choice in output.outputs)


async def test_S11_too_many_choices_are_refused_before_anything_is_allocated() -> None:
    async with running(limits=make_limits(max_sequences=4)) as sessions:
        for params, name in (
            (sampled(n=10**6), "n"),
            (sampled(n=1, best_of=5), "best_of"),
            (sampled(n=1, beam_width=5), "beam_width"),
        ):
            with pytest.raises(AdmissionError, match="4 sequences") as caught:
                await sessions.submit([5], params)
            assert caught.value.param == name
        statistics: Any = await sessions.client.statistics()
        assert statistics["loop"]["open_requests"] == 0
        assert len((await AsyncEngine(sessions).complete([5], sampled(n=4))).outputs) == 4


def test_P03_batches_mix_numbers_of_choices() -> None:
    with OfflineEngine(make_sessions(limits=make_limits(max_sequences=5))) as llm:
        params = [sampled(n=n) for n in (1, 3, 2, 5)]
        outputs: list[RequestOutput] = llm.generate([[5 + i] for i in range(4)], params)
    for i, (output, each) in enumerate(zip(outputs, params, strict=True)):
        wanted = [oracle([5 + i], 12, VOCAB_SIZE, (), each, choice=choice) for choice in range(each.n)]
        assert [choice.token_ids for choice in output.outputs] == wanted


# --- keys of prompt blocks


async def test_K02_prompt_keys_are_made_before_submit_and_the_scheduler_hashes_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sessions = make_sessions()
    captured: list[Request] = []

    async def submit(request: Request, media: object = ()) -> Any:
        captured.append(request)
        raise AdmissionError("enough", None)

    monkeypatch.setattr(sessions.client, "submit", submit)
    for params in (sampled(), sampled(n=3)):
        with pytest.raises(AdmissionError):
            await sessions.submit([3 + i % 50 for i in range(41)], params, tenant="t", cache_salt=b"s")
    await sessions.client.close()
    hashed: list[bytes] = []
    blake2b = prefix.blake2b

    def counted(data: bytes = b"", **options: Any) -> Any:
        hashed.append(bytes(data))
        return blake2b(data, **options)

    monkeypatch.setattr(prefix, "blake2b", counted)
    request, forked = captured
    assert request.block_keys == prefix.prompt_keys(request, 4) and len(request.block_keys) == 10
    assert len(hashed) == 11  # its own ten and the root: the count works
    hashed.clear()
    for each in (request, forked):
        scheduler = Scheduler(make_limits())
        scheduler.admit(each, 0.0)
        plan = scheduler.plan(0.0)
        assert plan.num_query_tokens == 41
        assert hashed == [], "a prompt block was hashed on the step loop"
    bare = Scheduler(make_limits())
    bare.admit(Request("bare", array("i", request.prompt_token_ids or ()), sampled()), 0.0)
    bare.plan(0.0)
    assert len(hashed) == 11  # what it costs without


async def test_K02_keys_of_a_long_prompt_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.frontend.sessions.OFF_LOOP_TOKENS", 8)
    prompt = list(range(5, 25))
    async with running() as sessions:
        engine = AsyncEngine(sessions)
        await engine.complete(prompt, sampled(max_tokens=2))
        monkeypatch.undo()
        again = await engine.complete(prompt, sampled(max_tokens=2))
    assert again.num_cached_tokens >= 16


async def test_K02_keys_made_in_front_hit_what_the_engine_made() -> None:
    """A second turn: its prompt holds blocks that the first turn generated, whose keys the scheduler made."""
    async with running() as sessions:
        engine = AsyncEngine(sessions)
        first = await engine.complete([5, 6, 7], sampled(max_tokens=14))
        prompt = [5, 6, 7, *first.outputs[0].token_ids, 9]
        second = await engine.complete(prompt, sampled(max_tokens=2))
    assert second.num_cached_tokens == 16
