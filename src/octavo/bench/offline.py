"""The offline benchmark: runs workloads on an engine in this process, and compares its steps with the memory floor.

Owns: keeping N requests open; the times of requests and steps; the report of `octavo bench offline`; code shared with
`latency`, `sweep`, `compare` and `startup`. Does not: open engines or parse flags.
Requests are greedy and ignore end-of-sequence, so that every pass does the same work. Invariant: a pass that loses or
shortens a request raises EngineError, because its figures would be wrong.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from octavo import machine
from octavo.assembly import LocalEngine
from octavo.bench.report import (
    Report,
    engine_facts,
    headline,
    peak_memory_bytes,
    show_facts,
    show_rows,
    spread_ms,
)
from octavo.bench.workload import BenchWorkload, Item
from octavo.config import Config
from octavo.core.plan import Event, Events, StepFailure, StepPlan, StepResult
from octavo.core.request import FinishReason, Request, SamplingParams
from octavo.engine.client import EngineClient
from octavo.engine.loop import EngineLoop
from octavo.errors import EngineError
from octavo.executors.protocol import Capacity
from octavo.observe.history import count_prefill
from octavo.observe.series import PARTS, StepTimes

DEVICE_PARTS = ("forward", "sample")  # all else is host time: schedule, prepare, emit, and the time between parts
WARM_UP_TOKENS = 8
Advance = Callable[[int], object]  # called with the number of new tokens
_NOT_TIMED = (0.0,) * len(PARTS)
_DECODE_COLUMNS = ("rows up to", "steps", "step ms", "host ms", "host share", "floor ms", "floor reached")


# --- steps ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepFloor:
    """The shortest possible time of a step, from a model's sizes and a machine's bytes and flops per second."""

    bandwidth: float
    flops: float
    weight_bytes: int
    linear_flops_per_token: int
    kv_bytes_per_token: int

    def seconds(self, num_query_tokens: int, num_kv_read: int) -> float:
        """Return the floor of a step that computes `num_query_tokens` and reads `num_kv_read` cached positions."""
        linear = max(self.weight_bytes / self.bandwidth, num_query_tokens * self.linear_flops_per_token / self.flops)
        return linear + num_kv_read * self.kv_bytes_per_token / self.bandwidth

    def facts(self) -> Report:
        """Return the machine's two rates for a report."""
        return {
            "bandwidth_gb_per_s": round(self.bandwidth / 1e9, 2),
            "gemm_gflop_per_s": round(self.flops / 1e9, 1),
        }


def probe_floor(capacity: Capacity) -> StepFloor:
    """Measure the machine's rates on the model's device in the model's types. Takes about a second; loads torch."""
    from octavo.bench.kernels import probe_rates  # loads torch

    rates = probe_rates(capacity.device, capacity.dtype, machine.look().cache_bytes, capacity.quantization)
    weight_bytes = capacity.weight_bytes - capacity.idle_expert_bytes
    return StepFloor(*rates, weight_bytes, capacity.linear_flops_per_token, capacity.kv_bytes_per_token)


class StepCounts:
    """Columns with one entry per step: rows, query tokens, KV positions read, a decode-only flag, seconds by part."""

    __slots__ = ("is_decode", "num_kv_read", "num_query_tokens", "num_rows", "seconds")

    def __init__(self) -> None:
        self.num_rows = array("q")
        self.num_query_tokens = array("q")
        self.num_kv_read = array("q")
        self.is_decode = array("b")
        self.seconds: list[tuple[float, ...]] = []

    def __len__(self) -> int:
        return len(self.num_rows)

    def floor_s(self, floor: StepFloor) -> float:
        """Return the sum of all steps' floors, in seconds."""
        return sum(map(floor.seconds, self.num_query_tokens, self.num_kv_read))

    def by_rows(self, floor: StepFloor) -> list[dict[str, Any]]:
        """Return means over the timed decode-only steps, grouped by rows: 1, 2, 3 to 4, 5 to 8, and so on."""
        groups: dict[int, list[int]] = {}
        for step in self._timed_decodes():
            groups.setdefault(1 << (self.num_rows[step] - 1).bit_length(), []).append(step)
        return [{"rows_up_to": rows, **self._means(groups[rows], floor)} for rows in sorted(groups)]

    def at_rows(self, rows: int, floor: StepFloor) -> dict[str, Any]:
        """Return means over the timed decode-only steps with exactly `rows` rows; {} if there are none."""
        steps = [step for step in self._timed_decodes() if self.num_rows[step] == rows]
        return self._means(steps, floor) if steps else {}

    def _timed_decodes(self) -> list[int]:
        return [step for step in range(len(self)) if self.is_decode[step] and self.seconds[step] is not _NOT_TIMED]

    def _means(self, steps: Sequence[int], floor: StepFloor) -> dict[str, Any]:
        totals = dict(zip(PARTS, map(sum, zip(*(self.seconds[step] for step in steps), strict=True)), strict=True))
        whole_s = totals["step"]
        host_s = max(0.0, whole_s - sum(totals[part] for part in DEVICE_PARTS))
        floor_s = sum(floor.seconds(self.num_query_tokens[step], self.num_kv_read[step]) for step in steps)
        return {
            "steps": len(steps),
            "step_ms": round(whole_s / len(steps) * 1e3, 4),
            "host_ms": round(host_s / len(steps) * 1e3, 4),
            "host_share": round(host_s / whole_s, 4) if whole_s else 0.0,
            "floor_ms": round(floor_s / len(steps) * 1e3, 4),
            "floor_fraction": round(floor_s / whole_s, 4) if whole_s else 0.0,
        }


