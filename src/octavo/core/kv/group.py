"""Cache groups: layers that share one kind of attention and so one block table.

Owns: the description of a group, and which blocks its kind of attention needs.
Does not: hold blocks (see pool) or tables (see cache).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class GroupKind(IntEnum):
    """How the layers of a group attend."""

    FULL = 0
    SLIDING = 1


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One cache group: its kind, window (tokens, 0 = none), bytes of one block over all its layers, and layers.

    A token at position p of a sliding group attends to positions p - window + 1 to p.
    """

    kind: GroupKind = GroupKind.FULL
    window: int = 0
    block_bytes: int = 0
    layers: tuple[int, ...] = ()

    def first_block(self, position: int, block_size: int) -> int:
        """Index of the first block that a token at `position` reads or writes."""
        if self.kind == GroupKind.FULL:
            return 0
        return max(0, position - self.window + 1) // block_size

    def peak_blocks(self, num_tokens: int, chunk: int, block_size: int) -> int:
        """Most blocks that `num_tokens` positions hold at once when at most `chunk` of them are granted in a step."""
        total = -(-num_tokens // block_size)
        if self.kind == GroupKind.FULL:
            return total
        span = self.window - 1 + chunk  # positions that one grant reads or writes, anywhere against the blocks' edges
        return min(total, (span + block_size - 2) // block_size + 1)
