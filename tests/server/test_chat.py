"""POST /v1/chat/completions: whole and streamed answers."""

import re

from tests.server.fakes import Harness, events, make_text


async def test_a_whole_answer_has_openais_form() -> None:
    harness = Harness()
    harness.engine.cached_tokens = 5
    response = await harness.chat(max_tokens=50)
    assert response.status_code == 200
    body = response.json()
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", body["id"])
    assert (body["object"], body["model"]) == ("chat.completion", "tiny")
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "Hello é!", "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    assert body["choices"] == [choice]
    prompt = len(b"user:hi\nassistant:")
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 10,
        "total_tokens": prompt + 10,
        "prompt_tokens_details": {"cached_tokens": 5},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert set(body["timings"]) >= {"queue_s", "prefill_s", "decode_s", "tokens_per_s"}
    assert harness.prompt == "user:hi\nassistant:"
    assert response.headers["x-request-id"] in body["id"]


async def test_length_is_told() -> None:
    body = (await Harness().chat(max_completion_tokens=2)).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["message"]["content"] == "He"


async def test_a_stream_has_the_same_text_in_openais_chunks() -> None:
    response = await Harness().chat(stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-length" not in response.headers
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "Hello é!"
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    assert (choices[-1]["delta"], choices[-1]["finish_reason"]) == ({}, "stop")
    assert all(
        "tool_calls" not in choice["delta"] and "usage" not in chunk
        for choice, chunk in zip(choices, chunks, strict=True)
    )
    assert chunks[-1]["timings"]["decode_s"] >= 0
    contents = [choice["delta"]["content"] for choice in choices[1:-1]]
    assert all(contents), "an empty chunk was sent for half a character"


async def test_the_usage_chunk_comes_last_and_without_choices() -> None:
    response = await Harness().chat(stream=True, stream_options={"include_usage": True})
    *chunks, usage, _ = events(response.text)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 10
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert all(chunk["usage"] is None for chunk in chunks)


async def test_logprobs_have_bytes_whole_and_streamed() -> None:
    whole = (await Harness().chat(logprobs=True, top_logprobs=2)).json()["choices"][0]["logprobs"]["content"]
    assert len(whole) == 10
    assert whole[0]["token"] == "H" and whole[0]["bytes"] == [72] and whole[0]["logprob"] == -0.25
    assert [top["logprob"] for top in whole[0]["top_logprobs"]] == [-0.25, -0.75]
    assert whole[6]["bytes"] == [0xC3], "a token may be a part of a character"
    chunks = events((await Harness().chat(logprobs=True, top_logprobs=2, stream=True)).text)[:-1]
    streamed = [e for chunk in chunks if (lp := chunk["choices"][0]["logprobs"]) for e in lp["content"]]
    assert streamed == whole
    bare = (await Harness().chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"]
    assert bare[0]["top_logprobs"] == []


async def test_a_stop_string_is_never_shown_and_ends_the_request_in_the_engine() -> None:
    for stream in (False, True):
        harness = Harness()
        response = await harness.chat(stop=["lo"], stream=stream)
        if stream:
            chunks = events(response.text)[:-1]
            text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
            choice = chunks[-1]["choices"][0]
        else:
            choice = response.json()["choices"][0]
            text = choice["message"]["content"]
            assert response.json()["usage"]["completion_tokens"] == 5
        assert (text, choice["finish_reason"], choice["stop_reason"]) == ("Hel", "stop", "lo")
        assert len(harness.engine.cancelled) == 1, "ended once, with reason stop"


async def test_messages_reach_the_template() -> None:
    harness = Harness()
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": [], "annotations": []},
        {"role": "user", "content": "d"},
    ]
    assert (await harness.chat(messages=messages, chat_template_kwargs={"mood": "calm"})).status_code == 200
    assert harness.prompt == "system:be brief\nuser(Ann):a\nb\nassistant:c\nuser:d\n[calm]assistant:"


async def test_the_last_message_can_be_continued() -> None:
    harness = Harness()
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
    assert (await harness.chat(messages=messages, continue_final_message=True)).status_code == 200
    assert harness.prompt == "user:hi\nassistant:Well, "
    refused = await harness.chat(messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "add_generation_prompt"


async def test_defaults_come_from_the_models_generation_config() -> None:
    harness = Harness(text=make_text({"temperature": 0.3, "top_k": 7.0, "top_p": 0.9}))
    await harness.chat()
    params = harness.engine.requests[-1].params
    assert (params.temperature, params.top_k, params.top_p) == (0.3, 7, 0.9)
    await harness.chat(temperature=1.5, top_k=0)
    params = harness.engine.requests[-1].params
    assert (params.temperature, params.top_k, params.top_p) == (1.5, 0, 0.9)


async def test_a_long_conversation_is_tokenised_off_the_loop() -> None:
    harness = Harness()
    response = await harness.chat(messages=[{"role": "user", "content": "x" * 40_000}])
    assert response.status_code == 400, "one byte a token, and the model holds 4096"
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    assert "40000 characters" in error["message"]
