"""Times each kernel of a step alone, beside the same operation in torch, and probes this machine's limits.

Owns: the shapes and cases; best_s; the tables of `octavo bench kernel`; the probes of memory bandwidth and flops.
Does not: check results (tests do).
The candidates of a case run in alternation and the best time of each counts, so that other load on the machine affects
all candidates alike. A table has a title and rows; a row maps column names to values, as in the JSON report.
Shapes: T tokens, H query heads, K KV heads, D head size, E inputs, F outputs, R rows, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo import machine
from octavo.nn.layers import Linear, choose_path
from octavo.nn.packed_weight import Codes, PackedWeight, WeightKind
from octavo.ops import cpu, packed_linear
from octavo.ops.attention import AttentionBackend, AttentionBatch, KVPool, LayerAttention, PoolShape
from octavo.ops.attention_batched import BatchedAttention
from octavo.ops.attention_kernel import KernelAttention, has_kernel
from octavo.ops.gated_mul import activation_of
from octavo.ops.rms_norm import add_rms_norm, rms_norm_reference

# Shapes of SmolLM2-135M.
HIDDEN, GATED, VOCAB = 576, 3072, 49_152
LINEAR_SHAPES = {"qkv": (960, 576), "gate_up": (3072, 576), "down": (576, 1536), "head": (49152, 576)}
LINEAR_MIN_S = 0.002  # minimum duration of one timing: shorter products are repeated within it

PROBE_BUFFER_BYTES = 256 * 2**20
PROBE_BUDGET_S = 0.25  # for each candidate
_PACKED_KINDS = {torch.float32: WeightKind.FLOAT32, torch.bfloat16: WeightKind.BFLOAT16}

Work = Callable[[], object]
KernelTable = dict[str, Any]


def best_s(
    works: Sequence[Work], budget_s: float, *, min_s: float = 0.0, synchronize: Callable[[], None] = lambda: None
) -> list[float]:
    """Call the functions in alternation (A B A B) until their budgets are spent; return the best seconds of each.

    The first round is not timed. A function that takes less than `min_s` is repeated within one timing.
    """
    repeats = []
    for work in works:
        start = time.perf_counter()
        work()
        synchronize()
        repeats.append(max(1, int(min_s / (time.perf_counter() - start))))
    best = [float("inf")] * len(works)
    end = time.perf_counter() + budget_s * len(works)
    while best[-1] == float("inf") or time.perf_counter() < end:
        for index, work in enumerate(works):
            start = time.perf_counter()
            for _ in range(repeats[index]):
                work()
            synchronize()
            best[index] = min(best[index], (time.perf_counter() - start) / repeats[index])
    return best


# --- norms, activations, sampling -------------------------------------------------------------------


def measure_rows(row_counts: Sequence[int], threads: int, budget_s: float) -> list[KernelTable]:
    """Return tables of microseconds per call by rows: a norm, an activation, and torch's argmax, softmax and top-k."""
    torch.set_num_threads(threads)
    tables: list[KernelTable] = [
        {"title": f"add + RMSNorm of {HIDDEN}", "rows": []},
        {"title": f"SiLU x mul of {GATED}", "rows": []},
        {"title": f"Torch over {VOCAB} logits: the cost of sampling without a kernel", "rows": []},
    ]
    weight_E = torch.ones(HIDDEN)
    with torch.inference_mode():
        for count in row_counts:
            inputs = torch.randn(count, HIDDEN), torch.randn(count, HIDDEN), weight_E, 1e-5
            gate_up_TG = torch.randn(count, GATED)
            pairs: list[tuple[Work, Work]] = [
                (partial(add_rms_norm, *inputs), partial(rms_norm_reference, *inputs)),
                (partial(activation_of("silu", is_gated=True), gate_up_TG), partial(_silu_mul_plain, gate_up_TG)),
            ]
            for table, pair in zip(tables, pairs, strict=False):
                own_s, torch_s = best_s(pair, budget_s)
                row = {"rows": count, "us": own_s * 1e6, "torch us": torch_s * 1e6, "ratio": torch_s / own_s}
                table["rows"].append(row)
            logits_RV = torch.randn(count, VOCAB)
            works = partial(logits_RV.argmax, -1), partial(logits_RV.softmax, -1), partial(logits_RV.topk, 64)
            columns = ("argmax us", "softmax us", "best 64 us")
            times_us = (seconds * 1e6 for seconds in best_s(works, budget_s))
            tables[2]["rows"].append({"rows": count, **dict(zip(columns, times_us, strict=True))})
    return tables


