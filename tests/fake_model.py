"""A fake model whose KV blocks hold a chain of hashes, and an executor that runs plans on it.

Owns: FakeExecutor: the order of a plan's effects, the checks of its rows, the forward pass, faults. The chain is
hash_chain's, blocks are fake_pool's, results are fake_sampling's.
Does not: import torch, or look into the scheduler: it sees plans only.
Invariants: a KV cell is read through the slot's block table only, so a wrong, stale, lost or overwritten
block changes the text against the oracle; with `strict` it is also reported at once, with its place.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from octavo.core.limits import GroupSpec
from octavo.core.plan import DROP_BLOCK, ROW_CARRY, ROW_FORK, ROW_SAMPLE, NewSequence, Row, StepPlan, StepResult
from octavo.executors.protocol import Capacity, ExecutorSpec
from tests import fake_sampling
from tests.fake_encoder import FakeEncoder
from tests.fake_faults import Faults, InjectedError, damage
from tests.fake_pool import FakeModelError, FakePool, Slot, quads, triples
from tests.hash_chain import UNKNOWN_TOKEN, Continuation, cells_at, context_of, draw, oracle, salt_of

__all__ = ["FakeExecutor", "FakeModelError", "Faults", "InjectedError", "Slot", "Ticket", "oracle", "quads", "triples"]


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
    results without token ids. `encoder` is told where media items lie and what fits.
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
        self.windows = tuple(group.window for group in self.groups)
        self.lazy, self.strict, self.durations_only = lazy, strict, durations_only
        self.faults = faults or Faults(random.Random(0))
        self.encoder = FakeEncoder(strict)
        self.names_all_prefixes = False  # whether a plan must tell every leading block that all its rows share
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

    def make_pool(self, block_size: int, num_blocks: Sequence[int], host_blocks: Sequence[int] = ()) -> None:
        """Allocate `num_blocks` blocks per group on the device, `host_blocks` on the host."""
        self.block_size = block_size
        self.pool = FakePool(self.groups, block_size, num_blocks, self.strict, host_blocks)

    def submit(self, plan: StepPlan) -> Ticket:
        """Queue a plan; execute it now unless lazy."""
        if plan.is_empty:
            raise FakeModelError("an empty plan was submitted")
        if self.faults.hits(self.faults.submit_failure, "failed submits"):
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
        """Refuse: no grammars here."""
        raise FakeModelError("masks were supplied")

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
        elif self.faults.hits(self.faults.collect_failure, "failed steps") or self.is_poisoned(plan):
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
        if len(set(plan.slots)) != plan.num_rows:
            raise FakeModelError("a slot has two rows in one step")
        for slot in plan.freed_slots:  # freeing a free slot is harmless
            self.free_slot(slot)
        for new in plan.new_sequences:
            self.enter(new)
        for slot, position, token_id in triples(plan.id_edits):
            self.set_id(slot, position, token_id)
        fresh = self.pool.move(plan)
        for entry in quads(plan.edits):
            if entry[0] not in self.slots:
                raise FakeModelError(f"edit {entry} of slot {entry[0]}, which is empty")
            self.pool.edit(self.slots[entry[0]], entry, fresh)
        self.pool.check_filled(plan, fresh)
        self.encoder.encode(plan, self.slots)
        rows = []
        for row in plan.rows():
            if self.is_baseless(row):
                self.pool.write_garbage(self.slots[row.slot], row)
            else:
                rows.append(row)
        self.check_rows(rows)
        if self.strict:
            self.check_prefixes(plan)
        self.failing = {row.slot for row in rows if self.faults.hits(self.row_error_chance(row), "rows of NaN")}
        self.forward(rows)
        result = fake_sampling.sample(self, list(plan.rows()))
        self.encoder.free(plan)
        return result

    def free_slot(self, slot: int) -> None:
        state = self.slots.pop(slot, None)
        if state is not None:
            self.pool.release(state)
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
        made = Continuation(ids, self.windows, new.adapter_id, self.encoder.spans.get(new.request_id, ()))
        tables: list[list[int]] = [[] for _ in self.groups]
        self.slots[new.slot] = Slot(
            new.request_id,
            new.num_prompt,
            new.params,
            new.eos_token_ids,
            new.adapter_id,
            made.ids,
            tables,
            made,
            new.choice,
        )

    def set_id(self, slot: int, position: int, token_id: int) -> None:
        """Write an id that the host chose behind a slot's last."""
        state = self.slots.get(slot)
        if state is None or position != len(state.ids):
            known = "an empty slot" if state is None else f"{len(state.ids)} ids"
            raise FakeModelError(f"id edit of slot {slot} at {position}: it has {known}")
        state.ids.append(token_id)
        state.sampled_in = -1

    # -- rows

    def is_baseless(self, row: Row) -> bool:
        """Whether the row was planned on a token that its slot's earlier result withheld."""
        state = self.slots.get(row.slot)
        return state is not None and state.may_repeat and row.start >= len(state.ids)

    def check_rows(self, rows: list[Row]) -> None:
        """Everyone's new table entries first, then each row: what it writes depends on who shares."""
        for row in rows:
            state = self.slots.get(row.slot)
            if state is None:
                raise FakeModelError(f"a row names slot {row.slot}, which is empty")
            state.row_start = row.start
            self.pool.judge(state, row.start, row.slot)
        for row in rows:
            self.check_row(row)
        for row in rows:
            state = self.slots[row.slot]
            state.next_start, state.may_repeat, state.row_start = row.start + row.count, False, None

    def check_row(self, row: Row) -> None:
        """Positions follow on, ids are known, blocks are the row's own, and the table is exactly long enough."""
        state = self.slots[row.slot]
        end = row.start + row.count
        if state.ids[0] == UNKNOWN_TOKEN:  # how many outputs it resumes with is not told
            state.ids.extend([UNKNOWN_TOKEN] * (end - len(state.ids)))
        known = len(state.ids) + len(row.drafts)
        where = (
            f"{state.request_id!r} choice {state.choice} (slot {row.slot}) positions [{row.start}, {end}) of {known}"
        )
        is_fork = bool(row.flags & ROW_FORK)
        if row.count < (0 if is_fork else 1) or end > known or (is_fork and row.count):
            raise FakeModelError(f"{where}: no such ids")
        repeats = state.may_repeat and row.start == known - 1
        if state.next_start is not None and row.start != state.next_start and not repeats:
            raise FakeModelError(f"{where}: follows {state.next_start}")
        if is_fork and state.next_start is not None:
            raise FakeModelError(f"{where}: forked, but it has run already")
        if bool(row.flags & ROW_CARRY) and (row.count != 1 or end != known or state.num_sampled == 0):
            raise FakeModelError(f"{where}: carries an id that its slot did not sample last")
        if not row.flags & ROW_CARRY and end == known and state.sampled_in >= self.current.num_told:
            raise FakeModelError(f"{where}: its last id is still on the device, and the row does not carry it")
        if row.flags & ROW_SAMPLE and end != known:
            raise FakeModelError(f"{where}: samples before its end")
        if row.drafts and (row.flags != ROW_SAMPLE or row.count != 1 + len(row.drafts)):
            raise FakeModelError(f"{where}: has {len(row.drafts)} drafts, and is no plain row of one known id")
        self.encoder.require(state, row)
        for group in range(len(self.groups)):
            self.pool.check_blocks(self.slots.values(), state, group, row, where)

    def check_prefixes(self, plan: StepPlan) -> None:
        """Blocks that rows are said to share are shared."""
        tables = [self.slots[slot].tables[0] for slot in plan.slots]
        for num_blocks, indices in plan.shared_prefixes:
            heads = {tuple(tables[index][:num_blocks]) for index in indices}
            if num_blocks < 1 or len(indices) < 2 or len(heads) != 1 or len(min(heads)) < num_blocks:
                raise FakeModelError(f"rows {indices} are said to share {num_blocks} blocks: {heads}")
        common, reading = 0, [table for table, count in zip(tables, plan.counts, strict=True) if count]
        for column in zip(*reading, strict=False):
            if len(set(column)) > 1 or (not common and column[0] == DROP_BLOCK):
                break
            common += 1
        if plan.num_common_blocks > common or (
            self.names_all_prefixes and len(reading) > 1 and plan.num_common_blocks != common
        ):
            raise FakeModelError(f"{plan.num_common_blocks} blocks are said to be common, {common} are")

    def row_error_chance(self, row: Row) -> float:
        """Rows that compute prompt positions fail more often: others may already read what they write."""
        if self.slots[row.slot].request_id in self.faults.bad:
            return 1.0
        return self.faults.row_error * (3 if row.start < self.slots[row.slot].num_prompt else 1)

    def forward(self, rows: Iterable[Row]) -> None:
        """Write every row's cells; a row whose context another row still has to write waits for it."""
        pending = [row for row in rows if row.count]
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
        state, size, pool = self.slots[row.slot], self.block_size, self.pool
        tables, windows = state.tables, self.windows
        if self.strict and not all([pool.check_context(state, group, row.start) for group in range(len(tables))]):
            return False
        is_bad = row.slot in self.failing or pool.has_bad(state)
        spans = self.encoder.present(state.made.spans) if state.made.spans else ()
        ids = [*state.ids, *row.drafts] if row.drafts else state.ids
        for position in range(row.start, row.start + row.count):
            context = [
                pool.cells[group][tables[group][where // size]][where % size]
                for group, where in context_of(windows, position)
            ]
            salt = salt_of(state.adapter_id, spans, position) if state.adapter_id or spans else 0
            made = cells_at(len(tables), context, ids[position], position, salt)
            for group, cell in enumerate(made):
                block = tables[group][position // size]
                pool.cells[group][block][position % size] = cell + is_bad
                pool.is_written[group][block][position % size] = True
                pool.is_bad[group][block] |= is_bad
        return True

    def draw_next(self, state: Slot, cell: int) -> int:
        """Sample one id and append it to the slot's ids, as the device does."""
        state.num_sampled += 1
        if state.ids[0] == UNKNOWN_TOKEN:
            state.ids.append(UNKNOWN_TOKEN)
            return 0
        num_outputs = len(state.ids) - state.num_prompt
        known = (num_outputs, self.vocab_size, state.eos, state.choice, state.ids[-1])
        state.ids.append(draw(cell, state.params, *known))
        return state.ids[-1]

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
        damage(plan, self.slots, self.pool, self.faults.rng)

    def void(self, plan: StepPlan) -> None:
        """Forget every slot that a discarded plan names: its sequence must be sent again."""
        named = {
            *plan.slots,
            *plan.freed_slots,
            *(new.slot for new in plan.new_sequences),
            *(edit[0] for edit in quads(plan.edits)),
            *(edit[0] for edit in triples(plan.id_edits)),
            *(job.slot for job in plan.encode_jobs),
        }
        for slot in named:
            state = self.slots.pop(slot, None)
            if state is not None:
                self.pool.release(state)
        self.void_slots |= named
        self.encoder.void(plan)
