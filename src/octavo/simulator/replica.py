"""Simulates one engine: the core's scheduler under a virtual clock, stepped in the order of engine.loop.

Owns: turns (admit commands, then plan up to the depth); retirements (commit and delivery); the times of both; runs of
decode steps in which no request arrives, ends or waits for a block, which core.repeat applies together.
Does not: know other replicas, or the source of requests (run); step a group of engines together (lockstep).
Time: a plan is made at a turn's start, begins on the device after the previous plan ends, and is committed at its end.
`host_s` passes after each commit; with two plans in flight, the device computes during `host_s`.
Invariant: plans and times equal those of an engine loop whose executor takes the cost model's times.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from math import inf

from octavo.core.plan import Event, StepPlan, StepResult, StepTimings
from octavo.core.repeat import Repeat, RowsBeside
from octavo.core.request import FinishReason
from octavo.core.scheduler import Scheduler
from octavo.errors import RequestError
from octavo.simulator.arrival import make_request
from octavo.simulator.cost_model import CostModel, StepShape, shape_of
from octavo.simulator.drafts import SimulatedDrafts
from octavo.simulator.outcomes import NEVER, ReplicaTotals, RequestTracker, Samples, SimulatedRequest
from octavo.simulator.pipeline import PipelineStages, Stepper
from octavo.simulator.setup import ReplicaSetup, Setup

_DURATION_ONLY = StepResult(None)
MORE_TURNS = 8  # maximum turns that DecodeRun.more predicts


class StepPrices:
    """Returns the times of plans. For a plan with decode rows only, uses the cost model's decode_s if there is one."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self.decode_s = costs.decode_s
        self._host: dict[int, float] = {}

    def of(self, plan: StepPlan, peer_tokens: tuple[int, ...] = ()) -> tuple[float, float]:
        """Return a plan's seconds on the device and on the host. Without rows and copies, the device time is 0.

        `peer_tokens` has the tokens of the other ranks' plans in the same step.
        """
        num_rows, has_copies = len(plan.slots), _has_copies(plan)
        if not num_rows and not has_copies:
            return 0.0, self._costs.host_s(shape_of(plan))
        if plan.is_fast_path and self.decode_s is not None and not has_copies and not peer_tokens:
            return self.decode_s(num_rows, plan.num_kv_read), self.host_s(num_rows)
        shape = shape_of(plan, peer_tokens)
        return self._costs.step_s(shape), self._costs.host_s(shape)

    def host_s(self, num_rows: int) -> float:
        """Return the host's seconds for a plan of `num_rows` decode rows."""
        known = self._host.get(num_rows)
        if known is None:
            known = self._host[num_rows] = self._costs.host_s(StepShape([1] * num_rows, [], num_rows))
        return known


def _has_copies(plan: StepPlan) -> bool:
    return bool(plan.copies or plan.swap_outs or plan.host_loads)


