"""`octavo simulate --search`: the cheapest fleet that reaches the objectives.

Owns: the search's flags; the candidates that can be simulated; the printed answer; the answer as a plan and as values
for Kubernetes. Does not: search (simulator.search does), or describe engines by flags (simulated_engines does).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from octavo.cli.flags import UsageError, check_output, output_json, resolve_args, settings_given, write_text
from octavo.cli.simulated_engines import MACHINE_FLAGS, SimulatedGroup, limits_of, make_groups, make_setups
from octavo.config import SETTINGS
from octavo.config.setting import Number
from octavo.config.sources import Resolved, load
from octavo.errors import ConfigError
from octavo.fleet.plan import FleetPlan
from octavo.simulator.advice import name_limit
from octavo.simulator.goals import read_goals
from octavo.simulator.search import (
    MAX_JOBS,
    MAX_REPLICAS,
    Candidate,
    CapacitySearch,
    Fate,
    SearchResult,
    SearchTrial,
    combine,
    count_replicas,
    label_of,
    read_space,
)  # fmt: skip
from octavo.simulator.workloads import SimulatedWorkload


def add_search_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the search's flags."""
    group = parser.add_argument_group("capacity search")
    group.add_argument(
        "--search", action="store_true", help="find the cheapest fleet that reaches --objective, as in ttft_p99=1.0"
    )
    group.add_argument(
        "--search-space", default="", metavar="S",
        help="settings to try, as in device=h100|l40s,tensor_parallel_size=1|2,max_sequences=64|256",
    )  # fmt: skip
    group.add_argument(
        "--max-replicas", type=Number(int, 1, MAX_REPLICAS), default=MAX_REPLICAS, metavar="N",
        help=f"most replicas tried [{MAX_REPLICAS}]",
    )  # fmt: skip
    group.add_argument(
        "--jobs", type=Number(int, 1, MAX_JOBS), default=1, metavar="N",
        help="simulate in so many processes; the answer is the same [1]",
    )  # fmt: skip
    group.add_argument("--kubernetes", metavar="FILE", help="write the fleet as values for deploy/kubernetes")


def search_fleets(args: argparse.Namespace, workload_of: Callable[[int], SimulatedWorkload]) -> int:
    """Search, print each trial when it ends, then the answer. Return 1 if no fleet reaches the objectives.

    `workload_of` opens the workload, for requests of at most so many tokens.
    """
    resolved = resolve_args(args)
    search, skipped, workload = prepare_search(args, workload_of)
    result = search.run(lambda trial: print(trial, file=sys.stderr, flush=True))
    plan = None if result.best is None else _fleet_plan(args, resolved, result.best, workload)
    facts = {"plan": None if plan is None else plan.facts(), **_facts(result, skipped)}
    prints_text = output_json(args.json, json.dumps(facts, indent=1))
    forms = [] if plan is None else [*_forms(args, plan)]
    if prints_text:
        print("\n".join([*_lines(result, skipped), *forms]))
    return 0 if result.best is not None else 1


def prepare_search(
    args: argparse.Namespace, workload_of: Callable[[int], SimulatedWorkload]
) -> tuple[CapacitySearch, dict[str, str], str]:
    """Return the search that the flags describe, why some settings are left out, and the workload's name."""
    if args.group:
        raise UsageError("--group is of one run; leave it out with --search, which finds the number of equal replicas")
    if "-" in (args.replicas or ""):
        raise UsageError("--replicas has a range; a search finds a fixed number, give it the first to try")
    if "," in resolve_args(args).config.scheduling.policy:
        raise UsageError("a search compares policies by --search-space policy=A|B; give --policy one")
    for name in ("html", "page", "perfetto", "requests", "fail"):
        if getattr(args, name):
            raise UsageError(f"--{name} is of one run; leave it out with --search, and simulate what it finds")
    check_output("--kubernetes", args.kubernetes)
    goals = read_goals(args.objective)
    candidates, skipped = _candidates(args)
    workload = workload_of(max(one.setup.limits.max_model_len for one in candidates))
    count = sum(1 for _ in workload.arrivals())
    if not count:
        raise UsageError("the workload has no request here; look at --start, --end and --too-long")
    search = CapacitySearch(workload.arrivals, count, candidates, goals, args.max_replicas, args.jobs)
    return search, skipped, workload.name


