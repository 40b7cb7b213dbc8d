"""The interface between the engine loop and an executor: Executor, its spec, its capacity.

Owns: the five methods of an executor. Plans and copies run in submission order, and results are collected in that
order. Does not: import torch. The engine loop keeps up to `depth` submitted plans uncollected.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from octavo.core.limits import GroupSpec
from octavo.core.plan import StepPlan, StepResult
from octavo.core.request import Request
from octavo.media.item import MediaItem

Ticket = object  # opaque to the loop: returned by submit, passed to collect


@dataclass(frozen=True, slots=True)
class ExecutorSpec:
    """The capacity that the executor must provide, in tokens, sequences or bytes as the names say.

    At most one of `num_blocks`, `pool_bytes` and `pool_tokens` may be set. If none is set, `memory_fraction` (None: the
    device's default) is the share of a device's memory for weights, a step and the pool, or of a host's free memory
    for the pool. `num_blocks` and `pool_tokens` count blocks and
    tokens of the leading cache group. `host_bytes` is the host tier's size; 0 means no host tier.
    `max_model_len=None` means the model's own limit.
    """

    max_sequences: int
    max_batch_tokens: int
    block_size: int = 16
    max_model_len: int | None = None
    num_blocks: int | None = None
    pool_bytes: int | None = None
    pool_tokens: int | None = None
    memory_fraction: float | None = None
    kv_dtype: str = "auto"
    host_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Digests of what decides an engine's ids; "" if unknown. Engines with equal ones give equal ids.

    `model` covers the architecture and the weights, `tokenizer` also the chat template, and `numerics` types, kernels
    and the CPU's features. `about` is `numerics` in words.
    """

    model: str = ""
    tokenizer: str = ""
    numerics: str = ""
    about: str = ""

    def differences(self, other: Fingerprint) -> list[str]:
        """Return the names of the parts that both have and that differ."""
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in ("model", "tokenizer", "numerics")}
        return [name for name, (ours, theirs) in pairs.items() if ours and theirs and ours != theirs]

    @property
    def text(self) -> str:
        """All parts in one text; "" if all are unknown."""
        return "/".join(part for part in (self.model, self.tokenizer, self.numerics) if part)


