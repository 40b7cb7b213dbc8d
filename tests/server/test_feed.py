"""The feed of the dashboard: who may watch, how many, one question for all, readers that do not read, the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from octavo.config import Config, ServingConfig
from octavo.errors import EngineDeadError
from octavo.server import feed as feed_module
from octavo.server import reply
from octavo.server.feed import MAX_WATCHERS
from octavo.server.http.connection import CUT
from tests.server.fakes import FakeClient, Harness, Wire, keyed


class FramesClient(FakeClient):
    """An engine whose ring has `number` frames; a head comes before the first."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 3
        self.asked: list[str] = []
        self.is_dead = False
        self.padding = ""

    async def control(self, verb: Any, argument: str = "") -> object:
        if verb != "frames":
            return await super().control(verb, argument)
        self.asked.append(argument)
        if self.is_dead:
            raise EngineDeadError("gone")
        begin = int(argument.rpartition(":")[2]) if argument else 0
        frames: list[dict[str, Any]] = [] if argument else [{"k": "head"}]
        end = min(self.number, begin + 2)
        frames += [{"k": "step", "n": n, "x": self.padding} for n in range(begin, end)]
        return {"cursor": f"a:{end}", "frames": frames, "lost": 0, "more": end < self.number}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "POLL_S", 0.005)
    monkeypatch.setattr(feed_module, "TROUBLE_S", 0.005)
    monkeypatch.setattr(reply, "LOOK_S", 0.005)


@pytest.fixture
async def played() -> AsyncIterator[Harness]:
    harness = Harness(engine=FramesClient())
    yield harness
    await ended(harness)


async def ended(harness: Harness) -> None:
    polling = harness.context.feed._polling
    if polling is not None:
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)


def watching(harness: Harness, headers: dict[str, str] | None = None) -> Wire:
    wire = Wire(harness.app, "/dashboard/feed", {}, headers)
    wire.scope["method"] = "GET"
    return wire


def frames_of(wire: Wire) -> list[dict[str, Any]]:
    lines = [line for line in wire.text.split("\n\n") if line.startswith("data: ")]
    return [frame for line in lines for frame in json.loads(line.removeprefix("data: "))]


def steps_of(wire: Wire) -> list[int]:
    return [frame["n"] for frame in frames_of(wire) if frame["k"] == "step"]


