"""Drives a scheduler and a fake executor as the loop does, and checks every promise that shows from outside.

Owns: Run (the loop's verbs with a clock and records), checks of the events and of the end. Does not: check plans
(see plan_checks) or texts (see records), or look into the scheduler beyond its public verbs and tests.core.invariants.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tests.core import invariants
from tests.core.plan_checks import PlanChecks
from tests.core.records import ENDED_EARLY, Record
from tests.fake_model import FakeExecutor, Faults, InjectedError

from octavo.core.limits import Limits
from octavo.core.plan import Event, EventKind, Events, StepFailure, StepPlan, WaitReason
from octavo.core.request import FinishReason, Request, SamplingParams
from octavo.core.scheduler import Scheduler

__all__ = ["ENDED_EARLY", "EOS", "Record", "Run", "limits", "prompt"]

EOS = 2


def limits(**changes: Any) -> Limits:
    """A small engine: 16 blocks of 4, room for 64-token sequences."""
    fields = {
        "block_size": 4,
        "num_blocks": (16,),
        "max_model_len": 64,
        "vocab_size": 97,
        "max_batch_tokens": 32,
        "max_sequences": 8,
        "headroom": 0.0,
    }
    fields.update(changes)
    if isinstance(fields["num_blocks"], int):
        fields["num_blocks"] = (fields["num_blocks"],)
    return Limits(**fields)


def prompt(length: int, seed: int = 0, vocab_size: int = 97) -> list[int]:
    """A prompt whose ids depend on the seed from the first on; never holds EOS."""
    rng = random.Random(seed * 1009 + 7)
    return [rng.randrange(3, vocab_size) for _ in range(length)]


class Run:
    """One scheduler with one fake executor; `depth` plans in flight; `now` is the clock.

    `check_every` says at how many plans and commits the full invariants are looked at; on events always.
    """

    def __init__(
        self,
        sizes: Limits | None = None,
        *,
        depth: int = 1,
        faults: Faults | None = None,
        check: bool = True,
        check_every: int = 1,
        **executor: Any,
    ) -> None:
        self.limits = sizes or limits()
        self.depth, self.check, self.now = depth, check, 0.0
        self.executor_options = {"faults": faults, "lazy": depth > 1, **executor}
        self.scheduler, self.executor = self.make_engine()
        self.flight: deque[tuple[StepPlan, object]] = deque()
        self.records: dict[str, Record] = {}
        self.slot_owner: dict[int, str] = {}
        self.plans: list[StepPlan] = []
        self.num_scheduled = 0
        self.num_failures = 0
        self.check_every, self.num_unchecked = check_every, 0
        self.is_paused = False
        self.checks = PlanChecks(self)
        self.is_ordered = True  # whether admissions must follow arrival strictly
        self.max_step = self.limits.max_batch_tokens  # tokens that a step may have now
        self.num_epochs = 1
        self.first_plan = 0  # of this epoch, in `plans`

    def make_engine(self) -> tuple[Scheduler, FakeExecutor]:
        """A new scheduler and a new executor."""
        executor = FakeExecutor(self.limits.groups, vocab_size=self.limits.vocab_size, **self.executor_options)
        executor.make_pool(self.limits.block_size, self.limits.num_blocks, self.limits.host_blocks)
        executor.encoder.budget = self.limits.encoder_budget
        executor.encoder.room = self.limits.encoder_cache
        executor.names_all_prefixes = self.limits.find_shared_prefixes
        return Scheduler(self.limits), executor

    # -- verbs

    def admit(
        self, prompt_ids: Sequence[int] | int, max_tokens: int | None = 8, request_id: str | None = None, **fields: Any
    ) -> Record:
        """Admit a prompt (or a length) with sampling fields and request fields mixed."""
        params = {name: fields.pop(name) for name in list(fields) if name in SamplingParams.__slots__}
        name = request_id or f"r{len(self.records)}"
        ids = None if isinstance(prompt_ids, int) else array("i", prompt_ids)
        fields.setdefault("arrival", self.now)
        if isinstance(prompt_ids, int):
            fields["num_prompt_tokens"] = prompt_ids
        request = Request(name, ids, SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **params}), **fields)
        admission = self.scheduler.admit(request, self.now)
        record = Record(request, len(self.records), admission.max_tokens, admission.capped)
        self.records[name] = record
        self.executor.encoder.spans[name] = request.spans
        return record

    def plan(self, only: Iterable[str] | None = None) -> StepPlan:
        """Make a plan, check it, and take in its events."""
        if self.check:
            self.checks.before()
        plan = self.scheduler.plan(self.now, None if only is None else frozenset(only))
        self.absorb(plan.events)
        self.plans.append(plan)
        if self.check:
            self.checks.check(plan, only is None)
            self.check_plan(plan, only is None)
            self.check_invariants(any(event.kind == EventKind.PREEMPTED for event in plan.events))
        for new in plan.new_sequences:
            self.slot_owner[new.slot] = new.request_id
        return plan

    def submit(self, plan: StepPlan) -> None:
        """Put a plan in flight; when the executor refuses it, commit the earlier ones, then its failure."""
        try:
            ticket = self.executor.submit(plan)
        except InjectedError as fault:
            num_failures = self.num_failures
            while self.flight:
                self.commit()
            if num_failures == self.num_failures:
                self.fail(plan, str(fault))
            return
        self.num_scheduled += sum(plan.counts)
        self.flight.append((plan, ticket))

    def commit(self) -> Events:
        """Collect the oldest plan and commit it; a fault becomes a failure of it and all later ones."""
        plan, ticket = self.flight.popleft()
        try:
            result = self.executor.collect(ticket)
        except InjectedError as fault:
            return self.fail(plan, str(fault))
        return self.take(self.scheduler.commit(plan, result, self.now))

    def die(self) -> None:
        """The engine is gone with all it knew. A new epoch takes over what is open, as the ledger has it."""
        self.num_epochs, self.first_plan = self.num_epochs + 1, len(self.plans)
        self.executor_options["faults"] = self.executor.faults
        self.scheduler, self.executor = self.make_engine()
        self.flight.clear()
        self.slot_owner.clear()
        self.checks = PlanChecks(self)
        self.max_step = self.limits.max_batch_tokens
        for name, record in self.records.items():
            if record.finished is None:
                self.scheduler.admit(record.resume(), self.now)
                self.executor.encoder.spans[name] = record.request.spans
        # Whose cancellation was under way is not forgotten: its end may not have come through.
        self.scheduler.cancel([name for name, record in self.records.items() if record.is_cancelled], self.now)
        if self.is_paused:
            self.scheduler.pause()

    def limit_step(self, num_tokens: int | None) -> None:
        """The executor ran out of memory, or has enough again: steps may have so many tokens from now on."""
        most = self.limits.max_batch_tokens
        self.max_step = most if num_tokens is None else max(1, min(num_tokens, most))
        self.scheduler.limit_step(num_tokens)

    def fail(self, plan: StepPlan, message: str = "injected") -> Events:
        """Commit a failure of `plan`; later plans in flight are void."""
        self.num_failures += 1
        self.executor.discard_rest()
        for void in (plan, *(later for later, _ in self.flight)):
            self.checks.mirror.void(void)
        self.flight.clear()
        return self.take(self.scheduler.commit(plan, StepFailure(message), self.now))

    def fail_oldest(self) -> Events:
        """Make the oldest plan in flight fail, whatever it computed."""
        plan, _ = self.flight[0]
        self.executor.is_broken = True
        for queued, _ in self.flight:
            self.executor.corrupt_or_skip(queued)
            self.executor.void(queued)
        self.executor.queue.clear()
        return self.fail(plan)

    def end_choice(self, request_id: str, choice: int) -> bool:
        """End one choice, as when a stop string was found in its text."""
        record = self.records[request_id]
        if record.finished is None and record.choices[choice].finished is None:
            record.choices[choice].is_cancelled = True
        ended = self.scheduler.end_choice(request_id, choice, self.now)
        self.absorb(self.scheduler.take_events())
        return ended

    def cancel(self, *request_ids: str, reason: FinishReason = FinishReason.CANCELLED) -> int:
        """Cancel requests."""
        for name in request_ids:
            if name in self.records and self.records[name].finished is None:
                self.records[name].is_cancelled = True
        return self.scheduler.cancel(request_ids, self.now, reason)

    def pause(self) -> None:
        """Let nobody in until resume()."""
        self.is_paused = True
        self.scheduler.pause()

    def resume(self) -> None:
        """End a pause."""
        self.is_paused = False
        self.scheduler.resume()

    def fill(self, only: Iterable[str] | None = None) -> StepPlan:
        """Submit plans until `depth` are in flight or one is empty; give the last plan made."""
        while len(self.flight) < self.depth:
            plan = self.plan(only)
            if plan.is_empty:
                break
            self.submit(plan)
        return self.plans[-1]

    def step(self, only: Iterable[str] | None = None) -> StepPlan:
        """One turn of the loop: fill the flight, commit the oldest; give the last plan made."""
        self.now += 0.01
        plan = self.fill(only)
        if self.flight:
            self.commit()
        return plan

    def steps(self, count: int) -> None:
        """Several turns."""
        for _ in range(count):
            self.step()

    def finish_all(self, max_steps: int = 2000) -> Run:
        """Run until every request has ended."""
        for _ in range(max_steps):
            if not self.scheduler.has_work and not self.flight:
                return self
            self.step()
        raise AssertionError(f"not ended after {max_steps} steps")

    def finish(self) -> Run:
        """Run to the end, then check the end."""
        self.finish_all()
        self.check_end()
        return self

    def until(self, condition: Callable[[], bool], max_steps: int = 500) -> None:
        """Run until a condition holds."""
        for _ in range(max_steps):
            if condition():
                return
            self.step()
        raise AssertionError("the condition never held")

    # -- views

    @property
    def digests(self) -> list[bytes]:
        """The digest of each plan."""
        return [plan.digest() for plan in self.plans]

    def rows(self, plan: StepPlan) -> dict[str, tuple[int, int, int]]:
        """Rows by request: (start, count, flags)."""
        owners = {**self.slot_owner, **{new.slot: new.request_id for new in plan.new_sequences}}
        return {owners[row.slot]: (row.start, row.count, row.flags) for row in plan.rows()}

    def counts(self, plan: StepPlan) -> dict[str, int]:
        """Tokens granted by request."""
        return {name: count for name, (_, count, _) in self.rows(plan).items()}

    def num_blocks_of(self, record: Record) -> int:
        """Blocks in the executor's table of a request (0 when it has no slot)."""
        return sum(len(s.tables[0]) for s in self.executor.slots.values() if s.request_id == record.request.request_id)

    def decisions(self, kind: EventKind) -> list[Event]:
        """All decisions of one kind, over all requests, by step."""
        return [event for record in self.records.values() for event in record.of_kind(kind)]

    # -- checks

    def take(self, events: Events) -> Events:
        """Take in what a commit made known: tokens first, then decisions."""
        assert len(events.request_ids) == len(events.choices) == len(events.positions) == len(events.token_ids)
        columns = zip(events.request_ids, events.choices, events.positions, events.token_ids, strict=True)
        for name, choice, position, token_id in columns:
            record = self.records[name]
            given = record.choices[choice]
            if record.comes_again(choice, position, token_id):
                continue
            assert record.finished is None and given.finished is None, f"{name}/{choice} gives a token after its end"
            assert position == len(given.token_ids), f"{name}/{choice}: {position} after {len(given.token_ids)}"
            given.token_ids.append(token_id)
        for name, *entry in events.scores:
            self.records[name].scores.append(entry)
        for name, state in events.pooled:
            self.records[name].pooled.append(state)
        self.absorb(events.decisions)
        if self.check:
            self.check_invariants(bool(events.decisions))
        return events

    def absorb(self, events: Iterable[Event]) -> None:
        """File decisions under their requests and check each one's order."""
        for event in events:
            record = self.records[event.request_id]
            assert record.finished is None, f"{event} after the end {record.finished}"
            record.events.append(event)
            if event.kind in (EventKind.ADMITTED, EventKind.RESUMED):
                assert not record.is_running, event
                was_preempted = any(earlier.kind == EventKind.PREEMPTED for earlier in record.events[record.epoch_at :])
                assert (event.kind == EventKind.RESUMED) == was_preempted, event
                record.is_running = True
            elif event.kind == EventKind.PREEMPTED:
                assert record.is_running, event
                record.is_running = False
            elif event.kind == EventKind.SWAPPED:
                assert record.events[-2].kind == EventKind.PREEMPTED, "swapped without being preempted"
            elif event.kind == EventKind.CHOICE_FINISHED:
                record.end_choice(event, self.limits)
            elif event.kind == EventKind.FINISHED:
                record.end(event, self.limits)
            elif event.kind == EventKind.DEFERRED:
                assert event.reason is not None and event.reason != WaitReason.BEHIND

    def check_invariants(self, is_due: bool = False) -> None:
        """The cheap ones; all of them when something happened, or when it is time again."""
        scheduler = self.scheduler
        self.num_unchecked += 1
        if is_due or self.num_unchecked >= self.check_every:
            self.num_unchecked = 0
            invariants.check(scheduler)
        else:
            invariants.check_cheap(scheduler)

    def check_plan(self, plan: StepPlan, is_whole: bool) -> None:
        """Progress, and who may be let in."""
        has_preempted = any(
            event.kind == EventKind.PREEMPTED and event.by is not None and event.step == plan.step
            for event in plan.events
        )
        admitted = {event.request_id for event in plan.events if event.kind in (EventKind.ADMITTED, EventKind.RESUMED)}
        if has_preempted and admitted:
            owners = {self.checks.mirror.seats[slot].request_id for slot in plan.slots}
            assert owners <= admitted, "an admission in a step that preempted and still had rows"
        if is_whole and plan.is_empty and not self.flight:
            has_work = self.scheduler.num_running if self.is_paused else self.scheduler.has_work
            has_work = has_work and WaitReason.KV_TRANSFER not in dict(plan.waits)  # another engine's turn
            assert not has_work, f"work is pending, nothing is in flight, and the plan is empty: {plan.waits}"
        if plan.is_empty:
            assert plan.waits, "an empty plan without a reason"
        self.check_order(plan, is_whole)

    def check_order(self, plan: StepPlan, is_whole: bool) -> None:
        """Under fcfs nobody is admitted past an earlier request that waits for room."""
        sizes = self.limits
        is_plain = sizes.policy == "fcfs" and sizes.chunked_prefill and not sizes.max_partial_prefills
        if not (is_plain and is_whole and self.is_ordered and self.depth == 1 and plan.new_sequences):
            return
        admitted = [self.records[new.request_id].order for new in plan.new_sequences]
        waiting = [
            record.order for record in self.records.values() if not record.is_running and record.finished is None
        ]
        assert not waiting or max(admitted) < min(waiting), f"{max(admitted)} is admitted before {min(waiting)}"

    def check_end(self) -> None:
        """Everyone has ended once, errors have a cause, and nothing is held."""
        self.absorb(self.scheduler.take_events())
        open_ids = [name for name, record in self.records.items() if record.finished is None]
        assert not open_ids, f"not ended: {open_ids}, {[self.scheduler.explain(name) for name in open_ids[:3]]}"
        assert not self.scheduler.has_work and self.scheduler.num_waiting == self.scheduler.num_running == 0
        invariants.check(self.scheduler)
        invariants.check_no_leaks(self.scheduler)
        assert self.scheduler.reset_prefix_cache()
