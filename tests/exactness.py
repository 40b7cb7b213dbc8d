"""Drives scheduler and executor step by step, without an engine, for tests that compare tokens.

Owns: one synchronous loop over an opened executor, up to `depth` plans in flight, with a fresh scheduler a run.
Time is the number of committed steps: a request with arrival 5 is admitted before the plan that follows the fifth.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from octavo.core.limits import Limits
from octavo.core.plan import ROW_BEAM, ROW_CARRY, ROW_FORK, Event, EventKind, Events, StepPlan, TokenLogprobs
from octavo.core.proposals import DraftSource
from octavo.core.request import Request, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.snapshots import Statistics
from octavo.engine.grammars import MaskedTicket, submit_masked
from octavo.executors.protocol import Capacity, Executor, Ticket
from octavo.grammar.bank import GrammarBank
from octavo.grammar.matcher import Matcher
from octavo.grammar.vocabulary import Vocabulary
from tests.core.invariants import check_no_leaks

Watch = Callable[[Scheduler, StepPlan], None]  # called with each plan as it is submitted


@dataclass
class Run:
    """What the last round gave, and what all rounds of a run counted.

    `choices[request][choice]` are ids, `choice_logprobs` alike; `token_ids` and `logprobs` those of choice 0.
    `num_carried` counts rows whose input id was still on its way when they were submitted; `order` is that of the
    first admissions; `digest` is over all plans.
    """

    choices: list[list[list[int]]]
    choice_logprobs: list[list[list[TokenLogprobs | None]]]
    num_steps: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0
    num_carried: int = 0
    num_forks: int = 0
    num_beam_rows: int = 0
    hit_tokens: int = 0
    host_hit_tokens: int = 0
    swapped_in_tokens: int = 0
    max_rows: int = 0
    max_blocks: int = 0
    max_in_flight: int = 0
    order: list[str] = field(default_factory=list)
    digest: str = ""

    @property
    def token_ids(self) -> list[list[int]]:
        return [choices[0] for choices in self.choices]

    @property
    def logprobs(self) -> list[list[TokenLogprobs | None]]:
        return [choices[0] for choices in self.choice_logprobs]


def limits_of(capacity: Capacity, **changes: object) -> Limits:
    """Limits that fit an opened executor; `changes` may only make them smaller."""
    limits = Limits(
        block_size=capacity.block_size,
        num_blocks=capacity.num_blocks,
        max_model_len=capacity.max_model_len,
        vocab_size=capacity.vocab_size,
        groups=capacity.groups,
        max_sequences=capacity.num_slots,
        max_batch_tokens=256,
    )
    return replace(limits, **changes)  # type: ignore[arg-type]


def run(
    executor: Executor,
    limits: Limits,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    rounds: int = 1,
    depth: int = 1,
) -> Run:
    """Serve all prompts together, `rounds` times on the same prefix cache; returns the last round's tokens."""
    each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
    return serve(executor, limits, requests_of(prompts, each), rounds, depth)


def requests_of(
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    traits: Sequence[Mapping[str, object]] = (),
) -> list[Request]:
    """A request for each prompt, called by its index; `traits` are further fields, used in turn."""
    made = []
    for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        more = traits[index % len(traits)] if traits else {}
        made.append(Request(str(index), array("i", prompt), one, **more))  # type: ignore[arg-type]
    return made


def serve(
    executor: Executor,
    limits: Limits,
    requests: Sequence[Request],
    rounds: int = 1,
    depth: int = 1,
    watch: Watch | None = None,
    vocabulary: Vocabulary | None = None,
    drafts: DraftSource | None = None,
) -> Run:
    """Serve requests, `rounds` times on the same prefix cache, with up to `depth` plans in flight.

    Requests may have grammars where `vocabulary` is given.
    """
    loop = _Loop(executor, Scheduler(limits, drafts=drafts), depth, watch)
    if vocabulary is not None:
        loop.hold_to_grammars(vocabulary)
    for _ in range(rounds):
        loop.round(requests)
    check_no_leaks(loop.scheduler)
    if loop.bank is not None:
        loop.bank.close()
    return loop.finish()


