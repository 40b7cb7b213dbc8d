"""Maps unsupported options of vLLM, SGLang and llama.cpp to the equivalent Octavo flag, or to the reason for refusal.

Owns: the tables, for flags and for keyword arguments of LLM.
Does not: list flags of vLLM and llama.cpp that Octavo accepts (the settings declare them as spellings).
"""

from __future__ import annotations

# Our flag -> other programs' flags with the same meaning, which near_names() would not find.
_SPELLINGS = {
    "--max-model-len": ("--n-ctx", "--max-seq-len", "--context-length"),
    "--model": ("--hf-repo", "-hf", "-hfr", "--model-path"),
    "--max-num-seqs": ("--max-running-requests", "--max-concurrent-requests"),
    "--kv-cache-tokens": ("--max-total-tokens",),
    "--gpu-memory-utilization": ("--mem-fraction-static",),
    "--max-num-batched-tokens": ("--chunked-prefill-size", "--ubatch-size", "-ub"),
    "--block-size": ("--page-size",),
    "--policy": ("--schedule-policy",),
    "--no-enable-prefix-caching": ("--disable-radix-cache",),
    "--host-cache-bytes": ("--hicache-ratio", "--hicache-size", "--cpu-offload-gb"),
    "--seed": ("--random-seed",),
    "--numerics": ("--enable-deterministic-inference",),
    "--speculate": (
        "--speculative-algorithm",
        "--speculative-config",
        "--lookup",
        "--model-draft",
        "-md",
        "--draft-model",
        "--speculative-model",
    ),
    "--chat-template": ("--chat-template-file",),
    "--kv-cache-dtype": ("--cache-type-k", "--cache-type-v", "-ctk", "-ctv"),
    "--threads": ("--threads-batch", "-tb", "--num-threads"),
    "--speculate-max-tokens": ("--num-speculative-tokens", "--draft-max", "--draft"),
    "--ssl-certfile": ("--ssl-cert-file",),
    "--ssl-keyfile": ("--ssl-key-file",),
    "--log-level": ("--uvicorn-log-level",),
    "--root-path": ("--api-prefix",),
    "--kv-cache-memory-bytes": ("--kv-cache-size",),
    "--tensor-parallel-size": ("--tp", "--tp-size"),
    "--pipeline-parallel-size": ("--pp", "--pp-size"),
    "--master-addr": ("--dist-init-addr",),
    "--router": ("--load-balance-method",),
    "--max-tokens": ("-n", "--n-predict", "--predict", "--max-new-tokens"),
    "--system": ("--system-prompt", "-sys"),
    "--lora-modules": ("--lora",),
    "--url": ("--host-url", "--endpoint"),
    "--decoder": ("--model-impl",),
}
RENAMED_FLAGS = {theirs: ours for ours, names in _SPELLINGS.items() for theirs in names}
# Reason -> other programs' flags that have no counterpart here.
_REASONS = {
    "a model runs whole on one device (--device)": (
        "--gpu-layers", "--n-gpu-layers", "-ngl", "--n-cpu-moe", "--cpu-moe", "-ot", "--override-tensor",
    ),
    "experts are not divided among ranks": ("--enable-expert-parallel", "--ep-size"),
    "ranks are processes of octavo serve (--nnodes for several hosts)": ("--distributed-executor-backend",),
    "octavo fleet --replicas N serves several engines": ("--data-parallel-size", "--dp", "--dp-size"),
    "loaded adapters stay in memory, and --max-loras bounds those of one step": ("--max-cpu-loras",),
    "images are read by models in Hugging Face's format": ("--mmproj",),
    "code from model repositories is never run": ("--trust-remote-code",),
    "the tokenizer is the model's own": (
        "--tokenizer", "--tokenizer-mode", "--tokenizer-revision", "--skip-tokenizer-init",
    ),
    "the model's configuration is used as it is": ("--hf-overrides",),
    "the format is read from the files": ("--load-format",),
    "weights are always read from the file's own pages": ("--mlock", "--no-mmap"),
    "there is nothing to switch": ("--flash-attn", "-fa"),
    "it is always on": (
        "--cont-batching", "-cb", "--jinja", "--enable-auto-tool-choice", "--embedding", "--embeddings",
        "--is-embedding", "--rerank", "--reranking", "--metrics", "--enable-metrics",
    ),
    "one engine generates and embeds": ("--task", "--runner", "--convert"),
    "it is read from the model's files": ("--pooling", "--pooler-config", "--override-pooler-config"),
    "requests are not logged (--log-level)": ("--disable-log-requests", "--disable-log-stats"),
    "octavo explain and octavo top show what runs": ("--slots",),
    "set HF_HOME": ("--download-dir",),
    "set HF_TOKEN, or run: hf auth login": ("--hf-token",),
    "give sampling parameters with the request": ("--generation-config",),
    "grammars are compiled by llguidance": ("--structured-outputs-config",),
    "give logit_bias or a grammar with the request": ("--logits-processors",),
}  # fmt: skip
UNSUPPORTED_FLAGS = {flag: reason for reason, flags in _REASONS.items() for flag in flags}
# Keyword arguments of vLLM's LLM that have no effect here, whatever the value.
_IGNORED = {
    "compilation_config", "disable_custom_all_reduce", "disable_log_requests", "disable_log_stats",
    "enable_log_requests",
}  # fmt: skip
# Other keyword arguments -> the values that have no effect here.
_HARMLESS: dict[str, tuple[object, ...]] = {
    "data_parallel_size": (1,),
    "trust_remote_code": (False,),
    "task": ("auto", "generate", "embed", "classify", "score"),
    "runner": ("auto", "generate", "pooling"),
    "convert": ("auto", "none", "embed", "classify"),
    "model_impl": ("auto",),
    "tokenizer_mode": ("auto", "slow", "fast"),
    "skip_tokenizer_init": (False,),
    "load_format": ("auto", "safetensors", "gguf"),
    "generation_config": ("auto",),
    "cpu_offload_gb": (0,),
}


def is_harmless(keyword: str, value: object) -> bool:
    """Return True for a keyword argument of vLLM's LLM that has no effect here."""
    return keyword in _IGNORED or value in _HARMLESS.get(keyword, ())
