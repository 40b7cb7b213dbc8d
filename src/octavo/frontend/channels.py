"""One output channel per request, for the tasks of one event loop, read from the ledger.

Owns: who waits for which entry. Does not: buffer anything: a channel is a reader's place in the ledger, so a
slow reader finds one larger output and never a queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable

from octavo.core.request import FinishError, FinishReason, Request
from octavo.engine.client import TokenOutput
from octavo.engine.delivery import Delivery, End
from octavo.errors import RequestError
from octavo.frontend.entry import Entry
from octavo.frontend.ledger import Ledger, LedgerObserver


class Channels:
    """Hands deliveries to waiting readers. Every method runs in the event loop's thread."""

    def __init__(self, epoch: int = 0, observer: LedgerObserver | None = None) -> None:
        self.ledger = Ledger(epoch, observer=observer)

    def open(self, request: Request) -> Entry:
        """Record a request. Raises DuplicateRequestError."""
        return self.ledger.add(request)

    def forget(self, request_id: str) -> None:
        """Drop a request that the engine refused."""
        self.ledger.forget(request_id)

    def deliver(self, epoch: int, delivery: Delivery) -> None:
        """Append to the ledger, then wake the readers with news."""
        _wake(self.ledger.accept(epoch, delivery))

    def end(
        self, request_id: str, reason: FinishReason, error: FinishError | None = None, choice: int | None = None
    ) -> None:
        """End an open request here, or one choice of it."""
        _wake(self.ledger.end(request_id, reason, error, choice))

    def finish(self, entry: Entry, end: End) -> None:
        """End an open request here with this end."""
        _wake(self.ledger.finish(entry, end))

    def end_all(self, reason: FinishReason, error: FinishError) -> None:
        """End every open request here."""
        _wake(self.ledger.end_all(reason, error))

    def outputs(self, request_id: str, final_only: bool = False) -> Reading:
        """Outputs of one request. Raises RequestError at once when it is not open here."""
        entry = self.ledger.get(request_id)
        if entry is None:
            raise RequestError(f"no request {request_id!r} is open here, or it was read to its end", "request_id")
        return Reading(self.ledger, entry, self._read(entry, final_only))

    async def _read(self, entry: Entry, final_only: bool) -> AsyncIterator[TokenOutput]:
        assert entry.waiter is None, "a request has one reader"
        entry.final_only = final_only
        if entry.is_read:
            return
        has_ended = False
        while not has_ended:
            if not (entry.end is not None or (entry.has_news and not final_only)):
                await _news(entry)
                continue
            outputs = entry.take()
            has_ended = outputs[-1].is_final
            if has_ended:
                self.ledger.forget_entry(entry)
            for output in outputs:
                yield output


class Reading(AsyncIterator[TokenOutput]):
    """Outputs of one entry, and how much of it waits to be read. Once nobody holds it, nobody reads the entry."""

    def __init__(self, ledger: Ledger, entry: Entry, outputs: AsyncIterator[TokenOutput]) -> None:
        self._ledger = ledger
        self._entry = entry
        self._outputs = outputs

    def __anext__(self) -> Awaitable[TokenOutput]:
        return self._outputs.__anext__()

    def __del__(self) -> None:
        if not self._entry.is_read:
            self._ledger.abandon(self._entry)

    @property
    def num_unread(self) -> int:
        """Tokens that the reader has not taken."""
        return sum(len(page.ids) - page.num_read for page in self._entry.pages.values())


async def _news(entry: Entry) -> None:
    entry.waiter = asyncio.get_running_loop().create_future()
    try:
        await entry.waiter
    finally:
        entry.waiter = None


def _wake(entries: Iterable[Entry]) -> None:
    for entry in entries:
        waiter = entry.waiter
        if waiter is not None and not waiter.done() and (entry.end is not None or not entry.final_only):
            waiter.set_result(None)
