"""Composes one plan: who runs, how many tokens each, whose blocks are taken.

Owns: the pass over running requests of one step, and the plan's columns. Does not: keep anything between steps
(state), let anybody in (intake), or check what can never run (admission).
Invariants: granted <= token budget; running <= sequence cap; nobody is preempted for one of later rank.
"""

from __future__ import annotations

from array import array
from typing import Any

from octavo.core.choices import Choices, is_caught_up
from octavo.core.composition import ANY, Turn
from octavo.core.eviction import make_room
from octavo.core.kv.cache import Effects, Publication
from octavo.core.plan import (
    ROW_BEAM,
    ROW_CARRY,
    ROW_POOL,
    ROW_SAMPLE,
    ROW_SCORE,
    EventKind,
    NewSequence,
    StepPlan,
    WaitReason,
)
from octavo.core.plan_facts import is_fast, shared_prefixes
from octavo.core.request import RequestState, Sequence, Status
from octavo.core.speculation import must_wait
from octavo.core.state import Flight, State

_DECODE_AHEAD = ROW_SAMPLE | ROW_CARRY


class Planner:
    """One step in the making. Made anew for every plan; `finish` hands the plan over."""

    __slots__ = (
        "choices", "counts", "draft_ids", "effects", "flags", "has_cleared", "held", "is_careful", "kept", "moved",
        "new", "now", "num_admitted", "num_drafts", "num_preempted", "only", "outstanding", "published", "reads",
        "rows", "starts", "state", "tokens", "turn", "waits",
    )  # fmt: skip

    def __init__(self, state: State, now: float, only: frozenset[str] | None) -> None:
        self.state = state
        self.now = now
        self.only = only
        self.turn: Turn = ANY
        self.rows: list[Sequence] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.flags: list[int] = []
        self.num_drafts = self.draft_ids = array("i")  # see speculation
        self.effects: Effects = state.cache.begin_plan(state.step)
        self.new: list[NewSequence] = []
        self.published: list[Publication] = []
        self.waits: dict[WaitReason, int] = {}  # waiting requests by reason
        self.held: dict[WaitReason, int] = {}  # running rows left out, by reason
        self.tokens = state.token_budget
        self.reads = state.read_budget
        self.tokens.renew()
        self.reads.renew()
        self.choices = Choices(self)
        self.num_preempted = 0
        self.has_cleared = False  # somebody had to go for a waiting request: nobody takes the room meanwhile
        self.num_admitted = 0
        self.outstanding = [0] * state.cache.num_groups  # blocks that sequences not caught up will still need
        self.kept: dict[str, list[int]] = {}  # the same by request
        self.is_careful = bool(state.limits.max_kv_read)  # whether each row has to ask what it may read
        state.encoder.renew()
        self._tell_changes()

    def _tell_changes(self) -> None:
        """Enter what commits decided since the last plan: sequences that moved, ids chosen, tables mended."""
        state = self.state
        self.moved = frozenset(sequence.slot for sequence in state.announced)
        for sequence in state.announced:
            self.announce(sequence)
            state.cache.announce(sequence)
        state.announced.clear()
        self.effects.edits.extend(state.table_edits)
        state.table_edits = array("i")

    # --- running requests ---------------------------------------------------------------------------

    def grant_running(self, turn: Turn = ANY) -> None:
        """Go on with what runs, in rank order. Rows that decode inside their last block are the hot path.

        They are entered right here: a call for each would cost more than all the rest of the step.
        """
        self.turn = turn
        self.waits = {}
        self.held = {}
        self.outstanding = [0] * self.state.cache.num_groups
        self.kept = {}
        self.state.partial_budget.renew()
        tokens, is_careful = self.tokens, self.is_careful
        is_choosy = self.only is not None or turn is not ANY or self._may_hold()
        rows, starts, counts, flags = self.rows, self.starts, self.counts, self.flags
        left = tokens.left
        for request in self._in_order() if is_careful else tuple(self.state.running.requests):
            if not left:
                break
            if is_choosy and self._skips(request):
                continue
            sequences = request.sequences
            if request.has_several:
                tokens.left = left
                sequences = self.choices.ready(request)
                left = tokens.left
            for sequence in sequences:
                start = sequence.num_scheduled
                pending = sequence.num_pending
                todo = sequence.num_committed + pending - start
                if (
                    todo == 1
                    and left
                    and start < sequence.block_end
                    and request.is_decoding
                    and (not pending or request.can_run_ahead)
                    and (not is_careful or self._may_read(request, start))
                ):
                    sequence.num_scheduled = start + 1
                    sequence.num_pending = pending + 1
                    sequence.in_flight += 1
                    rows.append(sequence)
                    starts.append(start)
                    counts.append(1)
                    flags.append(_DECODE_AHEAD if pending else ROW_SAMPLE)
                    left -= 1
                elif todo > 0:
                    tokens.left = left
                    has_forked = self._grant(request, sequence, todo)
                    left = tokens.left
                    if has_forked:
                        break  # its other choices have their rows
        tokens.left = left

    def grant_sequences(self, request: RequestState, sequences: list[Sequence]) -> None:
        """Go on with a request that has just come back."""
        for sequence in sequences:
            todo = sequence.num_known - sequence.num_scheduled
            if todo > 0 and self._grant(request, sequence, todo):
                return

    def _skips(self, request: RequestState) -> bool:
        """Whether nothing of a request may be in this step; one that is still prefilling keeps its room meanwhile."""
        if self.only is not None and request.name not in self.only:
            return True
        if request.may_draft and self._may_hold() and must_wait(self.state, request):
            self.held[WaitReason.UNCOMMITTED] = self.held.get(WaitReason.UNCOMMITTED, 0) + 1
            return True
        reason = self.turn.refusal(request, request.is_decoding)
        if reason is None or not request.is_decoding:
            return False
        self.held[reason] = self.held.get(reason, 0) + 1
        return True

    def _may_hold(self) -> bool:
        """Whether rows may have to wait for a commit, because of drafts."""
        return bool(self.state.limits.max_draft_tokens and self.state.flight)

    def _may_read(self, request: RequestState, start: int) -> bool:
        """Take what the next token of a row reads, if that may be read in this step."""
        cost = self.reads.cost(start, 1)
        if not self.reads.fits(cost):
            return False
        self.reads.take(cost)
        request.num_bypassed = 0
        return True

    def _in_order(self) -> list[RequestState]:
        """Running requests by rank; those that were passed over too often come first."""
        bound = self.state.limits.max_bypass
        return sorted(self.state.running.requests, key=lambda request: request.num_bypassed < bound)

    def _grant(self, request: RequestState, sequence: Sequence, todo: int) -> bool:
        """Grant a row that needs a block, or more than one token, or has more to be asked. True when it forked."""
        if request.status != Status.RUNNING or not self.tokens.left:
            return False
        if request.awaits_id(sequence):
            return False
        if not sequence.is_entered:
            if self.turn.refusal(request, is_decoding=False) or not self.choices.enter(request, sequence):
                return False
            todo = sequence.num_known - sequence.num_scheduled
        count = 1
        if todo > 1 or self.is_careful or self.turn is not ANY or request.request.spans:
            reason, count = self._cut(request, sequence, todo)
            if reason is not None:
                self.held[reason] = self.held.get(reason, 0) + 1
                self.count_rest(sequence)
                return False
        has_forked = False
        if make_room(self, request, sequence, sequence.num_scheduled + count):
            has_forked = self.enter(sequence, count)
            request.num_bypassed = 0
            if sequence.num_scheduled < sequence.num_committed:
                left = sequence.num_committed - sequence.num_scheduled
                self.event(EventKind.CHUNKED, request, num_tokens=count, needed=left)
                self.count_rest(sequence)
        elif request.status == Status.RUNNING:
            self.count_rest(sequence)
        return has_forked

    def _cut(self, request: RequestState, sequence: Sequence, todo: int) -> tuple[WaitReason | None, int]:
        """Cut a grant to what may run in this step; or say what it waits for."""
        start, count = sequence.num_scheduled, self.chunk(todo)
        if count < todo and not self.state.limits.chunked_prefill and todo <= self.tokens.limit:
            return WaitReason.TOKEN_BUDGET, 0
        is_decoding = request.is_decoding or (todo == 1 and sequence.num_known > sequence.num_prompt)
        refusal = self.turn.refusal(request, is_decoding)
        if refusal is not None:
            return refusal, 0
        if self.is_careful and not self.reads.fits(self.reads.cost(start, count)):
            request.num_bypassed += 1
            return WaitReason.KV_READ_BUDGET, 0
        if request.request.spans:
            encoder, spans = self.state.encoder, request.request.spans
            count = encoder.grant(request.name, sequence.slot, spans, start, count)
            if not count:
                return WaitReason.ENCODER_BUDGET, 0
        return None, count

    def chunk(self, todo: int) -> int:
        """Tokens to grant of `todo`: the budget's rest, under the threshold for long prompts."""
        threshold = self.state.limits.long_prefill_threshold
        if threshold and self.state.limits.chunked_prefill and len(self.state.requests) > 1:
            todo = min(todo, threshold)
        return min(todo, self.tokens.left)

    def enter(self, sequence: Sequence, count: int) -> bool:
        """Make a row of a sequence: blocks, budgets, columns, and blocks that others may now match.

        True when the other choices of its request got rows too.
        """
        state, request = self.state, sequence.request
        start = sequence.num_scheduled
        end = start + count
        if start >= sequence.block_end or end > sequence.capacity:
            state.cache.slide(sequence)
            state.cache.extend(sequence, end)
        self.tokens.take(count)
        if self.is_careful:
            self.reads.take(self.reads.cost(start, count))
        self.rows.append(sequence)
        self.starts.append(start)
        self.counts.append(count)
        flags = self._flags(sequence, start, end)
        self.flags.append(flags)
        sequence.num_scheduled = end
        sequence.in_flight += 1
        known = min(end, sequence.num_committed)
        if known >= (sequence.num_published + 1) * state.limits.block_size and start < known:
            self.published += state.cache.publish(sequence, known, state.step)
        if request.beams is not None:
            sequence.block_end = 0  # it takes the careful way each time
        if request.has_several and request.beams is None and flags & ROW_SAMPLE and end == sequence.num_prompt:
            return self.choices.fork(request, sequence)
        return False

    def _flags(self, sequence: Sequence, start: int, end: int) -> int:
        """What the row of positions [start, end) gives and takes; the token it samples becomes pending."""
        request = sequence.request
        flag = ROW_CARRY if start >= sequence.num_committed else 0
        if (
            request.scores
            and request.num_scored < sequence.num_prompt
            and start < sequence.num_prompt - 1
            and end >= request.num_scored
        ):
            flag |= ROW_SCORE
        if end == sequence.num_known:
            if not request.is_decoding and is_caught_up(request, sequence, self.state.cache.sharing):
                self.state.start_decoding(request)
            if request.pools and end == sequence.num_prompt and sequence is request.sequences[0]:  # the prompt's, once
                flag |= ROW_POOL
            if request.samples:
                flag |= ROW_SAMPLE if request.beams is None else ROW_SAMPLE | ROW_BEAM
                sequence.num_pending += 1
        return flag

    def count_rest(self, sequence: Sequence) -> None:
        """Keep a place and blocks for a sequence that will still need them for tokens it knows already."""
        if sequence.num_scheduled < sequence.num_committed:
            if self.state.partial_budget.left:
                self.state.partial_budget.take(1)
            self.count_outstanding(sequence)

    def count_outstanding(self, sequence: Sequence) -> None:
        """Keep blocks for the known tokens of a sequence from those who might be let in."""
        cache = self.state.cache
        held, peaks = cache.held_blocks(sequence), cache.peak_blocks(sequence.num_known)
        self.keep(sequence.request, [max(0, peak - have) for peak, have in zip(peaks, held, strict=True)])

    def keep(self, request: RequestState, blocks: list[int]) -> None:
        """Keep so many blocks of each group for a running request."""
        mine = self.kept.setdefault(request.name, [0] * len(blocks))
        for group, count in enumerate(blocks):
            self.outstanding[group] += count
            mine[group] += count

    def announce(self, sequence: Sequence) -> None:
        """Tell the executor a sequence in full; its table goes with the edits."""
        asked = sequence.request.request
        ids = sequence.token_ids[:] if sequence.token_ids is not None else None
        sequence.is_entered = True
        self.new.append(
            NewSequence(
                sequence.slot,
                asked.request_id,
                sequence.choice,
                sequence.num_prompt,
                ids,
                asked.params,
                asked.eos_token_ids,
                asked.adapter_id,
            )
        )

    def count_waits(self, reason: WaitReason, count: int) -> None:
        """Enter `count` requests that wait for `reason`."""
        if count:
            self.waits[reason] = self.waits.get(reason, 0) + count

    def event(self, kind: EventKind, request: RequestState, **fields: Any) -> None:
        """Log a decision of this step."""
        self.state.tell(kind, request, self.now, **fields)

    # --- the plan -----------------------------------------------------------------------------------

    def finish(self) -> StepPlan:
        """Turn the grants into columns, hand over pending effects, and enter the plan in flight."""
        state, effects = self.state, self.effects
        slots = array("i", [sequence.slot for sequence in self.rows])
        starts, counts = array("i", self.starts), array("i", self.counts)
        freed_slots, state.freed_slots = state.freed_slots, array("i")
        id_edits, state.id_edits = state.id_edits, array("i")
        plan = StepPlan(
            state.step,
            self.now,
            slots,
            starts,
            counts,
            array("i", self.flags),
            self.num_drafts,
            self.draft_ids,
            edits=effects.edits,
            copies=effects.copies,
            swap_outs=effects.swap_outs,
            host_loads=effects.host_loads,
            freed_slots=freed_slots,
            id_edits=id_edits,
            encode_jobs=state.encoder.take_jobs(),
            encoder_frees=state.encoder.take_frees(),
            new_sequences=tuple(self.new),
            finished_ids=tuple(state.finished_ids),
            preempted_ids=tuple(state.preempted_ids),
            num_query_tokens=sum(counts),
            num_kv_read=self._count_reads(starts, counts),
            is_fast_path=is_fast(starts, counts, state.limits),
            wake_at=state.deadlines.next(),
        )
        state.cache.end_plan()
        swapped, state.swapped_now = state.swapped_now, []
        if plan.is_empty:
            plan.waits = self._reasons()
        else:
            if state.limits.find_shared_prefixes:
                plan.shared_prefixes, plan.num_common_blocks = shared_prefixes(self.rows, counts)
            state.finished_ids = []
            state.preempted_ids = []
            state.totals.num_copies += len(effects.copies) // 3
            state.flight.append(Flight(plan, self.rows, self.published, effects.saved, swapped))
            state.step += 1
        plan.events = tuple(state.events)
        state.events = []
        return plan

    def _count_reads(self, starts: array[int], counts: array[int]) -> int:
        if not self.is_careful and 0 not in counts and self.reads.is_plain:
            return sum(starts) + sum(counts)
        return sum(map(self.reads.cost, starts, counts))

    def _reasons(self) -> tuple[tuple[WaitReason, int], ...]:
        named = sum(self.waits.values())
        behind = len(self.state.waiting) - named
        if behind > 0:
            self.count_waits(WaitReason.BEHIND, behind)
        for reason, count in self.held.items():
            self.count_waits(reason, count)
        if not self.waits:
            return ((WaitReason.DRAINING if self.state.is_draining else WaitReason.IDLE, 0),)
        return tuple(self.waits.items())
