"""What one plan does to blocks apart from its rows: table edits, copies, swap-outs, host loads, published keys.

Owns: the columns of these effects while the plan is made, and the slot that each entry is for. Does not: count
references (see pool) or decide.
Invariant: a plan has swap-outs or host loads, never both; each copy has its own destination.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from octavo.core.request_state import RequestState, Sequence

NO_BLOCK = -1  # a table entry without a block: its block has left the window, or was never needed


@dataclass(slots=True)
class Publication:
    """Full blocks that a plan published before it ran; `index` is that of the first in the owner's table.

    `is_duplicate`: another block already had the key. Such an entry has one block.
    """

    group: int
    blocks: list[int]
    index: int
    owner: Sequence  # whose row writes the blocks
    is_duplicate: bool = False

    @property
    def places(self) -> list[tuple[int, int]]:
        """(group, block) of each block."""
        return [(self.group, block) for block in self.blocks]


class Effects:
    """The effects of one plan, in the columns of StepPlan, and what to undo if the plan fails.

    `published` device blocks and `saved` host blocks can be found before the plan has run. `swapped_requests` are the
    requests that the plan swaps out. Written out, because every step makes one: a dataclass takes twice the time.
    """

    __slots__ = (
        "copies", "copy_slots", "edits", "host_loads", "load_slots", "pinned", "published", "saved", "step",
        "swap_outs", "swapped", "swapped_requests",
    )  # fmt: skip

    def __init__(self, step: int) -> None:
        self.step = step
        self.edits = array("i")
        self.copies = array("i")
        self.copy_slots: list[int] = []
        self.swap_outs = array("i")
        self.host_loads = array("i")
        self.load_slots: list[int] = []
        self.swapped: dict[tuple[int, int], int] = {}  # (group, device block) -> its host block
        self.published: list[Publication] = []
        self.saved: list[tuple[int, int]] = []  # (group, host block)
        self.swapped_requests: list[RequestState] = []
        self.pinned: list[tuple[int, int]] = []  # (group, host block) held until the plan is made

    def copy(self, slot: int, group: int, source: int, destination: int) -> None:
        """Add a block copy for the sequence in `slot`."""
        self.copies.extend((group, source, destination))
        self.copy_slots.append(slot)

    def load(self, slot: int, group: int, host_block: int, block: int) -> None:
        """Add a load from the host for the sequence in `slot`."""
        self.host_loads.extend((group, host_block, block))
        self.load_slots.append(slot)

    def drop(self, slots: frozenset[int]) -> None:
        """Remove the edits, copies and loads of these slots: their request is preempted while the plan is made."""
        self.edits = without_slots(self.edits, 4, slots)
        self.copies, self.copy_slots = _without(self.copies, self.copy_slots, slots)
        self.host_loads, self.load_slots = _without(self.host_loads, self.load_slots, slots)


def without_slots(flat: array[int], width: int, slots: frozenset[int]) -> array[int]:
    """Return a flat column of records without those whose first number is one of `slots`."""
    kept = [i for i in range(0, len(flat), width) if flat[i] not in slots]
    return array("i", [flat[i + k] for i in kept for k in range(width)])


def _without(flat: array[int], owners: list[int], slots: frozenset[int]) -> tuple[array[int], list[int]]:
    """Return the triples and their slots, without the entries of `slots`."""
    if not any(slot in slots for slot in owners):
        return flat, owners
    kept = [i for i, slot in enumerate(owners) if slot not in slots]
    return array("i", [flat[3 * i + k] for i in kept for k in range(3)]), [owners[i] for i in kept]
