"""Write a simulated stream of frames (docs/statistics.md) as JSON lines, for drawing and measuring pages.

Owns: the load (many tenants, shared prefixes, more requests than the pool holds, a host tier, cancellations, a failed
step now and then) and a clock that the made-up step times move. Does not: run a model.
Same arguments, same stream. Usage: python -m tools.sample_frames FILE [--steps N] [--running N] [--waiting N]
"""

from __future__ import annotations

import argparse
import json
import random
from array import array
from collections.abc import Callable
from pathlib import Path

from octavo.core.limits import Limits
from octavo.core.plan import ROW_SAMPLE, Event, EventKind, StepFailure, StepPlan, StepResult, StepTimings
from octavo.core.request import Request, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.observe.frames import Frame, FrameSource, FrameWriter, Window
from octavo.observe.history import History
from octavo.observe.series import StepTimes

BLOCK_SIZE = 16
SHARED_BLOCKS = 8  # of the prefix that a tenant's prompts begin with
TENANTS = ("alice", "bob", "carol", "batch")
SEED = 7


class Stream:
    """A scheduler under load, whose history a FrameWriter reads."""

    def __init__(self, running: int, waiting: int, write: Callable[[Frame], object], max_steps: int) -> None:
        self.random = random.Random(SEED)
        self.scheduler = Scheduler(
            Limits(
                block_size=BLOCK_SIZE,
                num_blocks=(running * 20,),
                host_blocks=(running * 4,),
                max_model_len=4096,
                vocab_size=32_000,
                max_batch_tokens=2048,
                max_sequences=running,
                max_draft_tokens=0,
                preemption="swap",
            )
        )
        self.times = StepTimes(1)
        source = FrameSource("simulation", "a made-up model", stream_id="sample")
        window = Window(max_steps=max_steps)
        self.history = History(self.scheduler, self.times)
        self.writer = FrameWriter(self.history, write, source, window)
        self.history.add_reader(self.writer.read)
        self.most = running + waiting
        self.num_open = 0
        self.num_made = 0
        self.now = 100.0

    def step(self) -> None:
        """Let requests come, make a step, commit it."""
        for _ in range(32):
            if self.num_open < self.most:
                self._admit()
        if self.random.random() < 0.02:
            victim = self.random.randrange(self.num_made)
            self.scheduler.cancel([f"chatcmpl-{victim:06}"], self.now)
        plan = self.scheduler.plan(self.now)
        self._tell(plan.events)
        if plan.is_empty:
            self.now += 0.01
            return
        outcome, seconds = self._compute(plan)
        self.now += seconds
        events = self.scheduler.commit(plan, outcome, self.now)
        self._tell(events.decisions)
        self.history.stepped(plan, outcome, events)
        if isinstance(outcome, StepResult):
            rows, parts = plan.num_rows, outcome.timings
            computed = parts.prepare_s, parts.forward_s, parts.sample_s
            self.times.add((2e-5 + 6e-7 * rows, *computed, 1e-5 + 9e-7 * rows, 0.0))  # schedule and emit are made up
        self.now += 4e-4 if self.random.random() < 0.97 else 0.05

    def _admit(self) -> None:
        tenant = self.random.choice(TENANTS)
        length = self.random.randint(40, 700)
        ids = array("i", [TENANTS.index(tenant) + 5] * (SHARED_BLOCKS * BLOCK_SIZE))
        ids.extend(self.random.randrange(10, 32_000) for _ in range(length))
        params = SamplingParams(max_tokens=self.random.randint(16, 400))
        request = Request(
            f"chatcmpl-{self.num_made:06}", ids[:length], params, self.now, tenant=tenant, eos_token_ids=(2,)
        )
        self.scheduler.admit(request, self.now)
        self.history.admitted(request)
        self.num_made += 1
        self.num_open += 1

    def _compute(self, plan: StepPlan) -> tuple[StepResult | StepFailure, float]:
        seconds = 0.004 + 3e-5 * plan.num_rows + 1.5e-5 * plan.num_query_tokens + 2e-4 * (len(plan.swap_outs) // 3)
        if self.random.random() < 0.004:
            return StepFailure("RuntimeError: a made-up failure"), seconds
        ids = array("i", [self.random.randrange(10, 32_000) for flag in plan.flags if flag & ROW_SAMPLE])
        return StepResult(ids, timings=StepTimings(0.04 * seconds, 0.88 * seconds, 0.05 * seconds)), seconds

    def _tell(self, decisions: tuple[Event, ...]) -> None:
        if decisions:
            self.history.decided(decisions)
            self.num_open -= sum(event.kind == EventKind.FINISHED for event in decisions)


def main() -> int:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=1000)
    args = parser.parse_args()
    with args.file.open("w", encoding="utf-8") as out:
        stream = Stream(
            args.running,
            args.waiting,
            lambda frame: out.write(json.dumps(frame, separators=(",", ":")) + "\n"),
            args.steps,
        )
        for _ in range(args.steps):
            stream.step()
        stream.writer.end()
    print(f"{args.file}: {args.steps} steps, {args.file.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
