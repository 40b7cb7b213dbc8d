"""The feed: the engine's frames (docs/statistics.md) for watchers such as the dashboard.

Owns: requesting frames while there are watchers, once for all watchers with the same cursor; of a fleet, the frames of
the replica that a watcher chose, and a row of figures for each replica; the watchers, their number and unread events.
Does not: send events (reply does), make frames (observe.frames does), or decide which keys may watch (keys does).
Invariants: without a watcher the engine gets no request. A watcher that does not read is cut and delays no other
watcher. Watchers do not keep a server from draining.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from octavo.engine.client import EngineClient
from octavo.errors import OctavoError
from octavo.server.encoding import sse_event
from octavo.server.http.errors import ApiError
from octavo.server.http.keys import KeyInfo, KeyRing
from octavo.server.http.lifecycle import Lifecycle, ServerPhase
from octavo.server.http.limits import HttpLimits, largest_user

MAX_WATCHERS = 16
MAX_UNREAD_BYTES = 8 << 20  # per watcher: some seconds of a busy engine's frames, or twice all stored frames
POLL_S = 0.2
REPLICAS_S = 1.0  # between two events with the rows of replicas
TROUBLE_S = 1.0  # between two calls to an engine that does not answer
ANSWER_S = 5.0
_log = logging.getLogger(__name__)


class Watcher:
    """One reader: its cursor and its unread events. `replica` is the number of a fleet's replica, or ""."""

    def __init__(self, holder: KeyInfo, replica: str = "") -> None:
        self.holder = holder
        self.prefix = f"{replica}/" if replica else ""
        self.cursor = self.prefix
        self.unread: deque[bytes] = deque()
        self.unread_bytes = 0
        self.is_slow = False
        self.is_over = False
        self.has_events = asyncio.Event()

    def put(self, event: bytes) -> None:
        """Queue an event for sending."""
        self.unread.append(event)
        self.unread_bytes += len(event)
        self.is_slow = self.is_slow or self.unread_bytes > MAX_UNREAD_BYTES
        self.has_events.set()

    def take(self) -> bytes:
        """Remove and return all unread events; b"" if there are none."""
        self.has_events.clear()
        found = b"".join(self.unread)
        self.unread.clear()
        self.unread_bytes = 0
        return found

    def end(self) -> None:
        """Mark the watcher as ended: no more events follow."""
        self.is_over = True
        self.has_events.set()


class Feed:
    """All watchers of one server's engine."""

    def __init__(self, client: EngineClient, keys: KeyRing, lifecycle: Lifecycle, limits: HttpLimits) -> None:
        self.limits = limits
        self.lifecycle = lifecycle
        self._client = client
        self._keys = keys
        self._watchers: dict[Watcher, None] = {}
        self._polling: asyncio.Task[None] | None = None
        self._next_replicas = 0.0

    def watch(self, holder: KeyInfo, replica: str = "") -> Watcher:
        """Add a watcher. Raises ApiError if the key may not watch, or if there are too many watchers."""
        if not self._keys.can_watch(holder):
            message = f"the key {holder.name!r} may not watch the engine: give it dashboard = true in --api-key-file"
            raise ApiError(403, message, code="dashboard_not_allowed")
        if len(self._watchers) >= MAX_WATCHERS and not self._end_oldest(holder.tenant):
            message = f"{MAX_WATCHERS} watch already, which is the most; close one"
            raise ApiError(429, message, code="too_many_watchers", retry_after_s=5)
        watcher = Watcher(holder, replica)
        self._watchers[watcher] = None
        self._next_replicas = 0.0  # at once for the new watcher
        if self._polling is None or self._polling.done():
            self._polling = asyncio.create_task(self._poll())
        return watcher

    def _end_oldest(self, tenant: str) -> bool:
        """End the oldest watcher of the tenant with most watchers, if `tenant` has at least two fewer; return if so."""
        used = Counter(watcher.holder.tenant for watcher in self._watchers)
        most = largest_user(used)
        if used[most] <= used[tenant] + 1:
            return False
        oldest = next(watcher for watcher in self._watchers if watcher.holder.tenant == most)
        self.leave(oldest)
        oldest.end()
        return True

    def leave(self, watcher: Watcher) -> None:
        """Remove a watcher. Idempotent."""
        self._watchers.pop(watcher, None)

    async def _poll(self) -> None:
        has_trouble = False
        while self._watchers:
            self._end_some()
            wait_s = POLL_S
            try:
                async with asyncio.timeout(ANSWER_S):
                    await self._send_replicas()
                    is_more = await self._round()
                has_trouble, wait_s = False, 0.0 if is_more else POLL_S
            except (OctavoError, TimeoutError):
                if not has_trouble:
                    self._send_all("trouble", {"message": "the engine does not answer"})
                has_trouble, wait_s = True, TROUBLE_S
            except Exception:  # one failure ends the feed; the server continues
                _log.exception("the feed of the dashboard failed")
                for watcher in self._watchers:
                    watcher.end()
                return
            await asyncio.sleep(wait_s)

    async def _round(self) -> bool:
        """Request frames for all cursors concurrently, so that cursors become equal; return True if there are more."""
        groups: dict[str, list[Watcher]] = {}
        for watcher in self._watchers:
            groups.setdefault(watcher.cursor, []).append(watcher)
        answers = await asyncio.gather(*(self._client.control("frames", cursor) for cursor in groups))
        is_more = False
        for watchers, answer in zip(groups.values(), answers, strict=True):
            found = cast(Mapping[str, Any], answer)
            is_more = is_more or bool(found["more"])
            event = b"data: " + msgspec.json.encode(found["frames"]) + b"\n\n" if found["frames"] else b""
            for watcher in watchers:
                watcher.cursor = watcher.prefix + found["cursor"]
                if event:
                    watcher.put(event)
        return is_more

    async def _send_replicas(self) -> None:
        """Send the rows of replicas at intervals; a server with one engine of one rank has none."""
        if (now := time.monotonic()) < self._next_replicas:
            return
        self._next_replicas = now + REPLICAS_S
        rows = (await self._client.statistics()).get("replicas")
        if rows:
            self._send_all("replicas", rows)

    def _end_some(self) -> None:
        """End watchers whose key may no longer watch; end all if a draining server has no other open request."""
        is_last = self.lifecycle.phase is not ServerPhase.READY and self.lifecycle.num_open <= len(self._watchers)
        for watcher in self._watchers:
            holder = self._keys.find_by_digest(watcher.holder.digest) if watcher.holder.digest else watcher.holder
            if is_last or holder is None or not self._keys.can_watch(holder):
                watcher.end()

    def _send_all(self, kind: str, data: object) -> None:
        event = sse_event(kind, data)
        for watcher in self._watchers:
            watcher.put(event)
