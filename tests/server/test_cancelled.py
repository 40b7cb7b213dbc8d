"""A request that is cancelled elsewhere: those who wait for it are told not to ask again, and SDKs do not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest

from tests.server.fakes import Harness

NAME = {"X-Request-Id": "mine"}
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture
def harness() -> Harness:
    made = Harness()
    made.engine.is_held = True
    return made


def sdk(harness: Harness) -> openai.AsyncOpenAI:
    client = httpx.AsyncClient(transport=httpx.ASGITransport(harness.app), base_url="http://127.0.0.1/v1")
    return openai.AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="none", max_retries=2, http_client=client)


def anthropic_sdk(harness: Harness) -> anthropic.AsyncAnthropic:
    client = httpx2.AsyncClient(transport=httpx2.ASGITransport(harness.app), base_url="http://127.0.0.1")
    return anthropic.AsyncAnthropic(base_url="http://127.0.0.1", api_key="none", max_retries=2, http_client=client)


async def cancelled(harness: Harness, asking: Awaitable[object]) -> BaseException:
    """What a caller gets whose request is cancelled as soon as the engine has it."""
    task = asyncio.ensure_future(asking)
    async with asyncio.timeout(60):
        await harness.engine.submitted.wait()
    answer = await harness.request("POST", "/v1/requests/mine/cancel")
    assert answer.status_code == 200 and answer.json() == {"id": "mine", "cancelled": True}
    [error] = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(error, BaseException)
    return error


class EventError(Exception):
    """An error that a stream of responses tells as an event; the package raises nothing for it."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


async def read(stream: Awaitable[Any]) -> None:
    async for event in await stream:
        if getattr(event, "type", "") == "error":
            raise EventError(event.code)


ASKED: dict[str, Callable[[openai.AsyncOpenAI], Awaitable[object]]] = {
    "chat": lambda it: it.chat.completions.create(model="tiny", messages=MESSAGES, extra_headers=NAME),
    "completion": lambda it: it.completions.create(model="tiny", prompt="hi", extra_headers=NAME),
    "response": lambda it: it.responses.create(model="tiny", input="hi", extra_headers=NAME),
    "chat, streamed": lambda it: read(
        it.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, extra_headers=NAME)
    ),
    "response, streamed": lambda it: read(
        it.responses.create(model="tiny", input="hi", stream=True, extra_headers=NAME)
    ),
    "with a key for retries": lambda it: it.completions.create(
        model="tiny", prompt="hi", extra_headers={**NAME, "Idempotency-Key": "one"}
    ),
}


@pytest.mark.parametrize("name", ASKED)
async def test_the_openai_package_asks_once(harness: Harness, name: str) -> None:
    async with sdk(harness) as client:
        error = await cancelled(harness, ASKED[name](client))
    assert isinstance(error, openai.APIError | EventError) and error.code == "cancelled", error
    if isinstance(error, openai.APIStatusError):
        assert error.status_code == 499 and error.response.headers["x-should-retry"] == "false"
        assert "retry-after" not in error.response.headers
    assert len(harness.engine.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_the_anthropic_package_asks_once(harness: Harness, stream: bool) -> None:
    async with anthropic_sdk(harness) as client:
        asked: Any = client.messages.create(
            model="tiny", max_tokens=9, messages=MESSAGES, stream=stream, extra_headers=NAME
        )
        error = await cancelled(harness, read(asked) if stream else asked)
    assert isinstance(error, anthropic.APIStatusError), error
    assert "cancelled" in str(error) and len(harness.engine.requests) == 1


async def test_a_retry_with_the_same_key_finds_it_cancelled(harness: Harness) -> None:
    asked = harness.complete(headers={**NAME, "Idempotency-Key": "k"})
    await cancelled_answer(harness, asked)
    again = await harness.complete(headers={"Idempotency-Key": "k"})
    assert (again.status_code, again.json()["error"]["code"]) == (499, "cancelled")
    assert len(harness.engine.requests) == 1


async def cancelled_answer(harness: Harness, asked: Awaitable[httpx.Response]) -> None:
    task = asyncio.ensure_future(asked)
    async with asyncio.timeout(60):
        await harness.engine.submitted.wait()
    await harness.request("POST", "/v1/requests/mine/cancel")
    assert (await task).status_code == 499


async def test_cancelling_a_response_answers_with_it_and_its_readers_are_told_not_to_ask_again(
    harness: Harness,
) -> None:
    async with sdk(harness) as client:
        begun = await client.responses.create(model="tiny", input="hi", background=True)
        reading = asyncio.create_task(
            harness.get(f"/v1/responses/{begun.id}", params={"stream": "true"}),
        )
        async with asyncio.timeout(60):
            await harness.engine.submitted.wait()
            while not harness.context.runs.num_attached:
                await asyncio.sleep(0.001)
        made = await client.responses.cancel(begun.id)
        assert made.id == begun.id and made.status == "cancelled" and made.error is None
        assert '"cancelled"' in (await reading).text
        again = await client.responses.cancel(begun.id)
        assert again.status == "cancelled"
        assert (await client.responses.retrieve(begun.id)).status == "cancelled"
    assert len(harness.engine.requests) == 1
