"""Compare the built-in policies on Azure's and Mooncake's public traces: tables and pictures for docs/policies.md.

Owns: the settings of both comparisons. Does not: copy the data (../shared/data). Usage: python tools/policies.py [NAME]

What is scaled and chosen is in CASES and is printed: nothing of the traces is clipped. They name no tenant, no priority
and no objective, so each request is given one of eight tenants (Zipf's law with exponent 1.2), and one in four is
urgent: priority 0 and a first token due in 1 s, where the others have 5 and 10 s. All is drawn from a seed.
"""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from octavo.core.limits import Limits
from octavo.core.policy import POLICIES
from octavo.simulator.arrival import Arrival
from octavo.simulator.charts import Chart, Line, draw_alone
from octavo.simulator.columns import Facts
from octavo.simulator.costs import Hardware, cost_model
from octavo.simulator.outcomes import Outcomes
from octavo.simulator.report import Case, seconds
from octavo.simulator.run import simulate
from octavo.simulator.setup import Setup
from octavo.simulator.summary import summarise
from octavo.simulator.workloads import Shaping, open_workload

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT.parent / "shared" / "data"
PICTURES = ROOT / "docs" / "img"
OBJECTIVES = {"ttft": 1.0, "tpot": 0.1}
URGENT_SHARE = 0.25
SHOWN = ("fcfs", "prefill_first", "fair", "deadline", "shortest_prefill", "prefix_affinity")  # lines of a chart


@dataclass(frozen=True)
class Comparison:
    """A trace and what serves it."""

    title: str
    kind: str
    file: str
    device: str
    rate_scale: float
    end: float
    max_sequences: int

    def describe(self) -> str:
        """Return a description of the settings."""
        return (
            f"{self.title}: the first {self.end:.0f} s at {self.rate_scale:g} times the rate, "
            f"Llama 3.1 8B on one {self.device}, {self.max_sequences} sequences at once, roofline"
        )


CASES = {
    "azure": Comparison(
        "Azure conversations", "azure", "azure2023/AzureLLMInferenceTrace_conv.csv.gz", "h100", 5.0, 900.0, 512
    ),
    "mooncake": Comparison(
        "Mooncake conversations", "mooncake", "mooncake/conversation_trace.jsonl.gz", "h200", 0.4, 900.0, 256
    ),
}


def arrivals_of(case: Comparison) -> list[Arrival]:
    """The trace's requests with tenants and priorities."""
    shaping = Shaping(rate_scale=case.rate_scale, end=case.end)
    rng = random.Random(0)
    workload = open_workload(f"{case.kind}:{DATA / case.file},tenants=8,zipf=1.2", shaping)
    return [
        replace(one, priority=0, ttft_objective=1.0)
        if rng.random() < URGENT_SHARE
        else replace(one, priority=5, ttft_objective=10.0)
        for one in workload
    ]


def limits_of(case: Comparison, policy: str) -> tuple[Limits, Hardware]:
    """Return a server's default limits on the device."""
    hardware = Hardware.of("llama-3.1-8b", case.device)
    limits = Limits(
        block_size=16, num_blocks=(hardware.pool_blocks(8192),), max_model_len=hardware.model.max_model_len,
        vocab_size=hardware.model.vocab_size, max_batch_tokens=8192, max_sequences=case.max_sequences, policy=policy,
    )  # fmt: skip
    return limits, hardware


def compare(case: Comparison, policies: tuple[str, ...] = tuple(POLICIES)) -> list[Case]:
    """One simulation for each policy."""
    arrivals = arrivals_of(case)
    cases = []
    for policy in policies:
        begun = time.monotonic()
        limits, hardware = limits_of(case, policy)
        run = simulate(arrivals, Setup(limits, cost_model("roofline", hardware), sample_s=1.0))
        facts = summarise(run, OBJECTIVES, hardware.device.price)
        facts["urgent"] = _urgent(run.outcomes, arrivals)
        cases.append(Case.of(policy, run, facts))
        print(f"{policy}: {time.monotonic() - begun:.0f} s", file=sys.stderr)
    return cases


def _urgent(outcomes: Outcomes, arrivals: list[Arrival]) -> Facts:
    """Mean time to the first token of the urgent, and of the others."""
    urgent = np.array([arrivals[index].priority == 0 for index in outcomes.indices])
    waited = np.asarray(outcomes.first_tokens) - np.asarray(outcomes.arrivals)
    return {"ttft_urgent": float(waited[urgent].mean()), "ttft_others": float(waited[~urgent].mean())}


def table(cases: list[Case]) -> str:
    """A row for each policy."""
    heads = (
        "policy", "ttft mean", "ttft p50", "ttft p99", "ttft urgent", "tpot mean", "tpot p99", "e2e mean", "e2e p99",
        "good", "cache hits", "preemptions",
    )  # fmt: skip
    rows = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for case in cases:
        facts = case.facts
        cells = [
            f"`{case.label}`", *(seconds(facts["ttft"][point]) for point in ("mean", "p50", "p99")),
            seconds(facts["urgent"]["ttft_urgent"]), *(seconds(facts["tpot"][point]) for point in ("mean", "p99")),
            *(seconds(facts["e2e"][point]) for point in ("mean", "p99")), f"{100 * facts['goodput']['share']:.1f} %",
            f"{100 * facts['cache']['hit_rate']:.1f} %", f"{facts['preemptions']['count']:,}",
        ]  # fmt: skip
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def tenants_table(cases: list[Case]) -> str:
    """Mean time to the first token of the tenant that asks most, and of the one that asks least."""
    rows = ["| policy | busiest tenant's ttft | quietest tenant's ttft |", "|---|---|---|"]
    for case in cases:
        named = list(case.facts["tenants"]["by_name"].values())
        rows.append(f"| `{case.label}` | {seconds(named[0]['ttft_mean'])} | {seconds(named[-1]['ttft_mean'])} |")
    return "\n".join(rows)


def draw(case: Comparison, cases: list[Case]) -> str:
    """Distributions, and the queue over time."""
    shown = [one for one in cases if one.label in SHOWN]

    def lines(curve: str) -> list[Line]:
        return [Line(one.label, one.curves[curve], place) for place, one in enumerate(shown)]

    return draw_alone([
        Chart(f"{case.title}: time to first token, s", "", "% of requests", lines("cdf ttft"), is_log=True, top=100.0),
        Chart(f"{case.title}: time per token, s", "", "% of requests", lines("cdf tpot"), is_log=True, top=100.0),
        Chart("Requests that wait for their first step, by time in s", "", "requests", lines("waiting")),
        Chart("KV pool held, by time in s", "", "%", lines("memory")),
    ])  # fmt: skip


def main(names: list[str]) -> int:
    """Print the tables, write the pictures."""
    results: dict[str, object] = {}
    for name in names or list(CASES):
        case = CASES[name]
        if not (DATA / case.file).exists():
            print(f"no {DATA / case.file}: nothing to replay", file=sys.stderr)
            return 2
        cases = compare(case)
        count = cases[0].facts["requests"]["came"]
        print(f"\n{case.describe()}, {count:,} requests\n\n{table(cases)}\n\n{tenants_table(cases)}\n")
        (PICTURES / f"policies-{name}.svg").write_text(draw(case, cases), encoding="utf-8")
        results[name] = {one.label: {key: one.facts[key]["mean"] for key in ("ttft", "tpot", "e2e")} for one in cases}
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
