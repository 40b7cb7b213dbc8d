"""Lifecycle: the server's phase and open requests; RequestIndex: finds requests by the names that clients gave them.

Owns: the phase, the count of open requests, the signal that ends them; the answers of a socket before the application
serves on it; the table from (tenant, client's name) to the engine's ids. Does not: know the engine, or cancel or
explain a single request.
A failed server stays failed: draining it would change nothing for its clients.
Invariants: a tenant finds only its own requests. A name that two open requests share finds both. The index keeps as
many ended requests as the engine can explain. Work under `supervise` ends in one of four ways (done, its own error,
ClientGoneError, ServerStoppingError), and its task has ended before `supervise` returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from enum import Enum
from typing import TypeVar

from starlette.types import Receive

from octavo.server.http.errors import RETRY_ENGINE_S, ApiError, draining_error
from octavo.server.http.limits import largest_user

T = TypeVar("T")
_HEAD_LIMIT_S = 5.0
_MAX_HEAD_BYTES = 16 << 10
MARK = "~"  # not allowed in client ids, so that no client can send the engine id of another's request


class ServerPhase(Enum):
    """The phase of the server."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class ClientGoneError(ApiError):
    """The client closed the connection. No answer is sent; the code is counted."""

    def __init__(self) -> None:
        super().__init__(499, "the client left", code="client_disconnected")


class ServerStoppingError(ApiError):
    """The drain time is over, or the server was stopped twice."""

    def __init__(self) -> None:
        super().__init__(503, draining_error().message, code="draining", retry_after_s=RETRY_ENGINE_S)


