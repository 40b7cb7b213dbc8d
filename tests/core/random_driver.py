"""A seeded random driver: every verb of the scheduler in random order, with faults, then quiescence.

Owns: how a seed becomes actions. A seed replays bit for bit. Does not: check anything itself (the harness, the fake
executor and tests.core.invariants do), or choose sizes and requests (random_config, random_requests).
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.core.harness import Run
from tests.core.random_config import random_faults, random_limits
from tests.core.random_requests import RequestMaker
from tests.fake_model import Faults

from octavo.core.limits import Limits
from octavo.core.plan import StepFailure, StepResult
from octavo.core.request import FinishReason, Want
from octavo.errors import AdmissionError, DuplicateRequestError, InvariantError

FULL_CHECK_EVERY = 16


@contextmanager
def refused(kind: type[Exception]) -> Iterator[None]:
    """What happens inside must be refused with this error."""
    try:
        yield
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was due, and did not come")


class Driver:
    """Random actions on one Run. `changes` override the random limits, for a test that wants one thing often.

    Two of them are not limits: `faults`, the four chances of Faults, and `host`, host blocks per device block.
    """

    run_type = Run

    def __init__(self, seed: int, check_every: int = FULL_CHECK_EVERY, **changes: Any) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        rng = self.rng
        self.depth = rng.choice((1, 2, 2, 3, 3))
        self.faults = random_faults(rng)
        lazy = self.depth > 1 or rng.random() < 0.5
        sizes = random_limits(rng)
        if "faults" in changes:
            self.faults = Faults(random.Random(rng.random()), *changes.pop("faults"))
        if "host" in changes:
            share = changes.pop("host")
            changes["host_blocks"] = tuple(int(share * count) for count in sizes.num_blocks)
        if changes:
            sizes = Limits(**{**{name: getattr(sizes, name) for name in Limits.__slots__}, **changes})
        self.run = self.run_type(sizes, depth=self.depth, faults=self.faults, lazy=lazy, check_every=check_every)
        self.run.is_ordered = False
        self.maker = RequestMaker(rng, sizes, rng.random() < 0.3)
        self.num_steps = 0
        self.struck = self.faults.struck  # faults by name, ours beside the executor's
        self.is_draining = False
        busy = rng.choice((0.1, 0.3, 1.0))
        self.actions: list[tuple[float, Callable[[], object]]] = [
            (busy, self.admit),
            (1.0, self.plan),
            (0.8, self.commit),
            (0.03, self.cancel),
            (0.03, self.end_choice),
            (rng.choice((0.0, 0.02)), self.fail),
            (rng.choice((0.0, 0.1)), self.plan_some),
            (0.02, self.reset),
            (0.02, self.repeat_id),
            (0.02, self.explain),
            (0.02, self.repeat_commit),
            (0.02, self.commit_early),
            (rng.choice((0.0, 0.03)), self.pause),
            (rng.choice((0.0, 0.0, 0.01)), self.drain),
            (rng.choice((0.0, 0.02)), self.jump),
            (0.3, self.pass_time),
        ]
        # Drawn apart, so that a seed without these is the run that it was before there were any.
        self.apart = random.Random(f"apart {seed}")
        self.disasters: list[tuple[float, Callable[[], object]]] = [
            (self.apart.choice((0.0, 0.0, 0.005, 0.02)), self.die),
            (self.apart.choice((0.0, 0.0, 0.01, 0.05)), self.run_out_of_memory),
        ]

    def drive(self, num_steps: int) -> int:
        """`num_steps` plans and commits among other actions, then the end; give the steps taken."""
        weights = [weight for weight, _ in self.actions]
        while self.num_steps < num_steps:
            for chance, disaster in self.disasters:
                if self.apart.random() < chance:
                    disaster()
            self.rng.choices(self.actions, weights)[0][1]()
            if self.is_draining and not self.run.scheduler.has_work:
                break
        self.settle()
        return self.num_steps

    def settle(self) -> None:
        """Faults stop; then everything must end within a bound."""
        run = self.run
        run.executor.faults = Faults(random.Random(0), struck=self.struck)
        run.resume()
        run.limit_step(None)
        work = sum(
            (record.request.num_prompt_tokens + record.max_tokens) * len(record.choices)
            for record in run.records.values()
            if record.finished is None
        )
        for _ in range(80 + 8 * work):
            if not run.scheduler.has_work and not run.flight:
                break
            run.step()
            self.num_steps += 1
        run.check_end()

    # -- actions

    def open_ids(self) -> list[str]:
        return [name for name, record in self.run.records.items() if record.finished is None]

    def admit(self) -> None:
        if len(self.open_ids()) >= 14:
            return
        prompt, max_tokens, fields = self.maker.make(self.run.now)
        try:
            self.run.admit(prompt, max_tokens, **fields)
        except AdmissionError as error:
            has_number = any(character.isdigit() for character in str(error))
            assert self.is_draining or has_number, f"a refusal without numbers: {error}"
        else:
            assert not self.is_draining

    def plan(self) -> None:
        run = self.run
        if len(run.flight) >= self.depth:
            return
        plan = run.plan()
        self.num_steps += 1
        if not plan.is_empty:
            run.submit(plan)

    def plan_some(self) -> None:
        run, names = self.run, self.open_ids()
        if len(run.flight) >= self.depth or not names:
            return
        only = self.rng.sample(names, self.rng.randrange(1, len(names) + 1))
        plan = run.plan(only)
        assert set(run.rows(plan)) <= set(only)
        self.num_steps += 1
        if not plan.is_empty:
            run.submit(plan)

    def commit(self) -> None:
        if self.run.flight:
            self.run.commit()
            self.num_steps += 1

    def fail(self) -> None:
        """The executor dies: everything in flight is void."""
        if self.run.flight:
            self.run.fail_oldest()
            self.num_steps += 1
            self.struck["executors dead"] += 1

    def die(self) -> None:
        """The executor's process dies with the scheduler, and all in flight; a new epoch goes on."""
        self.run.die()
        self.struck["engines dead"] += 1
        if self.is_draining:
            self.run.scheduler.drain()

    def run_out_of_memory(self) -> None:
        """A step has no memory: steps are smaller for a while."""
        if self.run.flight:
            num_tokens = self.run.flight[0][0].num_query_tokens
            self.fail()
            self.run.limit_step(num_tokens // 2 or None)
            self.struck["memory errors"] += 1
        else:
            self.run.limit_step(None)

    def repeat_commit(self) -> None:
        """A late or repeated result is refused, and changes nothing."""
        made = [plan for plan in self.run.plans[max(self.run.first_plan, len(self.run.plans) - 8) :] if plan.slots]
        in_flight = {plan.step for plan, _ in self.run.flight}
        for plan in made[:1]:
            if plan.step not in in_flight:
                outcome = self.rng.choice((StepResult(array("i")), StepFailure("late")))
                with refused(InvariantError):
                    self.run.scheduler.commit(plan, outcome, self.run.now)
                self.struck["late or doubled results"] += 1

    def commit_early(self) -> None:
        """A result out of order is refused, and changes nothing."""
        if len(self.run.flight) > 1:
            with refused(InvariantError):
                self.run.scheduler.commit(self.run.flight[-1][0], StepResult(array("i")), self.run.now)
            self.struck["results out of order"] += 1

    def cancel(self) -> None:
        names = [*self.rng.sample(self.open_ids(), min(len(self.open_ids()), self.rng.randrange(1, 4))), "nobody"]
        names += list(self.run.records)[:1]
        self.struck["aborts"] += self.run.cancel(
            *names, reason=self.rng.choice((FinishReason.CANCELLED, FinishReason.STOP))
        )

    def end_choice(self) -> None:
        for name in self.rng.sample(self.open_ids(), min(2, len(self.open_ids()))):
            record = self.run.records[name]
            if record.request.params.beam_width or not record.request.wants & Want.SAMPLE:
                continue
            self.run.end_choice(name, self.rng.randrange(len(record.choices)))

    def reset(self) -> None:
        self.run.scheduler.reset_prefix_cache()

    def repeat_id(self) -> None:
        for name in self.open_ids()[:1]:
            record = self.run.records[name]
            if record.is_cancelled or self.is_draining:
                continue
            with refused(DuplicateRequestError):
                self.run.scheduler.admit(record.request, self.run.now)

    def explain(self) -> None:
        for name in self.open_ids()[:3]:
            found = self.run.scheduler.explain(name)
            assert found is None or found.name == name  # None: it has ended, and its event was not taken yet

    def pause(self) -> None:
        if self.run.is_paused:
            self.run.resume()
        else:
            self.run.pause()

    def drain(self) -> None:
        self.run.scheduler.drain()
        self.is_draining = True
        self.struck["drains"] += 1

    def jump(self) -> None:
        """The clock jumps, forward or back."""
        self.run.now = max(0.0, self.run.now + self.rng.choice((-0.2, 0.7, 3600.0)))
        self.struck["jumps of the clock"] += 1

    def pass_time(self) -> None:
        self.run.now += self.rng.random() * 0.1
