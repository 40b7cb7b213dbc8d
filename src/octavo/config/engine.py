"""The settings of a model and of the engine that runs it.

Owns: sections and their options. Does not: compare options with the machine or the model (assembly does).
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.config.setting import option

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_DTYPES = (*DTYPES, "int8", "fp8")
CALL_PARSERS = (
    "auto", "none", "hermes", "llama3", "mistral", "qwen3_coder", "json", "llama3_json", "qwen3_xml", "qwen",
)  # fmt: skip
REASONING_PARSERS = (
    "auto", "none", "think", "thinking", "reasoning", "mistral", "cohere", "seed", "deepseek_r1", "qwen3", "command_a",
    "seed_oss",
)  # fmt: skip
QUANTIZATIONS = ("auto", "none", "int8", "int4")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model is loaded, and how."""

    model: str = option(
        "smollm2",
        "short name, folder, .gguf file, Hugging Face repository, or scripted:FILE",
        "--model=MODEL",
        "-m",
        brief="alias, folder, .gguf file or repository",
    )
    revision: str | None = option(None, "branch, tag or commit of the repository", "--revision")
    offline: bool = option(
        False,
        "use only files on this machine, without the network (as HF_HUB_OFFLINE=1)",
        "--offline",
        brief="use only what is on this machine",
    )
    served_model_name: tuple[str, ...] = option(
        (),
        "names by which clients address the model; answers have the first one if the request has none",
        "--served-model-name",
        "--alias",
        "-a",
        brief="the model's name for clients",
        heading="server",
        takes_words=True,
    )
    dtype: str = option("auto", "type of weights and activations", "--dtype", choices=DTYPES)
    quantization: str = option(
        "auto",
        "type of the weights on a CPU: auto keeps that of the files (with --dtype: none), none converts them to "
        "floats, int8 and int4 quantize larger ones",
        "--quantization",
        choices=QUANTIZATIONS,
        brief="auto, none, int8 or int4",
    )
    imatrix: str | None = option(
        None,
        "importance matrix of llama.cpp's llama-imatrix for this model; --quantization int4 then loses least where "
        "inputs are used most",
        "--imatrix=FILE",
    )
    weight_cache_dir: str | None = option(
        None, "folder of weights converted for this machine (default: ~/.cache/octavo/weights)", "--cache-dir=DIR"
    )
    weight_cache_bytes: int = option(
        20 << 30, "maximum bytes of that folder, such as 20G; 0 = keep none", "--weight-cache-bytes", within=(0, None)
    )
    max_model_len: int | None = option(
        None,
        "longest prompt + output in tokens (default: the model's own)",
        "--max-model-len",
        "--ctx-size",
        "-c",
        within=(1, None),
        brief="longest prompt + output [the model's own]",
    )

    def shown_name(self, default: str) -> str:
        """Return the first served name, else the default."""
        return self.served_model_name[0] if self.served_model_name else default


