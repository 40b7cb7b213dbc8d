"""The report of an online bench: one flat JSON object, and its tables.

Owns: the names of the numbers. Does not: measure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from octavo.bench.goodput import Objectives
from octavo.bench.online import OnlineLoad, OnlineRun
from octavo.bench.percentiles import spread_ms
from octavo.bench.table import show_facts, show_rows

SPREADS = {
    "first token": "ttft_ms",
    "per token": "tpot_ms",
    "between chunks": "inter_token_ms",
    "whole request": "e2e_ms",
    "sent late": "late_ms",
}


@dataclass(frozen=True, slots=True)
class OnlineMeasured:
    """A run, its parameters, and the known facts about the server."""

    server: str
    workload: str
    load: OnlineLoad
    objectives: Objectives
    run: OnlineRun
    facts: dict[str, Any] = field(default_factory=dict)


def make_online_report(measured: OnlineMeasured) -> dict[str, Any]:
    """Return the numbers of one run."""
    run, load, done = measured.run, measured.load, measured.run.done
    good = sum(measured.objectives.are_met(run.times_of(at, answer)) for at, answer in done)
    seconds, num_output = run.duration_s, run.num_output_tokens
    failures = run.failures()
    return {
        "bench": "online",
        "server": measured.server,
        **measured.facts,
        "workload": measured.workload,
        "arrivals": load.arrivals.describe(),
        "max_concurrency": load.max_concurrency or None,
        "max_open": run.max_open,
        "requests": len(run.answers),
        "requests_done": len(done),
        "requests_failed": sum(failures.values()),
        "failures": failures,
        "requests_not_sent": run.num_not_sent,
        "duration_s": round(seconds, 4),
        "prompt_tokens": run.num_prompt_tokens,
        "output_tokens": num_output,
        "requests_per_s": round(len(done) / seconds, 4),
        "output_tokens_per_s": round(num_output / seconds, 2),
        "total_tokens_per_s": round((run.num_prompt_tokens + num_output) / seconds, 2),
        "ttft_ms": spread_ms(run.ttft_s()),
        "tpot_ms": spread_ms(run.tpot_s()),
        "inter_token_ms": spread_ms(run.between_chunks_s()),
        "e2e_ms": spread_ms(run.e2e_s()),
        "late_ms": spread_ms(run.late_s()),
        "objectives_ms": measured.objectives.describe(),
        "goodput_requests_per_s": round(good / seconds, 4),
        "goodput_share": round(good / len(run.answers), 4) if run.answers else 0.0,
        "client_cpu_share": round(run.client_cpu_s / seconds, 4),
        "client_us_per_token": round(run.client_cpu_s / max(1, num_output) * 1e6, 1),
    }


def show_online_report(console: Console, report: dict[str, Any]) -> None:
    """Print the report as tables."""
    facts: dict[str, object] = {"server": report["server"]}
    if report.get("model"):
        known = [str(report[name]) for name in ("model", "dtype", "device") if report.get(name)]
        facts["model"] = ", ".join(known + ([f"{report['threads']} threads"] if report.get("threads") else []))
    facts |= {
        "workload": f"{report['workload']}: {report['requests']} requests, {report['arrivals']}, "
        f"at most {report['max_open']} open",
        "done": f"{report['requests_done']} of {report['requests']}"
        + "".join(f", {count} {kind}" for kind, count in report["failures"].items())
        + (f", {report['requests_not_sent']} not sent in time" if report["requests_not_sent"] else ""),
        "output tokens/s": f"{report['output_tokens_per_s']:,.1f}  ({report['requests_per_s']:.3g} requests/s)",
        "all tokens/s": f"{report['total_tokens_per_s']:,.1f}",
    }
    if report["objectives_ms"]:
        bounds = ", ".join(f"{name} {bound:g} ms" for name, bound in report["objectives_ms"].items())
        share, rate = report["goodput_share"], report["goodput_requests_per_s"]
        facts["goodput"] = f"{share:.1%} of requests, {rate:.3g} a second ({bounds})"
    if report.get("startup_s") is not None:
        facts["start-up"] = f"{report['startup_s']:.2f} s"
        facts["peak memory"] = f"{report['peak_memory_bytes'] / 2**30:.2f} GiB, all its processes"
    cost, share = report["client_us_per_token"], report["client_cpu_share"]
    facts["this client"] = f"{share:.1%} of one core, {cost:,.0f} us a token"
    show_facts(console, "Online bench", facts)
    console.print()
    rows = [(name, *report[key].values()) for name, key in SPREADS.items()]
    show_rows(console, "Latency, ms", ("", *report["ttft_ms"]), rows)
    step = report.get("step_ms")
    if step:
        console.print()
        rows = [(part, value, f"{value / step['total']:.1%}") for part, value in step.items() if step["total"]]
        show_rows(console, f"Step, ms, mean of {report['steps']}", ("", "mean", "share"), rows)
