"""`octavo bench online` (a server under load) and `octavo bench compare` (this engine and other engines).

Owns: the flags, the start of the server or the peers. Does not: measure, or make tables (octavo.bench does).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import re
import sys
import threading
from array import array
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from octavo.assembly import find_files
from octavo.bench import online, peers
from octavo.bench.comparison import Comparison, ComparisonTask, make_comparison_report, show_comparison
from octavo.bench.completion_client import Target
from octavo.bench.processes import ServerProcess, ending_with_this
from octavo.bench.report import Report
from octavo.bench.workload import BenchWorkload, draw_workload, read_texts, read_workload
from octavo.cli.bench import add_int, add_json, add_model, add_workload, print_report, progress
from octavo.cli.flags import UsageError, add_settings, config_from, respell, settings_given
from octavo.cli.servers import add_server_arguments, client_key, named_url
from octavo.cli.terminal import loading, say
from octavo.config.setting import Number
from octavo.machine import usable_cores

# --- online -----------------------------------------------------------------------------------------

VOCAB_SIZE = 32_000  # for random prompts: the server's vocabulary size is unknown, and most are larger
_MODEL_LINE = r"^model     (?P<model>\S+).*?, (?P<dtype>\w+), (?P<device>[\w:]+)(?:, (?P<threads>\d+) threads?)?$"
_RARE_ONLINE = (
    "--served-model", "--extra-body", "--text", "--arrivals", "--burstiness", "--request-timeout", "--warmups",
)  # fmt: skip


def add_online_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    add_model(parser, "what to serve where no server is named [smollm2]")
    group = parser.add_argument_group("a running server")
    add_server_arguments(group, default="none: one is started")
    group.add_argument("--served-model", metavar="NAME", help="its name of the model [the first that it lists]")
    group.add_argument("--extra-body", metavar="JSON", default="{}", help="merged into every body; null leaves one out")
    group = add_workload(parser)
    group.add_argument("--text", metavar="FILE", help="one prompt a line instead; outputs as --output-len says")
    group = parser.add_argument_group("load")
    group.add_argument("--request-rate", type=float, default=math.inf, metavar="X", help="requests a second [inf]")
    group.add_argument(
        "--arrivals", default="poisson", choices=online.ARRIVAL_KINDS, help="gaps between them at that rate [poisson]"
    )
    group.add_argument("--burstiness", type=float, metavar="X", help="shape of the gaps: 1 = Poisson, less = burstier")
    group.add_argument(
        "--max-concurrency", type=Number(int, 0), default=0, metavar="N", help="requests open at once [no bound]"
    )
    seconds = Number(float, 0, is_above=True)
    group.add_argument("--duration", type=seconds, default=math.inf, metavar="S", help="stop sending after [inf]")
    group.add_argument(
        "--request-timeout", type=seconds, default=600.0, metavar="S", help="give a request up after [600]"
    )
    add_int(group, "--warmups", 1, "requests before, not counted", low=0)
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="NAME:MS", help="objectives, such as ttft:500 tpot:50 e2e:5000"
    )
    add_json(group)
    add_settings(parser, is_short=False, rare=_RARE_ONLINE)


def run_online(args: argparse.Namespace) -> int:
    """Measure a server under timed arrivals; return 1 if requests failed."""
    url = named_url(args) or ""
    if url and (args.model or settings_given(args)):
        raise UsageError(f"{url} is a running server; leave out MODEL and the settings of one to start")
    given = settings_given(args).get("seed", 0)
    seed = int(str(given)) if str(given).isdigit() else 0
    load = online.OnlineLoad(
        online.Arrivals(args.request_rate, args.arrivals, args.burstiness, seed), args.max_concurrency, args.duration
    )
    objectives = online.Objectives.read(args.goodput)
    name, prompts = _prompts(args, seed)

    async def measure(target: Target) -> tuple[online.OnlineRun, Report]:
        with progress(sum(count for _, count in prompts), text="requests") as advance:
            return await online.measure_server(target, prompts, load, args.warmups, advance)

    key = client_key(None) or os.environ.get("OPENAI_API_KEY", "")
    target = Target(url, args.served_model or "", key, _extra_body(args), args.request_timeout)
    with ending_with_this() if threading.current_thread() is threading.main_thread() else nullcontext():
        run, facts = asyncio.run(measure(target) if url else _measure_own_server(args, target, measure))
    facts = {"server": url or "started here", **facts, "workload": name}
    report = online.make_online_report(facts, load, objectives, run)
    say(*(f"{kind}: {error}" for kind, error in run.first_errors().items()))
    print_report(args, report, online.show_online)
    return 1 if report["requests_failed"] else 0


def _prompts(args: argparse.Namespace, seed: int) -> tuple[str, list[tuple[array[int] | str, int]]]:
    """Return the workload's name, and its prompts with their numbers of output tokens."""
    if args.text and args.workload:
        raise UsageError("--text and --workload are both given; give one")
    if args.text:
        return Path(args.text).name, [(text, args.output_len) for text in read_texts(Path(args.text))]
    if args.workload:
        workload = read_workload(Path(args.workload))
    else:
        workload = draw_workload(args.num_prompts, args.input_len, args.output_len, VOCAB_SIZE, seed)
    return workload.name, [(item.prompt_token_ids, item.max_tokens) for item in workload.items]


