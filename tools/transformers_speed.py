"""Compare the transformers decoder's speed with the native decoder's on one model folder: CPU time of a step's layers.

Steps of the two decoders alternate, on one thread, and the lower quartile of each counts. The logits' largest
difference is printed too. A GGUF model is first written as a folder: give --from. With --engine, whole engines generate
in turns on all cores instead, and the median of their output tokens a second counts.
Usage: python -m tools.transformers_speed FOLDER [--from MODEL] [--quantization none|int8|int4] [--engine]
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tools.model_folder import write_folder

from octavo import LLM, SamplingParams
from octavo.artifacts.model_spec import ModelSpec
from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import DEFAULT_MODEL, resolve_model
from octavo.config import ExecutionConfig, ModelConfig
from octavo.executors.loading import DecoderChoice
from octavo.ops.attention import AttentionBatch, KVPool, PoolShape
from octavo.ops.attention_kernel import KernelAttention

BLOCK = 16
ENGINE_TOKENS, ENGINE_ROUNDS = 64, 9  # the first round warms up
CASES = ((1, 1, 200), (8, 1, 200), (32, 1, 200), (1, 256, 256))  # rows, tokens of each, context


def batch_of(rows: int, count: int, context: int) -> AttentionBatch:
    """A step of equal rows."""
    width = -(-context // BLOCK)
    table_NM = torch.arange(rows * width).view(rows, width)
    positions_T = torch.arange(context - count, context).repeat(rows)
    row_T = torch.arange(rows).repeat_interleave(count)
    return AttentionBatch(
        num_tokens=rows * count, num_rows=rows, num_decodes=rows if count == 1 else 0, positions_T=positions_T,
        slot_mapping_T=table_NM[row_T, positions_T // BLOCK] * BLOCK + positions_T % BLOCK,
        block_table_NM=table_NM, counts=np.full(rows, count), contexts=np.full(rows, context),
    )  # fmt: skip


@torch.inference_mode()
def compare(decoders: dict[str, tuple[Any, KernelAttention]], spec: ModelSpec, case: tuple[int, int, int]) -> Any:
    """Return one case's milliseconds, their ratio, and the logits' largest difference."""
    rows, count, _ = case
    batch = batch_of(*case)
    ids_T = torch.randint(0, spec.vocab_size, (batch.num_tokens,), dtype=torch.int32)
    times: dict[str, list[float]] = {name: [] for name in decoders}
    logits = {}
    for _ in range(60 if count == 1 else 12):
        for name, (decoder, attention) in decoders.items():
            begin = time.thread_time()
            attention.begin(batch)
            logits[name] = decoder.logits(decoder.forward(ids_T, batch.positions_T, attention)[-rows:])
            times[name].append(time.thread_time() - begin)
    native, other = (sorted(times[name])[len(times[name]) // 4] * 1e3 for name in decoders)
    difference = float((logits["native"] - logits["transformers"]).abs().max())
    return {"rows": rows, "tokens": count, "native_ms": round(native, 2), "transformers_ms": round(other, 2),
            "ratio": round(other / native, 2), "difference": difference}  # fmt: skip


def compare_engines(folder: Path, quantization: str, num_requests: int) -> Any:
    """Return the output tokens a second of both engines with this many requests at once, and the ratio of times."""
    params = SamplingParams(max_tokens=ENGINE_TOKENS, ignore_eos=True, temperature=0.0)
    rates: dict[str, list[float]] = {"native": [], "transformers": []}
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                LLM(str(folder), decoder=name, quantization=quantization, max_num_seqs=num_requests,
                    enable_prefix_caching=False, kv_cache_memory_bytes="1G")
            )
            for name in rates
        }  # fmt: skip
        for _ in range(ENGINE_ROUNDS):
            for name, engine in engines.items():
                begin = time.perf_counter()
                engine.generate([f"Story {index} begins in" for index in range(num_requests)], params)
                rates[name].append(num_requests * ENGINE_TOKENS / (time.perf_counter() - begin))
    native, other = (round(float(np.median(found[1:])), 1) for found in rates.values())
    return {"requests": num_requests, "native_tokens_per_s": native, "transformers_tokens_per_s": other,
            "ratio": round(native / other, 2)}  # fmt: skip


def main() -> None:
    """Print one JSON object per case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--from", dest="source", default=DEFAULT_MODEL)
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--engine", action="store_true")
    options = parser.parse_args()
    if not (options.folder / "config.json").exists():
        write_folder(options.source, options.folder)
    if options.engine:
        for num_requests in (1, 16):
            print(json.dumps(compare_engines(options.folder, options.quantization, num_requests)), flush=True)
        return
    torch.set_num_threads(1)
    files = resolve_model(str(options.folder))
    spec = read_model_spec(files)
    decoders: dict[str, tuple[Any, KernelAttention]] = {}
    for name in ("native", "transformers"):
        choice = DecoderChoice(
            files, spec, ExecutionConfig(decoder=name, threads=1), ModelConfig(quantization=options.quantization)
        )
        decoder = choice.load(2048).decoder
        heads = (spec.num_kv_heads, spec.head_dim, spec.head_dim)
        pool = KVPool(PoolShape(spec.num_layers, 1000, BLOCK, *heads, choice.dtype), torch.device("cpu"))
        decoders[name] = (decoder, KernelAttention(pool, decoder.attention))
    for case in CASES:
        print(json.dumps(compare(decoders, spec, case)), flush=True)


if __name__ == "__main__":
    main()
