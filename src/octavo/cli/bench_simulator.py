"""`octavo bench simulator`: how many requests a simulation completes in a second of one core.

Owns: the flags and the table. Does not: measure.
"""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import asdict

from rich.console import Console

from octavo.bench.simulator_cost import DEVICE, LENGTHS, MODEL, SimulatorSetting, measure_simulator
from octavo.bench.table import show_facts
from octavo.cli.flags import UsageError, whole
from octavo.simulator.routers import ROUTERS

MAX_REQUESTS = 10_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    own = SimulatorSetting()
    parser.add_argument(
        "--requests", type=whole, default=own.requests, metavar="N", help=f"requests in all [{own.requests:,}]"
    )
    parser.add_argument(
        "--replicas", type=whole, default=own.replicas, metavar="N", help=f"engines behind a router [{own.replicas}]"
    )
    parser.add_argument(
        "--rate", type=float, default=own.rate, metavar="X", help=f"requests a second for each replica [{own.rate:g}]"
    )
    parser.add_argument(
        "--router", default=own.router, choices=tuple(ROUTERS), help=f"who gets a request [{own.router}]"
    )
    parser.add_argument("--policy", default=own.policy, help=f"as for serve [{own.policy}]")
    parser.add_argument("--depth", type=int, default=own.depth, choices=(1, 2), help="plans in flight [1]")
    parser.add_argument(
        "--fast-forward", action=argparse.BooleanOptionalAction, default=True,
        help="compute unchanged decode steps together [on]",
    )  # fmt: skip
    parser.add_argument(
        "--check", type=whole, default=1000, metavar="N", help="first simulate N of them both ways and compare [1000]"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    """Measure, and print a table or one JSON object."""
    if not 1 <= args.requests <= MAX_REQUESTS:
        raise UsageError(f"--requests is {args.requests}; give 1 to {MAX_REQUESTS}")
    if not 0 < args.rate < 1e6:
        raise UsageError(f"--rate is {args.rate}; give a number above 0")
    setting = SimulatorSetting(
        args.requests, args.replicas, args.rate, args.router, args.policy, args.depth, args.fast_forward,
        min(args.check, args.requests),
    )  # fmt: skip
    cost = measure_simulator(setting)
    if not args.json:
        told = {
            "requests": cost.requests,
            "wall seconds": cost.wall_s,
            "CPU seconds": cost.cpu_s,
            "requests a CPU second": cost.requests_per_cpu_s,
            "CPU ms a request": cost.ms_per_request,
            "simulated seconds": cost.simulated_s,
            "steps": cost.steps,
            "steps made together": f"{cost.forwarded_share:.1%}",
            "rows a step": cost.rows_per_step,
            "devices busy": f"{cost.busy_share:.1%}",
            "prompt, output tokens": f"{cost.mean_prompt:,.0f}, {cost.mean_output:,.0f} on average",
            "peak memory": f"{cost.peak_mib:,.0f} MiB",
            "adding up range(1000)": f"{cost.bare_us[0]:.1f} us before, {cost.bare_us[1]:.1f} us behind",
        }
        if cost.checked:
            told["both ways equal"] = f"{cost.checked:,} requests"
        asked = {
            "model, device": f"{MODEL}, {args.replicas} x {DEVICE}",
            "workload": f"lengths {LENGTHS}, {args.rate:g} requests/s each",
        }
        show_facts(Console(width=110), "simulator", {**asked, **told})
    facts = {"bench": "simulator", "python": platform.python_version(), "setting": asdict(setting)}
    if args.json:
        print(json.dumps({**facts, "cost": cost.as_dict()}))
    return 0
