"""Cache groups: layers that share one kind of attention and so one block table.

Owns: the description of a group. Does not: hold blocks (see pool) or tables (see cache).
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
    """One cache group: its kind, window (tokens, 0 = none), bytes of one block over all its layers, and layers."""

    kind: GroupKind = GroupKind.FULL
    window: int = 0
    block_bytes: int = 0
    layers: tuple[int, ...] = ()
