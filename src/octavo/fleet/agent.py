"""The agent: runs an engine on this machine for a front on another one (`octavo serve --join` or `--offer`).

Owns: the connection to the front, or the wait for one; which front is obeyed; the local engine, which is watched here.
Does not: decode the frames that it passes on, keep requests, or serve HTTP.
Invariants: one front at a time. A front with a lower term than the highest seen is refused. An engine is offered only
when it has no request of an earlier front: when the connection ends, or is silent for LEASE_S, its requests are
cancelled, and the engine stays open for the next front.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from octavo.config import Config
from octavo.engine import wire
from octavo.errors import EngineDeadError, OctavoError
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
    Ping,
    Pong,
    Refused,
    Release,
    Welcome,
)
from octavo.fleet.security import HostPort, LinkSecurity
from octavo.frontend.engine_process import COMMAND, EngineProcess, EngineSpawner

_LOG = logging.getLogger(__name__)
CLEAN_PAUSE_S = 0.05  # between checks whether the cancelled requests have ended


class Agent(LinkEnds):
    """One engine for one front at a time. For one event loop; `run` serves until it is cancelled.

    `report` is called with a line for the user when the state changes.
    """

    def __init__(
        self, config: Config, security: LinkSecurity, report: Callable[[str], object], command: Sequence[str] = COMMAND
    ) -> None:
        self.agent_id = secrets.token_hex(8)
        self.name = f"{socket.gethostname()}:{os.getpid()}"
        self.model = config.model.shown_name(config.model.model)
        self.term = 0
        self.front = ""  # address of the current front, "" without one
        self.num_restarts = 0
        self._security = security
        self._report = report
        self._spawner = EngineSpawner(config, command, lambda epoch, events: None, itertools.count(1))
        self._engine: EngineProcess | None = None
        self._is_clean = False  # the engine has no request of an earlier front
        self._epoch: int | None = None  # the front's number of the engine
        self._link: Link | None = None
        self._front_id = ""
        self._released: Link | None = None  # on which the engine was given back
        self._link_ended = asyncio.Event()
        self._was_welcomed: Link | None = None
        self._cleaning: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def epoch(self) -> int | None:
        """The front's number of the engine; None while no front uses it."""
        return self._epoch

    @property
    def processes(self) -> dict[str, int]:
        """The pid of the engine, by role."""
        return {} if self._engine is None else {"engine": self._engine.pid}

    async def run_joining(self, fronts: Sequence[HostPort]) -> None:
        """Open the engine and join one of these fronts, for ever. Raises the error of the engine's opening."""
        for address in fronts:
            self._security.check(address, "--join")
        self._security.client_context()
        await self._run(self._join_for_ever(fronts))

    async def run_offering(self, address: HostPort, listening: Callable[[HostPort], object]) -> None:
        """Open the engine and wait for fronts here, for ever. Raises ConfigError, the error of the engine's opening."""
        listener = LinkListener(self._security, OFFER, lambda: self, self._greet)
        listening(await listener.open(address, "--offer"))
        try:
            await self._run(asyncio.Event().wait())  # for ever
        finally:
            listener.close()

    async def _run(self, links: Any) -> None:
        tasks = [asyncio.ensure_future(links), asyncio.create_task(self._run_engines(), name="octavo-engines")]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            tasks += [task for task in (self._cleaning, self._watching) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._link is not None:
                self._link.close(f"{self.name} was stopped")
            await self._spawner.close()
            if self._engine is not None:
                await self._engine.close()

    # --- the engine

    async def _run_engines(self) -> None:
        engine = await self._spawner.next()
        while True:
            self._engine, self._is_clean = engine, True
            self._report(f"the engine of {self.model} is ready (process {engine.pid})")
            self._offer()
            was_useful = await self._watch(engine)
            try:
                engine = await self._spawner.replace(was_useful)
            except EngineDeadError as error:
                self._send(AgentFailed(str(error)))
                raise
            self.num_restarts += 1

    async def _watch(self, engine: EngineProcess) -> bool:
        """Wait for the engine's end, and report it to the front that uses it; return True if it was useful."""
        death = await engine.watch()
        epoch, self._epoch, self._engine = self._epoch, None, None
        _LOG.error("the engine ended: %s", death.what)
        if epoch is not None:
            batch, in_commands = death.batch, death.in_commands
            self._send(EngineEnded(epoch, death.what, batch, in_commands, death.was_useful, death.stalled))
        return death.was_useful

    def _offer(self) -> None:
        """Offer the engine to the front, if both are there and the engine is clean and not bound."""
        engine, link = self._engine, self._link
        if engine is None or link is None or not self._is_clean or self._epoch is not None or link is self._released:
            return
        link.send(EngineReady(engine.client.epoch, wire.VERSION, engine.pid, engine.capacity))

    def _bind(self, link: Link, bind: Bind) -> None:
        engine = self._engine
        if engine is None or not self._is_clean or self._epoch is not None or bind.number != engine.client.epoch:
            return  # that engine has ended; the front learns it, or has
        self._epoch, self._is_clean = bind.epoch, False
        engine.client.forward(partial(link.send_frames, bind.epoch))

    def _unbind(self) -> None:
        """Take the engine from its front, cancel the front's requests, and offer the engine once they have ended."""
        engine, self._epoch = self._engine, None
        if engine is not None and not self._is_clean:
            engine.client.forward(None)
            if self._cleaning is None or self._cleaning.done():
                self._cleaning = asyncio.create_task(self._clean(engine), name="octavo-cleaning")

    async def _clean(self, engine: EngineProcess) -> None:
        try:
            while await engine.client.control("cancel_all"):
                await asyncio.sleep(CLEAN_PAUSE_S)
            await engine.client.control("resume")  # the front may have paused it
        except EngineDeadError:
            return
        if engine is self._engine:
            self._is_clean = True
            self._offer()

    # --- the connection to the front

    async def _join_for_ever(self, fronts: Sequence[HostPort]) -> None:
        pauses, last = DialPauses(), ""
        for address in itertools.cycle(fronts):
            self._link_ended.clear()
            try:
                link = await dial(address, self._security, JOIN, self)
                self._greet(link)
                await self._link_ended.wait()
                if link is self._was_welcomed:
                    pauses.reset()
                    last = ""
            except (OSError, OctavoError) as error:
                if str(error) != last:
                    self._report(f"cannot join {address} yet: {error}")
                last = str(error)
            await pauses.wait()

    def _greet(self, link: Link) -> None:
        link.send(AgentHello(VERSION, self.agent_id, self.name, self.model, self.term))

    def message(self, link: Link, message: LinkMessage) -> None:
        """Handle a message of a front."""
        if isinstance(message, Welcome):
            self._welcomed(link, message)
        elif isinstance(message, Refused):
            self._report(f"the front at {link.peer} refused this engine: {message.why}")
            link.abort(message.why)
        elif link is not self._link:
            link.abort("the first message was no Welcome")
        elif isinstance(message, Ping):
            trouble = None
            if self._engine is not None:
                trouble = self._engine.trouble()
                age_s = message.oldest_call_s
                self._engine.client.forwarded_call_at = None if age_s is None else time.monotonic() - age_s
            link.send(Pong(message.number, trouble))
        elif isinstance(message, Bind):
            self._bind(link, message)
        elif isinstance(message, Release) and message.epoch == self._epoch:
            self._released = link
            self._unbind()
        elif isinstance(message, Kill) and message.epoch == self._epoch and self._engine is not None:
            self._engine.kill()

    def frames(self, link: Link, epoch: int, data: bytes) -> None:
        """Pass a front's frames to the engine."""
        if link is self._link and epoch == self._epoch and self._engine is not None:
            self._engine.client.write_frames(data)

    def ended(self, link: Link, why: str) -> None:
        """Cancel the requests of a front that is lost."""
        if link is self._link:
            self._report(f"the connection to the front ended: {why}")
            self._lose_front()
        self._link_ended.set()

    def _welcomed(self, link: Link, welcome: Welcome) -> None:
        """Obey this front from now on, or refuse it."""
        why = self._refusal(link, welcome)
        if why is not None:
            self._report(f"the front at {link.peer} is refused: {why}")
            link.close(why)
            return
        earlier = self._link
        if earlier is not None and earlier is not link:
            self._lose_front()
            earlier.close("another front took this engine")
        self.term, self._front_id = welcome.term, welcome.front_id
        self._link = self._was_welcomed = link
        self._watching = asyncio.create_task(link.watch_pings(), name="octavo-lease")
        self.front = link.peer
        self._report(f"joined the front at {link.peer}")
        self._offer()

    def _refusal(self, link: Link, welcome: Welcome) -> str | None:
        if welcome.version != VERSION:
            return f"it speaks version {welcome.version} of the fleet's protocol, this engine {VERSION}"
        if welcome.term < self.term:
            return f"its term is {welcome.term}, and a front of term {self.term} took over from it"
        is_other = self._link is not None and self._link is not link and welcome.front_id != self._front_id
        if is_other and welcome.term == self.term:
            return "another front uses this engine"
        return None

    def _lose_front(self) -> None:
        self._link, self.front = None, ""
        self._unbind()

    def _send(self, message: LinkMessage) -> None:
        if self._link is not None:
            self._link.send(message)