class _Loop:
    """The step loop (as octavo.engine.loop has it: fill up to the depth, retire the oldest), and what it counts."""

    def __init__(self, executor: Executor, scheduler: Scheduler, depth: int, watch: Watch | None) -> None:
        self.scheduler = scheduler
        self.run = Run([], [])
        self._executor, self._depth, self._watch = executor, depth, watch
        self._flight: deque[tuple[StepPlan, Ticket]] = deque()
        self._digest = blake2b(digest_size=8)
        self._round = -1
        self.bank: GrammarBank | None = None
        self._vocabulary: Vocabulary | None = None

    def hold_to_grammars(self, vocabulary: Vocabulary) -> None:
        self.bank, self._vocabulary = GrammarBank(vocabulary), vocabulary

    def round(self, requests: Sequence[Request]) -> None:
        self._round += 1
        widths = [request.params.num_sequences for request in requests]
        self.run.choices = [[[] for _ in range(width)] for width in widths]
        self.run.choice_logprobs = [[[] for _ in range(width)] for width in widths]
        begun = self.run.num_steps
        coming = deque(sorted(enumerate(requests), key=lambda entry: entry[1].arrival))
        while True:
            while coming and coming[0][1].arrival <= self.run.num_steps - begun:
                index, request = coming.popleft()
                name, now = f"{self._round}-{index}", float(self.run.num_steps)
                self.scheduler.admit(replace(request, request_id=name, arrival=now), now)
                if request.params.grammar:
                    assert self.bank is not None and self._vocabulary is not None
                    matcher = Matcher.of(request.params.grammar, self._vocabulary, request.eos_token_ids)
                    self.bank.open(name, matcher)
            last = self._fill()
            if self._flight:
                self._retire()
            elif not coming:
                assert last is not None and not self.scheduler.has_work, last
                return
            else:
                self.run.num_steps += 1  # nothing to do until the next arrival

    def finish(self) -> Run:
        totals: Statistics = self.scheduler.statistics()
        self.run.num_preemptions = totals.num_preemptions
        self.run.hit_tokens = totals.prefix_hit_tokens
        self.run.host_hit_tokens = totals.num_host_hit_tokens
        self.run.swapped_in_tokens = totals.num_swapped_in_tokens
        self.run.digest = self._digest.hexdigest()
        return self.run

    def _fill(self) -> StepPlan | None:
        while len(self._flight) < self._depth:
            plan = self.scheduler.plan(float(self.run.num_steps))
            self._note(plan.events)
            if plan.is_empty:
                return plan
            self._count(plan)
            masked = self.bank is not None and not self.bank.is_empty
            ticket = submit_masked(self._executor, plan, self.bank) if masked else self._executor.submit(plan)
            self._flight.append((plan, ticket))
            self.run.max_in_flight = max(self.run.max_in_flight, len(self._flight))
        return None

    def _retire(self) -> None:
        plan, ticket = self._flight.popleft()
        is_masked = isinstance(ticket, MaskedTicket)
        result = ticket.collect(self._executor) if is_masked else self._executor.collect(ticket)
        events = self.scheduler.commit(plan, result, float(self.run.num_steps))
        self.run.num_steps += 1
        if self.bank is not None:
            self.bank.committed(events)
        self._note(events.decisions)
        self._take(events)

    def _take(self, events: Events) -> None:
        for at, (name, choice) in enumerate(zip(events.request_ids, events.choices, strict=True)):
            number, index = map(int, name.split("-"))
            assert number == self._round
            assert events.positions[at] == len(self.run.choices[index][choice])
            self.run.choices[index][choice].append(events.token_ids[at])
            self.run.choice_logprobs[index][choice].append(events.logprobs[at] if events.logprobs else None)

    def _count(self, plan: StepPlan) -> None:
        self._digest.update(plan.digest())
        ahead = {slot for earlier, _ in self._flight for slot in earlier.slots}
        for slot, flags in zip(plan.slots, plan.flags, strict=True):
            self.run.num_carried += bool(flags & ROW_CARRY) and slot in ahead
            self.run.num_forks += bool(flags & ROW_FORK)
            self.run.num_beam_rows += bool(flags & ROW_BEAM)
        self.run.max_rows = max(self.run.max_rows, plan.num_rows)
        self.run.max_blocks = max(self.run.max_blocks, self.scheduler.statistics().num_blocks_used)
        if self._watch is not None:
            self._watch(self.scheduler, plan)

    def _note(self, decisions: Sequence[Event]) -> None:
        if self.bank is not None:
            self.bank.ended(decisions)
        for event in decisions:
            self.run.num_swaps += event.kind == EventKind.SWAPPED
            if event.kind == EventKind.ADMITTED:
                self.run.order.append(event.request_id)


def explain_difference(expected: Sequence[int], run: Run, index: int) -> str:
    """Say where a request's tokens leave the expected ones, and how close the two best logits were there."""
    got = run.token_ids[index]
    for at, (want, have) in enumerate(zip(expected, got, strict=False)):
        if want != have:
            entry = run.logprobs[index][at]
            gap = ""
            if entry is not None and len(entry.top_logprobs) > 1:
                distance = entry.top_logprobs[0] - entry.top_logprobs[1]
                gap = f"; the two best logits there are {distance:.3e} apart {entry.top_ids}"
            return f"request {index} differs at output {at}: expected {want}, got {have}{gap}"
    return f"request {index}: {len(got)} tokens, expected {len(expected)}"


def assert_equal(expected: Sequence[Sequence[int]], run: Run) -> None:
    """Assert that every request's tokens are the expected ones; the message gives the logit gaps."""
    wrong = [
        explain_difference(want, run, index)
        for index, want in enumerate(expected)
        if list(want) != run.token_ids[index]
    ]
    assert not wrong, "\n".join(wrong)
