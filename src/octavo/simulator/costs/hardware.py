"""ModelFacts (bytes and FLOP from a model's shape), DeviceFacts (data-sheet numbers) and Hardware (a model on devices).

Owns: the facts; presets with public numbers; reading the shape from a model's files; a probe of this machine; the
number of KV blocks that fit beside the weights. Does not: predict times (roofline).
Models are decoders with grouped-query attention and dense or mixture-of-experts layers; latent attention (DeepSeek) and
state-space layers are not described. Peaks are without structured sparsity, with 32-bit accumulation. Prices are common
hourly rents, as a default.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from octavo import machine
from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import ModelFiles, resolve_model
from octavo.config.spelling import unknown
from octavo.errors import ConfigError, UnknownModelError
from octavo.simulator.pipeline import PipelineFacts

GIB, GB, TERA = 2.0**30, 1e9, 1e12
DTYPE_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5625, "fp4": 0.5625}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A decoder's shape, with the names of its config file.

    `dtype`, a key of DTYPE_BYTES, is the linear layers' weight type (int4 and fp4: a scale per 16 to 32 values).
    Embeddings take 2 bytes per element, and KV elements `kv_bytes` (default 2). `weight_file_bytes` is the weights'
    size in a file; 0 = derive the size. In every layer, a token uses `active_experts` of `num_experts` experts of size
    `expert_size`. `windows` has each layer's sliding window (None: full attention); empty: full attention everywhere.
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
        """Return the bytes per weight of the linear layers."""
        if self.weight_file_bytes:
            count = self.num_layers * self.layer_weights + self.head_weights * (1 if self.is_tied else 2)
            return self.weight_file_bytes / count
        return DTYPE_BYTES[self.dtype]

    @property
    def head_bytes(self) -> float:
        """Return the output projection's bytes: 16 bits per weight in quantised checkpoints, else the file's mean."""
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
MODELS: dict[str, ModelFacts] = {
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


def model_facts(name: str) -> ModelFacts:
    """Return a model's facts. `name` is a preset, `preset:dtype` (llama-3.1-8b:fp8), or a model for `octavo serve`.

    Downloads nothing. Raises ConfigError naming the presets, ModelFileError for unreadable files.
    """
    stem, _, dtype = name.lower().rpartition(":") if ":" in name else (name.lower(), "", "")
    facts = MODELS.get(stem.rpartition("/")[2].removesuffix("-instruct"))
    if facts is not None:
        if dtype and dtype not in DTYPE_BYTES:
            raise ConfigError(f"model is {name!r}: no dtype {dtype!r}; give one of {', '.join(DTYPE_BYTES)}")
        return replace(facts, dtype=dtype) if dtype else facts
    try:
        files = resolve_model(name, is_offline=True)
    except UnknownModelError as error:
        if "/" in name or name.endswith(".gguf"):
            raise
        remedy = f"give one of {', '.join(MODELS)}, or a model as octavo serve takes it"
        raise ConfigError(unknown("model", name, MODELS, remedy)) from error
    return _read_facts(files)


def _read_facts(files: ModelFiles) -> ModelFacts:
    spec = read_model_spec(files)
    if files.kind == "scripted":
        raise ConfigError(f"model is {files.name!r}, a script without a shape; give a model that computes")
    is_kept = files.kind == "gguf"  # GGUF weights keep the file's format in memory
    return ModelFacts(
        files.name,
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
        weight_file_bytes=sum(path.stat().st_size for path in files.weights) if is_kept else 0,
    )


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """A device's peak FLOP/s for 16, 8 and 4-bit weights (0 = no hardware support), bandwidth in bytes/s, and memory.

    `link_bandwidth` (bytes/s per direction) and `link_s` (latency of an all-reduce) describe the links between devices
    of one replica, `host_bandwidth` the link to the host. `kernel_s` is a layer's overhead between kernels, `step_s` a
    step's overhead outside the layers, on the device and earlier on the host. `price` is in dollars per hour. A
    measured device's `flops16` is its 32-bit rate.
    """

    name: str
    memory_bytes: float
    bandwidth: float
    flops16: float
    flops8: float = 0.0
    flops4: float = 0.0
    link_bandwidth: float = 25 * GB
    link_s: float = 20e-6
    host_bandwidth: float = 25 * GB
    kernel_s: float = 8e-6
    step_s: float = 1e-3
    price: float = 0.0
    is_measured: bool = False

    def flops(self, weight_bytes: float) -> float:
        """Return peak FLOP/s for weights of `weight_bytes` each, or of the next wider supported size."""
        if weight_bytes < 0.75 and self.flops4:
            return self.flops4
        if weight_bytes <= 1.25 and self.flops8:
            return self.flops8
        return self.flops16 if weight_bytes <= 2 or self.is_measured else self.flops16 / 2


def _gpu(name: str, gib: float, gbs: float, tflops: tuple[float, ...], price: float) -> DeviceFacts:
    flops16, flops8, flops4 = (peak * TERA for peak in (*tflops, 0.0, 0.0)[:3])
    return DeviceFacts(name, gib * GIB, gbs * GB, flops16, flops8, flops4, price=price)


def _linked(device: DeviceFacts, gbs: float) -> DeviceFacts:
    """Return the device with NVLink-class links of `gbs` GB/s."""
    return replace(device, link_bandwidth=gbs * GB, link_s=8e-6)


# Data sheets of NVIDIA and AMD: memory, GB/s, dense TFLOP/s at 16, 8 and 4 bits.
DEVICES: dict[str, DeviceFacts] = {
    device.name: device
    for device in (
        _gpu("t4", 15, 320, (65,), 0.53),
        _gpu("a10g", 22.5, 600, (70,), 1.01),
        _gpu("l4", 22.5, 300, (121, 242.5), 0.71),
        _gpu("l40s", 44.7, 864, (362, 733), 1.10),
        _gpu("rtx4090", 23.6, 1008, (165.2, 330.3), 0.45),
        _gpu("rtx5090", 31.4, 1792, (209.5, 419, 1676), 0.80),
        _gpu("rtxpro6000", 95, 1792, (503.8, 1007.6, 2015), 1.80),
        _gpu("rtxpro6000-server", 95, 1597, (503.8, 1007.6, 2015), 1.80),
        _linked(_gpu("a100-40g", 39.4, 1555, (312,), 1.40), 300),
        _linked(_gpu("a100-80g", 79.1, 2039, (312,), 1.80), 300),
        _gpu("h100-pcie", 79.1, 2000, (756, 1513), 2.40),
        _linked(_gpu("h100", 79.1, 3350, (989.4, 1978.9), 3.00), 450),
        _linked(_gpu("h200", 139.8, 4800, (989.4, 1978.9), 3.60), 450),
        _linked(_gpu("b200", 178, 8000, (2250, 4500, 9000), 5.50), 900),
        _linked(_gpu("b300", 267, 8000, (2250, 4500, 13500), 6.50), 900),
        _linked(_gpu("gb200", 184, 8000, (2500, 5000, 10000), 6.50), 900),
        _linked(_gpu("gb300", 277, 8000, (2500, 5000, 15000), 7.50), 900),
        _linked(_gpu("mi300x", 192, 5300, (1307.4, 2614.9), 2.50), 448),
    )
}
ALIASES = {"a100": "a100-80g", "4090": "rtx4090", "5090": "rtx5090", "h100-sxm": "h100", "h200-sxm": "h200"}
THIS = "this"


def device_facts(name: str) -> DeviceFacts:
    """Return a device by name; "this" measures this machine's CPU (0.5 s). Raises ConfigError naming all devices."""
    short = name.lower().removesuffix("_sxm").replace("_", "-").replace(" ", "")
    if short in (THIS, "cpu"):
        return _measure_machine()
    device = DEVICES.get(ALIASES.get(short, short))
    if device is None:
        raise ConfigError(unknown("device", name, (*DEVICES, THIS), f"give one of {', '.join((*DEVICES, THIS))}"))
    return device


