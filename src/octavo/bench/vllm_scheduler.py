"""Runs vLLM's own scheduler class under the decode load, if vLLM is installed.

Owns: building vLLM's scheduler without model weights, and timing its steps. Does not: install vLLM, or compare.
Written for vLLM 0.32. vLLM's internal interfaces are not stable, so a failure while building is a ConfigError.
"""

from __future__ import annotations

import importlib
import json
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from octavo.bench.scheduler import (
    BATCH_TOKENS,
    BLOCK_SIZE,
    MAX_FILL_STEPS,
    NUM_OUTPUT,
    NUM_PROMPT,
    LoadSetting,
    StepTime,
    make_ids,
    num_blocks,
)
from octavo.errors import ConfigError

# Enough for vLLM's ModelConfig; no weights are read.
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "vocab_size": 49152,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


def is_installed() -> bool:
    """Return True if vLLM can be imported."""
    return find_spec("vllm") is not None


class VllmScheduler:
    """vLLM's scheduler, filled as LoadedScheduler is. Raises ConfigError if this vLLM's classes do not fit."""

    name = "vllm"

    def __init__(self, setting: LoadSetting) -> None:
        if setting.load.name != "decode":
            raise ConfigError(f"vLLM's scheduler is measured under load decode only, not {setting.load.name}")
        self.setting = setting
        self.admit_s: list[float] = []
        try:
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "config.json").write_text(json.dumps(_MODEL))
                self._scheduler = self._build(folder)
            self._fill()
        except (ImportError, AttributeError, LookupError, TypeError, ValueError, RuntimeError, AssertionError) as error:
            raise ConfigError(f"vLLM's scheduler could not be built ({type(error).__name__}: {error})") from error

    def step(self) -> StepTime:
        """Schedule one step and update the scheduler with the step's tokens."""
        start = time.perf_counter()
        output = self._scheduler.schedule()
        planned = time.perf_counter()
        names = list(output.num_scheduled_tokens)
        result = _vllm("v1.outputs").ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[7]] * len(names),
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        commit_start = time.perf_counter()
        self._scheduler.update_from_output(output, result)
        end = time.perf_counter()
        num_rows = self.setting.num_rows
        is_typical = output.total_num_scheduled_tokens == num_rows == len(names)
        return StepTime(planned - start, end - commit_start, is_typical)

    def _build(self, folder: str) -> Any:
        config, interface = _vllm("config"), _vllm("v1.kv_cache_interface")
        model = config.ModelConfig(model=folder, dtype="bfloat16", seed=0, skip_tokenizer_init=True, max_model_len=4096)
        scheduling = config.SchedulerConfig(
            max_num_seqs=self.setting.num_rows,
            max_num_batched_tokens=BATCH_TOKENS,
            max_model_len=4096,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        )
        cache = config.CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
        cache.num_gpu_blocks = num_blocks(self.setting)
        whole = config.VllmConfig(
            model_config=model,
            scheduler_config=scheduling,
            cache_config=cache,
            parallel_config=config.ParallelConfig(),
        )
        float32 = importlib.import_module("torch").float32
        spec = interface.FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=float32)
        group = interface.KVCacheGroupSpec(["layer"], spec)
        return _vllm("v1.core.sched.scheduler").Scheduler(
            vllm_config=whole,
            kv_cache_config=interface.KVCacheConfig(
                num_blocks=cache.num_gpu_blocks, kv_cache_tensors=[], kv_cache_groups=[group]
            ),
            structured_output_manager=_vllm("v1.structured_output").StructuredOutputManager(whole),
            block_size=BLOCK_SIZE,
            log_stats=True,
        )

    def _fill(self) -> None:
        keys = _vllm("v1.core.kv_cache_utils")
        sha256 = _vllm("utils.hashing").sha256
        keys.init_none_hash(sha256)
        self._hasher = keys.get_request_block_hasher(BLOCK_SIZE, sha256)
        self._admit("r", self.setting.num_requests)
        for _ in range(MAX_FILL_STEPS):
            if self.step().is_typical:
                break
        else:
            raise ConfigError(f"vLLM's scheduler is not decoding after {MAX_FILL_STEPS} steps")
        self._admit("w", self.setting.waiting)

    def _admit(self, tag: str, count: int) -> None:
        """Queue requests. As for Octavo's scheduler, the block keys are computed outside the measured time."""
        params = _vllm("sampling_params").SamplingParams(ignore_eos=True, max_tokens=NUM_OUTPUT, temperature=0.0)
        kind = _vllm("v1.request").Request
        for index in range(count):
            request = kind(
                request_id=f"{tag}{index}",
                prompt_token_ids=make_ids(index, NUM_PROMPT).tolist(),
                sampling_params=params,
                pooling_params=None,
                block_hasher=self._hasher,
            )
            start = time.perf_counter()
            self._scheduler.add_request(request)
            self.admit_s.append(time.perf_counter() - start)


def _vllm(name: str) -> Any:
    return importlib.import_module(f"vllm.{name}")
