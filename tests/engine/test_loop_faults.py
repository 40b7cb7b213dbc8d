"""The step loop over an executor with every fault at once: all are answered, and nobody hears a wrong id."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest
from tests.engine.fakes import VOCAB_SIZE, GatedExecutor, Harness, expected, make_limits
from tests.fake_model import Faults

from octavo.core.plan import StepPlan
from octavo.core.request import FinishReason, Request, SamplingParams
from octavo.errors import ErrorKind


class FaultyExecutor(GatedExecutor):
    """Fails, runs out of memory, spoils rows and withholds tokens; with a host tier."""

    def __init__(self, rng: random.Random, depth: int) -> None:
        faults = Faults(rng, 0.03, 0.03, 0.02, 0.03)
        super().__init__(lazy=depth > 1, faults=faults)
        self.rng = rng
        self.fail = self.run_out_of_memory

    def run_out_of_memory(self, plan: StepPlan, owners: list[str]) -> Exception | None:
        return MemoryError("no room") if self.rng.random() < 0.002 * plan.num_query_tokens else None

    def make_pool(self, block_size: int, num_blocks: Any, host_blocks: Any = ()) -> None:
        super().make_pool(block_size, num_blocks, (40,))


def make(name: str, rng: random.Random) -> Request:
    shape: dict[str, Any] = rng.choice(({}, {}, {"n": 2}, {"n": 3}))
    params = SamplingParams(max_tokens=rng.randrange(1, 20), seed=3, temperature=0.0, **shape)
    ids = [rng.randrange(3, 9)] * rng.choice((4, 16)) + [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(12))]
    return Request(name, array("i", ids), params, eos_token_ids=())


@pytest.mark.parametrize("seed", range(8))
def test_L05_every_fault_at_once_answers_everyone_with_the_right_ids(seed: int) -> None:
    rng, depth = random.Random(seed), 1 + seed % 3
    sizes = make_limits(
        num_blocks=(30,), host_blocks=(40,), max_sequences=8, max_batch_tokens=48, headroom=0.0,
        preemption=rng.choice(("auto", "swap", "recompute")), prefix_caching=seed % 4 > 0,
        max_draft_tokens=rng.choice((0, 3)), max_draft_rows=8,
    )  # fmt: skip
    with Harness(FaultyExecutor(rng, depth), limits=sizes, depth=depth) as harness:
        requests = [make(f"r{i}", rng) for i in range(30)]
        for request in requests:
            harness.post(request)
        ends = harness.ends()
        assert harness.loop.failure is None
        for request in requests:
            end = ends[request.request_id]
            for choice in range(request.params.n):
                got = harness.inbox(request.request_id, choice).ids
                want = expected(request, choice)
                assert got == want if end.finish_reason is FinishReason.LENGTH else got == want[: len(got)]
            if end.finish_reason is not FinishReason.LENGTH:  # the same fault met it alone again
                assert end.error.kind is ErrorKind.STEP_FAILED or "not finite" in end.error.message
        assert sum(end.finish_reason is FinishReason.LENGTH for end in ends.values()) > 20
        assert harness.scheduler.statistics().num_failed_steps > 2
