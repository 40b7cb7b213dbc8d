"""Streams with images over a real server whose engine is killed: they go on, with the ids of a run without a kill."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("transformers")
from tests.fake_server import RealServer
from tests.models.vision_chat import CHATS, ChattingModel, Messages
from tests.server.test_vision_chats import OTHER, PICTURE, THIRD, sent

pytestmark = pytest.mark.slow  # two starts of an engine that imports transformers
FLAGS = ("--dtype", "float32", "--threads", "1", "--max-num-seqs", "5")
LENGTH = 120  # tokens of an answer, if they fit: the engine is killed before the first one ends


@pytest.fixture(scope="module", params=CHATS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("served")
    ChattingModel(request.param, folder / "model")
    with RealServer(str(folder / "model"), folder / "log", *FLAGS) as server:
        yield server


def bodies() -> list[dict[str, Any]]:
    """Chats with several images, greedy and seeded, and one without an image."""
    text = {"type": "text", "text": "What is it?"}
    made = []
    for number, images in enumerate([[PICTURE], [OTHER, PICTURE], [THIRD], []]):
        messages: Messages = [
            {"role": "user", "content": [*({"type": "image", "image": image} for image in images), text]}
        ]
        common = {"messages": sent(messages), "max_tokens": LENGTH, "ignore_eos": True, "stream": True}
        common |= {"return_token_ids": True}
        made += [{**common, "temperature": 0.0}, {**common, "temperature": 0.9, "seed": number, "n": 2}]
    return made


class Stream:
    """One streamed chat: the ids of each choice."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body
        self.ids: dict[int, list[int]] = {}
        self.reasons: list[str] = []

    async def read(self, http: httpx.AsyncClient) -> None:
        async with http.stream("POST", "/v1/chat/completions", json=self.body, timeout=120) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line.removeprefix("data: "))["choices"]:
                        self.ids.setdefault(choice["index"], []).extend(choice.get("token_ids") or ())
                        self.reasons += [choice["finish_reason"]] if choice["finish_reason"] else []


async def test_row_01_E02_streams_with_images_go_on_after_a_kill_of_the_engine(server: RealServer) -> None:
    async with httpx.AsyncClient(base_url=server.url) as http:
        whole = [Stream(body) for body in bodies()]
        for stream in whole:
            await stream.read(http)
        engine = await asyncio.to_thread(server.pid, "engine")
        cut = [Stream(body) for body in bodies()]
        reading = [asyncio.create_task(stream.read(http)) for stream in cut]
        while sum(bool(stream.ids) for stream in cut) < 3:
            await asyncio.sleep(0.002)
        os.kill(engine, signal.SIGKILL)
        num_open = sum(not task.done() for task in reading)
        await asyncio.gather(*reading)
    counted = (await asyncio.to_thread(server.status))["engine"]
    assert num_open > 4 and counted["restarts"] == 1 and counted["resumed_requests"] == num_open
    assert [stream.ids for stream in cut] == [stream.ids for stream in whole]
    for stream in cut:
        assert all(80 < len(ids) <= LENGTH for ids in stream.ids.values())  # LLaVA's images leave less room
        assert stream.reasons == ["length"] * stream.body.get("n", 1)
