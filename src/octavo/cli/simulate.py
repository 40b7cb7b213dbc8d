"""`octavo simulate`: runs a workload through the real scheduler with predicted step times, faster than real time.

Owns: the flags; running each policy or a capacity search; the printed text; the files to write.
Does not: simulate or search (simulator does), or lay out tables and the page (simulator.report does).
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from octavo.cli.compare_runs import COMPARED, compare_saved_runs
from octavo.cli.flags import (
    UsageError,
    add_settings,
    check_output,
    output_json,
    resolve_args,
    whole,
    write_text,
    writing,
)
from octavo.cli.search import add_search_arguments, search_fleets
from octavo.cli.simulated_engines import (
    RARE,
    SimulatedGroup,
    add_engine_arguments,
    describe_groups,
    make_groups,
    make_setups,
)
from octavo.core.request import FinishReason
from octavo.core.scheduler import Scheduler
from octavo.dashboard.page import write_page
from octavo.errors import ConfigError
from octavo.observe.frames import Frame, FrameSource, FrameSpool, FrameWriter
from octavo.observe.history import History
from octavo.observe.perfetto import PerfettoWriter, TraceClip, TraceFile
from octavo.observe.recording import open_recording
from octavo.simulator.advice import advise
from octavo.simulator.arrival import Arrival
from octavo.simulator.correction import MeasuredRequests, fit_correction
from octavo.simulator.costs.fitted import fit_recording
from octavo.simulator.goals import Goals, read_goals
from octavo.simulator.outcomes import NEVER, SimulatedRun
from octavo.simulator.report import Case, advice_lines, comparison_table, latency_table, page
from octavo.simulator.run import simulate
from octavo.simulator.saved import as_json
from octavo.simulator.setup import Setup
from octavo.simulator.summary import summarise
from octavo.simulator.workloads import KINDS, TOO_LONG, Shaping, SimulatedWorkload, open_workload

DEFAULT_WORKLOAD = "poisson:rate=4,lengths=azure_conv,requests=2000"
PROGRESS_S = 0.5
REQUEST_COLUMNS = (
    "index", "tenant", "first_replica", "replica", "arrival", "start", "first_token", "end", "prompt_tokens",
    "output_tokens", "cached_tokens", "preemptions", "restarts", "reason",
)  # fmt: skip
WORKLOAD_OPTIONS = """
generated   requests=1000, duration=S; prompt= and output= with a number, fixed(n), uniform(a,b),
            lognormal(median,sigma), normal(mean,sd), exponential(mean), geometric(mean),
            pareto(least,alpha), quantiles(0:8,50:200,100:4K); or lengths=azure_conv, azure_code,
            or the pairs of a trace, lengths=azure:FILE;
            prefix=N tokens shared in each of groups=N, group_zipf=X, group_tenants=yes
all         tenant=NAME, tenants=N, zipf=X, priority=N, ttft=S, tpot=S (objectives); traces: sort=yes"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--workload", "-w", action="append", metavar="W",
        help=f"KIND:... or a recording's folder; several are merged; --workload help lists kinds [{DEFAULT_WORKLOAD}]",
    )  # fmt: skip
    group.add_argument("--rate-scale", type=float, default=1.0, metavar="X", help="requests arrive X times as fast [1]")
    group.add_argument("--limit", type=whole, metavar="N", help="at most so many requests")
    group.add_argument("--start", type=float, default=0.0, metavar="S", help="leave out what arrives before [0]")
    group.add_argument("--end", type=float, default=float("inf"), metavar="S", help="leave out what arrives later")
    group.add_argument(
        "--too-long", default=TOO_LONG[0], choices=TOO_LONG,
        help="requests longer than the model: keep (the engine refuses or ends them), clip, drop [keep]",
    )  # fmt: skip
    group.add_argument("--seed", type=int, default=0, metavar="N", help="seed of workloads and routers [0]")
    add_engine_arguments(parser.add_argument_group("engines"))
    group = parser.add_argument_group("output")
    group.add_argument(
        "--objective", default="", metavar="O",
        help="seconds for each request (ttft=1.0,tpot=0.05,goodput=0.95), or for all together (ttft_p99=1.0)",
    )  # fmt: skip
    group.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="print all figures as JSON instead, or write them to FILE"
    )
    group.add_argument("--html", metavar="FILE", help="a report with charts, one file")
    group.add_argument("--compare", nargs="+", metavar="FILE", help="show the runs that --json FILE saved side by side")
    group.add_argument("--requests", metavar="FILE", help="the outcome of each request, as CSV")
    group.add_argument("--page", metavar="FILE", help="the dashboard's page playing the first replica's steps")
    group.add_argument("--perfetto", metavar="FILE", help="the first replica's steps for ui.perfetto.dev")
    group.add_argument(
        "--fast-forward", action=argparse.BooleanOptionalAction, default=True,
        help="compute unchanged decode steps together; the outcome is the same [on]",
    )  # fmt: skip
    group.add_argument(
        "--fit", metavar="DIR", help="fit a cost model to a recording's steps and print its errors; --json keeps it"
    )
    group.add_argument(
        "--fit-requests", metavar="FILE",
        help="correct --cost by the measured times of some requests of --workload, a CSV as --requests writes; "
        "--json keeps it",
    )  # fmt: skip
    add_search_arguments(parser)
    rare = (
        *RARE, "--start", "--end", "--too-long", "--seed", "--fast-forward", "--perfetto", "--page", "--fit",
        "--fit-requests", "--search-space", "--max-replicas", "--jobs", "--kubernetes",
    )  # fmt: skip
    add_settings(parser, ("scheduling", "cache"), is_short=False, rare=rare)


