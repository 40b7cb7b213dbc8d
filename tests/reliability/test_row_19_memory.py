"""Row 19: the executor runs out of memory at random allocations, or whenever a step is large: nobody is lost.

Faults are put before and behind the executor's parts, so that a step breaks off anywhere; in the whole dose a child
process has a real limit on its address space, which large steps exceed.
"""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.core.plan import StepPlan
from octavo.core.request import FinishReason
from octavo.executors import torch_executor
from octavo.executors.step_outputs import StepOutputs
from tests.reliability.real_engine import (
    DECODERS,
    RealHarness,
    SpoiltExecutor,
    make_requests,
    num_equal,
    open_executor,
)
from tests.reliability.scorecard import Score
from tests.source_tree import ROOT
from tests.tiny_models import make_tiny_model

ERRORS = (
    MemoryError("injected"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to ..."),
    RuntimeError("could not create a primitive"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama3", tmp_path_factory.mktemp("row19") / "model", head_dim=32)


@pytest.fixture(autouse=True)
def frozen() -> Iterator[None]:
    """As an engine's process has it: a collection after each error does not walk all that was there before."""
    gc.freeze()
    yield
    gc.unfreeze()


class Shortage:
    """Makes parts of an opened executor run out of memory, before they do anything or when they have done it."""

    def __init__(self, rng: random.Random, chance: float) -> None:
        self.rng, self.chance = rng, chance
        self.struck: Counter[str] = Counter()

    def put_on(self, executor: SpoiltExecutor, patch: pytest.MonkeyPatch) -> None:
        places: list[tuple[object, str]] = [
            (executor._slots, "change_sequences"),
            (executor._slots, "write_ids"),
            (executor._slots, "write_drafts"),
            (executor._slots, "edit_tables"),
            (executor._cache, "move_blocks"),
            (executor._cache, "begin"),
            (executor._decoder, "forward"),
            (executor._decoder, "logits"),
            (executor._sampler, "sample"),
            (executor._sampler, "candidates"),
            (torch_executor, "build_inputs"),
            (StepOutputs, "result"),
        ]
        for owner, name in places:
            patch.setattr(owner, name, self.wrap(getattr(owner, name), name))

    def wrap(self, part: Any, name: str) -> Any:
        def short(*args: Any, **options: Any) -> Any:
            self.strike(name)
            done = part(*args, **options)
            self.strike(name)
            return done

        return short

    def strike(self, name: str) -> None:
        if self.rng.random() < self.chance / 2:
            self.struck[name] += 1
            raise self.rng.choice(ERRORS)


@pytest.mark.parametrize("decoder", DECODERS)
def test_row_19_memory_errors_at_random_allocations_lose_nobody(decoder: str, folder: Path, score: Score) -> None:
    requests = make_requests()
    with RealHarness(open_executor(folder, decoder)) as harness:
        want = harness.serve(requests)
    num_same = num_failed = 0
    struck: Counter[str] = Counter()
    seeds = range(score.dose(3, 40))
    for seed in seeds:
        executor = open_executor(folder, decoder)
        executor.host_bytes = 1 << 20
        scarce = {"num_blocks": (30,), "host_blocks": (30,), "preemption": "swap", "headroom": 0.0}
        drafts = {"max_draft_tokens": 3, "max_draft_rows": 24}
        shortage = Shortage(random.Random(seed), (0.01, 0.03, 0.002)[seed % 3])
        with pytest.MonkeyPatch.context() as patch, RealHarness(executor, 1 + seed % 2, **scarce, **drafts) as harness:
            shortage.put_on(executor, patch)
            got = harness.serve(requests)
            shortage.chance = 0.0
            num_same += num_equal(want, got, with_bits=False)
            num_failed += harness.scheduler.statistics().num_failed_steps
            assert set(harness.reasons(requests)) == {FinishReason.LENGTH}, harness.loop.failure
        struck.update(shortage.struck)
    assert num_failed > len(seeds)
    score.tell(f"errors, {decoder}", f"{struck.total()} in {len(struck)} parts, {num_failed} failed steps")
    score.share(f"requests equal, {decoder}", num_same, len(seeds) * len(requests))


@pytest.mark.parametrize("decoder", DECODERS)
def test_row_19_large_steps_without_memory_are_halved_until_they_fit(decoder: str, folder: Path, score: Score) -> None:
    requests = make_requests()
    with RealHarness(open_executor(folder, decoder)) as harness:
        want = harness.serve(requests)
    executor, sizes = open_executor(folder, decoder), []

    def need(plan: StepPlan) -> None:
        sizes.append(plan.num_query_tokens)
        if plan.num_query_tokens > 20:
            raise MemoryError(f"no memory for {plan.num_query_tokens} tokens")

    with RealHarness(executor) as harness:
        executor.before_step = need
        num_same = num_equal(want, harness.serve(requests), with_bits=decoder == "native")
        reasons = harness.reasons(requests)
    too_large = [size for size in sizes if size > 20]
    assert too_large[:3] == [too_large[0], too_large[0] // 2, too_large[0] // 4]
    score.count(f"lost, {decoder}", len(requests) - reasons.count(FinishReason.LENGTH))
    score.share(f"requests equal, {decoder}", num_same, len(requests))
    score.tell(f"steps, {decoder}", f"{len(too_large)} of {len(sizes)} too large, the first of {too_large[0]} tokens")


@pytest.mark.slow
def test_row_19_a_process_with_a_limit_on_its_memory_goes_on(tmp_path: Path, score: Score) -> None:
    folder = make_tiny_model("llama2", tmp_path, max_position_embeddings=2048)
    said = []
    for slack in (0, 96 << 20):  # 0 = no limit
        child = ROOT / "tests/reliability/memory_child.py"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
        done = subprocess.run(
            [sys.executable, str(child), str(folder), str(slack)],
            capture_output=True, text=True, timeout=300, env=environment, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        said.append(json.loads(done.stdout.splitlines()[-1]))
    free, limited = said
    assert free["failed_steps"] == 0 < limited["failed_steps"], limited
    print(limited["messages"], *done.stderr.splitlines(), sep="\n")
    score.count("lost under RLIMIT_AS", sum(reason != "LENGTH" for reason in limited["reasons"]))
    score.share("requests equal under RLIMIT_AS", sum(map(list.__eq__, free["ids"], limited["ids"])), len(free["ids"]))
    score.tell("failed steps under RLIMIT_AS", limited["failed_steps"])
