"""Time what-if simulations of a recording of an hour: record a virtual hour, fit it, simulate it with other settings.

Owns: the virtual server that is recorded, and the times of the commands. Does not: simulate (octavo simulate, octavo
replay). Usage: python -m tools.what_if_speed [--hours 1] [--rate 4] [--keep DIR] [--commands fit,one]
The last line is one JSON object: CPU seconds of each command. The server is the core's scheduler on a virtual clock: an
H100's predicted step times, 10 % shorter or longer at random; requests with token ids, a third of which share a prefix
of 1,000 tokens with others of their tenant.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

from octavo.core.limits import Limits
from octavo.core.plan import ROW_SAMPLE, StepResult
from octavo.core.request import Request, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.observe.recording.format import Header
from octavo.observe.recording.recorder import MAX_QUEUED, Recorder
from octavo.simulator.arrival import Arrival
from octavo.simulator.cost_model import shape_of
from octavo.simulator.costs import Hardware, cost_model
from octavo.simulator.workloads import Shaping, open_workload

MODEL, DEVICE, VOCABULARY = "llama-3.1-8b", "h100", 128_256
LIMITS = Limits(16, (27_930,), 16_384, VOCABULARY, 2_048, 256)
PREFIX, TENANTS = 1_000, 8
CHANGES = ("policy=fair", "max_sequences=64", "max_batch_tokens=1024")


def main() -> None:
    """Record, time the commands, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second [4]")
    parser.add_argument("--keep", metavar="DIR", help="record to DIR, or use the recording that is there")
    parser.add_argument("--commands", default="fit,one,three,replay,fair,changes", help="which to time [all]")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder, fit = Path(args.keep or f"{scratch}/hour"), f"{scratch}/fit.json"
        if not folder.exists():
            record(folder, args.hours * 3600, args.rate)
        one = [
            "simulate", "-w", f"recording:{folder}", "--cost", f"fitted:{fit}", "--model", MODEL, "--device", DEVICE,
            "--max-num-batched-tokens", str(LIMITS.max_batch_tokens),
        ]  # fmt: skip
        commands = {
            "fit": ["simulate", "--fit", str(folder), "--json", fit],
            "one": one,
            "three": [*one, "--policy", "fcfs,fair,shortest_prefill"],
            "replay": ["replay", str(folder)],
            "fair": ["replay", str(folder), "--what-if", "policy=fair"],
            "changes": ["replay", str(folder), *[word for change in CHANGES for word in ("--what-if", change)]],
        }
        seconds = {name: timed(commands[name]) for name in args.commands.split(",")}
        size = sum(path.stat().st_size for path in folder.iterdir())
    print(json.dumps({"hours": args.hours, "rate": args.rate, "bytes": size, "cpu_s": seconds}))


def timed(words: list[str]) -> float:
    """Run an octavo command; return its CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begun = time.monotonic()
    subprocess.run([sys.executable, "-m", "octavo", *words], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    print(f"{spent:8.1f} CPU s, {time.monotonic() - begun:8.1f} s: octavo {' '.join(words)}", flush=True)
    return round(spent, 2)


def record(folder: Path, duration_s: float, rate: float) -> None:
    """Serve requests on a virtual clock, recorded as a server records them."""
    now = 0.0
    folder.mkdir(parents=True)
    recorder = Recorder(folder, 1 << 33, Header(MODEL, LIMITS, 1, device=DEVICE), lambda: now)
    scheduler = Scheduler(LIMITS, recorder)
    costs, rng = cost_model("roofline", Hardware.of(MODEL, DEVICE)), random.Random(1)
    spec = f"poisson:rate={rate},lengths=azure_conv,duration={duration_s}"
    coming = list(open_workload(spec, Shaping(seed=1)))[::-1]
    num_requests, num_steps = len(coming), 0
    while coming or scheduler.has_work:
        while coming and coming[-1].time <= now:
            scheduler.admit(_request(len(coming), coming.pop(), rng), now)
        plan = scheduler.plan(now)
        if plan.is_empty:
            now = max(now, coming[-1].time) if coming else now
            continue
        shape = shape_of(plan)
        count = sum(flag & ROW_SAMPLE for flag in plan.flags)
        result = StepResult(array("i", [rng.randrange(1_000, VOCABULARY) for _ in range(count)]))
        now += costs.step_s(shape) * rng.uniform(0.9, 1.1)
        scheduler.commit(plan, result, now)
        now += costs.host_s(shape) * rng.uniform(0.9, 1.1)
        num_steps += 1
        while recorder.status()["queued"] > MAX_QUEUED // 2:  # type: ignore[operator]
            time.sleep(0.01)
    recorder.close()
    print(f"recorded {num_requests:,} requests in {num_steps:,} steps, {now:,.0f} s", flush=True)


def _request(number: int, arrival: Arrival, rng: random.Random) -> Request:
    tenant = rng.randrange(TENANTS)
    shared = [1_000 + tenant] * PREFIX if rng.random() < 1 / 3 else []
    ids = array("i", [*shared, *(rng.randrange(1_000, VOCABULARY) for _ in range(arrival.prompt_tokens))])
    params: dict[str, Any] = {"max_tokens": arrival.output_tokens, "ignore_eos": True, "seed": number}
    return Request(
        f"r{number}", ids[: LIMITS.max_model_len - arrival.output_tokens], SamplingParams(**params), arrival.time,
        eos_token_ids=(2,), tenant=f"tenant{tenant}",
    )  # fmt: skip


if __name__ == "__main__":
    main()