@dataclass(frozen=True, slots=True)
class SimulationPlan:
    """The simulation that the flags describe: the workload, the engines, and one Setup per policy."""

    workload: SimulatedWorkload
    groups: list[SimulatedGroup]
    setups: list[Setup]
    goals: Goals

    @property
    def prices(self) -> dict[str, float]:
        """Return the dollars per engine and hour, by the name of its group."""
        return {group.name: group.price for group in self.groups}


def run(args: argparse.Namespace) -> int:
    """Simulate each policy; print and write the results. Return 1 if an objective on all requests is missed."""
    if args.workload and args.workload[0] in ("help", "list"):
        print("\n".join(_workload_help()))
        return 0
    for flag in ("json", "html", "requests", "page", "perfetto"):
        check_output(f"--{flag}", getattr(args, flag))
    if args.fit:
        return _fit(args)
    if args.compare:
        return compare_saved_runs(args)
    if args.fit_requests:
        return _fit_requests(args)
    if args.search:
        return search_fleets(args, partial(workload_of, args))
    plan = make_plan(args)
    cases: list[Case] = []
    remarks: list[str] = []
    is_missed = False
    for planned in plan.setups:
        limits, views = planned.limits, FirstReplicaViews(plan.groups[0].engine.model, args.page, args.perfetto)
        setup = replace(planned, make_sink=views.make_sink if args.page or args.perfetto else None)
        result = _simulate(plan.workload, setup, limits.policy)
        facts = summarise(result, plan.goals.bounds, plan.prices)
        case = Case.of(limits.policy, result, facts, plan.goals)
        bounds = plan.goals.bounds | {goal.name: goal.bound for goal in plan.goals.goals}
        case.advice = advise(facts, limits.policy, setup.router, bounds)
        cases.append(case)
        if plan.goals.goals or "goodput" in args.objective:  # per-request objectives without goodput cannot fail a run
            verdict = plan.goals.judge(result)
            is_missed = is_missed or not verdict.is_reached
            reaches = "reaches" if verdict.is_reached else "misses"
            remarks.append(f"{limits.policy} {reaches} the objectives: {verdict.text}")
        if args.requests:
            _write_requests(_path_of_policy(args.requests, limits.policy, len(plan.setups)), result)
        remarks += views.write()
    _output(args, plan, cases, remarks)
    return 1 if is_missed else 0


def _fit(args: argparse.Namespace) -> int:
    """Fit a cost model to the steps of a recording, and print the fit's errors."""
    if args.workload:
        raise UsageError("--fit looks at a recording alone; leave out --workload, and simulate with --cost fitted:FILE")
    fit = fit_recording(open_recording(args.fit))
    _keep(args.json, fit.as_json(), fit.report(), f"fitted:{args.json}")
    return 0


def _fit_requests(args: argparse.Namespace) -> int:
    """Correct the cost model by measured requests, and print whether this helps."""
    plan = make_plan(args)
    if not args.workload or len(plan.setups) > 1 or args.search:
        raise UsageError("--fit-requests corrects one run; give the --workload that was measured, and one --policy")
    fit = fit_correction(list(plan.workload.arrivals()), plan.setups[0], MeasuredRequests.read(args.fit_requests))
    _keep(args.json, fit.correction.as_json(), fit.report(), f"'{args.cost}*{args.json}'")
    return 0


def _keep(path: str | None, text: str, report: str, cost: str) -> None:
    """Print a fit or write it to the file; print the report, and the --cost that uses the file."""
    if output_json(path, text):
        print(report)
        if path is not None:
            print(f"\nkept in {path}; use it with --cost {cost}")


