"""Sampling parameters as one host column per parameter, one entry per executor slot.

Owns: the columns, and which slots need which treatment. Does not: touch logits or the device.
Invariants: a slot's entries are those of its last `put`; a step's questions are answered by numpy over the
rows of that step, so nothing asks the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.core.request import SamplingParams

NO_LOGPROBS = -1
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(slots=True)
class SamplingRows:
    """The rows of one step that sample: their slots, and the index each sampled token will have in its sequence."""

    slots: Ints
    positions: Ints


class SamplingColumns:
    """Parameters of all slots. Scalars are columns; the few variable-length ones are kept by slot."""

    def __init__(self, num_slots: int) -> None:
        self.temperature: Floats = np.zeros(num_slots)
        self.top_k: Ints = np.zeros(num_slots, dtype=np.int64)
        self.top_p: Floats = np.ones(num_slots)
        self.min_p: Floats = np.zeros(num_slots)
        self.presence: Floats = np.zeros(num_slots)
        self.frequency: Floats = np.zeros(num_slots)
        self.repetition: Floats = np.ones(num_slots)
        self.seed: NDArray[np.uint64] = np.zeros(num_slots, dtype=np.uint64)
        self.choice: Ints = np.zeros(num_slots, dtype=np.int64)
        self.num_prompt: Ints = np.zeros(num_slots, dtype=np.int64)
        self.min_end: Ints = np.zeros(num_slots, dtype=np.int64)  # EOS and stop ids are barred below this position
        self.logprobs: Ints = np.full(num_slots, NO_LOGPROBS, dtype=np.int64)
        self.prompt_logprobs: Ints = np.full(num_slots, NO_LOGPROBS, dtype=np.int64)
        self.num_candidates: Ints = np.zeros(num_slots, dtype=np.int64)  # that a beam's row must give
        self.has_bias: NDArray[np.bool_] = np.zeros(num_slots, dtype=np.bool_)
        self.bias: dict[int, tuple[Ints, Floats]] = {}
        self.barred: dict[int, Ints] = {}

    def put(
        self, slot: int, params: SamplingParams, *, choice: int, num_prompt: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        """Set a slot's entries. `params.seed` None counts as 0: the front draws seeds."""
        self.temperature[slot] = params.temperature
        self.top_k[slot] = max(0, params.top_k)
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        self.repetition[slot] = params.repetition_penalty
        self.seed[slot] = np.uint64((params.seed or 0) & (2**64 - 1))
        self.choice[slot] = choice
        self.num_prompt[slot] = num_prompt
        self.min_end[slot] = num_prompt + params.min_tokens if params.min_tokens else 0
        self.logprobs[slot] = NO_LOGPROBS if params.num_logprobs is None else params.num_logprobs
        self.prompt_logprobs[slot] = NO_LOGPROBS if params.prompt_logprobs is None else params.prompt_logprobs
        self.has_bias[slot] = bool(params.logit_bias)
        self.bias.pop(slot, None)
        self.barred.pop(slot, None)
        if params.logit_bias:
            ids, values = zip(*params.logit_bias, strict=True)
            self.bias[slot] = np.asarray(ids, dtype=np.int64), np.asarray(values, dtype=np.float64)
        stops = sorted(set(params.stop_token_ids if params.ignore_eos else (*eos_token_ids, *params.stop_token_ids)))
        # so many that beam_width are left when every beam's best ones end it
        self.num_candidates[slot] = max(2, 1 + len(stops)) * params.beam_width
        if params.min_tokens:
            self.barred[slot] = np.asarray(stops, dtype=np.int64)

    def keep_below(self, slot: int, vocab_size: int) -> None:
        """Leave out ids that the model does not have: a stop id of another vocabulary can never be sampled."""
        if slot in self.barred:
            self.barred[slot] = self.barred[slot][self.barred[slot] < vocab_size]
        if slot in self.bias:
            ids, values = self.bias[slot]
            self.bias[slot] = ids[ids < vocab_size], values[ids < vocab_size]

    def has_penalty(self, slots: Ints) -> NDArray[np.bool_]:
        """Which of the slots have a presence, frequency or repetition penalty."""
        on: NDArray[np.bool_] = (
            (self.presence[slots] != 0) | (self.frequency[slots] != 0) | (self.repetition[slots] != 1)
        )
        return on

    def bars(self, rows: SamplingRows) -> NDArray[np.bool_]:
        """Which rows are still below their min_tokens."""
        barred: NDArray[np.bool_] = rows.positions < self.min_end[rows.slots]
        return barred