def _candidates(args: argparse.Namespace) -> tuple[list[Candidate], dict[str, str]]:
    """Return the candidates that can be simulated, and why others cannot. Raises ConfigError if none can."""
    space = read_space(args.search_space)
    if not args.cost.startswith("roofline") and (names := [name for name in MACHINE_FLAGS if name in space]):
        raise UsageError(
            f"--cost is {args.cost}, which knows the steps of one machine; leave {names[0]} out of --search-space, or "
            "give --cost roofline"
        )
    candidates: list[Candidate] = []
    skipped: dict[str, str] = {}
    known: dict[tuple[object, ...], SimulatedGroup] = {}
    for chosen in combine(space):
        try:
            candidates.append(_candidate(args, chosen, known))
        except ConfigError as error:
            if not chosen:
                raise
            skipped[label_of(chosen)] = str(error)
    if not candidates:
        label, why = next(iter(skipped.items()))
        raise ConfigError(f"no setting of --search-space can be simulated; {label}: {why}")
    return candidates, skipped


def _candidate(
    args: argparse.Namespace, chosen: Mapping[str, Any], known: dict[tuple[object, ...], SimulatedGroup]
) -> Candidate:
    """Return the candidate of chosen settings; `known` has the replicas of machines. Raises ConfigError."""
    own = argparse.Namespace(**vars(args))
    own.router = chosen.get("router", args.router)
    for name, flag in MACHINE_FLAGS.items():
        setattr(own, flag, chosen.get(name, getattr(args, flag)))
    settings = {name: value for name, value in chosen.items() if name not in (*MACHINE_FLAGS, "router")}
    resolved = load(settings_given(args) | settings, os.environ, args.config)
    machine = tuple(getattr(own, flag) for flag in MACHINE_FLAGS.values())
    group = known.get(machine) or make_groups(own, resolved)[0]
    known[machine] = group
    group = replace(group, limits=limits_of(own, resolved, group.engine))
    engine, hardware = group.engine, group.engine.hardware
    if engine.ranks == 1 and chosen.get("data_parallel_size", 1) != 1:
        raise ConfigError(f"data_parallel_size is {own.dp}; {engine.model} has no experts, give replicas instead")
    setup = make_setups(own, [group])[0]
    return Candidate(
        chosen, setup, group.price * setup.fleet[0].replica.num_engines,
        1 if hardware is None else own.tp * engine.ranks * own.pp,
        engine.model, engine.device if hardware is None else hardware.device.name,
    )  # fmt: skip


def _fleet_plan(args: argparse.Namespace, resolved: Resolved, best: SearchTrial, workload: str) -> FleetPlan:
    """Return the fleet that was found for `octavo fleet --plan`: what the user set and what the search chose."""
    candidate, limits = best.candidate, best.candidate.setup.limits
    settings: dict[str, object] = {
        setting.name: resolved.value(setting)
        for setting in SETTINGS
        if setting.section in ("cache", "scheduling") and resolved.origins[setting.name] != "default"
    }
    sizes = {name: candidate.chosen.get(name, getattr(args, flag)) for name, flag in MACHINE_FLAGS.items()}
    settings |= {name: value for name, value in candidate.chosen.items() if name not in (*MACHINE_FLAGS, "router")}
    stages = sizes["pipeline_parallel_size"]  # each with an engine of its own, where octavo fleet has one for all
    settings |= {"policy": limits.policy, "max_sequences": limits.max_sequences * stages}
    settings |= {"max_batch_tokens": limits.max_batch_tokens}
    if candidate.setup.ranks == 1:  # of a model without experts, data-parallel engines are replicas
        sizes["data_parallel_size"] = 1
    flags = {"max_model_len": args.max_model_len, "depth": args.depth if stages == 1 else None, **sizes}
    del flags["device"]
    settings |= {name: value for name, value in flags.items() if value is True or value not in (None, False, 1)}
    return FleetPlan(
        candidate.model, best.replicas, candidate.setup.router, settings, args.objective, best.verdict.text, workload,
        candidate.device,
    )  # fmt: skip


# --- the answer


