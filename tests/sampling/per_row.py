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


def xtc_uniform(seed: int, choice: int, position: int) -> float:
    return uniform((seed & MASK) ^ 0xD6E8FEB86659FD93, choice, position)


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
    context = [*prompt, *outputs]
    if params.dry_multiplier:
        for token, length in repeated_lengths(context, params.dry_range, params.dry_breaker_ids).items():
            if length >= params.dry_allowed_length:
                penalty = params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)
                values[token] -= min(penalty, 1e30)
    for token, bias in params.logit_bias:
        values[token] += bias
    return banned(values, params, prompt, outputs, eos)


def banned(
    values: list[float], params: SamplingParams, prompt: Sequence[int], outputs: Sequence[int], eos: Sequence[int]
) -> list[float]:
    context = [*prompt, *outputs]
    for *before, last in params.bad_words_ids:
        if last < len(values) and len(before) <= len(context) and context[len(context) - len(before) :] == before:
            values[last] = -math.inf
    if params.no_repeat_ngram_size:
        size = params.no_repeat_ngram_size
        for at in range(len(context) - size + 1):
            if context[at : at + size - 1] == context[len(context) - size + 1 :]:
                values[context[at + size - 1]] = -math.inf
    if len(outputs) < params.min_tokens:
        for token in (*(() if params.ignore_eos else eos), *params.stop_token_ids):
            values[token] = -math.inf
    if params.allowed_token_ids:
        values = [value if token in params.allowed_token_ids else -math.inf for token, value in enumerate(values)]
    return values


def repeated_lengths(context: Sequence[int], window: int, breakers: Sequence[int]) -> dict[int, int]:
    """DRY, word for word: for each id that followed an earlier copy of the context's end, the longest such copy."""
    context = list(context[-window:]) if window else list(context)
    longest: dict[int, int] = {}
    for end in range(len(context) - 1):
        length = 0
        while length <= end and context[end - length] == context[-1 - length] and context[end - length] not in breakers:
            length += 1
        follower = context[end + 1]
        if length and follower not in breakers:
            longest[follower] = max(length, longest.get(follower, 0))
    return longest


def pick(values: Sequence[float], params: SamplingParams, u: float, xtc_u: float = 1.0) -> int:
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    if params.temperature == 0:
        return order[0]
    best = values[order[0]]
    weights = [math.exp((value - best) / params.temperature) for value in values]
    if params.top_n_sigma > 0:
        weights = within_sigma(values, weights, params.top_n_sigma)
    has_xtc = xtc_u < params.xtc_probability
    if params.top_k <= 0 and params.top_p == params.typical_p == 1 and params.top_n_sigma <= 0 and not has_xtc:
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
    if params.typical_p < 1:
        kept = typical(kept, weights, params.typical_p)
    if has_xtc:
        kept = without_top_choices(kept, weights, params.xtc_threshold)
    return weighted(kept, weights, u)


def weighted(kept: Sequence[int], weights: Sequence[float], u: float) -> int:
    target, running = u * sum(weights[token] for token in kept), 0.0
    for token in kept:
        running += weights[token]
        if running > target:
            return token
    return [token for token in kept if weights[token] > 0][-1]


def within_sigma(values: Sequence[float], weights: Sequence[float], sigma: float) -> list[float]:
    """As llama.cpp's top-n-sigma: the deviation is that of all logits that are not banned."""
    valid = [value for value in values if value > -math.inf]
    mean = sum(valid) / len(valid)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in valid) / len(valid))
    bound = max(valid) - sigma * deviation
    return [weight if value >= bound else 0.0 for value, weight in zip(values, weights, strict=True)]


def without_top_choices(kept: Sequence[int], weights: Sequence[float], threshold: float) -> list[int]:
    """As llama.cpp's XTC, when its chance has come: `kept` is sorted, the best first."""
    total, last = sum(weights[token] for token in kept), 0
    for index, token in enumerate(kept):
        if weights[token] / total < threshold:
            break
        last = index
    return list(kept[last:])


class Mirostat:
    """llama.cpp's mirostat 2.0 of one sequence, token by token."""

    def __init__(self, params: SamplingParams) -> None:
        self.params, self.mu = params, 2 * params.mirostat_tau

    def pick(self, values: Sequence[float], u: float) -> int:
        order = sorted(range(len(values)), key=lambda token: (-values[token], token))
        weights = [math.exp((value - values[order[0]]) / self.params.temperature) for value in values]
        total = sum(weights)
        kept = [token for token in order if weights[token] > 0 and -math.log2(weights[token] / total) <= self.mu]
        kept = kept or order[:1]
        token = weighted(kept, weights, u)
        surprise = -math.log2(weights[token] / sum(weights[other] for other in kept))
        self.mu -= self.params.mirostat_eta * (surprise - self.params.mirostat_tau)
        return token


def typical(kept: Sequence[int], weights: Sequence[float], mass: float) -> list[int]:
    """Those of the kept ids whose information is nearest the entropy, until they have the mass; ties included."""
    total = sum(weights[token] for token in kept)
    information = {token: -math.log(weights[token] / total) for token in kept if weights[token] > 0}
    entropy = sum(weights[token] / total * bits for token, bits in information.items())
    distance = {token: abs(bits - entropy) for token, bits in information.items()}
    running = 0.0
    for token in sorted(distance, key=distance.__getitem__):
        running += weights[token] / total
        if running >= mass:
            return [other for other in kept if other in distance and distance[other] <= distance[token]]
    return [other for other in kept if other in distance]
