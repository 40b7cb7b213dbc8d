"""Short probes of this machine: memory bandwidth and the rate of a large matrix product, with torch.

Owns: the two probes, about half a second each. Does not: keep results or judge them.
Bandwidth is the better of a read (sum) and a copy (read and write) of a buffer larger than any cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from octavo.bench.floor import Rates
from octavo.bench.kernel_linear import random_weight
from octavo.nn.layers import Linear, choose_path
from octavo.nn.packed_weight import PackedWeight, WeightKind
from octavo.ops import cpu
from octavo.ops.packed_linear import linear, prepare

_PACKED = {torch.float32: WeightKind.FLOAT32, torch.bfloat16: WeightKind.BFLOAT16}
MIN_BUFFER_BYTES = 256 * 2**20
BUDGET_S = 0.5


def probe(device: str, dtype: str, cache_bytes: int = 0, quantization: str = "none") -> Rates:
    """Measure both rates on the device with torch's current number of threads, in the model's types."""
    with torch.inference_mode():
        bandwidth = _bandwidth(device, max(MIN_BUFFER_BYTES, 4 * cache_bytes))
        return Rates(bandwidth, _gemm_rate(device, dtype, quantization))


def _bandwidth(device: str, num_bytes: int) -> float:
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    read_s = _best(lambda: source.sum(), device)
    copy_s = _best(lambda: target.copy_(source), device)
    return max(num_bytes / read_s, 2 * num_bytes / copy_s)


def _gemm_rate(device: str, dtype: str, quantization: str) -> float:
    rows, inner, outer = (1024, 2048, 2048) if device == "cpu" else (8192, 8192, 8192)
    kind = getattr(torch, dtype)
    x = torch.ones(rows, inner, dtype=kind, device=device)
    weight = torch.ones(outer, inner, dtype=kind, device=device)
    # The engine's own products can be faster than torch's plain one, and it must not run below the floor.
    works: list[Callable[[], object]] = []
    if device == "cpu" and cpu.status().is_loaded and kind in _PACKED:
        works.append(_packed(_PACKED[kind] if quantization == "none" else WeightKind[quantization.upper()], x, outer))
    if quantization == "none":
        ways = {choose_path(kind, weight.device), "plain"}
        works += [partial(Linear(weight, path=way), x) for way in sorted(ways)]
    return 2 * rows * inner * outer / min(_best(work, device) for work in works)


def _packed(kind: WeightKind, x_TE: torch.Tensor, outputs: int) -> Callable[[], object]:
    """Return the native decoder's product with a weight of this kind and prepared activations."""
    threads = torch.get_num_threads() if cpu.status().is_parallel else 1
    weight = random_weight(kind, outputs, x_TE.shape[1])
    descriptor = weight.descriptor()
    prepared = prepare(x_TE.float(), kind, threads)
    out_TF = torch.empty(x_TE.shape[0], outputs)

    def multiply() -> PackedWeight:
        linear(descriptor, prepared, out_TF, num_threads=threads)
        return weight  # keeps its memory alive

    return multiply


def _best(work: Callable[[], object], device: str) -> float:
    """Return the shortest time of several runs within the budget, without the first one."""
    synchronize = torch.cuda.synchronize if device.startswith("cuda") else _nothing
    work()
    synchronize()
    best, end = float("inf"), time.perf_counter() + BUDGET_S / 2
    while best == float("inf") or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def _nothing() -> None:
    return None
