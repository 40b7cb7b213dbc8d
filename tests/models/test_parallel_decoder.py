"""Decoders divided among ranks: the same bits as one rank, near the ordinary decoder, refusals, what a rank reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.dense_backend import all_logits, load_decoder
from tests.models.sharded_decoders import load_shard, prompt
from tests.tiny_models import FAMILIES, VOCAB_SIZE, make_tiny_model

TOLERANCE = 1e-4


@pytest.mark.parametrize("form", ["plain", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_rank_is_near_the_ordinary_decoder(family: str, form: str, tmp_path: Path) -> None:
    folder = make_tiny_model(family, tmp_path)
    rows = [prompt(64, VOCAB_SIZE), prompt(1, VOCAB_SIZE, 2), prompt(7, VOCAB_SIZE, 3)]
    expected, found = (all_logits(decoder, rows) for decoder in (load_decoder(folder), load_shard(str(folder), form)))
    for ours, ordinary in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, ordinary, atol=TOLERANCE, rtol=0)
