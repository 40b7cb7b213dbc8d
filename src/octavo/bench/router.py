"""Measures a fleet's router: a choice among replicas, and with it the hashing of the prompt's blocks.

Owns: the requests (half of each prompt is one of NUM_SHARED prefixes; each replica has about NUM_OPEN of them), and the
report of `octavo bench router`. Does not: start replicas. Times are of the processor, so other programs do not count.
The floors are what a choice and hashing cannot do without: one dictionary of the prompt's keys, one digest of its ids.
"""

from __future__ import annotations

import platform
import random
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

from rich.console import Console

from octavo.bench.report import Report, percentile, show_facts, show_rows
from octavo.core.kv.prefix import prompt_keys
from octavo.core.request import Request
from octavo.fleet.routing import MAX_KEYS, RoutedPrompt, create_router
from octavo.fleet.routing_log import LoggedTarget

BLOCK_SIZE, VOCAB_SIZE, NUM_SHARED, NUM_OPEN = 16, 32_000, 50, 8
TARGET_US = {"choose": 1000.0, "hash and choose": 1500.0}  # p99 of prompts of 8,192 tokens over 64 replicas
POINTS = (50, 99, 99.9, 100)


@dataclass(frozen=True, slots=True)
class RouterSetting:
    """A measurement."""

    router: str = "prefix_affinity"
    replicas: int = 64
    tokens: int = 8192
    requests: int = 3000


def _requests(setting: RouterSetting) -> Iterator[Request]:
    rng = random.Random(0)
    size = setting.tokens // 2
    shared = [array("i", rng.choices(range(VOCAB_SIZE), k=size)) for _ in range(NUM_SHARED)]
    for number in range(setting.requests):
        own = array("i", rng.choices(range(VOCAB_SIZE), k=setting.tokens - size))
        yield Request(f"r{number}", rng.choice(shared) + own)


def measure_router(setting: RouterSetting) -> Report:
    """Route requests that arrive and end at random; return the report, with times in microseconds."""
    router, rng = create_router(setting.router, 0), random.Random(1)
    targets = [LoggedTarget(number, 0, 0) for number in range(setting.replicas)]
    placed: list[LoggedTarget] = []
    times: dict[str, list[float]] = {name: [] for name in ("choose", "hash and choose", "floor", "hash floor")}
    for request in _requests(setting):
        marks = [time.thread_time()]
        keys = prompt_keys(request, BLOCK_SIZE)
        marks.append(time.thread_time())
        chosen = targets[router.choose(RoutedPrompt(keys, setting.tokens), targets).number]
        marks.append(time.thread_time())
        dict.fromkeys(keys, 0)
        marks.append(time.thread_time())
        blake2b(request.prompt_token_ids or b"", digest_size=16)
        marks.append(time.thread_time())
        for name, start, end in (("choose", 1, 2), ("hash and choose", 0, 2), ("floor", 2, 3), ("hash floor", 3, 4)):
            times[name].append((marks[end] - marks[start]) * 1e6)
        placed.append(chosen)
        ended = placed.pop(rng.randrange(len(placed))) if len(placed) > NUM_OPEN * setting.replicas else None
        for target, count in ((chosen, 1), (ended, -1)):
            if target is not None:
                target.num_open += count
                target.load += count * setting.tokens
    costs = {name: {f"p{point:g}": percentile(values, point) for point in POINTS} for name, values in times.items()}
    facts = {"router": setting.router, "replicas": setting.replicas, "tokens": setting.tokens}
    return {
        "bench": "router", "python": platform.python_version(), **facts, "requests": setting.requests,
        "block_size": BLOCK_SIZE, "max_keys": MAX_KEYS, "target_us": TARGET_US, "us": costs,
    }  # fmt: skip


def show_router(console: Console, report: Report) -> None:
    """Print the report as tables."""
    names = ("router", "replicas", "tokens", "requests")
    show_facts(console, "Router bench", {name: report[name] for name in names})
    rows = [
        (name, *(round(value, 1) for value in costs.values()), report["target_us"].get(name, ""))
        for name, costs in report["us"].items()
    ]
    show_rows(console, "Microseconds of the processor", ("", *(f"p{point:g}" for point in POINTS), "target p99"), rows)
