"""The front's side of engines on other machines: it accepts those that join, and dials those that it lists.

Owns: the connections to agents; the check of fingerprints; RemoteEngine, which a supervisor runs like a local one.
Does not: start engines (agents do), keep requests (open_requests does), or choose models (`find` does).
Invariants: an engine is bound to one epoch at a time, and frames of another epoch are dropped and counted. When its
connection ends or is silent for LOST_S, the engine counts as lost.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from octavo.core.plan import Events
from octavo.engine import wire
from octavo.errors import OctavoError
from octavo.executors.protocol import Capacity, Fingerprint
from octavo.fleet.connections import DialPauses, LinkListener, dial
from octavo.fleet.link import (
    JOIN,
    OFFER,
    VERSION,
    AgentFailed,
    AgentHello,
    Bind,
    EngineEnded,
    EngineReady,
    Kill,
    Link,
    LinkEnds,
    LinkMessage,
    Pong,
    Refused,
    Release,
    Welcome,
)
from octavo.fleet.replicas import AttachedSource
from octavo.fleet.security import HostPort, LinkSecurity
from octavo.frontend.engine_source import EngineDeath, EngineSource
from octavo.frontend.socket_client import Receive, SocketClient

_LOG = logging.getLogger(__name__)


class EngineHost(Protocol):
    """What runs engines of one model: an EngineSupervisor."""

    @property
    def epochs(self) -> Iterator[int]:
        """The numbers of the next engines."""

    def receive(self, epoch: int, events: Events) -> None:
        """Handle events of an engine."""

    async def add(self, source: EngineSource, name: str = "") -> int:
        """Run the engine of a source until it is lost. Raises OctavoError."""


@dataclass(frozen=True, slots=True)
class FrontModel:
    """A model of this front: what runs its engines, and the fingerprint that they must have, as far as it is known."""

    host: EngineHost
    expected: Callable[[], Fingerprint]


class _LinkWriter(asyncio.WriteTransport):
    """Passes what SocketClient writes to a link, as frames of one epoch."""

    def __init__(self, link: Link, epoch: int) -> None:
        super().__init__()
        self._link = link
        self._epoch = epoch

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send whole frames."""
        self._link.send_frames(self._epoch, bytes(data))

    def close(self) -> None:
        """Do nothing: the link outlives the engine."""


class RemoteEngine:
    """An engine on another machine; see frontend.engine_source.RunningEngine."""

    flight = None  # its own machine has it

    def __init__(self, link: Link, ready: EngineReady, epoch: int, receive: Receive) -> None:
        self.capacity: Capacity = ready.capacity
        self.pid = ready.pid
        self.num_stale = 0
        self.is_released = False
        self._number = ready.number
        self._link = link
        self._reader = asyncio.StreamReader()
        self.client = SocketClient.attached(self._reader, _LinkWriter(link, epoch), (epoch, ready.number), receive)
        self._trouble: str | None = None
        self._report: EngineEnded | None = None
        self._why = ""
        self._ended_at = 0.0
        link.send(Bind(ready.number, epoch))

    @property
    def epoch(self) -> int:
        """The number under which this front bound it."""
        return self.client.epoch

    def trouble(self) -> str | None:
        """Return why the engine makes no progress now, as of the last pong."""
        return "its connection ended" if self._why else self._trouble

    async def watch(self) -> EngineDeath:
        """Wait until the engine has ended or its connection is lost. Its agent kills it if it stalls."""
        await self.client.ended()
        report, client = self._report, self.client
        stale = client.num_stale + self.num_stale
        if report is None:
            return EngineDeath(
                self._why,
                self._ended_at,
                unanswered=client.unanswered,
                was_useful=True,  # the machine is at fault, not the engine
                num_malformed=client.num_malformed,
                num_stale=stale,
            )
        return EngineDeath(
            report.what,
            self._ended_at,
            client.unanswered if report.in_commands else report.batch,
            client.unanswered,
            was_useful=report.was_useful,
            stalled=report.stalled,
            num_malformed=client.num_malformed,
            num_stale=stale,
        )

    def kill(self) -> None:
        """Have its agent kill it."""
        self._link.send(Kill(self.epoch))

    async def close(self) -> None:
        """Give the engine back to its agent, which cancels its requests. Idempotent."""
        if not self._why:
            self.is_released = True
            self._link.send(Release(self.epoch))
            self.end("it was released")
        await self.client.ended()

    # --- called by the connection

    def feed(self, data: bytes) -> None:
        """Take frames of the engine."""
        if not self._why:
            self._reader.feed_data(data)

    def pong(self, pong: Pong) -> None:
        """Take what its agent sees."""
        self._trouble = pong.trouble

    def end(self, why: str, report: EngineEnded | None = None) -> None:
        """End the client, once; `report` is the agent's, if the engine itself ended."""
        if not self._why:
            self._why, self._report, self._ended_at = why, report, time.monotonic()
            self._reader.feed_eof()


