"""Anthropic's own tool runner against this server: it asks for a thread, is told there are none, and goes on."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic import beta_async_tool

from octavo.assembly import build_local
from octavo.config.sources import config_from_keywords
from octavo.server.app import create_app
from tests.server.fakes import Harness

RULES = [
    {"role": "tool", "say": "It is sunny."},
    {"role": "user", "call": {"name": "get_weather", "arguments": {"city": "Paris"}}},
]


class Recording(httpx2.AsyncBaseTransport):
    """The app, and what was sent to it."""

    def __init__(self, app: Any) -> None:
        self._app = httpx2.ASGITransport(app)
        self.bodies: list[dict[str, Any]] = []
        self.statuses: list[int] = []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.bodies.append(json.loads(request.content))
        response = await self._app.handle_async_request(request)
        self.statuses.append(response.status_code)
        return response


@pytest.fixture
async def sent(tmp_path: Path) -> AsyncIterator[Recording]:
    path = tmp_path / "script.json"
    path.write_text(json.dumps(RULES))
    config = config_from_keywords(f"scripted:{path}", {})
    engine = build_local(config)
    app = create_app(engine.sessions, engine.text, config, engine.client.statistics)
    yield Recording(app)
    await app.state.context.sandbox.close()
    await engine.client.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_the_tool_runner_goes_on_without_a_thread(sent: Recording, stream: bool) -> None:
    asked: list[str] = []

    @beta_async_tool
    async def get_weather(city: str) -> str:
        """Weather of a city.

        Args:
            city: its name
        """
        asked.append(city)
        return "25 degrees"

    async with (
        httpx2.AsyncClient(transport=sent, base_url="http://localhost") as http,
        anthropic.AsyncAnthropic(api_key="x", base_url="http://localhost", http_client=http, max_retries=0) as client,
    ):
        runner: Any = client.beta.messages.tool_runner(
            model="script",
            max_tokens=200,
            tools=[get_weather],
            messages=[{"role": "user", "content": "weather?"}],
            stream=stream,
        )
        last = await runner.until_done()
    assert asked == ["Paris"]
    assert [block.text for block in last.content if block.type == "text"] == ["It is sunny."]
    assert sent.bodies[0]["thread"] == {"type": "create"}, "what this version sends by default"
    assert sent.statuses == [400, 200, 200]
    assert not any("thread" in body for body in sent.bodies[1:])


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
async def test_the_refusal_of_a_thread_is_the_one_that_anthropics_packages_know(path: str, thread: Any) -> None:
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], "thread": thread}
    harness = Harness()
    response = await harness.request("POST", path, json=body, headers={"anthropic-beta": "message-threads-2026-08-12"})
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert response.headers["x-should-retry"] == "false" and not harness.engine.requests
    assert (await harness.request("POST", path, json={**body, "thread": None})).status_code == 200


async def test_other_errors_have_no_details() -> None:
    response = await Harness().request("POST", "/v1/messages", json={"messages": []})
    assert response.status_code == 400 and "details" not in response.json()["error"]
