"""`octavo bench online`: latencies and goodput of a server under requests that arrive on a schedule.

Owns: the arguments, starting a server if none is named, the report. Does not: measure (bench does).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from octavo.bench.arrivals import KINDS, Arrivals
from octavo.bench.completion_client import CompletionClient, Target
from octavo.bench.goodput import Objectives
from octavo.bench.online import OnlineLoad, OnlineRun, run_online
from octavo.bench.online_report import OnlineMeasured, make_online_report, show_online_report
from octavo.bench.process_tree import ending_with_this
from octavo.bench.prompts import Prompts, of_workload, read_texts
from octavo.bench.server_facts import first_model, step_split, step_totals
from octavo.bench.server_process import ServerProcess
from octavo.bench.workload import draw_workload, read_workload
from octavo.cli.bench_arguments import add_workload, check_at_least, token_progress
from octavo.cli.flags import UsageError, add_settings, respell, settings_given
from octavo.cli.servers import add_server_arguments, named_url
from octavo.cli.terminal import loading, say
from octavo.errors import EngineError

VOCAB_SIZE = 32_000  # for random prompts, as the server's is not known: most models have more
_MODEL_LINE = r"^model     (?P<model>\S+).*?, (?P<dtype>\w+), (?P<device>[\w:]+)(?:, (?P<threads>\d+) threads)?$"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="what to serve where no server is named [smollm2]")
    group = parser.add_argument_group("a server that runs")
    add_server_arguments(group, default="none: one is started")
    group.add_argument("--served-model", metavar="NAME", help="its name of the model [the first that it lists]")
    group.add_argument("--extra-body", metavar="JSON", default="{}", help="merged into every body; null leaves one out")
    group = add_workload(parser)
    group.add_argument("--text", metavar="FILE", help="a prompt a line instead; outputs as --output-len says")
    group = parser.add_argument_group("load")
    group.add_argument("--request-rate", type=float, default=math.inf, metavar="X", help="requests a second [inf]")
    group.add_argument("--arrivals", default="poisson", choices=KINDS, help="how they come at that rate [poisson]")
    group.add_argument("--burstiness", type=float, metavar="X", help="shape of the gaps: 1 = Poisson, less = burstier")
    group.add_argument("--max-concurrency", type=int, default=0, metavar="N", help="requests open at once [no bound]")
    group.add_argument("--duration", type=float, default=math.inf, metavar="S", help="send for so long at most [inf]")
    group.add_argument(
        "--request-timeout", type=float, default=600.0, metavar="S", help="give a request up after [600]"
    )
    group.add_argument("--warmups", type=int, default=1, metavar="N", help="requests before, not counted [1]")
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="NAME:MS", help="objectives, such as ttft:500 tpot:50 e2e:5000"
    )
    group.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    rare = ("--served-model", "--extra-body", "--text", "--arrivals", "--burstiness", "--request-timeout", "--warmups")
    add_settings(parser, is_short=False, rare=rare)


def run(args: argparse.Namespace) -> int:
    """Measure and print tables or one JSON object; return 1 if requests failed."""
    check_at_least(args, 1, "num_prompts", "input_len", "output_len")
    check_at_least(args, 0, "max_concurrency", "warmups")
    for name in ("duration", "request_timeout"):
        if not getattr(args, name) > 0:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(args, name):g}; give seconds above 0")
    url = named_url(args) or ""
    if url and (args.model or settings_given(args)):
        raise UsageError(f"{url} is a server that runs already; leave out MODEL and the settings of one to start")
    given = settings_given(args).get("seed", 0)
    seed = int(str(given)) if str(given).isdigit() else 0
    arrivals = Arrivals(args.request_rate, args.arrivals, args.burstiness, seed)
    load = OnlineLoad(arrivals, args.max_concurrency, args.duration)
    objectives, prompts = Objectives.read(args.goodput), _prompts(args, seed)
    with ending_with_this() if threading.current_thread() is threading.main_thread() else nullcontext():
        measured = asyncio.run(_measure(args, url, prompts, (load, objectives)))
    report = make_online_report(measured)
    if args.json:
        print(json.dumps(report))
    else:
        show_online_report(Console(), report)
    _say_failures(measured)
    return 1 if report["requests_failed"] else 0


def _prompts(args: argparse.Namespace, seed: int) -> Prompts:
    if args.text and args.workload:
        raise UsageError("--text and --workload are both given; give one")
    if args.text:
        return read_texts(Path(args.text), args.output_len)
    if args.workload:
        return of_workload(read_workload(Path(args.workload)))
    return of_workload(draw_workload(args.num_prompts, args.input_len, args.output_len, VOCAB_SIZE, seed))


async def _measure(
    args: argparse.Namespace, url: str, prompts: Prompts, how: tuple[OnlineLoad, Objectives]
) -> OnlineMeasured:
    target = Target(url, args.served_model or "", _key(), _extra(args), args.request_timeout)
    load, objectives = how
    if url:
        run, facts = await _drive(args, target, prompts, load)
        return OnlineMeasured(url, prompts.name, load, objectives, run, facts)
    words = [sys.executable, "-m", "octavo", "serve", *([args.model] if args.model else []), *respell(args)]
    keys = settings_given(args).get("api_key")
    if isinstance(keys, list):
        os.environ["OCTAVO_API_KEY"] = ",".join(keys)  # for the server: other users can see a process's arguments
        target = replace(target, api_key=keys[0])
    with loading(args.model or "the server", args.json):
        server = await ServerProcess.start([*words, "--host", "127.0.0.1", "--port", "{port}"])
    try:
        said = server.said(_MODEL_LINE)
        run, facts = await _drive(args, replace(target, base_url=server.base_url), prompts, load)
    finally:
        peak = server.end()
    facts |= said.groupdict() if said else {}
    facts |= {"startup_s": round(server.startup_s, 3), "peak_memory_bytes": peak}
    return OnlineMeasured("started here", prompts.name, load, objectives, run, facts)


async def _drive(
    args: argparse.Namespace, target: Target, prompts: Prompts, load: OnlineLoad
) -> tuple[OnlineRun, dict[str, Any]]:
    """Warm up and run; return the run, with the steps that the server made meanwhile."""
    model = target.model or await first_model(CompletionClient(target))
    client = CompletionClient(replace(target, model=model))
    bodies = [client.body(prompt, count) for prompt, count in prompts.all]
    for _ in range(args.warmups):
        answer = await client.send(client.body(*prompts.all[0]))
        if answer.has_failed:
            raise EngineError(f"a request to warm up failed ({answer.kind}): {answer.error}")
    before = await step_totals(client)
    num_output = sum(count for _, count in prompts.all)
    with token_progress() as progress:
        task = progress.add_task("requests", total=num_output)
        run = await run_online(client, bodies, load, partial(progress.advance, task))
    return run, {"model": model, **step_split(before, await step_totals(client))}


def _key() -> str:
    return os.environ.get("OCTAVO_API_KEY") or os.environ.get("OPENAI_API_KEY") or ""


def _extra(args: argparse.Namespace) -> dict[str, Any]:
    try:
        extra = json.loads(args.extra_body)
    except ValueError as error:
        raise UsageError(f"--extra-body is no JSON: {error}") from None
    if not isinstance(extra, dict):
        raise UsageError('--extra-body is no JSON object; give such as {"ignore_eos": null}')
    return extra


def _say_failures(measured: OnlineMeasured) -> None:
    """Print the first error of each kind."""
    shown: dict[str, str] = {}
    for answer in measured.run.answers:
        if answer.has_failed:
            shown.setdefault(answer.kind, answer.error)
    say(*(f"{kind}: {error}" for kind, error in shown.items()))
