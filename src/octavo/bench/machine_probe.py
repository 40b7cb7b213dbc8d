"""Short probes of this machine: memory bandwidth and the rate of a large matrix product, with torch.

Owns: the two probes, about half a second each. Does not: keep results or judge them.
Bandwidth is the better of a read (sum) and a copy (read and write) of a buffer that no cache holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from octavo.bench.floor import Rates
from octavo.nn.linear import Linear, choose_path

MIN_BUFFER_BYTES = 256 * 2**20
BUDGET_S = 0.5


def probe(device: str, dtype: str, cache_bytes: int = 0) -> Rates:
    """Measure both rates on the device with the threads that torch has now; `dtype` is the model's."""
    with torch.inference_mode():
        return Rates(_bandwidth(device, max(MIN_BUFFER_BYTES, 4 * cache_bytes)), _gemm_rate(device, dtype))


def _bandwidth(device: str, num_bytes: int) -> float:
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    read_s = _best(lambda: source.sum(), device)
    copy_s = _best(lambda: target.copy_(source), device)
    return max(num_bytes / read_s, 2 * num_bytes / copy_s)


def _gemm_rate(device: str, dtype: str) -> float:
    rows, inner, outer = (1024, 2048, 2048) if device == "cpu" else (8192, 8192, 8192)
    kind = getattr(torch, dtype)
    x = torch.ones(rows, inner, dtype=kind, device=device)
    weight = torch.ones(outer, inner, dtype=kind, device=device)
    # The engine's own way of multiplying can beat torch's plain one; a floor below which it runs would be none.
    ways = {choose_path(kind, weight.device), "plain"}
    layers = [Linear(weight, path=way) for way in sorted(ways)]
    return 2 * rows * inner * outer / min(_best(partial(layer, x), device) for layer in layers)


def _best(work: Callable[[], torch.Tensor], device: str) -> float:
    """The shortest time of several runs within the budget, the first one not counted."""
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
