"""`octavo bench scheduler`: the scheduler's own cost, without model and torch.

Owns: which loads are measured with which numbers, and the tables. Does not: measure.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import track

from octavo.bench import vllm_scheduler
from octavo.bench.scheduler_cost import ADMIT_TARGET_US, RUNNING, TARGET_US, WAITING, Cost, Subject, measure
from octavo.bench.scheduler_loads import LOADS, MAX_STEPS, LoadSetting, Trial
from octavo.bench.scheduler_profile import Spent, profile
from octavo.bench.table import show_rows
from octavo.bench.vllm_scheduler import VllmTrial
from octavo.cli.flags import UsageError
from octavo.core.policy import POLICIES
from octavo.errors import ConfigError

ALL_POLICIES = "policies"
MEASURED = "vllm, its scheduler measured in turn with this one under decode"
NOT_INSTALLED = "vllm is not installed here, so its scheduler was not measured beside this one"
_LEGEND = """Medians in microseconds. step = plan and commit; bare = times a bare loop over as many rows, in turn;
target = {}; admit = one request without the keys of its prompt, to be {:.0f} at most.
Peer: {}."""
_WIDTH = 110
_T = TypeVar("_T")
_COLUMNS = ("running", "waiting", "plan", "commit", "step", "p99", "bare", "target", "admit")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    names = (*LOADS, ALL_POLICIES)
    texts = "; ".join(f"{load.name}: {load.text}" for load in LOADS.values())
    parser.add_argument(
        "--load",
        nargs="+",
        default=names,
        choices=names,
        help=f"what steps hold [all]. {texts}; {ALL_POLICIES}: decode under every policy",
    )
    parser.add_argument("--running", type=int, nargs="+", default=RUNNING, metavar="N", help=f"sequences {RUNNING}")
    parser.add_argument("--waiting", type=int, nargs="+", default=WAITING, metavar="N", help=f"requests {WAITING}")
    parser.add_argument("--steps", type=int, default=64, metavar="N", help="steps to take the median of [64]")
    parser.add_argument("--policy", default="fcfs", help="the policy, as for serve [fcfs]")
    parser.add_argument("--profile", action="store_true", help="show where the time goes, from runs of their own")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    """Measure each setting, and print a table per load or one JSON object."""
    _check(args)
    settings = list(_settings(args))
    has_peer = vllm_scheduler.is_installed()
    peer = MEASURED if has_peer else NOT_INSTALLED
    tables: dict[str, list[Cost]] = {}
    for table, setting in _shown(settings, "measuring"):
        subjects: list[Subject] = [Trial(setting)]
        if has_peer and table == "decode":
            try:
                subjects.append(VllmTrial(setting))
            except ConfigError as error:
                peer, has_peer = str(error), False
        tables.setdefault(table, []).extend(measure(subjects))
    last = {(setting.load.name, setting.policy): setting for _, setting in settings}  # the largest setting of each
    wanted = list(last.values()) if args.profile else []
    profiles = [(setting, profile(setting)) for setting in _shown(wanted, "profiling")]
    if not args.json:
        for table, costs in tables.items():
            _show_costs(table, costs)
        targets = ", ".join(f"{target:,.0f} with {rows:,} running" for rows, target in TARGET_US.items())
        _console().print(_LEGEND.format(targets, ADMIT_TARGET_US, peer), soft_wrap=True, highlight=False)
        for setting, spent in profiles:
            _show_profile(setting, spent)
    report = {"costs": [cost.as_dict() for of_load in tables.values() for cost in of_load], **_profiles(profiles)}
    if args.json:
        print(json.dumps({**_head(args, peer), **report}))
    return 0


def _check(args: argparse.Namespace) -> None:
    for name, low in (("running", 1), ("waiting", 0), ("steps", 1)):
        given = getattr(args, name)
        least = min(given) if not isinstance(given, int) else given
        if least < low:
            raise UsageError(f"--{name} is {least}; give at least {low}")
    if args.steps > MAX_STEPS:
        raise UsageError(f"--steps is {args.steps}; give at most {MAX_STEPS}, or sequences end while they are measured")


def _settings(args: argparse.Namespace) -> Iterable[tuple[str, LoadSetting]]:
    """Yield each setting with the name of its table."""
    for name in args.load:
        is_policies = name == ALL_POLICIES
        load = LOADS["decode" if is_policies else name]
        sizes = [256 if 256 in args.running else max(args.running)] if is_policies else args.running
        for policy in POLICIES if is_policies else (args.policy,):
            for running in sizes:
                for waiting in args.waiting:
                    yield name, LoadSetting(load, running, waiting, args.steps, policy)


def _shown(things: Sequence[_T], text: str) -> Iterable[_T]:
    progress = Console(stderr=True)
    return track(things, text, console=progress, transient=True, disable=not sys.stderr.isatty())


def _console() -> Console:
    """Return a console that is wide enough for the tables where stdout is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


def _show_costs(table: str, costs: Sequence[Cost]) -> None:
    console = _console()
    text = "decode under every policy" if table == ALL_POLICIES else LOADS[table].text
    console.print(f"[bold]{table}[/]: {text}", soft_wrap=True, highlight=False)
    extra = [field for field in ("scheduler", "policy") if len({getattr(cost, field) for cost in costs}) > 1]
    rows = [(*(getattr(cost, field) for field in extra), *_row(cost)) for cost in costs]
    show_rows(console, "", (*extra, *_COLUMNS), rows)
    console.print()


def _show_profile(setting: LoadSetting, spent: Sequence[Spent]) -> None:
    console, load = _console(), setting.load.name
    where = f"{setting.num_rows:,} running, {setting.waiting:,} waiting"
    console.print(
        f"\nWhere a step of [bold]{load}[/] under {setting.policy} goes, {where} (profiled, which makes calls dearer)",
        soft_wrap=True,
        highlight=False,
    )
    rows = [tuple(one.as_dict().values()) for one in spent]
    show_rows(console, "", ("function", "calls a step", "own us a step", "share"), rows)


def _row(cost: Cost) -> tuple[object, ...]:
    target = {None: "", True: "met", False: "over"}[cost.is_met]
    bare = f"x {cost.step_us / cost.bare_us:.1f}"
    times = cost.plan_us, cost.commit_us, cost.step_us, cost.step_p99_us
    return cost.running, cost.waiting, *times, bare, target, cost.admit_us


def _head(args: argparse.Namespace, peer: str) -> dict[str, Any]:
    return {
        "bench": "scheduler",
        "policy": args.policy,
        "python": platform.python_version(),
        "steps": args.steps,
        "admit_target_us": ADMIT_TARGET_US,
        "peer": peer,
    }


def _profiles(profiles: Sequence[tuple[LoadSetting, Sequence[Spent]]]) -> dict[str, Any]:
    if not profiles:
        return {}
    return {
        "profiles": [
            {
                "load": setting.load.name,
                "policy": setting.policy,
                "running": setting.num_rows,
                "waiting": setting.waiting,
                "functions": [one.as_dict() for one in spent],
            }
            for setting, spent in profiles
        ]
    }
