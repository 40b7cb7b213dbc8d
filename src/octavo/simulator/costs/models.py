"""ModelFacts: a model's bytes and arithmetic, from its shape.

Owns: the facts, presets of well-known shapes, and reading them from a model's own files.
Does not: know devices (devices) or times (roofline). Facts are of decoders with grouped-query attention and dense or
routed feed-forward layers; latent attention (DeepSeek) and state-space layers are not described.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.artifacts.model_spec import read_model_spec
from octavo.artifacts.resolve import ModelFiles, resolve_model
from octavo.artifacts.spec import ModelSpec
from octavo.config.spelling import unknown
from octavo.errors import ConfigError, UnknownModelError

DTYPE_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5625, "fp4": 0.5625}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A decoder's shape, in the words of its config file.

    `dtype` is one of DTYPE_BYTES: the linear layers' weights (int4 and fp4 with a scale per 16 to 32 values);
    embeddings and the KV cache (`kv_bytes` per element) take 2 bytes unless given. `weight_file_bytes`: size of the
    weights if known from a file, 0 to derive it. With `num_experts` each token uses `active_experts` of them,
    of `expert_size`, in every layer. `windows` has each layer's sliding window, None for full; empty: all full.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    is_tied: bool = False
    max_model_len: int = 32768
    num_experts: int = 0
    active_experts: int = 0
    expert_size: int = 0
    windows: tuple[int | None, ...] = ()
    dtype: str = "bfloat16"
    kv_bytes: float = 2.0
    weight_file_bytes: int = 0

    @property
    def attention_weights(self) -> int:
        """Return the weights of one layer's four projections."""
        width = self.num_heads * self.head_dim
        return self.hidden_size * (2 * width + 2 * self.num_kv_heads * self.head_dim)

    @property
    def dense_weights(self) -> int:
        """Return the weights of one layer that every token uses."""
        return self.attention_weights + (0 if self.num_experts else 3 * self.hidden_size * self.intermediate_size)

    @property
    def expert_weights(self) -> int:
        """Return the weights of one expert of one layer, 0 without experts."""
        return 3 * self.hidden_size * self.expert_size if self.num_experts else 0

    @property
    def layer_weights(self) -> int:
        """Return all weights of one layer."""
        return self.dense_weights + self.num_experts * self.expert_weights

    @property
    def head_weights(self) -> int:
        """Return the weights of the output projection."""
        return self.vocab_size * self.hidden_size

    @property
    def weight_bytes(self) -> float:
        """Return the bytes of all weights in memory."""
        if self.weight_file_bytes:
            return float(self.weight_file_bytes)
        return self.num_layers * self.layer_weights * self.linear_bytes + self.embedding_bytes

    @property
    def linear_bytes(self) -> float:
        """Return the bytes per weight of the layers."""
        if self.weight_file_bytes:
            count = self.num_layers * self.layer_weights + self.head_weights * (1 if self.is_tied else 2)
            return self.weight_file_bytes / count
        return DTYPE_BYTES[self.dtype]

    @property
    def head_bytes(self) -> float:
        """Return the bytes of the output projection: 16 bits in quantised checkpoints, else the file's mean."""
        return self.head_weights * (self.linear_bytes if self.weight_file_bytes else max(2.0, DTYPE_BYTES[self.dtype]))

    @property
    def embedding_bytes(self) -> float:
        """Return the bytes of embeddings and output projection."""
        return self.head_bytes * (1 if self.is_tied else 2)

    @property
    def kv_bytes_per_token_layer(self) -> float:
        """Return the bytes of keys and values of one position in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.kv_bytes

    @property
    def kv_bytes_per_token(self) -> float:
        """Return the bytes of keys and values of one position."""
        return self.num_layers * self.kv_bytes_per_token_layer


def _qwen3(size: str, *shape: int, is_tied: bool = False) -> ModelFacts:
    layers, hidden, heads, kv_heads, ffn = shape
    return ModelFacts(f"qwen3-{size}", layers, hidden, heads, kv_heads, 128, ffn, 151936, is_tied, 40960)


def _routed(dense: ModelFacts, experts: int, active: int, size: int) -> ModelFacts:
    return replace(dense, num_experts=experts, active_experts=active, expert_size=size)


# From the models' published config.json files.
PRESETS: dict[str, ModelFacts] = {
    facts.name: facts
    for facts in (
        ModelFacts("smollm2-135m", 30, 576, 9, 3, 64, 1536, 49152, True, 8192),
        ModelFacts("smollm2-360m", 32, 960, 15, 5, 64, 2560, 49152, True, 8192),
        ModelFacts("smollm2-1.7b", 24, 2048, 32, 32, 64, 8192, 49152, True, 8192),
        ModelFacts("llama-3.2-1b", 16, 2048, 32, 8, 64, 8192, 128256, True, 131072),
        ModelFacts("llama-3.2-3b", 28, 3072, 24, 8, 128, 8192, 128256, True, 131072),
        ModelFacts("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256, False, 131072),
        ModelFacts("llama-3.1-70b", 80, 8192, 64, 8, 128, 28672, 128256, False, 131072),
        ModelFacts("llama-3.1-405b", 126, 16384, 128, 8, 128, 53248, 128256, False, 131072),
        ModelFacts("llama-2-7b", 32, 4096, 32, 32, 128, 11008, 32000, False, 4096),
        ModelFacts("llama-2-13b", 40, 5120, 40, 40, 128, 13824, 32000, False, 4096),
        ModelFacts("llama-2-70b", 80, 8192, 64, 8, 128, 28672, 32000, False, 4096),
        ModelFacts("mistral-7b", 32, 4096, 32, 8, 128, 14336, 32768, False, 32768),
        ModelFacts("mistral-small-24b", 40, 5120, 32, 8, 128, 32768, 131072, False, 32768),
        _routed(ModelFacts("mixtral-8x7b", 32, 4096, 32, 8, 128, 14336, 32000, False, 32768), 8, 2, 14336),
        ModelFacts("qwen2.5-7b", 28, 3584, 28, 4, 128, 18944, 152064, False, 32768),
        ModelFacts("qwen2.5-72b", 80, 8192, 64, 8, 128, 29568, 152064, False, 32768),
        _qwen3("0.6b", 28, 1024, 16, 8, 3072, is_tied=True),
        _qwen3("1.7b", 28, 2048, 16, 8, 6144, is_tied=True),
        _qwen3("4b", 36, 2560, 32, 8, 9728, is_tied=True),
        _qwen3("8b", 36, 4096, 32, 8, 12288),
        _qwen3("14b", 40, 5120, 40, 8, 17408),
        _qwen3("32b", 64, 5120, 64, 8, 25600),
        _routed(_qwen3("30b-a3b", 48, 2048, 32, 4, 6144), 128, 8, 768),
        _routed(_qwen3("235b-a22b", 94, 4096, 64, 4, 12288), 128, 8, 1536),
        ModelFacts(
            "gemma-3-4b", 34, 2560, 8, 4, 256, 10240, 262208, True, 131072,
            windows=tuple(None if layer % 6 == 5 else 1024 for layer in range(34)),
        ),
        ModelFacts(
            "gemma-3-27b", 62, 5376, 32, 16, 128, 21504, 262208, True, 131072,
            windows=tuple(None if layer % 6 == 5 else 1024 for layer in range(62)),
        ),
        replace(
            _routed(ModelFacts("gpt-oss-120b", 36, 2880, 64, 8, 64, 2880, 201088, False, 131072), 128, 4, 2880),
            windows=tuple(128 if layer % 2 == 0 else None for layer in range(36)), dtype="fp4",
        ),
    )
}  # fmt: skip


def model_facts(name: str, *, is_offline: bool = True) -> ModelFacts:
    """Return a model's facts: a preset, `preset:dtype` (llama-3.1-8b:fp8), or any model that `octavo serve` takes.

    Nothing is downloaded unless `is_offline` is False. Raises ConfigError naming the presets, ModelFileError for
    files that cannot be read.
    """
    stem, _, dtype = name.lower().rpartition(":") if ":" in name else (name.lower(), "", "")
    short = stem.rpartition("/")[2].removesuffix("-instruct")
    facts = PRESETS.get(short)
    if facts is not None:
        if dtype and dtype not in DTYPE_BYTES:
            raise ConfigError(f"model is {name!r}: no dtype {dtype!r}; give one of {', '.join(DTYPE_BYTES)}")
        return replace(facts, dtype=dtype) if dtype else facts
    try:
        files = resolve_model(name, is_offline=is_offline)
    except UnknownModelError as error:
        if "/" in name or name.endswith(".gguf"):
            raise
        remedy = f"give one of {', '.join(PRESETS)}, or a model as octavo serve takes it"
        raise ConfigError(unknown("model", name, PRESETS, remedy)) from error
    return _facts_of(files)


def _facts_of(files: ModelFiles) -> ModelFacts:
    spec = read_model_spec(files)
    if files.kind == "scripted":
        raise ConfigError(f"model is {files.name!r}, a script without a shape; give a model that computes")
    size = sum(path.stat().st_size for path in files.weights) if files.kind == "gguf" else 0
    return facts_of_spec(files.name, spec, size)


def facts_of_spec(name: str, spec: ModelSpec, weight_file_bytes: int = 0) -> ModelFacts:
    """Return the facts of a specification; `weight_file_bytes` if its files are kept in memory as they are."""
    return ModelFacts(
        name,
        spec.num_layers,
        spec.hidden_size,
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.intermediate_size,
        spec.vocab_size,
        spec.tie_word_embeddings,
        spec.max_model_len,
        windows=spec.layer_windows,
        dtype=spec.dtype if spec.dtype in DTYPE_BYTES else "float32",
        weight_file_bytes=weight_file_bytes,
    )
