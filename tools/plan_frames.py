"""Measure what a plan costs between ranks: `python -m tools.plan_frames [ROWS]`.

Owns: timing the encoding, the decoding and the digest of a plan of decoding rows. Does not: send it.
"""

import sys
import time
from array import array
from collections.abc import Callable

from octavo.core.plan import ROW_SAMPLE, StepPlan
from octavo.executors.ranks.frames import decode_plan, encode_plan

REPEATS = 2000
GOAL_US = 40.0


def decode_step(num_rows: int) -> StepPlan:
    """Return a plan in which each row computes one token, and one of sixteen gets a block."""
    ones = array("i", [1] * num_rows)
    edits = array("i", [1, 0, 2, 3] * (num_rows // 16))
    columns = {"starts": array("i", [1000] * num_rows), "counts": ones, "flags": array("i", [ROW_SAMPLE] * num_rows)}
    return StepPlan(step=1, now=0.0, slots=array("i", range(num_rows)), edits=edits, **columns)


def median_us(call: Callable[[], object]) -> float:
    """Return the median time of a call."""
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return sorted(times)[REPEATS // 2] * 1e6


def main(arguments: list[str]) -> int:
    """Print the sizes and times of a plan of so many rows (256)."""
    plan = decode_step(int(arguments[0]) if arguments else 256)
    body = encode_plan(plan)
    times = {
        "encode": median_us(lambda: encode_plan(plan)),
        "decode": median_us(lambda: decode_plan(body)),
        "digest": median_us(plan.digest),
    }
    print(f"{len(plan.slots)} rows, {len(body):,} bytes")
    for name, time_us in times.items():
        print(f"{name}  {time_us:5.1f} us")
    print(f"sum     {sum(times.values()):5.1f} us, goal {GOAL_US:g} us")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
