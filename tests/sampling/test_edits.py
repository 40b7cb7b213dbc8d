"""DRY, bad words, allowed ids and typical-p: against their per-row twins and transformers' processors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import generation

from octavo.core.request import SamplingParams
from octavo.sampling.columns import SamplingRows, SequenceIds
from octavo.sampling.dry import matching_ends
from octavo.sampling.sampler import Sampler
from octavo.sampling.selection import draw, uniforms
from tests.sampling import per_row
from tests.sampling.test_sampling import EOS, ONE_ID, Rig, draws_of

VOCAB_SIZE = 30
DRY: list[dict[str, Any]] = [
    {"dry_multiplier": 0.8},
    {"dry_multiplier": 1.0, "dry_allowed_length": 1, "dry_base": 1.2},
    {"dry_multiplier": 2.0, "dry_allowed_length": 3, "dry_base": 1.0},
    {"dry_multiplier": 0.5, "dry_breaker_ids": (2,)},
    {"dry_multiplier": 0.5, "dry_breaker_ids": (0, 10**6), "dry_allowed_length": 1},
    {"dry_multiplier": 0.8, "dry_range": 9},
    {"dry_multiplier": 0.8, "dry_range": 20, "dry_breaker_ids": (1,)},
    {"dry_multiplier": 100.0, "dry_base": 100.0},
    {"dry_multiplier": 0.7, "repetition_penalty": 1.3, "logit_bias": ((1, 2.0),), "bad_words_ids": ((0, 1), (2,))},
    {},
]


def apply(rig: Rig, logits: Tensor, lengths: list[int]) -> Tensor:
    edited = logits.clone()
    rows = SamplingRows(np.arange(len(lengths)), np.asarray(lengths))
    for processor, chosen in rig.processors.edits(rows):
        processor.apply(edited, rows, chosen)
    return edited


def assert_equals_twin(rig: Rig, logits: Tensor, edited: Tensor) -> None:
    for slot, (prompt, outputs) in enumerate(rig.histories):
        expected = per_row.edited(logits[slot].tolist(), rig.params[slot], prompt, outputs, EOS)
        assert edited[slot].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6), slot


@pytest.mark.parametrize("seed", range(5))
def test_P01_dry_equals_its_twin_while_sequences_grow(seed: int) -> None:
    rng = np.random.default_rng(seed)
    params = [SamplingParams(temperature=0.0, **options) for options in DRY]
    histories = [(rng.integers(0, 3, int(rng.integers(1, 20))).tolist(), []) for _ in params]
    rig = Rig(params, VOCAB_SIZE, histories)
    for _ in range(24):
        logits = torch.from_numpy(rng.normal(size=(len(params), VOCAB_SIZE))).float()
        edited = apply(rig, logits, [len(prompt) + len(outputs) for prompt, outputs in rig.histories])
        assert_equals_twin(rig, logits, edited)
        new = rng.integers(0, 3, len(params))
        rig.processors.append(np.arange(len(params)), new)
        for slot, (prompt, outputs) in enumerate(rig.histories):
            rig.ids[slot, len(prompt) + len(outputs)] = int(new[slot])
            outputs.append(int(new[slot]))


def test_P01_dry_begins_anywhere_and_takes_in_several_ids_at_once() -> None:
    rng = np.random.default_rng(7)
    params = [SamplingParams(temperature=0.0, **options) for options in DRY]
    rig = Rig(params, VOCAB_SIZE, [(rng.integers(0, 3, 11).tolist(), rng.integers(0, 3, 9).tolist()) for _ in params])
    logits = torch.from_numpy(rng.normal(size=(len(params), VOCAB_SIZE))).float()
    assert_equals_twin(rig, logits, apply(rig, logits, [20] * len(params)))
    assert torch.equal(apply(rig, logits, [20] * len(params)), apply(rig, logits, [20] * len(params)))
    for slot, (_, outputs) in enumerate(rig.histories):
        more = rng.integers(0, 3, 1 + slot % 4)
        rig.processors.append(np.full(len(more), slot), more)
        rig.ids[slot, 20 : 20 + len(more)] = torch.from_numpy(more)
        outputs.extend(more.tolist())
    assert_equals_twin(rig, logits, apply(rig, logits, [21 + slot % 4 for slot in range(len(params))]))


def test_P01_dry_of_a_slot_used_again_knows_nothing_of_the_one_before() -> None:
    rng = np.random.default_rng(3)
    params = [SamplingParams(dry_multiplier=1.0, dry_allowed_length=1, dry_breaker_ids=(slot,)) for slot in range(4)]
    rig = Rig(params, VOCAB_SIZE, [([0, 1, 2] * 6, []) for _ in params])
    logits = torch.zeros(4, VOCAB_SIZE)
    apply(rig, logits, [18] * 4)
    for slot in (2, 0, 1):
        prompt = rng.integers(0, 3, 10).tolist()
        rig.histories[slot][0][:] = prompt
        rig.sampler.release(slot)
        rig.ids[slot, :10] = torch.tensor(prompt)
    for slot in (1, 2, 0):  # other places than before
        rig.sampler.put(slot, params[slot], SequenceIds(np.asarray(rig.histories[slot][0]), eos=EOS))
    assert_equals_twin(rig, logits, apply(rig, logits, [10, 10, 10, 18]))


def test_P01_the_largest_dry_penalty_leaves_numbers() -> None:
    params = [SamplingParams(dry_multiplier=100.0, dry_base=100.0, dry_breaker_ids=()), SamplingParams()]
    rig = Rig(params, 2, [([0] * 60, []), ([1], [])])
    edited = apply(rig, torch.zeros(2, 2), [60, 1])
    assert edited[0, 0] == pytest.approx(-1e30) and edited[0, 1] == 0 and edited[1].tolist() == [0, 0]


@pytest.mark.parametrize("seed", range(20))
def test_P01_the_z_algorithm_equals_looking(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids, breakers = rng.integers(0, 1 + seed % 4, 1 + 3 * seed).tolist(), rng.integers(0, 9, seed % 3).tolist()
    for end, got in enumerate(matching_ends(ids, breakers)[:-1]):
        length = 0
        while length <= end and ids[end - length] == ids[-1 - length] and ids[end - length] not in breakers:
            length += 1
        assert got == length
    assert matching_ends([], breakers) == []


WORDS: list[tuple[tuple[int, ...], ...]] = [
    ((5,),),
    ((0, 1), (1, 2), (2, 0), (7,)),
    ((0, 1, 2), (1, 1), (2, 2, 2, 1), (0, 0, 1), (2, 1)),
    ((1, 1, 3), (2, 1, 3), (0, 1, 3), (1, 3), (3,), (2, 3), (0, 3)),
    tuple((a, b, c) for a in range(3) for b in range(3) for c in range(a, 3)),
]


@pytest.mark.parametrize("seed", range(6))
def test_P01_bad_words_equal_transformers_and_the_twin(seed: int) -> None:
    rng = np.random.default_rng(seed)
    histories = [(rng.integers(0, 3, 5 + n).tolist(), rng.integers(0, 3, n % 4).tolist()) for n in range(6)]
    params = [SamplingParams(temperature=0.0, bad_words_ids=words) for words in WORDS]
    params.append(SamplingParams(temperature=0.0))
    rig = Rig(params, VOCAB_SIZE, histories)
    logits = torch.from_numpy(rng.normal(size=(6, VOCAB_SIZE))).float()
    edited = apply(rig, logits, [len(prompt) + len(outputs) for prompt, outputs in histories])
    assert_equals_twin(rig, logits, edited)
    assert torch.equal(edited[5], logits[5])
    for slot, words in enumerate(WORDS):
        processor = generation.NoBadWordsLogitsProcessor([list(word) for word in words])
        context = torch.tensor([[*histories[slot][0], *histories[slot][1]]])
        assert torch.equal(processor(context, logits[slot : slot + 1])[0], edited[slot])


def test_P01_bad_words_longer_than_the_context_or_of_another_vocabulary_ban_nothing() -> None:
    words = ((1, 1, 1, 4), (10**6, 5), (2, 10**6), (1, 1, 6))
    rig = Rig([SamplingParams(bad_words_ids=words)] * 2, VOCAB_SIZE, [([1, 1], []), ([1], [])])
    edited = apply(rig, torch.zeros(2, VOCAB_SIZE), [2, 1])
    assert edited.isneginf().nonzero().tolist() == [[0, 6]]


@pytest.mark.parametrize("allowed", [(3,), (7, 3, 3, 29), tuple(range(VOCAB_SIZE)), (4, 10**6)])
def test_P01_allowed_ids_equal_transformers_suppression_of_the_others(allowed: tuple[int, ...]) -> None:
    params = [SamplingParams(temperature=0.0, allowed_token_ids=allowed), SamplingParams(temperature=0.0)]
    rig = Rig(params, VOCAB_SIZE, [([1], []), ([1], [])])
    logits = torch.randn(2, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    edited = apply(rig, logits, [1, 1])
    others = [token for token in range(VOCAB_SIZE) if token not in allowed]
    expected = logits[:1]
    if others:
        expected = generation.SuppressTokensLogitsProcessor(others)(torch.tensor([[1]]), expected)
    assert torch.equal(edited, torch.cat([expected, logits[1:]]))


def test_P01_a_row_whose_every_id_is_banned_is_seen_and_hurts_nobody() -> None:
    params = [
        SamplingParams(temperature=1.0, allowed_token_ids=(5,), bad_words_ids=((5,),), seed=1),
        SamplingParams(temperature=0.0, allowed_token_ids=(10**6,)),
        SamplingParams(temperature=1.0, allowed_token_ids=(6,), seed=1),
    ]
    rig = Rig(params, VOCAB_SIZE, [([1], [])] * 3)
    sampled = rig.sample(torch.zeros(3, VOCAB_SIZE), range(3))
    assert sampled.best_R.tolist() == [-math.inf, -math.inf, 0.0]
    assert sampled.ids_R[2] == 6 and all(0 <= token < VOCAB_SIZE for token in sampled.ids_R.tolist())


@pytest.mark.parametrize("typical_p", [0.05, 0.2, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0, 12.0])
def test_P01_typical_p_equals_transformers(typical_p: float, spread: float) -> None:
    num, size = 40, 200
    logits = torch.randn(1, size, generator=torch.Generator().manual_seed(int(10 * spread))) * spread
    warped = generation.TypicalLogitsWarper(typical_p)(torch.tensor([[1]]), logits.double())
    u = uniforms(np.arange(num, dtype=np.uint64), np.zeros(num, np.int64), np.zeros(num, np.int64))
    drawn = draw(logits.repeat(num, 1), draws_of(u, typical_p=typical_p))
    values, ids = warped.sort(dim=1, descending=True, stable=True)
    expected = ids[0][torch.searchsorted(values[0].softmax(0).cumsum(0), torch.from_numpy(u), right=True)]
    assert drawn.tolist() == expected.tolist()


@pytest.mark.parametrize("seed", range(4))
def test_P01_typical_p_behind_every_other_cut_equals_transformers(seed: int) -> None:
    """In its order: temperature, top-k, top-p, min-p, typical-p."""
    params = SamplingParams(temperature=1.7, top_k=60, top_p=0.9, min_p=0.02, typical_p=0.6, seed=seed)
    rig = Rig([params], 300, [([1], [])])
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(seed)) * 2
    warped, context = logits.double(), torch.tensor([[1]])
    for processor in (
        generation.TemperatureLogitsWarper(1.7),
        generation.TopKLogitsWarper(60),
        generation.TopPLogitsWarper(0.9),
        generation.MinPLogitsWarper(0.02),
        generation.TypicalLogitsWarper(0.6),
    ):
        warped = processor(context, warped)
    values, ids = warped.sort(dim=1, descending=True, stable=True)
    for length in range(1, 40):
        rows = SamplingRows(np.array([0]), np.array([length]))
        u = per_row.uniform(seed, 0, length)
        expected = ids[0][torch.searchsorted(values[0].softmax(0).cumsum(0), u, right=True)]
        assert rig.sampler.sample(logits.clone(), rows).ids_R.tolist() == [int(expected)]


def test_P03_rows_ranked_by_best_of_give_log_probabilities() -> None:
    sampler = Sampler(3, torch.zeros((3, 4), dtype=torch.int32), 300)
    for slot, options in enumerate(({"best_of": 2}, {"n": 2}, {"best_of": 2, "logprobs": 3})):
        sampler.put(slot, SamplingParams(**options), ONE_ID)  # type: ignore[arg-type]
    assert sampler.columns.logprobs.tolist() == [0, -1, 3]
