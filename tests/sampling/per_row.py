"""The slow twin of the sampler: one row at a time, plain Python and float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from octavo.core.request import SamplingParams

MASK = 2**64 - 1


def splitmix64(state: int, index: int) -> int:
    z = (state + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def uniform(seed: int, choice: int, position: int) -> float:
    return (splitmix64(splitmix64(seed & MASK, choice), position) >> 16) * 2.0**-48


def edited(
    logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], outputs: Sequence[int], eos: Sequence[int]
) -> list[float]:
    values = [float(np.float32(x)) for x in logits]
    for token in {*prompt, *outputs}:
        repeated = (
            values[token] / params.repetition_penalty
            if values[token] > 0
            else values[token] * params.repetition_penalty
        )
        count = list(outputs).count(token)
        values[token] = repeated - params.frequency_penalty * count - params.presence_penalty * (count > 0)
    for token, bias in params.logit_bias:
        values[token] += bias
    if len(outputs) < params.min_tokens:
        for token in (*(() if params.ignore_eos else eos), *params.stop_token_ids):
            values[token] = -math.inf
    return values


def pick(values: Sequence[float], params: SamplingParams, u: float) -> int:
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    if params.temperature == 0:
        return order[0]
    best = values[order[0]]
    weights = [math.exp((value - best) / params.temperature) for value in values]
    if params.top_k <= 0 and params.top_p == 1:
        kept = [token for token in range(len(values)) if weights[token] >= params.min_p]
    else:
        kept = order[: params.top_k] if params.top_k > 0 else order
        mass, before, cut = params.top_p * sum(weights[token] for token in kept), 0.0, []
        for token in kept:
            if before >= mass:
                break
            cut.append(token)
            before += weights[token]
        kept = [token for token in cut if weights[token] >= params.min_p]
    target, running = u * sum(weights[token] for token in kept), 0.0
    for token in kept:
        running += weights[token]
        if running > target:
            return token
    return [token for token in kept if weights[token] > 0][-1]
