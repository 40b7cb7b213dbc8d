"""Background: responses that run without the connection that requested them.

Owns: the running responses, storing each one's end, cancelling. Does not: run anything (IdempotentRequests does), or
hold stored responses (ResponseStore does).
Invariants: a running response is in the store as in progress until its end replaces it; one that was deleted or evicted
meanwhile is not stored again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.errors import OctavoError
from octavo.server.api.responses.answers import ResponseEncoder
from octavo.server.http.errors import ApiError, cancelled_error, from_exception

if TYPE_CHECKING:
    from starlette.types import Message

    from octavo.server.encoding import Json
    from octavo.server.http.lifecycle import Lifecycle
    from octavo.server.idempotency import IdempotentRequests, RetryKey
    from octavo.server.resumable_stream import ResumableStream

MAX_RESUMABLE = 10_000  # remembered runs; over this, those that are no longer kept are dropped


@dataclass(slots=True)
class _Job:
    """One running response. `keep` replaces it in the store."""

    key: RetryKey
    replay: ResumableStream
    shape: ResponseEncoder
    keep: Callable[[Json], None]
    is_cancelled: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Background:
    """All responses that run in the background."""

    def __init__(self, runs: IdempotentRequests, lifecycle: Lifecycle) -> None:
        self._runs = runs
        self._lifecycle = lifecycle
        self._jobs: dict[tuple[str, str], _Job] = {}
        self._keys: dict[tuple[str, str], RetryKey] = {}
        self._max_keys = MAX_RESUMABLE
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._jobs)

    def start(self, key: RetryKey, replay: ResumableStream, keep: Callable[[Json], None]) -> None:
        """Follow a run until its end, and store its response. A server that drains waits for it."""
        shape = replay.encoder
        assert isinstance(shape, ResponseEncoder)
        name = (key.tenant, shape.response_id)
        keep(shape.begun())
        self._jobs[name] = job = _Job(key, replay, shape, keep)
        self._keys[name] = key
        if len(self._keys) > self._max_keys:
            self._keys = {name: each for name, each in self._keys.items() if self._runs.has(each)}
            self._max_keys = MAX_RESUMABLE + 2 * len(self._keys)
        is_open = ExitStack()
        is_open.enter_context(self._lifecycle.opened())
        task = asyncio.create_task(self._follow(name, job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: is_open.close())

    def key_of(self, tenant: str, response_id: str) -> RetryKey | None:
        """Return the key of a response's run."""
        return self._keys.get((tenant, response_id))

    async def cancel(self, tenant: str, response_id: str) -> None:
        """End a response and wait until that is stored. Do nothing if it has ended already."""
        job = self._jobs.get((tenant, response_id))
        if job is not None:
            job.is_cancelled = True
            self._runs.give_up(job.key, cancelled_error())
            await job.ended.wait()

    async def _follow(self, name: tuple[str, str], job: _Job) -> None:
        shape = job.shape
        try:
            choices = await self._lifecycle.supervise(job.replay.collect(), _nobody_leaves)
            job.keep(shape.whole(choices))
        except (ApiError, OctavoError) as error:
            failure = from_exception(error)
            job.keep({**shape.ended(failure), "status": "cancelled", "error": None} if job.is_cancelled else
                     shape.ended(failure))  # fmt: skip
        finally:
            del self._jobs[name]
            job.ended.set()
            await job.replay.close()


async def _nobody_leaves() -> Message:
    """Wait forever: the `receive` of a connection that is never closed."""
    nothing: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    return await nothing
