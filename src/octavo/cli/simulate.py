"""`octavo simulate`: a workload through the real scheduler on predicted step times, faster than real time.

Owns: the flags, running each policy, the files that are written. Does not: simulate (simulator) or lay out (report).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from octavo.cli.flags import UsageError, add_settings, check_output, resolve_args, whole
from octavo.cli.simulate_output import lines, remarks, workload_help, write_requests
from octavo.cli.simulate_search import add_search_arguments, run_search
from octavo.cli.simulate_watchers import Watchers
from octavo.config import Config
from octavo.config.sources import Resolved
from octavo.core.limits import Limits
from octavo.engine.limits import read_tenant_weights
from octavo.errors import ConfigError
from octavo.simulator.arrival import Arrival
from octavo.simulator.cost_model import CostModel
from octavo.simulator.costs import Hardware, cost_model
from octavo.simulator.costs.fitted import Fitted, fit_recording
from octavo.simulator.goals import Goals, read_goals
from octavo.simulator.outcomes import SimulatedRun
from octavo.simulator.report import Case, page
from octavo.simulator.routers import ROUTERS
from octavo.simulator.run import simulate
from octavo.simulator.setup import ReplicaFailure, Setup, SimulatedEngine
from octavo.simulator.summary import summarise
from octavo.simulator.workloads import TOO_LONG, Shaping, SimulatedWorkload, open_workload

DEFAULT_WORKLOAD = "poisson:rate=4,lengths=azure_conv,requests=2000"
DEFAULT_MODEL, DEFAULT_DEVICE = "llama-3.1-8b", "h100"
MAX_POLICIES = 16
NOTHING: Mapping[str, str] = {}
PROGRESS_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    group = parser.add_argument_group("what is asked")
    group.add_argument(
        "--workload", "-w", action="append", metavar="W",
        help=f"KIND:... or a recording's folder; several are merged; --workload help lists kinds [{DEFAULT_WORKLOAD}]",
    )  # fmt: skip
    group.add_argument("--rate-scale", type=float, default=1.0, metavar="X", help="requests come X times as fast [1]")
    group.add_argument("--limit", type=whole, metavar="N", help="at most so many requests")
    group.add_argument("--start", type=float, default=0.0, metavar="S", help="leave out what comes before [0]")
    group.add_argument("--end", type=float, default=float("inf"), metavar="S", help="leave out what comes from then on")
    group.add_argument(
        "--too-long", default=TOO_LONG[0], choices=TOO_LONG,
        help="requests longer than the model: keep (the engine refuses or ends them), clip, drop [keep]",
    )  # fmt: skip
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of workloads and routers [0]")
    group = parser.add_argument_group("what serves it")
    group.add_argument("--model", metavar="M", help="a shape known by name, or a model [llama-3.1-8b]")
    group.add_argument("--max-model-len", type=whole, metavar="N", help="longest prompt + output [the model's]")
    group.add_argument("--device", metavar="D", help="a device by name, or this [h100]")
    group.add_argument("--tp", type=whole, default=1, metavar="N", help="devices of one replica [1]")
    group.add_argument("--cost", default="roofline", metavar="C", help="roofline, table:DIR or fitted:FILE [roofline]")
    group.add_argument(
        "--price", type=float, metavar="X", help="dollars an hour of one device [what it is often rented for]"
    )
    group.add_argument("--depth", type=whole, metavar="N", help="plans in flight, 1 or 2 [1]")
    group.add_argument("--replicas", type=whole, default=1, metavar="N", help="engines behind a router [1]")
    group.add_argument(
        "--router", default="round_robin", choices=tuple(ROUTERS), help="who gets a request [round_robin]"
    )
    group.add_argument(
        "--max-waiting", type=whole, default=0, metavar="N", help="requests that wait at most; 0 = no bound"
    )
    group.add_argument(
        "--fail", action="append", default=[], metavar="R@T+S", help="replica R dies at T seconds, back S seconds later"
    )
    group.add_argument(
        "--tenant-weight", action="append", default=[], metavar="T=W", help="a tenant's share under fair"
    )
    group = parser.add_argument_group("what is told")
    group.add_argument(
        "--objective", default="", metavar="O",
        help="seconds for each request (ttft=1.0,tpot=0.05,goodput=0.95), or for all together (ttft_p99=1.0)",
    )  # fmt: skip
    group.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="print all figures as JSON instead, or write them to FILE"
    )
    group.add_argument("--html", metavar="FILE", help="a report with plots, one file")
    group.add_argument("--requests", metavar="FILE", help="what became of each request, as CSV")
    group.add_argument("--page", metavar="FILE", help="the dashboard's page playing the first replica's steps")
    group.add_argument("--perfetto", metavar="FILE", help="the first replica's steps for ui.perfetto.dev")
    group.add_argument(
        "--fast-forward", action=argparse.BooleanOptionalAction, default=True,
        help="compute unchanged decode steps together; the outcome is the same [on]",
    )  # fmt: skip
    group.add_argument(
        "--fit", metavar="DIR", help="fit a cost model to a recording's steps and tell how good it is; --json keeps it"
    )
    add_search_arguments(parser)
    rare = (
        "--start", "--end", "--too-long", "--seed", "--tp", "--price", "--depth", "--max-waiting", "--fail",
        "--tenant-weight", "--fast-forward", "--perfetto", "--page", "--fit", "--search-space", "--max-replicas",
    )  # fmt: skip
    add_settings(parser, ("scheduling", "cache"), is_short=False, rare=rare)


@dataclass(frozen=True, slots=True)
class SimulationPlan:
    """All that the flags say: the workload, one Limits for each policy, and what every run shares."""

    resolved: Resolved
    workload: SimulatedWorkload
    blueprint: SimulatedEngine
    limits: list[Limits]
    setup: Setup
    goals: Goals
    price: float


def run(args: argparse.Namespace) -> int:
    """Simulate each policy; print and write the results. Return 1 if objectives of all requests together are missed."""
    if args.workload and args.workload[0] in ("help", "list"):
        print("\n".join(workload_help()))
        return 0
    for flag in ("json", "html", "requests", "page", "perfetto"):
        check_output(f"--{flag}", getattr(args, flag))
    if args.fit:
        return _fit(args)
    plan = make_plan(args)
    if args.search:
        return run_search(args, plan.workload.arrivals, plan.setup, plan.price, _remaker(args, plan))
    cases: list[Case] = []
    told: list[str] = []
    is_missed = False
    for limits in plan.limits:
        watchers = Watchers(plan.blueprint.model, args.page, args.perfetto)
        setup = replace(plan.setup, limits=limits, make_sink=watchers.make_sink if watchers.is_wanted else None)
        done = _simulate(plan.workload, setup, limits.policy)
        facts = summarise(done, plan.goals.bounds, plan.price)
        cases.append(Case.of(limits.policy, done, facts))
        is_missed = _misses(args, plan.goals, done, limits.policy, told) or is_missed
        if args.requests:
            write_requests(_own_path(args.requests, limits.policy, len(plan.limits)), done)
        told += watchers.write()
    _tell(args, plan, cases, told)
    return 1 if is_missed else 0


def _fit(args: argparse.Namespace) -> int:
    """Fit a cost model to the steps of a recording, and print how well it fits."""
    if args.workload:
        raise UsageError("--fit looks at a recording alone; leave out --workload, and simulate with --cost fitted:FILE")
    fit = fit_recording(args.fit)
    if args.json == "-":
        print(fit.as_json())
        return 0
    print(fit.report())
    if args.json:
        try:
            fit.save(Path(args.json))
        except OSError as error:
            raise _unwritable(args.json, error) from None
        print(f"\nkept in {args.json}; use it with --cost fitted:{args.json}")
    return 0


def _misses(args: argparse.Namespace, goals: Goals, done: SimulatedRun, label: str, told: list[str]) -> bool:
    """Return True if a run misses objectives of all requests together; add a line on it to `told`.

    Objectives of single requests are only counted.
    """
    if not goals.goals and "goodput" not in args.objective:
        return False
    verdict = goals.judge(done)
    told.append(f"{label} {'reaches' if verdict.is_reached else 'misses'} the objectives: {verdict.told}")
    return not verdict.is_reached


def make_plan(args: argparse.Namespace) -> SimulationPlan:
    """Read the flags. Raises ConfigError for flags that are unknown or contradict each other."""
    resolved = resolve_args(args)
    config = resolved.config
    if args.tp < 1 or args.tp > 64:
        raise UsageError(f"--tp is {args.tp}; give 1 to 64")
    if args.price is not None and args.price < 0:
        raise UsageError(f"--price is {args.price}; give 0 or more")
    if (args.page or args.perfetto) and "," in config.scheduling.policy:
        raise UsageError("--page and --perfetto show one policy; give one, or leave them out")
    blueprint, costs = _engine(args, config)
    limits = _limits(args, resolved, blueprint)
    longest = limits[0].max_model_len
    shaping = Shaping(args.seed, args.rate_scale, args.start, args.end, args.limit, longest, args.too_long)
    workload = open_workload(args.workload or [DEFAULT_WORKLOAD], shaping)
    setup = Setup(
        limits[0], costs, blueprint.depth if args.depth is None else args.depth, args.replicas, args.router,
        failures=tuple(map(_read_failure, args.fail)), max_waiting=args.max_waiting,
        fast_forward=args.fast_forward, sample_s=1.0, seed=args.seed,
    )  # fmt: skip
    goals = read_goals(args.objective) if args.objective or args.search else Goals()
    price = blueprint.price if args.price is None else args.price * args.tp
    return SimulationPlan(resolved, workload, blueprint, limits, setup, goals, price)


def _engine(args: argparse.Namespace, config: Config) -> tuple[SimulatedEngine, CostModel]:
    """Return model, device and cost model; with `fitted:`, the recorded engine unless another is named."""
    if args.cost.startswith("fitted:") and args.model is None and args.device is None:
        costs = cost_model(args.cost)
        fit = costs.fit if isinstance(costs, Fitted) else None
        if fit is not None and fit.limits is not None:
            model, device, depth = (fit.engine.get(name) for name in ("model", "device", "depth"))
            depth = depth if isinstance(depth, int) else 1
            return SimulatedEngine(f"{model}", f"{device}", depth, 0.0, recorded=fit.limits), costs
        raise UsageError(f"--cost {args.cost} does not say whose engine it is; give --model and --device")
    names = args.model or DEFAULT_MODEL, args.device or DEFAULT_DEVICE
    hardware = Hardware.of(*names, args.tp, config.cache.block_size)
    return SimulatedEngine.of_hardware(hardware), cost_model(args.cost, hardware)


def _limits(
    args: argparse.Namespace, resolved: Resolved, blueprint: SimulatedEngine, chosen: Mapping[str, str] = NOTHING
) -> list[Limits]:
    """Return Limits for each policy. `chosen`: settings that a search tries."""
    scheduling = resolved.config.scheduling
    given = {name for name, origin in resolved.origins.items() if origin != "default"} | {*chosen}
    if "policy" not in given and blueprint.recorded is not None:
        scheduling = replace(scheduling, policy=blueprint.recorded.policy)
    scheduling = replace(
        scheduling,
        policy=chosen.get("policy", scheduling.policy),
        max_sequences=int(chosen["max_sequences"]) if "max_sequences" in chosen else scheduling.max_sequences,
        max_batch_tokens=int(chosen["max_batch_tokens"])
        if "max_batch_tokens" in chosen
        else scheduling.max_batch_tokens,
    )
    names = [name.strip() for name in scheduling.policy.split(",")]
    if len(names) > MAX_POLICIES or len(names) != len({*names}):
        raise UsageError(f"--policy is {scheduling.policy!r}; give each of at most {MAX_POLICIES} once")
    weights = read_tenant_weights(args.tenant_weight)
    made = [
        blueprint.limits(replace(scheduling, policy=name), resolved.config.cache, given, args.max_model_len)
        for name in names
    ]
    return [replace(one, tenant_weights=weights) for one in made] if weights else made


def _remaker(args: argparse.Namespace, plan: SimulationPlan) -> Callable[[Limits, dict[str, str]], Limits]:
    """Return a function that makes the Limits of settings that a search tries, as the pool depends on some of them."""
    if len(plan.limits) > 1:
        raise UsageError("a search compares policies by --search-space policy=A|B; give --policy one")

    def remake(limits: Limits, chosen: dict[str, str]) -> Limits:
        return _limits(args, plan.resolved, plan.blueprint, chosen)[0]

    return remake


def _simulate(workload: SimulatedWorkload, setup: Setup, label: str) -> SimulatedRun:
    """Simulate, with a progress line if stderr is a terminal."""
    arrivals = workload.arrivals()
    if not sys.stderr.isatty() or isinstance(arrivals, list):
        done = simulate(arrivals, setup)
    else:
        done = simulate(_counted(arrivals, label), setup)
        print(f"\r{' ' * 72}\r", end="", file=sys.stderr)
    if not len(done.outcomes):
        raise ConfigError(f"workload {workload.name!r} has no request here; look at --start, --end and --too-long")
    return done


def _counted(arrivals: Iterator[Arrival], label: str) -> Iterator[Arrival]:
    begun = shown = time.monotonic()
    for number, arrival in enumerate(arrivals):
        now = time.monotonic()
        if now - shown >= PROGRESS_S:
            shown = now
            told = f"{label}: {number:,} requests came in {now - begun:.0f} s"
            print(f"\r{told:72.72}", end="", file=sys.stderr, flush=True)
        yield arrival


def _tell(args: argparse.Namespace, plan: SimulationPlan, cases: list[Case], left_out: list[str]) -> None:
    told = settings(args, plan)
    noted = [*remarks(plan.workload.notes.counts, cases), *left_out]
    if args.json:
        text = json.dumps(_facts(plan, told, cases), indent=1) + "\n"
        if args.json == "-":
            print(text, end="")
        else:
            _write(args.json, text)
    if args.json != "-":
        print("\n".join(lines(told, noted, cases)))
    if args.html:
        title = f"{plan.blueprint.model} on {plan.setup.replicas} x {plan.blueprint.device}"
        _write(args.html, page(f"Simulation: {title}", cases, told, noted))


def settings(args: argparse.Namespace, plan: SimulationPlan) -> dict[str, str]:
    """Return the simulated settings as text."""
    setup, shaping = plan.setup, plan.workload.shaping
    told = {"workload": plan.workload.name, **plan.blueprint.describe(plan.limits[0])}
    told |= {"policy": ", ".join(limits.policy for limits in plan.limits), "cost model": setup.costs.name}
    told |= {"replicas": f"{setup.replicas}", "plans in flight": f"{setup.depth}", "seed": f"{args.seed}"}
    if setup.replicas > 1:
        told["router"] = setup.router
    if shaping.rate_scale != 1:
        told["rate"] = f"times {shaping.rate_scale:g}"
    if shaping.start or args.end != float("inf"):
        told["window"] = f"{shaping.start:g} to {args.end:g} s of the workload"
    if args.limit:
        told["limit"] = f"{args.limit:,} requests"
    if setup.failures:
        told["failures"] = ", ".join(args.fail)
    if plan.price:
        told["price"] = f"${plan.price:g} an hour for each replica"
    if args.objective:
        told["objectives"] = args.objective
    return told


def _facts(plan: SimulationPlan, told: dict[str, str], cases: list[Case]) -> dict[str, Any]:
    return {
        "settings": told,
        "notes": plan.workload.notes.counts,
        "runs": {case.label: case.facts for case in cases},
    }


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: str, error: OSError) -> ConfigError:
    return ConfigError(f"{path} cannot be written ({error.strerror}); give a path in a folder that exists")


def _own_path(path: str, policy: str, count: int) -> str:
    """Return one path for each policy if there are several: requests.csv, requests.fair.csv, ..."""
    return path if count == 1 else str(Path(path).with_suffix(f".{policy}{Path(path).suffix}"))


def _read_failure(text: str) -> ReplicaFailure:
    replica, at, rest = text.partition("@")
    moment, plus, restart = rest.partition("+")
    try:
        if at:
            return ReplicaFailure(int(replica), float(moment), float(restart) if plus else None)
    except ValueError:
        pass
    raise UsageError(f"--fail is {text!r}; give REPLICA@SECONDS+SECONDS, as in 0@60+30, or without + for ever")
