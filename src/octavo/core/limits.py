"""Limits: the sizes, budgets, switches and policy of one scheduler, and the cache groups of its model.

A cache group is the layers with one kind of attention; they share a block table.
Owns: the settings and their ranges, and which blocks a group's attention needs.
Does not: derive the settings (engine.limits and executors do), or count what a step uses (step does).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from octavo.errors import ConfigError


class GroupKind(IntEnum):
    """How the layers of a group attend."""

    FULL = 0
    SLIDING = 1


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One cache group: its kind, window (tokens, 0 = none), bytes of one block over all its layers, and its layers.

    A token at position p of a sliding group attends to positions p - window + 1 to p.
    """

    kind: GroupKind = GroupKind.FULL
    window: int = 0
    block_bytes: int = 0
    layers: tuple[int, ...] = ()

    def first_block(self, position: int, block_size: int) -> int:
        """Return the index of the first block that a token at `position` reads or writes."""
        if self.kind == GroupKind.FULL:
            return 0
        return max(0, position - self.window + 1) // block_size

    def peak_blocks(self, num_tokens: int, chunk: int, block_size: int) -> int:
        """Return the most blocks that `num_tokens` positions hold at once, if a step computes at most `chunk`."""
        total = -(-num_tokens // block_size)
        if self.kind == GroupKind.FULL:
            return total
        span = self.window - 1 + chunk  # positions that one chunk reads or writes; it may begin anywhere in a block
        return min(total, (span + block_size - 2) // block_size + 1)


@dataclass(frozen=True, slots=True)
class Limits:
    """The scheduler's settings, in tokens, sequences and blocks as named; `headroom` is a share of the pool.

    `num_blocks` and `host_blocks` have one entry per group; an empty `host_blocks` means no host tier.
    `max_partial_prefills`, `long_prefill_threshold` and `max_kv_read` (tokens of context read per step) have no bound
    if they are 0. `encoder_budget` (media tokens encoded per step), `encoder_cache` (media tokens cached) and
    `adapter_slots` are 0 if the engine has no encoder or no adapters. If `whole_span_tokens` is not 0, media items of
    up to so many tokens are each computed in one step, because their positions see each other. `headroom=None` means
    the policy's default. `preemption` is auto, recompute or swap. `composition` is mixed or separate; if separate, a
    step has only prefills or only decodes, and at most `max_prefill_run` prefill steps run in a row while a request
    decodes. `tenant_weights` are shares under the fair policy; a tenant not named has weight 1. `find_shared_prefixes`
    fills the plan's shared_prefixes. A row gets at most `max_draft_tokens` drafts (0 = no speculation), and no drafts
    in a plan of more than `max_draft_rows` rows. With `has_draft_model`, and with `has_paced_lookup` (measured times
    decide which lookups become drafts), drafts are inputs, which a replay takes from the recording. With `num_stages`
    pipeline stages, a decoding sequence has no row while its last id is in flight, and a plan has at most that share of
    the running requests, so that as many plans can be in flight.
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
    block_sharing: bool = True
    max_blocks_per_sequence: int = 0
    max_kv_read: int = 0
    max_bypass: int = 64
    preemption: str = "auto"
    host_blocks: tuple[int, ...] = ()
    host_load_min_tokens: int = 64
    encoder_budget: int = 0
    encoder_cache: int = 0
    whole_span_tokens: int = 0
    adapter_slots: int = 0
    separate_modalities: bool = False
    composition: str = "mixed"
    max_prefill_run: int = 4
    tenant_weights: tuple[tuple[str, float], ...] = ()
    find_shared_prefixes: bool = False
    max_draft_tokens: int = 0
    max_draft_rows: int = 8
    has_draft_model: bool = False
    has_paced_lookup: bool = False
    num_stages: int = 1

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
            _require(getattr(self, name) >= 1, name, getattr(self, name), "give at least 1")
        for name in _AT_LEAST_ZERO:
            _require(getattr(self, name) >= 0, name, getattr(self, name), "give 0 or more")
        for name, choices in _CHOICES.items():
            _require(getattr(self, name) in choices, name, getattr(self, name), f"give one of {', '.join(choices)}")
        ok = len(self.num_blocks) == len(self.groups) and min(self.num_blocks) >= 1
        _require(ok, "num_blocks", self.num_blocks, f"give at least 1 block for each of {len(self.groups)} groups")
        ok = not self.host_blocks or (len(self.host_blocks) == len(self.groups) and min(self.host_blocks) >= 0)
        _require(ok, "host_blocks", self.host_blocks, f"give a number of blocks for each of {len(self.groups)} groups")
        if self.headroom is not None and not 0 <= self.headroom < 1:
            raise ConfigError(f"headroom is {self.headroom}; give a share of the pool from 0 up to, but not, 1")
        for tenant, weight in self.tenant_weights:
            _require(0 < weight < 1e6, f"tenant_weights[{tenant!r}]", weight, "give a number above 0")


_AT_LEAST_ONE = (
    "block_size", "max_model_len", "vocab_size", "max_batch_tokens", "max_sequences", "max_bypass", "max_prefill_run",
)  # fmt: skip
_AT_LEAST_ZERO = (
    "max_partial_prefills", "long_prefill_threshold", "max_blocks_per_sequence", "max_kv_read",
    "host_load_min_tokens", "encoder_budget", "encoder_cache", "whole_span_tokens", "adapter_slots", "max_draft_tokens",
    "max_draft_rows",
)  # fmt: skip
_CHOICES = {"preemption": ("auto", "recompute", "swap"), "composition": ("mixed", "separate")}


def _require(ok: bool, name: str, value: object, remedy: str) -> None:
    if not ok:
        raise ConfigError(f"{name} is {value!r}; {remedy}")
