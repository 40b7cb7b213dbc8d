"""Run Octavo and transformers' continuous batching on one workload in turn, A B A B; print ratios and medians.

Usage: python tools/compare.py WORKLOAD.json [--runs 3] [--threads 2] [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

TOOLS = Path(__file__).parent


def figure(command: list[str]) -> float:
    """Run a command whose last line of output is JSON; return its output tokens per second."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return float(json.loads(done.stdout.rstrip().splitlines()[-1])["output_tokens_per_s"])


def main() -> None:
    """Interleave the runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    threads = ["--threads", str(arguments.threads)]
    octavo = [sys.executable, "-m", "octavo", "bench", "offline", "--workload", str(arguments.workload), "--json"]
    octavo += ["--dtype", arguments.dtype, "--max-num-seqs", "32", *threads]
    peer = [sys.executable, str(TOOLS / "peer_transformers.py"), str(arguments.workload), *threads]
    ours, theirs = [], []
    for number in range(arguments.runs):
        ours.append(figure(octavo))
        theirs.append(figure(peer))
        print(f"run {number + 1}: octavo {ours[-1]:.1f}, transformers {theirs[-1]:.1f} output tokens/s", flush=True)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    report = {
        "octavo_output_tokens_per_s": statistics.median(ours),
        "transformers_output_tokens_per_s": statistics.median(theirs),
        "ratio_median": round(statistics.median(ratios), 2),
        "ratio_min": round(min(ratios), 2),
        "ratio_max": round(max(ratios), 2),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
