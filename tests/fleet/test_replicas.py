"""Replicas over fake engine processes: killed, added, drained, rolled, poisoned and attached while requests run."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.engine.fakes import expected, make_request
from tests.frontend.test_engine_process import is_alive
from tests.reliability.deaths import FAKE, Load, Stream, config, follow, start_fleet, until

from octavo.core.request import FinishReason
from octavo.errors import CapacityError, ConfigError, EngineDeadError, ErrorKind
from octavo.executors.protocol import Fingerprint
from octavo.fleet.fleet_router import FleetRouter
from octavo.fleet.replicas import AttachedSource, LocalReplicas
from octavo.frontend.engine_process import EngineProcess, EngineSpawner
from octavo.frontend.engine_source import EngineState
from octavo.frontend.engine_supervisor import EngineSupervisor
from octavo.frontend.open_requests import MAX_CRASHES, SUSPECT_WAIT_S


@asynccontextmanager
async def fleet(
    count: int, behaviour: str = "slow", router: str = "least_requests", **options: Any
) -> AsyncIterator[LocalReplicas]:
    """So many replicas of fake engines; closed at the end."""
    supervisor = EngineSupervisor(router=FleetRouter(router), **options)
    local = await start_fleet(supervisor, config(behaviour), count, FAKE)
    try:
        yield local
    finally:
        await supervisor.close()


def check(streams: list[Stream], errors: list[BaseException]) -> None:
    """No request was lost, and no token lost, doubled or changed."""
    assert not errors
    assert not [s.request.request_id for s in streams if s.num_misplaced or s.reason is not FinishReason.LENGTH]
    assert not [s.request.request_id for s in streams if s.ids != expected(s.request)]


async def test_X08_no_request_is_lost_while_replicas_are_killed() -> None:
    async with fleet(3) as local:
        supervisor, rng = local.supervisor, random.Random(1)
        load = Load(supervisor, lambda n: make_request(f"r{n}", max_tokens=rng.randrange(4, 40)), 64)
        for kill in range(1, 4):
            await until(lambda kill=kill: len(load.streams) >= 70 * kill)  # type: ignore[misc]
            victim = rng.choice([each for each in supervisor.replicas if each.bound is not None])
            assert victim.engine is not None
            os.kill(victim.engine.pid, signal.SIGKILL)
        await until(lambda: len(load.streams) >= 300)
        await load.stop()
        check(load.streams, load.errors)
        await until(lambda: supervisor.num_restarts == 3)  # the requests may all have ended before
        report = supervisor.report()
        assert report["resumed_requests"] and report["suspects_failed"] == 0
        await until(lambda: len(supervisor.report()["recovery_gaps_s"]) == 3)  # type: ignore[arg-type]
        states = [each.state for each in supervisor.replicas]
        assert states == [EngineState.READY] * 3 and len({each.number for each in supervisor.replicas}) == 3


async def test_requests_of_a_lost_replica_go_on_at_once_at_another() -> None:
    """They do not wait for the next engine, which cannot be started here."""
    async with fleet(2) as local:
        supervisor, request = local.supervisor, make_request("a", max_tokens=60)
        following = asyncio.create_task(follow(supervisor, request))
        await until(lambda: num_ids(supervisor, "a") > 5)
        first = bound_to(supervisor, "a")
        replica = supervisor.replicas[first]
        source: Any = replica.source
        source._command = ("false",)
        assert replica.engine is not None
        os.kill(replica.engine.pid, signal.SIGKILL)
        stream = await following
        check([stream], [])
        assert supervisor.state is EngineState.READY and replica.state is EngineState.RECOVERING
        assert supervisor.trouble() is None


def num_ids(supervisor: EngineSupervisor, name: str) -> int:
    state = supervisor.requests.get(name)
    return 0 if state is None else len(state.pages[0].ids)


def bound_to(supervisor: EngineSupervisor, name: str) -> int:
    """The number of the replica that has a request."""
    state = supervisor.requests.get_open(name)
    assert state is not None and state.engine is not None
    return state.engine.number


async def test_scaling_up_and_down_under_load_loses_none() -> None:
    async with fleet(1) as local:
        sizes: list[tuple[int, int]] = []
        local.supervisor.on_capacity = lambda *size: sizes.append(size)
        one = local.supervisor.total_capacity()
        load = Load(local.supervisor, lambda n: make_request(f"r{n}", max_tokens=30), 24)
        await until(lambda: len(load.streams) > 20)
        await local.scale(3)
        await until(lambda: all(each.bound and each.bound.num_open for each in local.supervisor.replicas))
        assert local.supervisor.total_capacity() == (3 * one[0], 3 * one[1])
        await local.scale(1)
        assert len(local.supervisor.replicas) == 1 and sizes[-1] == one
        await load.stop()
        check(load.streams, load.errors)
        assert local.supervisor.report()["restarts"] == 0 == local.supervisor.report()["moved_requests"]


async def test_a_rolling_restart_loses_none() -> None:
    async with fleet(2) as local:
        supervisor = local.supervisor
        before = supervisor.processes
        load = Load(supervisor, lambda n: make_request(f"r{n}", max_tokens=30), 16)
        await until(lambda: len(load.streams) > 10)
        await local.roll(lambda: supervisor.spawner(config("slow"), FAKE))
        assert len(supervisor.replicas) == 2
        await load.stop()
        check(load.streams, load.errors)
        assert not set(before.values()) & set(supervisor.processes.values())


async def test_a_rolling_restart_to_what_cannot_start_leaves_the_old_replicas() -> None:
    async with fleet(2) as local:
        with pytest.raises(CapacityError, match="the pool holds nothing"):
            await local.roll(lambda: local.supervisor.spawner(config("broken"), FAKE))
        assert [each.state for each in local.supervisor.replicas] == [EngineState.READY] * 2
        check([await follow(local.supervisor, make_request("a"))], [])


async def test_a_replica_that_dies_while_it_is_drained_is_not_replaced() -> None:
    async with fleet(2) as local:
        supervisor = local.supervisor
        following = [asyncio.create_task(follow(supervisor, make_request(f"r{n}", max_tokens=100))) for n in range(4)]
        await until(lambda: all(num_ids(supervisor, f"r{n}") > 2 for n in range(4)))
        draining = asyncio.create_task(supervisor.drain(0))
        await until(lambda: supervisor.replicas[0].state is EngineState.DRAINING)
        supervisor.kill("a test", 0)
        await draining
        check(await asyncio.gather(*following), [])
        assert [each.number for each in supervisor.replicas] == [1] and supervisor.num_restarts == 0
        with pytest.raises(ConfigError, match="there is no replica 0; there are: 1"):
            await supervisor.drain(0)


async def test_a_removed_replica_gives_its_requests_to_the_others() -> None:
    async with fleet(2) as local:
        supervisor = local.supervisor
        following = [asyncio.create_task(follow(supervisor, make_request(f"r{n}", max_tokens=100))) for n in range(4)]
        await until(lambda: all(num_ids(supervisor, f"r{n}") > 2 for n in range(4)))
        await supervisor.remove(1)
        check(await asyncio.gather(*following), [])


async def test_a_poisonous_request_kills_three_engines_at_most() -> None:
    """With many others around it, over three replicas: the suspect runs alone before it is failed."""
    async with fleet(3) as local:
        supervisor = local.supervisor
        following = [asyncio.create_task(follow(supervisor, make_request(f"r{n}", max_tokens=100))) for n in range(12)]
        await until(lambda: all(num_ids(supervisor, f"r{n}") > 2 for n in range(12)))
        bad = await follow(supervisor, make_request("poison", max_tokens=20))
        assert bad.error is not None and bad.error.kind is ErrorKind.STEP_FAILED and bad.ids == []
        check(await asyncio.gather(*following), [])
        assert supervisor.num_restarts <= MAX_CRASHES and supervisor.requests.num_failed_suspects == 1


async def test_a_suspect_that_no_new_engine_can_take_gets_an_emptied_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas of three cannot be started again, so the third is emptied, and no other request is lost."""
    monkeypatch.setattr("octavo.frontend.open_requests.SUSPECT_WAIT_S", 0.2)
    assert SUSPECT_WAIT_S > 1
    async with fleet(3) as local:
        supervisor = local.supervisor
        for each in supervisor.replicas[:2]:
            source: Any = each.source
            source._command = ("false",)
        load = Load(supervisor, lambda n: make_request(f"r{n}", max_tokens=60), 9)
        await until(lambda: len(load.streams) > 9)
        bad = await follow(supervisor, make_request("poison", max_tokens=20))
        assert bad.error is not None and bad.error.kind is ErrorKind.STEP_FAILED
        await load.stop()
        check(load.streams, load.errors)


