"""Attention by the C++ kernels, which read the pool in place through the block tables.

Owns: the structures that describe a group's layers, and the calls for the torch decoder. After the same `begin` the
native decoder reads `layers`, `step_address` and `slot_mapping_address` instead. The torch twin is attention_batched.
Does not: own the pool, or plan a step's work (attention_plan does).
Shapes: T tokens, H query heads, K KV heads, D size of keys, V size of values.
Invariants: a token's result depends on its row alone, bit for bit: not on other rows, the split of the prompt into
chunks, cache hits or threads. Parts before a token's window are skipped, and table entries before the window are not
read. Queries and results are float32 inside, for any dtype of pool and model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import Structure, addressof, byref, c_int32, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from octavo.ops import cpu
from octavo.ops.attention import AttentionBackend, AttentionBatch, GroupedAttention, KVPool, LayerAttention
from octavo.ops.attention_plan import AttentionLayer, AttentionPlan

__all__ = ["MAX_HEAD_DIM", "AttentionLayer", "KernelAttention", "PoolLayers", "has_kernel", "is_faster"]

MAX_HEAD_DIM = 256  # kMaxSize of csrc/attention.h
KV_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3, torch.float8_e4m3fn: 4}


@cache
def _kernels() -> tuple[Callable[..., None], Callable[..., None]] | None:
    attend = cpu.function("octavo_attention", *[c_void_p] * 3, c_int64, c_void_p, c_int64, c_int32)
    write = cpu.function("octavo_write_kv", c_void_p, c_void_p, c_int64, *(c_void_p, c_int64) * 2, c_int32)
    return None if attend is None or write is None else (attend, write)


def has_kernel(pool: KVPool, layers: Sequence[LayerAttention]) -> bool:
    """Return True if the kernel can read this pool and attend as these layers do."""
    shape = pool.shape
    fits = all(size % 8 == 0 and size <= MAX_HEAD_DIM for size in (shape.head_dim, shape.value_dim))
    is_even = all(layer.num_heads % shape.num_kv_heads == 0 for layer in layers)
    return fits and is_even and pool.device.type == "cpu" and shape.dtype in KV_KINDS and _kernels() is not None


def is_faster() -> bool:
    """Return True if the kernel is faster than the torch twin with this machine's instruction set.

    One layer, 9 heads of 64 over 3 KV heads, one Zen 3 core, float32, kernel / twin in ms: 32 rows x 200 positions
    1.7 / 4.1; 32 x 1000 7.3 / 18.9; a prompt of 512 5.9 / 10.9; 32 rows that share 384 of 500 positions 1.4 / 8.4
    (bench/kernel_attention.py). The portable instruction set was not measured.
    """
    return cpu.status().isa in ("avx2", "avx512", "amx")


class KernelAttention:
    """The AttentionBackend for CPUs where `has_kernel`.

    `layers` are the structures of the pool's layers, for the native decoder. All layers have as many heads, and the
    same window.
    """

    reads_unwritten = False

    def __init__(self, pool: KVPool, layers: Sequence[LayerAttention]) -> None:
        kernels = _kernels()
        assert kernels is not None and has_kernel(pool, layers), "no kernel for this pool; see has_kernel"
        self._attend, self._write = kernels
        shape = pool.shape
        self._pool = pool
        ((self._num_heads, window),) = {(layer.num_heads, layer.window) for layer in layers}
        self.plan = AttentionPlan(self._num_heads, shape.num_kv_heads, shape.value_dim, shape.block_size, window)
        self._per_head = [(_per_head(own.sinks_H), _per_head(own.slopes_H)) for own in layers]
        self.layers = [
            AttentionLayer(
                keys.data_ptr(), values.data_ptr(), KV_KINDS[shape.dtype], shape.block_size, own.num_heads,
                shape.num_kv_heads, shape.head_dim, shape.value_dim, window or 0, own.scale, own.soft_cap or 0.0,
                *(None if numbers_H is None else numbers_H.data_ptr() for numbers_H in per_head),
            )
            for keys, values, own, per_head in zip(pool.keys, pool.values, layers, self._per_head, strict=False)
        ]  # fmt: skip
        self._batch: AttentionBatch | None = None
        self._num_threads = 0  # of a layer's call in this step; 0: not known

    @property
    def step_address(self) -> int:
        """Address of the planned struct AttentionStep, which describes the newest step."""
        return addressof(self.plan.step)

    @property
    def slot_mapping_address(self) -> int:
        """Address of the step's slots, one per token."""
        assert self._batch is not None, "attend before begin"
        return self._batch.slot_mapping_T.data_ptr()

    def begin(self, batch: AttentionBatch) -> None:
        """Plan the step for all threads, because the native decoder uses all threads for work of any size."""
        self._batch, self._num_threads = batch, 0
        self.plan.begin(batch, cpu.team_size())

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKV: Tensor) -> Tensor:
        """Write the step's keys and values into the pool, then attend every token. Returns a new tensor."""
        batch, shape = self._batch, self._pool.shape
        assert batch is not None, "attend before begin"
        k_TKD, v_TKV = _rows(k_TKD), _rows(v_TKV)
        if not self._num_threads:
            elements = int(batch.contexts @ batch.counts) * shape.num_kv_heads * shape.head_dim
            self._num_threads = cpu.num_threads(elements)
        threads, structure = self._num_threads, byref(self.layers[layer])
        slots = batch.slot_mapping_T.data_ptr()
        self._write(
            structure, slots, batch.num_tokens, k_TKD.data_ptr(), k_TKD.stride(0), v_TKV.data_ptr(), v_TKV.stride(0),
            cpu.num_threads(k_TKD.numel()),
        )  # fmt: skip
        query_THD = _rows(q_THD)
        output_THV = torch.empty((batch.num_tokens, self._num_heads, shape.value_dim))
        self._attend(
            structure, self.step_address, query_THD.data_ptr(), query_THD.stride(0), output_THV.data_ptr(),
            output_THV.stride(0), threads,
        )  # fmt: skip
        return output_THV.to(q_THD.dtype)