def _measure_machine() -> DeviceFacts:
    """Measure this machine's rates of numpy products and copies: the best of a few short runs."""
    facts = machine.look()
    left, right = (np.ones((768, 768), np.float32) for _ in range(2))
    source, target = (np.ones(1 << 24, np.float32) for _ in range(2))
    product_s = min(_seconds_of(lambda: left @ right) for _ in range(5))
    copy_s = min(_seconds_of(lambda: np.copyto(target, source)) for _ in range(3))
    peak, bandwidth = 2 * 768**3 / product_s, 2 * source.nbytes / copy_s
    return DeviceFacts(
        THIS, float(facts.available_bytes), bandwidth, peak, link_bandwidth=bandwidth, host_bandwidth=bandwidth,
        kernel_s=20e-6, step_s=0.5e-3, is_measured=True,
    )  # fmt: skip


def _seconds_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return max(time.perf_counter() - start, 1e-9)


def expected_experts(num_experts: int, active_experts: int, tokens: float) -> float:
    """Return the expected number of distinct experts of a layer that `tokens` tokens use.

    Each token uses `active_experts` different ones, all equally likely.
    """
    return num_experts * (1.0 - (1.0 - active_experts / num_experts) ** tokens) if num_experts else 0.0


ACTIVATION_TOKENS_BYTES = 24  # activation bytes per hidden element and token of the largest step
FIXED_BYTES = 1.0e9  # bytes of contexts, graphs and libraries, per device
MIN_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class Hardware:
    """The hardware of a replica: a model on tp * dp * pp devices, with KV blocks of `block_size` tokens.

    `tp`, `dp` and `pp` are the tensor, data and pipeline parallel sizes. Data-parallel engines of a dense model share
    nothing, and are replicas. The experts of a layer are divided over
    tp * dp devices: whole experts if `is_expert_parallel`, else a slice of every expert on each device.
    """

    model: ModelFacts
    device: DeviceFacts
    tp: int = 1
    block_size: int = 16
    dp: int = 1
    pp: int = 1
    is_expert_parallel: bool = False

    def __post_init__(self) -> None:
        model = self.model
        if self.pp > model.num_layers:
            raise ConfigError(
                f"pipeline_parallel_size is {self.pp}; {model.name} has {model.num_layers} layers, give at most as many"
            )
        if self.dp > 1 and not model.num_experts:
            raise ConfigError(f"data_parallel_size is {self.dp}; {model.name} has no experts, give replicas instead")
        if self.is_expert_parallel and not model.num_experts:
            raise ConfigError(f"enable_expert_parallel is on; {model.name} has no experts, leave it out")
        if model.num_experts % self.expert_ranks:
            raise ConfigError(
                f"tensor_parallel_size * data_parallel_size is {self.expert_ranks}; give sizes whose product divides "
                f"the {model.num_experts} experts of {model.name}, or leave out enable_expert_parallel"
            )

    @staticmethod
    def of(model: str, device: str, tp: int = 1, block_size: int = 16) -> Hardware:
        """Look up the model and the device by name. Raises ConfigError naming the known names."""
        return Hardware(model_facts(model), device_facts(device), tp, block_size)

    @property
    def pipeline(self) -> PipelineFacts | None:
        """Return the pipeline; between its stages, activations of 2 bytes an element pass the device's link."""
        if self.pp == 1:
            return None
        return PipelineFacts(self.pp, self.device.link_s, self.model.hidden_size * 2 / self.device.link_bandwidth)

    @property
    def expert_ranks(self) -> int:
        """Return the number of devices among which whole experts are divided."""
        return self.tp * self.dp if self.is_expert_parallel else 1

    @property
    def kv_devices(self) -> int:
        """Return among how many devices an engine's KV is divided; further ones have copies of KV heads."""
        return min(self.tp, self.model.num_kv_heads) * self.pp

    @property
    def weight_bytes(self) -> float:
        """Return the weights of one data-parallel rank: all of the dense ones, and its share of the experts."""
        model = self.model
        experts = model.num_layers * model.num_experts * model.expert_weights * model.linear_bytes
        return model.weight_bytes - experts * (1 - 1 / self.dp)

    def pool_blocks(self, max_batch_tokens: int = 2048, memory_share: float = 0.9) -> int:
        """Return the number of an engine's blocks: what fits beside the weights in `memory_share` of the memory.

        The `pp` engines of a rank (see lockstep) have equal shares. Raises ConfigError with the numbers if fewer than
        16 fit.
        """
        model, device, num_devices = self.model, self.device, self.tp * self.pp
        usable = device.memory_bytes * memory_share * num_devices
        fixed = 0.0 if device.is_measured else FIXED_BYTES * num_devices
        activations = ACTIVATION_TOKENS_BYTES * model.hidden_size * max_batch_tokens * self.pp
        free = usable - self.weight_bytes - fixed - activations
        copies = max(1, self.tp // model.num_kv_heads)
        count = int(free // (model.kv_bytes_per_token * copies * self.block_size * self.pp)) if free > 0 else 0
        if count < MIN_BLOCKS:
            raise ConfigError(
                f"{model.name} has {self.weight_bytes / 1e9:.1f} GB of weights; {num_devices} x {device.name} give "
                f"{usable / 1e9:.1f} GB, which leaves {count} KV blocks: take more or larger devices, or a narrower "
                "dtype"
            )
        return count
