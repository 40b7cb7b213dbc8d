"""Outputs token by token, from a running engine or from what a former server left.

Owns: clients whose outputs have at most one token, so that text is known at every token: an event id may name any.
Does not: keep anything (replay does).
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Iterable, Mapping

from octavo.core.request import FinishReason, Request
from octavo.engine.client import Accepted, EngineClient, TokenOutput, Verb
from octavo.errors import EngineError
from octavo.frontend.open_request import OpenRequest
from octavo.frontend.output_slices import slices
from octavo.frontend.sessions import Sessions


def one_by_one(sessions: Sessions) -> Sessions:
    """The same sessions, which share their seeds and all else, over outputs of at most one token."""
    fine = copy.copy(sessions)
    fine.client = OneByOne(sessions.client)
    return fine


class OneByOne:
    """An engine client whose outputs have at most one token."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    async def submit(self, request: Request) -> Accepted:
        """See EngineClient."""
        return await self._client.submit(request)

    async def outputs(self, request_id: str, final_only: bool = False) -> AsyncIterator[TokenOutput]:
        """See EngineClient."""
        async for output in self._client.outputs(request_id, final_only):
            for piece in slices(output, 1):
                yield piece

    async def cancel(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.CANCELLED, choice: int | None = None
    ) -> None:
        """See EngineClient."""
        await self._client.cancel(request_ids, reason, choice)

    async def statistics(self) -> Mapping[str, object]:
        """See EngineClient."""
        return await self._client.statistics()

    async def control(self, verb: Verb, argument: str = "") -> object:
        """See EngineClient."""
        return await self._client.control(verb, argument)

    async def close(self) -> None:
        """See EngineClient."""
        await self._client.close()


class Stored(OneByOne):
    """A client of requests that have ended: their entries give the outputs, no engine is asked."""

    def __init__(self, entries: Mapping[str, OpenRequest]) -> None:
        self._entries = entries

    async def submit(self, request: Request) -> Accepted:
        """Refuse."""
        raise EngineError(f"request {request.request_id} cannot be submitted here")

    async def outputs(self, request_id: str, final_only: bool = False) -> AsyncIterator[TokenOutput]:
        """All that there is."""
        for output in self._entries[request_id].take():
            for piece in slices(output, 1):
                yield piece

    async def cancel(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.CANCELLED, choice: int | None = None
    ) -> None:
        """Nothing to do: what is stored has ended."""
