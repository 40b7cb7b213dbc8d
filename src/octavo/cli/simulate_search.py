"""`octavo simulate --search`: the fewest replicas, and the settings, that reach the objectives on a workload.

Owns: the flags of the search, and how its answer is printed. Does not: search (simulator.search).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from octavo.cli.flags import UsageError, whole
from octavo.core.limits import Limits
from octavo.simulator.arrival import Arrival
from octavo.simulator.goals import read_goals
from octavo.simulator.search import MAX_REPLICAS, Found, Question, read_space, search
from octavo.simulator.setup import Setup


def add_search_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the search."""
    group = parser.add_argument_group("capacity search")
    group.add_argument(
        "--search", action="store_true", help="find the fewest replicas that reach --objective, as in ttft_p99=1.0"
    )
    group.add_argument(
        "--search-space",
        default="",
        metavar="S",
        help="settings to try too, as in max_sequences=64|256,policy=fcfs|fair",
    )
    group.add_argument(
        "--max-replicas", type=whole, default=MAX_REPLICAS, metavar="N", help=f"replicas tried at most [{MAX_REPLICAS}]"
    )


def run_search(
    args: argparse.Namespace,
    arrivals: Callable[[], Iterable[Arrival]],
    setup: Setup,
    price: float,
    make_limits: Callable[[Limits, dict[str, str]], Limits],
) -> int:
    """Search, printing each trial as it ends; return 1 if nothing reaches the objectives."""
    for name in ("html", "page", "perfetto", "requests", "fail"):
        if getattr(args, name):
            raise UsageError(f"--{name} is of one run; leave it out with --search, and simulate what it finds")
    if not 1 <= args.max_replicas <= MAX_REPLICAS:
        raise UsageError(f"--max-replicas is {args.max_replicas}; give 1 to {MAX_REPLICAS}")
    goals, space = read_goals(args.objective), read_space(args.search_space)
    count = sum(1 for _ in arrivals())
    if not count:
        raise UsageError("the workload has no request here; look at --start, --end and --too-long")
    found = search(
        Question(
            arrivals, count, setup, goals, space, price, args.max_replicas,
            tell=lambda line: print(line, file=sys.stderr, flush=True), make_limits=make_limits,
        )
    )  # fmt: skip
    return _tell(found, price, args.json)


def _tell(found: Found, price: float, path: str | None) -> int:
    """Print the answer; write it as JSON if `path` is given."""
    facts = found_facts(found)
    if path == "-":
        print(json.dumps(facts, indent=1))
    elif path:
        try:
            Path(path).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--json {path} cannot be written ({error.strerror}); give a path that can") from None
    if path != "-":
        for note in found.notes:
            print(f"note: {note}")
        print(_answer(found, price))
    return 0 if found.setup is not None else 1


def found_facts(found: Found) -> dict[str, Any]:
    """Return the answer and the trials as plain values."""
    setup = found.setup
    answer = None
    if setup is not None and found.verdict is not None:
        answer = {
            "replicas": setup.replicas, "settings": found.label, "price_per_hour": found.cost,
            "policy": setup.limits.policy, "router": setup.router, "max_sequences": setup.limits.max_sequences,
            "max_batch_tokens": setup.limits.max_batch_tokens, "figures": found.verdict.facts,
        }  # fmt: skip
    trials = [
        {
            "settings": trial.label, "replicas": trial.replicas, "reached": trial.verdict.is_reached,
            "told": trial.verdict.told,
        }
        for trial in found.trials
    ]  # fmt: skip
    return {"answer": answer, "trials": trials, "notes": found.notes}


def _answer(found: Found, price: float) -> str:
    if found.setup is None or found.verdict is None:
        return (
            f"nothing among {len(found.trials)} trials reaches the objectives: take other devices, or wider objectives"
        )
    count, cost = found.setup.replicas, f", ${found.cost:g} an hour" if price else ""
    told = f"{count} replica{'s' * (count > 1)} ({found.label}){cost}: {found.verdict.told}"
    return f"{told}\n{len(found.trials)} trials"