def make_plan(args: argparse.Namespace) -> SimulationPlan:
    """Read the flags. Raises ConfigError for flags that are unknown or contradict each other."""
    resolved = resolve_args(args)
    config = resolved.config
    if (args.page or args.perfetto) and "," in config.scheduling.policy:
        raise UsageError("--page and --perfetto show one policy; give one, or leave them out")
    groups = make_groups(args, resolved)
    longest = min(group.limits[0].max_model_len for group in groups)
    goals = read_goals(args.objective) if args.objective else Goals()
    return SimulationPlan(workload_of(args, longest), groups, make_setups(args, groups), goals)


def workload_of(args: argparse.Namespace, longest: int) -> SimulatedWorkload:
    """Open the workload of the flags for engines with requests of at most `longest` tokens."""
    shaping = Shaping(args.seed, args.rate_scale, args.start, args.end, args.limit, longest, args.too_long)
    return open_workload(args.workload or [DEFAULT_WORKLOAD], shaping)


def _simulate(workload: SimulatedWorkload, setup: Setup, label: str) -> SimulatedRun:
    """Run a simulation; show a progress line if stderr is a terminal."""
    arrivals = workload.arrivals()
    if not sys.stderr.isatty() or isinstance(arrivals, list):
        result = simulate(arrivals, setup)
    else:
        result = simulate(_with_progress(arrivals, label), setup)
        print(f"\r{' ' * 72}\r", end="", file=sys.stderr)
    if not len(result.outcomes):
        raise ConfigError(f"workload {workload.name!r} has no request here; look at --start, --end and --too-long")
    return result


def _with_progress(arrivals: Iterator[Arrival], label: str) -> Iterator[Arrival]:
    start = shown = time.monotonic()
    for number, arrival in enumerate(arrivals):
        now = time.monotonic()
        if now - shown >= PROGRESS_S:
            shown = now
            line = f"{label}: {number:,} requests arrived in {now - start:.0f} s"
            print(f"\r{line:72.72}", end="", file=sys.stderr, flush=True)
        yield arrival


# --- output


def _workload_help() -> Iterator[str]:
    """Yield lines about the kinds of workloads and their options."""
    yield "KIND:option=value,...            generated"
    yield "KIND:FILE,option=value,...       read, plain or gzipped"
    yield ""
    for name, kind in KINDS.items():
        yield f"  {name:13}{'FILE  ' if kind.is_file else ''}{kind.help}"
    yield WORKLOAD_OPTIONS


def _output(args: argparse.Namespace, plan: SimulationPlan, cases: list[Case], remarks: list[str]) -> None:
    """Print and write the figures of all policies."""
    described = _describe(args, plan)
    notes = plan.workload.notes.counts
    changed = [f"{count:,} {description}" for description, count in notes.items()]
    refused = [
        f"{case.label}: {requests['refused']:,} of {requests['came']:,} requests were refused"
        for case in cases
        if (requests := case.facts["requests"])["refused"]
    ]
    remarks = [*changed, *refused, *remarks]
    advice = advice_lines(cases)
    facts = {
        "settings": described, "notes": notes, "advice": advice, "runs": {case.label: case.facts for case in cases}
    }  # fmt: skip
    if output_json(args.json, json.dumps(facts, indent=1) if args.json == "-" else as_json(facts, cases)):
        shown = ("workload", "model", "device", "KV pool", "cost model", "KV link", "replicas")
        for name, text in described.items():
            if name in shown or name.startswith("group "):
                print(f"{name:12}{'' if len(name) < 12 else '  '}{text}")
        for remark in remarks:
            print(f"{'note':12}{remark}")
        for line in advice:
            print(f"{'advice':12}{line}")
        print()
        if len(cases) == 1:
            print("\n".join([*latency_table(cases[0].facts), "", *comparison_table(cases, points=())]))
        else:
            print("\n".join(comparison_table(cases, [case.label[:14] for case in cases], points=COMPARED)))
    if args.html:
        devices = ", ".join(f"{group.count} x {group.engine.device}" for group in plan.groups)
        title = f"Simulation: {plan.groups[0].engine.model} on {devices}"
        settings = {name: [text] for name, text in described.items()}
        first = ", ".join(described[name] for name in ("workload", "objectives") if name in described)
        write_text(args.html, page(title, cases, settings, [first, *remarks], advice))