async def test_an_attached_replica_is_forgotten_with_its_engine() -> None:
    async with fleet(1, awaits_replicas=True) as local:
        supervisor = local.supervisor
        engine = await EngineProcess.start(
            config("slow"), epoch=next(supervisor.epochs), command=FAKE, receive=supervisor.receive
        )
        number = await supervisor.add(AttachedSource(engine), "guest")
        following = [asyncio.create_task(follow(supervisor, make_request(f"r{n}", max_tokens=60))) for n in range(6)]
        await until(lambda: all(num_ids(supervisor, f"r{n}") > 2 for n in range(6)))
        name = next(f"r{n}" for n in range(6) if bound_to(supervisor, f"r{n}") == number)
        shown: Any = await supervisor.control("explain", name)
        assert shown["replica"] == "guest" and shown["text"].endswith("on guest")
        engine.kill()
        check(await asyncio.gather(*following), [])
        assert [each.name for each in supervisor.replicas] == ["replica-0"]
        await supervisor.remove(0)
        assert supervisor.state is EngineState.RECOVERING and not supervisor.failed.is_set()
        waiting = asyncio.create_task(follow(supervisor, make_request("late")))
        await asyncio.sleep(0)
        await local.scale(1)
        check([await waiting], [])


async def test_an_engine_that_holds_less_than_the_fleet_promised_is_refused() -> None:
    async with fleet(1) as local:
        supervisor = local.supervisor
        supervisor.capacity = replace(supervisor.capacity, max_model_len=10**6)
        with pytest.raises(CapacityError, match=r"guest is refused: its max_model_len is \d+, and .* need 1000000"):
            await supervisor.add(supervisor.spawner(config("slow"), FAKE), "guest")
        assert len(supervisor.replicas) == 1 == len(supervisor.processes)


