"""Masks of ids: what is not allowed is never chosen, what is allowed keeps its bits, and other rows see nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from octavo.core.request import SamplingParams
from octavo.sampling.columns import SamplingRows
from octavo.sampling.processors import TokenMasks
from tests.sampling.test_sampling import Rig

VOCAB_SIZE = 77  # no multiple of 8
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 2.0, "seed": 1},
    {"temperature": 1.0, "seed": 2, "top_k": 3},
    {"temperature": 1.0, "seed": 3, "top_p": 0.5, "min_p": 0.1},
    {"temperature": 0.7, "seed": 4, "typical_p": 0.6},
    {"temperature": 1.0, "seed": 5, "presence_penalty": 1.5, "repetition_penalty": 1.4, "logprobs": 3},
    {"temperature": 1.0, "seed": 6, "logit_bias": ((3, 50.0), (70, -100.0)), "bad_words_ids": ((5,),)},
    {"temperature": 1.0, "seed": 7, "dry_multiplier": 1.0, "dry_allowed_length": 1},
]


def bits_of(allowed_RV: np.ndarray) -> np.ndarray:
    """Masks from booleans, one word at a time."""
    words = -(-allowed_RV.shape[1] // 32)
    bits = np.zeros((len(allowed_RV), words), dtype=np.uint32)
    for row, index in zip(*np.nonzero(allowed_RV), strict=True):
        bits[row, index // 32] |= np.uint32(1 << (index % 32))
    return bits.view(np.int32)


def make_rig(rng: np.random.Generator) -> Rig:
    histories = [(rng.integers(0, VOCAB_SIZE, 9).tolist(), rng.integers(0, VOCAB_SIZE, 4).tolist()) for _ in OPTIONS]
    return Rig([SamplingParams(**options) for options in OPTIONS], VOCAB_SIZE, histories)


def rows_of(rig: Rig) -> SamplingRows:
    return SamplingRows(np.arange(len(OPTIONS)), np.asarray([len(p) + len(o) for p, o in rig.histories]))


@pytest.mark.parametrize("seed", range(4))
def test_P06_what_is_not_allowed_is_never_chosen_whatever_else_is_asked(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rig = make_rig(rng)
    logits = torch.from_numpy(rng.normal(size=(len(OPTIONS), VOCAB_SIZE)) * 4).float()
    allowed = rng.random((len(OPTIONS), VOCAB_SIZE)) < 0.2
    allowed[:, 11] = True
    sampled = rig.sampler.sample(logits.clone(), rows_of(rig), TokenMasks(np.arange(len(OPTIONS)), bits_of(allowed)))
    ids = sampled.ids_R.tolist()
    assert all(allowed[row, token] for row, token in enumerate(ids))
    assert ids[0] == int(logits[0].masked_fill(~torch.from_numpy(allowed[0]), -torch.inf).argmax())
    assert torch.isfinite(sampled.best_R).all()


def test_P06_a_mask_equals_allowing_these_ids() -> None:
    rng = np.random.default_rng(9)
    logits = torch.from_numpy(rng.normal(size=(len(OPTIONS), VOCAB_SIZE)) * 4).float()
    allowed = rng.random((len(OPTIONS), VOCAB_SIZE)) < 0.3
    allowed[:, 7] = True
    rig = make_rig(np.random.default_rng(1))
    masked = rig.sampler.sample(logits.clone(), rows_of(rig), TokenMasks(np.arange(len(OPTIONS)), bits_of(allowed)))
    listed = [
        SamplingParams(**options, allowed_token_ids=tuple(np.flatnonzero(row).tolist()))
        for options, row in zip(OPTIONS, allowed, strict=True)
    ]
    twin = Rig(listed, VOCAB_SIZE, make_rig(np.random.default_rng(1)).histories)
    assert masked.ids_R.tolist() == twin.sampler.sample(logits.clone(), rows_of(twin)).ids_R.tolist()


def test_P06_rows_without_a_mask_are_what_they_are_without_masked_company() -> None:
    rng = np.random.default_rng(3)
    logits = torch.from_numpy(rng.normal(size=(len(OPTIONS), VOCAB_SIZE)) * 4).float()
    held = np.asarray([1, 4, 6])
    allowed = rng.random((len(held), VOCAB_SIZE)) < 0.3
    allowed[:, 7] = True
    rig = make_rig(np.random.default_rng(1))
    free = rig.sampler.sample(logits.clone(), rows_of(rig)).ids_R.tolist()
    rig = make_rig(np.random.default_rng(1))
    mixed = rig.sampler.sample(logits.clone(), rows_of(rig), TokenMasks(held, bits_of(allowed))).ids_R.tolist()
    assert [mixed[row] for row in range(len(OPTIONS)) if row not in held] == [
        free[row] for row in range(len(OPTIONS)) if row not in held
    ]
    assert all(allowed[place, mixed[row]] for place, row in enumerate(held))


def test_P06_log_probabilities_are_those_before_the_mask() -> None:
    rig = Rig([SamplingParams(temperature=0.0, logprobs=2)], VOCAB_SIZE, [([1, 2], [])])
    logits = torch.linspace(0, 3, VOCAB_SIZE)[None]
    allowed = np.zeros((1, VOCAB_SIZE), dtype=bool)
    allowed[0, 5] = True
    rows = SamplingRows(np.asarray([0]), np.asarray([2]))
    sampled = rig.sampler.sample(logits.clone(), rows, TokenMasks(np.asarray([0]), bits_of(allowed)))
    assert sampled.ids_R.tolist() == [5] and sampled.logprobs is not None
    [entry] = sampled.logprobs.entries()
    assert entry.rank == VOCAB_SIZE - 5 and entry.top_ids == (VOCAB_SIZE - 1, VOCAB_SIZE - 2)
    assert entry.logprob == pytest.approx(float(logits.log_softmax(1)[0, 5]))


def test_P06_nothing_left_and_numbers_that_are_none_are_told_apart() -> None:
    rig = Rig([SamplingParams(temperature=1.0, seed=1)] * 3, VOCAB_SIZE, [([1], [])] * 3)
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[1] = torch.nan
    allowed = np.ones((3, VOCAB_SIZE), dtype=bool)
    allowed[0] = False
    allowed[1, 8:] = False
    rows = SamplingRows(np.arange(3), np.ones(3, dtype=np.int64))
    best = rig.sampler.sample(logits, rows, TokenMasks(np.arange(3), bits_of(allowed))).best_R
    assert best[0] == -torch.inf and torch.isnan(best[1]) and best[2] == 0


def test_masks_of_some_rows_are_numbered_as_these() -> None:
    masks = TokenMasks(np.asarray([1, 4, 6]), np.asarray([[1], [4], [6]], dtype=np.int32))
    part = masks.among(np.asarray([0, 1, 6, 7]))
    assert part is not None and part.rows.tolist() == [1, 2] and part.bits_MW.tolist() == [[1], [6]]
    assert masks.among(np.asarray([0, 2, 9])) is None and masks.among(np.asarray([], dtype=np.int64)) is None