@dataclass(frozen=True, slots=True)
class ChatConfig:
    """Chat templates, and the parsing of tool calls and reasoning."""

    chat_template: str | None = option(
        None,
        "file with a jinja chat template to use instead of the model's",
        "--chat-template=FILE",
        brief="jinja file, instead of the model's",
    )
    trust_template: bool = option(
        False,
        "render the chat template in the API process, which a malicious template can block (default: in a sandbox "
        "process with a time limit)",
        "--trust-template",
    )
    special_tokens_in_text: bool = option(
        False,
        "parse special tokens in messages, such as <|im_end|>, into their ids, as transformers does (default: text)",
        "--special-tokens-in-text",
    )
    tool_call_parser: str = option(
        "auto",
        "format of the model's tool calls; auto: derived from its chat template (docs/structured-output.md)",
        "--tool-call-parser",
        choices=CALL_PARSERS,
    )
    reasoning_parser: str = option(
        "auto",
        "tags around the model's reasoning; auto: derived from its chat template",
        "--reasoning-parser",
        choices=REASONING_PARSERS,
    )


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV pool. At most one of num_blocks, kv_cache_bytes and kv_cache_tokens may be set."""

    block_size: int = option(16, "token positions in one KV block", "--block-size", within=(1, 1024))
    num_blocks: int | None = option(None, "KV blocks in the pool", "--num-gpu-blocks-override", within=(1, None))
    kv_cache_bytes: int | None = option(
        None,
        "bytes of the KV pool",
        "--kv-cache-memory-bytes",
        within=(1, None),
        brief="bytes of the KV pool, such as 4G",
    )
    kv_cache_tokens: int | None = option(None, "token positions in the KV pool", "--kv-cache-tokens", within=(1, None))
    memory_fraction: float | None = option(
        None,
        "share of a GPU's memory for weights, a step and the KV pool (default: 0.9); on a CPU, of free memory for KV",
        "--gpu-memory-utilization",
        within=(0.01, 1.0),
    )
    kv_cache_dtype: str = option("auto", "type of cached keys and values", "--kv-cache-dtype", choices=KV_DTYPES)
    enable_prefix_caching: bool = option(
        True, "reuse KV blocks of equal prefixes across requests", "--enable-prefix-caching"
    )
    block_sharing: bool = option(True, "share KV blocks among the choices of one request", "--enable-block-sharing")
    host_cache_bytes: int = option(
        0,
        "bytes of the host's memory for swapped and evicted KV blocks, such as 4G; 0 = none",
        "--host-cache-bytes",
        "--swap-space",
        within=(0, None),
    )
    host_load_min_tokens: int = option(
        64,
        "shortest prefix that is loaded from the host cache instead of computed again",
        "--host-load-min-tokens",
        within=(0, None),
    )
    preemption: str = option(
        "auto",
        "what happens to a preempted request's KV blocks; auto swaps those of several sequences",
        "--preemption",
        "--preemption-mode",
        choices=("auto", "recompute", "swap"),
    )


@dataclass(frozen=True, slots=True)
class SchedulingConfig:
    """The order and composition of steps."""

    policy: str = option(
        "fcfs",
        "order of admission and preemption: fcfs, fifo, prefill_first, priority, fair, deadline, shortest_prefill, "
        "prefix_affinity, an installed one, or module:Class",
        "--policy=NAME",
        "--scheduling-policy",
    )
    max_batch_tokens: int | None = option(
        None,
        "tokens computed in one step (default: 512 on a CPU, 8192 on a GPU)",
        "--max-num-batched-tokens",
        "--batch-size",
        "-b",
        within=(1, None),
    )
    max_sequences: int | None = option(
        None,
        "sequences running at once (default: 32 on a CPU, 256 on a GPU)",
        "--max-num-seqs",
        "--parallel",
        "-np",
        within=(1, None),
        brief="sequences running at once [CPU 32, GPU 256]",
    )
    headroom: float | None = option(
        None, "share of the pool kept free at admission (default: the policy's)", "--headroom", within=(0.0, 0.99)
    )
    chunked_prefill: bool = option(True, "split long prompts over several steps", "--enable-chunked-prefill")
    max_partial_prefills: int = option(
        0,
        "maximum sequences with a partly computed prompt; 0 = no limit",
        "--max-num-partial-prefills",
        within=(0, None),
    )
    long_prefill_threshold: int = option(
        0,
        "maximum prompt tokens of one sequence in a step; 0 = no limit",
        "--long-prefill-token-threshold",
        within=(0, None),
    )
    max_kv_read: int = option(
        0, "maximum tokens of context that one step reads; 0 = no limit", "--max-kv-read-tokens", within=(0, None)
    )
    max_bypass: int = option(
        64, "how often later requests may pass one that lacks memory", "--max-bypass", within=(1, None)
    )
    composition: str = option(
        "mixed", "whether prompts and decoding share a step", "--step-composition", choices=("mixed", "separate")
    )
    max_prefill_run: int = option(
        4,
        "maximum prompt steps in a row while anything decodes, with separate steps",
        "--max-prefill-run",
        within=(1, None),
    )
    separate_modalities: bool = option(
        False, "run requests with and without media in separate steps", "--separate-modalities"
    )


@dataclass(frozen=True, slots=True)
class ExecutionConfig:
    """Where and how steps run."""

    device: str = option("auto", "where steps run", "--device", choices=("auto", "cpu", "cuda"))
    threads: int | None = option(
        None,
        "CPU threads (default: the cores this process may use)",
        "--threads",
        "-t",
        within=(1, 1024),
        brief="CPU threads [the usable cores]",
    )
    depth: int | None = option(None, "plans in flight (default: 2 on CUDA, else 1)", "--pipeline-depth", within=(1, 8))
    attention: str = option(
        "auto",
        "attention code; reference is the slow one, for tests",
        "--attention-backend",
        choices=("auto", "batched", "reference"),
    )
    decoder: str = option(
        "auto",
        "what computes the layers; torch is slower than native on a CPU; transformers runs models of that library",
        "--decoder",
        choices=("auto", "native", "torch", "transformers"),
    )
    numerics: str = option(
        "auto",
        "invariant: an answer has the same bits in any batch; fast: it may not; auto: invariant where it costs under "
        "10 %",
        "--numerics",
        choices=("auto", "invariant", "fast"),
    )
    enforce_eager: bool = option(
        False,
        "capture no decode steps as CUDA graphs: the engine opens sooner, and steps are slower",
        "--enforce-eager",
    )
    seed: int = option(0, "seed of requests that have none of their own", "--seed", "-s", within=(-(2**63), 2**64 - 1))


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Several devices or processes (ranks) that run one engine (docs/fleet.md)."""

    tensor_parallel_size: int = option(
        1,
        "ranks that share each layer: a device each, or a process each on a CPU",
        "--tensor-parallel-size",
        "-tp",
        within=(1, 64),
    )
    pipeline_parallel_size: int = option(
        1,
        "stages that the layers are divided into, each of --tensor-parallel-size ranks",
        "--pipeline-parallel-size",
        "-pp",
        within=(1, 64),
    )
    tp_invariant: bool = option(
        False,
        "sum in an order that does not depend on the number of ranks, so that 1, 2 and 4 ranks give the same bits; "
        "slower on one rank",
        "--tp-invariant",
    )
    nnodes: int = option(1, "hosts that the ranks are divided among", "--nnodes", within=(1, 64))
    node_rank: int = option(
        0,
        "number of this host; host 0 serves, and the others wait for its engine and run ranks",
        "--node-rank",
        within=(0, 63),
    )
    master_addr: str = option(
        "127.0.0.1", "address of host 0, which the ranks of other hosts connect to", "--master-addr=ADDRESS"
    )
    master_port: int = option(29501, "port of host 0 for the ranks of other hosts", "--master-port", within=(1, 65535))

    @property
    def num_ranks(self) -> int:
        """Ranks of one engine on all hosts."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Speculative decoding: a step verifies draft tokens, so that the same text takes fewer steps."""

    speculate: str = option(
        "auto",
        "source of draft tokens: ngram (what followed the same tokens earlier in the sequence), a smaller model with "
        "the same tokenizer (a name or path, as for --model), ngram+MODEL, or none; auto: ngram on one CPU rank whose "
        "answers it cannot change",
        "--speculate",
        brief="auto, none, ngram, or a draft MODEL",
    )
    speculate_quantization: str = option(
        "auto",
        "type of the draft model's weights; auto: int4 on a CPU unless its files are quantized",
        "--speculate-quantization",
        choices=QUANTIZATIONS,
    )
    speculate_sampling: str = option(
        "exact",
        "how a draft of a sampled token is verified: exact accepts the token that would be drawn without drafts, so "
        "answers are the same; rejection accepts more, and answers have the same probabilities but also depend on the "
        "drafts, so the same seed may give another answer",
        "--speculate-sampling",
        choices=("exact", "rejection"),
    )
    speculate_max_tokens: int = option(
        7, "maximum draft tokens of one sequence in a step", "--speculate-max-tokens", within=(1, 64)
    )
    speculate_max_rows: int = option(
        8, "maximum sequences in a step that has draft tokens", "--speculate-max-rows", within=(1, None)
    )

    @property
    def has_ngrams(self) -> bool:
        """True if earlier text is a source of drafts, whatever the engine."""
        return self.speculate.split("+")[0] == "ngram"

    @property
    def draft_model(self) -> str | None:
        """The name or path of the draft model, or None."""
        name = self.speculate.removeprefix("ngram+")
        return None if name in ("auto", "none", "off", "ngram") else name


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Low-rank adapters (LoRA) on top of the model."""

    lora_modules: tuple[str, ...] = option(
        (),
        "adapters to load: NAME=PATH of a PEFT folder or a .gguf file; requests name an adapter as their model",
        "--lora-modules=NAME=PATH",
        "--lora-paths",
        takes_words=True,
    )
    enable_lora: bool = option(False, "allow adapters to be loaded while serving", "--enable-lora")
    max_loras: int = option(8, "different adapters in one step; others wait", "--max-loras", within=(1, 1024))
    max_lora_rank: int = option(64, "largest rank of an adapter", "--max-lora-rank", within=(1, 4096))
    allow_runtime_lora: bool = option(
        False,
        "let clients load and unload adapters over HTTP, by paths on this machine (octavo admin always can)",
        "--allow-runtime-lora-updating",
    )

    @property
    def is_enabled(self) -> bool:
        """True if the engine has adapters."""
        return self.enable_lora or bool(self.lora_modules) or self.allow_runtime_lora


@dataclass(frozen=True, slots=True)
class StatisticsConfig:
    """Which measurements of steps and requests the engine stores."""

    collect_statistics: bool = option(True, "keep measurements of the last steps and requests", "--collect-statistics")
    memory_analysis: bool = option(
        False, "analyse the KV pool with every query of the statistics, and every 5 s while busy", "--memory-analysis"
    )
    step_records: int = option(4096, "steps whose measurements are kept", "--step-records", within=(1, 65536))
    request_records: int = option(
        1024, "finished requests whose measurements are kept", "--request-records", within=(1, 65536)
    )
    explain_kept: int = option(
        1024, "finished requests that can still be explained; 0 = none", "--explain-kept", within=(0, 65536)
    )
    explain_kept_s: float = option(
        600.0, "seconds for which a finished request can be explained", "--explain-kept-s", within=(0.0, None)
    )
    drift_baseline: str | None = option(
        None, "fit of earlier steps (octavo simulate --fit) to compare the steps with", "--drift-baseline=FILE"
    )


@dataclass(frozen=True, slots=True)
class RecordingConfig:
    """Recording of the engine's decisions, for octavo replay and octavo simulate (docs/recording.md)."""

    record: str | None = option(
        None,
        "folder in which every decision of the engine is recorded",
        "--record=DIR",
        brief="record every decision in this folder",
    )
    record_bytes: int = option(
        1 << 30, "maximum bytes of that folder; the recording ends there", "--record-bytes", within=(1 << 16, None)
    )
    record_text: bool = option(False, "record token ids too (default: lengths and digests only)", "--record-text")


@dataclass(frozen=True, slots=True)
class FlightConfig:
    """The flight recorder: the last minutes of an engine's decisions, always kept (docs/recording.md)."""

    flight_recorder: float = option(
        300.0,
        "seconds of decisions that a server always keeps in memory, for octavo record; 0 = none",
        "--flight-recorder",
        within=(0.0, 86400.0),
    )
    flight_recorder_bytes: int = option(
        48 << 20, "maximum memory for these", "--flight-recorder-bytes", within=(1 << 20, None)
    )
    flight_recordings: str | None = option(
        None,
        "folder that gets what is kept when an engine dies (default: octavo/recordings in the cache folder)",
        "--flight-recordings=DIR",
    )
    record_on_miss: bool = option(
        False, "save it too when a request misses its ttft or tpot objective, once a minute", "--record-on-miss"
    )
