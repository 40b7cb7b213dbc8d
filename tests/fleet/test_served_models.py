"""ServedModels with engines that are played: loading, waiting, making room, unloading, failing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.settings import load_config

from octavo.errors import CapacityError, EngineDeadError, ModelLoadError
from octavo.fleet import served_models as module
from octavo.fleet.model_configs import served_models
from octavo.fleet.served_models import ModelState, OnDemandModel, ServedModels

LONG_S = 30


class PlayedEngine:
    """An engine without a process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.capacity: Any = f"capacity of {name}"
        self.failed = asyncio.Event()
        self.failure = ""
        self.is_closed = False
        self.may_close = asyncio.Event()
        self.may_close.set()
        self.processes = {"engine": 1}

    async def close(self) -> None:
        await self.may_close.wait()
        self.is_closed = True

    def report(self) -> dict[str, object]:
        return {"state": "ready"}

    def trouble(self) -> str | None:
        return None


class Player:
    """Starts engines: `gate` holds all starts back, `errors` has what the next starts of a model raise."""

    def __init__(self) -> None:
        self.engines: list[PlayedEngine] = []
        self.errors: dict[str, list[Exception]] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_starting = self.most_starting = 0

    @property
    def running(self) -> list[str]:
        return sorted(engine.name for engine in self.engines if not engine.is_closed)

    async def start(self, config: Any, observer: Any) -> Any:
        name = config.model.served_model_name[0]
        self.num_starting += 1
        self.most_starting = max(self.most_starting, self.num_starting)
        try:
            await self.gate.wait()
            await asyncio.sleep(0)
            if self.errors.get(name):
                raise self.errors[name].pop(0)
        finally:
            self.num_starting -= 1
        self.engines.append(PlayedEngine(name))
        return self.engines[-1]


@asynccontextmanager
async def models(**settings: Any) -> AsyncIterator[tuple[Player, ServedModels, list[OnDemandModel]]]:
    player = Player()
    served = ServedModels(served_models(load_config(settings), ("a", "b", "c")), player.start)
    async with asyncio.timeout(LONG_S):
        try:
            yield player, served, list(served.models.values())
        finally:
            await served.close()
    assert player.running == [], "no engine is left"


async def until(model: OnDemandModel, state: ModelState) -> None:
    while model.state is not state:
        await asyncio.sleep(0.001)


async def test_waiting_requests_share_one_load_and_loads_are_one_at_a_time() -> None:
    async with models() as (player, served, [a, b, _]):
        player.gate.clear()
        waiting = [asyncio.create_task(model.acquire()) for model in (a, b, a, b, a)]
        await until(a, ModelState.LOADING)
        assert b.state is ModelState.UNLOADED
        player.gate.set()
        releases = await asyncio.gather(*waiting)
        assert player.running == ["a", "b"] and player.most_starting == 1
        assert (a.num_users, b.num_users) == (3, 2)
        assert a.capacity == "capacity of a"
        for release in releases:
            release()
            release()  # once only
        assert (a.num_users, b.num_users) == (0, 0)
        assert a.expires_at is None, "it stays loaded"
        assert served.trouble() is None


async def test_an_idle_model_is_unloaded_and_one_with_users_is_not() -> None:
    async with models(keep_alive_s=0.02) as (player, _, [a, *_rest]):
        release = await a.acquire()
        await asyncio.sleep(0.06)
        assert a.state is ModelState.READY and a.expires_at is None
        second = await a.acquire()
        release()
        await asyncio.sleep(0.06)
        assert a.state is ModelState.READY
        second()
        assert a.expires_at is not None
        await until(a, ModelState.UNLOADED)
        assert player.running == []
        with pytest.raises(EngineDeadError, match="model a is not loaded"):
            await a.statistics()
        (await a.acquire())()
        assert a.num_loads == 2


async def test_a_request_that_arrives_while_the_model_is_unloaded_loads_it_again() -> None:
    async with models(keep_alive_s=0.0) as (player, _, [a, *_rest]):
        (await a.acquire())()
        player.engines[0].may_close.clear()
        await until(a, ModelState.UNLOADING)
        waiting = asyncio.create_task(a.acquire())
        await asyncio.sleep(0.01)
        assert len(player.engines) == 1, "its memory is not free yet"
        player.engines[0].may_close.set()
        release = await waiting
        assert [engine.is_closed for engine in player.engines] == [True, False]
        release()