class Lifecycle:
    """The phase of a server, and its open requests.

    `engine_trouble` returns why the engine makes no progress, or None. Without it, /readyz probes the engine.
    `on_answered` is called once, when work under `supervise` first succeeds.
    """

    def __init__(
        self,
        *,
        engine_trouble: Callable[[], str | None] | None = None,
        on_answered: Callable[[], object] | None = None,
    ) -> None:
        self.phase = ServerPhase.READY
        self.num_open = 0
        self.engine_trouble = engine_trouble
        self._on_answered = on_answered
        self._is_stopping = False
        self._stops: set[asyncio.Future[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def check_ready(self) -> None:
        """Raise ApiError (503) while the server loads or drains, and after a failure."""
        if self.phase is ServerPhase.READY:
            return
        if self.phase is ServerPhase.LOADING:
            raise ApiError(503, "the model is loading", code="loading", retry_after_s=RETRY_ENGINE_S)
        if self.phase is ServerPhase.DRAINING:
            raise draining_error()
        raise ApiError(503, "the engine failed", code="engine_unavailable", retry_after_s=RETRY_ENGINE_S)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Count one request as open while the block runs."""
        self.num_open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_open -= 1
            if self.num_open == 0:
                self._idle.set()

    def fail(self) -> None:
        """Refuse new work from now on: the engine will not restart."""
        self.phase = ServerPhase.FAILED

    def refuse(self) -> None:
        """Refuse new work from now on; open work continues."""
        if self.phase is not ServerPhase.FAILED:
            self.phase = ServerPhase.DRAINING

    async def drain(self, timeout_s: float, grace_s: float = 2.0) -> int:
        """Refuse new work, wait up to `timeout_s` for open work, and end the rest; return the number that it ended."""
        self.refuse()
        if await self._is_idle_within(timeout_s):
            return 0
        num_left = self.num_open
        self.stop()
        await self._is_idle_within(grace_s)
        return num_left

    def stop(self) -> None:
        """End all open work now. Each open request is answered with an error. Idempotent."""
        self.refuse()
        self._is_stopping = True
        for stop in self._stops:
            if not stop.done():
                stop.set_result(None)

    async def _is_idle_within(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def supervise(self, work: Coroutine[object, object, T], receive: Receive) -> T:
        """Run `work` until it ends, the client disconnects or the server stops; return its result."""
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(_disconnected(receive))
        stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._is_stopping:
            stop.set_result(None)
        self._stops.add(stop)
        try:
            await asyncio.wait((task, gone, stop), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                result = task.result()
                if self._on_answered is not None:
                    self._on_answered()
                    self._on_answered = None
                return result
            raise ServerStoppingError if stop.done() else ClientGoneError
        finally:
            self._stops.discard(stop)
            for each in (task, gone, stop):
                each.cancel()
            await asyncio.gather(task, gone, stop, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@contextlib.asynccontextmanager
async def answering_unready(listener: socket.socket, code: str, why: str) -> AsyncIterator[None]:
    """Answer 503 with this reason on an open socket while the block runs; /livez gets 200. The socket stays open."""
    error = ApiError(503, why, code=code, retry_after_s=RETRY_ENGINE_S)
    refusal = _response("503 Service Unavailable", error.body(), f"Retry-After: {RETRY_ENGINE_S}\r\n")
    alive = _response("200 OK", {"status": "ok"})

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(_HEAD_LIMIT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(alive if head.startswith((b"GET /livez ", b"HEAD /livez ")) else refusal)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, sock=listener.dup(), limit=_MAX_HEAD_BYTES)
    try:
        yield
    finally:
        server.close()


def _response(status: str, body: object, headers: str = "") -> bytes:
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n{headers}"
    return f"{head}Connection: close\r\n\r\n".encode() + data


class RequestIndex:
    """The open requests of all tenants, and the last `max_ended` that ended."""

    def __init__(self, max_ended: int = 0) -> None:
        self._names: dict[tuple[str, str], list[Sequence[str]]] = {}
        self._max_ended = max_ended
        self._ended: deque[tuple[str, str, Sequence[str]]] = deque()
        self._num_ended: Counter[str] = Counter()  # by tenant

    def add(self, tenant: str, name: str, engine_ids: Sequence[str]) -> Callable[[], None]:
        """Add a request; return a function that marks the request as ended."""
        key = (tenant, name)
        self._names.setdefault(key, []).append(engine_ids)

        def remove() -> None:
            listed = self._names.get(key, [])
            if engine_ids in listed:
                listed.remove(engine_ids)
                self._note_end((tenant, name, engine_ids))
            if not listed:
                self._names.pop(key, None)

        return remove

    def _note_end(self, end: tuple[str, str, Sequence[str]]) -> None:
        """Add an ended request. Above `max_ended`, drop the oldest of the tenant with most ended requests."""
        self._ended.append(end)
        self._num_ended[end[0]] += 1
        if len(self._ended) > self._max_ended:
            tenant = largest_user(self._num_ended)
            self._ended.remove(next(each for each in self._ended if each[0] == tenant))
            self._num_ended[tenant] -= 1
            if not self._num_ended[tenant]:
                del self._num_ended[tenant]

    def find(self, name: str, tenant: str | None = None) -> list[str]:
        """Return the engine ids of open requests with this client's name or engine id.

        None for `tenant` searches all tenants, for the operator.
        """
        found: list[str] = []
        for (owner, public), listed in self._names.items():
            if tenant is None or owner == tenant:
                found += [one for ids in listed for one in ids if name in (public, one)]
        return found

    def find_ended(self, name: str, tenant: str | None = None) -> list[str]:
        """Return the engine ids of the last ended request with this client's name or engine id."""
        for owner, public, ids in reversed(self._ended):
            if (tenant is None or owner == tenant) and (public == name or name in ids):
                return list(ids) if public == name else [name]
        return []

    def names(self, tenant: str) -> dict[str, str]:
        """Return a map from engine id to client's name, for one tenant's open and ended requests."""
        known = {one: name for owner, name, ids in self._ended if owner == tenant for one in ids}
        for (owner, name), listed in self._names.items():
            if owner == tenant:
                known.update((one, name) for ids in listed for one in ids)
        return known

    def __len__(self) -> int:
        return sum(map(len, self._names.values()))
