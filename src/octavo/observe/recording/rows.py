"""Rows of a plan as what differs from the rows that the plan before lets one expect.

Owns: the expectation (the same slots, each one token further) and both directions of the difference.
Does not: know the other columns.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from operator import add
from typing import Any

from octavo.core.plan import StepPlan
from octavo.observe.recording.errors import DamagedError

Delta = Sequence[Sequence[int]] | None  # None: as expected; else rows gone, rows that changed, rows that came


class Rows:
    """What to expect of the next plan's rows."""

    def __init__(self) -> None:
        self._slots, self._starts, self._flags = array("i"), array("i"), array("i")
        self._ones = array("i")
        self._one_each = 0

    def _is_expected(self, plan: StepPlan) -> bool:
        return (
            plan.slots == self._slots
            and plan.starts == self._starts
            and plan.flags == self._flags
            and plan.counts == self._ones
        )

    def encode(self, plan: StepPlan) -> Delta:
        """Say how a plan's rows differ from what was expected, and expect the next."""
        if self._is_expected(plan):
            delta: Delta = None
        else:
            delta = self._differ(plan)
        self._expect(plan)
        return delta

    def _differ(self, plan: StepPlan) -> Delta:
        here = frozenset(plan.slots)
        kept = [index for index, slot in enumerate(self._slots) if slot in here]
        if [self._slots[index] for index in kept] != plan.slots[: len(kept)].tolist():
            kept = []
        stays = frozenset(kept)
        gone = [index for index in range(len(self._slots)) if index not in stays]
        changed: list[int] = []
        for row, index in enumerate(kept):
            start, count, flags = plan.starts[row], plan.counts[row], plan.flags[row]
            if start != self._starts[index] or count != 1 or flags != self._flags[index]:
                changed += (row, start - self._starts[index], count, flags)
        came: list[int] = []
        for row in range(len(kept), len(plan.slots)):
            came += (plan.slots[row], plan.starts[row], plan.counts[row], plan.flags[row])
        return gone, changed, came

    def decode(self, delta: Delta, plan: StepPlan) -> None:
        """Fill in the rows of a plan, and expect the next. Raises DamagedError."""
        slots, starts, flags = self._slots[:], self._starts[:], self._flags[:]
        counts = array("i", [1]) * len(slots)
        if delta is not None:
            gone, changed, came = delta
            columns = (slots, starts, counts, flags)
            try:
                for index in reversed(gone):
                    for column in columns:
                        del column[index]
                for row, ahead, count, flag in zip(*[iter(changed)] * 4, strict=True):
                    starts[row], counts[row], flags[row] = starts[row] + ahead, count, flag
                for offset, column in enumerate(columns):
                    column.extend(came[offset::4])
            except (IndexError, TypeError, ValueError, OverflowError) as error:
                raise DamagedError(f"rows that cannot be ({error})") from None
        plan.slots, plan.starts, plan.counts, plan.flags = slots, starts, counts, flags
        self._expect(plan)

    def _expect(self, plan: StepPlan) -> None:
        self._slots, self._flags = plan.slots, plan.flags
        if len(self._ones) != len(plan.slots):
            self._ones = array("i", [1]) * len(plan.slots)
            self._one_each = _number(self._ones)
        if plan.counts == self._ones:  # one sum of long numbers: lanes of 32 bits that never carry
            total = _number(plan.starts) + self._one_each
            self._starts = array("i", total.to_bytes(plan.starts.itemsize * len(plan.starts), sys.byteorder))
        else:
            self._starts = array("i", map(add, plan.starts, plan.counts))


def _number(column: array[int]) -> int:
    return int.from_bytes(column.tobytes(), sys.byteorder)


def ints(values: Any) -> array[int]:
    """A column from a list. Raises DamagedError."""
    try:
        return array("i", values)
    except (TypeError, OverflowError) as error:
        raise DamagedError(f"a column that holds no whole numbers ({error})") from None
