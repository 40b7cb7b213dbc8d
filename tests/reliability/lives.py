"""Engines that follow each other in this thread, so that an engine can die between any two steps, hundreds of times.

Owns: Life (in the place of an engine process and its socket) and Lives (in the place of the keeper: an EngineClient
over OpenRequests). Does not: start processes; deaths of real ones are in the rows 1, 3 and 5.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any

from octavo.core.limits import Limits
from octavo.core.plan import Events
from octavo.core.request import FinishReason, Request
from octavo.core.scheduler import Scheduler
from octavo.engine.client import Accepted, TokenOutput
from octavo.engine.loop import Clock, EngineLoop
from octavo.errors import RequestError
from octavo.executors.protocol import Executor
from octavo.frontend.open_requests import OpenRequests
from octavo.grammar.bank import GrammarBank
from octavo.grammar.matcher import Matcher
from octavo.grammar.vocabulary import Vocabulary
from octavo.media.item import MediaItem

Opened = tuple[Executor, Limits]


class NoWait(Clock):
    """For a loop that shares its thread with those who would wake it."""

    def wait(self, condition: threading.Condition, until: float | None) -> None:
        return


class PromptBank(GrammarBank):
    """A bank that builds at once, so that an engine's turns are the same in every run."""

    def prepare(self, request: Request, done: Callable[[Matcher | RequestError], None]) -> None:
        self._prepare(request, done)


class Life:
    """An engine of this thread: an EngineLink, and one turn of the loop at a time."""

    def __init__(
        self,
        epoch: int,
        opened: Opened,
        receive: Callable[[int, Events], None],
        depth: int,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        executor, limits = opened
        bank = None if vocabulary is None else PromptBank(vocabulary)
        self.epoch = epoch
        self.is_alive = True
        self.num_turns = 0
        self.scheduler = Scheduler(limits)
        self.loop = EngineLoop(self.scheduler, executor, clock=NoWait(), depth=depth, bank=bank)
        self.loop.attach(lambda events: receive(epoch, events) if self.is_alive else None)

    def send(self, request: Request, media: Any = ()) -> asyncio.Future[Accepted]:
        answer: asyncio.Future[Accepted] = asyncio.get_running_loop().create_future()

        def settle(value: Any) -> None:
            if not answer.done() and self.is_alive:
                answer.set_exception(value) if isinstance(value, Exception) else answer.set_result(value)

        self.loop.submit(request, settle, media)
        return answer

    def post_cancel(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.CANCELLED, choice: int | None = None
    ) -> None:
        self.loop.cancel(tuple(request_ids), reason, choice)

    def turn(self) -> bool:
        """One beat of the loop; False when there is nothing to do."""
        if not (self.loop._inbox or self.scheduler.has_work or self.loop._in_flight):
            return False
        self.num_turns += 1
        self.loop._turn()
        return True


class Lives:
    """An EngineClient over engines of which `open_engine` makes one after another."""

    def __init__(self, open_engine: Callable[[], Opened], depth: int = 1, vocabulary: Vocabulary | None = None) -> None:
        self._vocabulary = vocabulary
        self.requests = OpenRequests()
        self._open_engine = open_engine
        self._depth = depth
        self.epoch = 0
        self.life: Life
        self.next_life()

    def next_life(self) -> None:
        """The engine in force, if there is one, is no more; another begins."""
        if self.epoch:
            self.life.is_alive = False
            if self.life.loop._bank is not None:
                self.life.loop._bank.close()
            self.requests.lose_engine(())
        self.epoch += 1
        opened, receive = self._open_engine(), self.requests.accept
        self.life = Life(self.epoch, opened, receive, self._depth, self._vocabulary)
        self.requests.begin_epoch(self.life)

    async def run(self, cut_after: Callable[[int], bool] = lambda _: False) -> int:
        """Turn until nothing is to be done; die after the turns that `cut_after` names. Returns how many turns."""
        turns = 0
        while True:
            for _ in range(4):  # readers, and what they ask for
                await asyncio.sleep(0)
            if not self.life.turn():
                return turns
            turns += 1
            if cut_after(turns):
                self.next_life()

    async def submit(self, request: Request, media: tuple[MediaItem, ...] = ()) -> Accepted:
        return await self.requests.submit(request, media)

    def outputs(
        self, request_id: str, final_only: bool = False, max_ids: int = sys.maxsize
    ) -> AsyncIterator[TokenOutput]:
        return self.requests.outputs(request_id, final_only, max_ids)

    def cancel(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.CANCELLED, choice: int | None = None
    ) -> int:
        return self.requests.cancel(request_ids, reason, choice)

    async def statistics(self) -> Mapping[str, object]:
        return {}

    async def control(self, verb: str, argument: str = "") -> object:
        return True

    async def close(self) -> None:
        """Nothing to end."""
