"""RequestIndex: which requests are open, or ended not long ago, by the names that their clients know.

Owns: the table from (tenant, client's name) to the engine's names. Does not: end or explain anything.
Invariants: a tenant finds its own requests only; a name that is used twice at once finds both; of ended requests so
many are kept as the engine can explain.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

from octavo.server.shares import keeps_most

MARK = "~"  # in no client's own id, so that nobody can spell the engine's name of another's request


class RequestIndex:
    """Open requests of all tenants, and the last `max_ended` that ended."""

    def __init__(self, max_ended: int = 0) -> None:
        self._names: dict[tuple[str, str], list[Sequence[str]]] = {}
        self._max_ended = max_ended
        self._ended: deque[tuple[str, str, Sequence[str]]] = deque()
        self._num_ended: Counter[str] = Counter()  # by tenant

    def add(self, tenant: str, name: str, engine_ids: Sequence[str]) -> Callable[[], None]:
        """List a request; call what is returned when it has ended."""
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
        """Keep an end; beyond the bound the tenant that keeps most loses its oldest."""
        self._ended.append(end)
        self._num_ended[end[0]] += 1
        if len(self._ended) > self._max_ended:
            tenant = keeps_most(self._num_ended)
            self._ended.remove(next(each for each in self._ended if each[0] == tenant))
            self._num_ended[tenant] -= 1
            if not self._num_ended[tenant]:
                del self._num_ended[tenant]

    def find(self, name: str, tenant: str | None = None) -> list[str]:
        """The engine's names of what is open under a client's name, or under the engine's own: of one tenant, or (for
        whoever runs the server) of all."""
        found: list[str] = []
        for (owner, public), listed in self._names.items():
            if tenant is None or owner == tenant:
                found += [one for ids in listed for one in ids if name in (public, one)]
        return found

    def find_ended(self, name: str, tenant: str | None = None) -> list[str]:
        """Likewise, of the last request of that name that ended."""
        for owner, public, ids in reversed(self._ended):
            if (tenant is None or owner == tenant) and (public == name or name in ids):
                return list(ids) if public == name else [name]
        return []

    def names(self, tenant: str) -> dict[str, str]:
        """The client's name for each of the engine's, of one tenant's requests, ended ones too."""
        known = {one: name for owner, name, ids in self._ended if owner == tenant for one in ids}
        for (owner, name), listed in self._names.items():
            if owner == tenant:
                known.update((one, name) for ids in listed for one in ids)
        return known

    def __len__(self) -> int:
        return sum(map(len, self._names.values()))
