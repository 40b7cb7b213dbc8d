"""`octavo bench offline, latency, sweep, startup, kernel, scheduler, simulator, router`: flags, engines, output.

Owns: the flags and their checks; progress bars; the JSON object of --json. bench_servers has `online` and `compare`.
Does not: measure, or make tables (each benchmark's module in octavo.bench does).
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from octavo.assembly import executor_spec, find_files
from octavo.bench import latency, offline, router, scheduler, simulator, startup, vllm_scheduler
from octavo.bench.report import Report, show_rows
from octavo.bench.workload import draw_workload, read_workload
from octavo.cli.answers import load_engine
from octavo.cli.flags import UsageError, add_settings, check_output, config_from, settings_given, whole, write_text
from octavo.config import ENGINE_SECTIONS
from octavo.config.setting import Number
from octavo.core.policy import POLICIES
from octavo.errors import ConfigError
from octavo.fleet.routing import ROUTERS
from octavo.machine import look, usable_cores

WIDTH = 120  # width of tables if stdout is not a terminal


def print_report(args: argparse.Namespace, report: Report, show: Callable[[Console, Report], None]) -> int:
    """Print the report as tables or as one JSON object."""
    if args.json:
        print(json.dumps(report))
    else:
        console = Console()
        show(console if console.is_terminal else Console(width=WIDTH), report)
    return 0


def add_model(parser: argparse.ArgumentParser, text: str = "what to run [smollm2]") -> None:
    """Add the MODEL argument."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=text)


def add_json(group: Any) -> None:
    """Add --json."""
    group.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def add_int(group: Any, flag: str, default: Any, text: str, low: int = 1, **options: Any) -> None:
    """Add a flag for a whole number of at least `low`; with nargs for several numbers."""
    numbers = default if isinstance(default, Sequence) else (default,)
    shown = " ".join(f"{number:,}" if number >= 10_000 else str(number) for number in numbers)
    group.add_argument(flag, type=Number(int, low), default=default, metavar="N", help=f"{text} [{shown}]", **options)


def _add_runs(group: Any, default: int) -> None:
    add_int(group, "--runs", default, "passes; the median one is reported")


def add_workload(parser: argparse.ArgumentParser) -> Any:
    """Add the flags of a workload; return their group."""
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--workload", metavar="FILE", help="JSON list of {prompt_token_ids, max_tokens}, or of such lists"
    )
    add_int(group, "--num-prompts", 64, "random prompts, without --workload")
    add_int(group, "--input-len", 128, "tokens of each random prompt")
    add_int(group, "--output-len", 128, "tokens produced for each")
    return group


@contextmanager
def progress(total: int, unit: str = "tokens", text: str = "measuring") -> Iterator[Callable[..., None]]:
    """Show a progress bar if stderr is a terminal; yield the function that advances it, or changes its text."""
    stderr = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,} of {task.total:,} " + unit),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        task = bar.add_task(text, total=total)
        yield lambda count=1, text=None: bar.update(task, advance=count, description=text)


def _open(args: argparse.Namespace, **extra: object) -> offline.BenchEngine:
    """Open an engine with the settings of the flags and with the settings in `extra`."""
    config = config_from(args, model=args.model, **extra)
    start = time.perf_counter()
    engine = load_engine(config, args.json)
    return offline.BenchEngine(config, engine, time.perf_counter() - start)


# --- offline ----------------------------------------------------------------------------------------


def add_offline_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    add_model(parser)
    group = add_workload(parser)
    _add_runs(group, 1)
    add_json(group)
    add_settings(parser, (*ENGINE_SECTIONS, "recording"))


def run_offline(args: argparse.Namespace) -> int:
    """Measure this engine on a workload."""
    workload = read_workload(Path(args.workload)) if args.workload else None
    bench = _open(args)
    capacity = bench.engine.capacity
    if workload is None:
        seed = bench.config.execution.seed
        workload = draw_workload(args.num_prompts, args.input_len, args.output_len, capacity.vocab_size, seed)
    with progress(workload.num_output_tokens * args.runs) as advance:
        runs = bench.run([workload] * args.runs, advance)
    report = offline.make_offline_report(bench.facts(), workload, capacity.num_slots, runs, bench.floor)
    return print_report(args, report, offline.show_offline)


