"""Blocks of cells, as an executor would hold them, that notice what a correct scheduler never asks for.

Owns: the cells, who holds which block, copies, table edits, FakeModelError. Does not: compute or sample.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from octavo.core.kv.group import GroupSpec
from octavo.core.plan import DROP_BLOCK, Row, StepPlan
from octavo.core.request import SamplingParams
from tests.hash_chain import chain

HOLE = 0  # content of a cell that nobody ever wrote


class FakeModelError(AssertionError):
    """A plan asked for something that no correct scheduler asks for."""


@dataclass
class Slot:
    """What the executor keeps of one sequence."""

    request_id: str
    num_prompt: int
    params: SamplingParams
    eos: tuple[int, ...]
    adapter_id: int
    ids: list[int]
    tables: list[list[int]]
    next_start: int | None = None  # first position not yet written; None until its first row
    num_sampled: int = 0  # since it entered the slot
    sampled_in: int = -1  # number of the submitted plan that sampled its last id
    may_repeat: bool = False  # its last result was withheld, so its last position may come again
    cells: list[int] = field(default_factory=list)  # what its blocks should hold, from its ids alone

    def expected(self, end: int) -> list[int]:
        """The cells of positions [0, end), extended as needed."""
        while len(self.cells) < end:
            self.cells.append(
                chain(self.cells.__getitem__, self.ids[len(self.cells)], len(self.cells), self.adapter_id)
            )
        return self.cells


class FakePool:
    """The pools of all groups. With `strict`, misuse is reported at once; without, only the text goes wrong."""

    def __init__(self, groups: Sequence[GroupSpec], block_size: int, num_blocks: Sequence[int], strict: bool) -> None:
        self.windows = [group.window for group in groups]
        self.strict = strict
        self.block_size = block_size
        self.cells = [[[HOLE] * block_size for _ in range(count)] for count in num_blocks]
        self.is_written = [[[False] * block_size for _ in range(count)] for count in num_blocks]
        # Written by a row that failed alone, or from such a block.
        self.is_bad = [[False] * count for count in num_blocks]
        self.holders: list[list[int]] = [[0] * count for count in num_blocks]

    def release(self, state: Slot) -> None:
        """Count a sequence's tables out."""
        for holders, table in zip(self.holders, state.tables, strict=True):
            for block in table:
                if block != DROP_BLOCK:
                    holders[block] -= 1

    def copy(self, plan: StepPlan) -> set[tuple[int, int]]:
        """Copy whole blocks, reading all sources before writing; give the destinations."""
        contents = [
            (self.cells[g][source][:], self.is_written[g][source][:], self.is_bad[g][source])
            for g, source, _ in triples(plan.copies)
        ]
        targets = [(g, to) for g, _, to in triples(plan.copies)]
        fresh = set(targets)
        if len(fresh) != len(targets):
            raise FakeModelError("two copies have one destination")
        for (g, to), content in zip(targets, contents, strict=True):
            if self.strict and self.holders[g][to]:
                raise FakeModelError(f"a copy overwrites block {to}, which a live table holds")
            self.cells[g][to], self.is_written[g][to], self.is_bad[g][to] = content
        return fresh

    def edit(
        self, table: list[int], entry: tuple[int, int, int, int], first: int | None, fresh: set[tuple[int, int]]
    ) -> None:
        """Append, replace or drop one entry of a slot's table."""
        slot, group, index, block = entry
        if not 0 <= index <= len(table) or block >= len(self.cells[group]) or block < DROP_BLOCK:
            raise FakeModelError(f"edit {entry} of a table of {len(table)} entries")
        is_append = index == len(table)
        if is_append and block == DROP_BLOCK:
            raise FakeModelError(f"edit of slot {slot} drops entry {index}, which does not exist")
        if not is_append:
            self.replace(table, entry, fresh)
        else:
            start = first if first is not None else 0
            is_shared = first is None or (index * self.block_size < start and (group, block) not in fresh)
            if not is_shared and self.strict and self.holders[group][block]:
                raise FakeModelError(f"block {block} is given to slot {slot} to write while a live table holds it")
            if is_shared and self.strict and (index + 1) * self.block_size > start:
                raise FakeModelError(
                    f"slot {slot} starts at {start}, inside block {block}, which is neither copied nor its own"
                )
            if not is_shared and (group, block) not in fresh:
                self.is_written[group][block] = [False] * self.block_size
                self.is_bad[group][block] = False
            table.append(block)
        if block != DROP_BLOCK:
            self.holders[group][block] += 1

    def replace(self, table: list[int], entry: tuple[int, int, int, int], fresh: set[tuple[int, int]]) -> None:
        """Take out an entry: dropped, copied on write, or exchanged for a block of the same content."""
        slot, group, index, block = entry
        old = table[index]
        same = block == DROP_BLOCK or (group, block) in fresh or self.cells[group][block] == self.cells[group][old]
        if self.strict and not same:
            raise FakeModelError(f"slot {slot}: block {old} is replaced by {block}, which holds something else")
        if old != DROP_BLOCK:
            self.holders[group][old] -= 1
        table[index] = block

    def check_blocks(self, state: Slot, group: int, row: Row, fresh: set[tuple[int, int]], where: str) -> None:
        """Positions to write lie in blocks that were not written there since they were given out."""
        table, size = state.tables[group], self.block_size
        end = row.start + row.count
        if len(table) != -(-end // size) and not state.may_repeat:
            raise FakeModelError(f"{where}: table of {len(table)} blocks of {size}")
        for position in range(row.start, end):
            block = table[position // size]
            if block == DROP_BLOCK:
                raise FakeModelError(f"{where}: writes into a hole at {position}")
            repeats = position == row.start and state.may_repeat and self.holders[group][block] == 1
            if (
                self.strict
                and self.is_written[group][block][position % size]
                and (group, block) not in fresh
                and not repeats
            ):
                raise FakeModelError(f"{where}: writes position {position} of block {block} again")
        for block in table[row.start // size :]:
            if (group, block) in fresh and self.holders[group][block] > 1:
                raise FakeModelError(
                    f"{where}: writes into block {block}, which {self.holders[group][block]} tables share"
                )

    def check_context(self, state: Slot, group: int, end: int) -> bool:
        """Whether positions [0, end) are written; raise when one holds what this sequence never wrote."""
        size, expected = self.block_size, state.expected(end)
        for index, block in enumerate(state.tables[group][: -(-end // size)]):
            if block == DROP_BLOCK:
                if not self.windows[group]:
                    raise FakeModelError(f"{state.request_id!r} reads a hole at {index * size}")
                continue
            stop = min(size, end - index * size)
            if not all(self.is_written[group][block][:stop]):
                return False
            if (
                not self.is_bad[group][block]
                and self.cells[group][block][:stop] != expected[index * size : index * size + stop]
            ):
                raise FakeModelError(
                    f"{state.request_id!r} reads foreign content in block {block}, entry {index} of group {group}"
                )
        return True


def quads(column: array[int]) -> Iterable[tuple[int, int, int, int]]:
    """Entries of a flat column of four."""
    flat = iter(column)
    return zip(flat, flat, flat, flat, strict=True)


def triples(column: array[int]) -> Iterable[tuple[int, int, int]]:
    """Entries of a flat column of three."""
    flat = iter(column)
    return zip(flat, flat, flat, strict=True)
