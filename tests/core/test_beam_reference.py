"""The slow beam search over the fake model and the scheduler's bookkeeping of beams agree."""

from __future__ import annotations

import random
from array import array

import pytest
from tests.beam_reference import beam_reference
from tests.hash_chain import Continuation, candidates

from octavo.core.beam_search import BeamGroup
from octavo.core.request import SamplingParams

VOCAB_SIZE = 13


def bookkeeping(ids: list[int], num_outputs: int, eos: tuple[int, ...], params: SamplingParams) -> list[list[int]]:
    """Run BeamGroup on the candidates that the fake executor would give."""
    stops = frozenset((*params.stop_token_ids, *(() if params.ignore_eos else eos)))
    group, beams = BeamGroup(params, num_outputs, stops), [Continuation(ids)]
    while not group.is_over:
        given = []
        for beam in beams:
            num_made = len(beam.ids) - len(ids)
            ranked = candidates(beam.last_cell(), params, num_made, VOCAB_SIZE, eos)
            given.append(([token_id for _, token_id in ranked], [logprob for logprob, _ in ranked]))
        chosen = group.advance(given, [array("i", beam.ids[len(ids) :]) for beam in beams])
        beams = [beams[parent].branch(token_id) for parent, token_id in chosen]
    return [list(kept.token_ids) for kept in group.best(params.n)]


@pytest.mark.parametrize("seed", range(60))
def test_P04_the_slow_search_and_the_bookkeeping_agree(seed: int) -> None:
    rng = random.Random(seed)
    width = rng.choice((1, 2, 3, 4))
    params = SamplingParams(
        beam_width=width,
        n=rng.randrange(1, width + 1),
        max_tokens=rng.choice((1, 2, 5, 9)),
        length_penalty=rng.choice((1.0, 0.0, 2.0, -1.0)),
        early_stopping=rng.choice((True, False, "never")),
        min_tokens=rng.choice((0, 0, 1)),
        ignore_eos=rng.random() < 0.2,
    )
    ids = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 6))]
    eos = (2,) if rng.random() < 0.7 else (2, 3, 4)
    assert params.max_tokens is not None
    slow = beam_reference(ids, params.max_tokens, VOCAB_SIZE, eos, params)
    assert slow == bookkeeping(ids, params.max_tokens, eos, params) != []
