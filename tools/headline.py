"""Measure the figures that the README quotes, and write their section of docs/performance.md: one run, one command.

Owns: the workloads A, B and C, the section, the README's sentence. Does not: measure (`octavo bench compare` does).
The engine (in a process of its own, without HTTP) and the server (over HTTP) are rows of their own; another engine's
server is compared with the server only.
Usage: python -m tools.headline [--llama-server PATH] [--rounds 3]; about 5 minutes on two cores, 20 with llama.cpp
"""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools.reliability import run_facts
from tools.sections import write_section

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
SECTION = "headline"  # of the page
WORKLOADS = {"A": "a.json.gz@32", "B": "b.json.gz@1", "C": "c.json.gz@32"}
NAMES = {"octavo": "Octavo's engine", "octavo server": "Octavo's server", "llama.cpp": "llama.cpp's server"}
OWN = ("octavo", "octavo server")
BUSY_LOAD = 0.5  # load average for each core, above which a run is marked
FIGURE = re.compile(r"\d[\d,.]*(?= (?:output )?tokens/s| times)")
Facts = dict[str, Any]


def measure(rounds: int, llama_server: str | None, model: str, python: str = sys.executable) -> Facts:
    """Run the comparison; return its report."""
    words = [python, "-m", "octavo", "bench", "compare", model, "--own-server", "--json", "--rounds", str(rounds)]
    words += ["--speculate", "none"]  # the workloads' prompts are random ids, which models answer with repetitions
    words += ["--workload", *(str(ROOT / "tools" / "workloads" / name) for name in WORKLOADS.values())]
    words += ["--llama-server", llama_server] if llama_server else []
    env = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, env=env, check=False)
    report: Facts = json.loads((done.stdout.splitlines() or ["{}"])[-1])
    failed = [peer["error"] for peer in report.get("peers", ()) if peer["error"] and peer["name"] in OWN]
    if failed or "peers" not in report:
        raise SystemExit(f"nothing is written: {failed[0] if failed else 'the comparison failed'}")
    return report


def render(report: Facts, run: Facts, command: str) -> str:
    """Return the section of the page."""
    lines = [f"One run, begun {run['date']}, commit {run['commit']}, {run['cores']} cores ({run['cpu']}),"]
    lines.append(f"load average {run['load']} at its start: `{command}`\n")
    if run["load"] > BUSY_LOAD * run["cores"]:
        lines.append("**The machine was busy with other work: these figures are too low.**\n")
    lines.append(
        "| workload | what | output tokens/s | first token p50, ms | a further token p50, ms |\n|---|---|---|---|---|"
    )
    for name in WORKLOADS:
        for peer in report["peers"]:
            figures = peer["workloads"].get(_task(report, name))
            if figures:
                lines.append(f"| {name} | {NAMES[peer['name']]} | {_cells(figures)} |")
    lines += [
        "",
        *_ratios(report),
        "",
        *_processes(report),
        "",
        f"In one sentence: {sentence(report, run['cores'])}",
        "",
    ]
    return "\n".join(lines)


def _task(report: Facts, workload: str) -> str:
    return str(report["workloads"][list(WORKLOADS).index(workload)])


def _cells(figures: Facts) -> str:
    return f"{figures['output_tokens_per_s']:,.0f} | {figures['ttft_ms']:,.0f} | {figures['token_ms']:.1f}"


def _ratios(report: Facts) -> list[str]:
    """Return lines with the ratios to other servers: median, least and greatest of the rounds."""
    rows = []
    for peer in report["peers"]:
        for name in WORKLOADS:
            ratio = peer["workloads"].get(_task(report, name), {}).get("ratios", {}).get("output_tokens_per_s")
            if ratio:
                shown = f"{ratio['median']:.2g} ({ratio['min']:.2g} to {ratio['max']:.2g})"
                rows.append(f"| {name} | {NAMES[peer['name']]} | {shown} |")
    if not rows:
        return ["No other engine took part in this run."]
    return ["| workload | Octavo's server beside | output tokens/s, ratio |\n|---|---|---|", *rows]


def _processes(report: Facts) -> list[str]:
    lines = ["| process | start-up, s | peak memory, GiB |\n|---|---|---|"]
    for peer in report["peers"]:
        failed = f" (left out: {peer['error'].splitlines()[0]})" if peer["error"] else ""
        memory = peer["peak_memory_bytes"] / 2**30
        lines.append(f"| {NAMES[peer['name']]}{failed} | {peer['startup_s']:.1f} | {memory:.2f} |")
    return lines


def sentence(report: Facts, cores: int) -> str:
    """Return the README's sentence about speed."""
    by_name = {peer["name"]: peer for peer in report["peers"]}
    task = _task(report, "A")
    engine, server = (by_name[name]["workloads"][task]["output_tokens_per_s"] for name in ("octavo", "octavo server"))
    text = (
        f"On {cores} cores the default model gives {engine:,.0f} output tokens/s in process and {server:,.0f} output "
    )
    text += "tokens/s over HTTP, 32 requests at a time"
    ratio = by_name.get("llama.cpp", {"workloads": {}})["workloads"].get(task, {}).get("ratios")
    if ratio:
        text += f"; over HTTP that is {ratio['output_tokens_per_s']['median']:.2g} times llama.cpp's server"
    return text + "."


def strange_figures(text: str, section: str) -> list[str]:
    """Return the figures of speed in a text that the section's sentence does not have."""
    known = FIGURE.findall(" ".join(section.partition("In one sentence: ")[2].split()))
    return [figure for figure in FIGURE.findall(" ".join(text.split())) if figure not in known]


def main(arguments: list[str] | None = None) -> int:
    """Measure, write the section, and print the sentence for the README."""
    parser = argparse.ArgumentParser(prog="python -m tools.headline")
    parser.add_argument("--llama-server", metavar="PATH", help="llama.cpp's server, which takes part")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--model", default="smollm2", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    run = run_facts()
    report = measure(args.rounds, args.llama_server, args.model)
    command = "python -m tools.headline" + (" --llama-server PATH" if args.llama_server else "")
    write_section(PAGE, SECTION, render(report, run, f"{command} --rounds {args.rounds}"))
    print(sentence(report, run["cores"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
