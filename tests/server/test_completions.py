"""POST /v1/completions: one and several prompts, echo, log-probabilities."""

import asyncio
import re

from octavo.core.request import ErrorKind, FinishError, FinishReason
from tests.server.fakes import EOS, FakeClient, Harness, events


async def test_each_prompt_shape_is_taken() -> None:
    harness = Harness()
    ids = harness.text.tokenizer.encode("hi")
    for prompt, count in (("hi", 1), (ids, 1), (["hi", "ho"], 2), ([ids, ids, ids], 3)):
        body = (await harness.complete(prompt=prompt)).json()
        assert [choice["index"] for choice in body["choices"]] == list(range(count))
        assert {choice["text"] for choice in body["choices"]} == {"Hello é!"}
        assert body["usage"]["prompt_tokens"] == 2 * count
        assert body["usage"]["completion_tokens"] == 10 * count
    assert re.fullmatch(r"cmpl-[0-9a-f]{32}", body["id"]) and body["object"] == "text_completion"


async def test_several_prompts_stream_by_index() -> None:
    harness = Harness()
    response = await harness.complete(prompt=["a", "b", "c"], stream=True, stream_options={"include_usage": True})
    *chunks, usage, done = events(response.text)
    assert done == "[DONE]" and usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 30
    texts = {0: "", 1: "", 2: ""}
    reasons: dict[int, list[object]] = {0: [], 1: [], 2: []}
    for chunk in chunks:
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["text"]
        reasons[choice["index"]].append(choice["finish_reason"])
    assert set(texts.values()) == {"Hello é!"}
    for seen in reasons.values():
        assert seen[-1] == "stop" and not any(seen[:-1])


async def test_when_one_prompt_fails_the_others_are_cancelled() -> None:
    harness = Harness()
    response = await harness.complete(prompt=[[3], [9_999_999]])
    assert response.status_code == 400 and response.json()["error"]["param"] == "prompt"
    assert [reason for _, reason in harness.engine.cancelled] == [FinishReason.CANCELLED]
    harness.engine.end = (FinishReason.ERROR, FinishError(ErrorKind.ENGINE, "bad row"))
    response = await harness.complete(prompt=["a", "b"])
    assert response.status_code == 500
    assert harness.context.queue.num_pending == 0


async def test_each_choice_of_a_batch_waits_until_its_own_first_token() -> None:
    harness = Harness()
    engine, room = harness.engine, harness.context.queue
    engine.is_held = True
    answer = asyncio.create_task(harness.complete(prompt=["a", "b", "c"]))
    async with asyncio.timeout(60):
        while len(engine.requests) < 3:
            await asyncio.sleep(0)
        for num_left in (2, 1):
            engine.answer(engine.requests[num_left], num_tokens=1)
            while room.num_pending == num_left + 1:
                await asyncio.sleep(0)
            assert room.num_pending == num_left, "the others still wait"
        for request in engine.requests:
            engine.answer(request)
        assert (await answer).status_code == 200
    assert room.num_pending == 0


async def test_echo_puts_the_prompt_first() -> None:
    harness = Harness()
    assert (await harness.complete(echo=True)).json()["choices"][0]["text"] == "hiHello é!"
    ids = harness.text.tokenizer.encode("hi")
    chunks = events((await harness.complete(prompt=ids, echo=True, stream=True)).text)[:-1]
    assert chunks[0]["choices"][0]["text"].startswith("hi")
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hiHello é!"


async def test_logprobs_are_aligned_whole_and_streamed() -> None:
    whole = (await Harness().complete(logprobs=2)).json()["choices"][0]["logprobs"]
    assert whole["tokens"][:5] == list("Hello")
    assert whole["text_offset"][:5] == [0, 1, 2, 3, 4]
    assert len(whole["tokens"]) == len(whole["token_logprobs"]) == len(whole["top_logprobs"]) == 10
    assert whole["top_logprobs"][0]["H"] == -0.25 and len(whole["top_logprobs"][0]) == 2
    streamed: dict[str, list[object]] = {key: [] for key in whole}
    for chunk in events((await Harness().complete(logprobs=2, stream=True)).text)[:-1]:
        for key, values in (chunk["choices"][0]["logprobs"] or {}).items():
            streamed[key] += values
    assert streamed == whole


async def test_a_stop_id_is_reported() -> None:
    harness = Harness()
    body = (await harness.complete(stop_token_ids=[EOS])).json()
    assert body["choices"][0]["stop_reason"] == EOS


async def test_too_many_prompts_are_refused() -> None:
    harness = Harness()
    response = await harness.complete(prompt=["a"] * 257)
    assert response.status_code == 400 and response.json()["error"]["param"] == "prompt"


async def test_text_offsets_count_a_character_split_over_tokens_once() -> None:
    harness = Harness(engine=FakeClient("a\N{FOX FACE}é!"))
    whole = (await harness.complete(logprobs=0)).json()["choices"][0]["logprobs"]["text_offset"]
    assert whole[:8] == [0, 1, 2, 2, 2, 2, 3, 3], "one token a byte: a, four of the fox, two of the e, !"
    chunks = events((await harness.complete(logprobs=0, stream=True)).text)[:-1]
    shown = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [offset for logprobs in shown if logprobs for offset in logprobs["text_offset"]] == whole
