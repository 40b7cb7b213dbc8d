"""The stored responses, in memory; and the responses that run without the connection that requested them.

Owns: each tenant's responses, their bounds in number, bytes and age, and the chain from a response to earlier ones; the
running responses, storing each one's end, cancelling.
Does not: make or run responses (IdempotentRequests runs them), or keep anything over a restart.
Invariants: no tenant finds another tenant's response. Above a bound, the tenant that keeps most loses its least
recently used response. Items that a later response continues are kept as long as that response, even if their own
response was deleted or evicted. A running response is stored as in progress until its end replaces it; if it was
deleted or evicted before, its end is not stored.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec

from octavo.errors import OctavoError
from octavo.server.api.responses.answers import ResponseEncoder
from octavo.server.http.errors import ApiError, bad_field, cancelled_error, draining_error, from_exception
from octavo.server.http.limits import largest_user

if TYPE_CHECKING:
    from starlette.types import Message

    from octavo.config import ResponsesConfig
    from octavo.server.encoding import Json
    from octavo.server.http.lifecycle import Lifecycle
    from octavo.server.idempotency import IdempotentRequests, RetryKey
    from octavo.server.resumable_stream import ResumableStream

_ID_IN_PATH = "the response's id"
_OVERHEAD_BYTES = 1024  # for a response's Python objects
_ID_BYTES = 256  # for an item's id and its entry in `items`


@dataclass(frozen=True, slots=True)
class InputItems:
    """The items that a response answers: as one JSON list, and their ids."""

    items: bytes
    ids: tuple[str, ...]


@dataclass(slots=True, eq=False)
class StoredTurn:
    """One turn: the input items and the answer's items, as JSON; and the previous turn."""

    input_items: bytes
    output: bytes
    ids: tuple[str, ...]
    previous: StoredTurn | None
    num_users: int = 0  # the store itself, and each turn that continues this one

    @property
    def num_bytes(self) -> int:
        """Approximate bytes in memory."""
        return len(self.input_items) + len(self.output) + _ID_BYTES * len(self.ids) + _OVERHEAD_BYTES


@dataclass(frozen=True, slots=True)
class Stored:
    """One stored response. `rest` is its JSON without the output."""

    response_id: str
    turn: StoredTurn
    rest: bytes
    previous_id: str | None
    status: str

    def response(self) -> bytes:
        """Return the response as JSON."""
        return self.rest[:-1] + b',"output":' + self.turn.output + b"}"

    def history(self) -> tuple[bytes, ...]:
        """Return the JSON lists of all inputs and outputs up to and including this response, oldest first."""
        found: list[bytes] = []
        turn: StoredTurn | None = self.turn
        while turn is not None:
            found += (turn.output, turn.input_items)
            turn = turn.previous
        return tuple(reversed(found))


@dataclass(slots=True)
class _TenantResponses:
    """One tenant's responses with their last use, least recently used first; and the turn of each item id."""

    stored: OrderedDict[str, tuple[Stored, float]] = field(default_factory=OrderedDict)
    items: dict[str, StoredTurn] = field(default_factory=dict)
    num_bytes: int = 0