async def _measure_own_server(
    args: argparse.Namespace, target: Target, measure: Callable[[Target], Awaitable[tuple[online.OnlineRun, Report]]]
) -> tuple[online.OnlineRun, Report]:
    """Start a server with the settings of the flags, measure the server, and end it."""
    words = [sys.executable, "-m", "octavo", "serve", *([args.model] if args.model else []), *respell(args)]
    keys = settings_given(args).get("api_key")
    if isinstance(keys, list):
        os.environ["OCTAVO_API_KEY"] = ",".join(keys)  # not as an argument, which other users can see
        target = replace(target, api_key=keys[0])
    with loading(args.model or "the server", args.json):
        server = await ServerProcess.start([*words, "--host", "127.0.0.1", "--port", "{port}"])
    try:
        model_line = re.search(_MODEL_LINE, server.output(), re.MULTILINE)
        run, facts = await measure(replace(target, base_url=server.base_url))
    finally:
        peak = server.end()
    facts |= model_line.groupdict() if model_line else {}
    return run, {**facts, "startup_s": round(server.startup_s, 3), "peak_memory_bytes": peak}


def _extra_body(args: argparse.Namespace) -> dict[str, Any]:
    try:
        extra = json.loads(args.extra_body)
    except ValueError as error:
        raise UsageError(f"--extra-body is not JSON: {error}") from None
    if not isinstance(extra, dict):
        raise UsageError('--extra-body is not a JSON object; give such as {"ignore_eos": null}')
    return extra


# --- compare ----------------------------------------------------------------------------------------


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    add_model(parser, "what this engine runs [smollm2]")
    group = parser.add_argument_group("peers")
    group.add_argument("--vllm-python", metavar="PATH", help="python of an environment with vLLM")
    group.add_argument("--transformers-python", metavar="PATH", help="python of one with transformers")
    group.add_argument("--mistralrs", metavar="PATH", help="python of one with mistral.rs")
    group.add_argument("--llama-server", metavar="PATH", help="llama.cpp's server")
    group.add_argument("--weights", metavar="DIR", help="safetensors for vLLM and transformers")
    group.add_argument("--gguf", metavar="FILE", help="GGUF for llama.cpp and mistral.rs [that of MODEL]")
    group.add_argument(
        "--peer-dtype", default="bfloat16", metavar="TEXT", help="type of vLLM's and transformers' weights [bfloat16]"
    )
    group.add_argument("--own-server", action="store_true", help="this engine's server too, also without llama.cpp's")
    group.add_argument("--peer-timeout", type=float, default=1200.0, metavar="S", help="for a start or a group [1200]")
    group = parser.add_argument_group("workloads")
    group.add_argument(
        "--workload", nargs="+", default=[], metavar="FILE[@N]", help="workload files, N requests at a time [32]"
    )
    group.add_argument("--max-requests", type=Number(int, 1), metavar="N", help="only the first N of each group")
    group.add_argument("--max-groups", type=Number(int, 1), metavar="N", help="only the first N groups")
    add_int(group, "--rounds", 3, "turns of each peer at each workload")
    group.add_argument("--neighbour", action="store_true", help="each workload again beside a busy process")
    add_json(group)
    add_settings(parser, ("model", "chat", "cache", "scheduling", "execution", "speculation"), is_short=False)


