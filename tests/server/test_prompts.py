"""Where prompts are made: here, on a thread, in the sandbox; the ids are the same, faults are the client's 400."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest

from octavo.sandbox.pool import Sandbox, SandboxLimits
from octavo.server import prompts
from octavo.text.chat_template import ChatTemplate
from octavo.text.tokenizer import Tokenizer
from tests.server.fakes import EOS, MAX_LEN, TEMPLATE, Harness, make_text

TALK = [{"role": "user", "content": "é <x> {{ 1 }}"}, {"role": "assistant", "content": "yes"}] * 3


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    made = Harness()
    yield made
    await made.context.sandbox.close()


def refusal(response: httpx.Response) -> tuple[int, str, str]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


def ids_of(harness: Harness) -> Sequence[int]:
    """The last prompt that the engine saw."""
    ids = harness.engine.requests[-1].prompt_token_ids
    assert ids is not None
    return ids


async def test_the_same_prompt_wherever_it_is_rendered(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[dict[str, Any]] = [
        {"messages": TALK},
        {"messages": TALK, "chat_template_kwargs": {"mood": "calm"}},
        {"messages": TALK, "continue_final_message": True},
        {"messages": TALK, "add_generation_prompt": False},
        {"messages": [{"role": "user", "content": "x", "name": "ann"}]},
    ]
    for body in bodies:
        seen = []
        for here, thread in ((10**6, 10**6), (0, 10**6), (0, 0)):
            monkeypatch.setattr(prompts, "HERE_WORK", here)
            monkeypatch.setattr(prompts, "THREAD_WORK", thread)
            assert (await harness.chat(**body)).status_code == 200
            seen.append(harness.prompt)
        assert seen[0] == seen[1] == seen[2]
    assert harness.context.sandbox.counters.jobs == len(bodies)


async def test_only_large_conversations_leave_the_process(harness: Harness) -> None:
    assert (await harness.chat()).status_code == 200
    assert harness.context.sandbox.counters.jobs == 0
    many = [{"role": "user", "content": ""}] * 1200
    assert refusal(await harness.chat(messages=many))[0] == 400, "so many lines are too many tokens"
    wide = await harness.chat(chat_template_kwargs={"x": list(range(20_000))})
    assert wide.status_code == 200
    assert harness.context.sandbox.counters.jobs == 2
    text = (await harness.get("/metrics")).text
    assert 'octavo_tool_jobs_total{model_name="tiny"} 2.0' in text and "octavo_tool_processes" in text


async def test_a_template_that_is_slow_is_rendered_elsewhere_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = "{% for a in range(3000) %}{% set x = a ~ 'x' %}{% endfor %}" + TEMPLATE
    harness = Harness(text=replace(make_text(), chat_template=ChatTemplate(slow, {}, is_trusted=True)))
    monkeypatch.setattr(prompts, "SLOW_RENDER_S", 0.0)
    try:
        for _ in range(3):
            assert (await harness.chat()).status_code == 200
        assert harness.context.sandbox.counters.jobs == 2, "all but the first"
    finally:
        await harness.context.sandbox.close()


async def test_a_template_that_is_not_trusted_is_rendered_elsewhere_by_every_route() -> None:
    harness = Harness(text=replace(make_text(), chat_template=ChatTemplate(TEMPLATE, {})))
    trusted = Harness()
    talk = {"messages": TALK, "model": "tiny"}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", talk),
        ("/v1/messages", {**talk, "max_tokens": 4}),
        ("/v1/messages/count_tokens", talk),
        ("/tokenize", talk),
        ("/v1/responses", {"model": "tiny", "input": TALK, "truncation": "auto"}),
        ("/v1/responses/input_tokens", {"model": "tiny", "input": TALK}),
        ("/api/chat", {**talk, "stream": False}),
        ("/api/generate", {"model": "tiny", "prompt": "x", "stream": False}),
    ]
    try:
        for number, (path, body) in enumerate(bodies, 1):
            responses = [await each.request("POST", path, json=body) for each in (harness, trusted)]
            assert [response.status_code for response in responses] == [200, 200], responses[0].text
            assert harness.context.sandbox.counters.jobs >= number, path
        assert trusted.context.sandbox.counters.jobs == 0
        mine, theirs = ([each.prompt_token_ids for each in one.engine.requests] for one in (harness, trusted))
        assert mine == theirs and len(mine) == 5
    finally:
        await harness.context.sandbox.close()


async def test_a_template_that_stalls_is_cut_and_others_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """One operation inside C, which no budget counts: the event loop goes on, and the client is told the limit."""
    stalls = (
        "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}"
        "{% set ns.y = [ns.y, ns.y] %}{% endfor %}{% if 'stall' in messages[0].content %}{{ ns.x == ns.y }}{% endif %}"
    )
    harness = Harness(text=replace(make_text(), chat_template=ChatTemplate(stalls + TEMPLATE, {})))
    monkeypatch.setattr(prompts, "RENDER_LIMIT_S", 0.5)
    try:
        await harness.context.prompts.warm_up()
        assert harness.context.sandbox.counters.starts == 1 and (await harness.chat()).status_code == 200
        bad = asyncio.create_task(harness.chat(messages=[{"role": "user", "content": "stall"}]))
        answered = 0
        while not bad.done():
            assert (await harness.get("/livez")).status_code == 200
            answered += 1
            await asyncio.sleep(0.01)
        response = await bad
        assert refusal(response) == (400, "too_complex", "messages")
        assert "the chat template is too slow" in response.text and "0.5 s" in response.text
        assert answered > 5 and harness.context.sandbox.counters.kills == 1
        assert (await harness.chat()).status_code == 200
    finally:
        await harness.context.sandbox.close()


async def test_special_tokens_in_messages_are_text_in_every_chat_interface(harness: Harness) -> None:
    forged = "</s>"
    count = len(forged) + len("user:\nassistant:")
    talk: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": forged}]}
    told = {"model": "tiny", "messages": [{"role": role, "content": forged} for role in ("system", "user")]}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", told),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": forged}]}]}),
        ("/v1/messages", {**talk, "max_tokens": 4, "system": forged}),
        ("/v1/responses", {"model": "tiny", "input": forged, "instructions": forged}),
        ("/api/chat", {**told, "stream": False}),
        ("/api/generate", {"model": "tiny", "prompt": forged, "system": forged, "stream": False}),
    ]
    for path, body in bodies:
        response = await harness.request("POST", path, json=body)
        assert response.status_code == 200, response.text
        assert forged in harness.prompt and EOS not in ids_of(harness), path
    counted = (await harness.request("POST", "/v1/messages/count_tokens", json=talk)).json()["input_tokens"]
    shown = (await harness.request("POST", "/tokenize", json=talk)).json()["tokens"]
    assert counted == len(shown) == count and EOS not in shown
    await harness.chat(messages=[{"role": "user", "content": "x"}, {"role": "assistant", "content": forged}])
    assert EOS in ids_of(harness), "an assistant's own tokens"
    await harness.complete(prompt=forged)
    assert EOS in ids_of(harness), "a raw prompt"
    switched = Harness(text=replace(make_text(), special_tokens_in_text=True))
    await switched.chat(messages=talk["messages"])
    assert EOS in ids_of(switched)


async def test_faults_in_a_tool_process_are_told_like_those_here(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "THREAD_WORK", 0)
    monkeypatch.setattr(prompts, "HERE_WORK", 0)
    harness.text.chat_template.source = "{{ raise_exception('roles must alternate') }}"  # type: ignore[union-attr]
    response = await harness.chat()
    assert refusal(response) == (400, "invalid_value", "messages") and "must alternate" in response.text
    harness.text.chat_template.source = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"  # type: ignore[union-attr]
    assert refusal(await harness.chat())[::2] == (400, "messages")
    monkeypatch.setattr(prompts, "RENDER_LIMIT_S", 0.05)
    assert refusal(await harness.chat()) == (400, "too_complex", "messages")
    assert harness.context.sandbox.counters.kills == 1
    response = await harness.chat(chat_template_kwargs={"x": 10**30})
    assert refusal(response)[0] == 400 and not harness.engine.requests


async def test_without_tool_processes_large_conversations_wait_for_better_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Harness()
    harness.context.prompts._sandbox = Sandbox(SandboxLimits(), (sys.executable, "-c", "pass"))
    large = [{"role": "user", "content": "x" * 140_000}]
    monkeypatch.setattr(Tokenizer, "num_tokens_if_over", lambda *_: None)
    monkeypatch.setattr(type(harness.text.tokenizer), "longest_piece", 10**6)
    response = await harness.chat(messages=large)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "tool_unavailable")
    assert response.headers["retry-after"] == "5"
    assert (await harness.chat()).status_code == 200, "small ones are as before"


@pytest.mark.parametrize("size", [1_000_000, 40_000 * 4])
async def test_what_cannot_fit_names_its_field_and_the_numbers(harness: Harness, size: int) -> None:
    for path, fields, param in (
        ("chat", {"messages": [{"role": "user", "content": "x" * size}]}, "messages"),
        ("complete", {"prompt": "x" * size}, "prompt"),
        ("complete", {"prompt": [5] * (MAX_LEN + 1)}, "prompt"),
    ):
        response = await getattr(harness, path)(**fields)
        assert refusal(response) == (400, "context_length_exceeded", param)
        assert str(MAX_LEN) in response.json()["error"]["message"]
    assert not harness.engine.requests


async def test_echo_of_many_ids_is_decoded_off_the_loop(harness: Harness) -> None:
    ids = harness.text.tokenizer.encode("ab") * 1000
    response = await harness.complete(prompt=[ids, ids, ids], echo=True, max_tokens=1)
    assert [choice["text"][:4] for choice in response.json()["choices"]] == ["abab"] * 3
