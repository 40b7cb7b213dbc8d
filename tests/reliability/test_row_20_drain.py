"""Row 20: SIGTERM under load, once and twice: unready at once, what can finish finishes, the rest is told."""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fake_server import FakeServer
from tests.reliability.scorecard import Score
from tests.tiny_models import make_tiny_model

SHORT, LONG = 8, 200  # tokens: the first finish within the drain time, the others do not
POLL_S = 0.005


@dataclass
class Seen:
    """One request as its client saw it."""

    is_stream: bool
    status: int = 0
    text: str = ""
    broken: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether it ended in a way that its client can tell: an answer, or an explicit error."""
        if self.broken or not self.is_stream:
            return not self.broken and self.status in (200, 503)
        return self.status == 503 or self.text.endswith("data: [DONE]\n\n")

    @property
    def has_finished(self) -> bool:
        return self.is_whole and self.status == 200 and '"error"' not in self.text


async def ask(client: httpx.AsyncClient, number: int, max_tokens: int, is_stream: bool) -> Seen:
    seen = Seen(is_stream)
    body = {"prompt": f"prompt {number}", "max_tokens": max_tokens, "stream": is_stream, "ignore_eos": True}
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            seen.status = response.status_code
            async for text in response.aiter_text():
                seen.text += text
    except httpx.HTTPError as error:
        seen.broken = repr(error)
    return seen


async def unready_after(client: httpx.AsyncClient) -> float:
    """Seconds until /readyz says 503."""
    begun = time.perf_counter()
    while (await client.get("/readyz")).status_code == 200:
        await asyncio.sleep(POLL_S)
    return time.perf_counter() - begun


async def drain(server: FakeServer, num_signals: int) -> tuple[list[Seen], float, list[Any]]:
    """Signal the supervisor under load: what the clients saw, when it was unready, what late ones were told."""
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(base_url=server.url, timeout=30, limits=limits) as client:
        await client.get("/readyz")
        tasks = [
            asyncio.create_task(ask(client, number, LONG if number % 2 else SHORT, is_stream=number % 4 < 3))
            for number in range(24)
        ]
        while server.status()["engine"]["open_requests"] + sum(task.done() for task in tasks) < 24:
            await asyncio.sleep(POLL_S)
        server.process.send_signal(signal.SIGTERM)
        seconds = await unready_after(client)
        late = [await client.post("/v1/completions", json={"prompt": "late"}), await client.get("/livez")]
        if num_signals > 1:
            server.process.send_signal(signal.SIGTERM)
        return await asyncio.gather(*tasks), seconds, late


@pytest.mark.parametrize("num_signals", [1, 2])
def test_row_20_a_drain_truncates_nothing(
    num_signals: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, score: Score
) -> None:
    model = str(make_tiny_model("smollm2", tmp_path / "tiny"))
    drain_s = "1.5" if num_signals == 1 else "60"
    with FakeServer(model, tmp_path / "log", "--shutdown-timeout", drain_s, env={"FAKE_STEP_S": "0.02"}) as server:
        seen, unready_s, (refused, live) = asyncio.run(drain(server, num_signals))
        code = server.process.wait(30)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining") and refused.headers[
        "retry-after"
    ]
    assert live.status_code == 200
    score.count("truncated without an error", sum(not one.is_whole for one in seen))
    score.count("short requests cut by one signal", sum(not one.has_finished for one in seen[::2]) * (num_signals == 1))
    assert sum(one.has_finished for one in seen[1::2]) == 0, "the long ones were to be cut"
    score.time(f"unready after {num_signals} SIGTERM, s", unready_s, most=0.1)
    assert code == 0 and "Traceback" not in server.text, server.text
