"""The cost of a simulation: requests simulated in a second of one core, with unchanged decode steps together or not.

Owns: the workload's and fleet's defaults, the measurement, and the check that both ways give the same outcome.
Does not: simulate (simulator), or judge the machine: `bare_us` is a loop of plain Python timed beside it.
"""

from __future__ import annotations

import itertools
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b

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
    """`rate` requests a second arrive for each of `replicas`; `check` requests are simulated both ways first."""

    requests: int = 20_000
    replicas: int = 64
    rate: float = 10.0
    router: str = "least_loaded"
    policy: str = "fcfs"
    depth: int = 1
    fast_forward: bool = True
    check: int = 0


@dataclass(frozen=True, slots=True)
class SimulatorCost:
    """The measured cost. `bare_us`: a sum over range(1000) before and after, which shows how busy the machine is."""

    requests: int
    wall_s: float
    cpu_s: float
    requests_per_cpu_s: float
    ms_per_request: float
    simulated_s: float
    steps: int
    forwarded_share: float
    rows_per_step: float
    busy_share: float
    preemptions: int
    mean_prompt: float
    mean_output: float
    peak_mib: float
    bare_us: tuple[float, float]
    checked: int
    outcome: str  # a digest of all outcomes

    def as_dict(self) -> dict[str, object]:
        """Return plain values, for JSON."""
        return asdict(self)


def measure_simulator(setting: SimulatorSetting) -> SimulatorCost:
    """Simulate once. Raises ConfigError when the two ways differ."""
    setup = _setup(setting)
    if setting.check:
        ways = [
            simulate(_arrivals(setting, setting.check), replace(setup, fast_forward=fast)) for fast in (True, False)
        ]
        if _digest(ways[0]) != _digest(ways[1]):
            raise ConfigError(f"{setting.check} requests come out differently with unchanged steps together: a bug")
    bare = _bare_us()
    wall, cpu = time.monotonic(), time.process_time()
    run = simulate(_arrivals(setting, setting.requests), setup)
    wall_s, cpu_s = time.monotonic() - wall, time.process_time() - cpu
    count, replicas = len(run.outcomes), run.replicas
    steps = sum(one.steps for one in replicas)
    return SimulatorCost(
        requests=count,
        wall_s=wall_s,
        cpu_s=cpu_s,
        requests_per_cpu_s=count / cpu_s,
        ms_per_request=cpu_s / count * 1e3,
        simulated_s=run.duration,
        steps=steps,
        forwarded_share=sum(one.forwarded_steps for one in replicas) / steps,
        rows_per_step=sum(one.output_tokens for one in replicas) / steps,
        busy_share=sum(one.busy_s for one in replicas) / len(replicas) / run.duration,
        preemptions=sum(one.preemptions for one in replicas),
        mean_prompt=sum(run.outcomes.prompt_tokens) / count,
        mean_output=sum(run.outcomes.output_tokens) / count,
        peak_mib=_peak_mib(),
        bare_us=(bare, _bare_us()),
        checked=setting.check,
        outcome=_digest(run),
    )


def _arrivals(setting: SimulatorSetting, count: int) -> Iterator[Arrival]:
    words = f"poisson:rate={setting.rate * setting.replicas},lengths={LENGTHS},requests={setting.requests}"
    return itertools.islice(iter(open_workload(words, Shaping(seed=1))), count)


def _setup(setting: SimulatorSetting) -> Setup:
    hardware = Hardware.of(MODEL, DEVICE)
    limits = Limits(
        hardware.block_size,
        (hardware.pool_blocks(MAX_BATCH_TOKENS),),
        MAX_MODEL_LEN,
        hardware.model.vocab_size,
        MAX_BATCH_TOKENS,
        MAX_SEQUENCES,
        policy=setting.policy,
    )
    return Setup(
        limits,
        cost_model("roofline", hardware),
        depth=setting.depth,
        replicas=setting.replicas,
        router=setting.router,
        fast_forward=setting.fast_forward,
    )


def _digest(run: SimulatedRun) -> str:
    out, digest = run.outcomes, blake2b(digest_size=8)
    for column in (out.indices, out.starts, out.first_tokens, out.ends, out.cached, out.preemptions, out.replicas):
        digest.update(column.tobytes())
    return digest.hexdigest()


def _bare_us() -> float:
    times = []
    for _ in range(25):
        begun = time.perf_counter()
        sum(range(1000))
        times.append(time.perf_counter() - begun)
    return sorted(times)[12] * 1e6


def _peak_mib() -> float:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
