"""Compute the number of KV blocks of each cache group, on the device and on the host, and a model's memory plan.

Owns: the arithmetic from a spec and free memory to numbers of blocks, and the errors of this arithmetic. `plan_memory`
makes the same choices as TorchExecutor.open from the files' headers, without loading weights. Does not: allocate, or
run the step whose memory is measured on a device (profiling does). On a CPU a step's own buffers are small compared
with the pool's margin.
Invariants: groups share one budget in bytes, divided so that sequences of typical length fill all groups at the same
time. Each group has room for one sequence of full length if the budget has.
A user's number of blocks or tokens refers to the leading group: the first, which is the full-attention group if any.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from octavo import machine
from octavo.artifacts.model_spec import ModelSpec
from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import ModelFiles
from octavo.artifacts.vision_spec import VisionSpec
from octavo.config import ExecutionConfig, ModelConfig, ParallelConfig
from octavo.core.limits import GroupKind, GroupSpec
from octavo.errors import CapacityError
from octavo.executors.cache import CacheLayout
from octavo.executors.device_choice import ABSENT, choose_device, memory_of
from octavo.executors.loading import DecoderChoice, cache_dtype, encoder_weights
from octavo.executors.media_rows import encoder_sizes, media_obstacle, tower_dtype
from octavo.executors.protocol import ExecutorSpec, MemoryPlan, VisionPlan, usable_len
from octavo.models.layer_attention import layer_attention
from octavo.models.native_weights import native_weight_bytes, wanted_tensors
from octavo.models.shards import ModelShard
from octavo.nn.packing import WantedTensor
from octavo.nn.parallel import Parallel, ShardSpec
from octavo.nn.weights import num_other_values, open_weights

_CODE_BITS = {"int8": 9, "int4": 5}  # with the scales
_OF_LAYER = re.compile(r"\.\d+\.")
HOST_FRACTION = 0.5  # of the free memory, by default
DEVICE_FRACTION = 0.9  # of a device's whole memory, by default: graphs and other processes' needs are not measured
FREE_BLOCKS = 1 << 22  # offered by a rank that has no layer of a group; other ranks have, and offer fewer
TYPICAL_LEN = 2048  # tokens per sequence that the default pool on a CPU is sized for


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The host's free memory: a share of it is for the pool. The unit is bytes, as below."""

    free: int

    @property
    def available(self) -> int:
        """The most that a pool can have."""
        return max(0, self.free)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device's memory before its pool is allocated: all of it, and what no process uses.

    `own` is what this engine has taken (weights, buffers), and `step` what its largest step takes beside that.
    """

    total: int
    free: int
    own: int
    step: int

    @property
    def available(self) -> int:
        """The most that a pool can have."""
        return max(0, self.free - self.step)


class PoolSizing:
    """Computes each group's number of blocks from a spec, the groups' block sizes and the maximum length."""

    def __init__(self, spec: ExecutorSpec, groups: Sequence[GroupSpec], max_model_len: int) -> None:
        self._spec = spec
        self._groups = tuple(groups)
        self._max_model_len = max_model_len
        self._typical = self._blocks_of(min(max_model_len, TYPICAL_LEN))

    def device_blocks(self, memory: HostMemory | DeviceMemory) -> tuple[int, ...]:
        """Return the number of blocks per group. Raises CapacityError if a group has no block or the blocks do not fit.

        If the spec has no pool size, its `memory_fraction` (or the default one) is, on a device, the share of the whole
        memory for weights, a step and the pool together; the default leaves the rest free of what other processes
        use, too. On the host it is a share of the free memory for the pool alone; the default is at most the blocks
        that `max_sequences` sequences of typical length need, because other processes share that memory.
        """
        num_blocks, source = self._requested(memory)
        fits = self._split(memory.available)[0]
        size = self._spec.block_size
        beside = f" beside {_size(memory.step)} for a step" if isinstance(memory, DeviceMemory) and memory.step else ""
        would_hold = f"{_size(memory.available)} free{beside}, which would hold {fits} blocks ({fits * size} tokens)"
        if min(num_blocks) < 1:
            cost = sum(group.block_bytes for group in self._groups)
            raise CapacityError(f"{source} holds no KV block of {size} tokens ({_size(cost)}); there are {would_hold}")
        if self._bytes(num_blocks) > memory.available:
            needs = "" if self._spec.pool_bytes is not None else f" ({_size(self._bytes(num_blocks))})"
            raise CapacityError(f"{source}{needs} exceeds the {would_hold}")
        return num_blocks

    @property
    def given_bytes(self) -> int:
        """The pool's bytes if the spec has its size, else 0."""
        spec = self._spec
        if spec.pool_bytes is not None:
            return spec.pool_bytes
        leading = spec.num_blocks if spec.pool_tokens is None else spec.pool_tokens // spec.block_size
        return 0 if leading is None else self._bytes(self._with_leading(leading))

    def host_blocks(self, available_bytes: int) -> tuple[int, ...]:
        """Return the number of host blocks per group, or () if `host_bytes` is 0. Raises CapacityError."""
        size = self._spec.host_bytes
        if not size:
            return ()
        source = f"--host-cache-bytes {_size(size)}"
        if size > available_bytes:
            raise CapacityError(f"{source} exceeds the {_size(available_bytes)} of free host memory")
        # a swapped-out sequence holds only its window, not a chunk being computed
        resting = PoolSizing(replace(self._spec, max_batch_tokens=1), self._groups, self._max_model_len)
        num_blocks = resting._split(size)
        if min(num_blocks) < 1:
            cost = sum(group.block_bytes for group in self._groups)
            raise CapacityError(
                f"{source} holds no KV block of {self._spec.block_size} tokens ({_size(cost)}); "
                "give more, such as 4G, or 0 for none"
            )
        return num_blocks

    def _requested(self, memory: HostMemory | DeviceMemory) -> tuple[tuple[int, ...], str]:
        spec = self._spec
        given = [size for size in (spec.num_blocks, spec.pool_bytes, spec.pool_tokens) if size is not None]
        if len(given) > 1:
            raise CapacityError("give one of num_blocks, pool_bytes and pool_tokens, not several")
        if spec.num_blocks is not None:
            return self._with_leading(spec.num_blocks), f"--num-gpu-blocks-override {spec.num_blocks}"
        if spec.pool_bytes is not None:
            return self._split(spec.pool_bytes), f"--kv-cache-memory-bytes {_size(spec.pool_bytes)}"
        if spec.pool_tokens is not None:
            return self._with_leading(spec.pool_tokens // spec.block_size), f"--kv-cache-tokens {spec.pool_tokens}"
        if isinstance(memory, DeviceMemory):
            share, source = self._device_share(memory)
            return self._split(share), source
        fraction = spec.memory_fraction or HOST_FRACTION
        share = int(memory.free * fraction)
        num_blocks = self._split(share)
        if spec.memory_fraction is None:
            num_blocks = tuple(map(min, num_blocks, self._default_blocks()))
        return num_blocks, f"--gpu-memory-utilization {fraction:g} ({_size(share)})"

    def _device_share(self, memory: DeviceMemory) -> tuple[int, str]:
        """Return the bytes for the pool on a device, and what they follow from. Raises CapacityError."""
        fraction, taken = self._spec.memory_fraction, memory.own + memory.step
        others = memory.total - memory.free - memory.own
        if fraction is None:
            share = min(int(memory.total * DEVICE_FRACTION) - taken, memory.available - _left_free(memory))
            source = f"the default --gpu-memory-utilization {DEVICE_FRACTION:g}"
            if others > _left_free(memory):
                source += (
                    f" (other processes use {_size(others)}; engines on one device need a share each, such as 0.4)"
                )
            return max(0, share), source
        limit = int(memory.total * fraction)
        parts = f"{_size(memory.own)} of weights and buffers, {_size(memory.step)} for a step"
        source = f"--gpu-memory-utilization {fraction:g} ({_size(limit)} of {_size(memory.total)}: {parts})"
        if limit - memory.own > memory.free:
            fitting = int(100 * (memory.free + memory.own) / memory.total) / 100
            raise CapacityError(
                f"{source} exceeds what the device has: other processes use {_size(others)}; end them, or give "
                f"--gpu-memory-utilization {fitting:g}"
            )
        if limit < taken:
            raise CapacityError(f"{source} leaves nothing for the KV pool; give more, or a smaller step or model")
        return limit - taken, source

    def _default_blocks(self) -> tuple[int, ...]:
        """Return the blocks for `max_sequences` of typical length; each of several groups also holds a longest one."""
        needed = tuple(self._spec.max_sequences * typical for typical in self._typical)
        return needed if len(needed) == 1 else tuple(map(max, needed, self._blocks_of(self._max_model_len)))

    def _blocks_of(self, num_tokens: int) -> tuple[int, ...]:
        """Return how many blocks of each group a sequence of `num_tokens` holds at once."""
        size = self._spec.block_size
        chunk = self._spec.max_batch_tokens
        return tuple(group.peak_blocks(num_tokens, chunk, size) for group in self._groups)

    def _bytes(self, num_blocks: Sequence[int]) -> int:
        return sum(count * group.block_bytes for count, group in zip(num_blocks, self._groups, strict=True))

    def _with_leading(self, leading: int) -> tuple[int, ...]:
        """Return each group's blocks, given the first group's: for as many typical sequences, and for a longest one."""
        if leading < 1:
            return (leading,) * len(self._groups)
        others = zip(self._blocks_of(self._max_model_len)[1:], self._typical[1:], strict=True)
        # if the leading group cannot hold a full-length sequence, no other group needs more blocks than the leading one
        return leading, *(
            max(min(longest, leading), -(-leading * typical // self._typical[0])) for longest, typical in others
        )

    def _split(self, budget: int) -> tuple[int, ...]:
        """Divide bytes among the groups; return each group's blocks."""
        longest = self._blocks_of(self._max_model_len)
        if self._bytes(longest) > budget:
            return self._for_one_sequence(budget)
        fixed = {index: FREE_BLOCKS for index, group in enumerate(self._groups) if not group.block_bytes}
        while True:
            rest = budget - sum(count * self._groups[index].block_bytes for index, count in fixed.items())
            free = [index for index in range(len(self._groups)) if index not in fixed]
            cost = sum(self._typical[index] * self._groups[index].block_bytes for index in free)
            shares = {index: rest * self._typical[index] // cost for index in free}
            short = {index: longest[index] for index in free if shares[index] < longest[index]}
            if not short:
                return tuple(fixed.get(index, shares.get(index, 0)) for index in range(len(self._groups)))
            fixed |= short  # never all: the rest suffices for one full-length sequence, so one group is not short

    def _for_one_sequence(self, budget: int) -> tuple[int, ...]:
        """Divide a budget that is too small for a full-length sequence so that the longest possible one fits."""
        if len(self._groups) == 1:
            return (budget // self._groups[0].block_bytes,)
        low, high = 0, self._max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._bytes(self._blocks_of(middle)) <= budget else (low, middle - 1)
        return self._blocks_of(low)


def _left_free(memory: DeviceMemory) -> int:
    return memory.total - int(memory.total * DEVICE_FRACTION)


def step_bytes(spec: ModelSpec, dtype: torch.dtype, num_tokens: int, num_sampled: int) -> int:
    """Return about the bytes of the largest tensors of a step of `num_tokens` tokens that samples `num_sampled`."""
    widest, mixture = 3 * spec.intermediate_size + 4 * spec.hidden_size, spec.mixture
    if mixture is not None:  # a device computes all chosen experts of all tokens together
        widest = max(widest, 4 * spec.hidden_size + mixture.top_k * (3 * mixture.intermediate_size + spec.hidden_size))
    return dtype.itemsize * num_tokens * widest + 12 * num_sampled * spec.vocab_size


def describe_groups(groups: Sequence[GroupSpec], num_blocks: Sequence[int], block_size: int) -> tuple[str, ...]:
    """Return the sizes of several groups as one note for the user, or () for one group."""
    if len(groups) == 1:
        return ()
    parts = []
    for group, count in zip(groups, num_blocks, strict=True):
        kind = "full attention" if group.kind == GroupKind.FULL else f"a window of {group.window}"
        layers = f"{len(group.layers)} layer{'s' * (len(group.layers) != 1)}"
        parts.append(f"{layers} with {kind}: {count * block_size} tokens")
    return ("the KV pool is shared by " + "; ".join(parts),)


def _size(num_bytes: int) -> str:
    if num_bytes < 2**20:
        return f"{num_bytes} bytes"
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def plan_memory(
    files: ModelFiles,
    execution: ExecutionConfig,
    model: ModelConfig,
    wanted: ExecutorSpec,
    parallel: ParallelConfig | None = None,
    draft: MemoryPlan | None = None,
) -> MemoryPlan:
    """Return the memory plan. Raises ConfigError, ModelFileError; if nothing fits, the plan's `shortfall` says why.

    `draft` is the plan of the draft model, which is loaded first. Of several ranks, bytes are those of the rank with
    the most KV heads and layers; the weights are divided evenly.
    """
    spec = read_model_spec(files)
    if spec.encoder is not None:
        return _plan_encoder(files, execution, model, wanted, spec)
    shards = _shards(spec, parallel)
    choice = DecoderChoice(files, spec, execution, model, Parallel() if shards else None)
    max_len = min(wanted.max_model_len or spec.max_model_len, spec.max_model_len)
    kv_dtype = cache_dtype(wanted.kv_dtype, choice.dtype)
    sizes = {(len(shard.query_heads), len(shard.kv_heads), shard.layers) for shard in shards}
    of_ranks = [
        CacheLayout.of(layer_attention(spec, heads, kv_heads), max_len, wanted.block_size, kv_dtype, layers).groups
        for heads, kv_heads, layers in sizes or {(spec.num_heads, spec.num_kv_heads, range(spec.num_layers))}
    ]
    groups = max(of_ranks, key=lambda groups: sum(group.block_bytes for group in groups))
    weight_bytes = _weight_bytes(files, spec, choice) // max(1, len(shards))
    is_host = choice.device.type == "cpu"
    total, free = memory_of(execution.device)
    if is_host and parallel is not None:
        free //= -(-parallel.num_ranks // parallel.nnodes)  # the ranks of a host share its memory
    note = media_obstacle(spec, choice)
    vision = None if spec.vision is None or note else _vision_plan(files, spec, spec.vision, choice, wanted, max_len)
    beside = sum(part.total_bytes for part in (vision, draft) if part is not None)
    left, step = (
        free - weight_bytes - beside,
        step_bytes(spec, choice.dtype, wanted.max_batch_tokens, wanted.max_sequences),
    )
    memory: HostMemory | DeviceMemory = HostMemory(left - wanted.host_bytes)
    if not is_host:
        memory = DeviceMemory(total, left, weight_bytes + beside, step)
    shortfall, num_blocks = None, (0,) * len(groups)
    try:
        offers = [PoolSizing(wanted, groups, max_len).device_blocks(memory) for groups in of_ranks]
        num_blocks = tuple(map(min, zip(*offers, strict=True)))
    except CapacityError as error:
        shortfall = str(error)
    return MemoryPlan(
        device=execution.device if execution.device in ABSENT else str(choice.device),
        dtype=str(choice.dtype).removeprefix("torch."),
        quantization=choice.quantization,
        num_threads=(execution.threads or machine.usable_cores()) if is_host else 1,
        max_model_len=max_len,
        free_bytes=free,
        step_bytes=0 if is_host else step,
        weight_bytes=weight_bytes,
        groups=groups,
        num_blocks=num_blocks,
        block_size=wanted.block_size,
        num_slots=wanted.max_sequences,
        sequence_blocks=tuple(
            group.peak_blocks(max_len, wanted.max_batch_tokens, wanted.block_size) for group in groups
        ),
        shortfall=shortfall or _too_short(groups, num_blocks, wanted, max_len),
        decoder=choice.decoder_name,
        decoder_reason=choice.reason,
        vision=vision,
        vision_note=note,
        draft=draft,
    )


def _too_short(
    groups: Sequence[GroupSpec], num_blocks: Sequence[int], wanted: ExecutorSpec, max_len: int
) -> str | None:
    """Return why a pool of these blocks does not hold one request of full length; None if it does."""
    longest = usable_len(groups, num_blocks, wanted, max_len)
    if longest >= max_len:
        return None
    return (
        f"it holds {num_blocks[0] * wanted.block_size:,} tokens, and one request of full length has {max_len:,}; "
        f"enlarge the pool, or give --max-model-len {longest}"
    )


def _vision_plan(
    files: ModelFiles, spec: ModelSpec, vision: VisionSpec, choice: DecoderChoice, wanted: ExecutorSpec, max_len: int
) -> VisionPlan:
    cache_tokens = encoder_sizes(vision, spec.hidden_size, wanted.max_batch_tokens, max_len)[1]
    weight_bytes = num_other_values(files) * tower_dtype(choice).itemsize
    return VisionPlan(weight_bytes, cache_tokens, 4 * spec.hidden_size * cache_tokens)


def _plan_encoder(
    files: ModelFiles, execution: ExecutionConfig, model: ModelConfig, wanted: ExecutorSpec, spec: ModelSpec
) -> MemoryPlan:
    """Return the plan of an encoder, which has weights and no KV pool."""
    device = choose_device(execution.device)
    packing, dtype, notes = encoder_weights(device, execution, model, spec)
    is_host = device.type == "cpu"
    free = memory_of(execution.device)[1]
    weight_bytes = _estimated_bytes(files, spec, packing, dtype)
    max_len = min(wanted.max_model_len or spec.max_model_len, spec.max_model_len)
    blocks = -(-max_len // wanted.block_size)
    shortfall = (
        None if weight_bytes < free else f"the weights need {_size(weight_bytes)}; use a machine with more memory"
    )
    return MemoryPlan(
        device=execution.device if execution.device in ABSENT else str(device),
        dtype=str(dtype).removeprefix("torch."),
        quantization="none" if packing is None else packing.quantization,
        num_threads=(execution.threads or machine.usable_cores()) if is_host else 1,
        max_model_len=max_len,
        free_bytes=free,
        weight_bytes=weight_bytes,
        groups=(GroupSpec(layers=tuple(range(spec.num_layers))),),
        num_blocks=(wanted.max_sequences * blocks,),
        block_size=wanted.block_size,
        num_slots=wanted.max_sequences,
        sequence_blocks=(blocks,),
        shortfall=shortfall,
        decoder="encoder",
        decoder_reason="; ".join(notes),
    )


def _shards(spec: ModelSpec, parallel: ParallelConfig | None) -> list[ModelShard]:
    """Return the part of every rank; none for the ordinary decoder, which is not divided."""
    if parallel is None or (parallel.num_ranks == 1 and not parallel.tp_invariant):
        return []
    sizes = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    return [ModelShard(spec, ShardSpec.of(rank, *sizes)) for rank in range(parallel.num_ranks)]


def _weight_bytes(files: ModelFiles, spec: ModelSpec, choice: DecoderChoice) -> int:
    if choice.is_packed:
        return native_weight_bytes(files, spec, choice.quantization, choice.dtype)
    packing = wanted_tensors(choice.quantization, choice.dtype) if choice.packs or choice.keeps_codes else None
    return _estimated_bytes(files, spec, packing, choice.dtype, choice.dtype.itemsize if choice.keeps_codes else 4)


def _estimated_bytes(
    files: ModelFiles, spec: ModelSpec, packing: WantedTensor | None, dtype: torch.dtype, rest_itemsize: int = 4
) -> int:
    """Return the bytes of the files' tensors. With `packing`, layers' matrices are packed, the rest as it says."""
    weights = open_weights(files, spec)
    shapes = {name: weights.shape(name) for name in weights.names}
    total = sum(map(prod, shapes.values()))
    if packing is None:
        return total * dtype.itemsize
    num_packed = sum(prod(shape) for name, shape in shapes.items() if len(shape) > 1 and _OF_LAYER.search(name))
    return (
        num_packed * _CODE_BITS.get(packing.quantization, 8 * dtype.itemsize) // 8
        + (total - num_packed) * rest_itemsize
    )
