"""From a body's fields to how a request is served: priority, deadlines, tenant, salt.

Owns: what a key may ask for, and the shorter of two bounds. Does not: admit, or know what is computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

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


def terms_of(key: KeyInfo, context: Context, body: Served) -> Terms:
    """Return how a request is served. Raises ApiError when its key may not have this priority."""
    priority = key.priority if body.priority is None else body.priority
    if body.priority is not None and key.max_priority is not None and priority < key.max_priority:
        message = f"priority is {priority}; the most urgent that key {key.name!r} may ask for is {key.max_priority}"
        raise ApiError(403, message, code="priority_not_allowed", param="priority")
    return {
        "priority": priority,
        "tenant": key.tenant,
        "cache_salt": context.keys.salt(key.tenant, body.cache_salt),
        "timeout_s": body.timeout,
        "queue_timeout_s": shorter(body.queue_timeout, context.admission.config.max_queue_time_s),
        "ttft_objective": body.ttft_objective,
        "tpot_objective": body.tpot_objective,
    }


def shorter(one: float | None, other: float | None) -> float | None:
    """Return the shorter of two bounds in seconds, each of which may be absent."""
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)
