"""A rank's place among the ranks of one model, and the exchange of tensors between ranks.

Owns: ShardSpec, the collectives, the fixed order of sums, and the start and end of torch.distributed.
Does not: split a model (models/shards.py does), start processes, or broadcast plans.
Invariants: eight virtual ranks compute the same partial results whatever the number of ranks. A sum over virtual ranks
is one binary tree, ((0+1)+(2+3))+((4+5)+(6+7)), so 1, 2, 4 and 8 ranks give the same bits. A virtual rank without a
part is skipped; adding zeros instead would change -0. A collective moves bytes and computes nothing.
Shapes: R ranks of the tensor-parallel group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import Store

from octavo.errors import ConfigError

VIRTUAL_RANKS = 8
TENSOR_SIZES = (1, 2, 4, 8)
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """A rank's place: tensor rank of `tensor_size`, and pipeline stage of `num_stages`.

    Ranks are numbered from the last stage: rank 0 is tensor rank 0 of the last stage. It samples, so results need not
    be sent to the engine's process, which is rank 0.
    """

    tensor_rank: int = 0
    tensor_size: int = 1
    stage: int = 0
    num_stages: int = 1

    @classmethod
    def of(cls, rank: int, tensor_size: int, num_stages: int = 1) -> ShardSpec:
        """Return the place of a rank of `tensor_size` * `num_stages`. Raises ConfigError for a size that cannot be."""
        if tensor_size not in TENSOR_SIZES:
            raise ConfigError(f"tensor_parallel_size is {tensor_size}; give 1, 2, 4 or 8")
        if num_stages < 1:
            raise ConfigError(f"pipeline_parallel_size is {num_stages}; give 1 or more")
        assert 0 <= rank < tensor_size * num_stages, f"rank {rank} of {tensor_size * num_stages}"
        return cls(rank % tensor_size, tensor_size, num_stages - 1 - rank // tensor_size, num_stages)

    @property
    def rank(self) -> int:
        """Number among all ranks of the model."""
        return (self.num_stages - 1 - self.stage) * self.tensor_size + self.tensor_rank

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the model."""
        return self.tensor_size * self.num_stages

    @property
    def is_first_stage(self) -> bool:
        """True if the rank embeds token ids."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """True if the rank has the final norm and the head, and samples."""
        return self.stage == self.num_stages - 1

    def virtual_ranks(self, tensor_rank: int | None = None) -> range:
        """Return the virtual ranks of a tensor rank (None: this one)."""
        rank = self.tensor_rank if tensor_rank is None else tensor_rank
        count = VIRTUAL_RANKS // self.tensor_size
        return range(rank * count, (rank + 1) * count)


class Collective(Protocol):
    """Exchange of tensors between ranks. Every rank of a group makes the same calls in the same order."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Return [R, *x.shape]: the tensors of the tensor-parallel group, which have one shape and dtype, by rank."""
        ...

    def send(self, hidden_TE: Tensor) -> None:
        """Send hidden states to the next stage, to the same tensor rank; return when the buffer may be reused."""
        ...

    def receive(self, hidden_TE: Tensor) -> Tensor:
        """Fill a buffer with the hidden states that the previous stage sends, and return it."""
        ...

    def close(self) -> None:
        """Leave the groups. Idempotent. Does not wait for other ranks, which may have ended."""
        ...


class LocalCollective:
    """The collective of a rank that is alone."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the tensor as that of the only rank."""
        return x[None]

    def send(self, hidden_TE: Tensor) -> None:
        """Raise AssertionError: one stage has no next one."""
        raise AssertionError("one stage has no next stage")

    def receive(self, hidden_TE: Tensor) -> Tensor:
        """Raise AssertionError: one stage has no previous one."""
        raise AssertionError("one stage has no previous stage")

    def close(self) -> None:
        """Do nothing."""


class GroupCollective:
    """A collective over torch.distributed. Made by `join_ranks`.

    Tensors travel as bytes, so every dtype does. gloo moves host memory: CUDA tensors are staged through it.
    """

    def __init__(self, shard: ShardSpec, tensor_group: dist.ProcessGroup | None, is_staged: bool) -> None:
        self._shard = shard
        self._tensor_group = tensor_group
        self._is_staged = is_staged

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the tensors of the group in a new buffer."""
        if self._tensor_group is None:
            return x[None]
        own = self._outgoing(x)
        size = self._shard.tensor_size
        if not own.numel():
            return x.new_empty((size, *x.shape))
        gathered = torch.empty((size * own.numel(),), dtype=torch.uint8, device=own.device)
        _all_gather(gathered, own, group=self._tensor_group)
        return gathered.to(x.device).view(x.dtype).view(size, *x.shape)

    def send(self, hidden_TE: Tensor) -> None:
        """Send to the same tensor rank of the next stage."""
        dist.send(self._outgoing(hidden_TE), self._shard.rank - self._shard.tensor_size)

    def receive(self, hidden_TE: Tensor) -> Tensor:
        """Receive from the same tensor rank of the previous stage."""
        source = self._shard.rank + self._shard.tensor_size
        if not self._is_staged:
            dist.recv(hidden_TE.view(-1).view(torch.uint8), source)
            return hidden_TE
        buffer = torch.empty(hidden_TE.nbytes, dtype=torch.uint8)
        dist.recv(buffer, source)
        return hidden_TE.copy_(buffer.view(hidden_TE.dtype).view(hidden_TE.shape))

    def close(self) -> None:
        """Destroy the process groups of this process."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _outgoing(self, x: Tensor) -> Tensor:
        flat = x.contiguous().view(-1).view(torch.uint8)
        return flat.cpu() if self._is_staged else flat


@dataclass(frozen=True, slots=True)
class Parallel:
    """What a decoder and an executor need to run one rank: its place and its collective.

    `host_ranks` is the number of ranks on this host, which share its memory. The default is one rank with the
    arithmetic of several (--tp-invariant).
    """

    shard: ShardSpec = ShardSpec()
    collective: Collective = field(default_factory=LocalCollective)
    host_ranks: int = 1


def join_ranks(
    shard: ShardSpec, store: Store, timeout_s: float, backend: str = "gloo", device: str = "cpu"
) -> Parallel:
    """Initialise torch.distributed in this process and join the groups of the model's ranks; waits for all ranks.

    `store` is a key-value store that all ranks reach, such as a TCPStore of rank 0. A collective that waits longer
    than `timeout_s` raises RuntimeError. `backend` is "gloo" or "nccl"; gloo listens on the interface that
    GLOO_SOCKET_IFNAME names, else on the one that the host's own name resolves to.
    """
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=shard.rank, world_size=shard.num_ranks, timeout=timeout)
    tensor_group = None
    for stage in range(shard.num_stages):  # every rank takes part in making every group
        first = (shard.num_stages - 1 - stage) * shard.tensor_size
        ranks = list(range(first, first + shard.tensor_size))
        group = dist.new_group(ranks, timeout=timeout) if shard.tensor_size > 1 else None
        tensor_group = group if stage == shard.stage else tensor_group
    return Parallel(shard, GroupCollective(shard, tensor_group, is_staged=backend == "gloo" and device != "cpu"))


def tree_sum(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Sum a power of two of parts as a binary tree, overwriting them. None is a missing part, or sum."""
    while len(parts) > 1:
        parts = [_add(left, right) for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _add(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return left.add_(right)
