"""From a body's fields to how a request is served: priority, deadlines, tenant, salt.

Owns: what a key may ask for, and the shorter of two bounds. Does not: admit, or know what is computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from starlette.types import Scope

from octavo.server.auth import KEY
from octavo.server.faults import ApiError
from octavo.server.keys import KeyInfo

if TYPE_CHECKING:
    from octavo.frontend.sessions import Terms
    from octavo.server.context import Context


class Served(Protocol):
    """The fields that say it (bodies.served has them)."""

    @property
    def priority(self) -> int | None:
        """Smaller is more urgent."""
        ...

    @property
    def cache_salt(self) -> str | None:
        """Narrows who shares cached prefixes."""
        ...

    @property
    def timeout(self) -> float | None:
        """Seconds."""
        ...

    @property
    def queue_timeout(self) -> float | None:
        """Seconds."""
        ...

    @property
    def ttft_objective(self) -> float | None:
        """Seconds."""
        ...

    @property
    def tpot_objective(self) -> float | None:
        """Seconds."""
        ...


def terms_of(scope: Scope, context: Context, body: Served) -> Terms:
    """How a request is served. Raises ApiError when its key may not have this priority."""
    key: KeyInfo = scope[KEY]
    waits = [limit for limit in (body.queue_timeout, context.admission.config.max_queue_time_s) if limit is not None]
    return {
        "priority": priority_of(body.priority, key),
        "tenant": key.tenant,
        "cache_salt": context.keys.salt(key.tenant, body.cache_salt),
        "timeout_s": body.timeout,
        "queue_timeout_s": min(waits, default=None),
        "ttft_objective": body.ttft_objective,
        "tpot_objective": body.tpot_objective,
    }


def max_wait_s(body: Served) -> float | None:
    """How long it may wait at most."""
    return min((limit for limit in (body.queue_timeout, body.timeout) if limit is not None), default=None)


def priority_of(asked: int | None, key: KeyInfo) -> int:
    """The request's priority, or the key's own. Raises ApiError where the key may not ask for it."""
    if asked is None:
        return key.priority
    if key.max_priority is not None and asked < key.max_priority:
        message = f"priority is {asked}; the most urgent that key {key.name!r} may ask for is {key.max_priority}"
        raise ApiError(403, message, code="priority_not_allowed", param="priority")
    return asked
