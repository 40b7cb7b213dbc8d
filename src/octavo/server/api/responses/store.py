"""The stored responses, in memory, and those that run without the connection that requested them.

Owns: the responses of each tenant, their bounds in number, bytes and age, the chain of a response to earlier ones; the
running responses, storing each one's end, cancelling.
Does not: make responses, run anything (IdempotentRequests does), or keep anything over a restart.
Invariants: no tenant finds another's; over a bound, the tenant that keeps most loses its least recently used; the items
that a later response continues are kept as long as it is, even if their own response was deleted or evicted; a running
response is stored as in progress until its end replaces it, and not at all once it was deleted or evicted.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from octavo.errors import OctavoError
from octavo.server.api.responses.answers import ResponseEncoder
from octavo.server.http.errors import ApiError, bad_field, cancelled_error, from_exception
from octavo.server.http.limits import largest_user

if TYPE_CHECKING:
    from starlette.types import Message

    from octavo.config import ResponsesConfig
    from octavo.server.encoding import Json
    from octavo.server.http.lifecycle import Lifecycle
    from octavo.server.idempotency import IdempotentRequests, RetryKey
    from octavo.server.resumable_stream import ResumableStream

_OVERHEAD_BYTES = 1024  # of a response's own objects
_ID_BYTES = 256  # of an item's id and its entry in `items`


@dataclass(frozen=True, slots=True)
class Given:
    """The items that a response answers, as one JSON list, and their ids."""

    items: bytes
    ids: tuple[str, ...]


@dataclass(slots=True, eq=False)
class Link:
    """One turn: the given items and the items of the answer, as JSON, and the turn before."""

    given: bytes
    output: bytes
    ids: tuple[str, ...]
    previous: Link | None
    num_users: int = 0  # the store itself, and the links after it

    @property
    def num_bytes(self) -> int:
        """Approximate bytes in memory."""
        return len(self.given) + len(self.output) + _ID_BYTES * len(self.ids) + _OVERHEAD_BYTES


@dataclass(frozen=True, slots=True)
class Stored:
    """One stored response: `rest` is its JSON without the output."""

    response_id: str
    link: Link
    rest: bytes
    previous_id: str | None
    status: str

    def response(self) -> bytes:
        """Return the response as JSON."""
        return self.rest[:-1] + b',"output":' + self.link.output + b"}"

    def history(self) -> tuple[bytes, ...]:
        """Return lists of items as JSON, oldest first: all inputs and outputs up to and with this response."""
        found: list[bytes] = []
        link: Link | None = self.link
        while link is not None:
            found += (link.output, link.given)
            link = link.previous
        return tuple(reversed(found))


@dataclass(slots=True)
class _Shelf:
    """One tenant's responses, least recently used first, each with the time of its last use; and the links of items."""

    stored: OrderedDict[str, tuple[Stored, float]] = field(default_factory=OrderedDict)
    items: dict[str, Link] = field(default_factory=dict)
    num_bytes: int = 0


