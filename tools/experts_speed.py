"""Compare a mixture of experts with llama.cpp's on the same GGUF file, in turns.

Usage: python tools/experts_speed.py [--kind Q4_0] [--bench LLAMA_BATCHED_BENCH] [--rounds 3] [--folder FOLDER]
Writes tools.model_folder's qwen3-moe into the folder unless it exists there. LLAMA_BATCHED_BENCH
is llama.cpp's program of that name; without it, only Octavo is measured. The last line is one JSON object: tokens/s of
prefill and decoding by rows, the medians of the rounds, and the ratios of Octavo to llama.cpp.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.executors.driver import Driver, make_prompt
from tools.model_folder import gguf_path, write_model

from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import resolve_model
from octavo.config import ExecutionConfig, ModelConfig
from octavo.core.plan import ROW_CARRY, ROW_SAMPLE
from octavo.core.request import SamplingParams
from octavo.executors.protocol import ExecutorSpec
from octavo.executors.torch_executor import TorchExecutor

ROWS = (1, 8)
PROMPT, STEPS = 256, 32
SPEC = ExecutorSpec(max_sequences=8, max_batch_tokens=2048, block_size=16, num_blocks=200, max_model_len=512)


def open_driver(path: Path, threads: int) -> Driver:
    """Open the model."""
    torch.set_num_threads(threads)
    files = resolve_model(str(path))
    execution = ExecutionConfig(device="cpu", threads=threads)
    executor = TorchExecutor(files, read_model_spec(files), execution, ModelConfig())
    return Driver(executor, executor.open(SPEC))


def measure(driver: Driver, rows: int) -> tuple[float, float]:
    """Return tokens/s of prefill of this many prompts at once, and of decoding them."""
    lengths = [PROMPT + 1] * rows
    for slot in range(rows):
        driver.add(slot, make_prompt(PROMPT, seed=slot), SamplingParams(temperature=0))
        driver.row(slot, 0, PROMPT, ROW_SAMPLE)
    begun = time.perf_counter()
    driver.run()
    prefilled = time.perf_counter()
    for _ in range(STEPS):
        for slot in range(rows):
            driver.row(slot, lengths[slot] - 1, 1, ROW_SAMPLE | ROW_CARRY)
            lengths[slot] += 1
        driver.run()
    decoded = time.perf_counter()
    return rows * PROMPT / (prefilled - begun), rows * STEPS / (decoded - prefilled)


def measure_llama(bench: str, path: Path, threads: int) -> dict[int, tuple[float, float]]:
    """Return the same of llama.cpp, by rows."""
    sizes = ["-npp", str(PROMPT), "-ntg", str(STEPS), "-npl", ",".join(map(str, ROWS))]
    sizes += ["-c", str(max(ROWS) * (PROMPT + STEPS + 16)), "-b", "2048", "-ub", "512"]
    command = [bench, "-m", str(path), *sizes, "-t", str(threads), "-tb", str(threads), "--output-format", "jsonl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if len(found) != len(ROWS):
        raise SystemExit(f"{bench} ended with {done.returncode}: {done.stderr[-2000:]}")
    return {run["pl"]: (run["speed_pp"], run["speed_tg"]) for run in found}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", default="Q4_0")
    parser.add_argument("--bench")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "qwen3-moe")
    arguments = parser.parse_args()
    write_model("qwen3-moe", arguments.folder, [arguments.kind])
    path = gguf_path(arguments.folder, arguments.kind)
    driver = open_driver(path, arguments.threads)
    measure(driver, 1)
    own: dict[int, list[tuple[float, float]]] = {rows: [] for rows in ROWS}
    peer: dict[int, list[tuple[float, float]]] = {rows: [] for rows in ROWS}
    for _ in range(arguments.rounds):
        for rows in ROWS:
            own[rows].append(measure(driver, rows))
        if arguments.bench:
            for rows, speeds in measure_llama(arguments.bench, path, arguments.threads).items():
                peer[rows].append(speeds)
    report: dict[str, object] = {"kind": arguments.kind, "threads": arguments.threads}
    for rows in ROWS:
        for index, name in enumerate(("prefill", "decode")):
            ours = median(speeds[index] for speeds in own[rows])
            entry = {"octavo": round(ours, 1)}
            if peer[rows]:
                theirs = median(speeds[index] for speeds in peer[rows])
                entry |= {"llama.cpp": round(theirs, 1), "ratio": round(ours / theirs, 2)}
            report[f"{name} {rows}"] = entry
            print(f"{name} of {rows} rows: {entry}")
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
