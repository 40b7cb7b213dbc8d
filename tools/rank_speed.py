"""Measure decoding by the ordinary decoder, by one rank with --tp-invariant, and by two ranks over gloo, in turns.

Usage: python tools/rank_speed.py [MODEL] [--quantization none|int8|int4]. One thread each. The last line is one JSON
object: tokens/s by rows of the batch, the medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.executors.driver import Driver, make_prompt
from tests.nn.rank_group import RankGroup

from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import resolve_model
from octavo.config import ExecutionConfig, ModelConfig
from octavo.core.plan import ROW_CARRY, ROW_SAMPLE
from octavo.core.request import SamplingParams
from octavo.executors.protocol import ExecutorSpec
from octavo.executors.torch_executor import TorchExecutor
from octavo.nn.parallel import Parallel

ROWS = (1, 8, 32)
ROUNDS, STEPS = 7, 6
SPEC = ExecutorSpec(max_sequences=40, max_batch_tokens=512, block_size=16, num_blocks=900, max_model_len=512)
_kept: dict[str, Any] = {}  # a rank process keeps its driver between calls


def open_driver(parallel: Parallel | None, model: str, quantization: str) -> bool:
    """Open the model with 32 sequences of 20 tokens."""
    files = resolve_model(model)
    execution, settings = ExecutionConfig(device="cpu", threads=1), ModelConfig(quantization=quantization)
    executor = TorchExecutor(files, read_model_spec(files), execution, settings, parallel)
    driver = Driver(executor, executor.open(SPEC))
    for slot in range(max(ROWS)):
        driver.add(slot, make_prompt(20, seed=slot), SamplingParams(temperature=0))
        driver.row(slot, 0, 20, ROW_SAMPLE)
        if slot % 16 == 15:
            driver.run()
    key = "own" if parallel is None else "rank"
    _kept[key] = driver, [21] * max(ROWS)
    return True


def time_steps(parallel: Parallel | None, rows: int) -> float:
    """Decode STEPS steps of this many rows; return seconds per step."""
    driver, lengths = _kept["own" if parallel is None else "rank"]
    started_at = time.perf_counter()
    for _ in range(STEPS):
        for slot in range(rows):
            driver.row(slot, lengths[slot] - 1, 1, ROW_SAMPLE | ROW_CARRY)
            lengths[slot] += 1
        driver.run()
    return (time.perf_counter() - started_at) / STEPS


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--quantization", default="none")
    arguments = parser.parse_args()
    open_driver(None, arguments.model, arguments.quantization)
    open_driver(Parallel(), arguments.model, arguments.quantization)
    names = ("ordinary", "tp1", "tp2")
    found: dict[str, dict[int, list[float]]] = {name: {rows: [] for rows in ROWS} for name in names}
    with RankGroup(Path(tempfile.mkdtemp()), 2) as group:
        group.call(open_driver, arguments.model, arguments.quantization)
        for rows in ROWS:
            for _ in range(ROUNDS):
                found["ordinary"][rows].append(time_steps(None, rows))
                found["tp1"][rows].append(time_steps(Parallel(), rows))
                found["tp2"][rows].append(max(group.call(time_steps, rows)))
    speed = {name: {rows: round(rows / median(times[rows]), 1) for rows in ROWS} for name, times in found.items()}
    for name in names[1:]:
        shares = {rows: f"{speed[name][rows] / speed['ordinary'][rows]:.2f}" for rows in ROWS}
        print(name, shares, "of the ordinary decoder")
    print(json.dumps({"model": arguments.model, "quantization": arguments.quantization, "tokens_per_s": speed}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
