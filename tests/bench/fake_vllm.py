"""A stand-in with the names and signatures of vLLM 0.32 that its adapter uses; it only queues and decodes.

It proves the adapter's own steps, not that a real vLLM takes them.
"""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


def keep(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**fields)


def model_config(*, model: str, **fields: Any) -> SimpleNamespace:
    assert json.loads((Path(model) / "config.json").read_text())["model_type"] == "llama"
    return keep(**fields)


def make_request(*, request_id: str, prompt_token_ids: list[int], block_hasher: Any, **fields: Any) -> SimpleNamespace:
    assert isinstance(prompt_token_ids, list) and block_hasher == "hasher"
    return keep(request_id=request_id, left=len(prompt_token_ids), **fields)


class FakeScheduler:
    """Gives each running request one token, or its prompt, within the budget."""

    def __init__(self, *, vllm_config: Any, kv_cache_config: Any, block_size: int, **fields: Any) -> None:
        self.sizes = vllm_config.scheduler_config
        self.blocks = kv_cache_config.num_blocks
        self.waiting: deque[Any] = deque()
        self.running: list[Any] = []

    def add_request(self, request: Any) -> None:
        self.waiting.append(request)

    def schedule(self) -> SimpleNamespace:
        while self.waiting and len(self.running) < self.sizes.max_num_seqs:
            self.running.append(self.waiting.popleft())
        left, scheduled = self.sizes.max_num_batched_tokens, {}
        for request in self.running:
            if left:
                scheduled[request.request_id] = count = min(left, request.left)
                request.left = max(1, request.left - count)
                left -= count
        return keep(num_scheduled_tokens=scheduled, total_num_scheduled_tokens=sum(scheduled.values()))

    def update_from_output(self, output: Any, result: Any) -> None:
        assert result.req_ids == list(output.num_scheduled_tokens)
        assert [result.req_id_to_index[name] for name in result.req_ids] == list(range(len(result.req_ids)))
        assert result.sampled_token_ids == [[7]] * len(result.req_ids)


def modules() -> dict[str, ModuleType]:
    """What to put into sys.modules."""
    names = {
        "": {},
        ".config": {
            "ModelConfig": model_config, "SchedulerConfig": keep, "CacheConfig": keep, "ParallelConfig": keep,
            "VllmConfig": keep,
        },
        ".sampling_params": {"SamplingParams": keep},
        ".utils": {},
        ".utils.hashing": {"sha256": "sha256"},
        ".v1": {},
        ".v1.core": {},
        ".v1.core.kv_cache_utils": {
            "init_none_hash": lambda function: None, "get_request_block_hasher": lambda size, function: "hasher",
        },
        ".v1.core.sched": {},
        ".v1.core.sched.scheduler": {"Scheduler": FakeScheduler},
        ".v1.kv_cache_interface": {
            "FullAttentionSpec": keep, "KVCacheConfig": keep, "KVCacheGroupSpec": lambda layers, spec: (layers, spec),
        },
        ".v1.outputs": {"ModelRunnerOutput": keep},
        ".v1.request": {"Request": make_request},
        ".v1.structured_output": {"StructuredOutputManager": lambda config: None},
    }  # fmt: skip
    made = {}
    for name, values in names.items():
        module = made["vllm" + name] = ModuleType("vllm" + name)
        module.__path__ = []  # type: ignore[attr-defined]
        vars(module).update(values)
    return made