@dataclass(frozen=True, slots=True)
class PoolBlocks:
    """Numbers of blocks, one per cache group: on the device, and on the host (empty without a host tier)."""

    device: tuple[int, ...]
    host: tuple[int, ...] = ()

    def least(self, other: PoolBlocks) -> PoolBlocks:
        """Return what both can hold. Both have the same groups and agree on whether there is a host tier."""
        return PoolBlocks(tuple(map(min, self.device, other.device)), tuple(map(min, self.host, other.host)))


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where one rank of an engine runs: its host, process and device."""

    rank: int
    where: str
    pid: int
    device: str


@dataclass(frozen=True, slots=True)
class Capacity:
    """The capacity of an opened executor, in bytes and tokens. Of several ranks, bytes are those of rank 0.

    `num_blocks` and `host_blocks` have one entry per cache group, the leading group first; without a host tier
    `host_blocks` is empty. `quantization` is the code of most weights; "none" means that weights have `dtype`. The
    cache has `dtype` too unless the spec names another. `has_masks`: the executor applies grammar masks (see supply);
    an executor without masks gets no request with a grammar. `usable_len`: tokens that one request can use, fewer than
    `max_model_len` if the pool is smaller (0: unknown). `ranks` is empty if there is one. `linear_flops_per_token`,
    `weight_bytes` and `kv_bytes_per_token` give a lower bound of a step's time; a step of one token reads
    `idle_expert_bytes` less than `weight_bytes`. `decoder` is the code of the layers:
    "native", "torch", "encoder", or "sharded" for ranks (of any number) and for one rank with their arithmetic.
    `is_encoder`: requests can only be pooled, and a prompt is computed whole, without cached prefixes. `media` are the
    kinds of media that requests may have, of which a step encodes at most `encoder_budget` tokens and `encoder_cache`
    tokens are kept. If `whole_span_tokens` is not 0, a step computes each item, of up to so many tokens, whole.
    """

    groups: tuple[GroupSpec, ...]
    num_blocks: tuple[int, ...]
    block_size: int
    num_slots: int
    max_model_len: int
    vocab_size: int
    device: str = "cpu"
    dtype: str = "float32"
    num_threads: int = 1
    weight_bytes: int = 0
    idle_expert_bytes: int = 0
    kv_bytes_per_token: int = 0
    linear_flops_per_token: int = 0
    notes: tuple[str, ...] = field(default=())
    host_blocks: tuple[int, ...] = ()
    quantization: str = "none"
    has_masks: bool = False
    usable_len: int = 0
    decoder: str = ""
    fingerprint: Fingerprint = Fingerprint()
    ranks: tuple[RankPlace, ...] = ()
    is_encoder: bool = False
    media: tuple[str, ...] = ()
    encoder_budget: int = 0
    encoder_cache: int = 0
    whole_span_tokens: int = 0

    def describe_lack(self, promised: Capacity) -> str | None:
        """Return why an engine cannot continue every request of one with the promised capacity, or None."""
        for name in ("max_model_len", "usable_len", "num_slots"):
            have, need = getattr(self, name), getattr(promised, name)
            if have < need:
                return f"its {name} is {have}, and requests may need {need}"
        for name in ("vocab_size", "block_size", "has_masks", "is_encoder", "media"):
            have, need = getattr(self, name), getattr(promised, name)
            if have != need:
                return f"its {name} is {have}, and it must be {need}"
        if "tokenizer" in promised.fingerprint.differences(self.fingerprint):
            return "its tokenizer (or chat template) differs from that of the first engine"
        return None


TYPICAL_IMAGE = 768, 1024  # height and width


@dataclass(frozen=True, slots=True)
class VisionPlan:
    """The memory of a vision tower and of the cache of its embeddings, and what images cost.

    `max_tokens` are those of the largest image in a prompt, and `typical_tokens` those of one of TYPICAL_IMAGE's height
    and width; None if that cannot be computed, because Pillow is missing.
    """

    weight_bytes: int
    cache_tokens: int
    cache_bytes: int
    max_tokens: int = 0
    typical_tokens: int | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes of both."""
        return self.weight_bytes + self.cache_bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory that opening would take, computed without loading weights, in bytes and tokens.

    `decoder` is as in Capacity, and `decoder_reason` says why it is not the native one. `num_blocks` has one entry per
    cache group. `free_bytes` is available for weights and pool together. `shortfall` says why no useful pool fits; None
    means that one fits. `vision` is None if the engine takes no images; `vision_note` says why if the model could.
    `draft` is the plan of the draft model, if one is configured. `step_bytes` is what the largest step takes on a
    device, estimated; the engine measures it.
    """

    device: str
    dtype: str
    quantization: str
    num_threads: int
    max_model_len: int
    free_bytes: int
    weight_bytes: int
    groups: tuple[GroupSpec, ...]
    num_blocks: tuple[int, ...]
    block_size: int
    num_slots: int
    sequence_blocks: tuple[int, ...]
    shortfall: str | None = None
    decoder: str = ""
    decoder_reason: str = ""
    vision: VisionPlan | None = None
    vision_note: str = ""
    draft: MemoryPlan | None = None
    step_bytes: int = 0

    @property
    def pool_bytes(self) -> int:
        """Bytes of the KV pool."""
        return sum(count * group.block_bytes for count, group in zip(self.num_blocks, self.groups, strict=True))

    @property
    def total_bytes(self) -> int:
        """Bytes of everything in the plan."""
        vision = 0 if self.vision is None else self.vision.total_bytes
        draft = 0 if self.draft is None else self.draft.total_bytes
        return self.weight_bytes + self.pool_bytes + self.step_bytes + vision + draft

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one cached token in all groups."""
        return sum(group.block_bytes for group in self.groups) // self.block_size

    @property
    def sequence_bytes(self) -> int:
        """Bytes of KV of one request of full length."""
        return sum(count * group.block_bytes for count, group in zip(self.sequence_blocks, self.groups, strict=True))

    @property
    def num_full_length(self) -> float:
        """Requests of full length that the pool holds at once."""
        shares = [count / need for count, need in zip(self.num_blocks, self.sequence_blocks, strict=True) if need]
        return min(shares, default=0.0)


class MediaExecutor(Protocol):
    """What an executor with media in its Capacity has beside the methods of Executor."""

    def add_media(self, request: Request, items: tuple[MediaItem, ...]) -> None:
        """Keep the items of a request's spans until drop_media. Called before the request's first plan."""
        ...

    def drop_media(self, request_ids: Iterable[str]) -> None:
        """Drop the items of requests that ended. Plans that are submitted already may have encoded them."""
        ...

    def media_report(self) -> Mapping[str, float]:
        """Return totals since the start, and the state of the cache of embeddings."""
        ...


class Executor(Protocol):
    """The interface of an executor, which runs plans in order. Not thread-safe: one thread calls it."""

    def open(self, spec: ExecutorSpec) -> Capacity:
        """Load weights, allocate the pool, and return the capacity. Raises CapacityError, ModelFileError."""
        ...

    def submit(self, plan: StepPlan) -> Ticket:
        """Start a plan. A synchronous executor may compute it here."""
        ...

    def supply(self, ticket: Ticket, masks: object) -> None:
        """Pass the grammar masks (grammar.matcher.Masks) of a step, which the host made while the device ran.

        Called exactly once, between submit and collect, for each plan in which a row with a grammar samples. The
        executor samples no row of that plan before this call. An executor without masks raises EngineError.
        """
        ...

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for the oldest ticket's result. Raises the error that made the step fail.

        After a failure the loop still collects the later tickets, and drops their results.
        """
        ...

    def close(self) -> None:
        """Release everything. Idempotent."""
        ...


def usable_len(groups: Sequence[GroupSpec], num_blocks: Sequence[int], spec: ExecutorSpec, max_model_len: int) -> int:
    """Return how many tokens one sequence can have in a pool of these blocks, at most `max_model_len`."""

    def fits(num_tokens: int) -> bool:
        needs = (group.peak_blocks(num_tokens, spec.max_batch_tokens, spec.block_size) for group in groups)
        return all(need <= count for need, count in zip(needs, num_blocks, strict=True))

    return bisect_left(range(1, max_model_len + 1), True, key=lambda num_tokens: not fits(num_tokens))
