"""Facts about a plan's rows that executors use: may a captured graph be replayed, which rows share a prefix.

Owns: pure functions of rows. Does not: plan.
"""

from __future__ import annotations

from array import array

from octavo.core.kv.effects import NO_BLOCK
from octavo.core.limits import Limits
from octavo.core.request import Sequence


def is_fast(starts: array[int], counts: array[int], limits: Limits) -> bool:
    """Whether every row is one token within the captured range (S14)."""
    if not counts or max(counts) != 1 or min(counts) != 1:
        return False
    bound = limits.max_blocks_per_sequence * limits.block_size
    return not bound or max(starts) < bound


def shared_prefixes(rows: list[Sequence], counts: array[int]) -> tuple[tuple[tuple[int, tuple[int, ...]], ...], int]:
    """Groups of rows with equal leading blocks, and the number that all rows share (K08), in cache group 0.

    Rows whose first block left a window share nothing. Cost: O(rows + shared blocks).
    """
    by_first: dict[int, list[int]] = {}
    num_rows = 0
    for index, (sequence, count) in enumerate(zip(rows, counts, strict=True)):
        if not count:
            continue
        num_rows += 1
        first = sequence.tables[0][0]
        if first != NO_BLOCK:
            by_first.setdefault(first, []).append(index)
    shared = []
    for members in by_first.values():
        if len(members) > 1:
            tables = [rows[index].tables[0] for index in members]
            shared.append((_num_equal(tables), tuple(members)))
    common = 0
    for members in by_first.values():
        if len(members) == num_rows:  # a row alone shares all it has
            common = _num_equal([rows[index].tables[0] for index in members])
    return tuple(shared), common


def _num_equal(tables: list[list[int]]) -> int:
    for index, blocks in enumerate(zip(*tables, strict=False)):
        if min(blocks) != max(blocks):
            return index
    return min(map(len, tables))
