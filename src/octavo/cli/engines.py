"""The engine of a server as the command line handles it, in a process of its own or in this one.

Owns: what is asked of either, and why it is not ready, in words. Does not: restart anything (engine.keeper does).
"""

from __future__ import annotations

import asyncio
import os
from typing import Protocol

from octavo.config import Config
from octavo.engine.client import EngineClient
from octavo.engine.local_client import LocalClient
from octavo.engine.loop import EngineLoop
from octavo.engine.process import EngineProcess
from octavo.errors import ConfigError
from octavo.executors.protocol import Capacity

WATCH_S = 0.5  # how long a dead engine of this process goes unnoticed


class Engine(Protocol):
    """A running engine, wherever it is. `failed` is set when it is gone for good, and `failure` says how."""

    capacity: Capacity
    failed: asyncio.Event
    failure: str
    is_protected: bool

    @property
    def client(self) -> EngineClient:
        """Talks to it."""
        ...

    @property
    def pid(self) -> int:
        """The process that it is in now."""
        ...

    def trouble(self) -> str | None:
        """Why it makes no progress now, or None."""
        ...

    def report(self) -> dict[str, object]:
        """Its lives so far."""
        ...

    def kill(self, why: str) -> None:
        """End its process at once, as a crash would. Raises ConfigError where that cannot be."""
        ...

    async def close(self) -> None:
        """Answer everyone, then end it."""
        ...


class InProcessEngine:
    """An engine loop of this process: it has one life, and this process shares it."""

    is_protected = False

    def __init__(self, loop: EngineLoop, capacity: Capacity) -> None:
        self.client = LocalClient(loop)
        self.capacity = capacity
        self.failed = asyncio.Event()
        self.failure = ""
        self._loop = loop
        self._watching = asyncio.create_task(self._watch(), name="octavo-engine-watch")

    @classmethod
    async def start(cls, config: Config) -> InProcessEngine:
        """Open an engine here."""
        from octavo.assembly import open_engine  # heavy, and needed here only

        return cls(*await asyncio.to_thread(open_engine, config))

    @property
    def pid(self) -> int:
        """This process."""
        return os.getpid()

    def trouble(self) -> str | None:
        """Why it makes no progress now, or None."""
        return None if self._loop.is_alive else "the engine ended"

    def report(self) -> dict[str, object]:
        """Its one life."""
        return {"epoch": 1, "restarts": 0}

    def kill(self, why: str) -> None:
        """Refuse. Raises ConfigError."""
        raise ConfigError("the engine is in the server's own process (--in-process), which would end with it")

    async def close(self) -> None:
        """Answer everyone, then end it."""
        self._watching.cancel()
        await self.client.close()

    async def _watch(self) -> None:
        while self._loop.is_alive:
            await asyncio.sleep(WATCH_S)
        self.failure = f"the engine ended ({self._loop.failure or 'it was stopped'}); see the lines above"
        self.failed.set()


class ProcessEngine:
    """An engine process without a keeper: it has one life."""

    is_protected = True

    def __init__(self, process: EngineProcess) -> None:
        self.client = process.client
        self.capacity = process.capacity
        self.failed = asyncio.Event()
        self.failure = ""
        self._process = process
        self._watching = asyncio.create_task(self._watch(), name="octavo-engine-watch")

    @classmethod
    async def start(cls, config: Config) -> ProcessEngine:
        """Start an engine process and wait until it is ready."""
        return cls(await EngineProcess.start(config))

    @property
    def pid(self) -> int:
        """The engine process."""
        return self._process.pid

    def trouble(self) -> str | None:
        """Why it makes no progress now, or None."""
        return None if self._process.returncode is None else "the engine ended"

    def report(self) -> dict[str, object]:
        """Its one life."""
        return {"epoch": 1, "restarts": 0}

    def kill(self, why: str) -> None:
        """End its process at once."""
        self._process.kill()

    async def close(self) -> None:
        """Answer everyone, then end it."""
        self._watching.cancel()
        await self._process.close()

    async def _watch(self) -> None:
        while self._process.returncode is None:
            await asyncio.sleep(WATCH_S)
        self.failure = f"the engine ended ({self._process.describe_exit()}); see the lines above"
        self.failed.set()