def _silu_mul_plain(gate_up_TG: Tensor) -> Tensor:
    gate_TF, up_TF = gate_up_TG.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate_TF) * up_TF


# --- linear layers ----------------------------------------------------------------------------------


def measure_linear(row_counts: Sequence[int], threads: int, budget_s: float) -> list[KernelTable]:
    """Return one table per layer: the product's time by rows, for each weight format and for torch's own products.

    Times include the preparation of the activations.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            return [
                {
                    "title": f"{layer}: {outputs} outputs of {inputs} inputs",
                    "rows": [
                        row for count in row_counts for row in _linear_rows(count, inputs, outputs, threads, budget_s)
                    ],
                }
                for layer, (outputs, inputs) in LINEAR_SHAPES.items()
            ]
    finally:
        torch.set_num_threads(before)


def _linear_rows(count: int, inputs: int, outputs: int, threads: int, budget_s: float) -> list[dict[str, Any]]:
    x_TE = torch.randn(count, inputs, generator=torch.Generator().manual_seed(0))
    candidates: dict[str, tuple[Work, int]] = {}
    for kind in WeightKind:
        weight = random_weight(kind, outputs, inputs)
        candidates[f"octavo {kind.name.lower()}"] = packed_product(weight, x_TE, outputs, threads), weight.nbytes
    candidates |= _torch_products(outputs, x_TE)
    times = best_s([work for work, _ in candidates.values()], budget_s, min_s=LINEAR_MIN_S)
    return [
        {
            "rows": count,
            "candidate": name,
            "seconds": seconds,
            "weight_bytes": num_bytes,
            "num_products": count * outputs * inputs,
        }
        for (name, (_, num_bytes)), seconds in zip(candidates.items(), times, strict=True)
    ]


def random_weight(kind: WeightKind, outputs: int, inputs: int) -> PackedWeight:
    """Return a packed weight of random codes."""
    random = np.random.default_rng(0)
    if kind in (WeightKind.FLOAT32, WeightKind.BFLOAT16):
        values = random.standard_normal((outputs, inputs), np.float32)
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        return PackedWeight.pack(Codes(kind, 0, values if kind == WeightKind.FLOAT32 else bits))
    scales = np.full((outputs, inputs // 32), 0.01, np.float16)
    if kind == WeightKind.INT8:
        return PackedWeight.pack(Codes(kind, 32, random.integers(-127, 128, (outputs, inputs), np.int8), scales))
    minima = -8 * scales if kind == WeightKind.INT4 else None
    return PackedWeight.pack(Codes(kind, 32, random.integers(0, 16, (outputs, inputs), np.uint8), scales, minima))


def packed_product(weight: PackedWeight, x_TE: Tensor, outputs: int, threads: int) -> Work:
    """Return a function that runs the native decoder's product, including the preparation of the activations."""
    descriptor, out_TF = weight.descriptor(), torch.empty(len(x_TE), outputs)

    def multiply() -> PackedWeight:
        prepared = packed_linear.prepare(x_TE, weight.kind, threads if len(x_TE) > threads else 1)
        packed_linear.linear(descriptor, prepared, out_TF, num_threads=threads)
        return weight  # keeps the weight's memory alive

    return multiply


