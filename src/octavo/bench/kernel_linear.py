"""Linear kernels by kind of weight and number of rows, beside torch's own, on the shapes of SmolLM2-135M.

Owns: building the weights, timing in turn, the figures. Does not: parse flags or print.
Invariants: every candidate of a case is timed in turn, round after round; a figure is the least of its rounds, so that
other load on the machine counts little. Shapes: T tokens, E inputs, F outputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.nn.packed_weight import Codes, PackedWeight, WeightKind
from octavo.ops import packed_linear

SHAPES = {"qkv": (960, 576), "gate_up": (3072, 576), "down": (576, 1536), "head": (49152, 576)}
ROW_COUNTS = (1, 4, 8, 32, 128, 512)
_LEAST_SECONDS = 0.002  # of one timing: short layers are repeated


@dataclass(frozen=True, slots=True)
class LinearFigure:
    """One candidate on one shape and number of rows. Bytes are those of the weight."""

    candidate: str
    layer: str
    num_rows: int
    seconds: float
    weight_bytes: int
    num_products: int

    @property
    def gigabytes_per_s(self) -> float:
        """Return the weight bytes read in a second, in 10^9."""
        return self.weight_bytes / self.seconds / 1e9

    @property
    def gigamacs_per_s(self) -> float:
        """Return the multiply-adds in a second, in 10^9."""
        return self.num_products / self.seconds / 1e9


def measure(layer: str, num_rows: int, num_threads: int, rounds: int = 5) -> list[LinearFigure]:
    """Time all candidates on one layer, with the preparation of activations. Needs the kernels."""
    outputs, inputs = SHAPES[layer]
    x_TE = torch.randn(num_rows, inputs, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        candidates = {**_kernels(outputs, x_TE, num_threads), **_torch_paths(outputs, x_TE)}
        with torch.inference_mode():
            seconds = _least_seconds({name: call for name, (call, _) in candidates.items()}, rounds)
    finally:
        torch.set_num_threads(before)
    products = num_rows * outputs * inputs
    return [
        LinearFigure(name, layer, num_rows, seconds[name], nbytes, products)
        for name, (_, nbytes) in candidates.items()
    ]  # fmt: skip


def _least_seconds(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    least = dict.fromkeys(calls, float("inf"))
    repeats = dict.fromkeys(calls, 1)
    for round_index in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            seconds = (time.perf_counter() - start) / repeats[name]
            if round_index == 0:  # the first round warms up and sets the number of repeats
                repeats[name] = max(1, int(_LEAST_SECONDS / seconds))
            else:
                least[name] = min(least[name], seconds)
    return least


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
    return PackedWeight.pack(Codes(kind, 32, random.integers(0, 16, (outputs, inputs), np.uint8), scales, -8 * scales))


def _kernels(outputs: int, x_TE: Tensor, num_threads: int) -> dict[str, tuple[Callable[[], object], int]]:
    out_TF = torch.empty(len(x_TE), outputs)

    def call_of(packed: PackedWeight) -> Callable[[], object]:
        descriptor = packed.descriptor()

        def call() -> PackedWeight:
            prepared = packed_linear.prepare(x_TE, packed.kind, num_threads if len(x_TE) > num_threads else 1)
            packed_linear.linear(descriptor, prepared, out_TF, num_threads=num_threads)
            return packed  # keeps its memory alive

        return call

    weights = {kind: random_weight(kind, outputs, x_TE.shape[1]) for kind in WeightKind}
    return {f"octavo {kind.name.lower()}": (call_of(packed), packed.nbytes) for kind, packed in weights.items()}


def _torch_paths(outputs: int, x_TE: Tensor) -> dict[str, tuple[Callable[[], object], int]]:
    """Return F.linear and oneDNN's prepacked form, and torch's int4 if this build has it."""
    weight_FE = torch.randn(outputs, x_TE.shape[1], generator=torch.Generator().manual_seed(1))
    low_FE, low_TE = weight_FE.bfloat16(), x_TE.bfloat16()
    paths: dict[str, tuple[Callable[[], object], int]] = {
        "torch float32": (lambda: torch.nn.functional.linear(x_TE, weight_FE), weight_FE.nbytes),
        "torch bfloat16": (lambda: torch.nn.functional.linear(low_TE, low_FE), low_FE.nbytes),
    }
    if torch._C._has_mkldnn:
        reordered = torch.ops.mkldnn._reorder_linear_weight(weight_FE, len(x_TE))
        pointwise = torch.ops.mkldnn._linear_pointwise
        paths["torch float32 prepacked"] = (
            lambda: pointwise(x_TE, reordered, None, "none", [], ""),
            weight_FE.nbytes,
        )
    if hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu"):
        codes_FE = torch.randint(0, 16, weight_FE.shape, dtype=torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes_FE, 1)
        scales = torch.ones(x_TE.shape[1] // 32, outputs, 2, dtype=torch.bfloat16)
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
        paths["torch int4"] = (lambda: multiply(low_TE, packed, 32, scales), packed.nbytes + scales.nbytes)
    return paths
