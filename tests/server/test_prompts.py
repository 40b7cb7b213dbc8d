"""Where prompts are made: here, on a thread, in a tool process; the ids are the same, faults are the client's 400."""

import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from octavo.server import prompts
from octavo.text.chat_template import ChatTemplate
from octavo.tool.process import ToolLimits, ToolProcess
from tests.server.fakes import MAX_LEN, TEMPLATE, Harness, make_text

TALK = [{"role": "user", "content": "é <x> {{ 1 }}"}, {"role": "assistant", "content": "yes"}] * 3


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    made = Harness()
    yield made
    await made.context.tool.close()


def refusal(response: httpx.Response) -> tuple[int, str, str]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


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
    assert harness.context.tool.counters.jobs == len(bodies)


async def test_only_large_conversations_leave_the_process(harness: Harness) -> None:
    assert (await harness.chat()).status_code == 200
    assert harness.context.tool.counters.jobs == 0
    many = [{"role": "user", "content": ""}] * 1200
    assert refusal(await harness.chat(messages=many))[0] == 400, "so many lines are too many tokens"
    wide = await harness.chat(chat_template_kwargs={"x": list(range(20_000))})
    assert wide.status_code == 200
    assert harness.context.tool.counters.jobs == 2
    text = (await harness.get("/metrics")).text
    assert 'octavo_tool_jobs_total{model_name="tiny"} 2.0' in text and "octavo_tool_processes" in text


async def test_a_template_that_is_slow_is_rendered_elsewhere_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = "{% for a in range(3000) %}{% set x = a ~ 'x' %}{% endfor %}" + TEMPLATE
    harness = Harness(text=replace(make_text(), chat_template=ChatTemplate(slow, {})))
    monkeypatch.setattr(prompts, "SLOW_RENDER_S", 0.0)
    try:
        for _ in range(3):
            assert (await harness.chat()).status_code == 200
        assert harness.context.tool.counters.jobs == 2, "all but the first"
    finally:
        await harness.context.tool.close()


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
    assert harness.context.tool.counters.kills == 1
    response = await harness.chat(chat_template_kwargs={"x": 10**30})
    assert refusal(response)[0] == 400 and not harness.engine.requests


async def test_without_tool_processes_large_conversations_wait_for_better_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Harness()
    harness.context.prompts._tool = ToolProcess(ToolLimits(), (sys.executable, "-c", "pass"))
    large = [{"role": "user", "content": "x" * 140_000}]
    monkeypatch.setattr(prompts, "num_tokens_if_over", lambda *_: None)
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