def _facts(result: SearchResult, skipped: Mapping[str, str]) -> dict[str, Any]:
    """Return the search's result, its trials, and what was found of each setting, as plain values."""
    best, answer = result.best, None
    if best is not None:
        setup, less = best.candidate.setup, result.one_less()
        answer = {
            "replicas": best.replicas, "settings": best.candidate.label,
            "price_per_hour": result.cost if result.is_priced else None,
            "device": best.candidate.device, "devices": best.replicas * best.candidate.devices,
            "policy": setup.limits.policy, "router": setup.router, "max_sequences": setup.limits.max_sequences,
            "max_batch_tokens": setup.limits.max_batch_tokens, "limited_by": name_limit(best.verdict.facts)[0],
            "one_replica_less": None if less is None else _trial_facts(less), "figures": best.verdict.facts,
        }  # fmt: skip
    outcomes = [
        {
            "settings": one.candidate.label, "fate": one.fate.name.lower(), "replicas": one.replicas or None,
            "fewest_by_bound": None if one.fate is Fate.INFEASIBLE else one.bound,
            "cost_of_replica": result.cost_of(one.candidate),
        }
        for one in result.outcomes
    ]  # fmt: skip
    return {
        "answer": answer, "nearest": [_trial_facts(trial) for trial in result.nearest()],
        "trials": [_trial_facts(trial) for trial in result.trials], "settings": outcomes,
        "skipped": [{"settings": label, "why": why} for label, why in skipped.items()], "notes": result.notes,
    }  # fmt: skip


def _trial_facts(trial: SearchTrial) -> dict[str, Any]:
    return {
        "settings": trial.candidate.label, "replicas": trial.replicas, "reached": trial.verdict.is_reached,
        "summary": trial.verdict.text, "limited_by": name_limit(trial.verdict.facts)[0],
    }  # fmt: skip


def _lines(result: SearchResult, skipped: Mapping[str, str]) -> Iterator[str]:
    """Yield the answer, what limits it, the nearest settings that were rejected, and counts."""
    for note in result.notes:
        yield f"note: {note}"
    for why, count in Counter(skipped.values()).items():
        labels = [label for label, reason in skipped.items() if reason == why]
        yield f"skipped     {count} setting{'s' * (count > 1)}, as {labels[0]}: {why}"
    best = result.best
    if best is None:
        yield (
            f"nothing among {len(result.trials)} trials reaches the objectives: take other devices, or wider objectives"
        )
    else:
        yield f"answer      {_describe(result, best)}: {best.verdict.text}"
        yield f"limited by  {': '.join(name_limit(best.verdict.facts))}"
        if (less := result.one_less()) is not None:
            yield f"one less    {count_replicas(less.replicas)}: {less.verdict.text}; {_limit_of(less)}"
    for trial in result.nearest():
        why = "less margin: " if trial.verdict.is_reached else ""
        yield f"rejected    {_describe(result, trial)}: {why}{trial.verdict.text}; {_limit_of(trial)}"
    fates = Counter(outcome.fate for outcome in result.outcomes)
    for fate, count in fates.items():
        yield f"settings    {count}: {fate.value}"
    yield f"simulated   {len(result.trials)} trials of {len(result.outcomes)} settings"


def _limit_of(trial: SearchTrial) -> str:
    return f"limited by {': '.join(name_limit(trial.verdict.facts))}"


def _describe(result: SearchResult, trial: SearchTrial) -> str:
    """Return a trial's fleet and its cost."""
    cost, candidate = result.cost_of(trial.candidate, trial.replicas), trial.candidate
    price = f"${cost:g} an hour" if result.is_priced else f"{cost} device{'s' * (cost > 1)}"
    return f"{count_replicas(trial.replicas)} ({candidate.label}), {price}"


def _forms(args: argparse.Namespace, plan: FleetPlan) -> Iterator[str]:
    """Write the values for Kubernetes; yield the command that starts the fleet, and the file or why there is none."""
    if (why := plan.why_not_served()) is not None:
        yield f"command     none: {why}"
    elif args.json:
        yield f"command     octavo fleet --plan {args.json}"
    else:
        yield f"command     {plan.command()}"
    if not args.kubernetes:
        return
    try:
        values = plan.kustomization()
    except ConfigError as error:
        yield f"kubernetes  none: {error}"
        return
    write_text(args.kubernetes, values)
    yield f"kubernetes  {args.kubernetes}"