async def test_an_engine_with_another_tokenizer_is_refused_and_the_others_serve_on() -> None:
    """However it comes: by a roll, from outside, or as the next engine of a replica."""
    async with fleet(2) as local:
        supervisor = local.supervisor
        supervisor.capacity = replace(supervisor.capacity, fingerprint=Fingerprint("model", "ours", "n"))
        numbers = list(local.numbers)
        for words, adding in (
            ("replica-2", local.roll(lambda: _Retokenized(supervisor))),
            ("guest", supervisor.add(_Retokenized(supervisor), "guest")),
        ):
            with pytest.raises(
                CapacityError, match=f"{words} is refused: its tokenizer .* differs from that of the fi"
            ):
                await adding
        assert local.numbers == numbers and len(supervisor.processes) == 2
        local.supervisor.replicas[0].source = _Retokenized(supervisor)
        supervisor.kill("a test", numbers[0])
        await until(lambda: supervisor.replicas[0].state is EngineState.FAILED)
        assert "its tokenizer" in supervisor.replicas[0].failure
        check(await asyncio.gather(*(follow(supervisor, make_request(f"r{n}")) for n in range(4))), [])


class _Retokenized(EngineSpawner):
    """Starts engines whose tokenizer is another."""

    def __init__(self, supervisor: EngineSupervisor) -> None:
        super().__init__(config("slow"), FAKE, supervisor.receive, supervisor.epochs)

    async def next(self) -> EngineProcess:
        engine = await super().next()
        engine.capacity = replace(engine.capacity, fingerprint=Fingerprint("model", "theirs", "n"))
        return engine


