"""Uploads: how many of one tenant are read at once, and how fast each must come.

Owns: the places, and the deadline of a body that arrives in parts. Does not: read or keep anything.
Invariant: an upload of one tenant never waits for another tenant's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from octavo.server.faults import ApiError
from octavo.server.limits import HttpLimits

MAX_UPLOADS = 4  # of one tenant at once: what they bring is in temporary files
MAX_WAITING_UPLOADS = 16  # of one tenant, each with an unread body
MAX_UPLOAD_WAIT_S = 10.0  # for a place


@dataclass(slots=True)
class _Places:
    """The places of one tenant, and how many hold one or wait for one."""

    semaphore: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_UPLOADS))
    num_users: int = 0


class UploadSlots:
    """Places for uploads, so many for each tenant."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Places] = {}

    @asynccontextmanager
    async def take(self, tenant: str) -> AsyncIterator[None]:
        """Hold a place while the body is read. Raises ApiError (429) when none is free in time."""
        places = self._tenants.setdefault(tenant, _Places())
        if places.num_users >= MAX_UPLOADS + MAX_WAITING_UPLOADS:
            raise _refusal()
        places.num_users += 1
        try:
            try:
                async with asyncio.timeout(MAX_UPLOAD_WAIT_S):
                    await places.semaphore.acquire()
            except TimeoutError:
                raise _refusal() from None
            try:
                yield
            finally:
                places.semaphore.release()
        finally:
            places.num_users -= 1
            if not places.num_users:
                del self._tenants[tenant]


def _refusal() -> ApiError:
    message = f"{MAX_UPLOADS} of your uploads are open, the most there may be, and others wait; finish one first"
    return ApiError(429, message, code="too_many_uploads", retry_after_s=1)


@dataclass(frozen=True, slots=True)
class UploadPace:
    """The least speed of an upload that began at `began`, on the event loop's clock."""

    limits: HttpLimits
    began: float

    def deadline(self, num_bytes: int) -> float:
        """Return when the next part must be here, where so many bytes are."""
        limits = self.limits
        allowed_s = limits.upload_grace_s + num_bytes / limits.min_upload_bytes_per_s
        return self.began + min(limits.body_timeout_s, allowed_s)
