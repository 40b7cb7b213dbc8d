"""The frozen decisions: 300 runs of the scheduler, as hashes of what was decided at each verb.

    python -m tests.freeze.decisions --check [SEED ..]   # name the first differing record of each run that differs
    python -m tests.freeze.decisions --show SEED STEP    # that record in clear, one field a line
    python -m tests.freeze.decisions --show SEED         # all records of a run, one a line
    python -m tests.freeze.decisions --coverage          # in how many runs each feature occurs
    python -m tests.freeze.decisions --write             # freeze anew: only for a decision changed on purpose

Run the same with PYTHONPATH at another commit's src/ and diff what --show prints. Records hold names, not numbers or
slots, so columns and enumerations may be renumbered; core_names.py is the one file that follows a renaming.
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
from collections import Counter
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tests.freeze.random_runs import Run

DATA = Path(__file__).with_name("decisions.json.xz")
# The last ones meet what is rare: media items over a step's encoder budget, forks and swaps without room, and such.
SEEDS = (*range(290), 493, 539, 613, 718, 736, 764, 956, 1349, 1831, 2377)
HASH_BYTES = 5


def digest(record: dict[str, Any]) -> str:
    """A short hash of one record in canonical JSON."""
    text = json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return blake2b(text.encode(), digest_size=HASH_BYTES).hexdigest()


def read() -> dict[str, dict[str, Any]]:
    """The frozen runs by seed: hashes of their records in one string each, and their features."""
    runs: dict[str, dict[str, Any]] = json.loads(lzma.decompress(DATA.read_bytes()))
    return runs


def write() -> None:
    """Freeze what the scheduler decides now."""
    runs = {}
    for seed in SEEDS:
        run = Run(seed).drive()
        runs[str(seed)] = {"hashes": "".join(map(digest, run.records)), "features": sorted(run.features)}
    DATA.write_bytes(lzma.compress(json.dumps(runs, indent=0).encode(), preset=9))
    num_records = sum(len(run["hashes"]) for run in runs.values()) // (2 * HASH_BYTES)
    print(f"{len(runs)} runs, {num_records} records, {DATA.stat().st_size} bytes")


def first_difference(seed: int, frozen: dict[str, dict[str, Any]]) -> str | None:
    """What differs first in a run, or None."""
    run = Run(seed)
    failure = ""
    try:
        run.drive()
    except Exception as error:  # the records up to here still say where it began
        failure = f"; then {type(error).__name__}: {error}"
    hashes = frozen[str(seed)]["hashes"]
    expected = [hashes[at : at + 2 * HASH_BYTES] for at in range(0, len(hashes), 2 * HASH_BYTES)]
    for index, record in enumerate(run.records):
        if index >= len(expected) or digest(record) != expected[index]:
            step = record.get("step", "-")
            return f"seed {seed}: record {index} of {len(expected)} differs ({record['verb']}, step {step}){failure}"
    if len(run.records) < len(expected) or failure:
        return f"seed {seed}: ends after {len(run.records)} records of {len(expected)}{failure}"
    return None


def check(seeds: list[int]) -> list[str]:
    """The first difference of each run that differs."""
    frozen = read()
    return [found for seed in seeds if (found := first_difference(seed, frozen))]


def coverage(frozen: dict[str, dict[str, Any]]) -> dict[str, int]:
    """In how many frozen runs each feature occurs."""
    counts = Counter(feature for run in frozen.values() for feature in run["features"])
    return dict(sorted(counts.items()))


def show(seed: int, index: int | None) -> None:
    """Print one record, or all."""
    run = Run(seed)
    try:
        run.drive()
    finally:
        if index is None:
            for number, record in enumerate(run.records):
                print(number, json.dumps(record, sort_keys=True))
        else:
            print(json.dumps({"limits": repr(run.limits), "depth": run.depth}))
            for name, value in sorted(run.records[index].items()):
                print(f"{name}: {json.dumps(value, sort_keys=True)}")


def main() -> int:
    """The commands of this module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.freeze.decisions", description="The frozen decisions.")
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--write", action="store_true", help="freeze what is decided now")
    group.add_argument("--check", nargs="*", type=int, metavar="SEED", help="compare these runs, or all")
    group.add_argument("--show", nargs="+", type=int, metavar="N", help="SEED [STEP]: print a record, or all")
    group.add_argument("--coverage", action="store_true", help="in how many runs each feature occurs")
    given = parser.parse_args()
    if given.write:
        write()
    elif given.coverage:
        for feature, count in coverage(read()).items():
            print(f"{count:4} {feature}")
    elif given.show:
        show(given.show[0], given.show[1] if len(given.show) > 1 else None)
    else:
        differences = check(given.check or list(SEEDS))
        print("\n".join(differences) or "equal")
        return bool(differences)
    return 0


if __name__ == "__main__":
    sys.exit(main())
