"""Beam search over the hash-chain model, the slow way: every beam is a list of ids, every step looks at all of them.

Owns: `beam_reference`, after the rules of transformers' `_beam_search` (Hugging Face, generation/utils.py, version 5):
the best (1 + number of end ids, at least 2) * width continuations of a step are looked at; of its first `width`
those that end are kept if they are among the best `width` ended ones, by score / length ** length_penalty; the best
`width` that do not end go on. Does not: know plans or schedulers.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from octavo.core.request import SamplingParams, Span
from tests.hash_chain import FULL, Continuation, candidates, end_ids

NEVER = -1.0e9


def _float32(value: float) -> float:
    return array("f", (value,))[0]


def _score(total: float, length: int, params: SamplingParams) -> float:
    return _float32(total / _float32(float(length) ** params.length_penalty))


def _worth_going_on(
    best: float, ended: list[tuple[float, list[int]]], params: SamplingParams, num_made: int, num_outputs: int
) -> bool:
    """Whether the best running beam may still beat the worst ended one."""
    longest = params.early_stopping == "never" and params.length_penalty > 0.0
    worst = ended[-1][0] if len(ended) == params.beam_width else NEVER
    return _score(best, num_outputs if longest else num_made, params) > worst


def beam_reference(
    prompt_ids: Sequence[int],
    num_outputs: int,
    vocab_size: int,
    eos: Sequence[int],
    params: SamplingParams,
    adapter_id: int = 0,
    *,
    windows: tuple[int, ...] = FULL,
    spans: Sequence[Span] = (),
) -> list[list[int]]:
    """The `n` best beams' outputs, best first."""
    width, ends, num_prompt = params.beam_width, end_ids(params, eos), len(prompt_ids)
    running = [(0.0, Continuation(prompt_ids, windows, adapter_id, spans))]
    ended: list[tuple[float, list[int]]] = []
    for num_made in range(1, num_outputs + 1):
        every = [
            (_float32(total + logprob), beam, token_id)
            for total, beam in running
            for logprob, token_id in candidates(beam.last_cell(), params, num_made - 1, vocab_size, eos)
        ]
        every.sort(key=lambda entry: -entry[0])
        looked_at = every[: max(2, 1 + len(ends)) * width]
        stops = [token_id in ends or num_made == num_outputs for _, _, token_id in looked_at]
        is_full = len(ended) == width and params.early_stopping is True
        for (total, beam, token_id), stop in list(zip(looked_at, stops, strict=True))[:width]:
            if stop and not is_full:
                ended.append((_score(total, num_made, params), [*beam.ids[num_prompt:], token_id]))
        ended = sorted(ended, key=lambda entry: -entry[0])[:width]
        going = [entry for entry, stop in zip(looked_at, stops, strict=True) if not stop][:width]
        if not going or (len(ended) == width and params.early_stopping is True):
            break
        running = [(total, beam.branch(token_id)) for total, beam, token_id in going]
        if not _worth_going_on(running[0][0], ended, params, num_made, num_outputs):
            break
    return [ids for _, ids in ended[: params.n]]
