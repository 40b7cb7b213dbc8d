"""Bounds of uploads: the number of one tenant that are read at once, and the speed at which each must arrive.

Owns: the slots, and the deadline of a body that arrives in parts. Does not: read or store anything.
Invariant: an upload of one tenant never waits for another tenant's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from octavo.server.http.errors import ApiError
from octavo.server.http.limits import HttpLimits

MAX_UPLOADS = 4  # of one tenant at once: their bodies are in temporary files
MAX_WAITING_UPLOADS = 16  # of one tenant, each with an unread body
MAX_UPLOAD_WAIT_S = 10.0  # for a slot


@dataclass(slots=True)
class _TenantSlots:
    """The slots of one tenant, and how many uploads hold one or wait for one."""

    semaphore: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_UPLOADS))
    num_users: int = 0


class UploadSlots:
    """Slots for uploads, MAX_UPLOADS for each tenant."""

    def __init__(self) -> None:
        self._tenants: dict[str, _TenantSlots] = {}

    @asynccontextmanager
    async def take(self, tenant: str) -> AsyncIterator[None]:
        """Hold a slot while the body is read. Raises ApiError (429) if none is free in time."""
        slots = self._tenants.setdefault(tenant, _TenantSlots())
        if slots.num_users >= MAX_UPLOADS + MAX_WAITING_UPLOADS:
            raise _refusal()
        slots.num_users += 1
        try:
            try:
                async with asyncio.timeout(MAX_UPLOAD_WAIT_S):
                    await slots.semaphore.acquire()
            except TimeoutError:
                raise _refusal() from None
            try:
                yield
            finally:
                slots.semaphore.release()
        finally:
            slots.num_users -= 1
            if not slots.num_users:
                del self._tenants[tenant]


def _refusal() -> ApiError:
    message = f"{MAX_UPLOADS} of your uploads are open, the most there may be, and others wait; finish one first"
    return ApiError(429, message, code="too_many_uploads", retry_after_s=1)


@dataclass(frozen=True, slots=True)
class UploadPace:
    """The minimum speed of an upload that began at `began`, on the event loop's clock."""

    limits: HttpLimits
    began: float

    def deadline(self, num_bytes: int) -> float:
        """Return when the next part must arrive, after `num_bytes`."""
        limits = self.limits
        allowed_s = limits.upload_grace_s + num_bytes / limits.min_upload_bytes_per_s
        return self.began + min(limits.body_timeout_s, allowed_s)
