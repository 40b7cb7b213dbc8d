"""Runs N requests of equal length at once: time to first token and time per token, beside the memory floor.

Owns: the points of `octavo bench latency` and `sweep`; their tables and curves. Does not: open engines or write files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from octavo.bench.offline import Advance, BenchEngine, RunRecord, StepFloor, machine_rows
from octavo.bench.report import Report, headline, percentile, show_facts, show_rows
from octavo.bench.workload import BenchWorkload, draw_workload
from octavo.errors import ConfigError
from octavo.executors.protocol import Capacity
from octavo.simulator.charts import Chart, Line, draw_alone

COLUMNS = (
    "at once", "prompt", "output", "tokens/s", "first token ms", "its floor", "ms/token", "p99", "step ms", "host ms",
    "floor ms", "floor reached",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoadShape:
    """The number of requests at once, the tokens of each prompt, and the output tokens of each request."""

    at_once: int
    num_prompt: int
    num_output: int

    def workloads(self, vocab_size: int, runs: int) -> list[BenchWorkload]:
        """Return one workload per run; each has different prompts."""
        seeds = (number * 1_000_003 + self.at_once * 1009 + self.num_prompt for number in range(runs))
        return [draw_workload(self.at_once, self.num_prompt, self.num_output, vocab_size, seed) for seed in seeds]

    def check_fits(self, capacity: Capacity) -> None:
        """Raise ConfigError if the engine cannot run all requests of this shape at once."""
        room, length = min(capacity.num_blocks) * capacity.block_size, self.num_prompt + self.num_output
        if self.at_once > capacity.num_slots or self.at_once * length > room or length > capacity.max_model_len:
            raise ConfigError(
                f"{self.at_once} requests of {length} tokens do not fit: this engine holds {capacity.num_slots} at "
                f"once, {room} tokens, {capacity.max_model_len} each; give smaller numbers, or raise --max-num-seqs, "
                "--kv-cache-tokens or --max-model-len"
            )


def measure_points(
    bench: BenchEngine, shapes: Sequence[LoadShape], runs: int, max_batch_tokens: int, advance: Advance
) -> list[Report]:
    """Run each shape `runs` times, then close the engine. Return one point per shape."""
    vocab_size = bench.engine.capacity.vocab_size
    workloads = [workload for shape in shapes for workload in shape.workloads(vocab_size, runs)]
    records = bench.run(workloads, advance)
    return [
        make_point(shape, records[index * runs : (index + 1) * runs], bench.floor, max_batch_tokens)
        for index, shape in enumerate(shapes)
    ]


def make_point(shape: LoadShape, runs: Sequence[RunRecord], floor: StepFloor, max_batch_tokens: int) -> Report:
    """Return the figures of the run with median throughput. Step figures are means of steps that decode every request.

    `ttft_floor_ms` is the floor of the steps that compute the first half of the prompts: a floor of the median TTFT.
    """
    record = sorted(runs, key=lambda run: run.output_tokens_per_s)[len(runs) // 2]
    step = record.steps.at_rows(shape.at_once, floor)
    left, prompts_floor_s = (shape.at_once + 1) // 2 * shape.num_prompt, 0.0
    while left > 0:
        prompts_floor_s += floor.seconds(min(left, max_batch_tokens), 0)
        left -= max_batch_tokens
    point: dict[str, Any] = {
        "at_once": shape.at_once,
        "num_prompt": shape.num_prompt,
        "num_output": shape.num_output,
        "output_tokens_per_s": record.output_tokens_per_s,
        "ttft_ms": percentile(record.ttft_s, 50) * 1e3,
        "ttft_floor_ms": prompts_floor_s * 1e3,
        "token_ms": percentile(record.inter_token_s, 50) * 1e3,
        "token_p99_ms": percentile(record.inter_token_s, 99) * 1e3,
        **{name: step.get(name) for name in ("step_ms", "host_ms", "floor_ms", "floor_fraction")},
    }
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in point.items()}


def show_latency(console: Console, report: Report) -> None:
    """Print the report of `octavo bench latency` as tables."""
    _show_points(console, report, {"Requests of one length at once": report["points"]})


def show_sweep(console: Console, report: Report) -> None:
    """Print the report of `octavo bench sweep` as tables."""
    at_once = report["contexts"][0]["at_once"]
    tables = {"Over concurrency": report["rows"], f"Over the context, {at_once} at once": report["contexts"]}
    _show_points(console, report, tables)


def draw_sweep(report: Report) -> str:
    """Return an SVG of both curves. Dashed lines show the floors."""
    over_rows, over_context = report["rows"], report["contexts"]
    speeds = [(point["at_once"], point["output_tokens_per_s"]) for point in over_rows]
    bounds = [
        (point["at_once"], point["at_once"] / point["floor_ms"] * 1e3) for point in over_rows if point["floor_ms"]
    ]
    steps = [(point["num_prompt"], point["step_ms"]) for point in over_context if point["step_ms"]]
    floors = [(point["num_prompt"], point["floor_ms"]) for point in over_context if point["floor_ms"]]
    lengths = f"{over_rows[0]['num_prompt']} in, {over_rows[0]['num_output']} out"
    return draw_alone(
        [
            Chart(
                f"Output tokens/s ({lengths})",
                "requests at once",
                "tokens/s",
                [Line("measured, prompts included", speeds), Line("floor of decode steps", bounds, 1, is_dashed=True)],
                is_log=True,
            ),
            Chart(
                f"Decode step, {over_context[0]['at_once']} rows",
                "tokens of context",
                "ms",
                [Line("measured", steps), Line("memory floor", floors, 1, is_dashed=True)],
                is_log=True,
            ),
        ]
    )


def _show_points(console: Console, report: Report, tables: dict[str, list[Report]]) -> None:
    show_facts(console, "", {"model": headline(report), **machine_rows(report)})
    for title, points in tables.items():
        console.print()
        show_rows(console, title, COLUMNS, [point_row(point) for point in points])


def point_row(point: Report) -> tuple[object, ...]:
    """Return a point's values in the order of COLUMNS."""
    *values, fraction = ("" if value is None else value for value in point.values())
    return (*values, f"{fraction:.1%}" if fraction != "" else "")
