"""Several choices over HTTP: n, best_of, beams; whole, streamed, cut by stop strings, refused in time."""

import json
import tracemalloc
from collections import Counter
from typing import Any

import httpx
import openai
import pytest

from octavo.core.limits import GroupSpec
from octavo.executors.protocol import Capacity
from octavo.frontend.sessions import Sessions
from octavo.server.app import create_app
from tests.server.fakes import FakeClient, Harness, Wire, events

TEXTS = ["one", "twelve", "tea"]
PROMPT_TOKENS = 2
NUM_TOKENS = sum(len(text) + 1 for text in TEXTS)  # an end-of-sequence id each


def several() -> Harness:
    harness = Harness()
    harness.engine.texts = TEXTS
    return harness


def streamed(chunks: list[Any]) -> tuple[dict[int, str], dict[int, list[str]]]:
    """Text and finish reasons by index; every chunk but the usage's has one choice."""
    texts: dict[int, str] = {}
    reasons: dict[int, list[str]] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        index = choice["index"]
        assert index not in reasons, "a chunk came after its choice's end"
        said = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        texts[index] = texts.get(index, "") + said
        if choice["finish_reason"] is not None:
            reasons.setdefault(index, []).append(choice["finish_reason"])
    return texts, reasons


async def test_P03_whole_answers_have_their_choices_by_index_and_one_usage() -> None:
    body = (await several().complete(n=3)).json()
    assert [(c["index"], c["text"], c["finish_reason"]) for c in body["choices"]] == [
        (i, text, "stop") for i, text in enumerate(TEXTS)
    ]
    assert body["usage"]["prompt_tokens"] == PROMPT_TOKENS and body["usage"]["completion_tokens"] == NUM_TOKENS
    body = (await several().chat(n=3)).json()
    assert [(c["index"], c["message"]["content"]) for c in body["choices"]] == list(enumerate(TEXTS))
    assert body["usage"]["completion_tokens"] == NUM_TOKENS


async def test_P03_the_choices_of_each_prompt_follow_those_of_the_one_before() -> None:
    for stream in (False, True):
        response = await several().complete(prompt=["a", "b"], n=2, echo=True, stream=stream)
        expected = {0: "aone", 1: "atwelve", 2: "bone", 3: "btwelve"}
        if stream:
            assert streamed(events(response.text)[:-1])[0] == expected
        else:
            assert {c["index"]: c["text"] for c in response.json()["choices"]} == expected
            assert response.json()["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
async def test_P03_a_stream_interleaves_choices_with_one_end_each_and_one_usage(endpoint: str) -> None:
    harness = several()
    response = await getattr(harness, endpoint)(n=3, stream=True, stream_options={"include_usage": True})
    *chunks, usage, done = events(response.text)
    assert done == "[DONE]" and len({chunk["id"] for chunk in chunks}) == 1
    texts, reasons = streamed(chunks)
    assert texts == dict(enumerate(TEXTS)) and reasons == {i: ["stop"] for i in range(3)}
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == NUM_TOKENS
    assert all(chunk["usage"] is None for chunk in chunks)
    order = [chunk["choices"][0]["index"] for chunk in chunks]
    assert order != sorted(order), "the choices came one after the other"
    if endpoint == "chat":
        roles = Counter(c["choices"][0]["index"] for c in chunks if "role" in c["choices"][0]["delta"])
        assert roles == {0: 1, 1: 1, 2: 1}


async def test_P03_without_a_usage_chunk_the_timings_come_once_at_the_very_end() -> None:
    for endpoint in ("chat", "complete"):
        *chunks, _ = events((await getattr(several(), endpoint)(n=3, stream=True)).text)
        assert ["timings" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


@pytest.mark.parametrize("stream", [False, True])
async def test_P05_a_stop_string_ends_only_its_choice(stream: bool) -> None:
    harness = several()
    response = await harness.chat(n=3, stop=["we"], stream=stream)
    if stream:
        texts, reasons = streamed(events(response.text)[:-1])
        assert set(map(tuple, reasons.values())) == {("stop",)}
    else:
        texts = {c["index"]: c["message"]["content"] for c in response.json()["choices"]}
        assert [c["stop_reason"] for c in response.json()["choices"]] == [None, "we", None]
        cut = len("twelve") + 1 - len("twe")
        assert response.json()["usage"]["completion_tokens"] == NUM_TOKENS - cut
    assert texts == {0: "one", 1: "t", 2: "tea"}
    assert harness.engine.cut == [(harness.engine.requests[0].request_id, 1)] and not harness.engine.cancelled


async def test_P03_best_of_keeps_the_likeliest_and_shows_no_logprobs_that_were_not_asked_for() -> None:
    harness = several()  # the fake's choice 0 is the likeliest, then 1, then 2
    body = (await harness.complete(n=2, best_of=3)).json()
    assert [(c["index"], c["text"], c["logprobs"]) for c in body["choices"]] == [(0, "one", None), (1, "twelve", None)]
    assert body["usage"]["completion_tokens"] == NUM_TOKENS, "what was made counts, shown or not"
    assert harness.engine.requests[0].params.num_logprobs == 0
    body = (await harness.complete(n=2, best_of=3, logprobs=1)).json()
    assert len(body["choices"][0]["logprobs"]["tokens"]) == 4
    refused = (await harness.complete(n=1, best_of=3, stream=True)).json()["error"]
    assert refused["param"] == "best_of" and "stream" in refused["message"]


async def test_P03_best_of_equal_to_n_streams() -> None:
    *chunks, _ = events((await several().complete(n=3, best_of=3, stream=True)).text)
    assert streamed(chunks)[0] == dict(enumerate(TEXTS))


async def test_P04_beams_are_asked_for_as_vllm_does() -> None:
    harness = several()
    response = await harness.complete(use_beam_search=True, n=2, best_of=4, length_penalty=0.5, early_stopping=True)
    params = harness.engine.requests[-1].params
    assert (params.n, params.beam_width, params.best_of) == (2, 4, None)
    assert (params.length_penalty, params.early_stopping) == (0.5, True)
    assert [c["text"] for c in response.json()["choices"]] == TEXTS[:2]
    *chunks, _ = events((await harness.chat(use_beam_search=True, n=3, stream=True)).text)
    assert harness.engine.requests[-1].params.beam_width == 3
    assert streamed(chunks)[0] == dict(enumerate(TEXTS))


async def test_S11_more_choices_than_the_engine_runs_are_refused_by_the_clients_name_for_them() -> None:
    engine = FakeClient()
    text = Harness().text
    capacity = Capacity((GroupSpec(),), (64,), 16, 4, 512, 258)
    app = create_app(Sessions(engine, text, capacity=capacity), text, Harness().config, engine.statistics)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"n": 5}, "n"),
        ({"best_of": 5}, "best_of"),
        ({"n": 5, "use_beam_search": True}, "n"),
        ({"best_of": 5, "use_beam_search": True}, "best_of"),
    ]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        for fields, param in cases:
            response = await client.post("/v1/completions", json={"prompt": "hi", **fields})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, param)
            assert error["message"].startswith(f"{param} is 5, this engine runs 4 sequences")
        assert (await client.post("/v1/completions", json={"prompt": "hi", "n": 4})).status_code == 200
    assert len(engine.requests) == 1 and app.state.context.queue.num_pending == 0