class StepGroup(Structure):
    """struct StepGroup of csrc/decoder_step.h."""

    _fields_ = (("attention", c_void_p), ("slot_mapping", c_void_p))


class PoolLayers:
    """Where a decoder's layers attend in kernels: `places` has each layer's group and its structure in the pool."""

    def __init__(self, backend: AttentionBackend, num_layers: int) -> None:
        self._backend, self._groups = backend, list[KernelAttention]()
        self.places: list[tuple[int, AttentionLayer]] = []
        for layer in range(num_layers):
            group, index = backend.places[layer] if isinstance(backend, GroupedAttention) else (backend, layer)
            if isinstance(group, KernelAttention):
                if group not in self._groups:
                    self._groups.append(group)
                self.places.append((self._groups.index(group), group.layers[index]))
        self._step_groups = (StepGroup * len(self._groups))()
        self.groups_address = addressof(self._step_groups)

    @classmethod
    def begin(cls, backend: AttentionBackend, num_layers: int, held: PoolLayers | None) -> PoolLayers | None:
        """Return the layers in the backend's pool, or in those of its groups, for the step that it began.

        They are `held` if that was made for this backend. Returns None if not all layers attend in kernels.
        """
        if held is None or held._backend is not backend:
            held = cls(backend, num_layers)
        if len(held.places) < num_layers:
            return None
        for step, group in zip(held._step_groups, held._groups, strict=True):
            step.attention, step.slot_mapping = group.step_address, group.slot_mapping_address
        return held


def _per_head(numbers_H: Tensor | None) -> Tensor | None:
    return None if numbers_H is None else numbers_H.detach().float().contiguous()


def _rows(x_THD: Tensor) -> Tensor:
    """Return a float32 tensor whose rows are dense; the stride between rows may have any value."""
    x_THD = x_THD.float()
    is_dense = x_THD.stride(2) == 1 and x_THD.stride(1) == x_THD.shape[2]
    return x_THD if is_dense else x_THD.contiguous()
