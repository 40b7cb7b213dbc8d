"""A fake model whose KV blocks hold a hash chain, an executor that runs plans on it, and a ten-line oracle.

Owns: the chain (`chain`, `draw`), `oracle`, FakeExecutor with its checks of the plans, and seeded faults.
Does not: import torch, or look into the scheduler: it sees plans only.
Invariants: a KV cell is read through the slot's block table only, so a wrong, stale, lost or overwritten
block changes the text against the oracle; with `strict` it is also reported at once, with its place.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from octavo.core.kv.group import GroupSpec
from octavo.core.plan import (
    DROP_BLOCK,
    ROW_CARRY,
    ROW_POOL,
    ROW_SAMPLE,
    ROW_SCORE,
    NewSequence,
    Row,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from octavo.executors.protocol import Capacity, ExecutorSpec
from tests.fake_pool import FakeModelError, FakePool, Slot, quads, triples
from tests.hash_chain import UNKNOWN_TOKEN, chain, draw, oracle

__all__ = ["FakeExecutor", "FakeModelError", "Faults", "InjectedError", "Slot", "Ticket", "oracle", "quads", "triples"]


class InjectedError(RuntimeError):
    """An injected failure of a step."""


@dataclass
class Faults:
    """Chances per step (or per row) of each injected fault, drawn from `rng`."""

    rng: random.Random
    submit_failure: float = 0.0
    collect_failure: float = 0.0
    row_error: float = 0.0
    zero_tokens: float = 0.0
    poison: frozenset[str] = frozenset()  # requests whose every row makes the step fail

    def hits(self, chance: float) -> bool:
        return chance > 0.0 and self.rng.random() < chance


@dataclass
class Ticket:
    """One submitted plan and, once executed, its result or fault."""

    plan: StepPlan
    number: int
    num_told: int  # plans whose results were collected when this one was submitted
    result: StepResult | None = None
    fault: Exception | None = None
    is_collected: bool = False


class FakeExecutor:
    """Executes plans on the hash-chain model. `lazy`: submit only queues, collect executes in order.

    `strict` reports a bad plan at once; without it, only the text goes wrong. `durations_only` gives
    results without token ids.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec] = (GroupSpec(),),
        *,
        vocab_size: int = 97,
        max_model_len: int = 256,
        lazy: bool = False,
        strict: bool = True,
        durations_only: bool = False,
        faults: Faults | None = None,
    ) -> None:
        self.groups, self.vocab_size, self.max_model_len = tuple(groups), vocab_size, max_model_len
        self.lazy, self.strict, self.durations_only = lazy, strict, durations_only
        self.faults = faults or Faults(random.Random(0))
        self.slots: dict[int, Slot] = {}
        self.void_slots: set[int] = set()  # named by a discarded plan: their owners must be sent again in full
        self.queue: deque[Ticket] = deque()
        self.is_broken = False
        self.failing: set[int] = set()  # slots whose row fails alone in this step
        self.current = Ticket(StepPlan(0, 0.0), 0, 0)
        self.num_steps = self.num_tokens = self.num_submitted = 0

    def open(self, spec: ExecutorSpec) -> Capacity:
        """Make the pool: one list of cells per block and group."""
        num_blocks = (spec.num_blocks or 64,) * len(self.groups)
        self.make_pool(spec.block_size, num_blocks)
        return Capacity(
            self.groups,
            num_blocks,
            spec.block_size,
            spec.max_sequences,
            spec.max_model_len or self.max_model_len,
            self.vocab_size,
        )

    def make_pool(self, block_size: int, num_blocks: Sequence[int]) -> None:
        """Allocate `num_blocks` blocks per group."""
        self.block_size = block_size
        self.pool = FakePool(self.groups, block_size, num_blocks, self.strict)

    def submit(self, plan: StepPlan) -> Ticket:
        """Queue a plan; execute it now unless lazy."""
        if plan.is_empty:
            raise FakeModelError("an empty plan was submitted")
        if self.faults.hits(self.faults.submit_failure):
            for earlier in self.queue:
                if earlier.result is None and earlier.fault is None:
                    self.run(earlier)
            self.void(plan)
            raise InjectedError("injected: submit")
        ticket = Ticket(plan, self.num_submitted, self.num_submitted - len(self.queue))
        self.num_submitted += 1
        self.queue.append(ticket)
        if not self.lazy:
            self.run(ticket)
        return ticket

    def supply(self, ticket: object, masks: object) -> None:
        """No grammars here."""

    def collect(self, ticket: object) -> StepResult:
        """Give the oldest ticket's result, or raise what made it fail; then all later ones are void too."""
        assert isinstance(ticket, Ticket)
        if not self.queue or self.queue[0] is not ticket:
            raise FakeModelError("collect out of order")
        if ticket.result is None and ticket.fault is None:
            self.run(ticket)
        self.queue.popleft()
        ticket.is_collected = True
        if ticket.fault is not None:
            self.discard_rest()
            raise ticket.fault
        assert ticket.result is not None
        return ticket.result

    def close(self) -> None:
        """Forget everything."""
        self.slots.clear()
        self.queue.clear()

    def discard_rest(self) -> None:
        """Drop every queued plan, as after the failure of an earlier one."""
        for later in self.queue:
            if later.result is None and later.fault is None:
                self.corrupt_or_skip(later.plan)
            self.void(later.plan)
        self.queue.clear()
        self.is_broken = False

    # -- one plan

    def run(self, ticket: Ticket) -> None:
        """Execute one plan, or damage what it would have written when a fault strikes."""
        plan = ticket.plan
        if self.is_broken:
            ticket.fault = InjectedError("an earlier step failed")
        elif self.faults.hits(self.faults.collect_failure) or self.is_poisoned(plan):
            ticket.fault = InjectedError("injected: step")
            self.is_broken = True
        if ticket.fault is not None:
            self.corrupt_or_skip(plan)
            self.void(plan)
        else:
            self.num_steps += 1
            self.num_tokens += sum(plan.counts)
            self.current = ticket
            ticket.result = self.execute(plan)

    def execute(self, plan: StepPlan) -> StepResult:
        """Apply the effects in their order, then the rows."""
        firsts = dict(zip(plan.slots, plan.starts, strict=True))
        if len(firsts) != plan.num_rows:
            raise FakeModelError("a slot has two rows in one step")
        for slot in dict.fromkeys(plan.freed_slots):  # a failed step's frees may come again
            self.free_slot(slot)
        for new in plan.new_sequences:
            self.enter(new)
        fresh = self.pool.copy(plan)
        for entry in quads(plan.edits):
            self.pool.edit(self.slots[entry[0]].tables[entry[1]], entry, firsts.get(entry[0]), fresh)
        rows = [row for row in plan.rows() if not self.is_baseless(row)]
        for row in rows:
            self.check_row(row, fresh)
        self.failing = {row.slot for row in rows if self.faults.hits(self.row_error_chance(row))}
        self.forward(rows)
        return self.sample(list(plan.rows()))

    def free_slot(self, slot: int) -> None:
        state = self.slots.pop(slot, None)
        if state is not None:
            self.pool.release(state)
        elif slot not in self.void_slots and self.strict:
            raise FakeModelError(f"slot {slot} is freed but nobody is in it")
        self.void_slots.discard(slot)

    def enter(self, new: NewSequence) -> None:
        if new.slot in self.slots:
            raise FakeModelError(
                f"slot {new.slot} of {new.request_id!r} still holds {self.slots[new.slot].request_id!r}"
            )
        self.void_slots.discard(new.slot)
        ids = list(new.token_ids) if new.token_ids is not None else [UNKNOWN_TOKEN] * new.num_prompt
        if len(ids) < new.num_prompt or not ids:
            raise FakeModelError(f"{new.request_id!r} enters with {len(ids)} ids and a prompt of {new.num_prompt}")
        tables: list[list[int]] = [[] for _ in self.groups]
        self.slots[new.slot] = Slot(
            new.request_id, new.num_prompt, new.params, new.eos_token_ids, new.adapter_id, ids, tables
        )

    # -- rows

    def is_baseless(self, row: Row) -> bool:
        """Whether the row was planned on a token that its slot's earlier result withheld."""
        state = self.slots.get(row.slot)
        return state is not None and state.may_repeat and row.start >= len(state.ids)

    def check_row(self, row: Row, fresh: set[tuple[int, int]]) -> None:
        """Positions follow on, ids are known, blocks are the row's own, and the table is exactly long enough."""
        state = self.slots.get(row.slot)
        if state is None:
            raise FakeModelError(f"a row names slot {row.slot}, which is empty")
        end = row.start + row.count
        if state.ids[0] == UNKNOWN_TOKEN:  # how many outputs it resumes with is not told
            state.ids.extend([UNKNOWN_TOKEN] * (end - len(state.ids)))
        known = len(state.ids)
        where = f"{state.request_id!r} (slot {row.slot}) positions [{row.start}, {end}) of {known}"
        if row.count < 1 or end > known:
            raise FakeModelError(f"{where}: no such ids")
        repeats = state.may_repeat and row.start == known - 1
        if state.next_start is not None and row.start != state.next_start and not repeats:
            raise FakeModelError(f"{where}: follows {state.next_start}")
        if bool(row.flags & ROW_CARRY) and (row.count != 1 or end != known or state.num_sampled == 0):
            raise FakeModelError(f"{where}: carries an id that its slot did not sample last")
        if not row.flags & ROW_CARRY and end == known and state.sampled_in >= self.current.num_told:
            raise FakeModelError(f"{where}: its last id is still on the device, and the row does not carry it")
        if row.flags & ROW_SAMPLE and end != known:
            raise FakeModelError(f"{where}: samples before its end")
        for group in range(len(self.groups)):
            self.pool.check_blocks(state, group, row, fresh, where)
        state.next_start, state.may_repeat = end, False

    def row_error_chance(self, row: Row) -> float:
        """Rows that compute prompt positions fail more often: others may already read what they write."""
        return self.faults.row_error * (3 if row.start < self.slots[row.slot].num_prompt else 1)

    def forward(self, rows: Iterable[Row]) -> None:
        """Write every row's cells; a row whose context another row still has to write waits for it."""
        pending = list(rows)
        while pending:
            later = [row for row in pending if not self.compute(row)]
            if len(later) == len(pending):
                states = [self.slots[row.slot] for row in later]
                raise FakeModelError(
                    f"positions are read that nobody wrote, by {[state.request_id for state in states]}"
                )
            pending = later

    def compute(self, row: Row) -> bool:
        """Write one row's cells in every group; False when its context is not there yet."""
        state, size = self.slots[row.slot], self.block_size
        for group, table in enumerate(state.tables):
            if self.strict and not self.pool.check_context(state, group, row.start):
                return False
            pool, written = self.pool.cells[group], self.pool.is_written[group]

            def read(position: int, pool: list[list[int]] = pool, table: list[int] = table) -> int:
                return pool[table[position // size]][position % size]

            is_bad = row.slot in self.failing or any(
                self.pool.is_bad[group][block] for block in table if block != DROP_BLOCK
            )
            for position in range(row.start, row.start + row.count):
                block, offset = table[position // size], position % size
                pool[block][offset] = chain(read, state.ids[position], position, state.adapter_id) + is_bad
                written[block][offset] = True
                self.pool.is_bad[group][block] |= is_bad
        return True

    def sample(self, rows: list[Row]) -> StepResult:
        """Draw behind each sampling row's last cell; score rows that want it."""
        ids, counts, errors, scores, pooled = array("i"), array("i"), [], [], []
        for index, row in enumerate(rows):
            state = self.slots[row.slot]
            if self.is_baseless(row):
                counts.append(1)
                ids.append(self.faults.rng.randrange(self.vocab_size))  # garbage, which nobody may take
                continue
            last = row.start + row.count - 1
            cell = self.pool.cells[0][state.tables[0][last // self.block_size]][last % self.block_size]
            if row.slot in self.failing:
                errors.append((index, "injected: not finite"))
            if row.flags & ROW_SCORE:
                scores.append((index, row.start + 1, self.score(state, row)))
            if row.flags & ROW_POOL:
                pooled.append((index, (cell % 2**32).to_bytes(4, "little")))
            if row.flags & ROW_SAMPLE:
                withheld = self.faults.hits(self.faults.zero_tokens)
                counts.append(0 if withheld else 1)
                if withheld:
                    state.may_repeat = True
                else:
                    ids.append(self.draw_next(state, cell))
                    state.sampled_in = self.current.number
        whole = None if all(counts) else counts
        return StepResult(
            None if self.durations_only else ids,
            whole,
            errors=tuple(errors),
            scores=tuple(scores),
            pooled=tuple(pooled),
        )

    def draw_next(self, state: Slot, cell: int) -> int:
        """Sample one id and append it to the slot's ids, as the device does."""
        state.num_sampled += 1
        if state.ids[0] == UNKNOWN_TOKEN:
            state.ids.append(UNKNOWN_TOKEN)
            return 0
        state.ids.append(draw(cell, state.params, len(state.ids) - state.num_prompt, self.vocab_size, state.eos))
        return state.ids[-1]

    def score(self, state: Slot, row: Row) -> tuple[TokenLogprobs, ...]:
        """One entry per prompt token behind the row's positions, a function of the cell before it."""
        end = min(row.start + row.count + 1, state.num_prompt)
        cells = state.expected(row.start + row.count)
        return tuple(TokenLogprobs(state.ids[p], -(cells[p - 1] % 1000) / 100, 1) for p in range(row.start + 1, end))

    # -- faults

    def is_poisoned(self, plan: StepPlan) -> bool:
        if not self.faults.poison:
            return False
        names = {slot: state.request_id for slot, state in self.slots.items()} | {
            new.slot: new.request_id for new in plan.new_sequences
        }
        return any(names.get(slot) in self.faults.poison for slot in plan.slots)

    def corrupt_or_skip(self, plan: StepPlan) -> None:
        """A failed step wrote anything, or nothing, where it was allowed to write."""
        if self.faults.rng.random() < 0.3:
            return
        tables = {slot: [table[:] for table in state.tables] for slot, state in self.slots.items()}
        for slot in plan.freed_slots:
            tables.pop(slot, None)
        for new in plan.new_sequences:
            tables[new.slot] = [[] for _ in self.groups]
        for slot, group, index, block in quads(plan.edits):
            if slot in tables:
                tables[slot][group][index : index + 1] = [block]
        for row in plan.rows():
            for group, table in enumerate(tables.get(row.slot, ())):
                for position in range(row.start, row.start + row.count):
                    block, offset = table[position // self.block_size], position % self.block_size
                    self.pool.cells[group][block][offset] = self.faults.rng.getrandbits(32)
                    self.pool.is_written[group][block][offset] = True

    def void(self, plan: StepPlan) -> None:
        """Forget every slot that a discarded plan names: its sequence must be sent again."""
        named = {
            *plan.slots,
            *plan.freed_slots,
            *(new.slot for new in plan.new_sequences),
            *(edit[0] for edit in quads(plan.edits)),
        }
        for slot in named:
            state = self.slots.pop(slot, None)
            if state is not None:
                self.pool.release(state)
        self.void_slots |= named
