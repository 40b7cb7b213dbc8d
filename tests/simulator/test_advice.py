"""Advice: each line where it holds, and not where it does not."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from octavo.core.limits import Limits
from octavo.simulator.advice import advise, advise_comparison
from octavo.simulator.columns import Facts
from octavo.simulator.costs import Hardware, cost_model
from octavo.simulator.run import simulate
from octavo.simulator.setup import Setup
from octavo.simulator.summary import summarise
from octavo.simulator.workloads import Shaping, open_workload

SILENT: Facts = {
    "requests": {"came": 5000, "served": 5000, "refused": 0},
    "replicas": {
        "count": 2, "busy_share": 0.7, "busy_share_least": 0.68, "busy_share_most": 0.72, "tokens_per_step": 400.0,
        "num_blocks": 1000, "kv_use_most": 0.5,
    },
    "tenants": {"count": 3},
    "cache": {"requests_with_keys": 5000},
    "limits": {
        "time": {}, "waiting": {"sequence_cap": 4.0, "token_budget": 2.0}, "compute": 0.4, "max_sequences": 64,
        "max_batch_tokens": 2048, "sequences_per_step": 20.0, "at_max_sequences": 0.1, "at_max_batch_tokens": 0.1,
    },
    "tpot": {"p50": 0.02, "p95": 0.03, "p99": 0.04},
    "ttft": {"p99": 2.0},
}  # fmt: skip


def told(
    policy: str = "fcfs", router: str = "round_robin", bounds: dict[str, float] | None = None, **changes: Any
) -> str:
    """Return the advice for a run that gives none, with some figures changed: replicas_count=1."""
    facts = copy.deepcopy(SILENT)
    for name, value in changes.items():
        part, _, figure = name.partition("_")
        assert figure in facts[part]
        facts[part][figure] = value
    return "\n".join(advise(facts, policy, router, bounds))


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
@pytest.mark.parametrize("router", ["round_robin", "prefix_affinity", "prefix_hash"])
def test_a_run_without_fault_gets_no_advice(policy: str, router: str) -> None:
    assert told(policy, router) == ""


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("all requests are of one", {"policy": "fair", "tenants_count": 1}),
        ("no request has keys of its prefix", {"router": "prefix_hash", "cache_requests_with_keys": 0}),
        ("there is one: give --replicas N", {"router": "least_loaded", "replicas_count": 1}),
        ("p99 rests on the slowest 4 of 499 requests: simulate 500", {"requests_served": 499}),
        ("p99 rests on the slowest of 60 requests", {"requests_served": 60}),
        ("idle 90% of the time, so settings hardly matter: try --rate-scale 7", {"replicas_busy_share": 0.1}),
        ("busy 3% of the time and another 72%", {"replicas_busy_share_least": 0.03}),
        ("with 31% of its slots and 7% of its compute", {"replicas_busy_share": 0.95, "limits_compute": 0.07}),
        (
            "busy is not full: the device is busy 95% of the time with 5% of its slots; more",
            {"replicas_busy_share": 0.95, "limits_compute": None, "limits_sequences_per_step": 3.0,
             "replicas_tokens_per_step": 30.0},
        ),
        ("max_sequences is 64: 30% of the steps reach it", {"limits_at_max_sequences": 0.3}),
        ("at most 50% of the KV pool is held: try --max-num-seqs 112", {"limits_at_max_sequences": 0.3}),
        ("max_batch_tokens is 2,048: 40% of the steps reach it", {"limits_at_max_batch_tokens": 0.4}),
        ("uses 40% of its compute: try --max-num-batched-tokens 4096", {"limits_at_max_batch_tokens": 0.4}),
        ("try --max-num-seqs", {"limits_at_max_sequences": 0.3, "bounds": {"tpot": 0.05, "ttft_p99": 0.1}}),
    ],
)  # fmt: skip
def test_a_fault_gets_one_line_with_its_numbers(words: str, changes: dict[str, Any]) -> None:
    assert words in told(**changes) and "\n" not in told(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"tenants_count": 1},
        {"cache_requests_with_keys": 0, "router": "least_loaded"},
        {"replicas_count": 1},
        {"requests_served": 500},
        {"replicas_busy_share": 0.0},
        {"replicas_busy_share": 0.95, "limits_compute": 0.07, "replicas_kv_use_most": 0.9},
        {"replicas_busy_share": 0.95, "limits_compute": 0.3},
        {"replicas_busy_share": 0.95, "limits_compute": 0.07, "limits_sequences_per_step": 60.0},
        {"limits_at_max_sequences": 0.3, "limits_waiting": {"kv_blocks": 3.0}},
        {"limits_at_max_sequences": 0.3, "replicas_kv_use_most": 0.9},
        {"limits_at_max_sequences": 0.3, "bounds": {"tpot": 0.041}},
        {"limits_at_max_sequences": 0.3, "bounds": {"tpot_p95": 0.029}},
        {"limits_at_max_batch_tokens": 0.4, "limits_compute": 0.95},
        {"limits_at_max_batch_tokens": 0.4, "limits_waiting": {}},
        {"limits_max_sequences": 0, "replicas_busy_share": 0.95, "limits_compute": None},
    ],
)
def test_what_looks_like_a_fault_and_is_none_gets_no_line(changes: dict[str, Any]) -> None:
    assert told(**changes) == ""


def test_runs_with_the_same_figures_are_named() -> None:
    other = copy.deepcopy(SILENT) | {"tenants": {"count": 9}}
    [line] = advise_comparison({"fcfs": SILENT, "lifo": other, "fair": copy.deepcopy(SILENT)})
    assert line.startswith("fcfs and fair have the same figures")
    assert advise_comparison({"fcfs": SILENT, "lifo": other}) == []


def test_the_settings_that_are_advised_help() -> None:
    """A simulation held back by max_sequences is told so, and with the advised number it serves sooner."""
    hardware = Hardware.of("llama-3.1-8b", "h100")
    arrivals = list(open_workload("poisson:rate=20,prompt=300,output=100,requests=600", Shaping(seed=1)))

    def run(max_sequences: int) -> Facts:
        limits = Limits(16, (20_000,), 4096, 1000, 8192, max_sequences)
        return summarise(simulate(arrivals, Setup(limits, cost_model("roofline", hardware), sample_s=1.0)))

    few = run(8)
    [line] = advise(few, "fcfs", "round_robin")
    assert line.startswith("max_sequences is 8: ") and line.endswith("try --max-num-seqs 32")
    more = run(32)
    assert more["ttft"]["p99"] < few["ttft"]["p99"] / 2
    assert not any("max_sequences" in line for line in advise(more, "fcfs", "round_robin"))
    assert sum(few["limits"]["time"].values()) == pytest.approx(few["replicas"]["busy_share"], rel=0.05)
    assert set(few["limits"]["waiting"]) == {"sequence_cap"} and few["limits"]["compute"] < 0.2