class _Agent(LinkEnds):
    """The connection to one agent, and its engine while it is bound."""

    def __init__(self, fleet: RemoteEngines) -> None:
        self.fleet = fleet
        self.hello: AgentHello | None = None
        self.engine: RemoteEngine | None = None
        self.is_refused = False
        self.ended_event = asyncio.Event()
        self._pinging: asyncio.Task[None] | None = None

    @property
    def is_serving(self) -> bool:
        """True while its engine is bound and was not given back."""
        return self.engine is not None and not self.engine.is_released

    def message(self, link: Link, message: LinkMessage) -> None:
        """Handle a message of the agent."""
        engine = self.engine
        if isinstance(message, AgentHello):
            self._begin(link, message)
        elif isinstance(message, Refused):
            self.is_refused = True
            _LOG.warning("the engine at %s ended the connection: %s", link.peer, message.why)
        elif self.hello is None:
            link.abort("the first message was no AgentHello")
        elif isinstance(message, Pong):
            if engine is not None:
                engine.pong(message)
        elif isinstance(message, EngineReady):
            self.fleet.offered(self, link, message)
        elif isinstance(message, EngineEnded):
            if engine is not None and message.epoch == engine.epoch:
                self.engine = None
                engine.end(f"{self.hello.name}: {message.what}", message)
        elif isinstance(message, AgentFailed):
            _LOG.error("%s starts no more engines: %s", self.hello.name, message.why)

    def frames(self, link: Link, epoch: int, data: bytes) -> None:
        """Pass frames to the engine's client."""
        engine = self.engine
        if engine is not None and epoch == engine.epoch:
            engine.feed(data)
        else:
            self.fleet.num_stale += 1

    def ended(self, link: Link, why: str) -> None:
        """Count the engine as lost."""
        self.fleet.forget(self)
        if self._pinging is not None:
            self._pinging.cancel()
        engine, self.engine = self.engine, None
        if engine is not None:
            assert self.hello is not None
            _LOG.warning("the connection to %s (%s) is lost: %s", self.hello.name, link.peer, why)
            engine.end(f"the connection to {self.hello.name} is lost: {why}")
        self.ended_event.set()

    def _begin(self, link: Link, hello: AgentHello) -> None:
        if self.hello is not None:
            link.abort("a second AgentHello")
            return
        if hello.version != VERSION:
            link.close(f"{hello.name} speaks version {hello.version} of the fleet's protocol, this front {VERSION}")
            return
        self.hello = hello
        link.send(Welcome(VERSION, self.fleet.front_id, self.fleet.term))
        self.fleet.met(self, link)
        self._pinging = asyncio.create_task(link.run_pings(self._oldest_call_at), name="octavo-pings")

    def _oldest_call_at(self) -> float | None:
        return None if self.engine is None else self.engine.client.oldest_call_at


