"""Measure the CPU cost of explanations: `python -m tools.explain_cost [--steps 2000] [--waiting 1000]`.

Owns: a scheduler of 256 sequences under a steady load; the CPU seconds of its event sink and of queries. Runs no model.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from typing import Any

from octavo.core.limits import Limits
from octavo.core.plan import StepResult
from octavo.core.request import Request, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.observe.explainer import Explainer
from octavo.observe.history import History

LIMITS = Limits(16, (20_000,), 4096, 32_000, max_batch_tokens=2048, max_sequences=256)


class Load:
    """A scheduler with open requests, its history, and the CPU seconds of both."""

    def __init__(self) -> None:
        self.now = self.spent = 0.0
        self.num_requests = 0
        self.scheduler = Scheduler(LIMITS)
        self.history = History(self.scheduler, now=lambda: self.now)
        self.explainer = Explainer(self.history, lambda: self.now)
        self._rng = random.Random(0)

    def fill(self, num_open: int) -> None:
        """Admit requests until `num_open` are open."""
        while self.scheduler.num_running + self.scheduler.num_waiting < num_open:  # each has one sequence
            params = SamplingParams(max_tokens=self._rng.randrange(50, 300), temperature=0.0)
            length = self._rng.randrange(50, 500)
            request = Request(f"r{self.num_requests}", None, params, self.now, num_prompt_tokens=length)
            self.num_requests += 1
            self.scheduler.admit(request, self.now)
            self._tell(self.history.admitted, request)

    def step(self) -> None:
        """Run one step, and report it to the history as the engine loop does."""
        plan = self.scheduler.plan(self.now)
        self.now += 0.01 + 1e-5 * plan.num_query_tokens
        result = StepResult(None)
        events = self.scheduler.commit(plan, result, self.now)
        self._tell(self.history.decided, plan.events)
        self._tell(self.history.decided, events.decisions)
        self._tell(self.history.stepped, plan, result, events)

    def _tell(self, hook: Callable[..., None], *arguments: Any) -> None:
        begun = time.thread_time()
        hook(*arguments)
        self.spent += time.thread_time() - begun


def main() -> int:
    """Measure and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--waiting", type=int, default=1000)
    args = parser.parse_args()
    load = Load()
    for _ in range(args.steps):
        load.fill(LIMITS.max_sequences)
        load.step()
    figures = {"us_per_step": 1e6 * load.spent / args.steps, "requests_per_step": load.num_requests / args.steps}
    load.fill(LIMITS.max_sequences + args.waiting)
    load.step()
    load.step()
    last = f"r{load.num_requests - 1}"
    for what, argument in (("first_ask_ms", last), ("next_ask_ms", last), ("list_all_ms", "")):
        begun = time.thread_time()
        load.explainer.answer(argument)
        figures[what] = 1e3 * (time.thread_time() - begun)
    print(json.dumps({name: round(value, 2) for name, value in figures.items()}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