# --- latency, sweep ---------------------------------------------------------------------------------


def add_latency_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    add_model(parser)
    group = parser.add_argument_group("requests")
    add_int(group, "--rows", (1, 8, 32), "requests at once", nargs="+")
    add_int(group, "--input-len", 128, "tokens of each prompt")
    add_int(group, "--output-len", 128, "tokens produced for each")
    _add_runs(group, 3)
    add_json(group)
    add_settings(parser, ENGINE_SECTIONS)


def run_latency(args: argparse.Namespace) -> int:
    """Measure time to first token and time per token for each number of concurrent requests."""
    shapes = [latency.LoadShape(rows, args.input_len, args.output_len) for rows in args.rows]
    facts, points = _measure_points(args, shapes)
    return print_report(args, {"bench": "latency", **facts, "points": points}, latency.show_latency)


def add_sweep_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    add_model(parser)
    group = parser.add_argument_group("curves")
    add_int(group, "--concurrency", (1, 2, 4, 8, 16, 32, 64), "requests at once", nargs="+")
    add_int(group, "--input-len", 128, "tokens of their prompts")
    add_int(group, "--output-len", 64, "tokens produced for each")
    add_int(group, "--contexts", (128, 256, 512, 1024, 2048, 4096), "tokens of context", nargs="+")
    add_int(group, "--rows", 8, "requests at once over the contexts")
    add_int(group, "--steps", 32, "tokens produced at each context", low=2)
    _add_runs(group, 3)
    group.add_argument("--svg", metavar="FILE", help="draw both curves into this file")
    add_json(group)
    add_settings(parser, ENGINE_SECTIONS)


def run_sweep(args: argparse.Namespace) -> int:
    """Measure by concurrency and by context length, and draw both curves."""
    check_output("--svg", args.svg)
    over_rows = [latency.LoadShape(rows, args.input_len, args.output_len) for rows in sorted(set(args.concurrency))]
    over_context = [latency.LoadShape(args.rows, context, args.steps) for context in sorted(set(args.contexts))]
    facts, points = _measure_points(args, [*over_rows, *over_context])
    report = {"bench": "sweep", **facts, "rows": points[: len(over_rows)], "contexts": points[len(over_rows) :]}
    if args.svg:
        write_text(args.svg, latency.draw_sweep(report))
    return print_report(args, report, latency.show_sweep)


def _measure_points(args: argparse.Namespace, shapes: Sequence[latency.LoadShape]) -> tuple[Report, list[Report]]:
    """Open an engine with room for the shapes, measure and close it; return facts and points."""
    room = {} if "max_sequences" in settings_given(args) else {"max_sequences": max(shape.at_once for shape in shapes)}
    bench = _open(args, **room)
    try:
        for shape in shapes:
            shape.check_fits(bench.engine.capacity)
    except ConfigError:
        bench.engine.loop.stop()
        raise
    batch_tokens = executor_spec(bench.config, bench.engine.capacity.device.partition(":")[0]).max_batch_tokens
    with progress(sum(shape.at_once * shape.num_output for shape in shapes) * args.runs) as advance:
        points = latency.measure_points(bench, shapes, args.runs, batch_tokens, advance)
    return bench.facts(), points


# --- startup ----------------------------------------------------------------------------------------


def add_startup_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    add_model(parser)
    group = parser.add_argument_group("measuring")
    add_int(group, "--runs", 5, "processes of each kind, in turn")
    add_int(group, "--input-len", 32, "tokens of the prompt")
    add_json(group)
    add_settings(parser, ("model", "chat", "cache", "scheduling", "execution"))


