"""Two hundred hostile images: each is a clear 400 (or an image that Pillow reads), and nothing else is disturbed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from tests.media.hostile import hostile_files
from tests.media.items import data_url
from tests.server.test_images import Served, part, serving

MAX_CHILD_BYTES = 1 << 30  # SandboxLimits.memory_bytes
MAX_GROWTH_BYTES = 256 << 20


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(tmp_path) as server:
        yield server


async def test_two_hundred_hostile_files_are_refused_and_disturb_nothing(served: Served) -> None:
    files, process = hostile_files(), psutil.Process()
    assert len(files) >= 200
    texts = {"messages": [{"role": "user", "content": "hello"}]}
    assert (await served.post("/v1/chat/completions", **texts)).status_code == 200
    before, readable, peak = process.memory_info().rss, [], 0
    for start in range(0, len(files), 8):
        group = files[start : start + 8]
        answers = asyncio.gather(*(served.chat(part(data_url(data))) for _, data in group))
        beside = await served.post("/v1/chat/completions", **texts)
        assert beside.status_code == 200 and beside.json()["choices"][0]["message"]["content"] == "Hi."
        for (name, _), answer in zip(group, await answers, strict=True):
            error = answer.json().get("error", {})
            if answer.status_code == 200:
                readable.append(name)
            else:
                assert answer.status_code == 400, (name, answer.text)
                assert error["param"] == "messages[0].content[0].image_url" and "image" in error["message"], name
                assert "Traceback" not in answer.text and len(error["message"]) < 300, name
        peak = max([peak, *(child.memory_info().rss for child in process.children())])
    assert all(" with another head " in name for name in readable), readable  # a change that does no harm
    assert len(files) - len(readable) >= 180
    assert process.memory_info().rss - before < MAX_GROWTH_BYTES and peak < MAX_CHILD_BYTES
