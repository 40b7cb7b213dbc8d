"""Where everybody stands after the plans made so far, from the plans alone.

Owns: who is in which slot, with which tables, and how far; blocks that tables hold. Does not: check anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.fake_pool import quads, triples

from octavo.core.limits import Limits
from octavo.core.plan import DROP_BLOCK, StepPlan


@dataclass
class Seat:
    """One sequence in the executor: `known` ids when it entered, `end` of what it was granted since."""

    request_id: str
    choice: int
    known: int
    tables: list[list[int]]
    end: int = 0

    @property
    def is_caught_up(self) -> bool:
        return self.end >= self.known


class Mirror:
    """Slots and blocks as the plans say."""

    def __init__(self, sizes: Limits, num_outputs: Callable[[str], int]) -> None:
        self.num_outputs = num_outputs  # of a request known by length only
        self.seats: dict[int, Seat] = {}
        self.holders = [[0] * count for count in sizes.num_blocks]

    def apply(self, plan: StepPlan) -> None:
        """Take in a plan's effects."""
        for slot in plan.freed_slots:
            self.leave(slot)
        for new in plan.new_sequences:
            outputs = self.num_outputs(new.request_id) if new.token_ids is None else 0
            known = new.num_prompt + outputs if new.token_ids is None else len(new.token_ids)
            self.leave(new.slot)
            self.seats[new.slot] = Seat(new.request_id, new.choice, known, [[] for _ in self.holders])
        for slot, group, index, block in quads(plan.edits):
            seat = self.seats.get(slot)
            if seat is None:
                continue
            table, holders = seat.tables[group], self.holders[group]
            if index < len(table) and table[index] != DROP_BLOCK:
                holders[table[index]] -= 1
            table.extend([DROP_BLOCK] * (index - len(table)))
            table[index : index + 1] = [block]
            if block != DROP_BLOCK:
                holders[block] += 1

    def advance(self, plan: StepPlan) -> None:
        """Take in how far its rows go."""
        for row in plan.rows():
            self.seats[row.slot].end = row.start + row.count

    def void(self, plan: StepPlan) -> None:
        """A discarded plan: whoever it names is sent again in full."""
        for slot in {
            *plan.slots,
            *plan.freed_slots,
            *(new.slot for new in plan.new_sequences),
            *(edit[0] for edit in quads(plan.edits)),
            *(edit[0] for edit in triples(plan.id_edits)),
            *(job.slot for job in plan.encode_jobs),
        }:
            self.leave(slot)

    def leave(self, slot: int) -> None:
        """Empty a slot."""
        seat = self.seats.pop(slot, None)
        if seat is not None:
            for holders, table in zip(self.holders, seat.tables, strict=True):
                for block in table:
                    if block != DROP_BLOCK:
                        holders[block] -= 1

    def num_free(self) -> list[int]:
        """Blocks per group that no table holds."""
        return [holders.count(0) for holders in self.holders]

    def seats_of(self, request_id: str) -> list[Seat]:
        """The sequences of one request."""
        return [seat for seat in self.seats.values() if seat.request_id == request_id]
