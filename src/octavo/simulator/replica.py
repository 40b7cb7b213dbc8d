"""One engine under a virtual clock: the core's scheduler, stepped in the order of engine.loop.

Owns: turns (commands, then plans up to the depth) and retirements (commit, delivery), and their times.
Does not: know other replicas, or the source of requests (fleet).
Time: a plan is made at a turn's start; its device time begins after the previous step's; its commit is at the end of
that; `host_s` passes after each commit, and with two plans in flight the device computes meanwhile.
Invariant: depth, plans and times are those of a loop whose executor takes these times.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf

from octavo.core.plan import Event, StepPlan, StepResult, StepTimings
from octavo.core.request import FinishReason
from octavo.core.scheduler import Scheduler
from octavo.errors import RequestError
from octavo.simulator.fast_forward import DecodeRun, StepPrices
from octavo.simulator.requests import make_request
from octavo.simulator.setup import Setup
from octavo.simulator.tally import Open, Tally
from octavo.simulator.totals import ReplicaTotals, Samples

MIN_WAIT_S = 0.001  # as in engine.loop: after an empty plan the next is at least this much later


@dataclass(slots=True)
class StepInFlight:
    """A plan on the device: its seconds there and on the host, and when it ends."""

    plan: StepPlan
    step_s: float
    host_s: float
    end: float


class Replica:
    """One engine, alive or dead. `next_at` is when `advance` must be called; nothing happens without it.

    `load` counts the prompt tokens of its requests that have not ended, `num_open` those requests.
    """

    def __init__(self, number: int, setup: Setup, tally: Tally, samples: Samples) -> None:
        own = setup.of(number)
        self.number = number
        self.totals = ReplicaTotals()
        self.load = 0
        self.num_open = 0
        self.is_up = True
        self.next_at = inf
        self._setup, self._limits, self._costs = setup, own.limits, own.costs
        self._prices = StepPrices(own.costs)
        self._tally, self._samples = tally, samples
        self._next_sample = 0.0 if setup.sample_s else inf
        self._fast = setup.fast_forward and setup.make_sink is None
        self._open: dict[str, Open] = {}
        self._born()

    def _born(self) -> None:
        self.scheduler = Scheduler(self._limits)
        make = self._setup.make_sink
        self._sink = None if make is None else make(self.scheduler)
        self._flight: deque[StepInFlight] = deque()
        self._inbox: deque[Open] = deque()
        self._run: DecodeRun | None = None
        self._is_retiring = False
        self._is_idle, self._idle_since = True, 0.0  # no turn begins before _idle_since
        self._free_at = 0.0  # when the device has finished all its plans
        self.next_at = inf

    # --- commands -----------------------------------------------------------------------------------

    def give(self, entry: Open, at: float) -> None:
        """Queue a request that arrives at `at`; the next turn admits it."""
        entry.replica = self.number
        self._open[entry.name] = entry
        self.load += entry.arrival.prompt_tokens
        self.num_open += 1
        self.totals.requests += 1
        if self._run is not None:
            self._cut_run(self._run, at)
        self._inbox.append(entry)
        if self._is_idle:
            self._is_idle, self.next_at = False, max(at, self._idle_since)

    def die(self, at: float) -> list[Open]:
        """Drop the replica's state; return its open requests with their emitted tokens, in order of arrival."""
        run = self._run
        if run is not None:
            num_committed, num_begun = run.num_commits_before(at), run.num_turns_before(at)
            self._end_run(num_committed)
            if num_begun > num_committed:
                self._make_plans(self.next_at)  # this plan is in flight at the death
        work = self.scheduler.open_work()
        outputs = {one.name: one.num_outputs for one in (*work.running, *work.waiting)}
        for entry in self._open.values():
            if entry.name in outputs:
                if entry.counts:  # a request with several choices starts again from nothing
                    entry.counts = [0] * len(entry.counts)
                else:
                    entry.emitted = outputs[entry.name]
                entry.restarts += 1
        lost = list(self._open.values())
        self._open, self.load, self.num_open = {}, 0, 0
        self.is_up = False
        self.totals.failures += 1
        self._close_life()
        self._born()
        return lost

    def revive(self, at: float) -> None:
        """Bring the replica back, with an empty cache."""
        self.is_up = True
        self._idle_since = at

    def close(self) -> None:
        """Add the scheduler's counts to the totals."""
        self._close_life()

    def _close_life(self) -> None:
        counted, totals = self.scheduler.gauges(), self.totals
        totals.steps += counted.num_steps
        totals.computed_tokens += counted.num_computed_tokens
        totals.output_tokens += counted.num_output_tokens
        totals.preemptions += counted.num_preemptions
        totals.queried_tokens += counted.queried_tokens
        totals.hit_tokens += counted.hit_tokens
        totals.num_blocks = sum(self._limits.num_blocks)

    # --- time ---------------------------------------------------------------------------------------

    def advance(self) -> list[Open]:
        """Do what is due at `next_at`; return the requests that ended."""
        if self._run is not None:
            if self._run.is_whole:
                return self._end_run(self._run.num_turns)
            self._run.more()
            self.next_at = self._run.next_at
            return []
        return self._retire() if self._is_retiring else self._turn()

    def _turn(self) -> list[Open]:
        """Admit queued requests, then plan up to the depth."""
        now, self._is_idle = self.next_at, False
        if now >= self._next_sample:
            self._sample(now)
        self._note_blocks()
        ended: list[Open] = []
        while self._inbox:
            self._admit(self._inbox.popleft(), now, ended)
        if not (self._fast and self._begin_run(now)):
            ended += self._make_plans(now)
        return ended

    def _make_plans(self, now: float) -> list[Open]:
        """Plan up to the depth."""
        ended: list[Open] = []
        wake_at = None
        while len(self._flight) < self._setup.depth:
            plan = self.scheduler.plan(now)
            if plan.events:
                ended += self._noted(plan.events)
            if plan.is_empty:
                wake_at = plan.wake_at
                break
            self._launch(plan, now)
        self._note_blocks()
        if self._flight:
            self._is_retiring = True
            self.next_at = max(now, self._flight[0].end)
        else:
            self._is_idle, self._idle_since = True, now
            self.next_at = inf if wake_at is None else max(wake_at, now + MIN_WAIT_S)
        return ended

    def _admit(self, entry: Open, now: float, ended: list[Open]) -> None:
        setup, tally = self._setup, self._tally
        own = entry.index if setup.own_keys else None
        request = make_request(entry.name, entry.arrival, entry.at, entry.emitted, self._limits, own)
        is_full = setup.max_waiting and not entry.restarts and self.scheduler.num_waiting >= setup.max_waiting
        try:
            if not is_full:
                self.scheduler.admit(request, now)
        except RequestError:
            is_full = True
        if is_full:
            self.totals.rejected += 1
            tally.end(entry, now, FinishReason.ERROR, entry.emitted)
            self._left(entry)
            ended.append(entry)
        elif self._sink is not None:
            self._sink.admitted(request)

    def _launch(self, plan: StepPlan, now: float) -> None:
        """Queue a plan on the device."""
        step_s, host_s = self._prices.of(plan)
        end = max(now, self._free_at) + step_s
        self._free_at = end
        self._flight.append(StepInFlight(plan, step_s, host_s, end))

    def _retire(self) -> list[Open]:
        """Commit the oldest plan, and let the host's time for it pass."""
        now, flight, totals = self.next_at, self._flight.popleft(), self.totals
        outcome = StepResult(None, timings=StepTimings(forward_s=flight.step_s))
        events = self.scheduler.commit(flight.plan, outcome, now)
        self._tally.given(events)
        due = self._tally.due(events)
        ended = self._noted(events.decisions) if events.decisions else []
        if self._sink is not None:
            self._sink.stepped(flight.plan, outcome, events)
        for name, choice in due:  # the longest choice ends the request by itself
            self.scheduler.end_choice(name, choice, now)
        totals.busy_s += flight.step_s
        totals.host_s += flight.host_s
        self._is_retiring = False
        self.next_at = now + flight.host_s
        return ended

    def _noted(self, decisions: tuple[Event, ...]) -> list[Open]:
        ended = self._tally.decided(decisions)
        for entry in ended:
            self._left(entry)
        if self._sink is not None:
            self._sink.decided(decisions)
        return ended

    def _left(self, entry: Open) -> None:
        del self._open[entry.name]
        self.load -= entry.arrival.prompt_tokens
        self.num_open -= 1

    # --- repeating decode steps, applied together

    def _begin_run(self, now: float) -> bool:
        """Predict steps in which running requests only decode; they are applied when their number is known."""
        if self._prices.decode_s is None or len(self._flight) != self._setup.depth - 1:
            return False
        steps = self.scheduler.find_repeat()
        if steps is None:
            return False
        until = self._next_sample if steps.wake_at is None else min(self._next_sample, steps.wake_at)
        flying = (self._flight[0].end, self._flight[0].host_s) if self._flight else None
        run = DecodeRun(steps, self._prices, now, until, flying)
        if not run.num_turns:
            return False
        self._run, self.next_at = run, run.next_at
        return True

    def _cut_run(self, run: DecodeRun, at: float) -> None:
        """Apply the turns that begin before an arrival; plan separately the turn whose commit ends requests."""
        num_turns = run.num_turns_before(at)
        is_last = run.has_end and num_turns == run.num_turns
        self._end_run(num_turns - is_last)
        if is_last:
            self._make_plans(self.next_at)

    def _end_run(self, num_turns: int) -> list[Open]:
        """Apply `num_turns` turns of the run; the next one is planned separately. Return the requests that ended."""
        run, self._run, totals = self._run, None, self.totals
        assert run is not None
        self.next_at = run.begins[num_turns]
        if not num_turns:
            return []
        last = num_turns - 1
        plan = self.scheduler.repeat(num_turns, run.begins[last])
        self._note_blocks()
        if run.has_end and num_turns == run.num_turns:
            for name, choice in run.steps.ending:
                self.scheduler.end_choice(name, choice, run.commits[last], FinishReason.LENGTH)
        decisions = self.scheduler.take_events()
        totals.forwarded_steps += num_turns
        self._free_at = run.ends[last]
        committed = run.steps_s[:num_turns]
        if plan is not None:
            flying = self._flight.popleft()
            self._flight.append(StepInFlight(plan, committed[-1], run.host_s, self._free_at))
            totals.busy_s += flying.step_s
            totals.host_s += flying.host_s
            del committed[-1]
        for step_s in committed:  # one by one, so that the sums round as single steps do
            totals.busy_s += step_s
            totals.host_s += run.host_s
        return self._noted(decisions) if decisions else []

    # --- gauges and samples

    def _note_blocks(self) -> None:
        used = self.scheduler.gauges().blocks_used[0]
        if used > self.totals.max_blocks_used:
            self.totals.max_blocks_used = used

    def _sample(self, now: float) -> None:
        samples, gauges, step = self._samples, self.scheduler.gauges(), self._setup.sample_s
        samples.times.append(now)
        samples.replicas.append(self.number)
        samples.running.append(gauges.num_running_requests)
        samples.waiting.append(gauges.num_waiting)
        samples.used.append(gauges.blocks_used[0])
        samples.cached.append(gauges.blocks_cached[0])
        samples.steps.append(gauges.num_steps)
        samples.tokens.append(gauges.num_computed_tokens)
        self._next_sample = (now // step + 1) * step
