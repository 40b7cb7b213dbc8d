"""A step's parts: they add up to its time, and name what bounds it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.simulator.costs.steps_of import fit_steps, steps_of, workload
from tests.simulator.costs.test_table import write
from tests.simulator.fakes import ConstantCosts

from octavo.simulator.cost_model import CostModel, StepShape
from octavo.simulator.costs import Hardware, cost_model
from octavo.simulator.costs.fitted import Fitted

NAMES = ("llama-3.1-8b", "qwen3-30b-a3b", "gemma-3-27b", "llama-3.1-8b tp", "scaled", "fitted", "table", "constant")


def model_of(name: str, folder: Path) -> CostModel:
    """Return a cost model of each kind."""
    if name == "fitted":
        return Fitted(fit_steps(steps_of(model_of("llama-3.1-8b", folder), workload()), "test"))
    if name == "table":
        return cost_model(write(folder), Hardware.of("llama-3.1-8b", "h100", 2))
    if name == "constant":
        return ConstantCosts()
    model, _, is_split = name.partition(" ")
    hardware = Hardware.of("llama-3.1-8b" if name == "scaled" else model, "h100", 2 if is_split else 1)
    return cost_model("roofline*1.5" if name == "scaled" else "roofline", hardware)


@pytest.mark.parametrize("name", NAMES)
def test_the_parts_of_a_step_add_up_to_its_time_and_have_the_same_names(name: str, tmp_path: Path) -> None:
    costs, rng = model_of(name, tmp_path), random.Random(1)
    names = {tuple(costs.parts(StepShape([1], [])).seconds)}
    for _ in range(50):
        kv = [rng.randint(1, 9000) for _ in range(rng.randint(0, 40))]
        chunks = [(rng.randint(2, 4000), rng.randint(0, 4000)) for _ in range(rng.randint(0 if kv else 1, 3))]
        shape = StepShape(kv, chunks, len(kv))
        parts, step_s = costs.parts(shape), costs.step_s(shape)
        names.add(tuple(parts.seconds))
        assert sum(parts.seconds.values()) == pytest.approx(step_s, rel=1e-9)
        assert min(parts.seconds.values()) >= 0
        assert parts.compute_s is None or 0 < parts.compute_s <= step_s
    assert len(names) == 1


def test_a_few_decode_rows_are_bound_by_memory_and_a_long_chunk_by_compute(tmp_path: Path) -> None:
    costs = model_of("llama-3.1-8b", tmp_path)
    decode, chunk = StepShape([500] * 4, [], 4), StepShape([], [(8192, 0)], 1)
    few, many = costs.parts(decode), costs.parts(chunk)
    assert few.seconds["memory bandwidth"] > 0.6 * costs.step_s(decode) and few.seconds["compute"] == 0
    assert many.seconds["compute"] > 0.9 * costs.step_s(chunk)
    assert few.compute_s is not None and few.compute_s < 0.05 * costs.step_s(decode)
    assert many.compute_s is not None and many.compute_s > 0.9 * costs.step_s(chunk)
