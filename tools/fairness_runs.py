"""Repeat VTC's fairness runs (Sheng et al., OSDI 2024) in the simulator: same arrivals, fcfs and fair; draw them.

Owns: the runs' settings, the one number fitted, service over time (measured and simulated alike), the bound.
Does not: copy the data (../shared/data/vtc, from Ying1123/VTC-artifact, Apache-2.0).
Usage: python tools/fairness_runs.py

The runs are of Llama 2 7B on an A10G with a KV pool of 10,000 tokens and two clients. The roofline's steps are
stretched by one factor for each workload, so that the simulated FCFS run takes as long as the measured one: it is the
order of service that is compared, not the speed. Nothing of the VTC runs is fitted.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from octavo.core.limits import Limits
from octavo.core.policy.fair import Fair
from octavo.core.request import FinishReason
from octavo.simulator.charts import Chart, Line, draw_alone
from octavo.simulator.columns import Columns
from octavo.simulator.costs import Hardware, cost_model
from octavo.simulator.curves import service
from octavo.simulator.outcomes import Outcomes
from octavo.simulator.run import simulate
from octavo.simulator.setup import Setup
from octavo.simulator.workloads import Shaping, open_workload

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT.parent / "shared" / "data" / "vtc"
PICTURE = ROOT / "docs" / "img" / "fairness-vtc.svg"
WORKLOADS = {"overload": "Two clients, 1.5 and 3 requests/s", "poisson_short_long": "8 short and 1.5 long requests/s"}
POOL_TOKENS, BLOCK_SIZE, LONGEST_PROMPT = 10_000, 16, 256
GRID = 400


@dataclass(frozen=True)
class Gap:
    """Client 1's service minus client 0's over time, while both have waiting requests."""

    name: str
    times: np.ndarray
    gaps: np.ndarray
    duration: float

    @property
    def range(self) -> float:
        """Return the greatest change over any interval, which VTC's theorem bounds."""
        return float(self.gaps.max() - self.gaps.min())

    @property
    def end(self) -> float:
        """Return the last difference."""
        return float(self.gaps[-1])


def bound() -> float:
    """VTC's bound (theorem 4.4): 2 max(w_p longest prompt, w_q tokens of a batch), a full pool of outputs."""
    return 2 * max(Fair.prompt_weight * LONGEST_PROMPT, Fair.output_weight * POOL_TOKENS)


def measured(name: str) -> Columns:
    """Return a measured run's times."""
    outcomes = Outcomes()
    with gzip.open(DATA / f"{name}.csv.gz", "rt") as file:
        for index, row in enumerate(csv.DictReader(file)):
            came = float(row["req_time"])
            first = came + float(row["first_token_latency"])
            outcomes.indices.append(index)
            outcomes.arrivals.append(came)
            outcomes.starts.append(first)
            outcomes.first_tokens.append(first)
            outcomes.ends.append(came + float(row["request_latency"]))
            outcomes.prompt_tokens.append(int(row["prompt_len"]))
            outcomes.output_tokens.append(int(row["output_len"]))
            outcomes.longest.append(int(row["output_len"]))
            outcomes.tenants.append(outcomes.tenant(f"client{row['client']}"))
            outcomes.reasons.append(FinishReason.LENGTH)
    return _by_client(outcomes)


def simulated(workload: str, policy: str, factor: float, until: float = math.inf) -> Columns:
    """Simulate the measured FCFS run's arrivals up to the time `until`."""
    hardware = Hardware.of("llama-2-7b", "a10g", block_size=BLOCK_SIZE)
    limits = Limits(
        block_size=BLOCK_SIZE, num_blocks=(POOL_TOKENS // BLOCK_SIZE,), max_model_len=hardware.model.max_model_len,
        vocab_size=hardware.model.vocab_size, max_batch_tokens=2048, max_sequences=256, policy=policy,
    )  # fmt: skip
    costs = cost_model(f"roofline*{factor!r}", hardware)
    arrivals = open_workload(f"clients:{DATA / f'FCFS__{workload}.csv.gz'}", Shaping(end=until))
    return _by_client(simulate(arrivals, Setup(limits, costs)).outcomes)


def fitted_factor(workload: str) -> float:
    """Return the factor on step times with which the simulated FCFS run ends at the measured run's end."""
    goal, factor = float(measured(f"FCFS__{workload}").ends.max()), 1.0
    for _ in range(2):
        factor *= goal / float(simulated(workload, "fcfs", factor).ends.max())
    return factor


def gap(name: str, columns: Columns, until: float) -> Gap:
    """Reduce a run to the two clients' difference."""
    times = np.linspace(0, until, GRID)
    one, zero = (service(columns, client, times) for client in (1, 0))
    return Gap(name, times, one - zero, float(columns.ends.max()))


def compare(workload: str) -> tuple[list[Gap], float]:
    """Measured and simulated, fcfs and fair, up to the end of the shorter run's arrivals; and the factor."""
    factor = fitted_factor(workload)
    runs = {
        "FCFS measured": measured(f"FCFS__{workload}"),
        "fcfs simulated": simulated(workload, "fcfs", factor),
        "VTC measured": measured(f"VTC__{workload}"),
        "fair simulated": simulated(workload, "fair", factor),
    }
    until = min(float(columns.arrivals.max()) for columns in runs.values())
    return [gap(name, columns, until) for name, columns in runs.items()], factor


def draw(runs: dict[str, list[Gap]]) -> str:
    """Two charts for each workload: to scale, and what is within the bound."""
    charts = []
    for workload, gaps in runs.items():
        lines = [
            Line(one.name, [(float(t), abs(float(v))) for t, v in zip(one.times, one.gaps, strict=True)], place)
            for place, one in enumerate(gaps)
        ]
        until = float(gaps[0].times[-1])
        limit = Line("bound", [(0.0, bound()), (until, bound())], 7, is_dashed=True)
        charts.append(Chart(WORKLOADS[workload], "time, s", "difference in service", [*lines, limit]))
        near = [lines[2], lines[3], limit]
        charts.append(Chart(f"{WORKLOADS[workload]}: VTC and fair", "time, s", "difference in service", near))
    return draw_alone(charts)


def _by_client(outcomes: Outcomes) -> Columns:
    """Columns whose tenants are 0 and 1 as the clients are."""
    columns = Columns.of(outcomes)
    number = np.array([int(name.removeprefix("client")) for name in outcomes.tenant_names])
    columns.tenants[:] = number[columns.tenants]
    return columns


def main() -> int:
    """Print a table for each workload, and write the picture."""
    if not DATA.exists():
        print(f"no {DATA}: nothing to compare with", file=sys.stderr)
        return 2
    runs: dict[str, list[Gap]] = {}
    results = {}
    for workload in WORKLOADS:
        gaps, factor = compare(workload)
        runs[workload] = gaps
        print(
            f"\n{WORKLOADS[workload]} (steps x {factor:.3f}), first {gaps[0].times[-1]:.0f} s, bound {bound():,.0f}\n"
        )
        print("| run | difference at the end | greatest over any stretch | whole run, s |\n|---|---|---|---|")
        for one in gaps:
            print(f"| {one.name} | {one.end:,.0f} | {one.range:,.0f} | {one.duration:,.0f} |")
        results[workload] = {one.name: {"end": one.end, "range": one.range, "duration": one.duration} for one in gaps}
    PICTURE.write_text(draw(runs), encoding="utf-8")
    print(json.dumps({"bound": bound(), **results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
