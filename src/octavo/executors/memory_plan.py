"""Compute a model's memory here from its files' headers: weights, KV per token, how much fits.

Owns: the same choices and arithmetic as TorchExecutor.open, without loading or allocating.
Does not: count a step's own buffers; on a CPU they are small beside the pool's margin.
"""

from __future__ import annotations

from math import prod

import torch

from octavo import machine
from octavo.artifacts.model_spec import ModelSpec
from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import ModelFiles
from octavo.config import ExecutionConfig, ModelConfig
from octavo.errors import CapacityError
from octavo.executors.cache_groups import group_layers, layer_windows, within
from octavo.executors.loading import DecoderChoice, dtype_named
from octavo.executors.pool_sizing import PoolSizing, usable_len
from octavo.executors.protocol import ExecutorSpec, MemoryPlan
from octavo.models.native_weights import native_weight_bytes
from octavo.nn.weights import open_weights
from octavo.ops.attention_pool import PoolShape


def plan_memory(files: ModelFiles, execution: ExecutionConfig, model: ModelConfig, wanted: ExecutorSpec) -> MemoryPlan:
    """Return the memory plan. Raises ConfigError, ModelFileError; if nothing fits, the plan's `shortfall` says why."""
    spec = read_model_spec(files)
    choice = DecoderChoice(files, spec, execution, model)
    max_len = min(wanted.max_model_len or spec.max_model_len, spec.max_model_len)
    kv_dtype = choice.dtype if wanted.kv_dtype == "auto" else dtype_named(wanted.kv_dtype, "kv_cache_dtype")
    block = PoolShape(1, 0, wanted.block_size, spec.num_kv_heads, spec.head_dim, kv_dtype)
    groups = group_layers(within(layer_windows(spec), max_len), block)
    weight_bytes = _weight_bytes(files, spec, choice)
    is_host = choice.device.type == "cpu"
    free = machine.usable_memory()[1] if is_host else int(torch.cuda.mem_get_info(choice.device)[0])
    sizing = PoolSizing(wanted, groups, max_len)
    shortfall, num_blocks = None, (0,) * len(groups)
    try:
        num_blocks = sizing.device_blocks(max(0, free - weight_bytes - wanted.host_bytes * is_host), is_host)
    except CapacityError as error:
        shortfall = str(error)
    longest = usable_len(groups, num_blocks, wanted, max_len)
    if shortfall is None and longest < max_len:
        shortfall = (
            f"it holds {num_blocks[0] * wanted.block_size:,} tokens, and one request of full length has {max_len:,}; "
            f"enlarge the pool, or give --max-model-len {longest}"
        )
    return MemoryPlan(
        device=str(choice.device),
        dtype=str(choice.dtype).removeprefix("torch."),
        quantization=choice.quantization if choice.is_native else "none",
        num_threads=(execution.threads or machine.usable_cores()) if is_host else 1,
        max_model_len=max_len,
        free_bytes=free,
        weight_bytes=weight_bytes,
        groups=groups,
        num_blocks=num_blocks,
        block_size=wanted.block_size,
        num_slots=wanted.max_sequences,
        sequence_blocks=tuple(
            group.peak_blocks(max_len, wanted.max_batch_tokens, wanted.block_size) for group in groups
        ),
        shortfall=shortfall,
    )


def _weight_bytes(files: ModelFiles, spec: ModelSpec, choice: DecoderChoice) -> int:
    if choice.is_native:
        return native_weight_bytes(files, spec, choice.quantization, choice.dtype)
    weights = open_weights(files, spec)
    return sum(prod(weights.shape(name)) for name in weights.names) * choice.dtype.itemsize
