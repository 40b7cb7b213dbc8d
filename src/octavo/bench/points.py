"""One point of a curve: N requests of one length at once, with the times of its requests and steps.

Owns: the workload of a point, the median of its runs, the least time of its prompts. Does not: choose points or draw.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from octavo.bench.floor import StepFloor
from octavo.bench.offline import OfflineBench, RunRecord
from octavo.bench.percentiles import percentile
from octavo.bench.steps import StepCounts
from octavo.bench.workload import draw_workload
from octavo.executors.protocol import Capacity

COLUMNS = (
    "at once", "prompt", "output", "tokens/s", "first token ms", "its floor", "ms/token", "p99", "step ms", "host ms",
    "floor ms", "floor reached",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoadShape:
    """Requests at once, tokens of each prompt, tokens produced for each."""

    at_once: int
    num_prompt: int
    num_output: int


@dataclass(frozen=True, slots=True)
class Point:
    """The median run of a shape, times in milliseconds; the step's are means of the steps that decode all rows."""

    at_once: int
    num_prompt: int
    num_output: int
    output_tokens_per_s: float
    ttft_ms: float
    ttft_floor_ms: float
    token_ms: float
    token_p99_ms: float
    step_ms: float | None
    host_ms: float | None
    floor_ms: float | None
    floor_fraction: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(self).items()}

    def row(self) -> tuple[object, ...]:
        """Return the table row, in the order of COLUMNS."""
        reached = "" if self.floor_fraction is None else f"{self.floor_fraction:.1%}"
        values = (*asdict(self).values(),)[:-1]
        return (*("" if value is None else value for value in values), reached)


async def measure_point(
    bench: OfflineBench, shape: LoadShape, capacity: Capacity, runs: int, advance: Callable[[int], object]
) -> list[tuple[RunRecord, StepCounts]]:
    """Run a shape `runs` times, each with its own prompts, all requests open at once."""
    seen = []
    for number in range(runs):
        seed = number * 1_000_003 + shape.at_once * 1009 + shape.num_prompt
        workload = draw_workload(shape.at_once, shape.num_prompt, shape.num_output, capacity.vocab_size, seed)
        record = await bench.run(workload, advance)
        seen.append((record, bench.steps.take()))
    return seen


def make_point(
    shape: LoadShape, seen: list[tuple[RunRecord, StepCounts]], floor: StepFloor, max_batch_tokens: int
) -> Point:
    """Return the median run (by throughput) of a shape."""
    record, counts = sorted(seen, key=lambda pair: pair[0].output_tokens_per_s)[len(seen) // 2]
    step = counts.at_rows(shape.at_once, floor)
    return Point(
        shape.at_once,
        shape.num_prompt,
        shape.num_output,
        record.output_tokens_per_s,
        percentile(record.ttft_s, 50) * 1e3,
        _prompts_floor_s(shape, floor, max_batch_tokens) * 1e3,
        percentile(record.inter_token_s, 50) * 1e3,
        percentile(record.inter_token_s, 99) * 1e3,
        step.get("step_ms"),
        step.get("host_ms"),
        step.get("floor_ms"),
        step.get("floor_fraction"),
    )


def _prompts_floor_s(shape: LoadShape, floor: StepFloor, max_batch_tokens: int) -> float:
    """Return the floor of the steps until half of the prompts, in order, are computed (the median first token)."""
    left, seconds = (shape.at_once + 1) // 2 * shape.num_prompt, 0.0
    while left > 0:
        seconds += floor.seconds(min(left, max_batch_tokens), 0)
        left -= max_batch_tokens
    return seconds
