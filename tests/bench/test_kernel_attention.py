"""The attention benchmark: what it counts, and that it runs."""

from __future__ import annotations

import pytest
import torch

from octavo.bench import kernel_attention
from octavo.bench.kernel_attention import COLUMNS, AttentionCase, AttentionShape, MachineLimits, measure, work_of


def test_the_least_bytes_and_the_operations_of_a_case() -> None:
    shape = AttentionShape("2/1 x 8", 2, 1, 8)
    assert work_of(AttentionCase("decodes", (10, 20), (1, 1)), shape, 4) == (2 * 30 * 8 * 4, 4 * 30 * 2 * 8)
    assert work_of(AttentionCase("prompt", (3,), (3,)), shape, 2) == (2 * 3 * 8 * 2, 4 * (1 + 2 + 3) * 2 * 8)
    assert work_of(AttentionCase("shared", (32, 32), (1, 1), 16), shape, 4)[0] == 2 * (64 - 16) * 8 * 4


def test_rows_have_the_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_attention, "BUDGET_S", 0.0)
    cases = (AttentionCase("a", (20, 40), (1, 7)), AttentionCase("b", (33, 34), (1, 1), 16))
    rows = measure(MachineLimits(1e9, 1e9), (AttentionShape("2/1 x 8", 2, 1, 8),), (torch.float32,), cases)
    assert all(len(row) == len(COLUMNS) for row in rows) and len(rows) in (0, len(cases))
