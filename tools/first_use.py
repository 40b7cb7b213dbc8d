"""Measure what the first use of KV blocks costs a step, alternating pools populated at start and lazy pools.

Usage: python -m tools.first_use [--rounds 3]. A step writes one block for each of ROWS sequences in every layer of a
pool of SmolLM2's default shape (1.4 GiB), until each block was written once. Times are the writing thread's own, so
that other programs add little; "again" is the same pass over blocks that were used. One JSON object is the last line.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from itertools import pairwise

import numpy as np
import torch

from octavo.executors.cache import make_resident
from octavo.ops.attention import KVPool, PoolShape

SHAPE = PoolShape(30, 4096, 16, 3, 64, 64, torch.bfloat16)
ROWS = 32


def one_pass(pool: KVPool) -> dict[str, float]:
    """Write every block once, ROWS blocks per step; return the milliseconds of steps, and all page faults."""
    times, faults = [], resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for begin, end in pairwise(range(0, SHAPE.num_blocks + 1, ROWS)):
        start = time.thread_time()
        for plane in (*pool.keys, *pool.values):
            plane[begin:end].fill_(1.0)
        times.append(1e3 * (time.thread_time() - start))
    p50, p90, p99, most = np.percentile(times, [50, 90, 99, 100]).tolist()
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - faults
    return {"p50": p50, "p90": p90, "p99": p99, "max": most, "sum": sum(times), "faults": faults}


def show(way: str, figures: dict[str, float]) -> None:
    """Print a line."""
    print(f"{way:9} " + "  ".join(f"{name} {value:9.2f}" for name, value in figures.items()), flush=True)


def main() -> None:
    """Run both ways alternately."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    torch.set_num_threads(1)
    found: dict[str, list[dict[str, float]]] = {"lazy": [], "populated": [], "again": []}
    for _ in range(parser.parse_args().rounds):
        for way in ("lazy", "populated"):
            start = time.perf_counter()
            pool = KVPool(SHAPE, torch.device("cpu"))
            thread = make_resident([pool]) if way == "populated" else None
            opened_s = time.perf_counter() - start
            if thread is not None:
                thread.join()
            resident_s = time.perf_counter() - start
            figures = one_pass(pool) | {"open_ms": 1e3 * opened_s, "resident_ms": 1e3 * resident_s}
            found[way].append(figures)
            show(way, figures)
        found["again"].append(one_pass(pool))
        print(
            "again     " + "  ".join(f"{name} {value:9.2f}" for name, value in found["again"][-1].items()), flush=True
        )
        del pool
    print(json.dumps(found))


if __name__ == "__main__":
    main()