def run_startup(args: argparse.Namespace) -> int:
    """Measure the time of new processes to their first token."""
    config = config_from(args, model=args.model)
    find_files(config)  # report a wrong name before any process starts
    with progress(1 + 2 * args.runs, "processes") as advance:
        subjects = startup.measure_startup(config, args.input_len, args.runs, advance)
    return print_report(args, startup.make_startup_report(subjects, args.runs), startup.show_startup)


# --- kernel -----------------------------------------------------------------------------------------

# Imported when chosen, because they load torch; the masks benchmark must be the first to import torch.
KERNELS = {
    "rows": "octavo.bench.kernels:measure_rows",
    "linear": "octavo.bench.kernels:measure_linear",
    "attention": "octavo.bench.kernels:measure_attention",
    "masks": "octavo.bench.grammar_masks:measure_masks",
}
DEFAULT_KERNELS = ("rows", "linear", "attention")  # without masks, which runs whole steps of the default model


def add_kernel_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    names = f"of {', '.join(DEFAULT_KERNELS)} [all], and masks, for which the default model is loaded"
    parser.add_argument("--kernels", nargs="+", choices=tuple(KERNELS), metavar="NAME", help=names)
    add_int(parser, "--rows", (1, 8, 32, 128), "rows of a step", nargs="+")
    parser.add_argument(
        "--threads", type=Number(int, 1), default=usable_cores(), metavar="N", help="threads [all cores]"
    )
    parser.add_argument(
        "--budget", type=Number(float, 0, 60, is_above=True), default=0.2, metavar="S",
        help="seconds that one time may take [0.2]",
    )  # fmt: skip
    add_json(parser)


def run_kernel(args: argparse.Namespace) -> int:
    """Measure each kernel of a step alone."""
    tables = []
    for name in args.kernels or DEFAULT_KERNELS:
        tables += resolve_name(KERNELS[name])(args.rows, args.threads, args.budget)
    report = {"bench": "kernel", "threads": args.threads, "cpu": look().cpu_name, "tables": tables}
    return print_report(args, report, _show_kernels)


def _show_kernels(console: Console, report: Report) -> None:
    for table in report["tables"]:
        rows = table["rows"]
        show_rows(console, table["title"], tuple(rows[0]) if rows else (), [tuple(row.values()) for row in rows])
        console.print()


# --- scheduler --------------------------------------------------------------------------------------

ALL_POLICIES = "policies"
VLLM_MEASURED = "vllm, its scheduler measured in turn with this one under decode"
VLLM_MISSING = "vllm is not installed here, so its scheduler was not measured beside this one"


def add_scheduler_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    names = (*scheduler.LOADS, ALL_POLICIES)
    texts = "; ".join(f"{load.name}: {load.text}" for load in scheduler.LOADS.values())
    text = f"what steps hold [all]. {texts}; {ALL_POLICIES}: decode under every policy"
    parser.add_argument("--load", nargs="+", default=names, choices=names, help=text)
    add_int(parser, "--running", scheduler.RUNNING, "sequences", nargs="+")
    add_int(parser, "--waiting", scheduler.WAITING, "requests", low=0, nargs="+")
    add_int(parser, "--steps", 64, "steps of which the median is reported")
    parser.add_argument("--policy", default="fcfs", help="the policy, as for serve [fcfs]")
    parser.add_argument("--profile", action="store_true", help="show the time by function, from separate runs")
    add_json(parser)


def run_scheduler(args: argparse.Namespace) -> int:
    """Measure plan, commit and admission under each load."""
    if args.steps > scheduler.MAX_STEPS:
        raise UsageError(f"--steps is {args.steps}; give at most {scheduler.MAX_STEPS}, as sequences end after that")
    settings = list(_load_settings(args))
    peer = VLLM_MEASURED if vllm_scheduler.is_installed() else VLLM_MISSING
    tables: dict[str, list[scheduler.SchedulerCost]] = {}
    with progress(len(settings), "settings") as advance:
        for table, setting in settings:
            schedulers: list[scheduler.MeasuredScheduler] = [scheduler.LoadedScheduler(setting)]
            if peer == VLLM_MEASURED and table == "decode":
                try:
                    schedulers.append(vllm_scheduler.VllmScheduler(setting))
                except ConfigError as error:
                    peer = str(error)
            tables.setdefault(table, []).extend(scheduler.measure(schedulers))
            advance()
    report = {
        "bench": "scheduler",
        "policy": args.policy,
        "python": platform.python_version(),
        "steps": args.steps,
        "admit_target_us": scheduler.ADMIT_TARGET_US,
        "peer": peer,
        "costs": [asdict(cost) for costs in tables.values() for cost in costs],
    }
    if args.profile:
        largest = {(setting.load.name, setting.policy): setting for _, setting in settings}
        report["profiles"] = [scheduler.profile(setting) for setting in largest.values()]
    return print_report(args, report, partial(scheduler.show_scheduler, tables=tables))