class ResponseStore:
    """All stored responses of this server."""

    def __init__(self, config: ResponsesConfig, now: Callable[[], float] = time.monotonic) -> None:
        self.num_evicted = 0
        self._config = config
        self._now = now
        self._by_tenant: dict[str, _TenantResponses] = {}
        self._num = 0
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return self._num

    @property
    def num_bytes(self) -> int:
        """Approximate bytes of all responses in memory."""
        return sum(own.num_bytes for own in self._by_tenant.values())

    def put(self, tenant: str, response: Json, input_items: InputItems, previous: Stored | None) -> None:
        """Store a response and the items that it answers; then evict responses beyond the bounds."""
        output = msgspec.json.encode(response["output"])
        rest = msgspec.json.encode({name: value for name, value in response.items() if name != "output"})
        self.delete(tenant, response["id"])  # replaces the response in progress
        ids = (*input_items.ids, *(item["id"] for item in response["output"]))
        turn = StoredTurn(input_items.items, output, ids, previous.turn if previous is not None else None)
        stored = Stored(response["id"], turn, rest, previous.response_id if previous else None, response["status"])
        own = self._by_tenant.setdefault(tenant, _TenantResponses())
        own.stored[stored.response_id] = (stored, self._now())
        own.num_bytes += len(rest)
        self._num += 1
        self._use(own, turn)
        self._make_room()
        self._sweep()

    def get(self, tenant: str, response_id: str, param: str | None = None) -> Stored:
        """Return a response; this counts as a use of the response and of all earlier ones. Raises ApiError (404)."""
        self._drop_old()
        found = self._find(tenant, response_id)
        if found is None:
            place = f"{param or _ID_IN_PATH} is {response_id[:128]!r}"
            message = f"{place}, but no response of yours with that id is stored: they are kept in memory, for a while"
            raise ApiError(404, message, code="response_not_found", param=param)
        self._touch(self._by_tenant[tenant], found)
        return found

    def has(self, tenant: str, response_id: str) -> bool:
        """Return True if a response is stored. This does not count as a use."""
        return self._find(tenant, response_id) is not None

    def delete(self, tenant: str, response_id: str) -> bool:
        """Delete a response; return True if it was stored."""
        found = self._find(tenant, response_id)
        if found is None:
            return False
        own = self._by_tenant[tenant]
        del own.stored[response_id]
        own.num_bytes -= len(found.rest)
        self._num -= 1
        self._leave(own, found.turn)
        if not own.stored:
            del self._by_tenant[tenant]
        return True

    def turns(self, tenant: str, item_ids: Iterable[str]) -> list[StoredTurn]:
        """Return the turns that contain these items, each turn once. Raises ApiError."""
        items = self._by_tenant[tenant].items if tenant in self._by_tenant else {}
        found: dict[int, StoredTurn] = {}
        for item_id in item_ids:
            turn = items.get(item_id)
            if turn is None:
                message = f"input refers to item {item_id[:128]!r}; no stored response of yours has it"
                raise bad_field("input", message, "item_not_found")
            found[id(turn)] = turn
        return list(found.values())

    @property
    def is_on(self) -> bool:
        """True if responses are stored at all."""
        return self._config.max_stored_responses > 0

    def report(self) -> dict[str, int]:
        """Return the counts for /metrics."""
        return {"kept": len(self), "bytes": self.num_bytes, "given_way": self.num_evicted}

    def _find(self, tenant: str, response_id: str) -> Stored | None:
        own = self._by_tenant.get(tenant)
        found = own.stored.get(response_id) if own is not None else None
        return found[0] if found is not None else None

    def _touch(self, own: _TenantResponses, stored: Stored) -> None:
        """Mark a response and the earlier ones in its chain as used now, oldest first."""
        chain: list[Stored] = []
        current: Stored | None = stored
        while current is not None:
            chain.append(current)
            previous = own.stored.get(current.previous_id) if current.previous_id is not None else None
            current = previous[0] if previous is not None else None
        for each in reversed(chain):
            own.stored[each.response_id] = (each, self._now())
            own.stored.move_to_end(each.response_id)

    def _use(self, own: _TenantResponses, turn: StoredTurn) -> None:
        """Count a new user of a turn. A turn's first user makes the turn a user of the previous one."""
        current: StoredTurn | None = turn
        while current is not None:
            current.num_users += 1
            if current.num_users > 1:
                return
            own.num_bytes += current.num_bytes
            own.items.update(dict.fromkeys(current.ids, current))
            current = current.previous

    def _leave(self, own: _TenantResponses, turn: StoredTurn) -> None:
        current: StoredTurn | None = turn
        while current is not None:
            current.num_users -= 1
            if current.num_users > 0:
                return
            own.num_bytes -= current.num_bytes
            for item_id in current.ids:
                if own.items.get(item_id) is current:  # clients may send the same id again
                    del own.items[item_id]
            current = current.previous

    def _make_room(self) -> None:
        config = self._config
        while self._num > config.max_stored_responses:
            self._drop_oldest(largest_user({tenant: len(own.stored) for tenant, own in self._by_tenant.items()}))
        while self._by_tenant and self.num_bytes > config.max_stored_bytes:
            self._drop_oldest(largest_user({tenant: own.num_bytes for tenant, own in self._by_tenant.items()}))

    def _drop_oldest(self, tenant: str) -> None:
        self.delete(tenant, next(iter(self._by_tenant[tenant].stored)))
        self.num_evicted += 1

    def _drop_old(self) -> None:
        oldest = self._now() - self._config.keep_responses_s
        for tenant in list(self._by_tenant):
            while (own := self._by_tenant.get(tenant)) is not None:
                response_id, (_, used_at) = next(iter(own.stored.items()))
                if used_at > oldest:
                    break
                self.delete(tenant, response_id)

    def _sweep(self) -> None:
        """Set the timer that drops old responses even without requests."""
        if self._timer is None and self._num:
            used = [next(iter(own.stored.values()))[1] for own in self._by_tenant.values()]
            wait_s = max(0.1, min(used) + self._config.keep_responses_s - self._now())
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        self._drop_old()
        self._sweep()


MAX_DETACHED, MAX_DETACHED_BYTES = 256, 32 << 20  # runs with their own events, among them ended ones
MAX_RESUMABLE = 10_000  # remembered runs; above this, runs that are no longer kept are dropped