class StepRecorder:
    """An EventSink that records the tokens and KV positions of each successful step with rows.

    The loop calls a sink just before it records the step's times, so the recorder fetches the times one step later.
    """

    def __init__(self, loop: EngineLoop) -> None:
        self._counts = StepCounts()
        self._times: StepTimes = loop.step_times
        self._untimed_step: int | None = None
        loop.watch(self)

    def admitted(self, request: Request) -> None:
        """Do nothing: there is no step to count."""

    def decided(self, decisions: tuple[Event, ...]) -> None:
        """Do nothing: there is no step to count."""

    def stepped(self, plan: StepPlan, outcome: StepResult | StepFailure, events: Events) -> None:
        """Record one step. A step without rows is skipped: it makes no pass over the weights."""
        self._fetch_times()
        if plan.num_rows and isinstance(outcome, StepResult):
            counts = self._counts
            counts.num_rows.append(plan.num_rows)
            counts.num_query_tokens.append(plan.num_query_tokens)
            counts.num_kv_read.append(plan.num_kv_read)
            counts.is_decode.append(plan.num_query_tokens == plan.num_rows or not count_prefill(plan)[0])
            self._untimed_step = self._times.num_steps

    def take(self) -> StepCounts:
        """Return the steps recorded since the last call. Call while the engine is idle."""
        self._fetch_times()
        counts, self._counts = self._counts, StepCounts()
        return counts

    def _fetch_times(self) -> None:
        if self._untimed_step is not None:
            self._counts.seconds.append(self._times.get(self._untimed_step) or _NOT_TIMED)
            self._untimed_step = None


# --- a pass over a workload -------------------------------------------------------------------------


