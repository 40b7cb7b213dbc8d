"""`octavo bench latency`: first token and time per token of N requests at once, beside the memory floor.

Owns: the arguments and tables of latency, and what it shares with sweep: opening an engine and measuring shapes.
Does not: measure (bench does).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console

from octavo.assembly import LocalEngine, build_local, executor_spec
from octavo.bench.engine_facts import (
    engine_facts,
    floor_facts,
    headline,
    memory_facts,
    peak_memory_bytes,
    probe_floor,
)
from octavo.bench.floor import StepFloor
from octavo.bench.offline import OfflineBench
from octavo.bench.points import COLUMNS, LoadShape, Point, make_point, measure_point
from octavo.bench.steps import StepRecorder
from octavo.bench.table import show_facts, show_rows
from octavo.bench.workload import draw_workload
from octavo.cli.bench_arguments import check_at_least, token_progress
from octavo.cli.flags import UsageError, add_settings, config_from, settings_given
from octavo.cli.terminal import loading, warn_limits
from octavo.config import ENGINE_SECTIONS, Config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="what to run [smollm2]")
    group = parser.add_argument_group("requests")
    group.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], metavar="N", help="requests at once [1 8 32]")
    group.add_argument("--input-len", type=int, default=128, metavar="N", help="tokens of each prompt [128]")
    group.add_argument("--output-len", type=int, default=128, metavar="N", help="tokens produced for each [128]")
    group.add_argument("--runs", type=int, default=3, metavar="N", help="passes; the median one is reported [3]")
    group.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    add_settings(parser, ENGINE_SECTIONS)


def run(args: argparse.Namespace) -> int:
    """Measure, and print a table or one JSON object."""
    check_at_least(args, 1, "rows", "input_len", "output_len", "runs")
    shapes = [LoadShape(rows, args.input_len, args.output_len) for rows in args.rows]
    opened = open_for(args, shapes)
    points = measure_all(opened, shapes, args.runs)
    if not args.json:
        show_points(opened, [("Requests of one length at once", points)])
    if args.json:
        print(json.dumps({**report_head("latency", opened), "points": [point.as_dict() for point in points]}))
    return 0


@dataclass(slots=True)
class BenchEngine:
    """An engine to measure, with its settings, its start-up time, and the floor once it is probed."""

    config: Config
    engine: LocalEngine
    steps: StepRecorder
    max_batch_tokens: int
    startup_s: float
    floor: StepFloor | None = None
    peak_memory_bytes: int = 0


def open_for(args: argparse.Namespace, shapes: Sequence[LoadShape]) -> BenchEngine:
    """Open an engine with room for the shapes. Raises UsageError if they do not fit."""
    most = max(shape.at_once for shape in shapes)
    extra = {} if "max_sequences" in settings_given(args) else {"max_sequences": most}
    config = config_from(args, model=args.model, **extra)
    begun = time.perf_counter()
    with loading(config.model.model, args.json):
        engine = build_local(config)
    warn_limits(config, engine.capacity)
    startup_s = time.perf_counter() - begun
    capacity, steps = engine.capacity, StepRecorder()
    room = min(capacity.num_blocks) * capacity.block_size
    for shape in shapes:
        length = shape.num_prompt + shape.num_output
        if shape.at_once > capacity.num_slots or shape.at_once * length > room or length > capacity.max_model_len:
            engine.loop.stop()
            raise UsageError(
                f"{shape.at_once} requests of {length} tokens do not fit: this engine holds {capacity.num_slots} at "
                f"once, {room} tokens, {capacity.max_model_len} each; ask for less, or raise --max-num-seqs, "
                "--kv-cache-tokens or --max-model-len"
            )
    steps.watch(engine.loop)
    batch_tokens = executor_spec(config, capacity.device.partition(":")[0]).max_batch_tokens
    return BenchEngine(config, engine, steps, batch_tokens, startup_s)


def measure_all(opened: BenchEngine, shapes: Sequence[LoadShape], runs: int) -> list[Point]:
    """Measure every shape on the engine, close it, probe the machine, and return the points."""
    seen = asyncio.run(_measure_all(opened, shapes, runs))
    opened.peak_memory_bytes = peak_memory_bytes()
    opened.floor = probe_floor(opened.engine.capacity)
    floor, tokens = opened.floor, opened.max_batch_tokens
    return [make_point(shape, one, floor, tokens) for shape, one in zip(shapes, seen, strict=True)]


async def _measure_all(opened: BenchEngine, shapes: Sequence[LoadShape], runs: int) -> list[Any]:
    capacity, client = opened.engine.capacity, opened.engine.client
    bench = OfflineBench(client, opened.steps, capacity.num_slots)
    try:
        await bench.warm_up(draw_workload(1, shapes[0].num_prompt, shapes[0].num_output, capacity.vocab_size, 0))
        with token_progress() as progress:
            total = sum(shape.at_once * shape.num_output * runs for shape in shapes)
            advance = partial(progress.advance, progress.add_task("measuring", total=total))
            return [await measure_point(bench, shape, capacity, runs, advance) for shape in shapes]
    finally:
        await client.close()


def report_head(bench: str, opened: BenchEngine) -> dict[str, Any]:
    """Return the facts that begin every report of points."""
    assert opened.floor is not None, "measure_all comes first"
    return {
        "bench": bench,
        **engine_facts(opened.engine.text.name, opened.config, opened.engine.capacity),
        **memory_facts(opened.engine.capacity),
        **floor_facts(opened.floor),
        "startup_s": round(opened.startup_s, 3),
        "peak_memory_bytes": opened.peak_memory_bytes,
    }


def show_points(opened: BenchEngine, tables: Sequence[tuple[str, Sequence[Point]]]) -> None:
    """Print the facts of the engine, then the tables of points."""
    head, console = report_head("", opened), Console()
    console = console if console.is_terminal else Console(width=120)
    facts = {
        "model": headline(head),
        "start-up": f"{head['startup_s']:.2f} s",
        "peak memory": f"{head['peak_memory_bytes'] / 2**30:.2f} GiB ({head['weight_bytes'] / 2**30:.2f} weights)",
        "floor at": f"{head['bandwidth_gb_per_s']:.1f} GB/s and {head['gemm_gflop_per_s']:,.0f} GFLOP/s, measured now",
    }
    show_facts(console, "", facts)
    for title, points in tables:
        console.print()
        show_rows(console, title, COLUMNS, [point.row() for point in points])
