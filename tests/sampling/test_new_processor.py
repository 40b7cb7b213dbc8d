"""The sampling side of a new parameter is one class: its neutral value costs nothing, another edits only its rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.core.request import SamplingParams
from octavo.sampling import processors
from octavo.sampling.columns import Floats, Ints, SamplingRows, SequenceIds, upload
from octavo.sampling.processors import ALWAYS, OFF
from octavo.sampling.sampler import Sampler


class SpeakEven:
    """Subtract a number from the logits of odd ids. (The number is `length_penalty`, which nothing here reads.)"""

    def __init__(self, num_slots: int, ids_SW: Tensor, vocab_size: int) -> None:
        self._penalty: Floats = np.zeros(num_slots)

    def put(self, slot: int, params: SamplingParams, ids: SequenceIds) -> int:
        """Keep the slot's number; 1 is neutral."""
        self._penalty[slot] = params.length_penalty
        return OFF if params.length_penalty == 1 else ALWAYS

    def release(self, slot: int) -> None:
        """Keep nothing."""

    def apply(self, logits_RV: Tensor, rows: SamplingRows, chosen: Ints) -> None:
        """Subtract."""
        at, penalty = upload(logits_RV.device, chosen)[0], self._penalty[rows.slots[chosen]]
        logits_RV[at, 1::2] -= upload(logits_RV.device, penalty.astype(np.float32))[0][:, None]


def test_P01_a_new_parameter_is_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "PROCESSORS", (*processors.PROCESSORS, SpeakEven))
    params = [
        SamplingParams(temperature=0.0, logprobs=0),
        SamplingParams(temperature=0.0, length_penalty=5.0),
        SamplingParams(temperature=0.0, length_penalty=5.0, allowed_token_ids=(3, 7)),
        SamplingParams(temperature=0.0, logit_bias=((4, 1.0),)),
    ]
    sampler = Sampler(len(params), torch.zeros((len(params), 9), dtype=torch.int32), 50)
    for slot, one in enumerate(params):
        sampler.put(slot, one, SequenceIds(np.zeros(5, dtype=np.int64)))
    logits = torch.randn(len(params), 50, generator=torch.Generator().manual_seed(3))
    logits[:, 9] = 8.0
    edited = logits.clone()
    sampled = sampler.sample(edited, SamplingRows(np.arange(4), np.full(4, 5)))
    assert torch.equal(edited[0], logits[0])
    assert torch.equal(edited[1, 0::2], logits[1, 0::2]) and torch.equal(edited[1, 1::2], logits[1, 1::2] - 5)
    assert sampled.ids_R.tolist()[0] == 9 and sampled.ids_R[1] == edited[1].argmax()
    assert sampled.ids_R[2] in (3, 7) and sampled.ids_R[3] == 9
    assert [type(one) for one, _ in sampler.processors.edits(SamplingRows(np.array([0]), np.array([5])))] == []