@dataclass(slots=True)
class RunRecord:
    """One pass over the workload. Times are in seconds; `step_s` holds the total of each part over all steps."""

    duration_s: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    inter_token_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    requests: list[tuple[float, float, int]] = field(default_factory=list)  # (TTFT, seconds to last token, tokens)
    steps: StepCounts = field(default_factory=StepCounts)
    step_s: dict[str, float] = field(default_factory=dict)
    prefix_hit_tokens: int = 0
    num_preemptions: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def output_tokens_per_s(self) -> float:
        """Return output tokens per second, from the first submission to the last token."""
        return self.num_output_tokens / self.duration_s

    def as_dict(self) -> dict[str, Any]:
        """Return the report's figures."""
        steps = max(1, len(self.steps))
        parts = dict(self.step_s)
        total = parts.pop("step", 0.0)
        parts["other"] = max(0.0, total - sum(parts.values()))
        return {
            "duration_s": round(self.duration_s, 4),
            "output_tokens_per_s": round(self.output_tokens_per_s, 2),
            "total_tokens_per_s": round((self.num_prompt_tokens + self.num_output_tokens) / self.duration_s, 2),
            "ttft_ms": spread_ms(self.ttft_s),
            "inter_token_ms": spread_ms(self.inter_token_s),
            "e2e_ms": spread_ms(self.e2e_s),
            "steps": len(self.steps),
            "step_ms": {"total": round(total / steps * 1e3, 4)}
            | {part: round(seconds / steps * 1e3, 4) for part, seconds in parts.items()},
            "step_share": {part: round(seconds / total, 4) if total else 0.0 for part, seconds in parts.items()},
            "prefix_hit_tokens": self.prefix_hit_tokens,
            "preemptions": self.num_preemptions,
            "output_tokens_per_step": round(self.num_output_tokens / steps, 4),
            "drafted_tokens": self.num_drafted_tokens,
            "accepted_tokens": self.num_accepted_tokens,
            "acceptance": round(self.num_accepted_tokens / max(1, self.num_drafted_tokens), 4),
        }

    def add_statistics(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Fill in the differences between two snapshots of the engine's statistics."""
        old_s, new_s = before["steps"]["total_s"], after["steps"]["total_s"]
        self.step_s = {part: new_s[part] - old_s[part] for part in new_s}
        for name in ("prefix_hit_tokens", "num_preemptions", "num_drafted_tokens", "num_accepted_tokens"):
            setattr(self, name, after["scheduler"][name] - before["scheduler"][name])


class OfflineBench:
    """Runs workloads on one engine. Each pass has its own cache salt, so that no pass reuses another's KV blocks."""

    def __init__(self, client: EngineClient, recorder: StepRecorder, concurrency: int) -> None:
        self._client = client
        self._recorder = recorder
        self._concurrency = concurrency
        self._num_passes = 0

    async def warm_up(self, workload: BenchWorkload) -> None:
        """Generate a few tokens from the first group's longest prompt. No figure includes them."""
        longest = max(workload.groups[0], key=lambda item: len(item.prompt_token_ids))
        item = Item(longest.prompt_token_ids, min(WARM_UP_TOKENS, longest.max_tokens))
        await self.run(BenchWorkload("warm-up", ((item,),)))

    async def run(self, workload: BenchWorkload, advance: Advance = lambda tokens: None) -> RunRecord:
        """Run one pass: one group after another, with up to `concurrency` open requests."""
        self._num_passes += 1
        self._recorder.take()
        record = RunRecord(num_prompt_tokens=workload.num_prompt_tokens, num_output_tokens=workload.num_output_tokens)
        before = await self._client.statistics()
        start = time.perf_counter()
        for index, group in enumerate(workload.groups):
            names = (f"bench-{self._num_passes}-{index}-{number}" for number in range(len(group)))
            await self._run_group(zip(names, group, strict=True), len(group), record, advance)
        record.duration_s = time.perf_counter() - start
        record.add_statistics(before, await self._client.statistics())
        record.steps = self._recorder.take()
        return record

    async def _run_group(
        self, requests: Iterator[tuple[str, Item]], count: int, record: RunRecord, advance: Advance
    ) -> None:
        """Run a group; if a request fails, cancel the others and raise its error."""

        async def work() -> None:
            for name, item in requests:
                await self._run_request(name, item, record, advance)

        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(self._concurrency, count)):
                    tasks.create_task(work())
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _run_request(self, name: str, item: Item, record: RunRecord, advance: Advance) -> None:
        params = SamplingParams(max_tokens=item.max_tokens, temperature=0.0, ignore_eos=True, seed=0)
        request = Request(
            name, item.prompt_token_ids, params, arrival=time.monotonic(), cache_salt=b"pass %d" % self._num_passes
        )
        start = first = last = time.perf_counter()
        await self._client.submit(request)
        count = 0
        async for output in self._client.outputs(name):
            now, new = time.perf_counter(), len(output.token_ids)
            if new:
                if count == 0:
                    first = now
                    record.ttft_s.append(first - start)
                    record.inter_token_s.extend([0.0] * (new - 1))  # tokens that arrived with the first one
                else:
                    record.inter_token_s.extend([(now - last) / new] * new)
                count, last = count + new, now
                advance(new)
            if output.finish_reason is FinishReason.ERROR:
                raise EngineError(f"request {name} failed: {output.message}")
        if count != item.max_tokens:
            raise EngineError(f"request {name} gave {count} tokens instead of {item.max_tokens}")
        record.e2e_s.append(last - start)
        record.requests.append((first - start, last - start, count))


@dataclass(slots=True)
class BenchEngine:
    """An engine that run() measures and closes. `peak_memory_bytes` and `floor` are set by run()."""

    config: Config
    engine: LocalEngine
    startup_s: float
    peak_memory_bytes: int = 0
    floor: StepFloor = field(init=False)

    def run(self, workloads: Sequence[BenchWorkload], advance: Advance = lambda tokens: None) -> list[RunRecord]:
        """Warm up, run one pass of each workload, close the engine, and measure the machine."""
        records = asyncio.run(self._run(workloads, advance))
        self.peak_memory_bytes = peak_memory_bytes()
        self.floor = probe_floor(self.engine.capacity)
        return records

    async def _run(self, workloads: Iterable[BenchWorkload], advance: Advance) -> list[RunRecord]:
        client, records = self.engine.client, list[RunRecord]()
        bench = OfflineBench(client, StepRecorder(self.engine.loop), self.engine.capacity.num_slots)
        try:
            for workload in workloads:
                if not records:
                    await bench.warm_up(workload)
                records.append(await bench.run(workload, advance))
        finally:
            await client.close()
        return records

    def facts(self) -> Report:
        """Return facts about the engine and the machine for a report. Call after run()."""
        return {
            **engine_facts(self.engine.text.name, self.config, self.engine.capacity),
            **self.floor.facts(),
            "startup_s": round(self.startup_s, 3),
            "peak_memory_bytes": self.peak_memory_bytes,
        }


