"""How many replicas a fleet has: LocalReplicas adds and drains those that this machine starts.

Owns: scaling, rolling to another version, loading and unloading on demand; the source of a replica that came from
outside. Does not: start, watch or drain an engine (EngineSupervisor does), or choose engines for requests.
Invariants: a replica is ready before the one that it replaces is drained, unless there is no room for both. Nothing is
stopped while it has a request.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from octavo.config import Config
from octavo.errors import EngineDeadError
from octavo.frontend.engine_process import COMMAND
from octavo.frontend.engine_source import EngineSource, RunningEngine
from octavo.frontend.engine_supervisor import EngineSupervisor

START_LIMIT_S = 600.0  # how long a request waits for the first engine

SourceFactory = Callable[[], EngineSource]


class LocalReplicas:
    """The replicas of a supervisor that `make_source` starts, oldest first. Others may be added beside them."""

    def __init__(self, supervisor: EngineSupervisor, make_source: SourceFactory) -> None:
        self.supervisor = supervisor
        self.make_source = make_source
        self.numbers: list[int] = []
        self._changes = asyncio.Lock()  # held while replicas are scaled, rolled, loaded or unloaded

    async def scale(self, count: int, limit_s: float | None = None) -> None:
        """Have `count` replicas: add some, or drain the newest ones, whose requests are moved after `limit_s`.

        Raises the error of an opening; the replicas that could be opened stay.
        """
        async with self._changes:
            await self._scale(count, limit_s)

    async def roll(self, make_source: SourceFactory, *, limit_s: float | None = None, is_one_more: bool = True) -> None:
        """Replace the replicas one after another by those of another factory; no request is lost.

        Each new replica is ready before the old one is drained. With `is_one_more` False the old one is drained first,
        for machines without room for another. Raises the error of an opening, and leaves the other replicas as they
        are.
        """
        async with self._changes:
            before, self.make_source = self.make_source, make_source
            for number in tuple(self.numbers):
                try:
                    if is_one_more:
                        await self._add()
                    await self._drain(number, limit_s)
                    if not is_one_more:
                        await self._add()
                except BaseException:
                    self.make_source = before
                    raise

    async def ensure_started(self) -> None:
        """If there is no replica, start one. Raises the error of its opening, or TimeoutError."""
        if not self.supervisor.replicas:
            async with self._changes, asyncio.timeout(START_LIMIT_S):
                if not self.supervisor.replicas:
                    await self._add()

    async def unload(self) -> bool:
        """Stop all replicas; `ensure_started` starts one again. Return False if a request is open."""
        async with self._changes:
            if len(self.supervisor.requests):
                return False
            await self._scale(0, None)
            return True

    async def _scale(self, count: int, limit_s: float | None) -> None:
        known = {replica.number for replica in self.supervisor.replicas}
        self.numbers = [number for number in self.numbers if number in known]
        while len(self.numbers) < count:
            await self._add()
        await asyncio.gather(*(self._drain(number, limit_s) for number in reversed(self.numbers[count:])))

    async def _add(self) -> None:
        self.numbers.append(await self.supervisor.add(self.make_source()))

    async def _drain(self, number: int, limit_s: float | None) -> None:
        self.numbers.remove(number)
        await self.supervisor.drain(number, limit_s)


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


async def start_fleet(
    supervisor: EngineSupervisor, config: Config, count: int, command: Sequence[str] = COMMAND
) -> LocalReplicas:
    """Start `count` replicas on this machine. Raises the error of an opening, and leaves no process then."""
    shared = share_machine(config, max(1, count))
    local = LocalReplicas(supervisor, lambda: supervisor.spawner(shared, command))
    try:
        await local.scale(count)
    except BaseException:
        await supervisor.close()
        raise
    return local