class DecodeRun:
    """Predicted turns of repeating decode steps. Each turn makes one plan and commits one plan.

    `begins` and `commits` are the times of turns and commits; `steps_s` and `ends` are the plans' durations and ends.
    `begins` has one extra entry: the begin of the next turn. `host_s` passes after each commit. `in_flight` is (end,
    host time) of a plan in flight before the first turn; if there is one, each turn commits the previous turn's plan.
    """

    __slots__ = ("_decode_s", "_in_flight", "_until", "begins", "commits", "ends", "host_s", "steps", "steps_s")

    def __init__(
        self, steps: Repeat, prices: StepPrices, begin: float, until: float, in_flight: tuple[float, float] | None
    ) -> None:
        assert prices.decode_s is not None
        self.steps = steps
        self.host_s = prices.host_s(steps.num_rows)
        self.begins = [begin]
        self.ends: list[float] = []
        self.steps_s: list[float] = []
        self.commits: list[float] = self.ends if in_flight is None else []
        self._decode_s = prices.decode_s
        self._until = until
        self._in_flight = in_flight
        self.more()

    def more(self) -> None:
        """Predict up to MORE_TURNS more turns that begin before `until`."""
        done, num_rows = len(self.steps_s), self.steps.num_rows
        kv_sum = self.steps.kv_sum + done * num_rows
        decode_s, at, until = self._decode_s, self.begins[-1], self._until
        is_ahead = self._in_flight is not None
        end, host_s = self._in_flight or (at, self.host_s)
        for _ in range(min(self.steps.max_steps - done, MORE_TURNS)):
            if at >= until:
                break
            step_s = decode_s(num_rows, kv_sum)
            if is_ahead:  # this turn commits the previous turn's plan, which ends at `end`
                commit = max(at, end)
                self.commits.append(commit)
                end = commit + step_s
                at = commit + host_s
                host_s = self.host_s
            else:  # this turn commits its own plan
                end = at + step_s
                at = end + host_s
            self.steps_s.append(step_s)
            self.ends.append(end)
            self.begins.append(at)
            kv_sum += num_rows
        if is_ahead:
            self._in_flight = (end, host_s)

    @property
    def is_whole(self) -> bool:
        """True if no further turn can be predicted."""
        return len(self.steps_s) == self.steps.max_steps or self.begins[-1] >= self._until

    @property
    def has_end(self) -> bool:
        """True if requests end in the last commit."""
        return self.steps.has_end and len(self.steps_s) == self.steps.max_steps

    @property
    def next_at(self) -> float:
        """Return when requests end, or else when the next turn begins."""
        return self.commits[-1] if self.has_end else self.begins[-1]

    @property
    def num_turns(self) -> int:
        """Return the number of predicted turns."""
        return len(self.steps_s)

    def num_turns_before(self, at: float) -> int:
        """Return the number of turns that begin before `at`."""
        return bisect_left(self.begins, at, hi=len(self.steps_s))

    def num_commits_before(self, at: float) -> int:
        """Return the number of commits before `at`."""
        return bisect_left(self.commits, at)


@dataclass(slots=True)
class StepInFlight:
    """A plan on the device: its device seconds, its host seconds, its end, and the seconds of its drafts.

    `beside` are rows of the step that the plan leaves out.
    """

    plan: StepPlan
    step_s: float
    host_s: float
    end: float
    drafting_s: float = 0.0
    beside: RowsBeside | None = None

    @property
    def num_tokens(self) -> int:
        """Return the tokens of the whole step."""
        return self.plan.num_query_tokens + (0 if self.beside is None else self.beside.num_rows)

    def shape(self) -> StepShape:
        """Return the shape of the whole step."""
        shape = shape_of(self.plan)
        if self.beside is not None:
            shape.decode_kv += self.beside.lengths()
            shape.num_samples += self.beside.num_rows
        return shape


