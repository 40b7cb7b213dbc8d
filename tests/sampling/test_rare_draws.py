"""Top-n-sigma, XTC, mirostat and n-grams: against plain twins of llama.cpp's samplers and transformers' processor."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import generation

from octavo.core.drafts import allows
from octavo.core.request import Request, SamplingParams
from octavo.errors import InvalidRequestError
from octavo.sampling.columns import SamplingRows, SequenceIds
from octavo.sampling.mirostat import _logarithm
from octavo.sampling.sampler import Sampler
from tests.sampling import per_row
from tests.sampling.test_sampling import Rig

VOCAB_SIZE = 80


def logits_of(seed: int, rows: int = 1, size: int = VOCAB_SIZE, spread: float = 2.0) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * spread


def ids_of(num: int, start: int = 1, **more: Any) -> SequenceIds:
    known = np.arange(start, start + num, dtype=np.int64)
    return SequenceIds(known[:1], known[1:], **more)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_P01_no_repeated_ngrams_equal_transformers(size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    params = [SamplingParams(temperature=0.0, no_repeat_ngram_size=size), SamplingParams(temperature=0.0)] * 3
    histories = [(rng.integers(0, 3, 1 + 4 * slot).tolist(), rng.integers(0, 3, slot).tolist()) for slot in range(6)]
    rig = Rig(params, VOCAB_SIZE, histories)
    rig.ids[0, 5:] = 7  # what a buffer holds after the known ids does not matter
    logits = logits_of(seed, 6)
    edited, rows = logits.clone(), SamplingRows(np.arange(6), np.array([sum(map(len, each)) for each in histories]))
    for processor, chosen in rig.processors.edits(rows):
        processor.apply(edited, rows, chosen)
    for slot, (prompt, outputs) in enumerate(histories):
        ids = torch.tensor([prompt + outputs])
        expected = logits[slot : slot + 1]
        if slot % 2 == 0 and ids.shape[1] >= size:
            expected = generation.NoRepeatNGramLogitsProcessor(size)(ids, expected.clone())
        assert torch.equal(edited[slot], expected[0]), slot


@pytest.mark.parametrize("options", [
    {"top_n_sigma": 1.0}, {"top_n_sigma": 0.3, "temperature": 5.0}, {"xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"xtc_probability": 1.0, "xtc_threshold": 0.02, "min_p": 0.05},
    {"top_n_sigma": 2.0, "xtc_probability": 0.3, "top_k": 9},
])  # fmt: skip
def test_P01_rare_draws_equal_their_twin(options: dict[str, Any]) -> None:
    """400 draws, each at its own position, equal those of the twin."""
    params = SamplingParams(**{"temperature": 1.5, "seed": 5, **options})
    sampler = Sampler(1, torch.zeros((1, 8), dtype=torch.int32), VOCAB_SIZE)
    sampler.put(0, params, ids_of(1))
    logits, positions = logits_of(3), np.arange(1, 401)
    rows = SamplingRows(np.zeros(400, dtype=np.int64), positions)
    drawn = sampler.sample(logits.repeat(400, 1), rows).ids_R.tolist()
    values = logits[0].tolist()
    expected = [
        per_row.pick(values, params, per_row.uniform(5, 0, at), per_row.xtc_uniform(5, 0, at))
        for at in positions.tolist()
    ]
    assert drawn == expected and len(Counter(drawn)) > 1


RARE = [
    {"typical_p": 0.3}, {"typical_p": 0.95, "top_k": 30}, {"top_n_sigma": 0.8, "top_p": 0.9},
    {"xtc_probability": 1.0, "xtc_threshold": 0.1}, {"xtc_probability": 0.6, "xtc_threshold": 0.01, "typical_p": 0.9},
    {"top_n_sigma": 3.0, "typical_p": 0.7, "xtc_probability": 1.0, "xtc_threshold": 0.04, "min_p": 0.01, "top_k": 50},
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 80, 700])
def test_P01_rare_draws_of_rows_together_equal_their_twin(size: int) -> None:
    """Rows of all kinds in one call; logits with equal values, banned ids, and one far from the others."""
    count, rng = 90, np.random.default_rng(size)
    logits = logits_of(size, count, size, 3.0)
    logits[::3] = logits[::3].round(decimals=1)
    logits[1::3].masked_fill_(torch.from_numpy(rng.random((30, size)) < 0.5), -math.inf)
    logits[:, rng.integers(size)] = 1.25
    logits[5, 0] = -1e6
    sampler, expected = Sampler(count, torch.zeros((count, 8), dtype=torch.int32), size), []
    for slot in range(count):
        params = SamplingParams(temperature=float(rng.choice([0.5, 1.0, 2.0])), seed=slot, **RARE[slot % 6])
        sampler.put(slot, params, ids_of(1))
        numbers = per_row.uniform(slot, 0, 3), per_row.xtc_uniform(slot, 0, 3)
        expected.append(per_row.pick(logits[slot].tolist(), params, *numbers))
    rows = SamplingRows(np.arange(count), np.full(count, 3))
    assert sampler.sample(logits.clone(), rows).ids_R.tolist() == expected


def test_the_logarithm_is_that_of_a_float64() -> None:
    x = torch.cat((torch.arange(1, 3000), 2 ** torch.arange(62), torch.randint(1, 2**53, (3000,))))
    expected = torch.tensor([math.log(number) for number in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(_logarithm(x), expected, atol=2e-16, rtol=5e-16)


def test_P01_xtc_leaves_out_all_top_choices_but_the_least_likely() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.06, 0.04]]).log()
    sampler = Sampler(3, torch.zeros((3, 8), dtype=torch.int32), 5)
    options = [{"xtc_threshold": 0.1}, {"xtc_threshold": 0.35}, {"xtc_threshold": 0.6}]
    for slot, one in enumerate(options):
        sampler.put(slot, SamplingParams(xtc_probability=1.0, seed=slot, **one), ids_of(1))  # type: ignore[arg-type]
    seen = [set[int](), set[int](), set[int]()]
    for position in range(1, 400):
        ids = sampler.sample(logits.repeat(3, 1), SamplingRows(np.arange(3), np.full(3, position))).ids_R.tolist()
        for slot, token in enumerate(ids):
            seen[slot].add(token)
    assert seen == [{2, 3, 4}, {0, 1, 2, 3, 4}, {0, 1, 2, 3, 4}]


def mirostat_run(sampler: Sampler, slots: list[int], logits: Tensor, start: int) -> list[list[int]]:
    """Draw a token for each slot at each of the positions that `logits` [positions, slots, vocabulary] has."""
    drawn: list[list[int]] = [[] for _ in slots]
    for step, each in enumerate(logits):
        rows = SamplingRows(np.asarray(slots), np.full(len(slots), start + step))
        for place, token in enumerate(sampler.sample(each.clone(), rows).ids_R.tolist()):
            drawn[place].append(token)
    return drawn


MIROSTAT = [
    SamplingParams(mirostat=2, seed=1),
    SamplingParams(mirostat=2, mirostat_tau=2.0, mirostat_eta=0.5, temperature=2.0, top_k=1, top_p=0.1, seed=2),
    SamplingParams(mirostat=2, mirostat_tau=0.0, mirostat_eta=1.0, xtc_probability=1.0, seed=3),
    SamplingParams(seed=4),
]


def test_P01_mirostat_equals_llama_cpp() -> None:
    steps, count = 150, len(MIROSTAT)
    logits = torch.stack([logits_of(100 + step, count) for step in range(steps)])
    sampler = Sampler(count, torch.zeros((count, 200), dtype=torch.int32), VOCAB_SIZE)
    for slot, params in enumerate(MIROSTAT):
        sampler.put(slot, params, ids_of(1, request_id=f"r{slot}"))
    drawn = mirostat_run(sampler, list(range(count)), logits, 1)
    for slot, params in enumerate(MIROSTAT):
        if params.mirostat:
            twin = per_row.Mirostat(params)
            seed = params.seed or 0
            expected = [
                twin.pick(logits[step, slot].tolist(), per_row.uniform(seed, 0, 1 + step)) for step in range(steps)
            ]
            assert drawn[slot] == expected, slot


def test_P02_mirostat_is_the_same_alone_and_goes_on_after_a_preemption() -> None:
    logits = torch.stack([logits_of(step, 3) for step in range(90)])
    together = Sampler(3, torch.zeros((3, 100), dtype=torch.int32), VOCAB_SIZE)
    for slot in range(3):
        together.put(slot, MIROSTAT[slot], ids_of(1, request_id=f"r{slot}"))
    expected = mirostat_run(together, [0, 1, 2], logits, 1)
    alone = Sampler(2, torch.zeros((2, 100), dtype=torch.int32), VOCAB_SIZE)
    for index in range(3):
        alone.put(0, MIROSTAT[index], ids_of(1, request_id=f"r{index}"))
        first = mirostat_run(alone, [0], logits[:70, index : index + 1], 1)[0]
        alone.release(0)
        alone.put(0, MIROSTAT[3], ids_of(1, request_id="another"))
        alone.put(1, MIROSTAT[index], ids_of(68, request_id=f"r{index}"))  # three steps are repeated
        rest = mirostat_run(alone, [1], logits[67:, index : index + 1], 68)[0]
        assert first[:67] + rest == expected[index]
        alone.mirostat.forget([f"r{index}"])
        assert not alone.mirostat._bounds


def test_P03_mirostat_of_greedy_rows_is_greedy_and_holds_nothing() -> None:
    sampler = Sampler(1, torch.zeros((1, 9), dtype=torch.int32), VOCAB_SIZE)
    sampler.put(0, SamplingParams(mirostat=2, temperature=0.0), ids_of(1, request_id="r"))
    logits = logits_of(1)
    assert sampler.sample(logits.clone(), SamplingRows(np.zeros(1, int), np.ones(1, int))).ids_R[0] == logits.argmax()
    assert not sampler.mirostat._bounds


def test_P03_rows_without_usable_logits_are_reported_with_rare_draws_too() -> None:
    sampler = Sampler(2, torch.zeros((2, 9), dtype=torch.int32), VOCAB_SIZE)
    sampler.put(0, MIROSTAT[0], ids_of(1, request_id="r"))
    sampler.put(1, SamplingParams(top_n_sigma=1.0, xtc_probability=1.0), ids_of(1))
    rows = SamplingRows(np.arange(2), np.ones(2, int))
    for bad in (math.nan, -math.inf):
        sampled = sampler.sample(torch.full((2, VOCAB_SIZE), bad), rows)
        assert not sampled.best_R.isfinite().any() and all(0 <= each < VOCAB_SIZE for each in sampled.ids_R.tolist())


def test_mirostat_version_1_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError, match="mirostat is 1; give 2"):
        SamplingParams(mirostat=1)
    with pytest.raises(InvalidRequestError, match="give top_n_sigma"):
        SamplingParams(nsigma=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(("options", "is_allowed"), [
    ({"mirostat": 2}, False), ({"top_n_sigma": 1.0}, True), ({"xtc_probability": 0.5}, True),
    ({"no_repeat_ngram_size": 3}, True),
])  # fmt: skip
def test_P02_drafts_are_proposed_where_draws_depend_on_ids_alone(options: dict[str, Any], is_allowed: bool) -> None:
    request = Request("r", None, SamplingParams(**options), 0.0, 4)
    assert allows(request) is is_allowed
