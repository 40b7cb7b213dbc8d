"""Promises that every plan must keep, seen from outside: budgets, caps, separation, order, bounds.

Owns: PlanChecks. Does not: look into the scheduler, beyond the order its policy gives the waiting and the running.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from tests.core.plan_mirror import Mirror
from tests.fake_pool import quads, triples

from octavo.core.plan import ROW_FORK, EventKind, StepPlan, WaitReason
from octavo.core.policy import POLICIES
from octavo.core.request_state import Status

if TYPE_CHECKING:
    from tests.core.harness import Run

NO_LACK = (WaitReason.MODALITY, WaitReason.COMPOSITION, WaitReason.UNCOMMITTED)  # not for want of room
Rank = tuple[tuple[float, ...], int]


class PlanChecks:
    """Checks of one run's plans, in order."""

    def __init__(self, run: Run) -> None:
        self.run, self.sizes = run, run.limits
        self.mirror = Mirror(run.limits, lambda name: len(run.records[name].token_ids))
        self.num_prefills = 0  # plans in a row that were all prefill
        self.num_bypasses = 0  # the most that any request saw
        policy = POLICIES[run.limits.policy]
        self.has_sane_policy = getattr(policy, "is_sane", True)
        self.has_fixed_order = self.has_sane_policy and policy.lookahead == 1
        self.victim_ranks: dict[str, Rank] = {}
        self.places: dict[str, tuple[str, Rank]] = {}  # the order within a line does not change during a plan
        self.num_passed: dict[str, int] = {}

    def before(self) -> None:
        """Note the order before a plan is made."""
        state = self.run.scheduler._state
        policy = state.policy
        self.num_passed = {name: entry.num_bypassed for name, entry in state.requests.items()}
        if self.has_sane_policy:
            self.victim_ranks = {entry.name: policy.victim_rank(entry) for entry in state.requests.values()}
            self.places = {
                entry.name: (entry.lane, entry.rank)
                for entry in state.requests.values()
                if entry.status == Status.WAITING
            }

    def check(self, plan: StepPlan, is_whole: bool) -> None:
        """Check a plan and take it in."""
        self.check_columns(plan)
        self.mirror.apply(plan)
        self.check_drafts(plan)
        self.check_reads(plan)
        self.check_company(plan, is_whole)
        self.check_partials(plan, is_whole)
        self.check_headroom(plan)
        self.check_victims(plan)
        self.check_bypasses(plan, is_whole)
        self.mirror.advance(plan)

    def check_columns(self, plan: StepPlan) -> None:
        """Totals, caps, distinct destinations, and the fast-path flag."""
        sizes = self.sizes
        granted, most = sum(plan.counts), self.run.max_step
        assert granted == plan.num_query_tokens <= most, f"{granted} tokens are granted, a step may have {most}"
        assert len(set(plan.slots)) == plan.num_rows <= sizes.max_sequences
        assert all(row.count >= 1 or row.flags & ROW_FORK for row in plan.rows())
        for column, counts in (
            (plan.copies, sizes.num_blocks),
            (plan.host_loads, sizes.num_blocks),
            (plan.swap_outs, sizes.host_blocks),
        ):
            entries = list(triples(column))
            assert len({(group, to) for group, _, to in entries}) == len(entries), "a destination comes twice"
            assert all(0 <= to < counts[group] for group, _, to in entries)
        assert not (plan.swap_outs and plan.host_loads), "swap-outs and host loads in one plan"
        assert len({new.slot for new in plan.new_sequences}) == len(plan.new_sequences)
        assert all(-1 <= block < sizes.num_blocks[group] for _, group, _, block in quads(plan.edits))
        if plan.slots:
            reach = sizes.max_blocks_per_sequence * sizes.block_size or sizes.max_model_len + 1
            is_fast = all(row.count == 1 and row.start < reach for row in plan.rows())
            assert plan.is_fast_path == is_fast

    def check_drafts(self, plan: StepPlan) -> None:
        """P07: how many in a row and in what company, and no draw behind the last one that its request may have."""
        if not plan.num_drafts:
            return
        assert plan.num_rows == len(plan.num_drafts) <= self.sizes.max_draft_rows
        assert sum(plan.num_drafts) == len(plan.draft_token_ids) > 0
        for row in plan.rows():
            if row.drafts:
                record = self.run.records[self.mirror.seats[row.slot].request_id]
                limit = record.request.num_prompt_tokens + record.num_allowed(self.sizes)
                assert len(row.drafts) <= self.sizes.max_draft_tokens and not record.request.params.beam_width
                assert row.start + row.count < limit, f"drafts up to {row.start + row.count}, the limit is {limit}"

    def check_reads(self, plan: StepPlan) -> None:
        """S04: the context read, clipped to the window of a model that has only windows; one row alone may exceed."""
        windows = [group.window for group in self.sizes.groups]
        reach = max(windows) - 1 if all(windows) else self.sizes.max_model_len + 1
        read = sum(min(row.start, reach) + row.count for row in plan.rows() if row.count)
        assert plan.num_kv_read == read, f"the plan says that {plan.num_kv_read} tokens are read, {read} are"
        num_reading = sum(1 for count in plan.counts if count)
        if self.sizes.max_kv_read and num_reading > 1:
            assert read <= self.sizes.max_kv_read, f"{read} tokens of context are read by {num_reading} rows"

    def check_company(self, plan: StepPlan, is_whole: bool) -> None:
        """S12, S13 and adapters: who may be in one step with whom."""
        run, seats = self.run, self.mirror.seats
        names = list(dict.fromkeys(seats[slot].request_id for slot in plan.slots))
        asked = [run.records[name].request for name in names]
        if self.sizes.separate_modalities:
            assert len({bool(request.spans) for request in asked}) <= 1, "text and media in one step"
        adapters = {request.adapter_id for request in asked if request.adapter_id}
        assert len(adapters) <= self.sizes.adapter_slots, f"adapters {sorted(adapters)} in one step"
        if self.sizes.composition != "separate" or not plan.slots:
            return
        is_decoding = {
            name: all(seat.is_caught_up and seat.end for seat in self.mirror.seats_of(name)) for name in names
        }
        decodes = prefills = False
        for row in plan.rows():
            seat = seats[row.slot]
            decodes |= is_decoding[seat.request_id] and bool(row.count)
            prefills |= bool(row.count) and row.start + row.count < seat.known
        assert not (decodes and prefills), "prefill and decode in one step"
        others = [seat for seat in seats.values() if seat.request_id not in names and seat.end and seat.is_caught_up]
        self.num_prefills = self.num_prefills + 1 if prefills and others else 0
        # A plan of some requests alone may have no decodes to give a turn to; the next whole one must.
        if is_whole and run.depth == 1 and not self.sizes.max_kv_read and not self.sizes.separate_modalities:
            assert self.num_prefills <= self.sizes.max_prefill_run, f"{self.num_prefills} prefill steps in a row"

    def check_partials(self, plan: StepPlan, is_whole: bool) -> None:
        """S02: requests whose prompts are cut short in one step."""
        cap = self.sizes.max_partial_prefills
        if cap and is_whole and plan.new_sequences:
            seats = self.mirror.seats
            rows = [(seats[row.slot], row) for row in plan.rows() if row.count]
            cut = {seat.request_id for seat, row in rows if row.start + row.count < seat.known}
            fresh = {new.request_id for new in plan.new_sequences}
            assert len(cut) <= cap or not fresh & cut, f"{sorted(cut)} are partial prefills, the cap is {cap}"

    def check_headroom(self, plan: StepPlan) -> None:
        """S05: an admission leaves blocks free, but for an empty batch, or one that was passed over too often."""
        admitted = [event.request_id for event in plan.events if _is_admission(event.kind)]
        running = {seat.request_id for seat in self.mirror.seats.values()}
        if not admitted or not running.difference(admitted[-1:]):
            return
        if any(self.num_passed.get(name, 0) >= self.sizes.max_bypass for name in admitted):
            return
        share = self.sizes.headroom
        if share is None:
            share = POLICIES[self.sizes.policy].headroom
        for group, free in enumerate(self.mirror.num_free()):
            wanted = ceil(share * self.sizes.num_blocks[group] - 1e-9)
            assert free >= wanted, f"group {group}: {free} blocks free after admitting {admitted}, headroom {wanted}"

    def check_victims(self, plan: StepPlan) -> None:
        """S06, S07: nobody is preempted for work of later rank, and whoever goes is the last."""
        # A policy of what tenants were given may rank anew within a plan: a preemption is one of the things it counts.
        if not self.has_sane_policy or POLICIES[self.sizes.policy].tracks_service:
            return
        for event in plan.events:
            if event.kind == EventKind.PREEMPTED and event.by is not None and event.by != event.request_id:
                by, victim = self.victim_ranks[event.by], self.victim_ranks[event.request_id]
                was_passed = self.num_passed.get(event.by, 0) >= self.sizes.max_bypass
                assert by <= victim or was_passed, f"preempted for later work: {event}"

    def check_bypasses(self, plan: StepPlan, is_whole: bool) -> None:
        """S10: how often somebody who lacked room saw a later one let in."""
        records = self.run.records
        for event in plan.events:
            if event.kind == EventKind.DEFERRED:
                records[event.request_id].lacks_room = event.reason not in NO_LACK
            elif _is_admission(event.kind) or event.kind == EventKind.PREEMPTED:
                records[event.request_id].num_bypassed, records[event.request_id].lacks_room = 0, False
        if not is_whole or not self.has_fixed_order:
            return
        latest: dict[str, Rank] = {}
        for event in plan.events:
            goes_first = self.num_passed.get(event.request_id, 0) >= self.sizes.max_bypass  # that passes nobody unduly
            if _is_admission(event.kind) and event.request_id in self.places and not goes_first:
                lane, rank = self.places[event.request_id]
                latest[lane] = max(latest.get(lane, rank), rank)
        for name, (lane, rank) in self.places.items() if latest else ():
            record = records[name]
            was_passed = lane in latest and rank < latest[lane] and record.lacks_room
            if was_passed and not record.is_running and record.finished is None:
                record.num_bypassed += 1
                self.num_bypasses = max(self.num_bypasses, record.num_bypassed)
                assert record.num_bypassed <= self.sizes.max_bypass, f"{name} was bypassed {record.num_bypassed} times"


def _is_admission(kind: EventKind) -> bool:
    return kind in (EventKind.ADMITTED, EventKind.RESUMED)
