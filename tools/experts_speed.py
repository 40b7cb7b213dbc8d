"""Compare a mixture of experts with llama.cpp's on the same GGUF file, in turns.

Usage: python tools/experts_speed.py [--kind Q4_0] [--bench LLAMA_BATCHED_BENCH] [--rounds 3] [--file PATH]
Writes a Qwen3-MoE of random weights (1.8 billion, of which 0.3 are active) unless the file exists. LLAMA_BATCHED_BENCH
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

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.executors.driver import Driver, make_prompt

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
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 1024, 24, 16, 4, 64, 32_000
EXPERTS, TOP_K, SIZE = 64, 8, 384


def write_model(path: Path, kind: GGMLQuantizationType) -> None:
    """Write the model: matrices of random blocks, all with one scale."""
    writer = GGUFWriter(path, "qwen3moe")
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("none")
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(4 * HIDDEN)
    writer.add_expert_feed_forward_length(SIZE)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(TOP_K)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    random = np.random.default_rng(0)
    size, size_bytes = GGML_QUANT_SIZES[kind]

    def matrix(name: str, *shape: int) -> None:
        blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // size, size_bytes), np.uint8)
        blocks[..., :2] = np.frombuffer(np.float16(0.0002 if kind.name == "Q8_0" else 0.004).tobytes(), np.uint8)
        writer.add_tensor(f"{name}.weight", blocks.reshape(*shape[:-1], -1), raw_dtype=kind)

    def norm(name: str, length: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(length, np.float32))

    matrix("token_embd", VOCABULARY, HIDDEN)
    matrix("output", VOCABULARY, HIDDEN)
    norm("output_norm", HIDDEN)
    for layer in range(LAYERS):
        prefix = f"blk.{layer}."
        for name, length in (("attn_norm", HIDDEN), ("ffn_norm", HIDDEN), ("attn_q_norm", HEAD_DIM),
                             ("attn_k_norm", HEAD_DIM)):  # fmt: skip
            norm(prefix + name, length)
        matrix(f"{prefix}attn_q", HEADS * HEAD_DIM, HIDDEN)
        matrix(f"{prefix}attn_k", KV_HEADS * HEAD_DIM, HIDDEN)
        matrix(f"{prefix}attn_v", KV_HEADS * HEAD_DIM, HIDDEN)
        matrix(f"{prefix}attn_output", HIDDEN, HEADS * HEAD_DIM)
        router = random.standard_normal((EXPERTS, HIDDEN)).astype(np.float32) / np.float32(HIDDEN**0.5)
        writer.add_tensor(f"{prefix}ffn_gate_inp.weight", router)
        matrix(f"{prefix}ffn_gate_exps", EXPERTS, SIZE, HIDDEN)
        matrix(f"{prefix}ffn_up_exps", EXPERTS, SIZE, HIDDEN)
        matrix(f"{prefix}ffn_down_exps", EXPERTS, HIDDEN, SIZE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
    parser.add_argument("--file", type=Path)
    arguments = parser.parse_args()
    path = arguments.file or Path(tempfile.mkdtemp()) / f"qwen3moe-{arguments.kind}.gguf"
    if not path.exists():
        write_model(path, GGMLQuantizationType[arguments.kind])
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
