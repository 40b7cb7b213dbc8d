"""transformers' continuous batching in its own environment. Stand-alone: see host.py.

Options: model (a folder, or a .gguf file, which is dequantised), threads, at_once, max_len, dtype. Written for 5.23.
"""

from __future__ import annotations

import importlib
import os
import time
from pathlib import Path
from typing import Any

PAGE_TOKENS, NUM_PAGES, STEP_TOKENS = 32, 1024, 512


class TransformersHost:
    """One model with its batching manager, which stays open."""

    def __init__(self, options: dict[str, Any]) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        torch = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
        settings: Any = importlib.import_module("transformers.generation.configuration_utils")
        torch.set_num_threads(options["threads"])
        path = Path(options["model"])
        where: dict[str, Any] = {"pretrained_model_name_or_path": str(path)}
        if path.suffix == ".gguf":
            where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
            where["quantization_config"] = transformers.GgufConfig(dequantize=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            **where, dtype=getattr(torch, options["dtype"])
        ).eval()
        model.set_attn_implementation("sdpa")
        generation = transformers.GenerationConfig(
            max_new_tokens=options["max_len"], do_sample=False, eos_token_id=-1, pad_token_id=2
        )
        batching = settings.ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=NUM_PAGES,
            max_batch_tokens=STEP_TOKENS,
            max_requests_per_batch=options["at_once"],
            allow_block_sharing=True,
            use_cuda_graph=False,
        )
        self._context = model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=batching, block=True, timeout=5
        )
        self._manager = self._context.__enter__()
        self.facts = {"engine": f"transformers {transformers.__version__}", "dtype": options["dtype"]}

    def run(self, requests: list[dict[str, Any]], at_once: int) -> list[list[float]]:
        """Keep `at_once` requests open until all have ended."""
        waiting = list(enumerate(requests))[::-1]
        index_of: dict[str, int] = {}
        begun: list[float] = [0.0] * len(requests)
        times: list[list[float]] = [[] for _ in requests]
        num_open = 0
        while waiting or num_open:
            while waiting and num_open < at_once:
                index, request = waiting.pop()
                begun[index] = time.perf_counter()
                name = self._manager.add_request(
                    input_ids=request["prompt_token_ids"],
                    max_new_tokens=request["max_tokens"],
                    eos_token_id=-1,
                    streaming=True,
                )
                index_of[name] = index
                num_open += 1
            output = self._manager.get_result(timeout=1)
            if output is None:
                if not self._manager.is_running():
                    raise RuntimeError("the batching manager ended")
                continue
            if output.error is not None:
                raise RuntimeError(str(output.error))
            seen = times[index_of[output.request_id]]
            seen += [time.perf_counter()] * (len(output.generated_tokens) - len(seen))
            num_open -= bool(output.is_finished())
        return [[seen[0] - at, seen[-1] - at, len(seen)] for at, seen in zip(begun, times, strict=True)]


ENGINE = TransformersHost  # read by peers/host.py
