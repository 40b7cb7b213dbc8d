"""`octavo bench compare`: this engine beside others on the same workloads, in turn.

Owns: the arguments, the choice of peers, the tables. Does not: measure (bench does) or install a peer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from octavo.assembly import find_files
from octavo.bench.comparison import Comparison, ComparisonTask, make_comparison_report
from octavo.bench.peers import llama_peer, mistralrs_peer, octavo_peer, transformers_peer, vllm_peer
from octavo.bench.peers.peer import Peer, PeerSetup
from octavo.bench.process_tree import ending_with_this
from octavo.bench.table import show_rows
from octavo.bench.workload import BenchWorkload, read_workload
from octavo.cli.bench_arguments import check_at_least, token_progress
from octavo.cli.flags import UsageError, add_settings, config_from, respell, settings_given
from octavo.cli.terminal import say
from octavo.machine import usable_cores

_COLUMNS = ("", "tokens/s", "ratio", "min", "max", "first token ms", "ratio", "ms/token", "ratio")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="what this engine runs [smollm2]")
    group = parser.add_argument_group("peers")
    group.add_argument("--vllm-python", metavar="PATH", help="python of an environment with vLLM")
    group.add_argument("--transformers-python", metavar="PATH", help="python of one with transformers")
    group.add_argument("--mistralrs", metavar="PATH", help="python of one with mistral.rs")
    group.add_argument("--llama-server", metavar="PATH", help="llama.cpp's server")
    group.add_argument("--weights", metavar="DIR", help="safetensors for vLLM and transformers")
    group.add_argument("--gguf", metavar="FILE", help="GGUF for llama.cpp and mistral.rs [that of MODEL]")
    group.add_argument(
        "--peer-dtype", default="bfloat16", metavar="TEXT", help="type of vLLM's and transformers' weights"
    )
    group.add_argument("--own-server", action="store_true", help="this engine's server too, also without llama.cpp's")
    group.add_argument("--peer-timeout", type=float, default=1200.0, metavar="S", help="for a start or a group [1200]")
    group = parser.add_argument_group("workloads")
    group.add_argument(
        "--workload", nargs="+", default=[], metavar="FILE[@N]", help="workload files, N requests at a time [32]"
    )
    group.add_argument("--max-requests", type=int, metavar="N", help="only the first N of each group")
    group.add_argument("--max-groups", type=int, metavar="N", help="only the first N groups")
    group.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of each peer at each workload [3]")
    group.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    add_settings(parser, ("model", "chat", "cache", "scheduling", "execution"), is_short=False)


def run(args: argparse.Namespace) -> int:
    """Compare and print tables or one JSON object; return 1 if a peer failed."""
    check_at_least(args, 1, "rounds")
    if not args.workload:
        raise UsageError("no --workload is given; give one or more files, such as a.json b.json@1")
    tasks = [read_task(word, args.max_requests, args.max_groups) for word in args.workload]
    comparison = Comparison(make_peers(args, tasks), tasks, args.rounds)
    with ending_with_this(), token_progress("turns") as progress:
        bar = progress.add_task("starting", total=comparison.num_turns)
        asyncio.run(comparison.run(lambda text: progress.update(bar, advance=1, description=text)))
    report = make_comparison_report(comparison.standings, tasks)
    report |= {"rounds": args.rounds}
    if not args.json:
        console = Console()
        show_comparison(console if console.is_terminal else Console(width=120), report)
    for standing in comparison.standings:
        if standing.error:
            say(f"{standing.peer.name} was left out: {standing.error}")
    if args.json:
        print(json.dumps(report))
    return 1 if any(standing.error for standing in comparison.standings) else 0


def read_task(word: str, max_requests: int | None, max_groups: int | None) -> ComparisonTask:
    """Read FILE or FILE@N, cut to --max-requests and --max-groups. Raises ConfigError."""
    name, at, number = word.rpartition("@")
    if at and not (number.isdigit() and int(number) > 0):
        raise UsageError(f"--workload is {word!r}; give FILE@N with N requests at a time, at least 1")
    for flag, given in (("--max-requests", max_requests), ("--max-groups", max_groups)):
        if given is not None and given < 1:
            raise UsageError(f"{flag} is {given}; give at least 1")
    workload = read_workload(Path(name if at else word))
    groups = tuple(group[:max_requests] for group in workload.groups[:max_groups])
    return ComparisonTask(BenchWorkload(workload.name, groups), int(number) if at else 32)


def make_peers(args: argparse.Namespace, tasks: list[ComparisonTask]) -> list[Peer]:
    """Return this engine first, then every peer whose path is given. Raises ConfigError for what is missing."""
    config = config_from(args, model=args.model)
    files = find_files(config)
    at_once = max(task.at_once for task in tasks)
    longest = max(task.workload.max_len for task in tasks)
    # Round up to a multiple of 64, with the one position that some engines reserve.
    setup = PeerSetup(
        config.execution.threads or usable_cores(), at_once, -(-(longest + 1) // 64) * 64, args.peer_dtype
    )
    setup = replace(setup, timeout_s=args.peer_timeout)
    peers: list[Peer] = [octavo_peer.engine(config.model.model, _own_settings(args), setup)]
    gguf = args.gguf or (str(files.weights[0]) if files.kind == "gguf" else "")
    if args.vllm_python:
        peers.append(vllm_peer.make(_existing(args.vllm_python), _needed(args.weights, "vLLM", "--weights"), setup))
    if args.transformers_python:
        weights = _needed(args.weights or gguf, "transformers", "--weights")
        peers.append(transformers_peer.make(_existing(args.transformers_python), weights, setup))
    if args.mistralrs:
        weights = _needed(gguf, "mistral.rs", "--gguf")
        peers.append(mistralrs_peer.make(_existing(args.mistralrs), weights, setup))
    if args.llama_server or args.own_server:
        words = [word for word in respell(args) if not word.startswith(("--threads=", "--max-num-seqs=", "--model="))]
        peers.append(octavo_peer.server(config.model.model, words, setup))
    if args.llama_server:
        weights = _needed(gguf, "llama.cpp", "--gguf")
        peers.append(llama_peer.make(_existing(args.llama_server), weights, setup))
    return peers


def show_comparison(console: Console, report: dict[str, Any]) -> None:
    """Print one table for each workload, then start-up times and memory."""
    for name in report["workloads"]:
        rows = [_row(peer, peer["workloads"][name]) for peer in report["peers"] if name in peer["workloads"]]
        show_rows(console, f"{name}, medians of {report['rounds']}; ratios above 1: octavo is ahead", _COLUMNS, rows)
        console.print()
    starts = [
        (peer["name"], str(peer.get("dtype", "")), peer["startup_s"], round(peer["peak_memory_bytes"] / 2**30, 2))
        for peer in report["peers"]
    ]
    show_rows(console, "Processes", ("", "weights", "start-up s", "peak GiB"), starts)


def _row(peer: dict[str, Any], result: dict[str, Any]) -> tuple[object, ...]:
    ratios = result.get("ratios", {})
    speed = ratios.get("output_tokens_per_s", {})
    first, token = (ratios.get(name, {}).get("median", "") for name in ("ttft_ms", "token_ms"))
    spread = speed.get("median", ""), speed.get("min", ""), speed.get("max", "")
    return peer["name"], result["output_tokens_per_s"], *spread, result["ttft_ms"], first, result["token_ms"], token


def _own_settings(args: argparse.Namespace) -> dict[str, object]:
    """Return the settings given here, for the engine's own process. Raises UsageError if --config is given."""
    if args.config:
        raise UsageError("--config is not passed on to the compared engine; give its settings as flags")
    given = settings_given(args)
    return {name: value for name, value in given.items() if name not in ("model", "threads", "max_sequences")}


def _existing(path: str) -> str:
    if not Path(path).exists():
        raise UsageError(f"{path} does not exist; give the path of the peer's python or server")
    return path


def _needed(given: str | None, peer: str, flag: str) -> str:
    if not given:
        raise UsageError(f"{peer} needs weights; give {flag}")
    return _existing(given)