def _load_settings(args: argparse.Namespace) -> Iterator[tuple[str, scheduler.LoadSetting]]:
    """Yield (name of the table, setting) for each measurement."""
    for name in args.load:
        is_policies = name == ALL_POLICIES
        load = scheduler.LOADS["decode" if is_policies else name]
        policies = POLICIES if is_policies else (args.policy,)
        sizes = args.running
        if is_policies:
            sizes = [256 if 256 in sizes else max(sizes)]
        for policy in policies:
            for running in sizes:
                for waiting in args.waiting:
                    yield name, scheduler.LoadSetting(load, running, waiting, args.steps, policy)


# --- simulator --------------------------------------------------------------------------------------

MAX_SIMULATED_REQUESTS = 10_000_000


def add_simulator_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    own = simulator.SimulatorSetting()
    parser.add_argument(
        "--requests", type=Number(int, 1, MAX_SIMULATED_REQUESTS), default=own.requests, metavar="N",
        help=f"requests in all [{own.requests:,}]",
    )  # fmt: skip
    parser.add_argument(
        "--replicas", type=whole, default=own.replicas, metavar="N", help=f"engines after a router [{own.replicas}]"
    )
    parser.add_argument(
        "--rate", type=Number(float, 0, 1_000_000, is_above=True), default=own.rate, metavar="X",
        help=f"requests a second for each replica [{own.rate:g}]",
    )  # fmt: skip
    parser.add_argument(
        "--router", default=own.router, choices=tuple(ROUTERS), help=f"how requests are routed [{own.router}]"
    )
    parser.add_argument("--policy", default=own.policy, help=f"as for serve [{own.policy}]")
    parser.add_argument("--depth", type=int, default=own.depth, choices=(1, 2), help="plans in flight [1]")
    parser.add_argument(
        "--fast-forward", action=argparse.BooleanOptionalAction, default=True,
        help="whether unchanged decode steps are computed together [on]",
    )  # fmt: skip
    parser.add_argument(
        "--check", type=whole, default=1000, metavar="N", help="first simulate N of them both ways and compare [1000]"
    )
    add_json(parser)


def run_simulator(args: argparse.Namespace) -> int:
    """Measure the number of requests that one core simulates per second."""
    setting = simulator.SimulatorSetting(
        args.requests, args.replicas, args.rate, args.router, args.policy, args.depth, args.fast_forward,
        min(args.check, args.requests),
    )  # fmt: skip
    return print_report(args, simulator.measure_simulator(setting), simulator.show_simulator)


# --- router -----------------------------------------------------------------------------------------


def add_router_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    own = router.RouterSetting()
    parser.add_argument("--router", default=own.router, choices=tuple(ROUTERS), help=f"which one [{own.router}]")
    add_int(parser, "--replicas", own.replicas, "replicas to choose from")
    add_int(parser, "--tokens", own.tokens, "tokens of each prompt", low=router.BLOCK_SIZE)
    add_int(parser, "--requests", own.requests, "requests in all")
    add_json(parser)


def run_router(args: argparse.Namespace) -> int:
    """Measure the choice of a replica."""
    setting = router.RouterSetting(args.router, args.replicas, args.tokens, args.requests)
    return print_report(args, router.measure_router(setting), router.show_router)
