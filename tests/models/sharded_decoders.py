"""Decoders and executors of one rank each, for tests: what they compute, and ranks that are threads of one process.

Functions here run in rank processes too, so this module imports nothing that is slow.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import resolve_model
from octavo.models.decoder import Decoder
from octavo.models.native_weights import wanted_tensors
from octavo.models.shard_loader import ShardLoader
from octavo.nn.parallel import Parallel, ShardSpec
from octavo.nn.weights import open_weights
from tests.models.dense_backend import DenseBackend

ROWS = (1, 7, 64)
CODES = ("int8", "int4", "auto")
Logits = list[Tensor]


def load_shard(folder: str, form: str, parallel: Parallel | None = None) -> Decoder:
    """Load a rank's part. `form` is "plain" (float32 for torch), or a code or a dtype of packed weights.

    With "device " before it, weights are in the form that they have on a device.
    """
    files = resolve_model(folder)
    spec = read_model_spec(files)
    dtype = torch.bfloat16 if form == "bfloat16" else torch.float32
    code = form.removeprefix("device ")
    wanted = None if form == "plain" else wanted_tensors(code if code in CODES else "none", dtype)
    forms = (wanted, None) if code == form else (None, wanted)
    place, weights = (dtype, torch.device("cpu")), open_weights(files, spec)
    return Decoder(ShardLoader(spec, place, weights, parallel or Parallel(), *forms), max_model_len=128)


def prompt(length: int, vocab_size: int, seed: int = 1) -> list[int]:
    """Random ids, equal in every process."""
    return torch.randint(0, vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def all_shard_logits(decoder: Decoder, rows: list[list[int]], is_last: bool = True) -> Tensor:
    """Logits of every position of the rows, in one step; nothing in a stage without a head."""
    backend = DenseBackend(decoder.attention)
    backend.counts = [len(row) for row in rows]
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    hidden_TE = decoder.forward(torch.tensor([token for row in rows for token in row]), positions, backend)
    return decoder.logits(hidden_TE) if is_last else torch.empty(0)


def logits_of(parallel: Parallel | None, folder: str, form: str) -> Logits:
    """Logits of one step each of 1, 7 and 64 rows of one token, and of two prompts; empty in other stages."""
    with torch.inference_mode():
        decoder = load_shard(folder, form, parallel)
        size = decoder.spec.vocab_size
        steps = [[prompt(1, size, seed) for seed in range(rows)] for rows in ROWS]
        steps.append([prompt(40, size), prompt(9, size, 2)])
        is_last = parallel is None or parallel.shard.is_last_stage
        return [all_shard_logits(decoder, step, is_last).clone() for step in steps]


def many_logits_of(parallel: Parallel | None, cases: list[tuple[str, str]]) -> list[Logits]:
    """The same for each (folder, form)."""
    return [logits_of(parallel, folder, form) for folder, form in cases]


class ThreadCollective:
    """The collective of a rank that is a thread: `board` is common to the ranks."""

    def __init__(self, shard: ShardSpec, board: dict[Any, Tensor], barrier: threading.Barrier) -> None:
        self._rank = shard.tensor_rank
        self._size = shard.tensor_size
        self._board = board
        self._barrier = barrier

    def all_gather(self, x: Tensor) -> Tensor:
        self._board[self._rank] = x.clone()
        self._barrier.wait(60)
        gathered = torch.stack([self._board[rank] for rank in range(self._size)])
        self._barrier.wait(60)
        return gathered

    def send(self, hidden_TE: Tensor) -> None:
        raise AssertionError("one stage")

    def receive(self, hidden_TE: Tensor) -> Tensor:
        raise AssertionError("one stage")

    def close(self) -> None:
        pass


def logits_of_threads(size: int, folder: str, form: str) -> list[Logits]:
    """The logits of every rank of `size` that are threads."""
    board: dict[Any, Tensor] = {}
    barrier = threading.Barrier(size)

    def run(rank: int) -> Logits:
        shard = ShardSpec.of(rank, size)
        try:
            return logits_of(Parallel(shard, ThreadCollective(shard, board, barrier)), folder, form)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
