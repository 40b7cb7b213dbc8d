"""Draw docs/img/fairness.svg: the difference between two tenants' service under fcfs and under fair.

Owns: the simulated engine (the real scheduler, constant tokens, a clock that counts steps); two tenants that always
have waiting requests, one with sixteen times as many; the picture.
Does not: run a model, or measure time. The same seed and scheduler give the same picture.

Service is what the policy charges: prompt tokens, and twice the output tokens. Usage: python tools/fairness_plot.py
"""

from __future__ import annotations

import json
import random
import sys
from array import array
from dataclasses import dataclass, field
from pathlib import Path

from octavo.core.limits import Limits
from octavo.core.plan import ROW_SAMPLE, EventKind, StepResult
from octavo.core.policy.fair import Fair
from octavo.core.request import Request, SamplingParams
from octavo.core.scheduler import Scheduler

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "img" / "fairness.svg"
NUM_STEPS = 4000
WAITING = {"flood": 64, "modest": 4}  # requests that each tenant keeps waiting
PROMPT_LENGTHS = (32, 256)
OUTPUT_LENGTHS = (16, 128)
SIZES = {
    "block_size": 16,
    "num_blocks": (256,),
    "max_model_len": 512,
    "vocab_size": 1000,
    "max_batch_tokens": 512,
    "max_sequences": 16,
}


@dataclass
class Drift:
    """The flooding tenant's service minus the modest tenant's, after each step; the bound on the range."""

    policy: str
    bound: float
    differences: list[float] = field(default_factory=list)

    @property
    def range(self) -> float:
        """Return the greatest change over any range of steps."""
        return max(self.differences) - min(self.differences)


class Tenants:
    """Two tenants that refill their queues after every step."""

    def __init__(self, scheduler: Scheduler, seed: int) -> None:
        self.scheduler = scheduler
        self.rng = random.Random(seed)
        self.num_waiting = dict.fromkeys(WAITING, 0)
        self.service = dict.fromkeys(WAITING, 0.0)
        self.owner: dict[str, tuple[str, int]] = {}

    def refill(self, now: float) -> None:
        """Submit requests until each tenant has its number of waiting requests."""
        for tenant, wanted in WAITING.items():
            while self.num_waiting[tenant] < wanted:
                name = f"r{len(self.owner)}"
                length = self.rng.randint(*PROMPT_LENGTHS)
                ids = array("i", [self.rng.randrange(1000) for _ in range(length)])
                params = SamplingParams(max_tokens=self.rng.randint(*OUTPUT_LENGTHS), temperature=0.0, ignore_eos=True)
                self.owner[name] = tenant, length
                self.num_waiting[tenant] += 1
                self.scheduler.admit(Request(name, ids, params, arrival=now, tenant=tenant), now)

    def step(self, now: float) -> None:
        """Plan and commit one step, and record the service."""
        plan = self.scheduler.plan(now)
        result = StepResult(array("i", [7]) * sum(flag & ROW_SAMPLE for flag in plan.flags))
        events = self.scheduler.commit(plan, result, now)
        for event in (*plan.events, *events.decisions):
            tenant, length = self.owner[event.request_id]
            if event.kind == EventKind.ADMITTED:
                self.service[tenant] += Fair.prompt_weight * length
            self.num_waiting[tenant] -= event.kind in (EventKind.ADMITTED, EventKind.RESUMED)
            self.num_waiting[tenant] += event.kind == EventKind.PREEMPTED
        for name in events.request_ids:
            self.service[self.owner[name][0]] += Fair.output_weight


def simulate(policy: str, num_steps: int = NUM_STEPS, seed: int = 0) -> Drift:
    """Run both tenants under a policy."""
    limits = Limits(policy=policy, **SIZES)  # type: ignore[arg-type]
    capacity = limits.num_blocks[0] * limits.block_size
    drift = Drift(policy, 2 * max(Fair.prompt_weight * PROMPT_LENGTHS[1], Fair.output_weight * capacity))
    tenants = Tenants(Scheduler(limits), seed)
    for step in range(num_steps):
        tenants.refill(float(step))
        tenants.step(float(step))
        drift.differences.append(tenants.service["flood"] - tenants.service["modest"])
    return drift


def draw(drifts: list[Drift]) -> str:
    """Return an SVG of two panels: all values, and the values up to the bound."""
    top = max(max(drift.differences) for drift in drifts)
    bound = drifts[0].bound
    panels = [_panel(drifts, 70, -bound * 1.2, top * 1.05), _panel(drifts, 450, -bound * 1.2, bound * 1.2)]
    return "\n".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 780 330" font-family="sans-serif" font-size="12">',
            '<rect width="780" height="330" fill="white"/>',
            '<text x="70" y="20">Service of a flooding tenant less that of a modest one, by step</text>',
            *panels,
            "</svg>\n",
        ]
    )


COLOURS = {"fcfs": "#c0392b", "fair": "#1f6fb2"}
WIDTH, HEIGHT, TOP = 300, 240, 40


def _panel(drifts: list[Drift], left: int, low: float, high: float) -> str:
    def y(value: float) -> float:
        return round(TOP + HEIGHT * (high - value) / (high - low), 1)

    bound, parts = drifts[0].bound, []
    for value in (-bound, 0.0, bound):
        dash = ' stroke-dasharray="4 3"' if value else ""
        parts.append(f'<path d="M{left} {y(value)}h{WIDTH}" stroke="#888" fill="none"{dash}/>')
    if high > 2 * bound:
        parts.append(f'<text x="{left - 6}" y="{y(high / 1.05) + 4}" text-anchor="end">{high / 1.05:,.0f}</text>')
    else:
        parts += [f'<text x="{left - 6}" y="{y(v) + 4}" text-anchor="end">{v:,.0f}</text>' for v in (-bound, 0, bound)]
        parts.append(f'<text x="{left + WIDTH}" y="{y(bound) - 5}" text-anchor="end">bound</text>')
    for drift in drifts:
        count = len(drift.differences)
        shown = [(index, value) for index, value in enumerate(drift.differences) if index % max(1, count // 400) == 0]
        inside = [(index, value) for index, value in shown if low <= value <= high]
        points = " ".join(f"{left + WIDTH * index / count:.1f},{y(value)}" for index, value in inside)
        colour = COLOURS[drift.policy]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    steps = len(drifts[0].differences)
    base = TOP + HEIGHT + 18
    parts.append(f'<text x="{left}" y="{base}">0</text>')
    parts.append(f'<text x="{left + WIDTH}" y="{base}" text-anchor="end">{steps:,} steps</text>')
    for index, drift in enumerate(drifts):
        x = left + 90 + 60 * index
        parts.append(f'<text x="{x}" y="{base + 20}" fill="{COLOURS[drift.policy]}">{drift.policy}</text>')
    return "\n".join(parts)


def main() -> int:
    """Write the picture; print the numbers."""
    drifts = [simulate("fcfs"), simulate("fair")]
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(draw(drifts), encoding="utf-8")
    numbers = {drift.policy: {"range": drift.range, "end": drift.differences[-1]} for drift in drifts}
    print(json.dumps({"steps": NUM_STEPS, "bound": drifts[0].bound, **numbers}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
