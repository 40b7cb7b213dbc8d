"""What simulator tests stand on: tiny limits, cost models of known times, workloads, a sink that keeps digests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from octavo.core.limits import Limits
from octavo.core.plan import Event, Events, StepFailure, StepPlan, StepResult
from octavo.core.request import Request
from octavo.simulator.arrival import Arrival
from octavo.simulator.cost_model import CostModel, StepShape
from octavo.simulator.outcomes import Outcomes, SimulatedRun


def limits(**changes: Any) -> Limits:
    fields: dict[str, Any] = {
        "block_size": 4,
        "num_blocks": (120,),
        "max_model_len": 128,
        "vocab_size": 97,
        "max_batch_tokens": 24,
        "max_sequences": 6,
    }
    return Limits(**{**fields, **changes})


class ConstantCosts(CostModel):
    """Every step takes the same."""

    name = "constant"

    def __init__(self, step_s: float = 0.013, host_s: float = 0.0) -> None:
        self._step_s, self._host_s = step_s, host_s

    def step_s(self, shape: StepShape) -> float:
        return self._step_s

    def host_s(self, shape: StepShape) -> float:
        return self._host_s


class LinearCosts(CostModel):
    """A time for the step, each token and each position read; priced by its sums for decode rows."""

    name = "linear"

    def __init__(self) -> None:
        self.decode_s = self._decode_s

    def step_s(self, shape: StepShape) -> float:
        read = sum(shape.decode_kv) + sum(before + count for count, before in shape.prefills)
        return 0.004 + 0.0003 * shape.num_tokens + 0.000011 * read

    def host_s(self, shape: StepShape) -> float:
        return 0.0007 + 0.00001 * (len(shape.decode_kv) + len(shape.prefills))

    def _decode_s(self, num_rows: int, kv_sum: int) -> float:
        return 0.004 + 0.0003 * num_rows + 0.000011 * kv_sum


class Digests:
    """Keeps each step's digest, when it was planned and when it was committed, and every decision."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, bytes, float, float]] = []
        self.decisions: list[Event] = []
        self.admissions: list[str] = []

    def admitted(self, request: Request) -> None:
        self.admissions.append(request.request_id)

    def decided(self, decisions: tuple[Event, ...]) -> None:
        self.decisions.extend(decisions)

    def stepped(self, plan: StepPlan, outcome: StepResult | StepFailure, events: Events) -> None:
        self.steps.append((plan.step, plan.digest(), plan.now, events.time))


def workload(num: int, rate: float = 30.0, seed: int = 0, **options: Any) -> list[Arrival]:
    """Requests of 1 to 40 tokens and as many outputs, some with shared prefixes, tenants and sessions."""
    rng = random.Random(seed)
    at, arrivals = 0.0, []
    for index in range(num):
        at += rng.expovariate(rate)
        prompt, family = rng.randint(1, 40), rng.randint(0, 3)
        follows = rng.randrange(index) if index > 4 and rng.random() < options.get("followers", 0.0) else None
        keys = [family * 1000 + place for place in range(prompt // 8)] if rng.random() < 0.5 else []
        arrivals.append(
            Arrival(
                at if follows is None else rng.choice((0.0, 0.05, 0.3)),
                prompt,
                rng.randint(1, 40),
                tenant=rng.choice(("a", "b", "c")),
                session=f"s{rng.randint(0, 9)}",
                keys=keys,
                key_tokens=8,
                follows=follows,
            )
        )
    return arrivals


def columns(outcomes: Outcomes) -> list[Sequence[float]]:
    return [
        outcomes.indices, outcomes.arrivals, outcomes.starts, outcomes.first_tokens, outcomes.ends,
        outcomes.prompt_tokens, outcomes.output_tokens, outcomes.cached, outcomes.preemptions, outcomes.restarts,
        outcomes.replicas, outcomes.tenants, outcomes.reasons,
    ]  # fmt: skip


def check_whole(run: SimulatedRun, arrivals: Sequence[Arrival]) -> None:
    """Each request ended exactly once, with all that it asked for, in the order of its times."""
    out = run.outcomes
    assert sorted(out.indices) == list(range(len(arrivals)))
    for place, index in enumerate(out.indices):
        assert out.served(place)
        assert out.output_tokens[place] == arrivals[index].output_tokens
        assert out.arrivals[place] <= out.starts[place] < out.first_tokens[place] <= out.ends[place]
