"""Every setting, in frozen parts, with its flag: the one place where an option is defined.

Owns: the fields, their defaults, help and flag spellings (the CLI, OCTAVO_* and YAML keys derive from them).
Does not: look at the machine or a model (assembly passes those facts in), or read files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from octavo.errors import ConfigError


def option(default: Any, text: str, *flags: str) -> Any:
    """Define a setting: its default, help text, and flag spellings (the field's own name when none)."""
    return field(default=default, metadata={"help": text, "flags": flags})


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and how it is loaded."""

    model: str = option("smollm2", "alias, local folder, .gguf file or Hugging Face repository", "--model", "-m")
    revision: str | None = option(None, "branch, tag or commit of the repository", "--revision")
    served_model_name: str | None = option(None, "name under which clients address the model", "--served-model-name", "--alias")
    dtype: str = option("auto", "auto, float32, bfloat16 or float16", "--dtype")
    max_model_len: int | None = option(None, "longest prompt + output in tokens (default: the model's own)", "--max-model-len", "--ctx-size", "-c")
    chat_template: str | None = option(None, "file with a jinja chat template to use instead of the model's", "--chat-template")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV pool. At most one of num_blocks, kv_cache_bytes and kv_cache_tokens may be set."""

    block_size: int = option(16, "token positions in one KV block", "--block-size")
    num_blocks: int | None = option(None, "KV blocks in the pool", "--num-gpu-blocks-override")
    kv_cache_bytes: int | None = option(None, "bytes of the KV pool", "--kv-cache-memory-bytes")
    kv_cache_tokens: int | None = option(None, "token positions in the KV pool", "--kv-cache-tokens")
    memory_fraction: float | None = option(None, "share of the free memory for the KV pool (default: 0.9 on a GPU, a fitting size on a CPU)", "--gpu-memory-utilization")
    kv_cache_dtype: str = option("auto", "auto, float32, bfloat16 or float16", "--kv-cache-dtype")
    enable_prefix_caching: bool = option(True, "reuse KV blocks of equal prefixes across requests", "--enable-prefix-caching")


@dataclass(frozen=True, slots=True)
class SchedulingConfig:
    """How steps are composed."""

    policy: str = option("fcfs", "order of admission: fcfs or fifo", "--policy", "--scheduling-policy")
    max_batch_tokens: int | None = option(None, "tokens computed in one step (default: 512 on a CPU, 8192 on a GPU)", "--max-num-batched-tokens", "-b")
    max_sequences: int | None = option(None, "sequences running at once (default: 32 on a CPU, 256 on a GPU)", "--max-num-seqs", "-np")
    headroom: float | None = option(None, "share of the pool kept free at admission (default: the policy's)", "--headroom")
    chunked_prefill: bool = option(True, "split long prompts over several steps", "--enable-chunked-prefill")
    max_partial_prefills: int = option(0, "sequences whose prompt may be partly computed at once; 0 = no bound", "--max-num-partial-prefills")
    long_prefill_threshold: int = option(0, "most prompt tokens of one sequence in a step; 0 = no bound", "--long-prefill-token-threshold")


@dataclass(frozen=True, slots=True)
class ExecutionConfig:
    """Where and how steps run."""

    device: str = option("auto", "auto, cpu or cuda", "--device")
    threads: int | None = option(None, "CPU threads (default: the cores this process may use)", "--threads", "-t")
    depth: int = option(1, "plans in flight", "--pipeline-depth")
    attention: str = option("auto", "auto, batched or reference (the slow twin)", "--attention-backend")
    seed: int = option(0, "seed from which requests without one draw theirs", "--seed")


@dataclass(frozen=True, slots=True)
class ServingConfig:
    """The HTTP side."""

    host: str = option("127.0.0.1", "address to listen on", "--host")
    port: int = option(8000, "port to listen on", "--port")
    api_key: tuple[str, ...] = option((), "keys that clients must present (any of them)", "--api-key")
    insecure: bool = option(False, "allow an address other than loopback without a key", "--insecure")
    in_process: bool = option(False, "run the engine inside the API process (no crash protection)", "--in-process")
    max_waiting: int = option(1024, "requests that may wait before new ones get 429", "--max-queue-size")
    drain_timeout_s: float = option(30.0, "seconds that open requests get at shutdown", "--shutdown-timeout")


@dataclass(frozen=True, slots=True)
class Config:
    """All settings."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduling: SchedulingConfig = SchedulingConfig()
    execution: ExecutionConfig = ExecutionConfig()
    serving: ServingConfig = ServingConfig()

    def __post_init__(self) -> None:
        sizes = [n for n in ("num_blocks", "kv_cache_bytes", "kv_cache_tokens") if getattr(self.cache, n) is not None]
        if len(sizes) > 1:
            raise ConfigError(f"{' and '.join(sizes)} are both set; give one size for the KV pool")