class DetachedRun(Protocol):
    """A running response with events of its own: one with calls of MCP servers."""

    name: str
    unread_bytes: int
    encoder: ResponseEncoder
    events: list[bytes]
    failure: ApiError | None

    def read(self, behind: int, quiet_s: float) -> AsyncGenerator[bytes, None]:
        """Yield the events after event number `behind` until the end, and b"" after `quiet_s` without any."""

    async def finished(self) -> Json:
        """Wait for the end and return the response. Raises ApiError."""

    def cancel(self, why: ApiError) -> None:
        """End it with this error."""

    async def close(self) -> None:
        """Stop reading."""


@dataclass(slots=True)
class _BackgroundRun:
    """One running response. `keep` replaces it in the store; `finish` waits for its end, and `end` causes it."""

    encoder: ResponseEncoder
    keep: Callable[[Json], None]
    finish: Callable[[], Coroutine[object, object, Json]]
    end: Callable[[ApiError], None]
    is_cancelled: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Background:
    """All responses that run in the background."""

    def __init__(self, runs: IdempotentRequests, lifecycle: Lifecycle) -> None:
        self._runs = runs
        self._lifecycle = lifecycle
        self._jobs: dict[tuple[str, str], _BackgroundRun] = {}
        self._keys: dict[tuple[str, str], RetryKey] = {}
        self._max_keys = MAX_RESUMABLE
        self._detached: OrderedDict[tuple[str, str], DetachedRun] = OrderedDict()  # also some that have ended
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._jobs)

    def start(self, key: RetryKey, replay: ResumableStream, keep: Callable[[Json], None]) -> None:
        """Follow a run to its end and store its response. A draining server waits for the run."""
        encoder = replay.encoder
        assert isinstance(encoder, ResponseEncoder)
        name = (key.tenant, encoder.response_id)
        self._keys[name] = key
        if len(self._keys) > self._max_keys:
            self._keys = {name: each for name, each in self._keys.items() if self._runs.has(each)}
            self._max_keys = MAX_RESUMABLE + 2 * len(self._keys)

        async def finish() -> Json:
            try:
                return encoder.whole(await replay.collect())
            finally:
                await replay.close()

        self._start(name, _BackgroundRun(encoder, keep, finish, lambda why: self._runs.give_up(key, why)))

    def start_calls(self, tenant: str, run: DetachedRun, keep: Callable[[Json], None]) -> None:
        """Follow a run that has its own events to its end and store its response."""
        name = (tenant, run.encoder.response_id)
        self._detached[name] = run

        async def finish() -> Json:
            try:
                return await run.finished()
            except asyncio.CancelledError:  # the server stops
                run.cancel(draining_error())
                raise

        self._start(name, _BackgroundRun(run.encoder, keep, finish, run.cancel))

    def key_of(self, tenant: str, response_id: str) -> RetryKey | None:
        """Return the RetryKey of a response's run; None if unknown."""
        return self._keys.get((tenant, response_id))

    def run_of(self, tenant: str, response_id: str) -> DetachedRun | None:
        """Return a response's run that has its own events; None if unknown."""
        return self._detached.get((tenant, response_id))

    async def cancel(self, tenant: str, response_id: str) -> None:
        """End a running response and wait until its end is stored. Do nothing if it has ended."""
        job = self._jobs.get((tenant, response_id))
        if job is not None:
            job.is_cancelled = True
            job.end(cancelled_error())
            await job.ended.wait()

    def _start(self, name: tuple[str, str], job: _BackgroundRun) -> None:
        job.keep(job.encoder.in_progress())
        self._jobs[name] = job
        is_open = ExitStack()
        is_open.enter_context(self._lifecycle.opened())
        task = asyncio.create_task(self._follow(name, job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: is_open.close())

    async def _follow(self, name: tuple[str, str], job: _BackgroundRun) -> None:
        encoder = job.encoder
        try:
            job.keep(await self._lifecycle.supervise(job.finish(), _never_disconnects))
        except (ApiError, OctavoError) as error:
            failure = from_exception(error)
            job.keep({**encoder.ended(failure), "status": "cancelled", "error": None} if job.is_cancelled else
                     encoder.ended(failure))  # fmt: skip
        finally:
            del self._jobs[name]
            job.ended.set()
            self._forget_events()

    def _forget_events(self) -> None:
        """Drop the events of ended runs beyond the bounds, the oldest first."""
        num_bytes = {name: sum(map(len, run.events)) for name, run in self._detached.items()}
        total = sum(num_bytes.values())
        for name in [name for name in self._detached if name not in self._jobs]:
            if len(self._detached) <= MAX_DETACHED and total <= MAX_DETACHED_BYTES:
                return
            del self._detached[name]
            total -= num_bytes[name]


async def _never_disconnects() -> Message:
    """Wait forever: the `receive` of a connection that never closes."""
    nothing: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    return await nothing
