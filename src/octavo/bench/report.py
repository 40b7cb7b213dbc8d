"""The report of an offline bench: one flat JSON object, and its tables.

Owns: the names of the numbers, the choice of the median run. Does not: measure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from octavo.bench.floor import StepFloor
from octavo.bench.offline import RunRecord
from octavo.bench.table import show_facts, show_rows
from octavo.bench.workload import Workload
from octavo.executors.protocol import Capacity


@dataclass(frozen=True, slots=True)
class Measured:
    """Everything that was seen: passes with the sum of their steps' floors, and the process's own numbers."""

    model: str
    capacity: Capacity
    workload: Workload
    concurrency: int
    floor: StepFloor
    runs: Sequence[tuple[RunRecord, float]]
    startup_s: float
    peak_memory_bytes: int


def make_report(measured: Measured) -> dict[str, Any]:
    """The numbers of the median run (by throughput), beside what was run on what."""
    by_speed = sorted(measured.runs, key=lambda run: run[0].output_tokens_per_s)
    record, floor_s = by_speed[len(by_speed) // 2]
    step_s = record.step_s.get("step", 0.0)
    capacity, workload, rates = measured.capacity, measured.workload, measured.floor.rates
    return {
        "bench": "offline",
        "model": measured.model,
        "dtype": capacity.dtype,
        "device": capacity.device,
        "threads": capacity.num_threads,
        "workload": workload.name,
        "requests": workload.num_requests,
        "concurrency": measured.concurrency,
        "prompt_tokens": workload.num_prompt_tokens,
        "output_tokens": workload.num_output_tokens,
        **record.as_dict(),
        "floor_ms_per_step": round(floor_s / max(1, record.num_steps) * 1e3, 4),
        "floor_fraction": round(floor_s / step_s, 4) if step_s else 0.0,
        "bandwidth_gb_per_s": round(rates.bandwidth / 1e9, 2),
        "gemm_gflop_per_s": round(rates.flops / 1e9, 1),
        "weight_bytes": capacity.weight_bytes,
        "kv_bytes_per_token": capacity.kv_bytes_per_token,
        "kv_blocks": sum(capacity.num_blocks),
        "peak_memory_bytes": measured.peak_memory_bytes,
        "startup_s": round(measured.startup_s, 3),
        "runs_output_tokens_per_s": [round(run[0].output_tokens_per_s, 2) for run in measured.runs],
    }


def show_report(console: Console, report: Mapping[str, Any]) -> None:
    """Print the report as tables."""
    runs = report["runs_output_tokens_per_s"]
    facts = {
        "model": f"{report['model']}, {report['dtype']}, {report['device']}, {report['threads']} threads",
        "workload": f"{report['workload']}: {report['requests']} requests, {report['prompt_tokens']:,} prompt and "
        f"{report['output_tokens']:,} output tokens, {report['concurrency']} at a time",
        "output tokens/s": f"{report['output_tokens_per_s']:,.1f}"
        + (f"  (median of {', '.join(f'{speed:,.1f}' for speed in runs)})" if len(runs) > 1 else ""),
        "all tokens/s": f"{report['total_tokens_per_s']:,.1f}",
        "prefix hits": f"{report['prefix_hit_tokens']:,} tokens",
        "preemptions": report["preemptions"],
        "start-up": f"{report['startup_s']:.2f} s",
        "peak memory": f"{report['peak_memory_bytes'] / 2**30:.2f} GiB ({report['weight_bytes'] / 2**30:.2f} weights)",
    }
    show_facts(console, "Offline bench", facts)
    console.print()
    spreads = {"first token": "ttft_ms", "between tokens": "inter_token_ms", "whole request": "e2e_ms"}
    rows = [(name, *report[key].values()) for name, key in spreads.items()]
    show_rows(console, "Latency, ms", ("", "p50", "p90", "p99"), rows)
    console.print()
    times, shares = report["step_ms"], report["step_share"]
    rows = [(part, times[part], f"{share:.1%}") for part, share in shares.items()]
    rows.append((f"whole step, mean of {report['steps']}", times["total"], "100.0%"))
    rows.append(("memory floor", report["floor_ms_per_step"], f"{report['floor_fraction']:.1%}"))
    show_rows(console, "Step, ms", ("", "mean", "share"), rows)
    bandwidth, rate = report["bandwidth_gb_per_s"], report["gemm_gflop_per_s"]
    console.print(f"floor at {bandwidth:.1f} GB/s and {rate:,.0f} GFLOP/s, measured on this machine now", style="dim")