def _describe(args: argparse.Namespace, plan: SimulationPlan) -> dict[str, str]:
    """Return the simulated settings as text."""
    setup, shaping, price = plan.setups[0], plan.workload.shaping, plan.groups[0].price
    described = {"workload": plan.workload.name, **describe_groups(plan.groups)}
    described |= {"policy": ", ".join(one.limits.policy for one in plan.setups)}
    described |= {"replicas": plan.groups[0].count if len(plan.groups) == 1 else f"{setup.num_replicas}"}
    described |= {"plans in flight": f"{setup.depth}", "seed": f"{args.seed}"}
    if setup.link is not None:
        link = setup.link
        described["KV link"] = f"{args.kv_link}: {link.bandwidth / 1e9:g} GB/s, {link.latency_s * 1e6:g} us"
    described |= {} if setup.hop is None else {"network hop": f"{setup.hop}"}
    if any(group.scaling is not None for group in plan.groups):
        described["scaling"] = args.autoscale or "requests:16"
    if setup.num_replicas > 1:
        described["router"] = setup.router
    if shaping.rate_scale != 1:
        described["rate"] = f"times {shaping.rate_scale:g}"
    if shaping.start or args.end != float("inf"):
        described["window"] = f"{shaping.start:g} to {args.end:g} s of the workload"
    if args.limit:
        described["limit"] = f"{args.limit:,} requests"
    if setup.failures:
        described["failures"] = ", ".join(args.fail)
    if price and not args.group:
        described["price"] = f"${price:g} an hour for each replica"
    if args.objective:
        described["objectives"] = args.objective
    return described


def _path_of_policy(path: str, policy: str, count: int) -> str:
    """Return the path for one policy. With several policies, each has its own: requests.fair.csv, ..."""
    return path if count == 1 else str(Path(path).with_suffix(f".{policy}{Path(path).suffix}"))


def _write_requests(path: str, result: SimulatedRun) -> None:
    """Write one CSV line per request, in order of arrival. Times are in seconds, or empty if not reached."""
    out = result.outcomes
    order = sorted(range(len(out)), key=lambda index: (out.arrivals[index], out.indices[index]))
    with writing(path), open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(REQUEST_COLUMNS)
        for index in order:
            times = (out.arrivals[index], out.starts[index], out.first_tokens[index], out.ends[index])
            writer.writerow((
                out.indices[index], out.tenant_names[out.tenants[index]],
                out.first_replicas[index], out.replicas[index],
                *("" if time == NEVER else f"{time:.6f}" for time in times),
                out.prompt_tokens[index], out.output_tokens[index], out.cached[index], out.preemptions[index],
                out.restarts[index], FinishReason(out.reasons[index]).name.lower(),
            ))  # fmt: skip


class FirstReplicaViews:
    """The first scheduler's dashboard page and Perfetto trace. They disable fast-forward."""

    def __init__(self, model: str, page: str | None, perfetto: str | None) -> None:
        self._model = model
        self._page, self._perfetto = page, perfetto
        self._frames = FrameSpool()
        self._num_cut = 0
        self._frame_writer: FrameWriter | None = None
        self._trace: tuple[TraceFile, TraceClip, PerfettoWriter] | None = None

    def make_sink(self, scheduler: Scheduler) -> History | None:
        """Return the history of the first scheduler, with its readers; None for other schedulers."""
        if self._frame_writer is not None or self._trace is not None:
            return None
        history = History(scheduler)
        if self._page is not None:
            self._frame_writer = FrameWriter(history, self._keep, FrameSource("simulation", self._model))
            history.add_reader(self._frame_writer.read)
        if self._perfetto is not None:
            with writing(self._perfetto):
                file = TraceFile(self._perfetto, {"model": self._model, "source": "simulation"})
            clip = TraceClip(file.write)
            writer = PerfettoWriter(history, clip.write)
            self._trace = file, clip, writer
            history.add_reader(writer.read)
        return history

    def write(self) -> list[str]:
        """Write the files after the simulation; return remarks on omitted data."""
        remarks: list[str] = []
        if self._frame_writer is not None and self._page is not None:
            self._frame_writer.end()
            with writing(self._page):
                write_page(self._frames, self._page)
        if self._trace is not None:
            file, clip, writer = self._trace
            writer.end()
            file.close()
            if clip.num_undrawn:
                remarks.append(f"{self._perfetto}: {clip.num_undrawn:,} requests more have no track of their own")
        if self._num_cut:
            remarks.append(f"{self._page}: {self._num_cut:,} steps more were left out")
        return remarks

    def _keep(self, frame: Frame) -> None:
        self._num_cut = frame.get("cut", 0)  # the last frame has the total
        self._frames.write(frame)
