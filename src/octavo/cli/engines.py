"""The engine of a server as the command line handles it, in a process of its own or in this one.

Owns: the interface of both, and why an engine is not ready, in words.
Does not: restart anything (engine_supervisor does).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Protocol

from octavo.config import Config
from octavo.engine.client import EngineClient
from octavo.engine.loop import EngineLoop
from octavo.errors import ConfigError
from octavo.executors.protocol import Capacity
from octavo.frontend.engine_process import COMMAND
from octavo.frontend.engine_supervisor import EngineState, EngineSupervisor
from octavo.frontend.local_client import LocalClient
from octavo.frontend.open_request import OpenRequest
from octavo.frontend.open_requests import LedgerObserver

WATCH_S = 0.5  # the longest time for which a dead engine of this process goes unnoticed


class Engine(Protocol):
    """A running engine, in this process or another. `failed` is set when it has failed for good."""

    capacity: Capacity
    failed: asyncio.Event
    is_protected: bool

    @property
    def failure(self) -> str:
        """Return why the engine failed for good."""
        ...

    @property
    def client(self) -> EngineClient:
        """Return the engine's client."""
        ...

    @property
    def processes(self) -> dict[str, int]:
        """Return the pids of the engine's own processes by role; the api process is not among them."""
        ...

    def trouble(self) -> str | None:
        """Return why the engine makes no progress now, or None."""
        ...

    def report(self) -> dict[str, object]:
        """Return the epoch and the restarts so far."""
        ...

    def restore(self, entries: Iterable[OpenRequest]) -> None:
        """Put back the open requests of an earlier server and continue them. Raises EngineDeadError."""
        ...

    def kill(self, why: str) -> None:
        """Kill the engine's process at once, as a crash would. Raises ConfigError if this is impossible."""
        ...

    async def close(self) -> None:
        """Answer all open requests, then end the engine."""
        ...


class InProcessEngine:
    """An engine loop in this process; it is never restarted."""

    is_protected = False

    def __init__(self, loop: EngineLoop, capacity: Capacity) -> None:
        self.client = LocalClient(loop)
        self.capacity = capacity
        self.failed = asyncio.Event()
        self.failure = ""
        self._loop = loop
        self._watching = asyncio.create_task(self._watch(), name="octavo-engine-watch")

    @classmethod
    async def start(cls, config: Config, observer: LedgerObserver | None = None) -> InProcessEngine:
        """Open an engine here; `observer` is not used, as there is no ledger."""
        from octavo.assembly import open_engine  # heavy, and needed here only

        return cls(*await asyncio.to_thread(open_engine, config))

    @property
    def processes(self) -> dict[str, int]:
        """Return nothing: the engine runs in the api process."""
        return {}

    def trouble(self) -> str | None:
        """Return why the engine makes no progress now, or None."""
        return None if self._loop.is_alive else "the engine ended"

    def report(self) -> dict[str, object]:
        """Return the epoch and the restarts, which never change."""
        return {"epoch": 1, "restarts": 0}

    def restore(self, entries: Iterable[OpenRequest]) -> None:
        """Refuse. Raises ConfigError."""
        raise ConfigError("an engine in the server's own process (--in-process) has no journal")

    def kill(self, why: str) -> None:
        """Refuse. Raises ConfigError."""
        raise ConfigError("the engine is in the server's own process (--in-process), which would end with it")

    async def close(self) -> None:
        """Answer all open requests, then end the engine."""
        self._watching.cancel()
        await self.client.close()

    async def _watch(self) -> None:
        while self._loop.is_alive:
            await asyncio.sleep(WATCH_S)
        self.failure = f"the engine ended ({self._loop.failure or 'it was stopped'}); see the lines above"
        self.failed.set()


class KeptEngine:
    """An engine whose process is replaced when it dies (see EngineSupervisor)."""

    is_protected = True

    def __init__(self, supervisor: EngineSupervisor) -> None:
        self.client = supervisor
        self.capacity = supervisor.capacity
        self.failed = supervisor.failed

    @classmethod
    async def start(
        cls, config: Config, observer: LedgerObserver | None = None, command: Sequence[str] = COMMAND
    ) -> KeptEngine:
        """Start the first engine process and wait until it is ready."""
        return cls(await EngineSupervisor.start(config, command=command, observer=observer))

    @property
    def failure(self) -> str:
        """Return why the engine failed for good."""
        return self.client.failure

    @property
    def processes(self) -> dict[str, int]:
        """Return the pids of the engine and its standby by role."""
        standby = self.client.spawner.standby
        return {"engine": self.client.pid} | ({"standby": standby.pid} if standby is not None else {})

    def trouble(self) -> str | None:
        """Return why the engine makes no progress now, or None."""
        if self.client.state is EngineState.READY:
            return None if self.client.is_stepping else "the engine makes no steps"
        return "the engine is being restarted" if self.client.state is not EngineState.FAILED else "the engine failed"

    def report(self) -> dict[str, object]:
        """Return the epoch and the restarts so far."""
        return self.client.report()

    def restore(self, entries: Iterable[OpenRequest]) -> None:
        """Put back the open requests of an earlier server and continue them."""
        self.client.restore(entries)

    def kill(self, why: str) -> None:
        """Kill the engine's process at once."""
        self.client.kill(why)

    async def close(self) -> None:
        """Answer all open requests, then end the engine."""
        await self.client.close()
