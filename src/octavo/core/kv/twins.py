"""A full block equal to a cached one gives way to it (K04).

Owns: finding the twin, and putting it into tables. Does not: release the duplicate (see State.defer_release).
Invariant: only a block that is cached for sure is adopted, never one that a plan in flight still writes.
"""

from __future__ import annotations

from octavo.core.kv.cache import KVCache
from octavo.core.kv.effects import Publication
from octavo.core.request import Sequence


def twin_of(cache: KVCache, entry: Publication) -> int | None:
    """The cached block that equals a duplicate one, if the sequence that wrote the duplicate still holds it."""
    sequence = entry.owner
    table = sequence.tables[entry.group]
    if entry.index >= len(table) or table[entry.index] != entry.block or entry.index >= len(sequence.keys):
        return None
    pool = cache.pools[entry.group]
    twin = pool.lookup(sequence.keys[entry.index], cache.ids_of(sequence, entry.index))
    is_usable = twin is not None and twin != entry.block and twin not in pool.pending
    return twin if is_usable and pool.key_of[entry.block] is None else None


def adopt_twin(cache: KVCache, entry: Publication, twin: int) -> list[Sequence]:
    """Put the cached block in the duplicate's place, in every table of the request that has it there.

    Returns the sequences changed; the caller releases the duplicate for each.
    """
    changed = []
    for sequence in entry.owner.request.sequences:
        table = sequence.tables[entry.group]
        if entry.index < len(table) and table[entry.index] == entry.block:
            cache.pools[entry.group].share(twin)
            table[entry.index] = twin
            changed.append(sequence)
    return changed
