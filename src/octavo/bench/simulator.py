"""Measures the simulator's speed: requests per second of one core, with fast-forward (runs of decode steps) or without.

Owns: the defaults of the workload and the fleet; the measurement; the check that fast-forward changes no outcome; the
report of `octavo bench simulator`. Does not: simulate, or judge the machine (`bare_us` times a plain Python loop).
"""

from __future__ import annotations

import itertools
import platform
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b

from rich.console import Console

from octavo.bench.report import Report, peak_memory_bytes, show_facts
from octavo.core.limits import Limits
from octavo.errors import ConfigError
from octavo.simulator.arrival import Arrival
from octavo.simulator.costs import Hardware, cost_model
from octavo.simulator.outcomes import SimulatedRun
from octavo.simulator.run import simulate
from octavo.simulator.setup import Setup
from octavo.simulator.workloads import Shaping, open_workload

MODEL, DEVICE, LENGTHS = "llama-3.1-8b", "h100", "azure_conv"
MAX_MODEL_LEN, MAX_BATCH_TOKENS, MAX_SEQUENCES = 16384, 2048, 256


@dataclass(frozen=True, slots=True)
class SimulatorSetting:
    """A measurement. `rate` is requests per second per replica; `check` requests are first simulated both ways."""

    requests: int = 20_000
    replicas: int = 64
    rate: float = 10.0
    router: str = "least_loaded"
    policy: str = "fcfs"
    depth: int = 1
    fast_forward: bool = True
    check: int = 0

    def arrivals(self, count: int) -> Iterator[Arrival]:
        """Return the first `count` requests of the workload."""
        spec = f"poisson:rate={self.rate * self.replicas},lengths={LENGTHS},requests={self.requests}"
        return itertools.islice(iter(open_workload(spec, Shaping(seed=1))), count)

    def setup(self) -> Setup:
        """Return the simulated fleet."""
        hardware = Hardware.of(MODEL, DEVICE)
        limits = Limits(
            hardware.block_size,
            (hardware.pool_blocks(MAX_BATCH_TOKENS),),
            MAX_MODEL_LEN,
            hardware.model.vocab_size,
            MAX_BATCH_TOKENS,
            MAX_SEQUENCES,
            policy=self.policy,
        )
        return Setup(
            limits,
            cost_model("roofline", hardware),
            depth=self.depth,
            replicas=self.replicas,
            router=self.router,
            fast_forward=self.fast_forward,
        )


def measure_simulator(setting: SimulatorSetting) -> Report:
    """Simulate once and return the report. Raises ConfigError if fast-forward changes an outcome.

    `bare_us` is the time of sum(range(1000)) before and after the simulation; a high value shows a busy machine.
    `outcome` is a digest of all outcomes.
    """
    setup = setting.setup()
    if setting.check:
        digests = {
            _digest(simulate(setting.arrivals(setting.check), replace(setup, fast_forward=is_fast)))
            for is_fast in (True, False)
        }
        if len(digests) > 1:
            raise ConfigError(f"{setting.check} requests have other outcomes with unchanged steps together: a bug")
    bare_us = _bare_us()
    start_s, start_cpu_s = time.monotonic(), time.process_time()
    run = simulate(setting.arrivals(setting.requests), setup)
    wall_s, cpu_s = time.monotonic() - start_s, time.process_time() - start_cpu_s
    count, replicas = len(run.outcomes), run.replicas
    steps = sum(one.steps for one in replicas)
    cost = {
        "requests": count,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "requests_per_cpu_s": count / cpu_s,
        "ms_per_request": cpu_s / count * 1e3,
        "simulated_s": run.duration,
        "steps": steps,
        "forwarded_share": sum(one.forwarded_steps for one in replicas) / steps,
        "rows_per_step": sum(one.output_tokens for one in replicas) / steps,
        "busy_share": sum(one.busy_s for one in replicas) / len(replicas) / run.duration,
        "preemptions": sum(one.preemptions for one in replicas),
        "mean_prompt": sum(run.outcomes.prompt_tokens) / count,
        "mean_output": sum(run.outcomes.output_tokens) / count,
        "peak_mib": peak_memory_bytes() / 2**20,
        "bare_us": (bare_us, _bare_us()),
        "checked": setting.check,
        "outcome": _digest(run),
    }
    return {"bench": "simulator", "python": platform.python_version(), "setting": asdict(setting), "cost": cost}


def show_simulator(console: Console, report: Report) -> None:
    """Print the report as a table."""
    setting, cost = report["setting"], report["cost"]
    facts = {
        "model, device": f"{MODEL}, {setting['replicas']} x {DEVICE}",
        "workload": f"lengths {LENGTHS}, {setting['rate']:g} requests/s each",
        "requests": cost["requests"],
        "wall seconds": cost["wall_s"],
        "CPU seconds": cost["cpu_s"],
        "requests a CPU second": cost["requests_per_cpu_s"],
        "CPU ms a request": cost["ms_per_request"],
        "simulated seconds": cost["simulated_s"],
        "steps": cost["steps"],
        "steps made together": f"{cost['forwarded_share']:.1%}",
        "rows a step": cost["rows_per_step"],
        "devices busy": f"{cost['busy_share']:.1%}",
        "prompt, output tokens": f"{cost['mean_prompt']:,.0f}, {cost['mean_output']:,.0f} on average",
        "peak memory": f"{cost['peak_mib']:,.0f} MiB",
        "adding up range(1000)": f"{cost['bare_us'][0]:.1f} us before, {cost['bare_us'][1]:.1f} us after",
    }
    if cost["checked"]:
        facts["both ways equal"] = f"{cost['checked']:,} requests"
    show_facts(console, "Simulator bench", facts)


def _digest(run: SimulatedRun) -> str:
    out, digest = run.outcomes, blake2b(digest_size=8)
    for column in (out.indices, out.starts, out.first_tokens, out.ends, out.cached, out.preemptions, out.replicas):
        digest.update(column.tobytes())
    return digest.hexdigest()


def _bare_us() -> float:
    times = []
    for _ in range(25):
        start = time.perf_counter()
        sum(range(1000))
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6
