"""Decoders of one rank each, for tests: loaded from a folder, packed for the kernels or plain for torch."""

from __future__ import annotations

import torch

from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import resolve_model
from octavo.models.decoder import Decoder
from octavo.models.native_weights import wanted_tensors
from octavo.models.shard_loader import ShardLoader
from octavo.nn.parallel import Parallel
from octavo.nn.weights import open_weights
from tests.models.dense_backend import all_logits

ROWS = (1, 7, 64)


def load_shard(folder: str, form: str, parallel: Parallel | None = None) -> Decoder:
    """Load a rank's part. `form` is "plain", or the quantization of packed weights, or a dtype of packed weights."""
    files = resolve_model(folder)
    spec = read_model_spec(files)
    dtype = getattr(torch, form) if hasattr(torch, form) and form not in ("int8",) else torch.float32
    quantization = form if form in ("int8", "int4", "auto") else "none"
    wanted = None if form == "plain" else wanted_tensors(quantization, dtype)
    weights = open_weights(files, spec)
    return Decoder(
        ShardLoader(spec, dtype, torch.device("cpu"), weights, parallel or Parallel(), wanted), max_model_len=128
    )


def prompt(length: int, vocab_size: int, seed: int = 1) -> list[int]:
    """Random ids, equal in every process."""
    return torch.randint(0, vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def logits_of(parallel: Parallel | None, folder: str, form: str) -> list[torch.Tensor]:
    """Logits of one step each of 1, 7 and 64 rows of one token, then of one prompt of 40; [] in other stages."""
    with torch.inference_mode():
        decoder = load_shard(folder, form, parallel)
        size = decoder.spec.vocab_size
        steps = [[prompt(1, size, seed) for seed in range(rows)] for rows in ROWS]
        return [torch.cat(all_logits(decoder, step)) for step in [*steps, [prompt(40, size)]]]
