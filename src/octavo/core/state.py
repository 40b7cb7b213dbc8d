"""The scheduler's whole state between two calls, and the operations that keep the state consistent.

Owns: requests, queues, cache, slots, plans in flight, and the event log; the methods that move requests between queues
or end them. Does not: make plans (step) or read their results (commit).
Invariants: a request waits, runs or has finished, and is in exactly one queue or in none once finished. A freed block
or slot has no owner. (tests/core/invariants.py checks these invariants and others.)
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from octavo.core.composition import Composition
from octavo.core.encoder import EncoderCache
from octavo.core.gates import AdapterSlots, Gate
from octavo.core.kv.cache import KVCache
from octavo.core.kv.effects import Effects, without_slots
from octavo.core.limits import GroupKind, Limits
from octavo.core.plan import Event, EventKind, StepPlan, WaitReason, int_column
from octavo.core.policy import PolicyGuard, create_policy
from octavo.core.request import FinishError, FinishReason
from octavo.core.request_state import Deadlines, RequestState, RunningList, Sequence, Status, WaitingQueue

UNBOUNDED = 2**62
_NAMES = {reason: reason.name.lower() for reason in FinishReason}


@dataclass(slots=True)
class Flight:
    """A plan in flight: the sequences of its rows, and what must be undone if it fails.

    `releases` are (group, block) to free when this plan is committed: it was the newest plan that could still use them.
    """

    plan: StepPlan
    rows: list[Sequence]
    effects: Effects
    releases: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class Updates:
    """Changes since the last plan that the next plan sends to the executor, apart from its rows and blocks.

    `sequences` are forked beams that got a slot and are sent in full. The columns are those of StepPlan.
    """

    freed_slots: array[int] = field(default_factory=int_column)
    sequences: list[Sequence] = field(default_factory=list)
    id_edits: array[int] = field(default_factory=int_column)
    table_edits: array[int] = field(default_factory=int_column)
    finished_ids: list[str] = field(default_factory=list)
    preempted_ids: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Totals:
    """Counters since the start."""

    num_steps: int = 0
    num_failed_steps: int = 0
    num_computed_tokens: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_drafted_rows: int = 0  # rows with drafts that were verified
    num_drafted_tokens: int = 0  # drafts that were verified
    num_accepted_tokens: int = 0  # verified drafts that became output tokens
    num_preemptions: int = 0  # preemptions for lack of room
    num_requeued: int = 0  # requests that wait again after a failed row or step
    num_admitted: int = 0
    num_swapped_out_tokens: int = 0
    num_swapped_in_tokens: int = 0
    num_host_hit_tokens: int = 0
    num_forks: int = 0
    num_copies: int = 0
    num_adopted_blocks: int = 0  # full blocks replaced by an equal block that was cached before
    num_bypasses: int = 0
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_NAMES.values(), 0))


class State:
    """The scheduler's whole state."""

    __slots__ = (
        "adapters", "cache", "composition", "counts_blocks", "deadlines", "encoder", "ended", "events", "flight",
        "free_slots", "gates", "headroom", "is_draining", "is_paused", "is_plain", "kept", "limits", "max_step_tokens",
        "next_order", "num_swapped", "overdue", "policy", "read_window", "requests", "running", "slot_owner", "step",
        "totals", "updates", "waiting",
    )  # fmt: skip

    def __init__(self, limits: Limits, counts_blocks: bool = False) -> None:
        self.limits = limits
        self.is_plain = _is_plain(limits)  # no optional feature can act in a step
        self.counts_blocks = counts_blocks and self.is_plain and len(limits.groups) == 1
        self.policy = PolicyGuard(create_policy(limits.policy, limits))
        self.cache = KVCache(limits)
        self.requests: dict[str, RequestState] = {}
        self.kept: dict[str, list[Sequence]] = {}  # of ended requests whose blocks are held until release_kv
        self.waiting = WaitingQueue(self.policy.lane_key)
        self.running = RunningList()
        self.deadlines = Deadlines()
        self.max_step_tokens = limits.max_batch_tokens  # reduced after a step ran out of memory
        has_full_group = any(group.kind == GroupKind.FULL for group in limits.groups)
        # The most tokens of context that a row reads before its own tokens.
        self.read_window = UNBOUNDED if has_full_group else max(group.window for group in limits.groups) - 1
        share = self.policy.headroom if limits.headroom is None else limits.headroom
        # Blocks of each group that an admission leaves free (S05); 0.07 * 100 is 7.000000000000001.
        self.headroom = [ceil(share * count - 1e-9) for count in limits.num_blocks]
        self.encoder = EncoderCache(limits.encoder_budget, limits.encoder_cache)
        self.adapters = AdapterSlots(limits.adapter_slots)
        self.gates: tuple[Gate, ...] = (self.adapters,) if limits.adapter_slots else ()
        is_mixed = limits.composition == "mixed" and not limits.separate_modalities
        self.composition = None if is_mixed else Composition(limits)
        self.flight: deque[Flight] = deque()
        self.overdue: list[RequestState] = []  # bypassed max_bypass times: no other is admitted before them (S10)
        self.free_slots = list(range(limits.max_sequences - 1, -1, -1))
        self.slot_owner: list[Sequence | None] = [None] * limits.max_sequences
        self.updates = Updates()
        self.num_swapped = 0  # requests whose KV is on the host
        self.ended: list[RequestState] = []  # ended requests of which the policy has not been notified
        self.events: list[Event] = []
        self.totals = Totals()
        self.step = 0
        self.next_order = 0
        self.is_paused = False
        self.is_draining = False

    @property
    def num_sequences(self) -> int:
        """The number of slots in use: one per running sequence, and one per beam that does not exist yet."""
        return self.limits.max_sequences - len(self.free_slots)

    def log(self, kind: EventKind, request: RequestState, now: float, **fields: Any) -> None:
        """Add a decision to the event log, which the next plan or commit returns."""
        self.events.append(Event(kind, request.name, now, self.step, **fields))

    def report_ended(self) -> None:
        """Notify the policy of ended requests. Call this after notifying it of their last tokens."""
        for request in self.ended:
            self.policy.notify("finished", request)
            request.sequences = []  # each refers to its request; without this cycle both are freed at once
        self.ended.clear()

    # --- ends ----------------------------------------------------------------------------------------

    def finish(
        self,
        request: RequestState,
        now: float,
        reason: FinishReason,
        stop_id: int | None = None,
        error: FinishError | None = None,
    ) -> None:
        """End a request: free its slots and blocks at once, and log its FINISHED event."""
        was_scheduled = request.first_scheduled_at is not None
        if request.status == Status.RUNNING:
            if request.keeps_kv and reason in (FinishReason.STOP, FinishReason.LENGTH):
                self.kept[request.name] = request.sequences[:]
            self._leave_running(request)
        else:
            self.waiting.remove(request)
            self.unswap(request)
        request.status = Status.FINISHED
        if was_scheduled:
            self.updates.finished_ids.append(request.name)
        outputs = request.num_ended_outputs
        if request.beams is None:  # a beam search outputs nothing before it ends
            outputs += sum(sequence.num_outputs for sequence in request.sequences)
        del self.requests[request.name]
        self.totals.finished[_NAMES[reason]] += 1
        self.ended.append(request)
        self.log(
            EventKind.FINISHED, request, now, num_tokens=outputs, cached_tokens=request.cached_tokens,
            finish_reason=reason, stop_token_id=stop_id, error=error, choice=request.sequences[0].choice,
        )  # fmt: skip

    def end_choice(self, sequence: Sequence, now: float, reason: FinishReason, stop_id: int | None = None) -> None:
        """End one choice, whose rows in flight become void; ending the last choice ends the request."""
        request, outputs = sequence.request, sequence.num_outputs
        if len(request.sequences) == 1:
            self.finish(request, now, reason, stop_id)
            return
        self.drop_sequence(sequence)
        request.num_ended_outputs += outputs
        self.log(
            EventKind.CHOICE_FINISHED, request, now, num_tokens=outputs, finish_reason=reason, stop_token_id=stop_id,
            choice=sequence.choice,
        )  # fmt: skip

    def drop_sequence(self, sequence: Sequence, keep_slot: bool = False) -> None:
        """Remove a sequence from its request: free its blocks, and void its rows in flight.

        With `keep_slot` (beam search) the request keeps the slot for another beam.
        """
        request = sequence.request
        request.sequences.remove(sequence)
        sequence.stale = sequence.in_flight
        sequence.num_pending = 0
        self.cache.release(sequence)
        if request.request.spans:
            self.encoder.release(request.name)  # the other choices need their outputs again in later plans
        slot = sequence.slot
        if slot >= 0:
            self._leave_slot(sequence)
            if keep_slot:
                request.spare_slots.append(slot)
            else:
                self.free_slots.append(slot)

    # --- running -------------------------------------------------------------------------------------

    def enter_running(self, request: RequestState, now: float) -> EventKind:
        """Move a waiting request to the running list, with slots; return ADMITTED, or RESUMED if it has run before."""
        self.waiting.remove(request)
        request.status = Status.RUNNING
        request.forget_waiting()
        for gate in self.gates:
            gate.take(request)
        slots = self.free_slots[: -request.num_slots - 1 : -1]
        del self.free_slots[-request.num_slots :]
        for sequence, slot in zip(request.sequences, slots, strict=False):
            sequence.slot = slot
            self.slot_owner[slot] = sequence
        request.spare_slots = slots[len(request.sequences) :]
        request.rank = self.policy.rank(request)
        self.running.add(request)
        if request.first_scheduled_at is not None:
            return EventKind.RESUMED
        request.first_scheduled_at = now
        self.totals.num_admitted += 1
        self.totals.num_prompt_tokens += request.request.num_prompt_tokens
        return EventKind.ADMITTED

    def set_decoding(self, request: RequestState, is_decoding: bool) -> None:
        """Set whether a running request decodes (all its known tokens are scheduled), and update its rank."""
        request.is_decoding = is_decoding
        rank = self.policy.rank(request)
        if rank != request.rank:
            self.running.remove(request)
            request.rank = rank
            self.running.add(request)

    def preempt(
        self, request: RequestState, now: float, by: str | None, reason: WaitReason | None, may_swap: bool = False
    ) -> None:
        """Move a running request back to the waiting queue, at its rank; it keeps its outputs.

        `by` is the request that needs the room, or None after a failed row or step, which does not count as a
        preemption. With `may_swap`, its KV is moved to the host if the configuration and the host tier allow it.
        """
        num_tokens = sum(sequence.num_scheduled for sequence in request.sequences)
        is_swapped = may_swap and self._swaps(request) and self.cache.swap_out(request.sequences)
        self._leave_running(request)
        request.status = Status.WAITING
        request.is_decoding = False
        request.is_swapped = is_swapped
        request.num_remote, request.is_receiving = 0, False  # what has arrived is lost, and is computed here
        request.num_preemptions += by is not None
        request.forget_waiting()
        for sequence in request.sequences:
            sequence.candidates = None
            if not request.can_run_ahead:  # rows in flight are void: their positions will be sampled again
                sequence.stale = sequence.in_flight
                sequence.num_pending = 0
        request.rank = self.policy.rank(request)
        self.waiting.add(request)
        self.updates.preempted_ids.append(request.name)
        self.totals.num_preemptions += by is not None
        self.totals.num_requeued += by is None
        self.policy.notify("preempted", request)
        recompute = 0 if is_swapped else num_tokens
        self.log(EventKind.PREEMPTED, request, now, reason=reason, num_tokens=recompute, by=by)
        if is_swapped:
            self.num_swapped += 1
            self.cache.effects.swapped_requests.append(request)
            self.totals.num_swapped_out_tokens += num_tokens
            self.log(EventKind.SWAPPED, request, now, num_tokens=num_tokens, by=by)

    def swap_in(self, request: RequestState) -> list[Sequence]:
        """Move a running request's KV from the host to the device, which must have room; return its sequences."""
        sequences = [sequence for sequence in request.sequences if sequence.host_tables]
        self.cache.swap_in(sequences)
        request.is_swapped = False
        self.num_swapped -= 1
        self.totals.num_swapped_in_tokens += sum(sequence.num_scheduled for sequence in sequences)
        return sequences

    def unswap(self, request: RequestState) -> None:
        """Drop a request's host blocks, because it will be recomputed or has ended."""
        if request.is_swapped:
            request.is_swapped = False
            self.num_swapped -= 1
            for sequence in request.sequences:
                self.cache.release(sequence)

    def defer_release(self, group: int, block: int) -> None:
        """Release a block once the newest plan in flight is committed, because that plan may still use the block."""
        if self.flight:
            self.flight[-1].releases.append((group, block))
        else:
            self.cache.pools[group].release(block)

    def release_deferred(self, flight: Flight) -> None:
        """Release the blocks whose release waited for this plan."""
        for group, block in flight.releases:
            self.cache.pools[group].release(block)
        flight.releases = []

    def _swaps(self, request: RequestState) -> bool:
        """Return True if a preemption of this request should swap (S09).

        False if a row in flight is void, has drafts, or has given candidates to some beams only. False also if a choice
        has not entered: blocks on the host have no keys, so the choice would not find the shared blocks.
        """
        mode = self.limits.preemption
        if mode == "recompute" or (mode == "auto" and len(request.sequences) < 2):
            return False
        sequences = request.sequences
        if any(one.stale or one.num_drafts or one.candidates is not None or not one.is_entered for one in sequences):
            return False
        return request.can_run_ahead or not request.in_flight

    def _leave_running(self, request: RequestState) -> None:
        self.running.remove(request)
        for gate in self.gates:
            gate.give_back(request)
        for sequence in request.sequences:
            if sequence.capacity and request.name not in self.kept:  # not swapped out just now
                self.cache.release(sequence)
            self.free_slots.append(sequence.slot)
            self._leave_slot(sequence)
        self.free_slots.extend(request.spare_slots)
        request.spare_slots = []
        if request.request.spans:
            self.encoder.release(request.name)

    def _leave_slot(self, sequence: Sequence) -> None:
        """Free a sequence's slot with the next plan, and drop its updates that were not sent yet."""
        slot, updates = sequence.slot, self.updates
        updates.freed_slots.append(slot)
        self.slot_owner[slot] = None
        sequence.slot = -1
        sequence.is_entered = False
        if sequence in updates.sequences:
            updates.sequences.remove(sequence)
        if updates.id_edits or updates.table_edits:
            freed = frozenset((slot,))
            updates.id_edits = without_slots(updates.id_edits, 3, freed)
            updates.table_edits = without_slots(updates.table_edits, 4, freed)


def _is_plain(limits: Limits) -> bool:
    """Return True if no optional feature is configured that acts in steps."""
    return not (
        limits.max_kv_read
        or limits.max_draft_tokens
        or limits.num_stages > 1
        or limits.find_shared_prefixes
        or limits.encoder_budget
        or any(group.window for group in limits.groups)
        or any(limits.host_blocks)
        or limits.composition != "mixed"
        or limits.separate_modalities
    )
