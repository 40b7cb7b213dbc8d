"""The offline bench on the fake model: counts, times, isolation of passes, the floor, the report."""

from __future__ import annotations

import asyncio
import io
import json

import pytest
from rich.console import Console
from tests.fake_model import FakeExecutor

from octavo.bench.offline import OfflineBench, StepFloor, StepRecorder, make_offline_report, show_offline
from octavo.bench.report import engine_facts
from octavo.bench.workload import BenchWorkload, Item, draw_workload
from octavo.config import Config
from octavo.core.limits import Limits
from octavo.core.scheduler import Scheduler
from octavo.engine.loop import EngineLoop
from octavo.errors import AdmissionError
from octavo.executors.protocol import ExecutorSpec
from octavo.frontend.local_client import LocalClient

VOCAB = 97


def _engine():
    executor = FakeExecutor(vocab_size=VOCAB)
    capacity = executor.open(ExecutorSpec(max_sequences=4, max_batch_tokens=32, num_blocks=64))
    limits = Limits(
        block_size=capacity.block_size,
        num_blocks=capacity.num_blocks,
        max_model_len=capacity.max_model_len,
        vocab_size=VOCAB,
        max_batch_tokens=32,
        max_sequences=4,
    )
    loop = EngineLoop(Scheduler(limits), executor)
    return LocalClient(loop), StepRecorder(loop), capacity


async def _bench(work, concurrency=4):
    client, recorder, capacity = _engine()
    try:
        return await work(OfflineBench(client, recorder, concurrency)), capacity
    finally:
        await client.close()


def test_one_pass_counts_everything() -> None:
    workload = draw_workload(6, 20, 5, VOCAB, 0)
    seen = []

    async def work(bench):
        return await bench.run(workload, seen.append)

    record, _ = asyncio.run(_bench(work))
    assert (record.num_prompt_tokens, record.num_output_tokens, sum(seen)) == (120, 30, 30)
    assert (len(record.ttft_s), len(record.inter_token_s), len(record.e2e_s)) == (6, 24, 6)
    assert len(record.steps) > 5
    assert sum(record.steps.num_query_tokens) == 120 + 30 - 6
    assert record.duration_s > 0
    assert record.step_s["step"] <= record.duration_s


def test_concurrency_bounds_what_is_open() -> None:
    workload = draw_workload(3, 8, 4, VOCAB, 0)

    async def work(bench):
        return await bench.run(workload)

    record, _ = asyncio.run(_bench(work, concurrency=1))
    assert len(record.steps) == 12
    assert list(record.steps.num_query_tokens) == [8, 1, 1, 1] * 3


def test_passes_share_no_prefix_but_groups_do() -> None:
    item = draw_workload(1, 48, 2, VOCAB, 0).groups[0][0]
    workload = BenchWorkload("same twice", ((item,), (item,)))

    async def work(bench):
        await bench.warm_up(workload)
        return [(await bench.run(workload)).prefix_hit_tokens for _ in range(2)]

    hits, _ = asyncio.run(_bench(work))
    assert hits == [47, 47]


def test_a_request_that_cannot_run_is_its_own_error() -> None:
    async def work(bench):
        await bench.run(
            BenchWorkload("long", ((Item(draw_workload(1, 300, 1, VOCAB, 0).groups[0][0].prompt_token_ids, 1),),))
        )

    with pytest.raises(AdmissionError, match="maximum context length is 256 tokens, and the prompt has 300"):
        asyncio.run(_bench(work))


def test_report_has_every_number_and_is_one_line() -> None:
    workload = draw_workload(4, 20, 5, VOCAB, 0)
    floor = StepFloor(1e9, 1e9, 1000, 10, 1)

    async def work(bench):
        return [await bench.run(workload) for _ in range(3)]

    runs, capacity = asyncio.run(_bench(work))
    facts = {**engine_facts("fake", Config(), capacity), **floor.facts(), "startup_s": 1.5, "peak_memory_bytes": 2**30}
    report = make_offline_report(facts, workload, 4, runs, floor)
    line = json.dumps(report)
    assert "\n" not in line
    wanted = {"model", "dtype", "device", "threads", "workload", "requests", "prompt_tokens", "output_tokens"}
    wanted |= {"output_tokens_per_s", "total_tokens_per_s", "ttft_ms", "inter_token_ms", "step_ms", "step_share"}
    wanted |= {"steps", "floor_ms_per_step", "floor_fraction", "peak_memory_bytes", "startup_s", "prefix_hit_tokens"}
    assert wanted | {"preemptions"} <= set(report)
    assert report["output_tokens_per_s"] == sorted(report["runs_output_tokens_per_s"])[1]
    assert set(report["ttft_ms"]) == {"p50", "p90", "p95", "p99"}
    assert set(report["step_share"]) == {"schedule", "prepare", "forward", "sample", "emit", "other"}
    assert report["decode_steps"][-1]["rows_up_to"] == 4
    assert all(0 <= step["host_share"] <= 1 and step["floor_fraction"] >= 0 for step in report["decode_steps"])
    assert sum(report["step_share"].values()) == pytest.approx(1, abs=1e-3)
    out = io.StringIO()
    show_offline(Console(file=out, width=120), report)
    assert "memory floor" in out.getvalue()