async def test_I06_a_watcher_gets_the_head_what_is_kept_and_what_comes(played: Harness) -> None:
    engine = played.engine
    assert isinstance(engine, FramesClient)
    wire = watching(played)
    task = wire.start()
    await wire.until(lambda: steps_of(wire) == [0, 1, 2])
    assert frames_of(wire)[0] == {"k": "head"}
    assert (await played.get("/health")).json()["open_requests"] == 0, "a watcher is no request"
    headers = dict(wire.sent[0]["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream") and headers[b"cache-control"] == b"no-cache"
    engine.number = 6
    await wire.until(lambda: steps_of(wire) == [0, 1, 2, 3, 4, 5])
    wire.leave()
    await task
    assert len(played.context.feed._watchers) == 0
    await played.context.feed._polling
    assert len(engine.asked) > 0
    asked = len(engine.asked)
    await asyncio.sleep(0)
    assert len(engine.asked) == asked, "without a watcher nobody is asked"


async def test_watchers_at_one_place_share_a_question(played: Harness) -> None:
    engine = played.engine
    assert isinstance(engine, FramesClient)
    first, second = watching(played), watching(played)
    tasks = [first.start()]
    await first.until(lambda: steps_of(first) == [0, 1, 2])
    tasks.append(second.start())
    await second.until(lambda: steps_of(second) == [0, 1, 2])
    engine.asked.clear()
    engine.number = 5
    await first.until(lambda: steps_of(first)[-1] == 4 and steps_of(second)[-1] == 4)
    assert engine.asked.count("a:3") == len([each for each in engine.asked if each == "a:3"])
    assert steps_of(first) == steps_of(second) == [0, 1, 2, 3, 4]
    rounds = engine.asked[engine.asked.index("a:5") :] if "a:5" in engine.asked else []
    assert set(rounds) <= {"a:5"}
    for wire, task in zip((first, second), tasks, strict=True):
        wire.leave()
        await task


async def test_places_for_watchers_are_bounded(played: Harness) -> None:
    wires = [watching(played) for _ in range(MAX_WATCHERS)]
    tasks = [wire.start() for wire in wires]
    await wires[-1].until(lambda: steps_of(wires[-1]))
    refused = await played.get("/dashboard/feed")
    assert refused.status_code == 429 and refused.json()["error"]["code"] == "too_many_watchers"
    for wire in wires:
        wire.leave()
    await asyncio.gather(*tasks)
    assert len(played.context.feed._watchers) == 0


async def test_an_engine_that_is_gone_is_told_once_and_then_the_feed_goes_on(played: Harness) -> None:
    engine = played.engine
    assert isinstance(engine, FramesClient)
    engine.is_dead = True
    wire = watching(played)
    task = wire.start()
    await wire.until(lambda: len(engine.asked) > 5)
    assert wire.text.count("event: trouble") == 1 and "does not answer" in wire.text
    engine.is_dead = False
    await wire.until(lambda: steps_of(wire) == [0, 1, 2])
    wire.leave()
    await task


async def test_a_watcher_that_does_not_read_is_cut_and_disturbs_nobody(
    played: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "MAX_UNREAD_BYTES", 100_000)
    engine = played.engine
    assert isinstance(engine, FramesClient)
    slow, quick_one, cut = watching(played), watching(played), []
    slow.scope[CUT] = cut.append
    slow.pause_after = 1  # the head of the answer, and no more
    tasks = [slow.start(), quick_one.start()]
    await quick_one.until(lambda: steps_of(quick_one) == [0, 1, 2])
    engine.padding = "x" * 20_000
    engine.number = 20
    await quick_one.until(lambda: steps_of(quick_one)[-1] == 19)
    async with asyncio.timeout(60):
        await tasks[0]
    assert cut == [b""] and len(played.context.feed._watchers) == 1
    quick_one.leave()
    await tasks[1]


async def test_a_silent_feed_is_kept_alive() -> None:
    from octavo.server.http.limits import HttpLimits

    harness = Harness(engine=FramesClient(), limits=HttpLimits(keep_alive_s=0.02))
    wire = watching(harness)
    task = wire.start()
    await wire.until(lambda: ": keep-alive" in wire.text)
    wire.leave()
    await task
    await ended(harness)


async def test_watchers_do_not_keep_a_server_from_draining(played: Harness) -> None:
    wire = watching(played)
    task = wire.start()
    await wire.until(lambda: steps_of(wire))
    async with asyncio.timeout(60):
        assert await played.context.lifecycle.drain(60.0) == 0
        await task
    assert wire.sent[-1]["more_body"] is False


@pytest.mark.parametrize("keys, status", [((), 200), (("sk-only",), 200), (("sk-only", "sk-other"), 403)])
async def test_I06_with_several_keys_only_marked_ones_may_watch(keys: tuple[str, ...], status: int) -> None:
    harness = Harness(engine=FramesClient(), config=keyed(*keys))
    headers = {"authorization": f"Bearer {keys[0]}"} if keys else {}
    wire = watching(harness, headers)
    task = wire.start()
    await wire.until(lambda: wire.status is not None)
    assert wire.status == status
    wire.leave()
    await task
    if status == 403:
        assert json.loads(wire.text)["error"]["code"] == "dashboard_not_allowed"
    await ended(harness)


async def test_a_key_that_loses_its_right_watches_no_more(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("keys: [{name: a, key: sk-aaaaaaa, dashboard: true}, {name: b, key: sk-bbbbbbb}]")
    path.chmod(0o600)
    harness = Harness(engine=FramesClient(), config=Config(serving=ServingConfig(api_key_file=str(path))))
    refused = await harness.get("/dashboard/feed", headers={"authorization": "Bearer sk-bbbbbbb"})
    assert refused.status_code == 403 and "dashboard = true" in refused.json()["error"]["message"]
    wire = watching(harness, {"authorization": "Bearer sk-aaaaaaa"})
    task = wire.start()
    await wire.until(lambda: steps_of(wire))
    path.write_text("keys: [{name: a, key: sk-aaaaaaa}, {name: b, key: sk-bbbbbbb}]")
    harness.context.keys.reload()
    async with asyncio.timeout(60):
        await task
    assert wire.sent[-1]["more_body"] is False
    await ended(harness)
