"""`octavo bench sweep`: tokens a second over concurrency, and a step's time over the context, beside the floor.

Owns: the arguments, the two curves and their picture. Does not: measure (bench does) or open engines (bench latency).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from octavo.bench.points import LoadShape, Point
from octavo.cli.bench_arguments import check_at_least
from octavo.cli.bench_latency import measure_all, open_for, report_head, show_points
from octavo.cli.flags import add_settings, check_output
from octavo.config import ENGINE_SECTIONS
from octavo.simulator.charts import Chart, Line, draw_alone

CONCURRENCY = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="what to run [smollm2]")
    group = parser.add_argument_group("curves")
    group.add_argument("--concurrency", type=int, nargs="+", default=CONCURRENCY, metavar="N", help="requests at once")
    group.add_argument("--input-len", type=int, default=128, metavar="N", help="tokens of their prompts [128]")
    group.add_argument("--output-len", type=int, default=64, metavar="N", help="tokens produced for each [64]")
    group.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, metavar="N", help="tokens of context")
    group.add_argument("--rows", type=int, default=8, metavar="N", help="requests at once over the contexts [8]")
    group.add_argument("--steps", type=int, default=32, metavar="N", help="tokens produced at each context [32]")
    group.add_argument("--runs", type=int, default=3, metavar="N", help="passes; the median one is reported [3]")
    group.add_argument("--svg", metavar="FILE", help="draw both curves into this file")
    group.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    add_settings(parser, ENGINE_SECTIONS)


def run(args: argparse.Namespace) -> int:
    """Measure, print tables or one JSON object, and draw."""
    check_at_least(args, 1, "concurrency", "input_len", "output_len", "contexts", "rows", "runs")
    check_at_least(args, 2, "steps")
    check_output("--svg", args.svg)
    over_rows = [LoadShape(rows, args.input_len, args.output_len) for rows in sorted(set(args.concurrency))]
    over_context = [LoadShape(args.rows, context, args.steps) for context in sorted(set(args.contexts))]
    opened = open_for(args, [*over_rows, *over_context])
    points = measure_all(opened, [*over_rows, *over_context], args.runs)
    first, second = points[: len(over_rows)], points[len(over_rows) :]
    if not args.json:
        show_points(opened, [("Over concurrency", first), (f"Over the context, {args.rows} at once", second)])
    if args.svg:
        Path(args.svg).write_text(picture(first, second), encoding="utf-8")
    curves = {name: [point.as_dict() for point in curve] for name, curve in (("rows", first), ("contexts", second))}
    if args.json:
        print(json.dumps({**report_head("sweep", opened), **curves}))
    return 0


def picture(over_rows: Sequence[Point], over_context: Sequence[Point]) -> str:
    """Return an SVG of both curves, each beside its floor: an engine at its floor would follow the dashed line."""
    speeds = [(point.at_once, point.output_tokens_per_s) for point in over_rows]
    bounds = [(point.at_once, point.at_once / point.floor_ms * 1e3) for point in over_rows if point.floor_ms]
    steps = [(point.num_prompt, point.step_ms) for point in over_context if point.step_ms]
    floors = [(point.num_prompt, point.floor_ms) for point in over_context if point.floor_ms]
    lengths = f"{over_rows[0].num_prompt} in, {over_rows[0].num_output} out"
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
                f"Decode step, {over_context[0].at_once} rows",
                "tokens of context",
                "ms",
                [Line("measured", steps), Line("memory floor", floors, 1, is_dashed=True)],
                is_log=True,
            ),
        ]
    )
