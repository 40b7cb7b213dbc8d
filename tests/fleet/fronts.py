"""A front and agents for tests: the front and some agents in this process, other agents in processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from tests.engine.fakes import expected, make_request

from octavo.config import Config, ModelConfig
from octavo.core.request import FinishReason, Request
from octavo.executors.protocol import Fingerprint
from octavo.fleet.agent import Agent
from octavo.fleet.remote_engines import FrontModel, RemoteEngines
from octavo.fleet.security import HostPort, LinkSecurity
from octavo.frontend.engine_supervisor import EngineSupervisor

COMMAND = (sys.executable, str(Path(__file__).parents[1] / "frontend" / "fake_engine.py"))
TOKEN = b"a token of the tests"
LOCAL = HostPort("127.0.0.1", 0)


class Front:
    """A supervisor whose engines join over the network, at `address`."""

    def __init__(self, folder: Path, term: int = 0, token: bytes | None = TOKEN) -> None:
        self.supervisor = EngineSupervisor(awaits_replicas=True, term=term)
        self.security = LinkSecurity(folder, token)
        self.expected = Fingerprint()
        self.engines = RemoteEngines(self._find, self.security, term=term)
        self.address = LOCAL

    def _find(self, model: str) -> FrontModel | None:
        return None if model == "unknown" else FrontModel(self.supervisor, self._fingerprint)

    def _fingerprint(self) -> Fingerprint:
        capacity = getattr(self.supervisor, "capacity", None)
        return self.expected if capacity is None else capacity.fingerprint

    async def serve(self, request: Request) -> list[int]:
        """Submit a request and return its ids."""
        await self.supervisor.submit(request)
        ids: list[int] = []
        async for output in self.supervisor.outputs(request.request_id):
            assert output.position == len(ids)
            ids += output.token_ids
            assert output.finish_reason in (None, FinishReason.LENGTH), output
        return ids

    async def serve_all(self, names: list[str], max_tokens: int = 40) -> None:
        """Serve requests at the same time, and compare their ids with those of an engine that never died."""
        requests = [make_request(name, max_tokens=max_tokens) for name in names]
        answers = await asyncio.gather(*map(self.serve, requests))
        assert answers == [expected(request) for request in requests]


@asynccontextmanager
async def open_front(
    folder: Path, term: int = 0, token: bytes | None = TOKEN, address: HostPort = LOCAL
) -> AsyncIterator[Front]:
    front = Front(folder, term, token)
    front.address = await front.engines.listen(address)
    try:
        yield front
    finally:
        await front.supervisor.close()
        await front.engines.close()


def make_agent(folder: Path, behaviour: str = "slow", token: bytes | None = TOKEN) -> tuple[Agent, list[str]]:
    """Return an agent around a fake engine, and its lines."""
    lines: list[str] = []
    config = Config(model=ModelConfig(model=behaviour))
    return Agent(config, LinkSecurity(folder, token), lines.append, COMMAND), lines


@asynccontextmanager
async def running(agent: Agent, *fronts: HostPort) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(agent.run_joining(fronts))
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def offering(agent: Agent, address: HostPort = LOCAL) -> AsyncIterator[HostPort]:
    """Run an agent that waits for fronts; yield its address."""
    found: asyncio.Future[HostPort] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(agent.run_offering(address, found.set_result))
    try:
        yield await found
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)
