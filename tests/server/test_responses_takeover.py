"""Responses with an Idempotency-Key over a restart: the journal has them, and whoever asks again has them stored."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from octavo.server.http.keys import ANONYMOUS
from tests.server.fakes import Wire
from tests.server.response_events import check_events, put_together, read_events
from tests.server.test_idempotency import key
from tests.server.test_takeover import life

PATH = "/v1/responses"
BODY: dict[str, Any] = {"input": "hi", "max_output_tokens": 30, "seed": 3, "metadata": {"a": "b"}}


async def test_an_answer_is_the_same_in_the_next_life_and_stored_there(tmp_path: Path) -> None:
    async with life(tmp_path / "j") as first:
        before = json.loads((await first.whole(PATH, BODY, key())).text)
    async with life(tmp_path / "j") as second:
        assert second.taken == (0, 1) and len(second.context.responses) == 0
        after = json.loads((await second.whole(PATH, BODY, key())).text)
        assert len(second.context.responses) == 1
        chained = {**BODY, "input": "go on", "previous_response_id": after["id"]}
        assert (await second.whole(PATH, chained, {})).status == 200
    before.pop("timings"), after.pop("timings")
    assert before == after


async def test_a_stream_that_was_cut_is_told_anew(tmp_path: Path) -> None:
    body = {**BODY, "stream": True, "max_output_tokens": 60, "ignore_eos": True}
    async with life(tmp_path / "j") as first:
        wire = Wire(first.app, PATH, body, key())
        reading = wire.start()
        await wire.until(lambda: wire.text.count("output_text.delta") >= 10)
        wire.leave()
        await reading
        had = wire.text.rsplit("\n\n", 1)[0]
    async with life(tmp_path / "j") as second:
        assert second.taken == (1, 0)
        text = (await second.whole(PATH, body, key())).text
        events = read_events(text)
        check_events(events)
        assert text.startswith(had), "every reading has the same events"
        assert put_together(events) == events[-1]["response"]["output"]
        assert events[-1]["type"] == "response.incomplete"


async def test_one_in_the_background_goes_on_for_whoever_asks_again(tmp_path: Path) -> None:
    body = {**BODY, "background": True, "max_output_tokens": 200, "ignore_eos": True}
    async with life(tmp_path / "j") as first:
        begun = json.loads((await first.whole(PATH, body, key())).text)
        assert begun["status"] == "in_progress"
    async with life(tmp_path / "j") as second:
        again = json.loads((await second.whole(PATH, body, key())).text)
        assert (again["id"], again["status"]) == (begun["id"], "in_progress")
        stored = second.context.responses
        async with asyncio.timeout(60):
            while stored.get(ANONYMOUS.tenant, begun["id"]).status == "in_progress":
                await asyncio.sleep(0.01)
        ended = json.loads((await second.whole(PATH, body, key())).text)
        assert ended["status"] == "incomplete" and ended["usage"]["output_tokens"] == 200
