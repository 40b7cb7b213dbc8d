"""Blocks of cells, as an executor would hold them, that notice what a correct scheduler never asks for.

Owns: the cells on the device and on the host, who holds which block, copies and moves, table edits, FakeModelError.
Does not: compute or sample.
Invariants: a block that a live table holds changes only where no other holder has read or will read what was there;
with `strict` anything else is reported at once, with its place; without, only the text goes wrong.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from octavo.core.limits import GroupSpec
from octavo.core.plan import DROP_BLOCK, Row, StepPlan
from octavo.core.request import SamplingParams
from tests.hash_chain import Continuation

HOLE = 0  # content of a cell that nobody ever wrote
GARBAGE = -1  # content of a cell that no sequence may read
Place = tuple[int, int]  # group, block
Content = tuple[list[int], list[bool], bool]  # cells, which are written, whether a failed row wrote them


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
    made: Continuation  # what its blocks should hold, from its ids alone
    choice: int = 0
    next_start: int | None = None  # first position not yet written; None until its first row
    num_sampled: int = 0  # since it entered the slot
    sampled_in: int = -1  # number of the submitted plan that sampled its last id
    may_repeat: bool = False  # its last result was withheld, so its last position may come again
    row_start: int | None = None  # of its row in the step being executed
    # Entries that its next row tells the use of: (group, index, filled in this plan, held by others before)
    unjudged: list[tuple[int, int, bool, bool]] = field(default_factory=list)

    @property
    def frontier(self) -> int | None:
        """Positions from here on are not yet its context."""
        return self.next_start if self.row_start is None else self.row_start


class FakePool:
    """The pools of all groups, on the device and on the host."""

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        block_size: int,
        num_blocks: Sequence[int],
        strict: bool,
        host_blocks: Sequence[int] = (),
    ) -> None:
        self.windows = tuple(group.window for group in groups)
        self.strict, self.block_size = strict, block_size
        self.cells = [[[HOLE] * block_size for _ in range(count)] for count in num_blocks]
        self.is_written = [[[False] * block_size for _ in range(count)] for count in num_blocks]
        # Written by a row that failed alone, or from such a block.
        self.is_bad = [[False] * count for count in num_blocks]
        self.holders: list[list[int]] = [[0] * count for count in num_blocks]
        self.host: list[list[Content | None]] = [[None] * count for count in host_blocks or (0,) * len(num_blocks)]

    def release(self, state: Slot) -> None:
        """Count a sequence's tables out."""
        for holders, table in zip(self.holders, state.tables, strict=True):
            for block in table:
                if block != DROP_BLOCK:
                    holders[block] -= 1

    # -- whole blocks

    def _content(self, group: int, block: int) -> Content:
        return self.cells[group][block][:], self.is_written[group][block][:], self.is_bad[group][block]

    def _fill(self, group: int, block: int, content: Content) -> None:
        cells, is_written, is_bad = content
        self.cells[group][block], self.is_written[group][block] = cells[:], is_written[:]
        self.is_bad[group][block] = is_bad

    def move(self, plan: StepPlan) -> set[Place]:
        """Swap out, load and copy whole blocks, each reading all sources before writing; give the blocks filled."""
        if plan.swap_outs and plan.host_loads:
            raise FakeModelError("a plan has both swap-outs and host loads")
        self._check_moves(plan)
        for group, device, host in triples(plan.swap_outs):
            content = self._content(group, device)
            if self.strict and not any(content[1]):
                raise FakeModelError(f"block {device} of group {group} is swapped out, but nobody wrote it")
            self.host[group][host] = content
        for group, host, device in triples(plan.host_loads):
            loaded = self.host[group][host]
            if loaded is None:
                raise FakeModelError(f"host block {host} of group {group} is loaded, but nothing was put there")
            self._fill(group, device, loaded)
        contents = [self._content(group, source) for group, source, _ in triples(plan.copies)]
        for (group, _, to), content in zip(triples(plan.copies), contents, strict=True):
            self._fill(group, to, content)
        return {(group, to) for column in (plan.copies, plan.host_loads) for group, _, to in triples(column)}

    def _check_moves(self, plan: StepPlan) -> None:
        """Every number exists and every destination is named once; a device block leaves at most once."""
        for name, column, sources, targets in (
            ("swap-out", plan.swap_outs, self.cells, self.host),
            ("load", plan.host_loads, self.host, self.cells),
            ("copy", plan.copies, self.cells, self.cells),
        ):
            entries = list(triples(column))
            for group, source, to in entries:
                if not (0 <= source < len(sources[group]) and 0 <= to < len(targets[group])):
                    raise FakeModelError(f"{name} {source} -> {to} of group {group}: no such block")
            if len({(group, to) for group, _, to in entries}) != len(entries):
                raise FakeModelError(f"two entries of a {name} have one destination")
            if name == "swap-out" and len({(group, source) for group, source, _ in entries}) != len(entries):
                raise FakeModelError("a block is swapped out twice")
        loaded = {(group, to) for group, _, to in triples(plan.host_loads)}
        if any((group, to) in loaded for group, _, to in triples(plan.copies)):
            raise FakeModelError("a block is loaded and copied into in one step")

    def check_filled(self, plan: StepPlan, fresh: set[Place]) -> None:
        """Blocks filled in this step belong to the tables that this step put them in, and to no other."""
        given = Counter((group, block) for _, group, _, block in quads(plan.edits))
        for group, block in sorted(fresh):
            if self.strict and self.holders[group][block] > given[group, block]:
                raise FakeModelError(f"block {block} of group {group} is overwritten, which a live table holds")

    # -- tables

    def edit(self, state: Slot, entry: tuple[int, int, int, int], fresh: set[Place]) -> None:
        """Append, replace or drop one entry of a slot's table."""
        slot, group, index, block = entry
        table = state.tables[group]
        if self.windows[group] and index > len(table) and state.next_start is None:
            table.extend([DROP_BLOCK] * (index - len(table)))  # a prefix hit: what left the window is never set
        if not 0 <= index <= len(table) or not DROP_BLOCK <= block < len(self.cells[group]):
            raise FakeModelError(f"edit {entry} of a table of {len(table)} entries")
        if index == len(table):
            if block == DROP_BLOCK:
                raise FakeModelError(f"edit of slot {slot} drops entry {index}, which does not exist")
            table.append(block)
        elif block == DROP_BLOCK and index == len(table) - 1 and index * self.block_size >= (state.next_start or 0):
            self.holders[group][table.pop()] -= 1  # rejected drafts alone were in it
        else:
            self._replace(table, entry, fresh)
        if block != DROP_BLOCK:
            state.unjudged.append((group, index, (group, block) in fresh, self.holders[group][block] > 0))
            self.holders[group][block] += 1

    def _replace(self, table: list[int], entry: tuple[int, int, int, int], fresh: set[Place]) -> None:
        """Take out an entry: dropped, copied on write, or exchanged for a block of the same content."""
        slot, group, index, block = entry
        old = table[index]
        if old == DROP_BLOCK:
            raise FakeModelError(f"slot {slot}: entry {index} of group {group} was dropped and is set again")
        same = (
            block == DROP_BLOCK
            or (group, block) in fresh
            or (group, old) in fresh
            or self.cells[group][block] == self.cells[group][old]
        )
        if self.strict and not same and not self.is_bad[group][block] and not self.is_bad[group][old]:
            raise FakeModelError(f"slot {slot}: block {old} is replaced by {block}, which holds something else")
        self.holders[group][old] -= 1
        table[index] = block

    def judge(self, state: Slot, start: int, slot: int) -> None:
        """The row's start tells which new entries are context and which are to be written: those count as empty."""
        size, pending, state.unjudged = self.block_size, state.unjudged, []
        for group, index, is_fresh, was_held in pending:
            if index >= len(state.tables[group]) or (block := state.tables[group][index]) == DROP_BLOCK:
                continue
            if index * size >= start and was_held and self.holders[group][block] > 1 and self.strict:
                raise FakeModelError(
                    f"block {block} of group {group} is given to slot {slot} to write while a live table holds it"
                )
            if index * size >= start or is_fresh:
                keep = max(0, start - index * size)
                written = self.is_written[group][block]
                self.is_written[group][block] = written[:keep] + [False] * (size - keep)
                self.is_bad[group][block] = self.is_bad[group][block] and keep > 0

    # -- rows

    def check_blocks(self, states: Iterable[Slot], state: Slot, group: int, row: Row, where: str) -> None:
        """Positions to write lie in blocks of its own, not written there since they were given out."""
        table, size = state.tables[group], self.block_size
        end = row.start + row.count
        if len(table) != -(-end // size) and not state.may_repeat:
            raise FakeModelError(f"{where}: table of {len(table)} blocks of {size} in group {group}")
        for position in range(row.start, end):
            block = table[position // size]
            if block == DROP_BLOCK:
                raise FakeModelError(f"{where}: writes into a hole at {position} of group {group}")
            repeats = position == row.start and state.may_repeat and self.holders[group][block] == 1
            if self.strict and self.is_written[group][block][position % size] and not repeats:
                raise FakeModelError(f"{where}: writes position {position} of block {block}, group {group}, again")
        if not self.strict or not row.count:
            return
        for index in range(row.start // size, len(table)):
            if self.holders[group][table[index]] > 1:
                last = min((index + 1) * size, end) - 1
                self._check_sharers(states, state, (group, index), last, where)

    def _check_sharers(
        self, states: Iterable[Slot], state: Slot, entry: tuple[int, int], last: int, where: str
    ) -> None:
        """A block that others hold may be written only where it is their context already."""
        group, index = entry
        block = state.tables[group][index]
        for other in states:
            table = other.tables[group]
            if other is state or index >= len(table) or table[index] != block or other.frontier is None:
                continue
            if other.frontier <= last:
                raise FakeModelError(
                    f"{where}: writes position {last} of block {block}, group {group}, which {other.request_id!r} "
                    f"choice {other.choice} shares from {other.frontier} on"
                )

    def check_context(self, state: Slot, group: int, end: int) -> bool:
        """Whether what position `end` may read is written; raise when a cell holds what this sequence never wrote."""
        size, window, expected = self.block_size, self.windows[group], state.made.expected(end)[group]
        first = max(0, end - window + 1) if window else 0
        table = state.tables[group]
        for index in range(first // size, -(-end // size)):
            block = table[index]
            if block == DROP_BLOCK:
                raise FakeModelError(f"{state.request_id!r} reads a hole at {index * size} of group {group}")
            begin, stop = max(0, first - index * size), min(size, end - index * size)
            if not all(self.is_written[group][block][begin:stop]):
                return False
            wanted = expected[index * size + begin : index * size + stop]
            if not self.is_bad[group][block] and self.cells[group][block][begin:stop] != wanted:
                raise FakeModelError(
                    f"{state.request_id!r} reads foreign content in block {block}, entry {index} of group {group}"
                )
        return True

    def unwrite(self, state: Slot, start: int, end: int) -> None:
        """What rejected drafts wrote is void: nobody may read it, and its sequence writes there again."""
        for is_written, table in zip(self.is_written, state.tables, strict=True):
            for position in range(start, end):
                is_written[table[position // self.block_size]][position % self.block_size] = False

    def write_garbage(self, state: Slot, row: Row) -> None:
        """A row planned on a withheld token writes anything: its block may leave, but nobody may read it."""
        size = self.block_size
        for cells, is_written, table in zip(self.cells, self.is_written, state.tables, strict=True):
            for position in range(row.start, row.start + row.count):
                cells[table[position // size]][position % size] = GARBAGE
                is_written[table[position // size]][position % size] = True

    def has_bad(self, state: Slot) -> bool:
        """Whether any block of a slot was written by a row that failed alone."""
        return any(
            is_bad[block]
            for is_bad, table in zip(self.is_bad, state.tables, strict=True)
            for block in table
            if block != DROP_BLOCK
        )


def quads(column: array[int]) -> Iterable[tuple[int, int, int, int]]:
    """Entries of a flat column of four."""
    flat = iter(column)
    return zip(flat, flat, flat, flat, strict=True)


def triples(column: array[int]) -> Iterable[tuple[int, int, int]]:
    """Entries of a flat column of three."""
    flat = iter(column)
    return zip(flat, flat, flat, strict=True)
