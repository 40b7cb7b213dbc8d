"""What a scheduler is built with: sizes, budgets, switches and the policy's name.

Owns: the frozen numbers. Does not: derive them (config and assembly do) or spend them (budget does).
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.kv.group import GroupSpec
from octavo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Limits:
    """The scheduler's numbers: tokens, sequences and blocks as named; `headroom` is a share of the pool.

    `num_blocks` has one entry per group. `max_partial_prefills=0` and `long_prefill_threshold=0` mean
    no bound. `headroom=None` means the policy's own default.
    """

    block_size: int
    num_blocks: tuple[int, ...]
    max_model_len: int
    vocab_size: int
    max_batch_tokens: int = 512
    max_sequences: int = 32
    groups: tuple[GroupSpec, ...] = (GroupSpec(),)
    policy: str = "fcfs"
    headroom: float | None = None
    chunked_prefill: bool = True
    max_partial_prefills: int = 0
    long_prefill_threshold: int = 0
    prefix_caching: bool = True
    max_blocks_per_sequence: int = 0

    def __post_init__(self) -> None:
        for name in ("block_size", "max_model_len", "vocab_size", "max_batch_tokens", "max_sequences"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give at least 1")
        if len(self.num_blocks) != len(self.groups) or min(self.num_blocks) < 1:
            raise ConfigError(
                f"num_blocks is {self.num_blocks}; give at least 1 block for each of {len(self.groups)} groups"
            )
        if self.headroom is not None and not 0 <= self.headroom < 1:
            raise ConfigError(f"headroom is {self.headroom}; give a share of the pool from 0 up to, but not, 1")
