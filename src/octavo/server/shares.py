"""Shares: one tenant's part of a bound for all tenants, and the tenant that loses an entry at the bound.

Owns: the rule, for everything that is stored for clients. Does not: count the use (each store does), or refuse.
The rule: half of a bound is divided evenly among the tenants with keys, and reserved for each of them; the other half
is for all. Entries that can be dropped (answers, responses, sessions, explanations) need no refusal: the tenant with
most, including the new entry, loses its oldest, so a tenant within an even share never loses an entry to another.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

from octavo.server.keys import KeyRing

K = TypeVar("K")


def keeps_most(used: Mapping[K, int], among: Collection[K] | None = None) -> K:
    """Return the tenant (or key) that uses most, of all or of those in `among`."""
    return max(used if among is None else among, key=lambda each: used.get(each, 0))


class Shares:
    """The rule for the tenants of one key ring."""

    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys

    def free(self, tenant: str, used: Mapping[str, int], bound: int) -> int:
        """Return how much more of a bound a tenant may use; `used` is the current use of each.

        Without keys, or with keys of one tenant only, nothing is reserved for others.
        """
        others = self._keys.tenants - {tenant}
        own = bound // (2 * (len(others) + 1))
        kept_free = sum(max(0, own - used.get(other, 0)) for other in others)
        # The second applies if others use more than their share: answers of batches, tenants of removed keys.
        return max(0, bound - sum(used.values()) - kept_free, own - used.get(tenant, 0))
