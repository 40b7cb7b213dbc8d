"""The report of an offline bench: one flat JSON object, and its tables.

Owns: the names of the numbers, the choice of the median run. Does not: measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from octavo.bench.engine_facts import engine_facts, floor_facts, headline, memory_facts
from octavo.bench.floor import StepFloor
from octavo.bench.offline import RunRecord
from octavo.bench.steps import StepCounts
from octavo.bench.table import show_facts, show_rows
from octavo.bench.workload import BenchWorkload
from octavo.config import Config
from octavo.executors.protocol import Capacity

_BY_ROWS = ("rows up to", "steps", "step ms", "host ms", "host share", "floor ms", "floor reached")


@dataclass(frozen=True, slots=True)
class Measured:
    """All measurements: passes with the counts of their steps, and the process's own numbers."""

    model: str
    config: Config
    capacity: Capacity
    workload: BenchWorkload
    concurrency: int
    floor: StepFloor
    runs: Sequence[tuple[RunRecord, StepCounts]]
    startup_s: float
    peak_memory_bytes: int


def make_report(measured: Measured) -> dict[str, Any]:
    """Return the numbers of the median run (by throughput), with the engine and workload."""
    by_speed = sorted(measured.runs, key=lambda run: run[0].output_tokens_per_s)
    record, counts = by_speed[len(by_speed) // 2]
    floor_s, step_s = counts.floor_s(measured.floor), record.step_s.get("step", 0.0)
    workload = measured.workload
    return {
        "bench": "offline",
        **engine_facts(measured.model, measured.config, measured.capacity),
        "workload": workload.name,
        "requests": workload.num_requests,
        "concurrency": measured.concurrency,
        "prompt_tokens": workload.num_prompt_tokens,
        "output_tokens": workload.num_output_tokens,
        **record.as_dict(),
        "floor_ms_per_step": round(floor_s / max(1, record.num_steps) * 1e3, 4),
        "floor_fraction": round(floor_s / step_s, 4) if step_s else 0.0,
        **floor_facts(measured.floor),
        "decode_steps": counts.by_rows(measured.floor),
        **memory_facts(measured.capacity),
        "peak_memory_bytes": measured.peak_memory_bytes,
        "startup_s": round(measured.startup_s, 3),
        "runs_output_tokens_per_s": [round(run[0].output_tokens_per_s, 2) for run in measured.runs],
    }


def show_report(console: Console, report: dict[str, Any]) -> None:
    """Print the report as tables."""
    runs = report["runs_output_tokens_per_s"]
    facts = {
        "model": headline(report),
        "workload": f"{report['workload']}: {report['requests']} requests, {report['prompt_tokens']:,} prompt and "
        f"{report['output_tokens']:,} output tokens, {report['concurrency']} at a time",
        "output tokens/s": f"{report['output_tokens_per_s']:,.1f}"
        + (f"  (median of {', '.join(f'{speed:,.1f}' for speed in runs)})" if len(runs) > 1 else ""),
        "all tokens/s": f"{report['total_tokens_per_s']:,.1f}",
        "prefix hits": f"{report['prefix_hit_tokens']:,} tokens",
        "preemptions": report["preemptions"],
        "tokens a step": f"{report['output_tokens_per_step']:.2f}",
        "drafts accepted": f"{report['accepted_tokens']:,} of {report['drafted_tokens']:,}",
        "start-up": f"{report['startup_s']:.2f} s",
        "peak memory": f"{report['peak_memory_bytes'] / 2**30:.2f} GiB ({report['weight_bytes'] / 2**30:.2f} weights)",
    }
    show_facts(console, "Offline bench", facts)
    console.print()
    spreads = {"first token": "ttft_ms", "between tokens": "inter_token_ms", "whole request": "e2e_ms"}
    rows = [(name, *report[key].values()) for name, key in spreads.items()]
    show_rows(console, "Latency, ms", ("", *report["ttft_ms"]), rows)
    console.print()
    show_steps(console, report)


def show_steps(console: Console, report: dict[str, Any]) -> None:
    """Print the parts of a step's time, and the steps that only decode, by rows."""
    times, shares = report["step_ms"], report["step_share"]
    rows = [(part, times[part], f"{share:.1%}") for part, share in shares.items()]
    rows.append((f"whole step, mean of {report['steps']}", times["total"], "100.0%"))
    rows.append(("memory floor", report["floor_ms_per_step"], f"{report['floor_fraction']:.1%}"))
    show_rows(console, "Step, ms", ("", "mean", "share"), rows)
    if report["decode_steps"]:
        console.print()
        show_rows(console, "Steps that only decode", _BY_ROWS, [_decode_row(step) for step in report["decode_steps"]])
    bandwidth, rate = report["bandwidth_gb_per_s"], report["gemm_gflop_per_s"]
    console.print(f"floor at {bandwidth:.1f} GB/s and {rate:,.0f} GFLOP/s, measured on this machine now", style="dim")


def _decode_row(step: dict[str, Any]) -> tuple[object, ...]:
    shares = f"{step['host_share']:.1%}", f"{step['floor_fraction']:.1%}"
    times = step["step_ms"], step["host_ms"]
    return step["rows_up_to"], step["steps"], *times, shares[0], step["floor_ms"], shares[1]
