"""The bench of masks: both halves decode side by side, and one of them is held to the grammar all the way."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.tiny_models import make_tiny_model

from octavo.artifacts.resolve import resolve_model
from octavo.bench import grammar_masks


def test_P06_the_bench_of_masks_times_as_many_steps_of_both_halves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model("llama3", tmp_path / "llama3", eos_token_id=2)
    monkeypatch.setattr(grammar_masks, "resolve_model", lambda _: resolve_model(str(folder)))
    monkeypatch.setattr(grammar_masks, "STEPS", 12)
    monkeypatch.setattr(grammar_masks, "WARM_UP", 1)
    seen: dict[str, int] = {}
    run = grammar_masks.HalfConstrainedBatch.run

    def watched(self: grammar_masks.HalfConstrainedBatch, count: int) -> tuple[list[float], list[float]]:
        free_s, held_s = run(self, count)
        seen["free"], seen["held"] = len(free_s), len(held_s)
        return free_s, held_s

    monkeypatch.setattr(grammar_masks.HalfConstrainedBatch, "run", watched)
    (table,) = grammar_masks.measure_masks((2,), 1, 0.1)
    (row,) = table["rows"]
    assert list(row) == ["rows", "free ms", "held ms", "ratio"] and "torch" in sys.modules
    assert row["rows"] == 2 and min(row.values()) > 0
    assert seen["free"] == seen["held"] == 12
