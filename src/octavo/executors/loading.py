"""Choose a model's decoder, dtypes and device.

Owns: the choice between the native decoder and the torch decoder, and the automatic choices of device and dtype.
Does not: load files (models does), or size or allocate the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from octavo import machine
from octavo.artifacts.model_spec import ModelSpec
from octavo.artifacts.resolve import ModelFiles
from octavo.config import ExecutionConfig, ModelConfig
from octavo.errors import ConfigError
from octavo.models import native_decoder
from octavo.models.decoder import Decoder, load_model
from octavo.models.native_decoder import NativeDecoder
from octavo.models.native_weights import load_native_weights, wanted_tensors
from octavo.models.shard_loader import ShardLoader
from octavo.nn.packing import choose_quantization
from octavo.nn.parallel import Parallel
from octavo.nn.weight_cache import WeightCache
from octavo.nn.weights import open_weights
from octavo.ops.attention import AttentionBackend

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BF16_FEATURES = {"avx512_bf16", "amx_bf16", "bf16"}


class AnyDecoder(Protocol):
    """The methods of a decoder that an executor calls, native or not."""

    max_model_len: int

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, backend: AttentionBackend) -> Tensor:
        """Return the hidden states after the final norm, [T, E]. The next call may overwrite them."""
        ...

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """Return float32 logits [N, V]. The next call may overwrite them."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads."""
        ...

    @property
    def linear_flops_per_token(self) -> int:
        """Floating-point operations of one sampled token outside attention."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedDecoder:
    """A decoder, the quantization of most of its weights ("none" if most are floats), and notes for the user."""

    decoder: AnyDecoder
    quantization: str
    notes: tuple[str, ...] = ()


class DecoderChoice:
    """The choice of a decoder, made from the configuration and the files' headers before anything is loaded."""

    def __init__(
        self,
        files: ModelFiles,
        spec: ModelSpec,
        execution: ExecutionConfig,
        model: ModelConfig,
        parallel: Parallel | None = None,
    ) -> None:
        self._files = files
        self._spec = spec
        self._model = model
        self._parallel = parallel
        self.device = choose_device(execution.device)
        self._obstacle = _obstacle(self.device, execution, model, spec)
        requested = {"decoder": execution.decoder == "native", "numerics": execution.numerics == "invariant"}
        if self._obstacle is not None and any(requested.values()):
            setting, value = ("decoder", "native") if requested["decoder"] else ("numerics", "invariant")
            raise ConfigError(f"{setting} is {value!r}, but the native decoder cannot be used: {self._obstacle}")
        self.is_packed = self._obstacle is None
        self.is_native = self.is_packed and parallel is None
        self.decoder_name = "sharded" if parallel is not None else "native" if self.is_native else "torch"
        self._is_requested = execution.decoder == "torch" or execution.attention != "auto"
        self.dtype = choose_dtype(model.dtype, spec.dtype, self.device, self.is_packed)
        self.quantization = choose_quantization(model.quantization, model.dtype, files, spec)
        if not self.is_packed and self.quantization != "none":
            if model.quantization not in ("auto", "none"):
                raise ConfigError(
                    f"quantization is {model.quantization!r}, which needs the native decoder: {self._obstacle}; "
                    "give none or auto"
                )
            self.quantization = "none"

    def load(self, max_model_len: int | None) -> LoadedDecoder:
        """Load the weights. Raises ModelFileError, and ConfigError if the model cannot be divided among the ranks."""
        if self._parallel is not None:
            return self._load_shard(self._parallel, max_model_len)
        if not self.is_native:
            decoder = load_model(self._files, self._spec, self.dtype, self.device, max_model_len)
            notes: tuple[str, ...] = ()
            if self.device.type == "cpu" and not self._is_requested:
                notes = (f"layers are computed by torch, which is slower: {self._obstacle}",)
            return LoadedDecoder(decoder, "none", notes)
        weights = load_native_weights(
            self._files, self._spec, self.quantization, self.dtype, WeightCache.of(self._model)
        )
        native = NativeDecoder(self._spec, weights, max_model_len)
        return LoadedDecoder(native, native.quantization, weights.notes)

    def _load_shard(self, parallel: Parallel, max_model_len: int | None) -> LoadedDecoder:
        """Load one rank's part: packed for the kernels where they can be used, else for torch."""
        wanted = wanted_tensors(self.quantization, self.dtype) if self.is_packed else None
        weights = open_weights(self._files, self._spec)
        loader = ShardLoader(self._spec, self.dtype, self.device, weights, parallel, wanted)
        decoder = Decoder(loader, max_model_len)
        return LoadedDecoder(decoder, loader.quantization)


def _obstacle(device: torch.device, execution: ExecutionConfig, model: ModelConfig, spec: ModelSpec) -> str | None:
    """Return why the native decoder cannot be used, or None if it can."""
    if device.type != "cpu":
        return f"the device is {device.type}"
    if execution.decoder == "torch":
        return "decoder is 'torch'"
    if execution.attention != "auto":
        return f"attention is {execution.attention!r}"
    return native_decoder.unsupported_reason(spec, model.dtype)


def choose_device(name: str) -> torch.device:
    """Return the device with this name; "auto" means CUDA if there is a CUDA device. Raises ConfigError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch sees no CUDA device; give cpu or auto")
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"device is {name!r}; give auto, cpu or cuda")
    return torch.device(name)


def choose_dtype(name: str, checkpoint: str, device: torch.device, is_native: bool = False) -> torch.dtype:
    """Return the dtype of weights and cache. Raises ConfigError.

    On a CPU, "auto" is bfloat16 if the decoder is native or the CPU supports bfloat16, else float32. On CUDA, "auto" is
    float16 if the checkpoint is float16, else bfloat16.
    """
    if name != "auto":
        return dtype_named(name, "dtype")
    if device.type == "cuda":
        return torch.float16 if checkpoint == "float16" else torch.bfloat16
    return torch.bfloat16 if is_native or _BF16_FEATURES & set(machine.look().features) else torch.float32


def dtype_named(name: str, setting: str) -> torch.dtype:
    """Return the dtype with this name. Raises ConfigError, whose message names `setting`."""
    if name not in DTYPES:
        raise ConfigError(f"{setting} is {name!r}; give auto, {', '.join(DTYPES)}")
    return DTYPES[name]
