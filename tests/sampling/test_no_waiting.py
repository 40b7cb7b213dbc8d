"""Sampling on a device never waits for it: the meta device has no values, so that whoever asks for one fails."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.request import SamplingParams
from octavo.sampling import dry, processors, sampler, selection
from octavo.sampling.columns import SamplingRows, SequenceIds
from tests.sampling.test_edits import DRY, WORDS
from tests.sampling.test_sampling import EOS, MANY

PARAMS = [
    *MANY,
    *(SamplingParams(**options) for options in DRY),
    *(SamplingParams(bad_words_ids=words) for words in WORDS),
    SamplingParams(beam_width=3, repetition_penalty=1.2),
]


def to_meta(device: torch.device, *columns: NDArray[Any]) -> list[Tensor]:
    return [torch.from_numpy(np.ascontiguousarray(column)).to(device) for column in columns]


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> sampler.Sampler:
    for module in (dry, processors, sampler, selection):
        monkeypatch.setattr(module, "upload", to_meta)
    made = sampler.Sampler(len(PARAMS), torch.zeros((len(PARAMS), 40), dtype=torch.int32, device="meta"), 5000)
    for slot, params in enumerate(PARAMS):
        made.put(slot, params, SequenceIds(np.arange(6), np.arange(3), EOS))
    return made


def test_P01_sampling_with_every_parameter_asks_the_device_nothing(rig: sampler.Sampler) -> None:
    slots = np.arange(len(PARAMS))
    for length in (9, 10, 13):
        logits = torch.zeros((len(PARAMS), 5000), device="meta")
        sampled = rig.sample(logits, SamplingRows(slots, np.full(len(PARAMS), length)))
        assert sampled.ids_R.shape == (len(PARAMS),) and sampled.ids_R.device.type == "meta"
        assert sampled.logprobs is not None


@pytest.mark.parametrize("held", [np.arange(len(PARAMS)), np.arange(0, len(PARAMS), 3)])
def test_P06_masks_ask_the_device_nothing(rig: sampler.Sampler, held: NDArray[np.int64]) -> None:
    masks = processors.TokenMasks(held, np.zeros((len(held), -(-5000 // 32)), dtype=np.int32))
    logits = torch.zeros((len(PARAMS), 5000), device="meta")
    rows = SamplingRows(np.arange(len(PARAMS)), np.full(len(PARAMS), 9))
    assert rig.sample(logits, rows, masks).ids_R.device.type == "meta"


def test_P04_candidates_and_chosen_ids_ask_the_device_nothing(rig: sampler.Sampler) -> None:
    slots = np.arange(len(PARAMS))
    logits = torch.zeros((len(PARAMS), 5000), device="meta")
    ids, logprobs = rig.candidates(logits, SamplingRows(slots, np.full(len(PARAMS), 9)))
    assert ids.shape == logprobs.shape == (len(PARAMS), 6)
    rig.processors.append(slots, np.full(len(PARAMS), 7))


def test_the_meta_device_does_refuse() -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        bool(torch.zeros(3, device="meta").any())
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.zeros(3, device="meta").nonzero()
