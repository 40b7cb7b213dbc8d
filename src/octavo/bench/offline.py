"""Run a workload on an engine in this process: greedy, end-of-sequence ignored, so that the work is always the same.

Owns: keeping N requests open, the times seen by the client, the record of one run.
Does not: build the engine, probe the machine or print.
Invariant: a run that lost or shortened a request raises, as its numbers would be wrong.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.bench.percentiles import spread_ms
from octavo.bench.steps import StepRecorder
from octavo.bench.workload import BenchWorkload, Item
from octavo.core.request import FinishReason, Request, SamplingParams
from octavo.engine.client import EngineClient
from octavo.errors import EngineError

PARTS = ("schedule", "prepare", "forward", "sample", "emit")
WARM_UP_TOKENS = 8


@dataclass(slots=True)
class RunRecord:
    """One pass over the workload. Times in seconds; `step_s` are totals by part over `num_steps` steps with rows."""

    duration_s: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    inter_token_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    requests: list[tuple[float, float, int]] = field(default_factory=list)  # to the first token, to the last, tokens
    num_steps: int = 0
    step_s: dict[str, float] = field(default_factory=dict)
    prefix_hit_tokens: int = 0
    num_preemptions: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def output_tokens_per_s(self) -> float:
        """Return output tokens a second, from the first submission to the last token."""
        return self.num_output_tokens / self.duration_s

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers of the report."""
        steps = max(1, self.num_steps)
        total = self.step_s.get("step", 0.0)
        split = {part: self.step_s.get(part, 0.0) for part in PARTS}
        split["other"] = max(0.0, total - sum(split.values()))
        return {
            "duration_s": round(self.duration_s, 4),
            "output_tokens_per_s": round(self.output_tokens_per_s, 2),
            "total_tokens_per_s": round((self.num_prompt_tokens + self.num_output_tokens) / self.duration_s, 2),
            "ttft_ms": spread_ms(self.ttft_s),
            "inter_token_ms": spread_ms(self.inter_token_s),
            "e2e_ms": spread_ms(self.e2e_s),
            "steps": self.num_steps,
            "step_ms": {"total": round(total / steps * 1e3, 4)}
            | {part: round(seconds / steps * 1e3, 4) for part, seconds in split.items()},
            "step_share": {part: round(seconds / total, 4) if total else 0.0 for part, seconds in split.items()},
            "prefix_hit_tokens": self.prefix_hit_tokens,
            "preemptions": self.num_preemptions,
            "output_tokens_per_step": round(self.num_output_tokens / steps, 4),
            "drafted_tokens": self.num_drafted_tokens,
            "accepted_tokens": self.num_accepted_tokens,
            "acceptance": round(self.num_accepted_tokens / max(1, self.num_drafted_tokens), 4),
        }


class OfflineBench:
    """Runs workloads on one engine. Each pass has its own cache salt, so that no pass helps the next."""

    def __init__(self, client: EngineClient, steps: StepRecorder, concurrency: int) -> None:
        self._client = client
        self.steps = steps
        self._concurrency = concurrency
        self._num_passes = 0

    async def warm_up(self, workload: BenchWorkload) -> None:
        """Run a few tokens of the first group's longest prompt, outside all numbers."""
        longest = max(workload.groups[0], key=lambda item: len(item.prompt_token_ids))
        item = Item(longest.prompt_token_ids, min(WARM_UP_TOKENS, longest.max_tokens))
        await self.run(BenchWorkload("warm-up", ((item,),)))

    async def run(self, workload: BenchWorkload, advance: Callable[[int], object] = lambda tokens: None) -> RunRecord:
        """Run one pass: groups in turn, `concurrency` requests open at a time. `advance` counts new tokens."""
        self._num_passes += 1
        self.steps.take()
        record = RunRecord(num_prompt_tokens=workload.num_prompt_tokens, num_output_tokens=workload.num_output_tokens)
        before = await self._client.statistics()
        start = time.perf_counter()
        for index, group in enumerate(workload.groups):
            names = (f"bench-{self._num_passes}-{index}-{number}" for number in range(len(group)))
            pending = zip(names, group, strict=True)
            workers = [self._worker(pending, record, advance) for _ in range(min(self._concurrency, len(group)))]
            await _gather(workers)
        record.duration_s = time.perf_counter() - start
        _subtract(record, before, await self._client.statistics())
        record.num_steps = len(self.steps.counts)
        return record

    async def _worker(
        self, pending: Iterator[tuple[str, Item]], record: RunRecord, advance: Callable[[int], object]
    ) -> None:
        for name, item in pending:
            await self._one(name, item, record, advance)

    async def _one(self, name: str, item: Item, record: RunRecord, advance: Callable[[int], object]) -> None:
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
                    record.inter_token_s.extend([0.0] * (new - 1))  # tokens that arrived together with the first
                else:
                    record.inter_token_s.extend([(now - last) / new] * new)
                count, last = count + new, now
                advance(new)
            if output.finish_reason is FinishReason.ERROR:
                raise EngineError(f"request {name} failed: {output.message}")
        if count != item.max_tokens:
            raise EngineError(f"request {name} gave {count} tokens, {item.max_tokens} were asked for")
        record.e2e_s.append(last - start)
        record.requests.append((first - start, last - start, count))


async def _gather(workers: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all; if one fails, cancel the others and raise its error."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for worker in workers:
                tasks.create_task(worker)
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


def _subtract(record: RunRecord, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Fill in the engine's counts between two statistics."""
    totals = after["steps"]["total_s"]
    record.step_s = {part: totals[part] - before["steps"]["total_s"][part] for part in totals}
    new, old = after["scheduler"], before["scheduler"]
    record.prefix_hit_tokens = new["prefix_hit_tokens"] - old["prefix_hit_tokens"]
    record.num_preemptions = new["num_preemptions"] - old["num_preemptions"]
    record.num_drafted_tokens = new["num_drafted_tokens"] - old["num_drafted_tokens"]
    record.num_accepted_tokens = new["num_accepted_tokens"] - old["num_accepted_tokens"]
