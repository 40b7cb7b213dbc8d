"""Row 10: a pool of 1.2 times the longest request, 64 mixed requests: everybody finishes, and is seldom put back."""

from __future__ import annotations

import random

from octavo.core.plan import EventKind
from tests.core.harness import Run, limits, prompt
from tests.core.random_config import BUILT_IN
from tests.reliability.scorecard import Score

LONGEST, BLOCK = 64, 4
NUM_BLOCKS = 12 * LONGEST // BLOCK // 10  # 1.2 longest
NUM_REQUESTS = 64


def serve(policy: str, preemption: str, depth: int, seed: int = 5) -> Run:
    """Short and long prompts, several choices, tenants and priorities, all at once and after each other."""
    rng = random.Random(seed)
    host = {"host_blocks": (NUM_BLOCKS,)} if preemption == "swap" else {}
    sizes = limits(
        policy=policy, preemption=preemption, num_blocks=NUM_BLOCKS, max_model_len=LONGEST, block_size=BLOCK,
        max_batch_tokens=16, headroom=None, **host,
    )  # fmt: skip
    run = Run(sizes, depth=depth, check_every=16)
    run.is_ordered = False
    for index in range(NUM_REQUESTS):
        length = rng.choice((1, 3, 9, 20, 39))
        shape = {"n": 2} if index % 8 == 7 and length < 20 else {}
        run.admit(
            prompt(length, index % 5), LONGEST - length if index % 16 == 0 else rng.randrange(1, 24), ignore_eos=True,
            arrival=index / 100, priority=index % 3, tenant="ab"[index % 2], **shape,
        )  # fmt: skip
    return run.finish()  # checks that all ended, with the oracle's text, and that nothing is held


def test_row_10_a_pool_of_little_more_than_one_request_serves_all(score: Score) -> None:
    ways = [("recompute", 2, 5)]
    ways = score.dose(
        ways, [(way, depth, seed) for way in ("recompute", "swap") for depth in (1, 2, 3) for seed in range(4)]
    )
    num_finished = 0
    for policy in BUILT_IN:
        counts = []
        for preemption, depth, seed in ways:
            records = serve(policy, preemption, depth, seed).records.values()
            num_finished += sum(record.finished is not None for record in records)
            counts.append(max(len(record.of_kind(EventKind.PREEMPTED)) for record in records))
        score.count(f"preemptions of one request at most, {policy}", max(counts), most=3)
    score.share("requests finished", num_finished, NUM_REQUESTS * len(BUILT_IN) * len(ways))
