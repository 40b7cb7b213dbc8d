"""`octavo bench startup`: from a cold process to the first token, in parts, beside the import of torch.

Owns: the arguments and the table. Does not: measure (bench does).
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console

from octavo.assembly import find_files
from octavo.bench.engine_facts import headline
from octavo.bench.startup import PARTS, SUBJECTS, Startup, measure_startup
from octavo.bench.table import show_facts, show_rows
from octavo.cli.bench_arguments import check_at_least, token_progress
from octavo.cli.flags import add_settings, config_from

_WORDS = {
    "interpreter": "interpreter",
    "imports": "imports",
    "torch": "import of torch",
    "tokenizer": "tokenizer (beside the rest)",
    "weights": "weights",
    "pool": "KV pool",
    "open": "engine open, torch to pool",
    "first_step": "first step",
    "first_token": "first token, from the start of the process",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="what to run [smollm2]")
    group = parser.add_argument_group("measuring")
    group.add_argument("--runs", type=int, default=5, metavar="N", help="processes of each kind, in turn [5]")
    group.add_argument("--input-len", type=int, default=32, metavar="N", help="tokens of the prompt [32]")
    group.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    add_settings(parser, ("model", "chat", "cache", "scheduling", "execution"))


def run(args: argparse.Namespace) -> int:
    """Measure, and print a table or one JSON object."""
    check_at_least(args, 1, "runs", "input_len")
    config = config_from(args, model=args.model)
    find_files(config)  # report a wrong name before any process starts
    with token_progress("processes") as progress:
        task = progress.add_task("starting", total=1 + 2 * args.runs)
        found = measure_startup(config, args.input_len, args.runs, lambda: progress.advance(task))
    report = make_startup_report(found, args.runs)
    if not args.json:
        show_startup(Console(), found, report)
    if args.json:
        print(json.dumps(report))
    return 0


def make_startup_report(found: dict[str, Startup], runs: int) -> dict[str, Any]:
    """Return the medians of every subject, and the first token's time as a multiple of torch's import."""
    warm = found["warm weight cache"]
    subjects = {name.replace(" ", "_"): found[name].as_dict() for name in SUBJECTS}
    torch_s = subjects["import_torch"]["process_s"]["median"]
    first_s = subjects["warm_weight_cache"]["first_token_s"]["median"]
    head = {"bench": "startup", **warm.facts, "runs": runs, **subjects}
    return {**head, "first_token_per_import_torch": round(first_s / torch_s, 3) if torch_s else 0.0}


def show_startup(console: Console, found: dict[str, Startup], report: dict[str, Any]) -> None:
    """Print the times of whole processes and of their parts."""
    warm, cold = found["warm weight cache"], found["cold weight cache"]
    facts = {
        "model": headline(report),
        "first token": f"{report['warm_weight_cache']['first_token_s']['median']:.2f} s, "
        f"{report['first_token_per_import_torch']:.2f} times the import of torch",
        "peak memory": f"{warm.peak_memory_bytes / 2**30:.2f} GiB warm, {cold.peak_memory_bytes / 2**30:.2f} cold "
        f"({report['weight_bytes'] / 2**30:.2f} weights)",
    }
    show_facts(console, "Start-up", facts)
    console.print()
    rows = [(name, *report[name.replace(" ", "_")]["process_s"].values()) for name in SUBJECTS]
    show_rows(console, "Whole processes, s", ("", "median", "min", "max"), rows)
    console.print()
    parts = warm.median_parts_ms(), cold.median_parts_ms()
    rows = [(_WORDS[name], *(one.get(name, "") for one in parts)) for name in PARTS if name in parts[0]]
    show_rows(console, "Parts, median ms", ("", "warm weight cache", "cold"), rows)
