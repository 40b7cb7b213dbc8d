"""`octavo bench scheduler`: the scheduler's own cost, without model and torch."""

from __future__ import annotations

import argparse
import json
import platform
import sys

from rich.console import Console
from rich.progress import track

from octavo.bench.scheduler_cost import RUNNING, WAITING, measure_one
from octavo.bench.table import show_rows
from octavo.cli.flags import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("--running", type=int, nargs="+", default=RUNNING, metavar="N", help=f"{RUNNING}")
    parser.add_argument("--waiting", type=int, nargs="+", default=WAITING, metavar="N", help=f"{WAITING}")
    parser.add_argument("--steps", type=int, default=64, metavar="N", help="steps to take the median of [64]")
    parser.add_argument("--policy", default="fcfs", help="the policy, as for serve [fcfs]")
    parser.add_argument("--json", action="store_true", help="print only the JSON line")


def run(args: argparse.Namespace) -> int:
    """Measure each pair, print a table, and as the last line one JSON object."""
    for name, low in (("running", 1), ("waiting", 0), ("steps", 1)):
        given = getattr(args, name)
        least = min(given) if not isinstance(given, int) else given
        if least < low:
            raise UsageError(f"--{name} is {least}; give at least {low}")
    pairs = [(running, waiting) for running in args.running for waiting in args.waiting]
    progress = Console(stderr=True)
    shown = track(pairs, "measuring", console=progress, transient=True, disable=not sys.stderr.isatty())
    costs = [measure_one(running, waiting, args.steps, args.policy) for running, waiting in shown]
    if not args.json:
        columns = ("running", "waiting", "plan us", "commit us", "plan + commit us", "p99 us", "admit us")
        rows = [tuple(cost.as_dict().values()) for cost in costs]
        show_rows(Console(), "Scheduler cost of one decode step, medians", columns, rows)
    head = {"bench": "scheduler", "policy": args.policy, "python": platform.python_version(), "steps": args.steps}
    print(json.dumps({**head, "costs": [cost.as_dict() for cost in costs]}))
    return 0