class ResponseStore:
    """All stored responses of this server."""

    def __init__(self, config: ResponsesConfig, now: Callable[[], float] = time.monotonic) -> None:
        self.num_given_way = 0
        self._config = config
        self._now = now
        self._shelves: dict[str, _Shelf] = {}
        self._num = 0
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return self._num

    @property
    def num_bytes(self) -> int:
        """Approximate bytes of all responses in memory."""
        return sum(shelf.num_bytes for shelf in self._shelves.values())

    def put(self, tenant: str, response: Json, given: Given, previous: Stored | None) -> None:
        """Store a response and the items that it answers, then evict responses beyond the bounds."""
        output = msgspec.json.encode(response["output"])
        rest = msgspec.json.encode({name: value for name, value in response.items() if name != "output"})
        self.delete(tenant, response["id"])  # replaces its state in progress
        ids = (*given.ids, *(item["id"] for item in response["output"]))
        link = Link(given.items, output, ids, previous.link if previous is not None else None)
        stored = Stored(response["id"], link, rest, previous.response_id if previous else None, response["status"])
        shelf = self._shelves.setdefault(tenant, _Shelf())
        shelf.stored[stored.response_id] = (stored, self._now())
        shelf.num_bytes += len(rest)
        self._num += 1
        self._use(shelf, link)
        self._make_room()
        self._sweep()

    def get(self, tenant: str, response_id: str, param: str | None = None) -> Stored:
        """Return a response; its use renews it and those before it. Raises ApiError (404)."""
        self._drop_old()
        found = self._find(tenant, response_id)
        if found is None:
            asked = param or "the response's id"
            message = (
                f"{asked} is {response_id[:128]!r}, but no such response of yours is stored (for a while, in memory)"
            )
            raise ApiError(404, message, code="response_not_found", param=param)
        self._touch(self._shelves[tenant], found)
        return found

    def has(self, tenant: str, response_id: str) -> bool:
        """Return True if a response is stored, without counting that as a use."""
        return self._find(tenant, response_id) is not None

    def delete(self, tenant: str, response_id: str) -> bool:
        """Delete a response; return True if it was stored."""
        found = self._find(tenant, response_id)
        if found is None:
            return False
        shelf = self._shelves[tenant]
        del shelf.stored[response_id]
        shelf.num_bytes -= len(found.rest)
        self._num -= 1
        self._leave(shelf, found.link)
        if not shelf.stored:
            del self._shelves[tenant]
        return True

    def links(self, tenant: str, item_ids: Iterable[str]) -> list[Link]:
        """Return the turns that have these items, each once. Raises ApiError."""
        items = self._shelves[tenant].items if tenant in self._shelves else {}
        found: dict[int, Link] = {}
        for item_id in item_ids:
            link = items.get(item_id)
            if link is None:
                message = f"input refers to item {item_id[:128]!r}; no stored response of yours has it"
                raise bad_field("input", message, "item_not_found")
            found[id(link)] = link
        return list(found.values())

    @property
    def is_on(self) -> bool:
        """True if responses are stored at all."""
        return self._config.max_stored_responses > 0

    def report(self) -> dict[str, int]:
        """Return the figures for /metrics."""
        return {"kept": len(self), "bytes": self.num_bytes, "given_way": self.num_given_way}

    def _find(self, tenant: str, response_id: str) -> Stored | None:
        shelf = self._shelves.get(tenant)
        found = shelf.stored.get(response_id) if shelf is not None else None
        return found[0] if found is not None else None

    def _touch(self, shelf: _Shelf, stored: Stored) -> None:
        """Mark a response and those before it as used now, the oldest first."""
        chain: list[Stored] = []
        current: Stored | None = stored
        while current is not None:
            chain.append(current)
            previous = shelf.stored.get(current.previous_id) if current.previous_id is not None else None
            current = previous[0] if previous is not None else None
        for each in reversed(chain):
            shelf.stored[each.response_id] = (each, self._now())
            shelf.stored.move_to_end(each.response_id)

    def _use(self, shelf: _Shelf, link: Link) -> None:
        """Count a new user of a link; a new link uses the one before it."""
        current: Link | None = link
        while current is not None:
            current.num_users += 1
            if current.num_users > 1:
                return
            shelf.num_bytes += current.num_bytes
            shelf.items.update(dict.fromkeys(current.ids, current))
            current = current.previous

    def _leave(self, shelf: _Shelf, link: Link) -> None:
        current: Link | None = link
        while current is not None:
            current.num_users -= 1
            if current.num_users > 0:
                return
            shelf.num_bytes -= current.num_bytes
            for item_id in current.ids:
                if shelf.items.get(item_id) is current:  # clients may give the same id again
                    del shelf.items[item_id]
            current = current.previous

    def _make_room(self) -> None:
        config = self._config
        while self._num > config.max_stored_responses:
            self._drop_oldest(largest_user({tenant: len(shelf.stored) for tenant, shelf in self._shelves.items()}))
        while self._shelves and self.num_bytes > config.max_stored_bytes:
            self._drop_oldest(largest_user({tenant: shelf.num_bytes for tenant, shelf in self._shelves.items()}))

    def _drop_oldest(self, tenant: str) -> None:
        self.delete(tenant, next(iter(self._shelves[tenant].stored)))
        self.num_given_way += 1

    def _drop_old(self) -> None:
        oldest = self._now() - self._config.keep_responses_s
        for tenant in list(self._shelves):
            while (shelf := self._shelves.get(tenant)) is not None:
                response_id, (_, used_at) = next(iter(shelf.stored.items()))
                if used_at > oldest:
                    break
                self.delete(tenant, response_id)

    def _sweep(self) -> None:
        """Set the timer that drops old responses when there are no requests."""
        if self._timer is None and self._num:
            used = [next(iter(shelf.stored.values()))[1] for shelf in self._shelves.values()]
            wait_s = max(0.1, min(used) + self._config.keep_responses_s - self._now())
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        self._drop_old()
        self._sweep()


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
