"""A server takes over what the one before left in the journal: real engine processes, one app after the other."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from octavo.frontend.engine_supervisor import EngineSupervisor
from octavo.frontend.journal import open_journal
from octavo.frontend.sessions import Sessions
from octavo.server.app import create_app
from octavo.server.context import Context
from octavo.server.reply import restore_runs
from tests.server.fakes import Wire, make_text
from tests.server.test_idempotency import CHAT, COMPLETIONS, assembled, blocks, chat_body, key, plain
from tests.settings import load_config

ENGINE = Path(__file__).resolve().parents[1] / "reliability" / "timed_engine.py"
STEP_MS = "3"


class Life:
    """One life of a server."""

    def __init__(self, app: Any, keeper: EngineSupervisor, taken: tuple[int, int]) -> None:
        self.app = app
        self.keeper = keeper
        self.taken = taken
        self.context: Context = app.state.context

    async def whole(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Wire:
        wire = Wire(self.app, path, body, headers)
        await asyncio.wait_for(wire.start(), 60)
        return wire


@asynccontextmanager
async def life(folder: Path, **settings: Any) -> AsyncIterator[Life]:
    """A server with this journal; leaving it is a death: nothing that follows reaches the journal."""
    config = load_config({"model": STEP_MS, "journal": str(folder), **settings})
    journal = open_journal(config)
    assert journal is not None
    keeper = await EngineSupervisor.start(config, command=(sys.executable, str(ENGINE)), observer=journal)
    text = make_text()
    sessions = Sessions(keeper, text, capacity=keeper.capacity)
    app = create_app(sessions, text, config, keeper.statistics)
    try:
        yield Life(app, keeper, restore_runs(app.state.context, journal, keeper.restore))
    finally:
        await app.state.context.runs.close()
        await keeper.close()


KINDS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"max_tokens": 60, "temperature": 0}),
    (CHAT, {"max_tokens": 40, "n": 3, "logprobs": True, "top_logprobs": 2, "seed": 5}),
    (COMPLETIONS, {"prompt": ["ab", "cd"], "max_tokens": 50, "logprobs": 1, "ignore_eos": True}),
    (COMPLETIONS, {"prompt": "xyz", "echo": True, "max_tokens": 60, "stop": ["q", "Z"], "temperature": 0.8}),
]


@pytest.mark.parametrize("number", range(len(KINDS)))
async def test_a_stream_goes_on_in_the_next_life(tmp_path: Path, number: int) -> None:
    path, fields = KINDS[number]
    options = {"stream": True, "stream_options": {"include_usage": True}, **fields}
    body = chat_body(**options) if path == CHAT else {"model": STEP_MS, **options}
    body.pop("model")
    async with life(tmp_path / "other") as first:
        unbroken = blocks((await first.whole(path, {**body, "seed": 9}, key())).text)
    expected = assembled(plain(unbroken))
    async with life(tmp_path / "j") as first:
        wire = Wire(first.app, path, {**body, "seed": 9}, key())
        reading = wire.start()
        await wire.until(lambda: len(blocks(wire.text)) >= 8)
        wire.leave()
        await reading
        had = blocks(wire.text)[:-1]
        assert had[-1][1] != "[DONE]", "it was still running"
    async with life(tmp_path / "j") as second:
        assert second.taken == (1, 0)
        retry = await second.whole(path, {**body, "seed": 9}, key(last=had[-1][0]))
        got = assembled(plain(had) + plain(blocks(retry.text)))
        again = assembled(plain(blocks((await second.whole(path, {**body, "seed": 9}, key())).text)))
    for each in (expected, got, again):
        for usage in each["usage"]:
            usage["prompt_tokens_details"] = None  # the cache of another engine
    assert len(got["ids"]) == len(again["ids"]) == 1 and got["ids"] == again["ids"]
    assert {**got, "ids": 0} == {**again, "ids": 0} == {**expected, "ids": 0}
    async with life(tmp_path / "j") as third:
        assert third.taken == (0, 1)
        stored = await third.whole(path, {**body, "seed": 9}, key())
        assert {**assembled(plain(blocks(stored.text))), "ids": 0, "usage": 0} == {**expected, "ids": 0, "usage": 0}
        assert third.keeper.report()["open_requests"] == 0, "it was not computed again"


async def test_a_whole_answer_is_the_same_in_every_life(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "n": 2, "logprobs": True}
    answers = []
    for _ in range(3):
        async with life(tmp_path / "j") as server:
            answers.append((await server.whole(CHAT, body, key())).text)
    assert answers[1] == answers[2], "from the journal it is the same bytes"
    first, later = (json.loads(answer) for answer in answers[:2])
    timings = [answer.pop("timings") for answer in (first, later)]
    assert timings[0].keys() == timings[1].keys() and all(each["total_s"] > 0 for each in timings)
    assert first == later


async def test_nobody_comes_back(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3000, "ignore_eos": True, "stream": True}
    async with life(tmp_path / "j") as first:
        wire = Wire(first.app, CHAT, body, {**key(), "X-Request-Id": "mine"})
        reading = wire.start()
        await wire.until(lambda: len(blocks(wire.text)) >= 3)
        wire.leave()
        await reading
    async with life(tmp_path / "j", orphan_timeout_s=0.2) as second:
        assert second.taken == (1, 0) and second.context.queue.num_pending == 1
        (name,) = second.context.request_index.find("mine", "")
        assert name.startswith("mine~"), "by the name that its client knows"
        await wire.until(lambda: second.context.runs.report()["orphaned"] == 1)
        await wire.until(lambda: second.keeper.report()["open_requests"] == 0)
        assert second.context.queue.num_running == 0 and len(second.context.request_index) == 0
    async with life(tmp_path / "j") as third:
        assert third.taken == (0, 0)


async def test_of_two_runs_with_one_key_the_later_counts(tmp_path: Path) -> None:
    """The record that the first was forgotten may be lost with the disk."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    async with life(tmp_path / "j") as first:
        await first.whole(CHAT, body, key())
        runs = first.context.runs
        run = next(iter(runs._runs.values()))
        number, run.number = run.number, None
        runs._drop(run)  # without a record
        await first.whole(CHAT, body, key())
        assert runs.journal is not None and list(runs.journal.state.runs) == [number, 2]
    async with life(tmp_path / "j") as second:
        assert second.taken == (0, 1) and len(second.context.runs) == 1
        assert second.context.runs.journal is not None
        assert list(second.context.runs.journal.state.runs) == [2]
