"""How many replicas a fleet has: Replicas scales and rolls them; LocalReplicas are those that this machine starts.

Owns: scaling, rolling to another version; the source of a replica that came from outside.
Does not: start, watch or drain an engine (EngineSupervisor does), or choose engines for requests.
Invariants: a replica is ready before the one that it replaces is drained. Nothing is stopped while it has a request.
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeVar

from octavo.config import Config
from octavo.errors import EngineDeadError
from octavo.frontend.engine_source import EngineSource, RunningEngine
from octavo.frontend.engine_supervisor import EngineSupervisor

SourceFactory = Callable[[], EngineSource]
_Template = TypeVar("_Template")


class Replicas(ABC, Generic[_Template]):
    """The replicas of a supervisor that are made from one template, oldest first. Others may be added beside them."""

    def __init__(self, supervisor: EngineSupervisor, template: _Template) -> None:
        self.supervisor = supervisor
        self.template = template
        self.numbers: list[int] = []
        self._changes = asyncio.Lock()  # held while replicas are scaled or rolled

    async def scale(self, count: int) -> None:
        """Have `count` replicas: add some, or drain the newest ones.

        Raises the error of an opening; the replicas that could be opened stay.
        """
        async with self._changes:
            await self._scale(count)

    async def roll(self, template: _Template) -> None:
        """Replace the replicas one after another by those of another template; no request is lost.

        Each new replica is ready before the old one is drained. Raises the error of an opening, and leaves the other
        replicas as they are.
        """
        async with self._changes:
            before, self.template = self.template, template
            for number in tuple(self.numbers):
                try:
                    await self._add()
                    await self._drain(number)
                except BaseException:
                    self.template = before
                    raise

    @abstractmethod
    async def _scale(self, count: int) -> None: ...

    @abstractmethod
    async def _add(self) -> None: ...

    @abstractmethod
    async def _drain(self, number: int) -> None: ...


class LocalReplicas(Replicas[SourceFactory]):
    """Replicas that this process starts; the template makes their sources."""

    async def _scale(self, count: int) -> None:
        known = {replica.number for replica in self.supervisor.replicas}
        self.numbers = [number for number in self.numbers if number in known]
        while len(self.numbers) < count:
            await self._add()
        await asyncio.gather(*(self._drain(number) for number in reversed(self.numbers[count:])))

    async def _add(self) -> None:
        self.numbers.append(await self.supervisor.add(self.template()))

    async def _drain(self, number: int) -> None:
        self.numbers.remove(number)
        await self.supervisor.drain(number)


class AttachedSource:
    """The source of a replica that came from outside with its engine: when the engine is lost, so is the replica."""

    is_lasting = False
    standby: RunningEngine | None = None

    def __init__(self, engine: RunningEngine) -> None:
        self._engine = engine

    async def next(self) -> RunningEngine:
        """Return the engine."""
        return self._engine

    async def replace(self, was_useful: bool) -> RunningEngine:
        """Refuse. Raises EngineDeadError."""
        raise EngineDeadError("it has left the fleet")

    def prepare(self, is_settled: Callable[[], bool]) -> None:
        """Start no standby."""

    async def close(self) -> None:
        """There is nothing to end."""


def share_machine(config: Config, count: int) -> Config:
    """Return the settings of each of `count` replicas on this machine: equal shares of its threads and memory."""
    execution, cache = config.execution, config.cache
    if execution.threads is None:
        execution = replace(execution, threads=max(1, len(os.sched_getaffinity(0)) // count))
    if cache.memory_fraction is not None:
        cache = replace(cache, memory_fraction=cache.memory_fraction / count)
    return replace(config, execution=execution, cache=cache)
