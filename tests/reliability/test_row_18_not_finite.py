"""Row 18: non-finite numbers in one row of the real executor end or repeat that request alone.

Three sources: a row of weights that is NaN (it lasts), a block of keys and values that goes bad (it passes), logits
that are NaN once. Neighbours say the same ids, natively with the same bits of log-probabilities, as without it; and no
block that holds such a number is ever to be found in the prefix cache, which is looked through after each step.
"""

from __future__ import annotations

import random
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.core.plan import StepPlan
from octavo.core.request import FinishReason, Request, SamplingParams, Want
from tests.reliability.real_engine import (
    DECODERS,
    FiniteCache,
    RealHarness,
    Said,
    head,
    make_requests,
    num_equal,
    open_executor,
)
from tests.reliability.scorecard import Score
from tests.tiny_models import VOCAB_SIZE, make_tiny_model, tiny_config, tiny_tensors, write_tensors

FIELDS = {"head_dim": 32}
BITS = {"native": True, "torch": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama3", tmp_path_factory.mktemp("row18") / "sound", **FIELDS)


def unspoilt(folder: Path, decoder: str, requests: list[Request]) -> Said:
    """What the requests say when nothing is wrong."""
    with RealHarness(open_executor(folder, decoder)) as harness:
        return harness.serve(requests)


def bad_requests(token: int) -> list[Request]:
    """Requests of every shape with this token: at the end, in the middle of a shared or long prompt, to be scored."""
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    prompts = [
        [*head(1, 24), token],
        [*head(2, 24), *head(90, 5), token, *head(91, 60)],
        [token],
        [*head(1, 24), *head(92, 40), token, 5, 6],
    ]
    made = [Request(f"bad{i}", array("i", ids), greedy) for i, ids in enumerate(prompts)]
    several = SamplingParams(max_tokens=8, temperature=0.7, seed=1, n=3, ignore_eos=True)
    beam = SamplingParams(max_tokens=8, temperature=0.0, beam_width=3, n=1)
    scores = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    made.append(Request("bad-n", array("i", prompts[1]), several))
    made.append(Request("bad-beam", array("i", prompts[3]), beam))
    made.append(Request("bad-scores", array("i", prompts[1]), scores, wants=Want.SAMPLE | Want.SCORE))
    return made


@pytest.mark.parametrize("decoder", DECODERS)
def test_row_18_a_row_of_weights_that_is_not_finite(decoder: str, folder: Path, tmp_path: Path, score: Score) -> None:
    good = make_requests()
    want = unspoilt(folder, decoder, good)
    seen = {i for choices in want.values() for ids, _ in choices for i in ids}
    seen |= {i for request in good for i in request.prompt_token_ids or ()}
    token = next(i for i in range(3, VOCAB_SIZE) if i not in seen)
    config = tiny_config("llama3", torch_dtype="float32", **FIELDS)
    tensors = tiny_tensors(config, 0, torch.float32)
    tensors["model.embed_tokens.weight"][token] = float("nan")
    spoilt = make_tiny_model("llama3", tmp_path / "spoilt", **FIELDS)
    write_tensors(spoilt, tensors)
    bad = bad_requests(token)
    num_same = num_ended = 0
    for depth in score.dose((2,), (1, 2, 3)):
        with RealHarness(open_executor(spoilt, decoder), depth, max_batch_tokens=32) as harness:
            cache = FiniteCache(harness)
            harness.loop.watch(cache)
            got = harness.serve([*good, *bad])
            num_ended += harness.reasons(bad).count(FinishReason.ERROR)
            assert all("finite" in (harness.end(request.request_id).message or "") for request in bad)
            num_same += num_equal(want, got, BITS[decoder])
            again = [Request(f"again{i}", r.prompt_token_ids, r.params) for i, r in enumerate(good)]  # from the cache
            got = harness.serve(again)
            num_same += num_equal({f"again{i}": want[r.request_id] for i, r in enumerate(good)}, got, BITS[decoder])
            assert cache.num_looks > 100 and harness.scheduler.statistics().prefix_hit_tokens > 0
            score.count(f"poisoned blocks that could be hit, {decoder}, depth {depth}", cache.num_poisoned)
    num_runs = len(score.dose((2,), (1, 2, 3)))
    score.share(f"neighbours equal, {decoder}", num_same, 2 * num_runs * len(good))
    score.share(f"spoilt requests ended with an error, {decoder}", num_ended, num_runs * len(bad))


@pytest.mark.parametrize("decoder", DECODERS)
def test_row_18_blocks_that_go_bad_once(decoder: str, folder: Path, score: Score) -> None:
    requests = make_requests()
    want = unspoilt(folder, decoder, requests)
    num_same = num_spoilt = num_poisoned = num_put_back = 0
    seeds = range(score.dose(2, 12))
    for seed in seeds:
        rng, executor = random.Random(seed), open_executor(folder, decoder)
        pause = 0

        def spoil(plan: StepPlan, rng: Any = rng, executor: Any = executor) -> None:
            nonlocal num_spoilt, pause
            pause -= 1
            running = [slot for slot, start in zip(plan.slots, plan.starts, strict=True) if start > 8]
            if pause < 0 and running and rng.random() < 0.3:  # a retry must get through before the next
                executor.spoil(rng.choice(executor.blocks_of(running[:1])))
                num_spoilt += 1
                pause = 12

        with RealHarness(executor, 1 + seed % 2) as harness:
            cache = FiniteCache(harness)
            harness.loop.watch(cache)
            executor.before_step = spoil
            got = harness.serve(requests)
            num_same += num_equal(want, got, BITS[decoder])
            num_put_back += harness.scheduler.statistics().num_requeued
            if seed % 2 == 0:  # with one plan in flight a step is looked at before the next one spoils something
                num_poisoned += cache.num_poisoned
            assert set(harness.reasons(requests)) == {FinishReason.LENGTH}
    assert num_spoilt >= len(seeds) and num_put_back > 0
    score.tell(f"blocks spoilt, {decoder}", f"{num_spoilt}; {num_put_back} requests computed anew")
    score.count(f"poisoned blocks that could be hit, {decoder}", num_poisoned)
    score.share(f"requests equal, {decoder}", num_same, len(seeds) * len(requests))


@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("decoder", DECODERS)
def test_row_18_logits_that_are_not_finite_once_beside_drafts_and_beams(
    decoder: str, drafts: int, folder: Path, score: Score
) -> None:
    requests = make_requests(num_tokens=24)
    want = unspoilt(folder, decoder, requests)
    num_same = num_spoilt = num_accepted = 0
    seeds = range(score.dose(2, 12))
    for seed in seeds:
        rng, executor = random.Random(seed), open_executor(folder, decoder)
        with RealHarness(executor, 1 + seed % 2, max_draft_tokens=drafts, max_draft_rows=24) as harness:
            assert executor._decoder is not None
            compute, pause, executor.keeps_logits = executor._decoder.logits, 0, True

            def spoil(hidden: torch.Tensor, rng: Any = rng, compute: Any = compute) -> torch.Tensor:
                nonlocal pause, num_spoilt
                logits, pause = compute(hidden), pause - 1
                if pause < 0 and rng.random() < 0.4:
                    row, value = rng.randrange(len(logits)), rng.choice((float("nan"), float("inf")))
                    logits[row, rng.randrange(VOCAB_SIZE)] = value
                    num_spoilt += 1
                    pause = 12
                return logits

            executor._decoder.logits = spoil  # type: ignore[method-assign]
            got = harness.serve(requests)
            num_same += num_equal(want, got, BITS[decoder] and not drafts)
            num_accepted += harness.scheduler.statistics().num_accepted_tokens
            assert set(harness.reasons(requests)) == {FinishReason.LENGTH}
    assert num_spoilt >= len(seeds) and bool(num_accepted) == bool(drafts)
    what = f"{decoder}, {f'{num_accepted} drafts accepted' if drafts else 'no drafts'}"
    score.share(f"requests equal, {num_spoilt} logits spoilt, {what}", num_same, len(seeds) * len(requests))