async def test_the_last_replica_that_cannot_be_replaced_ends_the_requests() -> None:
    async with fleet(2) as local:
        supervisor = local.supervisor
        for each in supervisor.replicas:
            source: Any = each.source
            source.budget.max_useless, source._command = 0, ("false",)
        await supervisor.submit(make_request("a", max_tokens=100))
        supervisor.kill("a test", 0)
        await until(lambda: supervisor.replicas[0].state is EngineState.FAILED)
        assert supervisor.trouble() is None and not supervisor.failed.is_set()
        supervisor.kill("a test", 1)
        await asyncio.wait_for(supervisor.failed.wait(), 30)
        with pytest.raises(EngineDeadError, match="before it did a step"):
            await supervisor.submit(make_request("b"))


async def test_pause_and_statistics_are_those_of_all_replicas() -> None:
    async with fleet(3) as local:
        supervisor = local.supervisor
        assert await supervisor.control("pause") is True
        for name in ("a", "b", "c"):
            await supervisor.submit(make_request(name))
        statistics: Any = await supervisor.statistics()
        assert statistics["scheduler"]["num_waiting"] == 3 and set(statistics["replicas"]) == {"0", "1", "2"}
        shown: Any = await supervisor.control("explain")
        assert {entry["id"] for entry in shown["open"]} == {"a", "b", "c"} and shown["num_waiting"] == 3
        one: Any = await supervisor.control("statistics", replica=1)
        assert one["scheduler"]["num_waiting"] == 1
        supervisor.kill("a test", 1)
        await until(lambda: supervisor.num_restarts == 1)
        assert not any(num_ids(supervisor, name) for name in ("a", "b", "c"))
        assert await supervisor.control("resume") is True
        await until(lambda: not len(supervisor.requests))
        assert all(num_ids(supervisor, name) for name in ("a", "b", "c"))
        assert await supervisor.control("reset_prefix_cache") is True


async def test_a_request_that_another_version_continues_is_marked() -> None:
    async with fleet(1) as local:
        supervisor = local.supervisor
        other = await EngineProcess.start(
            config("slow"), epoch=next(supervisor.epochs), command=FAKE, receive=supervisor.receive
        )
        other.capacity = replace(other.capacity, fingerprint=Fingerprint("another"))
        following = asyncio.create_task(follow(supervisor, make_request("a", max_tokens=100)))
        await until(lambda: num_ids(supervisor, "a") > 2)
        await supervisor.add(AttachedSource(other), "other")
        await supervisor.remove(0)
        await until(lambda: supervisor.report()["inexact_requests"] == 1)
        shown: Any = await supervisor.control("explain", "a")
        assert shown["is_exact"] is False and "generated its first tokens" in shown["text"]
        check([await following], [])


async def test_a_fleet_that_is_closed_while_a_replica_opens_leaves_no_process() -> None:
    others = children()  # of other tests
    async with fleet(1) as local:
        supervisor = local.supervisor
        scaling = asyncio.create_task(local.scale(2))
        await until(lambda: len(supervisor.replicas) == 2)
        await asyncio.sleep(0.05)
        pids = set(children()) - set(others)
        assert pids
        await supervisor.close()
        with pytest.raises(EngineDeadError, match="was stopped"):
            await scaling
        await until(lambda: not any(is_alive(pid) for pid in pids))


def children() -> list[int]:
    """The processes that this one started."""
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
