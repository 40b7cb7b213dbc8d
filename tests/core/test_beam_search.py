"""Beam bookkeeping against transformers' generate, on tiny random models, and its edges."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from octavo.core.beam_search import BeamGroup
from octavo.core.request import SamplingParams

VOCAB_SIZE, NUM_PROMPT = 24, 4


def tiny_model(seed: int) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, initializer_range=0.6, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def log_probs(model: Any, prompt: list[int], paths: Sequence[array[int]]) -> Tensor:
    """Of the next id behind each path, each computed in full."""
    logits = model(torch.tensor([[*prompt, *path] for path in paths])).logits[:, -1].float()
    return logits.log_softmax(-1)


def search(model: Any, prompt: list[int], group: BeamGroup) -> BeamGroup:
    """Run a search to its end, as the scheduler would."""
    paths = [array("i")]
    size = min(max(2, 1 + len(group.stop_ids)) * group.width, VOCAB_SIZE)
    while not group.is_over:
        log_probs_KV = log_probs(model, prompt, paths)
        if len(paths[0]) < group.params.min_tokens:
            log_probs_KV[:, sorted(group.stop_ids)] = -math.inf
        best = log_probs_KV.sort(dim=1, descending=True, stable=True)
        rows = zip(best.indices[:, :size].tolist(), best.values[:, :size].tolist(), strict=True)
        beams = group.advance(list(rows), paths)
        assert group.is_over == (not beams) and len(group.scores) == len(beams) <= group.width
        paths = [paths[parent] + array("i", [token]) for parent, token in beams]
    return group


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("stop_ids", [(), (3,), (3, 7, 11), (1, 2, 3, 4, 5, 6)])
@pytest.mark.parametrize("width", [2, 3, 5])
def test_P04_equal_to_transformers(width: int, stop_ids: tuple[int, ...], early_stopping: bool | str) -> None:
    for seed, length_penalty in enumerate((1.0, 0.0, -1.5, 2.0, 0.6)):
        model = tiny_model(seed)
        prompt = torch.randint(0, VOCAB_SIZE, (NUM_PROMPT,), generator=torch.Generator().manual_seed(seed)).tolist()
        max_tokens, min_tokens = 3 + 2 * seed, seed % 3 if stop_ids else 0
        expected = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, NUM_PROMPT, dtype=torch.long), do_sample=False,
            num_beams=width, num_return_sequences=width, length_penalty=length_penalty, early_stopping=early_stopping,
            eos_token_id=list(stop_ids) or None, pad_token_id=0, max_new_tokens=max_tokens,
            min_new_tokens=min_tokens or None, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        params = SamplingParams(
            beam_width=width, length_penalty=length_penalty, early_stopping=early_stopping, min_tokens=min_tokens
        )  # fmt: skip
        got = search(model, prompt, BeamGroup(params, max_tokens, frozenset(stop_ids))).best(width)
        assert len(got) == width
        lengths = (expected.beam_indices >= 0).sum(dim=1).tolist()
        ids = [
            row[NUM_PROMPT : NUM_PROMPT + size] for row, size in zip(expected.sequences.tolist(), lengths, strict=True)
        ]
        assert [one.token_ids.tolist() for one in got] == ids
        assert [one.score for one in got] == pytest.approx(expected.sequences_scores.tolist(), rel=1e-5)
        for one in got:
            at_limit = one.stop_token_id is None
            assert at_limit == (one.token_ids[-1] not in stop_ids) and (
                not at_limit or len(one.token_ids) == max_tokens
            )
            assert one.stop_token_id == (None if at_limit else one.token_ids[-1])
            assert one.score == pytest.approx(one.cumulative_logprob / len(one.token_ids) ** length_penalty, rel=1e-5)


def group_of(width: int, *, stop_ids: tuple[int, ...] = (0,), max_outputs: int = 8, **others: Any) -> BeamGroup:
    return BeamGroup(SamplingParams(beam_width=width, **others), max_outputs, frozenset(stop_ids))


def ended(group: BeamGroup) -> list[list[int]]:
    """The ids of the hypotheses that are kept."""
    return [one.token_ids.tolist() for one in group.best(9)]


def test_P04_only_the_first_width_may_end_and_the_others_fill_up() -> None:
    group = group_of(2)
    beams = group.advance([([1, 2, 0, 3], [-1.0, -2.0, -3.0, -4.0])], [array("i")])
    assert beams == [(0, 1), (0, 2)] and ended(group) == [] and group.scores == [-1.0, -2.0]
    paths = [array("i", [1]), array("i", [2])]
    beams = group.advance([([0, 4, 5, 6], [-0.5, -2.5, -4.0, -5.0]), ([7, 0, 8, 9], [-0.25, -0.5, -3.0, -6.0])], paths)
    assert ended(group) == [[1, 0]]  # [2, 0], at -2.5, is the third best
    assert beams == [(1, 7), (0, 4)] and group.scores == [-2.25, -3.5]
    (kept,) = group.best(2)
    assert kept.token_ids.tolist() == [1, 0] and kept.score == -0.75 and kept.cumulative_logprob == -1.5
    assert kept.stop_token_id == 0 and paths[0].tolist() == [1]


def test_P04_ties_go_to_the_earlier_beam_and_the_better_candidate() -> None:
    group = group_of(2)
    group.advance([([3, 4, 5, 6], [-1.0] * 4)], [array("i")])
    beams = group.advance([([8, 9], [-1.0, -1.0]), ([1, 2], [-1.0, -1.0])], [array("i", [3]), array("i", [4])])
    assert beams == [(0, 8), (0, 9)]


def test_P04_barred_ids_are_no_continuations() -> None:
    group = group_of(2, max_outputs=2)
    beams = group.advance([([5, 1, 2, 3], [-1.0, -math.inf, -math.inf, -math.inf])], [array("i")])
    assert beams == [(0, 5)] and not group.is_over
    beams = group.advance([([6, 1], [-1.0, -math.inf])], [array("i", [5])])
    assert group.is_over and beams == [] and ended(group) == [[5, 6]]
    nothing = group_of(2)
    assert nothing.advance([([1], [-math.inf])], [array("i")]) == [] and nothing.is_over and nothing.best(2) == []


def test_P04_one_output_and_extreme_penalties() -> None:
    group = group_of(3, max_outputs=1)
    beams = group.advance([([0, 1, 2, 3, 4, 5], [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0])], [array("i")])
    assert group.is_over and beams == [] and ended(group) == [[0], [1], [2]]
    has_stopped = [one.stop_token_id is not None for one in group.best(3)]
    assert has_stopped == [True, False, False]
    for penalty in (100.0, -100.0):
        group = group_of(1, length_penalty=penalty, early_stopping="never", max_outputs=10**6)
        assert group.score(-3.0, 10**5) <= 0.0 and group.score(-3.0, 1) == -3.0
        assert not math.isnan(group.score(0.0, 10**5))


def test_P04_a_stop_id_before_min_tokens_ends_nothing() -> None:
    group = group_of(1, max_outputs=4, min_tokens=1)
    assert group.advance([([0, 1], [-1.0, -2.0])], [array("i")]) == [(0, 0)] and ended(group) == []
    group.advance([([0, 1], [-1.0, -2.0])], [array("i", [0])])
    assert ended(group) == [[0, 0]] and group.best(1)[0].stop_token_id is not None
