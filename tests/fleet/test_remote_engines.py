"""Engines on other machines, over loopback: requests, losses, terms, refusals, orphans."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

from tests.engine.fakes import expected, make_request
from tests.fleet.fronts import make_agent, offering, open_front, running, until

from octavo.executors.protocol import Fingerprint
from octavo.fleet import link as link_module


async def test_requests_flow_and_an_engine_that_is_killed_is_replaced(tmp_path: Path) -> None:
    async with open_front(tmp_path) as front:
        one, _ = make_agent(tmp_path)
        two, _ = make_agent(tmp_path)
        async with running(one, front.address), running(two, front.address):
            await until(lambda: front.engines.num_engines == 2)
            await front.serve_all([f"first-{number}" for number in range(20)])
            work = asyncio.create_task(front.serve_all([f"second-{number}" for number in range(40)], 100))
            await until(lambda: len(front.supervisor.requests) == 40)
            epochs = {row["epoch"] for row in front.engines.report()}
            os.kill(one.processes["engine"], signal.SIGKILL)
            await work
            await until(lambda: front.engines.num_engines == 2)
            assert one.num_restarts == 1 and max(row["epoch"] for row in front.engines.report()) > max(epochs)
            await front.serve_all(["third"])


async def test_an_agent_that_stops_answering_is_lost_within_the_limit(tmp_path: Path) -> None:
    """Its loop is not run: as SIGSTOP, or a machine that is gone."""
    async with open_front(tmp_path) as front:
        one, _ = make_agent(tmp_path)
        two, _ = make_agent(tmp_path)
        async with running(one, front.address), running(two, front.address):
            await until(lambda: front.engines.num_engines == 2)
            work = asyncio.create_task(front.serve_all([f"r{number}" for number in range(30)], 100))
            await until(lambda: len(front.supervisor.requests) == 30)
            assert one._link is not None and one._link._transport is not None
            one._link._transport.pause_reading()  # it gets neither pings nor frames
            begun = asyncio.get_running_loop().time()
            await until(lambda: front.engines.num_engines == 1)
            assert asyncio.get_running_loop().time() - begun < link_module.LOST_S + 10.0  # 2 s on an idle machine
            await work


async def test_orphans_are_cancelled_and_the_engine_serves_the_next_front(tmp_path: Path) -> None:
    agent, _ = make_agent(tmp_path)
    async with offering(agent) as address:
        async with open_front(tmp_path) as front:
            front.engines.dial(address)
            await until(lambda: front.engines.num_engines == 1)
            pid = agent.processes["engine"]
            await front.serve_all(["one"])
            for number in range(8):
                await front.supervisor.submit(make_request(f"orphan-{number}", max_tokens=100))
            for _, link in tuple(front.engines._agents.values()):
                link.abort("the test cuts it")
            await until(lambda: front.engines.num_engines == 1)  # dialled again, the same engine under a new epoch
            assert agent.processes["engine"] == pid
            requests = [make_request(f"orphan-{number}", max_tokens=100) for number in range(8)]
            for request in requests:
                ids = [token async for out in front.supervisor.outputs(request.request_id) for token in out.token_ids]
                assert ids == expected(request)
        async with open_front(tmp_path, term=1) as later:
            later.engines.dial(address)
            await until(lambda: later.engines.num_engines == 1)
            assert agent.processes["engine"] == pid and agent.term == 1
            await later.serve_all(["one"])


async def test_a_front_with_a_lower_term_is_refused_and_a_higher_one_takes_over(tmp_path: Path) -> None:
    agent, lines = make_agent(tmp_path)
    async with offering(agent) as address, open_front(tmp_path, term=4) as front:
        front.engines.dial(address)
        await until(lambda: front.engines.num_engines == 1)
        async with open_front(tmp_path, term=3) as old, open_front(tmp_path, term=4) as equal:
            old.engines.dial(address)
            equal.engines.dial(address)
            await until(lambda: any("term is 3" in line for line in lines))
            await until(lambda: any("another front uses this engine" in line for line in lines))
            await front.serve_all(["still here"])
            assert not old.engines.num_engines and not equal.engines.num_engines
        async with open_front(tmp_path, term=5) as new:
            new.engines.dial(address)
            await until(lambda: new.engines.num_engines == 1)
            await until(lambda: front.engines.num_engines == 0)
            await new.serve_all(["taken over"])


async def test_an_engine_that_knows_two_fronts_joins_the_other_one_when_the_first_is_gone(tmp_path: Path) -> None:
    agent, _ = make_agent(tmp_path)
    async with (
        open_front(tmp_path, term=2) as standby,
        open_front(tmp_path, term=1) as front,
        running(agent, front.address, standby.address),
    ):
        await until(lambda: front.engines.num_engines == 1)
        await front.engines.close()
        await until(lambda: standby.engines.num_engines == 1)
        await standby.serve_all(["a", "b"])
        assert agent.term == 2


async def test_what_differs_is_refused_by_name(tmp_path: Path) -> None:
    async def refusal(ours: Fingerprint, model: str = "slow") -> str:
        async with open_front(tmp_path) as front:
            front.expected = ours
            agent, lines = make_agent(tmp_path, model)
            agent.model = model if model == "slow" else "unknown"
            agent._spawner = _Printed(agent._spawner, Fingerprint("m", "t", "n", "dtype float32"))  # type: ignore
            async with running(agent, front.address):
                await until(lambda: any("refused this engine" in line for line in lines))
            assert not front.engines.num_engines
            return next(line for line in lines if "refused this engine" in line)

    base = Fingerprint("m", "t", "n", "dtype float32")
    assert "the replica's tokenizer differs" in await refusal(replace(base, tokenizer="u"))
    assert "the replica's model differs" in await refusal(replace(base, model="u"))
    numerics = await refusal(replace(base, numerics="u", about="dtype bfloat16"))
    assert "numerics differs (it has dtype float32; the fleet has dtype bfloat16)" in numerics
    both = await refusal(replace(base, model="u", tokenizer="u"))
    assert "the replica's model and the replica's tokenizer differ" in both
    assert "this fleet has no model 'unknown'" in await refusal(base, "fake")


class _Printed:
    """A source whose engines have a fingerprint."""

    def __init__(self, spawner: object, fingerprint: Fingerprint) -> None:
        self._spawner = spawner
        self._fingerprint = fingerprint

    async def next(self) -> object:
        engine = await self._spawner.next()  # type: ignore[attr-defined]
        engine.capacity = replace(engine.capacity, fingerprint=self._fingerprint)
        return engine

    async def close(self) -> None:
        await self._spawner.close()  # type: ignore[attr-defined]


async def test_a_released_engine_is_not_bound_again_by_the_same_front(tmp_path: Path) -> None:
    async with open_front(tmp_path) as front:
        agent, _ = make_agent(tmp_path)
        async with running(agent, front.address):
            await until(lambda: front.engines.num_engines == 1)
            await front.serve_all(["one"])
            (replica,) = front.supervisor.replicas
            await front.supervisor.drain(replica.number)
            await until(lambda: agent.epoch is None and agent._is_clean)
            assert not front.supervisor.replicas and front.engines.report()[0]["epoch"] is None


async def test_without_a_token_loopback_has_a_random_one(tmp_path: Path) -> None:
    async with open_front(tmp_path, token=None) as front:
        (path,) = tmp_path.glob("link-*.token")
        assert path.stat().st_mode & 0o777 == 0o600 and len(path.read_bytes()) == 32
        agent, _ = make_agent(tmp_path, token=None)
        async with running(agent, front.address):
            await until(lambda: front.engines.num_engines == 1)
            await front.serve_all(["one"])
    assert not list(tmp_path.glob("link-*.token"))


async def test_poison_in_a_remote_engine_is_failed_and_others_go_on(tmp_path: Path) -> None:
    async with open_front(tmp_path) as front:
        agents = [make_agent(tmp_path)[0] for _ in range(2)]
        async with running(agents[0], front.address), running(agents[1], front.address):
            await until(lambda: front.engines.num_engines == 2)
            await front.supervisor.submit(make_request("poison", max_tokens=5))
            await front.serve_all([f"r{number}" for number in range(10)])
            last = [output async for output in front.supervisor.outputs("poison")][-1]
            assert last.error is not None
            await until(lambda: front.engines.num_engines == 2, 60.0)
