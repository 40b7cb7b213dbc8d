"""`octavo bench offline`: throughput, latencies, step split and memory floor on one workload.

Owns: the arguments, the order of measuring, the report. Does not: measure (bench does).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from functools import partial
from pathlib import Path

from rich.console import Console

from octavo.assembly import LocalEngine, build_local
from octavo.bench.engine_facts import peak_memory_bytes, probe_floor
from octavo.bench.offline import OfflineBench, RunRecord
from octavo.bench.report import Measured, make_report, show_report
from octavo.bench.steps import StepCounts, StepRecorder
from octavo.bench.workload import BenchWorkload, draw_workload, read_workload
from octavo.cli.bench_arguments import add_workload, check_at_least, token_progress
from octavo.cli.flags import add_settings, config_from
from octavo.cli.terminal import loading, warn_limits
from octavo.config import ENGINE_SECTIONS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="what to run [smollm2]")
    group = add_workload(parser)
    group.add_argument("--runs", type=int, default=1, metavar="N", help="passes; the median one is reported [1]")
    group.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    add_settings(parser, (*ENGINE_SECTIONS, "recording"))


def run(args: argparse.Namespace) -> int:
    """Measure, and print tables or one JSON object."""
    check_at_least(args, 1, "num_prompts", "input_len", "output_len", "runs")
    config = config_from(args, model=args.model)
    workload = read_workload(Path(args.workload)) if args.workload else None
    begun = time.perf_counter()
    with loading(config.model.model, args.json):
        engine = build_local(config)
    warn_limits(config, engine.capacity)
    startup_s = time.perf_counter() - begun
    if workload is None:
        vocab_size, seed = engine.capacity.vocab_size, config.execution.seed
        workload = draw_workload(args.num_prompts, args.input_len, args.output_len, vocab_size, seed)
    steps = StepRecorder()
    steps.watch(engine.loop)
    records = asyncio.run(_run_all(engine, workload, steps, args.runs))
    peak_bytes = peak_memory_bytes()
    measured = Measured(
        engine.text.name,
        config,
        engine.capacity,
        workload,
        engine.capacity.num_slots,
        probe_floor(engine.capacity),
        records,
        startup_s,
        peak_bytes,
    )
    report = make_report(measured)
    if not args.json:
        show_report(Console(), report)
    if args.json:
        print(json.dumps(report))
    return 0


async def _run_all(
    engine: LocalEngine, workload: BenchWorkload, steps: StepRecorder, runs: int
) -> list[tuple[RunRecord, StepCounts]]:
    bench = OfflineBench(engine.client, steps, engine.capacity.num_slots)
    records = []
    try:
        await bench.warm_up(workload)
        with token_progress() as progress:
            for number in range(runs):
                task = progress.add_task(f"pass {number + 1} of {runs}", total=workload.num_output_tokens)
                record = await bench.run(workload, partial(progress.advance, task))
                records.append((record, steps.take()))
    finally:
        await engine.client.close()
    return records
