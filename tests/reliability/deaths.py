"""Streams over an EngineSupervisor while its engine processes are killed, stopped or poisoned.

Owns: keeping(), readers that check positions and note their gaps, a load that goes on until it is told to end.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from octavo.config import Config, ModelConfig, ServingConfig
from octavo.core.request import FinishError, FinishReason, Request
from octavo.fleet.replicas import LocalReplicas, share_machine
from octavo.frontend.engine_process import COMMAND
from octavo.frontend.engine_supervisor import EngineSupervisor

FAKE = (sys.executable, str(Path(__file__).parents[1] / "frontend" / "fake_engine.py"))
WAIT_S = 60.0  # for what must come


def config(model: str, **changes: Any) -> Config:
    return Config(model=ModelConfig(model=model), serving=ServingConfig(**changes))


@asynccontextmanager
async def keeping(
    of: Config | str, command: Sequence[str] | None = None, **serving: Any
) -> AsyncIterator[EngineSupervisor]:
    """A keeper over fake engines that behave as named, or over what a whole Config says; closed at the end."""
    if isinstance(of, str):
        keeper = await EngineSupervisor.start(config(of, **serving), command=command or FAKE)
    else:
        keeper = await EngineSupervisor.start(of, command=command or COMMAND)
    try:
        yield keeper
    finally:
        await keeper.close()


async def until(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


@dataclass
class Stream:
    """What one reader got of a request of one choice, and when."""

    request: Request
    ids: list[int] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    num_misplaced: int = 0
    reason: FinishReason | None = None
    error: FinishError | None = None

    def gap_over(self, moment: float) -> float | None:
        """Seconds between the outputs before and after a moment; None when it was not open then."""
        before = [at for at in self.at if at <= moment]
        after = [at for at in self.at if at > moment]
        return after[0] - before[-1] if before and after else None

    def longest_gap(self, moment: float, within_s: float = 5.0) -> float | None:
        """The longest wait for an output in the seconds after a moment; None when it was not open then.

        What was on its way at the moment still arrives, so the gap over the moment itself may be short.
        """
        if self.gap_over(moment) is None:
            return None
        pairs = pairwise(self.at)
        return max(later - before for before, later in pairs if later > moment and before < moment + within_s)


async def follow(keeper: EngineSupervisor, request: Request) -> Stream:
    """Submit and read to the end."""
    stream = Stream(request)
    await keeper.submit(request)
    async for output in keeper.outputs(request.request_id):
        stream.num_misplaced += output.position != len(stream.ids)
        stream.ids += output.token_ids
        stream.at.append(time.monotonic())
        if output.finish_reason is not None:
            stream.reason, stream.error = output.finish_reason, output.error
    return stream


class Load:
    """So many streams at any time, each followed by another, until stop()."""

    def __init__(self, keeper: EngineSupervisor, make: Callable[[int], Request], width: int) -> None:
        self.streams: list[Stream] = []
        self.errors: list[BaseException] = []
        self._keeper = keeper
        self._make = make
        self._next = 0
        self._is_stopping = False
        self._workers = [asyncio.create_task(self._work()) for _ in range(width)]

    async def _work(self) -> None:
        while not self._is_stopping:
            self._next += 1
            try:
                self.streams.append(await follow(self._keeper, self._make(self._next)))
            except Exception as error:
                self.errors.append(error)
                return

    async def stop(self) -> None:
        """Let everything that is open come to its end."""
        self._is_stopping = True
        async with asyncio.timeout(4 * WAIT_S):
            await asyncio.gather(*self._workers)


def quantile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


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