class Replica(Stepper):
    """One engine. `num_open` counts its open requests, `load` their prompt tokens."""

    def __init__(
        self,
        number: int,
        setup: Setup,
        tracker: RequestTracker,
        samples: Samples,
        own: ReplicaSetup,
        stages: PipelineStages | None = None,
    ) -> None:
        super().__init__(number, stages)
        self.totals = ReplicaTotals()
        self.load = 0
        self.num_open = 0
        self._setup, self._own = setup, own
        self._prices = StepPrices(self._own.costs)
        self._tracker, self._samples = tracker, samples
        self._next_sample = 0.0 if setup.sample_s else inf
        self._is_fast = setup.fast_forward and setup.make_sink is None
        self._open: dict[str, SimulatedRequest] = {}
        self._start()

    def _start(self) -> None:
        drafts, seed = self._setup.drafts, self._setup.seed + self.number
        self._drafts = None if drafts is None else SimulatedDrafts(drafts, seed)
        self.scheduler = Scheduler(self._own.limits, drafts=self._drafts, counts_blocks=self._is_fast)
        make = self._setup.make_sink
        self._sink = None if make is None else make(self.scheduler)
        self._flight: deque[StepInFlight] = deque()
        self._inbox: deque[SimulatedRequest] = deque()
        self._moved: list[tuple[SimulatedRequest, bool]] = []  # KV that has left or arrived (True)
        self._run: DecodeRun | None = None
        self._is_sampled = False
        self._clear()

    # --- commands

    def bind(self, entry: SimulatedRequest) -> None:
        """Count a request that the router has chosen this replica for, before it arrives here."""
        entry.replica = self.number
        self.load += entry.arrival.prompt_tokens
        self.num_open += 1
        self.totals.requests += 1

    def release(self, entry: SimulatedRequest) -> None:
        """Count a request no longer: the router knows that it has ended, or has been handed over."""
        self.load -= entry.arrival.prompt_tokens
        self.num_open -= not (
            entry.handover_at and entry.handed != NEVER
        )  # one that is handed over is open until it left

    def submit(self, entry: SimulatedRequest, at: float) -> None:
        """Queue a bound request that arrives at `at`; the next turn admits it. The caller must call `wake` then."""
        self._open[entry.name] = entry
        if self._run is not None:
            self._cut_run(self._run, at)
        self._inbox.append(entry)

    def note_moved(self, entry: SimulatedRequest, at: float, has_arrived: bool) -> None:
        """Note that a request's KV has arrived, or has left; the next turn tells the scheduler. Call `wake` then."""
        if self._run is not None:
            self._cut_run(self._run, at)
        self._moved.append((entry, has_arrived))
        self.num_open -= not has_arrived

    def fail(self, at: float) -> list[SimulatedRequest]:
        """Drop the replica's state; return its open requests, with `emitted` updated, in order of arrival."""
        if self._run is not None:
            self._break_run(self._run, at)
        work = self.scheduler.open_work()
        outputs = {one.name: one.num_outputs for one in (*work.running, *work.waiting)}
        for entry in self._open.values():
            if entry.name in outputs:
                if entry.counts:  # a request with several choices loses its tokens
                    entry.counts = [0] * len(entry.counts)
                else:
                    entry.emitted = outputs[entry.name]
                entry.restarts += 1
        lost = sorted(self._open.values(), key=lambda entry: (entry.at, entry.index))
        self._open, self.load, self.num_open = {}, 0, 0
        self.totals.failures += 1
        self._reset()
        return lost

    def stop(self, at: float) -> None:
        """Drop all state of a replica without open requests; `restart` starts it again."""
        self._is_sampled = bool(self._setup.sample_s)
        if self._is_sampled:
            self._sample(at)
            self.sample_plan(None)
        self._reset()

    def _reset(self) -> None:
        self.is_up = False
        self.close()
        self._start()

    def pool_share(self, at: float) -> float:
        """Return the share of the KV pool that requests hold at `at`."""
        if self._run is not None:
            self._break_run(self._run, at)
        return self.scheduler.num_used_blocks / self._own.limits.num_blocks[0]

    def close(self) -> None:
        """Add the scheduler's counts to the totals."""
        counted, totals = self.scheduler.gauges(), self.totals
        totals.steps += counted.num_steps
        totals.computed_tokens += counted.num_computed_tokens
        totals.output_tokens += counted.num_output_tokens
        totals.preemptions += counted.num_preemptions
        totals.queried_tokens += counted.queried_tokens
        totals.hit_tokens += counted.hit_tokens
        totals.num_blocks = sum(self._own.limits.num_blocks)
        totals.max_sequences = self._own.limits.max_sequences
        totals.max_batch_tokens = self._own.limits.max_batch_tokens

    # --- time

    def advance(self) -> list[SimulatedRequest]:
        """Run the turn or the commit that is due at `next_at`; return the requests that ended."""
        if self._run is not None:
            if self._run.is_whole:
                ended = self._end_run(self._run.num_turns)
                self._begin_early()
                return ended
            self._run.more()
            self.next_at = self._run.next_at
            return []
        return super().advance()

    def _turn(self) -> list[SimulatedRequest]:
        """Admit queued requests, then plan up to the depth."""
        now, self._is_idle = self.next_at, False
        ended = self.admit_queued(now)
        if not (self._is_fast and self._begin_run(now)):
            ended += self._make_plans(now)
        if self._is_sampled:
            self.sample_plan(self._planned_shape(now))
        return ended

    def admit_queued(self, now: float) -> list[SimulatedRequest]:
        """Begin a turn: sample, and admit the queued requests; return those that could not be admitted."""
        self._is_sampled = now >= self._next_sample
        if self._is_sampled:
            self._sample(now)
        for entry, has_arrived in self._moved:
            (self.scheduler.receive_kv if has_arrived else self.scheduler.release_kv)(entry.name)
        self._moved.clear()
        ended: list[SimulatedRequest] = []
        while self._inbox:
            entry = self._inbox.popleft()
            if not self._admit(entry, now):
                ended.append(entry)
        return ended

    def _admit(self, entry: SimulatedRequest, now: float) -> bool:
        """Admit a request. End the request with an error if it does not fit, or if too many requests wait."""
        setup = self._setup
        is_new = not entry.restarts and entry.source < 0
        is_full = setup.max_waiting and is_new and self.scheduler.num_waiting >= setup.max_waiting
        request = make_request(entry.name, entry.arrival, entry.at, entry.emitted, self._own.limits, entry.handover_at)
        try:
            if not is_full:
                self.scheduler.admit(request, now)
                if entry.handover_at:
                    self.scheduler.keep_kv(entry.name)
                elif entry.source >= 0:
                    self.scheduler.expect_kv(entry.name, entry.arrival.prompt_tokens + entry.emitted - 1)
        except RequestError:
            is_full = True
        if is_full:
            self.totals.rejected += 1
            self._tracker.end(entry, now, FinishReason.ERROR, entry.emitted)
            del self._open[entry.name]
            return False
        if self._sink is not None:
            self._sink.admitted(request)
        return True

    def _make_plans(self, now: float) -> list[SimulatedRequest]:
        """Make plans until `depth` plans are in flight; return the requests that ended."""
        ended: list[SimulatedRequest] = []
        wake_at = None
        beside = self.scheduler.plan_beside(now) if self._is_fast and self._setup.depth == 1 else None
        if beside is not None:
            self._launch(self._price_beside(*beside), now)
            ended += self._apply(beside[0].events) if beside[0].events else []
        while len(self._flight) < self._setup.depth:
            plan, ended_now = self.plan(now)
            ended += ended_now
            if plan.is_empty:
                wake_at = plan.wake_at
                break
            self._launch(self.price(plan), now)
        self.totals.max_blocks_used = max(self.totals.max_blocks_used, self.scheduler.num_used_blocks)
        self._end_turn(now, self._flight[0].end if self._flight else None, wake_at)
        return ended

    def _launch(self, flight: StepInFlight, now: float) -> None:
        """Queue a plan on the device."""
        flight.end = self._compute(now, flight.step_s, flight.num_tokens, flight.drafting_s)
        self._flight.append(flight)

    def plan(self, now: float) -> tuple[StepPlan, list[SimulatedRequest]]:
        """Return the scheduler's next plan, and the requests that ended by it."""
        plan = self.scheduler.plan(now)
        return plan, self._apply(plan.events) if plan.events else []

    def price(self, plan: StepPlan, peer_tokens: tuple[int, ...] = ()) -> StepInFlight:
        """Count a plan, and return it with its times; the caller sets its end. `peer_tokens`: see StepShape."""
        step_s, host_s = self._prices.of(plan, peer_tokens)
        self._count_rows(len(plan.slots), plan.num_query_tokens, 1)
        drafting_s = 0.0
        if self._drafts is not None and plan.num_drafts:
            plain = StepShape([start + 1 for start in plan.starts], [], len(plan.starts))
            drafting_s = self._drafts.drafting_s(plan, self._own.costs.step_s(plain))
        return StepInFlight(plan, step_s, host_s, inf, drafting_s)

    def _price_beside(self, plan: StepPlan, beside: RowsBeside) -> StepInFlight:
        """Count a plan that leaves out repeating rows, and return it with the times of the whole step."""
        flight, prices, costs = StepInFlight(plan, 0.0, 0.0, inf, beside=beside), self._prices, self._own.costs
        self._count_rows(len(plan.slots) + beside.num_rows, flight.num_tokens, 1)
        if prices.decode_s is not None and not plan.slots and not _has_copies(plan):
            flight.step_s, flight.host_s = (
                prices.decode_s(beside.num_rows, beside.kv_sum),
                prices.host_s(beside.num_rows),
            )
        else:
            shape = flight.shape()
            flight.step_s, flight.host_s = costs.step_s(shape), costs.host_s(shape)
        return flight

    def _retire(self) -> list[SimulatedRequest]:
        """Commit the oldest plan, and advance by the plan's host time."""
        now, flight = self.next_at, self._flight.popleft()
        ended = self.commit(flight, now)
        self._is_retiring = False
        self.next_at = now + flight.host_s
        self._begin_early()
        return ended

    def commit(self, flight: StepInFlight, now: float) -> list[SimulatedRequest]:
        """Commit a plan; return the requests that ended."""
        totals = self.totals
        if self._drafts is not None:
            result = self._drafts.result(flight.plan, flight.step_s)
        else:
            result = _DURATION_ONLY if self._sink is None else StepResult(None, timings=StepTimings(0.0, flight.step_s))
        events = self.scheduler.commit(flight.plan, result, now)
        complete = self._tracker.apply_tokens(events)
        ended = self._apply(events.decisions) if events.decisions else []
        if self._sink is not None:
            self._sink.stepped(flight.plan, result, events)
        for name, choice in complete:  # the scheduler ends the request at its longest choice
            self.scheduler.end_choice(name, choice, now)
        totals.busy_s += flight.step_s + flight.drafting_s
        totals.host_s += flight.host_s
        return ended

    def _apply(self, decisions: tuple[Event, ...]) -> list[SimulatedRequest]:
        """Record decisions; return the requests that ended."""
        ended = self._tracker.apply_decisions(decisions)
        for entry in ended:
            del self._open[entry.name]
        if self._sink is not None:
            self._sink.decided(decisions)
        return ended

    # --- repeating decode steps, applied together

    def _begin_run(self, now: float) -> bool:
        """Begin to predict steps in which running requests only decode. _end_run applies the predicted steps."""
        if self._prices.decode_s is None or len(self._flight) != self._setup.depth - 1:
            return False
        steps = self.scheduler.find_repeat()
        if steps is None or self._stages is not None:  # stages compute steps of other engines between these
            return False
        until = self._next_sample if steps.wake_at is None else min(self._next_sample, steps.wake_at)
        in_flight = (self._flight[0].end, self._flight[0].host_s) if self._flight else None
        run = DecodeRun(steps, self._prices, now, until, in_flight)
        if not run.num_turns:
            return False
        self._run, self.next_at = run, run.next_at
        return True

    def _begin_early(self) -> None:
        """Begin the next run already now, if the turn at `next_at` would do nothing else.

        An arrival before that turn ends the run without a step, so this only saves an event.
        """
        if self._is_fast and not self._inbox and self.next_at < self._next_sample:
            self._begin_run(self.next_at)

    def _cut_run(self, run: DecodeRun, at: float) -> None:
        """Apply the turns that begin before an arrival. A turn whose commit ends requests is planned separately."""
        num_turns = run.num_turns_before(at)
        is_last = run.has_end and num_turns == run.num_turns
        self._end_run(num_turns - is_last)
        if is_last:
            self._make_plans(self.next_at)

    def _break_run(self, run: DecodeRun, at: float) -> None:
        """Apply the commits before `at`, and make the plan that is in flight then."""
        num_committed, num_begun = run.num_commits_before(at), run.num_turns_before(at)
        self._end_run(num_committed)
        if num_begun > num_committed:
            self._make_plans(self.next_at)

    def _end_run(self, num_turns: int) -> list[SimulatedRequest]:
        """Apply `num_turns` turns of the run; the next turn is planned separately. Return the requests that ended."""
        run, self._run, totals = self._run, None, self.totals
        assert run is not None
        self.next_at = run.begins[num_turns]
        if not num_turns:
            return []
        last = num_turns - 1
        plan, most_used = self.scheduler.repeat(num_turns, run.begins[last], run.commits[last])
        totals.max_blocks_used = max(totals.max_blocks_used, most_used)
        decisions = self.scheduler.take_events()
        totals.forwarded_steps += num_turns
        self._count_rows(run.steps.num_rows, run.steps.num_rows, num_turns)
        self._free_at = run.ends[last]
        committed = run.steps_s[:num_turns]
        if plan is not None:
            first = self._flight.popleft()
            self._flight.append(StepInFlight(plan, committed[-1], run.host_s, self._free_at))
            totals.busy_s += first.step_s
            totals.host_s += first.host_s
            del committed[-1]
        for step_s in committed:  # one by one, so that the sum has the same rounding as single steps
            totals.busy_s += step_s
            totals.host_s += run.host_s
        return self._apply(decisions) if decisions else []

    # --- gauges and samples

    def _count_rows(self, num_rows: int, num_tokens: int, num_steps: int) -> None:
        totals, limits = self.totals, self._own.limits
        totals.rows += num_rows * num_steps
        if num_rows >= limits.max_sequences:
            totals.steps_at_max_sequences += num_steps
        if num_tokens >= limits.max_batch_tokens:
            totals.steps_at_max_batch_tokens += num_steps

    def _sample(self, now: float) -> None:
        """Sample the replica before the turn's plans."""
        samples, gauges, interval = self._samples, self.scheduler.gauges(), self._setup.sample_s
        samples.times.append(now)
        samples.replicas.append(self.number)
        samples.used.append(gauges.blocks_used[0])
        samples.steps.append(gauges.num_steps)
        samples.tokens.append(gauges.num_computed_tokens)
        samples.busy_s.append(self.totals.busy_s)
        samples.host_s.append(self.totals.host_s)
        interval *= 1 + len(samples) // samples.MANY
        self._next_sample = (now // interval + 1) * interval

    def sample_plan(self, shape: StepShape | None) -> None:
        """Complete the turn's sample after its plans, if it has one. `shape` is of the first plan; None without one."""
        if not self._is_sampled:
            return
        samples, first = self._samples, self.scheduler.first_waiting(1)
        samples.waiting.append(self.scheduler.num_waiting)
        samples.reasons.append(-1 if not first or first[0].reason is None else first[0].reason)
        num_rows = 0 if shape is None else len(shape.decode_kv) + len(shape.prefills)
        samples.rows.append(num_rows)
        parts = self._own.costs.parts(shape or StepShape([1], []))
        samples.part_names = samples.part_names or tuple(parts.seconds)  # other cost models' parts are left out
        samples.parts.extend(parts.seconds.get(name, 0.0) if num_rows else 0.0 for name in samples.part_names)
        step_s = sum(parts.seconds.values())
        is_known = num_rows > 0 and step_s > 0 and parts.compute_s is not None
        samples.compute.append((parts.compute_s or 0.0) / step_s if is_known else -1.0)

    def _planned_shape(self, now: float) -> StepShape | None:
        """Return the shape of the first plan that was made at `now`; None without one."""
        if self._run is not None:
            steps = self._run.steps  # models that price more than the sum of the lengths have no runs
            mean, rest = divmod(steps.kv_sum, steps.num_rows)
            return StepShape([mean] * (steps.num_rows - 1) + [mean + rest], [], steps.num_rows)
        first = next((flight for flight in self._flight if flight.plan.now == now), None)
        return first.shape() if first is not None and (first.plan.slots or first.beside is not None) else None