def _torch_products(outputs: int, x_TE: Tensor) -> dict[str, tuple[Work, int]]:
    """Return torch's products with their weight bytes: F.linear, oneDNN prepacked, and int4 if this build has it."""
    weight_FE = torch.randn(outputs, x_TE.shape[1], generator=torch.Generator().manual_seed(1))
    low_FE, low_TE = weight_FE.bfloat16(), x_TE.bfloat16()
    works: dict[str, tuple[Work, int]] = {
        "torch float32": (lambda: torch.nn.functional.linear(x_TE, weight_FE), weight_FE.nbytes),
        "torch bfloat16": (lambda: torch.nn.functional.linear(low_TE, low_FE), low_FE.nbytes),
    }
    if torch._C._has_mkldnn:
        reordered = torch.ops.mkldnn._reorder_linear_weight(weight_FE, len(x_TE))
        pointwise = torch.ops.mkldnn._linear_pointwise
        works["torch float32 prepacked"] = (
            lambda: pointwise(x_TE, reordered, None, "none", [], ""),
            weight_FE.nbytes,
        )
    if hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu"):
        codes_FE = torch.randint(0, 16, weight_FE.shape, dtype=torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes_FE, 1)
        scales = torch.ones(x_TE.shape[1] // 32, outputs, 2, dtype=torch.bfloat16)
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
        works["torch int4"] = (lambda: multiply(low_TE, packed, 32, scales), packed.nbytes + scales.nbytes)
    return works


# --- attention --------------------------------------------------------------------------------------

BLOCK = 16
LAYERS = 4  # each call reads another layer's pool, so that small cases miss the CPU caches as they do in a model


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """The rows of a step: each row's context length and query tokens; all rows share the first `shared` positions."""

    name: str
    contexts: tuple[int, ...]
    counts: tuple[int, ...]
    shared: int = 0

    def batch(self) -> AttentionBatch:
        """Return the case as an AttentionBatch. The shared positions are in the first row's blocks."""
        contexts, counts = np.array(self.contexts), np.array(self.counts)
        widths = -(-contexts // BLOCK)
        table = np.zeros((len(contexts), widths.max()), dtype=np.int64)
        firsts = np.cumsum(widths) - widths
        for row, (first, width) in enumerate(zip(firsts.tolist(), widths.tolist(), strict=True)):
            table[row, :width] = np.arange(first, first + width)
        table[:, : self.shared // BLOCK] = table[0, : self.shared // BLOCK]
        row_T = np.repeat(np.arange(len(counts)), counts)
        starts = np.concatenate(([0], np.cumsum(counts)))
        position_T = np.arange(starts[-1]) - starts[row_T] + (contexts - counts)[row_T]
        slots_T = table[row_T, position_T // BLOCK] * BLOCK + position_T % BLOCK
        return AttentionBatch(
            num_tokens=int(starts[-1]),
            num_rows=len(counts),
            num_decodes=int((counts == 1).sum()),
            positions_T=torch.from_numpy(position_T),
            slot_mapping_T=torch.from_numpy(slots_T),
            block_table_NM=torch.from_numpy(table),
            counts=counts,
            contexts=contexts,
        )


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The attention heads of a model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def work(self, case: AttentionCase, itemsize: int) -> tuple[int, int]:
        """Return the bytes of keys and values that one layer must read, and its flops (2 per multiply-add)."""
        positions = sum(case.contexts) - (len(case.contexts) - 1) * case.shared
        pairs = sum(
            count * context - count * (count - 1) // 2
            for context, count in zip(case.contexts, case.counts, strict=True)
        )
        return 2 * positions * self.num_kv_heads * self.head_dim * itemsize, 4 * pairs * self.num_heads * self.head_dim


ATTENTION_CASES = (
    AttentionCase("32 decodes x 200", (200,) * 32, (1,) * 32),
    AttentionCase("32 decodes x 1000", (1000,) * 32, (1,) * 32),
    AttentionCase("1 decode x 4096", (4096,), (1,)),
    AttentionCase("prompt of 512", (512,), (512,)),
    AttentionCase("last 512 of 4096", (4096,), (512,)),
    AttentionCase("32 decodes x 500, 384 shared", (500,) * 32, (1,) * 32, 384),
)
ATTENTION_SHAPES = (AttentionShape(9, 3, 64), AttentionShape(16, 8, 128))


def measure_attention(row_counts: Sequence[int], threads: int, budget_s: float) -> list[KernelTable]:
    """Return one table: the time of one layer's attention for each case, and its share of the machine's limits.

    The table is empty without the kernel library. `row_counts` has no effect: the cases define their own rows.
    """
    torch.set_num_threads(threads)
    rates = probe_rates("cpu", "float32", machine.look().cache_bytes)
    rows = [
        row
        for shape in ATTENTION_SHAPES
        for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn)
        for case in ATTENTION_CASES
        if (row := attention_row(shape, dtype, case, rates, budget_s)) is not None
    ]
    return [{"title": "attention, one layer, in pools of each type", "rows": rows}]


def attention_row(
    shape: AttentionShape, dtype: torch.dtype, case: AttentionCase, rates: tuple[float, float], budget_s: float
) -> dict[str, Any] | None:
    """Time the kernel and the torch backend on a case; return None if there is no kernel for the pool."""
    blocks = sum(-(-context // BLOCK) for context in case.contexts)
    heads, size = (shape.num_heads, shape.num_kv_heads), shape.head_dim
    pool = KVPool(PoolShape(LAYERS, blocks, BLOCK, heads[1], size, size, dtype), torch.device("cpu"))
    layers = [LayerAttention(*heads, size, size, size**-0.5)] * LAYERS
    if not has_kernel(pool, layers):
        return None
    slots = torch.arange(blocks * BLOCK)
    for layer in range(LAYERS):
        pool.write(layer, slots, *torch.randn(2, len(slots), heads[1], size).unbind(0))
    batch, generator = case.batch(), torch.Generator().manual_seed(0)
    query_THD, keys_TKD, values_TKD = (
        torch.randn(batch.num_tokens, count, size, generator=generator) for count in (heads[0], heads[1], heads[1])
    )

    def attend(backend: AttentionBackend) -> None:
        for layer in range(LAYERS):
            backend.attend(layer, query_THD, keys_TKD, values_TKD)

    backends = KernelAttention(pool, layers), BatchedAttention(pool, layers)
    for backend in backends:
        backend.begin(batch)
    kernel_s, twin_s = (
        seconds / LAYERS for seconds in best_s([partial(attend, backend) for backend in backends], budget_s)
    )
    (bandwidth, flops_per_s), (num_bytes, flops) = rates, shape.work(case, dtype.itemsize)
    return {
        "heads": f"{shape.num_heads}/{shape.num_kv_heads} x {shape.head_dim}",
        "KV kind": str(dtype).removeprefix("torch."),
        "case": case.name,
        "kernel ms": kernel_s * 1e3,
        "twin ms": twin_s * 1e3,
        "times": twin_s / kernel_s,
        "GB/s": num_bytes / kernel_s / 1e9,
        "GFLOP/s": flops / kernel_s / 1e9,
        "% memory": 100 * num_bytes / kernel_s / bandwidth,
        "% product": 100 * flops / kernel_s / flops_per_s,
    }


# --- the machine ------------------------------------------------------------------------------------


def probe_rates(device: str, dtype: str, cache_bytes: int = 0, quantization: str = "none") -> tuple[float, float]:
    """Return memory bandwidth in bytes per second, and flops per second of a large product in the model's types.

    Uses torch's current number of threads. Bandwidth is the better of a read (sum) and a copy (read and write) of a
    buffer that is larger than any cache.
    """
    synchronize = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    num_bytes = max(PROBE_BUFFER_BYTES, 4 * cache_bytes)
    with torch.inference_mode():
        source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
        target = torch.empty_like(source)
        works: list[Work] = [source.sum, partial(target.copy_, source)]
        read_s, copy_s = best_s(works, PROBE_BUDGET_S, synchronize=synchronize)
        rows, inner, outer = (1024, 2048, 2048) if device == "cpu" else (8192, 8192, 8192)
        products = _products(device, getattr(torch, dtype), quantization, (rows, inner, outer))
        product_s = min(best_s(products, PROBE_BUDGET_S, synchronize=synchronize))
    return max(num_bytes / read_s, 2 * num_bytes / copy_s), 2 * rows * inner * outer / product_s


def _products(device: str, kind: torch.dtype, quantization: str, shape: tuple[int, int, int]) -> list[Work]:
    """Return the engine's product and torch's. The faster one sets the floor, so that no step beats the floor."""
    rows, inner, outer = shape
    x_TE = torch.ones(rows, inner, dtype=kind, device=device)
    works: list[Work] = []
    if device == "cpu" and cpu.status().is_loaded and kind in _PACKED_KINDS:
        packed_kind = _PACKED_KINDS[kind] if quantization == "none" else WeightKind[quantization.upper()]
        threads = torch.get_num_threads() if cpu.status().is_parallel else 1
        works.append(packed_product(random_weight(packed_kind, outer, inner), x_TE.float(), outer, threads))
    if quantization == "none":
        weight_FE = torch.ones(outer, inner, dtype=kind, device=device)
        paths = {choose_path(kind, weight_FE.device), "plain"}
        works += [partial(Linear(weight_FE, path=path), x_TE) for path in sorted(paths)]
    return works