class RemoteEngines:
    """All engines on other machines, of one front. For one event loop.

    `find` returns the model of this front that an agent's engine of this name serves; None refuses the agent. `term` is
    greater than that of every front before this one: agents refuse a front with a lower term than they have seen.
    """

    def __init__(self, find: Callable[[str], FrontModel | None], security: LinkSecurity, *, term: int = 0) -> None:
        self.term = term
        self.front_id = secrets.token_hex(8)
        self.num_stale = 0  # frames of an epoch that is over
        self._find = find
        self._security = security
        self._agents: dict[str, tuple[_Agent, Link]] = {}  # by agent_id
        self._released: set[str] = set()  # agents whose engines were drained here
        self._listener = LinkListener(security, JOIN, partial(_Agent, self))
        self._attaching = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_refused(self) -> int:
        """Connections that did not prove the token."""
        return self._listener.num_refused

    async def listen(self, address: HostPort) -> HostPort:
        """Wait for engines that join; return the address with its port. Raises ConfigError."""
        return await self._listener.open(address, "--fleet-address")

    def dial(self, address: HostPort) -> None:
        """Keep a connection to an agent that offers its engine at this address. Raises ConfigError."""
        self._security.check(address, f"the host {address}")
        self._start(self._dial_for_ever(address), f"octavo-dial-{address}")

    @property
    def num_engines(self) -> int:
        """Engines that serve this front now."""
        return sum(agent.is_serving for agent, _ in self._agents.values())

    def report(self) -> list[dict[str, object]]:
        """Return the connected agents and the state of their engines, as plain JSON values."""
        found: list[dict[str, object]] = []
        for agent, link in self._agents.values():
            assert agent.hello is not None
            epoch = agent.engine.epoch if agent.engine is not None and agent.is_serving else None
            found.append({"name": agent.hello.name, "address": link.peer, "model": agent.hello.model, "epoch": epoch})
        return found

    async def close(self) -> None:
        """End all connections. Idempotent."""
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for _, link in tuple(self._agents.values()):
            link.abort("this front was stopped")

    async def _dial_for_ever(self, address: HostPort) -> None:
        pauses, last = DialPauses(), ""
        while True:
            agent = _Agent(self)
            try:
                await dial(address, self._security, OFFER, agent)
                await agent.ended_event.wait()
                if agent.hello is not None and not agent.is_refused:
                    pauses.reset()
                    last = ""
            except (OSError, OctavoError) as error:
                if str(error) != last:
                    _LOG.warning("no engine at %s yet: %s", address, error)
                last = str(error)
            await pauses.wait()

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- called by connections

    def met(self, agent: _Agent, link: Link) -> None:
        """Register an agent; an earlier connection of the same one ends."""
        assert agent.hello is not None
        earlier = self._agents.get(agent.hello.agent_id)
        self._agents[agent.hello.agent_id] = agent, link
        if earlier is not None:
            earlier[1].abort("the engine's machine connected anew")

    def forget(self, agent: _Agent) -> None:
        """Forget a connection that has ended."""
        if agent.hello is not None and self._agents.get(agent.hello.agent_id, (None,))[0] is agent:
            del self._agents[agent.hello.agent_id]
        if agent.engine is not None and agent.engine.is_released and agent.hello is not None:
            self._released.add(agent.hello.agent_id)

    def offered(self, agent: _Agent, link: Link, ready: EngineReady) -> None:
        """Bind an engine that its agent offers, unless it was released here."""
        assert agent.hello is not None
        if agent.engine is None and agent.hello.agent_id not in self._released:
            self._start(self._attach(agent, link, ready), "octavo-attach")

    async def _attach(self, agent: _Agent, link: Link, ready: EngineReady) -> None:
        assert agent.hello is not None
        hello = agent.hello
        async with self._attaching:  # so that the first engine's capacity is known to the check of the next
            model = self._find(hello.model)
            why = _refusal(hello, ready, model)
            if why is not None or model is None:
                _LOG.error("%s (%s) is refused: %s", hello.name, link.peer, why)
                link.close(str(why))
                return
            if not link.is_open or agent.engine is not None:
                return
            engine = agent.engine = RemoteEngine(link, ready, next(model.host.epochs), model.host.receive)
            try:
                await model.host.add(AttachedSource(engine), hello.name)
            except OctavoError as error:
                agent.engine = None
                engine.end(str(error))
                _LOG.error("%s (%s) is refused: %s", hello.name, link.peer, error)
                link.close(str(error))
            else:
                _LOG.warning("%s (%s) serves as epoch %d", hello.name, link.peer, engine.epoch)


def _refusal(hello: AgentHello, ready: EngineReady, model: FrontModel | None) -> str | None:
    """Return why an engine cannot serve a model, in words; None if it can."""
    if model is None:
        return f"this fleet has no model {hello.model!r}"
    if ready.wire_version != wire.VERSION:
        return f"the replica speaks version {ready.wire_version} of the engine's protocol, this front {wire.VERSION}"
    ours, theirs = model.expected(), ready.capacity.fingerprint
    names = ours.differences(theirs)
    if not names:
        return None
    what = " and ".join(f"the replica's {name}" for name in names) + (" differs" if len(names) == 1 else " differ")
    if "numerics" in names:
        ours_only = ", ".join(sorted({*ours.about.split(", ")} - {*theirs.about.split(", ")}))
        theirs_only = ", ".join(sorted({*theirs.about.split(", ")} - {*ours.about.split(", ")}))
        what += f" (it has {theirs_only}; the fleet has {ours_only})"
    return f"{what}; start it with the fleet's model files and settings"
