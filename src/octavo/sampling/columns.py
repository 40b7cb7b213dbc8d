"""Sampling parameters as one host column per parameter, one entry per executor slot.

Owns: the columns, and which slots need which edits. Does not: touch logits or the device.
Invariants: a slot's entries are those of its last `put`; decisions about a step's rows are made with numpy on the
host, so that nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.core.request import SamplingParams

MIN_TOP_P = 1e-9  # keeps the most likely token, as a top_p of 0 should
NO_LOGPROBS = -1
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(slots=True)
class Words:
    """Banned id sequences: their last ids, the sizes of the prefixes before these, and the prefixes, padded with -1."""

    last_ids: Ints
    prefix_sizes: Ints
    prefixes: Ints

    @classmethod
    def of(cls, words: Sequence[Sequence[int]]) -> Words:
        """Lay out non-empty sequences."""
        sizes = np.asarray([len(word) - 1 for word in words], dtype=np.int64)
        prefixes = np.full((len(words), int(sizes.max(initial=0))), -1, dtype=np.int64)
        for line, word in zip(prefixes, words, strict=True):
            line[len(line) - len(word) + 1 :] = word[:-1]
        return cls(np.asarray([word[-1] for word in words], dtype=np.int64), sizes, prefixes)


@dataclass(slots=True)
class SamplingRows:
    """The rows of one step that sample: their slots, and the index of each sampled token in its sequence."""

    slots: Ints
    positions: Ints


class SamplingColumns:
    """Parameters of all slots. Scalars are columns; the few variable-length parameters are dicts by slot."""

    def __init__(self, num_slots: int) -> None:
        self.temperature: Floats = np.zeros(num_slots)
        self.inverse_temperature: NDArray[np.float32] = np.zeros(num_slots, dtype=np.float32)  # 0 = the best one
        self.floor: NDArray[np.float32] = np.full(num_slots, -np.inf, dtype=np.float32)  # of scaled logits: log(min_p)
        self.top_k: Ints = np.zeros(num_slots, dtype=np.int64)
        self.top_p: Floats = np.ones(num_slots)
        self.min_p: Floats = np.zeros(num_slots)
        self.typical_p: Floats = np.ones(num_slots)
        self.presence: Floats = np.zeros(num_slots)
        self.frequency: Floats = np.zeros(num_slots)
        self.repetition: Floats = np.ones(num_slots)
        self.seed: NDArray[np.uint64] = np.zeros(num_slots, dtype=np.uint64)
        self.choice: Ints = np.zeros(num_slots, dtype=np.int64)
        self.num_prompt: Ints = np.zeros(num_slots, dtype=np.int64)
        self.min_end: Ints = np.zeros(num_slots, dtype=np.int64)  # EOS and stop ids are barred below this position
        self.logprobs: Ints = np.full(num_slots, NO_LOGPROBS, dtype=np.int64)
        self.prompt_logprobs: Ints = np.full(num_slots, NO_LOGPROBS, dtype=np.int64)
        self.num_candidates: Ints = np.zeros(num_slots, dtype=np.int64)  # that a beam's row must return
        self.dry_multiplier: Floats = np.zeros(num_slots)
        self.dry_base: Floats = np.ones(num_slots)
        self.dry_allowed: Ints = np.ones(num_slots, dtype=np.int64)
        self.dry_range: Ints = np.zeros(num_slots, dtype=np.int64)  # 0 = the whole context
        self.has_bias: NDArray[np.bool_] = np.zeros(num_slots, dtype=np.bool_)
        self.has_words: NDArray[np.bool_] = np.zeros(num_slots, dtype=np.bool_)
        self.has_allowed: NDArray[np.bool_] = np.zeros(num_slots, dtype=np.bool_)
        self.has_grammar: NDArray[np.bool_] = np.zeros(num_slots, dtype=np.bool_)  # its rows sample only with a mask
        self.has_edits: NDArray[np.bool_] = np.zeros(num_slots, dtype=np.bool_)  # any of these, DRY or a penalty
        self.wants_more: NDArray[np.bool_] = np.zeros(num_slots, dtype=np.bool_)  # than an id from unedited logits
        self.bias: dict[int, tuple[Ints, Floats]] = {}
        self.barred: dict[int, Ints] = {}
        self.words: dict[int, Words] = {}
        self.allowed: dict[int, Ints] = {}
        self.breakers: dict[int, Ints] = {}

    def put(
        self, slot: int, params: SamplingParams, *, choice: int, num_prompt: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        """Set a slot's entries. `params.seed` None counts as 0: the front draws seeds."""
        self.temperature[slot] = params.temperature
        # a temperature that rounds to 0 in float32 would divide by 0
        divisor = np.maximum(np.float32(params.temperature), np.finfo(np.float32).tiny)
        self.inverse_temperature[slot] = np.float32(1) / divisor if params.temperature > 0 else 0
        self.floor[slot] = math.log(params.min_p) if params.min_p > 0 else -math.inf
        self.top_k[slot] = max(0, params.top_k)
        self.top_p[slot] = max(params.top_p, MIN_TOP_P)
        self.min_p[slot] = params.min_p
        self.typical_p[slot] = params.typical_p
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        self.repetition[slot] = params.repetition_penalty
        self.seed[slot] = np.uint64((params.seed or 0) & (2**64 - 1))
        self.choice[slot] = choice
        self.num_prompt[slot] = num_prompt
        self.min_end[slot] = num_prompt + params.min_tokens if params.min_tokens else 0
        self.logprobs[slot] = NO_LOGPROBS if params.num_logprobs is None else params.num_logprobs
        self.prompt_logprobs[slot] = NO_LOGPROBS if params.prompt_logprobs is None else params.prompt_logprobs
        self.dry_multiplier[slot] = params.dry_multiplier
        self.dry_base[slot] = params.dry_base
        self.dry_allowed[slot] = params.dry_allowed_length
        self.dry_range[slot] = params.dry_range
        self.has_bias[slot] = bool(params.logit_bias)
        self.has_words[slot] = bool(params.bad_words_ids)
        self.has_allowed[slot] = bool(params.allowed_token_ids)
        self.has_grammar[slot] = bool(params.grammar)
        has_list = self.has_bias[slot] or self.has_words[slot] or self.has_allowed[slot]
        self.has_edits[slot] = has_list or params.dry_multiplier > 0 or self.has_penalty(np.asarray([slot]))[0]
        is_watched = params.num_logprobs is not None or params.typical_p < 1 or params.min_tokens > 0
        self.wants_more[slot] = self.has_edits[slot] or is_watched
        stops = params.stop_token_ids if params.ignore_eos else (*eos_token_ids, *params.stop_token_ids)
        # enough that beam_width candidates are left if each beam's best ones end it
        self.num_candidates[slot] = max(2, 1 + len(set(stops))) * params.beam_width
        self._put_lists(slot, params, stops)

    def _put_lists(self, slot: int, params: SamplingParams, stops: Sequence[int]) -> None:
        for lists in (self.bias, self.barred, self.words, self.allowed, self.breakers):
            lists.pop(slot, None)
        if params.logit_bias:
            ids, values = zip(*params.logit_bias, strict=True)
            self.bias[slot] = np.asarray(ids, dtype=np.int64), np.asarray(values, dtype=np.float64)
        if params.min_tokens:
            self.barred[slot] = _distinct(stops)
        if params.bad_words_ids:
            self.words[slot] = Words.of(params.bad_words_ids)
        if params.allowed_token_ids:
            self.allowed[slot] = _distinct(params.allowed_token_ids)
        if params.dry_multiplier:
            self.breakers[slot] = _distinct(params.dry_breaker_ids)

    def keep_below(self, slot: int, vocab_size: int) -> None:
        """Drop a slot's ids that the model does not have: a stop id of another vocabulary can never be sampled."""
        for lists in (self.barred, self.allowed, self.breakers):
            if slot in lists:
                lists[slot] = lists[slot][lists[slot] < vocab_size]
        if slot in self.bias:
            ids, values = self.bias[slot]
            self.bias[slot] = ids[ids < vocab_size], values[ids < vocab_size]
        if slot in self.words:
            words = self.words[slot]
            fits = (words.last_ids < vocab_size) & (words.prefixes < vocab_size).all(axis=1)
            self.words[slot] = Words(words.last_ids[fits], words.prefix_sizes[fits], words.prefixes[fits])

    def has_penalty(self, slots: Ints) -> NDArray[np.bool_]:
        """Return which of the slots have a presence, frequency or repetition penalty."""
        on: NDArray[np.bool_] = (
            (self.presence[slots] != 0) | (self.frequency[slots] != 0) | (self.repetition[slots] != 1)
        )
        return on

    def bars(self, rows: SamplingRows) -> NDArray[np.bool_]:
        """Return which rows are still below their min_tokens."""
        barred: NDArray[np.bool_] = rows.positions < self.min_end[rows.slots]
        return barred


def _distinct(ids: Sequence[int]) -> Ints:
    return np.asarray(sorted(set(ids)), dtype=np.int64)
