"""Shares: how much of a bound for all tenants one tenant may use, and which tenant gives way.

Owns: the rule, for everything that is kept for clients. Does not: count what is used (each store does), or refuse.
The rule: half of a bound is divided evenly among the tenants that have keys, and stays free for each of them; the other
half is for all. What can be dropped (answers, responses, sessions, explanations) needs no refusal: the tenant that
keeps most, what is new included, loses its oldest, so a tenant within an even share never loses anything to another.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

from octavo.server.keys import KeyRing

K = TypeVar("K")


def keeps_most(used: Mapping[K, int], among: Collection[K] | None = None) -> K:
    """Return the tenant (or key) that uses most, of all or of some of them."""
    return max(used if among is None else among, key=lambda each: used.get(each, 0))


class Shares:
    """The rule for the tenants of one key ring."""

    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys

    def free(self, tenant: str, used: Mapping[str, int], bound: int) -> int:
        """Return how much more of a bound a tenant may use; `used` is what each one uses now.

        A server without keys, or whose keys are of one tenant, has no one to keep anything free for.
        """
        others = self._keys.tenants - {tenant}
        own = bound // (2 * (len(others) + 1))
        kept_free = sum(max(0, own - used.get(other, 0)) for other in others)
        # The second where others use more than they were granted: answers of batches, tenants without a key any more.
        return max(0, bound - sum(used.values()) - kept_free, own - used.get(tenant, 0))