async def test_the_least_recently_used_idle_model_makes_room() -> None:
    async with models(max_loaded_models=2) as (player, _, [a, b, c]):
        (await a.acquire())()
        release_b = await b.acquire()
        (await a.acquire())()
        (await c.acquire())()  # a was used later than b, but b has a user
        assert player.running == ["b", "c"]
        release_b()
        (await a.acquire())()
        assert player.running == ["a", "b"], "c was released before b"


async def test_a_busy_model_makes_room_once_its_users_have_left_and_none_starves() -> None:
    async with models(max_loaded_models=1) as (player, _, [a, b, _]):
        release = await a.acquire()
        for_b = asyncio.create_task(b.acquire())
        await until(a, ModelState.READY)
        while not a.is_wanted_off:
            await asyncio.sleep(0.001)
        late = asyncio.create_task(a.acquire())  # behind b, or b would wait for ever while a is in use
        await asyncio.sleep(0.02)
        assert not for_b.done() and not late.done() and player.running == ["a"]
        release()
        release_b = await for_b
        assert player.running == ["b"] and not late.done()
        release_b()
        (await late)()
        assert player.running == ["a"]


async def test_a_failure_names_the_reason_until_it_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with models() as (player, served, [a, b, c]):
        player.errors["a"] = [CapacityError("the pool holds nothing")]
        for _ in range(2):
            with pytest.raises(ModelLoadError, match="model a cannot be loaded: the pool holds nothing") as caught:
                await a.acquire()
            assert caught.value.retry_after_s is not None and 0 < caught.value.retry_after_s <= module.LOAD_RETRY_S
        assert a.state is ModelState.FAILED and a.report()["failure"] == "the pool holds nothing"
        assert served.trouble() is None, "the other models could be loaded"
        (await b.acquire())()
        for model in (b, c):
            model.state, model.failure = ModelState.FAILED, "no"
        assert served.trouble() == "the pool holds nothing"
        b.state, c.state = ModelState.READY, ModelState.UNLOADED
        monkeypatch.setattr(a, "_retry_at", 0.0)
        (await a.acquire())()
        assert a.state is ModelState.READY and a.failure == ""


async def test_where_memory_lacks_idle_models_are_unloaded_first() -> None:
    async with models() as (player, _, [a, b, c]):
        (await a.acquire())()
        (await b.acquire())()
        player.errors["c"] = [CapacityError("too small"), CapacityError("too small")]
        (await c.acquire())()
        assert player.running == ["c"] and c.num_loads == 1
        hold = await c.acquire()
        player.errors["a"] = [CapacityError("too small")]
        with pytest.raises(ModelLoadError, match="too small"):
            await a.acquire()
        assert player.running == ["c"], "a model in use is not unloaded"
        hold()


async def test_an_engine_that_is_given_up_fails_its_model_alone() -> None:
    async with models() as (player, _, [a, b, _]):
        release = await a.acquire()
        (await b.acquire())()
        player.engines[0].failure = "it ended too often"
        player.engines[0].failed.set()
        await until(a, ModelState.FAILED)
        with pytest.raises(ModelLoadError, match="it ended too often"):
            await a.acquire()
        await a.closed()
        assert player.running == ["b"]
        release()


async def test_a_client_that_leaves_while_a_model_is_loaded_keeps_nothing() -> None:
    async with models(keep_alive_s=0.01) as (player, _, [a, *_rest]):
        player.gate.clear()
        waiting = asyncio.create_task(a.acquire())
        await until(a, ModelState.LOADING)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        player.gate.set()
        await until(a, ModelState.READY)
        assert a.num_users == 0
        await until(a, ModelState.UNLOADED)


async def test_a_clients_keep_alive_holds_until_the_model_is_unloaded() -> None:
    async with models() as (_, _served, [a, *_rest]):
        (await a.acquire())()
        a.set_keep_alive(0.01)
        await until(a, ModelState.UNLOADED)
        assert a.keep_alive_s == -1
        a.set_keep_alive(3600)
        (await a.acquire())()
        assert a.expires_at is not None
        a.set_keep_alive(-1)
        assert a.expires_at is None


async def test_closing_refuses_what_waits() -> None:
    async with models() as (player, served, [a, b, _]):
        (await b.acquire())()
        player.gate.clear()
        waiting = asyncio.create_task(a.acquire())
        await until(a, ModelState.LOADING)
        await served.close()
        with pytest.raises(ModelLoadError, match="the server stops"):
            await waiting
        with pytest.raises(ModelLoadError, match="the server stops"):
            await a.acquire()
