"""Compare the speed of two trees of octavo: the same command in interleaved pairs, and the ratio with its interval.

Owns: running the pairs, in alternating order; a bootstrap of the median ratio. Does not: judge the speed.
Usage: python -m tools.paired --base OTHER/src --now src [--pairs 10] [--key plan_us --key commit_us] -- COMMAND ...
COMMAND runs with PYTHONPATH set to each tree in turn, from this folder. Without --key its wall time is compared, else
the numbers under that key in the JSON that it prints last (every one of them, in order, such as the step_us of each
setting of `octavo bench scheduler --json`). A ratio above 1 means that the tree of --now takes longer.
Example: python -m tools.paired --base ../before/src --now src --key step_us --
python -m octavo bench scheduler --json --load decode --running 32 256 --waiting 0
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

BOOTSTRAPS = 4000


def run(command: Sequence[str], tree: str, keys: Sequence[str]) -> dict[str, float]:
    """Run the command once on a tree; return its figures by name."""
    paths = [os.path.abspath(tree), os.getcwd()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    begun = time.perf_counter()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    spent = time.perf_counter() - begun
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode} on {tree}")
    if not keys:
        return {"wall_s": spent}
    found = read_json(done.stdout)
    figures = {}
    for key in keys:
        for index, value in enumerate(values_under(found, key)):
            figures[f"{key}[{index}]"] = value
    if not figures:
        raise SystemExit(f"nothing in what {' '.join(command)} printed has a number under {', '.join(keys)}")
    return figures


def read_json(text: str) -> Any:
    """Parse a command's output as JSON: the whole output, or its last line."""
    try:
        return json.loads(text)
    except ValueError:
        return json.loads(text.strip().rsplit("\n", 1)[-1])


def values_under(value: Any, key: str) -> Iterator[float]:
    """Every number under a key, however deep, in order."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == key and isinstance(inner, int | float):
                yield float(inner)
            else:
                yield from values_under(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from values_under(inner, key)


def interval(ratios: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """The 95 % bootstrap interval of the median."""
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(BOOTSTRAPS))
    return medians[int(0.025 * BOOTSTRAPS)], medians[int(0.975 * BOOTSTRAPS) - 1]


def compare(command: Sequence[str], base: str, now: str, keys: Sequence[str], num_pairs: int) -> dict[str, Any]:
    """Median ratio of each figure, now over base, and its interval."""
    pairs: list[tuple[dict[str, float], dict[str, float]]] = []
    for index in range(num_pairs):
        trees = (base, now) if index % 2 == 0 else (now, base)
        found = {tree: run(command, tree, keys) for tree in trees}
        pairs.append((found[base], found[now]))
        print(f"pair {index + 1} of {num_pairs}", file=sys.stderr)
    summary = {}
    for name in pairs[0][0]:
        before, after = [one[name] for one, _ in pairs], [other[name] for _, other in pairs]
        ratios = [late / early for early, late in zip(before, after, strict=True)]
        low, high = interval(ratios)
        summary[name] = {
            "base": statistics.median(before), "now": statistics.median(after), "ratio": statistics.median(ratios),
            "low": low, "high": high,
        }  # fmt: skip
    return summary


def main() -> int:
    """Print a table, and last one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m tools.paired", description=__doc__.split("\n")[0])
    parser.add_argument("--base", required=True, help="the src/ to compare with")
    parser.add_argument("--now", default="src", help="the src/ that is compared [src]")
    parser.add_argument("--pairs", type=int, default=10, help="pairs of runs [10]")
    parser.add_argument("--key", action="append", default=[], help="compare the numbers under this JSON key")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="after --")
    given = parser.parse_args()
    if os.path.abspath(given.base) == os.path.abspath(given.now):
        parser.error("--base and --now are the same folder")
    command = [sys.executable if given.command[0] == "python" else given.command[0], *given.command[1:]]
    summary = compare(command, given.base, given.now, given.key, given.pairs)
    print(f"{'figure':16} {'base':>10} {'now':>10}  ratio  95 % interval")
    for name, row in summary.items():
        times, bounds = f"{row['base']:10.3f} {row['now']:10.3f}", f"{row['low']:.3f} to {row['high']:.3f}"
        print(f"{name:16} {times}  {row['ratio']:.3f}  {bounds}")
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
