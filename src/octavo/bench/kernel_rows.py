"""Norms, activations and the choice of tokens alone, beside their torch twins.

Owns: the shapes and the tables. Does not: check results (tests do).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from octavo.bench.kernel_table import KernelTable, Sizes, best_s
from octavo.ops.rms_norm import add_rms_norm, rms_norm_reference
from octavo.ops.silu_mul import silu_mul

HIDDEN, GATED, VOCAB = 576, 3072, 49_152  # SmolLM2-135M's


def tables(sizes: Sizes) -> list[KernelTable]:
    """Return tables of microseconds a call, by rows."""
    torch.set_num_threads(sizes.threads)
    with torch.inference_mode():
        return [_norms(sizes), _activations(sizes), _choices(sizes)]


def _norms(sizes: Sizes) -> KernelTable:
    rows = []
    weight_E = torch.ones(HIDDEN)
    for count in sizes.rows:
        inputs = torch.randn(count, HIDDEN), torch.randn(count, HIDDEN), weight_E, 1e-5
        ours, twin = best_s([partial(add_rms_norm, *inputs), partial(rms_norm_reference, *inputs)], sizes.budget_s)
        rows.append((count, ours * 1e6, twin * 1e6, twin / ours))
    return KernelTable(f"add + RMSNorm of {HIDDEN}", ("rows", "us", "torch us", "ratio"), rows)


def _activations(sizes: Sizes) -> KernelTable:
    rows = []
    for count in sizes.rows:
        gate_up_TG = torch.randn(count, GATED)
        ours, twin = best_s([partial(silu_mul, gate_up_TG), partial(_silu_mul_plain, gate_up_TG)], sizes.budget_s)
        rows.append((count, ours * 1e6, twin * 1e6, twin / ours))
    return KernelTable(f"SiLU x mul of {GATED}", ("rows", "us", "torch us", "ratio"), rows)


def _silu_mul_plain(gate_up_TG: Tensor) -> Tensor:
    gate_TF, up_TF = gate_up_TG.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate_TF) * up_TF


def _choices(sizes: Sizes) -> KernelTable:
    rows = []
    for count in sizes.rows:
        logits_RV = torch.randn(count, VOCAB)
        works: list[Callable[[], object]] = [
            partial(logits_RV.argmax, -1),
            partial(logits_RV.softmax, -1),
            partial(logits_RV.topk, 64),
        ]
        rows.append((count, *(seconds * 1e6 for seconds in best_s(works, sizes.budget_s))))
    columns = ("rows", "argmax us", "softmax us", "best 64 us")
    return KernelTable(f"Torch over {VOCAB} logits, the least that sampling costs without a kernel", columns, rows)
