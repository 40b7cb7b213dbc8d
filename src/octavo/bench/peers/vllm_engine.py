"""vLLM's engine, stepped by hand in its own environment. Stand-alone: see host.py.

Options: model, threads, at_once, max_len, dtype. Written for vLLM 0.32.
"""

from __future__ import annotations

import importlib
import os
import time
from typing import Any

KV_GIB = "4"


class VllmHost:
    """One LLM; requests are added while fewer than `at_once` are open."""

    def __init__(self, options: dict[str, Any]) -> None:
        threads = options["threads"]
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", KV_GIB)
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}")
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        vllm = importlib.import_module("vllm")
        self._sampling: Any = importlib.import_module("vllm.sampling_params")
        llm = vllm.LLM(
            model=options["model"],
            dtype=options["dtype"],
            max_num_seqs=options["at_once"],
            max_model_len=options["max_len"],
            max_num_batched_tokens=int(os.environ.get("MAX_NUM_BATCHED_TOKENS", "2048")),
            enable_prefix_caching=True,
            seed=0,
        )
        self._llm = llm
        self._engine = llm.llm_engine
        self._num_added = 0
        self.facts = {"engine": f"vllm {vllm.__version__}", "dtype": options["dtype"]}

    def run(self, requests: list[dict[str, Any]], at_once: int) -> list[list[float]]:
        """Add requests while fewer than `at_once` are open, and step until all have ended."""
        waiting = list(enumerate(requests))[::-1]
        added: dict[str, tuple[int, float]] = {}
        times: list[list[float]] = [[] for _ in requests]
        begun: list[float] = [0.0] * len(requests)
        num_open = 0
        while waiting or num_open:
            while waiting and num_open < at_once:
                index, request = waiting.pop()
                name = f"r{self._num_added}"
                self._num_added += 1
                begun[index] = time.perf_counter()
                added[name] = index, begun[index]
                prompt = {"prompt_token_ids": request["prompt_token_ids"]}
                self._engine.add_request(name, prompt, self._params(request["max_tokens"]))
                num_open += 1
            for output in self._engine.step():
                # Names are returned as given, or with a suffix that the engine adds.
                index, _ = added.get(output.request_id) or added[output.request_id.partition("-")[0]]
                now = time.perf_counter()
                times[index] += [now] * sum(len(choice.token_ids) for choice in output.outputs)
                num_open -= bool(output.finished)
        return [[seen[0] - at, seen[-1] - at, len(seen)] for at, seen in zip(begun, times, strict=True)]

    def _params(self, max_tokens: int) -> Any:
        kind = self._sampling.RequestOutputKind.DELTA
        return self._sampling.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, output_kind=kind)


ENGINE = VllmHost  # read by peers/host.py