# --- the report -------------------------------------------------------------------------------------


def make_offline_report(
    facts: Report, workload: BenchWorkload, concurrency: int, runs: Sequence[RunRecord], floor: StepFloor
) -> Report:
    """Return the figures of the run with median throughput, with the engine's facts."""
    record = sorted(runs, key=lambda run: run.output_tokens_per_s)[len(runs) // 2]
    floor_s, step_s = record.steps.floor_s(floor), record.step_s.get("step", 0.0)
    return {
        "bench": "offline",
        **facts,
        "workload": workload.name,
        "requests": workload.num_requests,
        "concurrency": concurrency,
        "prompt_tokens": workload.num_prompt_tokens,
        "output_tokens": workload.num_output_tokens,
        **record.as_dict(),
        "floor_ms_per_step": round(floor_s / max(1, len(record.steps)) * 1e3, 4),
        "floor_fraction": round(floor_s / step_s, 4) if step_s else 0.0,
        "decode_steps": record.steps.by_rows(floor),
        "runs_output_tokens_per_s": [round(run.output_tokens_per_s, 2) for run in runs],
    }


def show_offline(console: Console, report: Report) -> None:
    """Print the report as tables."""
    speeds = report["runs_output_tokens_per_s"]
    of_runs = f"  (median of {', '.join(f'{speed:,.1f}' for speed in speeds)})" if len(speeds) > 1 else ""
    facts = {
        "model": headline(report),
        "workload": f"{report['workload']}: {report['requests']} requests, {report['prompt_tokens']:,} prompt and "
        f"{report['output_tokens']:,} output tokens, {report['concurrency']} at a time",
        "output tokens/s": f"{report['output_tokens_per_s']:,.1f}{of_runs}",
        "all tokens/s": f"{report['total_tokens_per_s']:,.1f}",
        "prefix hits": f"{report['prefix_hit_tokens']:,} tokens",
        "preemptions": report["preemptions"],
        "tokens a step": f"{report['output_tokens_per_step']:.2f}",
        "drafts accepted": f"{report['accepted_tokens']:,} of {report['drafted_tokens']:,}",
        **machine_rows(report),
    }
    show_facts(console, "Offline bench", facts)
    console.print()
    spreads = {"first token": "ttft_ms", "between tokens": "inter_token_ms", "whole request": "e2e_ms"}
    rows = [(name, *report[key].values()) for name, key in spreads.items()]
    show_rows(console, "Latency, ms", ("", *report["ttft_ms"]), rows)
    console.print()
    times = report["step_ms"]
    parts = [(part, times[part], f"{share:.1%}") for part, share in report["step_share"].items()]
    parts.append((f"whole step, mean of {report['steps']}", times["total"], "100.0%"))
    parts.append(("memory floor", report["floor_ms_per_step"], f"{report['floor_fraction']:.1%}"))
    show_rows(console, "Step, ms", ("", "mean", "share"), parts)
    if report["decode_steps"]:
        console.print()
        decodes = [
            {**step, "host_share": f"{step['host_share']:.1%}", "floor_fraction": f"{step['floor_fraction']:.1%}"}
            for step in report["decode_steps"]
        ]
        show_rows(console, "Steps that only decode", _DECODE_COLUMNS, [tuple(step.values()) for step in decodes])


def machine_rows(report: Report) -> dict[str, object]:
    """Return the start-up time, the peak memory and the floor's rates as text."""
    return {
        "start-up": f"{report['startup_s']:.2f} s",
        "peak memory": f"{report['peak_memory_bytes'] / 2**30:.2f} GiB ({report['weight_bytes'] / 2**30:.2f} weights)",
        "floor at": f"{report['bandwidth_gb_per_s']:.1f} GB/s and {report['gemm_gflop_per_s']:,.0f} GFLOP/s, measured "
        "on this machine now",
    }
