"""Beam candidates against transformers' processors on the log-softmax."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import generation

from octavo.core.request import SamplingParams
from octavo.sampling.columns import SamplingRows
from tests.sampling.test_sampling import EOS, Rig, make_histories


def rows_of(rig: Rig) -> SamplingRows:
    lengths = [len(prompt) + len(outputs) for prompt, outputs in rig.histories]
    return SamplingRows(np.arange(len(lengths)), np.asarray(lengths))


@pytest.mark.parametrize("seed", range(4))
def test_P04_candidates_are_those_of_transformers(seed: int) -> None:
    vocab_size = 50
    histories = make_histories(4, vocab_size, seed)
    met = histories[1][0][0]  # its bias is penalised, too
    params = [
        SamplingParams(beam_width=3, temperature=0.3, top_k=2, top_p=0.1),
        SamplingParams(beam_width=2, repetition_penalty=1.7, logit_bias=((met, 4.0), (met + 1, -3.0))),
        SamplingParams(beam_width=1, repetition_penalty=0.6, min_tokens=9, stop_token_ids=(5, 7)),
        SamplingParams(beam_width=2, bad_words_ids=((4,), (8,)), allowed_token_ids=tuple(range(3, 30))),
    ]
    rig = Rig(params, vocab_size, histories)
    logits = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    ids, logprobs = rig.sampler.candidates(logits, rows_of(rig))
    assert ids.shape == logprobs.shape == (4, 6)  # 2 * 3 for the first, which is the widest
    for slot, one in enumerate(params):
        prompt, outputs = rig.histories[slot]
        context = torch.tensor([prompt + outputs])
        expected = logits[slot : slot + 1].log_softmax(1)
        if one.logit_bias:
            bias = {(token,): value for token, value in one.logit_bias}
            expected = generation.SequenceBiasLogitsProcessor(bias)(context, expected)
        if one.repetition_penalty != 1:
            expected = generation.RepetitionPenaltyLogitsProcessor(one.repetition_penalty)(context, expected)
        if one.min_tokens:
            barred = [*EOS, *one.stop_token_ids]
            expected = generation.MinNewTokensLengthLogitsProcessor(len(prompt), one.min_tokens, barred)(
                context, expected
            )
        if one.bad_words_ids:
            expected = generation.NoBadWordsLogitsProcessor([[4], [8]])(context, expected)
        if one.allowed_token_ids:
            others = [token for token in range(vocab_size) if token not in one.allowed_token_ids]
            expected = generation.SuppressTokensLogitsProcessor(others)(context, expected)
        best = expected[0].sort(descending=True, stable=True)
        assert ids[slot].tolist() == best.indices[:6].tolist()
        assert torch.equal(logprobs[slot], best.values[:6])


def test_P04_ties_go_to_the_lower_id_and_a_small_vocabulary_is_given_whole() -> None:
    rig = Rig([SamplingParams(beam_width=4)], 5, [([1], [])])
    ids, logprobs = rig.sampler.candidates(torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0]]), rows_of(rig))
    assert ids.tolist() == [[1, 3, 0, 2, 4]] and logprobs.shape == (1, 5)


def test_P04_candidates_count_nothing_and_chosen_ids_are_counted_when_appended() -> None:
    params = [SamplingParams(beam_width=1, frequency_penalty=1.0), SamplingParams(beam_width=1)]
    rig = Rig(params, 20, [([1], []), ([1], [])])
    logits = torch.zeros(2, 20)
    logits[:, 9] = 1.5
    rows = rows_of(rig)
    for _ in range(3):
        ids, logprobs = rig.sampler.candidates(logits, rows)
        assert ids[:, 0].tolist() == [9, 9] and logprobs[0, 0] == logprobs[1, 0]
    for length, best in ((1, 9), (2, 0)):
        rig.ids[:, length] = 9
        rig.processors.append(np.array([0, 1]), np.array([9, 9]))
        rows = SamplingRows(np.arange(2), np.full(2, length + 1))
        assert rig.sampler.candidates(logits, rows)[0][:, 0].tolist() == [best, 9]


def test_P04_an_unusable_row_of_candidates_shows_in_its_first() -> None:
    rig = Rig([SamplingParams(beam_width=2)] * 2, 20, [([1], []), ([1], [])])
    logits = torch.zeros(2, 20)
    logits[0, 3] = float("nan")
    logprobs = rig.sampler.candidates(logits, rows_of(rig))[1]
    assert logprobs[:, 0].isfinite().tolist() == [False, True]
