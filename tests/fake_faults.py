"""Faults of the fake executor: how often each strikes, and what a failed step leaves behind.

Owns: Faults, InjectedError, `damage`. Does not: decide what a failure means to anybody.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from octavo.core.plan import DROP_BLOCK, StepPlan
from tests.fake_pool import FakePool, Slot, quads, triples


class InjectedError(RuntimeError):
    """An injected failure of a step."""


@dataclass
class Faults:
    """Chances per step (or per row) of each injected fault, drawn from `rng`; `struck` counts them."""

    rng: random.Random
    submit_failure: float = 0.0
    collect_failure: float = 0.0
    row_error: float = 0.0
    zero_tokens: float = 0.0
    poison: frozenset[str] = frozenset()  # requests whose every row makes the step fail
    bad: frozenset[str] = frozenset()  # requests whose every row fails alone

    struck: Counter[str] = field(default_factory=Counter)

    def hits(self, chance: float, name: str) -> bool:
        if chance > 0.0 and self.rng.random() < chance:
            self.struck[name] += 1
            return True
        return False


def damage(plan: StepPlan, slots: dict[int, Slot], pool: FakePool, rng: random.Random) -> None:
    """A failed step wrote anything, or nothing, where it was allowed to write."""
    if rng.random() < 0.3:
        return
    size = pool.block_size
    for group, _, host in triples(plan.swap_outs):
        pool.host[group][host] = ([rng.getrandbits(32) for _ in range(size)], [True] * size, False)
    for group, block, offset in _written(plan, slots, pool):
        pool.cells[group][block][offset] = rng.getrandbits(32)
        pool.is_written[group][block][offset] = True


def _written(plan: StepPlan, slots: dict[int, Slot], pool: FakePool) -> Iterator[tuple[int, int, int]]:
    """(group, block, offset) of everything on the device that the plan writes."""
    size = pool.block_size
    for column in (plan.host_loads, plan.copies):
        for group, _, to in triples(column):
            yield from ((group, to, offset) for offset in range(size))
    tables = _tables(plan, slots, pool)
    for row in plan.rows():
        for group, table in enumerate(tables.get(row.slot, ())):
            for position in range(row.start, min(row.start + row.count, len(table) * size)):
                if table[position // size] != DROP_BLOCK:
                    yield group, table[position // size], position % size


def _tables(plan: StepPlan, slots: dict[int, Slot], pool: FakePool) -> dict[int, list[list[int]]]:
    """Everybody's tables, by slot and group, as the plan would have made them."""
    tables = {slot: [table[:] for table in state.tables] for slot, state in slots.items()}
    for slot in plan.freed_slots:
        tables.pop(slot, None)
    for new in plan.new_sequences:
        tables[new.slot] = [[] for _ in pool.windows]
    for slot, group, index, block in quads(plan.edits):
        if slot in tables:
            table = tables[slot][group]
            table.extend([DROP_BLOCK] * (index - len(table)))
            table[index : index + 1] = [block]
    return tables