def run_compare(args: argparse.Namespace) -> int:
    """Compare this engine with other engines; return 1 if a peer failed."""
    if not args.workload:
        raise UsageError("no --workload is given; give one or more files, such as a.json b.json@1")
    alone = [read_task(word, args.max_requests, args.max_groups) for word in args.workload]
    neighbours = (False, True) if args.neighbour else (False,)
    tasks = [replace(task, has_neighbour=neighbour) for task in alone for neighbour in neighbours]
    comparison = Comparison(make_peers(args, tasks), tasks, args.rounds)
    with ending_with_this(), progress(comparison.num_turns, "turns", "starting") as advance:
        asyncio.run(comparison.run(partial(advance, 1)))
    report = make_comparison_report(comparison.results, tasks, args.rounds)
    errors = {result.peer.name: result.error for result in comparison.results if result.error}
    say(*(f"{name} was left out: {error}" for name, error in errors.items()))
    print_report(args, report, show_comparison)
    return 1 if errors else 0


def read_task(word: str, max_requests: int | None, max_groups: int | None) -> ComparisonTask:
    """Read FILE or FILE@N, cut to --max-requests and --max-groups. Raises ConfigError."""
    name, at, number = word.rpartition("@")
    if at and not (number.isdigit() and int(number) > 0):
        raise UsageError(f"--workload is {word!r}; give FILE@N with N requests at a time, at least 1")
    workload = read_workload(Path(name if at else word))
    groups = tuple(group[:max_requests] for group in workload.groups[:max_groups])
    return ComparisonTask(BenchWorkload(workload.name, groups), int(number) if at else 32)


def make_peers(args: argparse.Namespace, tasks: list[ComparisonTask]) -> list[peers.Peer]:
    """Return this engine, and every peer whose path is given. Raises ConfigError if a path or weights are missing."""
    config = config_from(args, model=args.model)
    files = find_files(config)
    max_len = max(task.workload.max_len for task in tasks)
    setup = peers.PeerSetup(
        config.execution.threads or usable_cores(),
        max(task.at_once for task in tasks),
        -(-(max_len + 1) // 64) * 64,  # a multiple of 64, with room for the position that some engines reserve
        args.peer_dtype,
        args.peer_timeout,
    )
    gguf = args.gguf or (str(files.weights[0]) if files.kind == "gguf" else "")
    # (path of the peer, factory, name in messages, weights, flag of the weights)
    others = (
        (args.vllm_python, peers.vllm, "vLLM", args.weights, "--weights"),
        (args.transformers_python, peers.transformers, "transformers", args.weights or gguf, "--weights"),
        (args.mistralrs, peers.mistralrs, "mistral.rs", gguf, "--gguf"),
        (args.llama_server, peers.llama_server, "llama.cpp", gguf, "--gguf"),
    )
    chosen: list[peers.Peer] = [peers.own_engine(config.model.model, _own_settings(args), setup)]
    for path, make_peer, name, weights, flag in others:
        if make_peer is peers.llama_server and (path or args.own_server):
            skipped = ("--threads=", "--max-num-seqs=", "--model=")
            words = [word for word in respell(args) if not word.startswith(skipped)]
            chosen.append(peers.own_server(config.model.model, words, setup))
        if path:
            if not weights:
                raise UsageError(f"{name} needs weights; give {flag}")
            chosen.append(make_peer(_existing(path), _existing(weights), setup))
    return chosen


def _own_settings(args: argparse.Namespace) -> dict[str, object]:
    """Return the settings of the flags, for the engine's process. Raises UsageError if --config is given."""
    if args.config:
        raise UsageError("--config is not passed on to the compared engine; give its settings as flags")
    given = settings_given(args)
    return {name: value for name, value in given.items() if name not in ("model", "threads", "max_sequences")}


def _existing(path: str) -> str:
    if not Path(path).exists():
        raise UsageError(f"{path} does not exist; give the path of the peer's python, server or weights")
    return path