async def test_a_million_choices_cost_nothing() -> None:
    harness = Harness()
    await harness.complete(n=2)
    tracemalloc.start()
    try:
        for fields in ({"n": 10**6}, {"best_of": 10**6}, {"n": 10**6, "use_beam_search": True}):
            response = await harness.complete(**fields)
            assert response.status_code == 400 and "at most 16" in response.json()["error"]["message"]
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()
    assert len(harness.engine.requests) == 1


async def test_a_client_that_leaves_cancels_the_whole_request_once() -> None:
    harness = several()
    harness.engine.is_held = True
    wire = Wire(harness.app, "/v1/completions", {"prompt": "hi", "n": 3, "stream": True})
    task = wire.start()
    await wire.until(lambda: harness.engine.requests)
    harness.engine.answer(harness.engine.requests[0], 2)
    await wire.until(lambda: "tw" in wire.text or wire.text.count("data:") >= 5)
    wire.leave()
    await task
    assert [reason.name for _, reason in harness.engine.cancelled] == ["CANCELLED"]
    assert harness.context.queue.num_pending == 0


async def test_the_series_count_a_request_once_and_its_tokens_all() -> None:
    harness = several()
    assert (await harness.complete(n=3)).status_code == 200
    assert (await harness.complete(n=3, stream=True)).status_code == 200
    text = (await harness.get("/metrics")).text
    assert f'octavo_generation_tokens_total{{model_name="tiny"}} {2.0 * NUM_TOKENS}' in text
    assert 'octavo_requests_finished_total{finished_reason="stop",model_name="tiny"} 2.0' in text
    assert text.count("octavo_requests_finished_total{") == 1
    assert 'octavo_request_params_n_sum{model_name="tiny"} 6.0' in text
    assert 'vllm:request_params_n_sum{engine="0",model_name="tiny"} 6.0' in text


async def test_words_become_ids() -> None:
    harness = Harness()
    encode = harness.text.tokenizer.encode
    await harness.complete(bad_words=["no", " no", "yes"], dry_multiplier=0.8)
    params = harness.engine.requests[-1].params
    assert params.bad_words_ids == tuple(tuple(encode(word)) for word in ("no", " no", "yes", " yes"))
    assert params.dry_breaker_ids == tuple(encode(text)[0] for text in ("\n", ":", '"', "*"))
    await harness.complete(dry_multiplier=0.8, dry_sequence_breakers=[])
    assert harness.engine.requests[-1].params.dry_breaker_ids == ()


async def test_the_tenant_is_the_keys() -> None:
    harness = Harness(config=keyed_config(), headers={"authorization": "Bearer a"})
    await harness.complete()
    await harness.complete(headers={"authorization": "Bearer b"})
    first, second = (request.tenant for request in harness.engine.requests)
    assert first and second and first != second


def keyed_config() -> Any:
    from tests.server.fakes import keyed

    return keyed("a", "b")


async def test_P03_openais_client_streams_two_choices() -> None:
    harness = several()
    transport = httpx.ASGITransport(harness.app)
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as http,
        openai.AsyncOpenAI(api_key="x", base_url="http://localhost/v1", http_client=http) as client,
    ):
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            n=2,
            stream=True,
            stream_options={"include_usage": True},
        )
        texts, reasons, usages = {0: "", 1: ""}, {}, []
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                if choice.finish_reason is not None:
                    reasons[choice.index] = choice.finish_reason
            usages += [chunk.usage] if chunk.usage is not None else []
        assert texts == {0: "one", 1: "twelve"} and reasons == {0: "stop", 1: "stop"}
        assert [usage.completion_tokens for usage in usages] == [len("one") + len("twelve") + 2]
        whole = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], n=2, logprobs=True
        )
        assert [choice.message.content for choice in whole.choices] == TEXTS[:2]
        assert json.loads(whole.choices[1].model_dump_json())["logprobs"]["content"][0]["logprob"] == -0.5
