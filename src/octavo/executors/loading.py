"""Choose a model's decoder, dtypes and device.

Owns: the choice between the native, the torch and the transformers decoder; the automatic choices of device and dtype.
Does not: load files (models does), or size or allocate the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from octavo.artifacts.model_spec import ModelSpec
from octavo.artifacts.resolve import ModelFiles
from octavo.config import ExecutionConfig, ModelConfig
from octavo.errors import ConfigError
from octavo.executors.device_choice import ABSENT, DTYPES, check_invariant, choose_device, choose_dtype, dtype_named
from octavo.executors.loading_progress import loading_progress
from octavo.models import native_decoder
from octavo.models.decoder import Decoder
from octavo.models.loader import Loader
from octavo.models.native_decoder import NativeDecoder
from octavo.models.native_weights import load_native_weights, wanted_tensors
from octavo.models.shard_loader import ShardLoader
from octavo.models.step_extras import StepExtras
from octavo.models.transformers_decoder import TransformersDecoder
from octavo.nn.packing import WantedTensor, choose_quantization
from octavo.nn.parallel import Parallel
from octavo.nn.weight_cache import WeightCache
from octavo.nn.weights import ReadOptions, open_weights
from octavo.ops import cpu
from octavo.ops.attention import AttentionBackend, LayerAttention
from octavo.ops.triton import available

_AS_IT_IS = ", whose own operations compute it on a device: they keep no codes, and a row's bits depend on the batch"
KV_DTYPES = {**DTYPES, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


class AnyDecoder(Protocol):
    """The methods of a decoder that an executor calls, native or not."""

    max_model_len: int
    attention: tuple[LayerAttention, ...]  # of each of the model's layers; on a rank, with the rank's heads

    def forward(
        self, token_ids_T: Tensor, positions_T: Tensor, backend: AttentionBackend, extras: StepExtras | None = None
    ) -> Tensor:
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
    """A decoder, the quantization of most of its weights ("none" if most are floats), and notes for the user.

    `idle_expert_bytes` counts experts' weights that a step of one token does not read.
    """

    decoder: AnyDecoder
    quantization: str
    notes: tuple[str, ...] = ()
    idle_expert_bytes: int = 0


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
        self.is_transformers = _is_transformers(files, spec, execution, parallel)
        self._obstacle = _obstacle(self.device, execution, model, spec)
        # of a device whose kernels keep codes, and a row's bits whatever the company
        has_triton = execution.device in ABSENT or available.is_available()  # the machine that is planned for has it
        self.has_device_kernels = self.device.type != "cpu" and not self.is_transformers and has_triton
        self.is_invariant = execution.numerics == "invariant"
        if self.is_invariant:
            check_invariant(execution.device)
        requested = {
            "decoder": execution.decoder == "native",
            "numerics": self.is_invariant and not self.has_device_kernels,
        }
        if self._obstacle is not None and any(requested.values()):
            setting, value = ("decoder", "native") if requested["decoder"] else ("numerics", "invariant")
            raise ConfigError(f"{setting} is {value!r}, but the native decoder cannot be used: {self._obstacle}")
        self.is_packed = self._obstacle is None
        self.is_native = self.is_packed and parallel is None
        self.packs = self.is_packed or (self.is_transformers and _no_kernels(self.device, model) is None)
        self.decoder_name = "sharded" if parallel is not None else "native" if self.is_native else "torch"
        if self.is_transformers:
            self.decoder_name = "transformers"
        self._is_requested = execution.decoder == "torch" or execution.attention != "auto"
        self.dtype = choose_dtype(model.dtype, spec.dtype, self.device, self.packs)
        self.quantization = choose_quantization(model.quantization, model.dtype, spec)
        if not (self.packs or self.has_device_kernels) and self.quantization != "none":
            if model.quantization not in ("auto", "none"):
                raise ConfigError(
                    f"quantization is {model.quantization!r}, which needs the native decoder: {self._obstacle}; "
                    "give none or auto"
                )
            self.quantization = "none"
        if model.imatrix is not None and self.quantization != "int4":
            raise ConfigError(
                f"imatrix is {model.imatrix!r}, which is for 4-bit codes, but quantization is {self.quantization!r}; "
                "give --quantization int4, or leave --imatrix out"
            )

    @property
    def keeps_codes(self) -> bool:
        """Return True if linear layers on a device keep codes."""
        return self.has_device_kernels and self.quantization != "none"

    @property
    def reason(self) -> str:
        """Why the decoder is not the native one; "" if it is, or if ranks take its place."""
        if self.is_transformers:
            return self._spec.path_reason or "decoder is 'transformers'"
        return self._obstacle or ""

    def load(self, max_model_len: int | None) -> LoadedDecoder:
        """Load the weights. Raises ModelFileError, and ConfigError if the model cannot be divided among the ranks."""
        if self.is_transformers:
            return self._load_transformers(max_model_len)
        imatrix = None if self._model.imatrix is None else Path(self._model.imatrix)
        if self._parallel is not None and self._parallel.shard.rank:  # rank 0 shows the progress
            return self._load(max_model_len, ReadOptions(imatrix))
        with loading_progress(self._files) as advance:
            loaded = self._load(max_model_len, ReadOptions(imatrix, advance))
        return replace(loaded, notes=(*self._spec.notes_at(loaded.decoder.max_model_len), *loaded.notes))

    def _load(self, max_model_len: int | None, options: ReadOptions) -> LoadedDecoder:
        if self._parallel is not None:
            return self._load_shard(self._parallel, max_model_len, options)
        if not self.is_native:
            path = "invariant" if self.is_invariant and self.has_device_kernels else None
            coded = wanted_tensors(self.quantization, self.dtype) if self.keeps_codes else None
            weights = open_weights(self._files, self._spec, options)
            loader = Loader(self._spec, self.dtype, self.device, weights, path, coded)
            decoder = Decoder(loader, max_model_len)
            notes = decoder.notes
            if self.device.type == "cpu" and not self._is_requested:
                notes = (
                    *notes,
                    f"layers are computed by torch, which is slower: {self._obstacle}",
                )
            return LoadedDecoder(decoder, loader.quantization, notes, decoder.idle_expert_bytes)
        native_weights = load_native_weights(
            self._files, self._spec, self.quantization, self.dtype, WeightCache.of(self._model), options
        )
        native = NativeDecoder(self._spec, native_weights, max_model_len)
        return LoadedDecoder(native, native.quantization, native_weights.notes, native.idle_expert_bytes)

    def _load_transformers(self, max_model_len: int | None) -> LoadedDecoder:
        if self._model.imatrix is not None:
            raise ConfigError(f"imatrix is {self._model.imatrix!r}, which transformers models cannot use; leave it out")
        wanted = wanted_tensors(self.quantization, self.dtype) if self.packs else None
        place = (self.dtype, self.device)
        decoder = TransformersDecoder(self._files, self._spec, place, wanted, max_model_len)
        return LoadedDecoder(
            decoder, decoder.quantization, (f"the model runs through transformers: {self.reason}", *decoder.notes)
        )

    def _load_shard(self, parallel: Parallel, max_model_len: int | None, options: ReadOptions) -> LoadedDecoder:
        """Load one rank's part: packed for the kernels where they can be used, else for torch."""
        wanted = wanted_tensors(self.quantization, self.dtype)
        weights = open_weights(self._files, self._spec, options)
        packed = wanted if self.is_packed else None
        coded = wanted if self.keeps_codes or (self.is_invariant and self.has_device_kernels) else None
        loader = ShardLoader(self._spec, (self.dtype, self.device), weights, parallel, packed, coded)
        decoder = Decoder(loader, max_model_len)
        return LoadedDecoder(decoder, loader.quantization, decoder.notes)


def draft_quantization(files: ModelFiles, spec: ModelSpec, execution: ExecutionConfig, model: ModelConfig) -> str:
    """Return the quantization of a draft model: "auto" is int4 if there are kernels and its files have no codes."""
    if model.quantization != "auto" or spec.quantization is not None:
        return model.quantization
    return "int4" if DecoderChoice(files, spec, execution, model).packs else "auto"


def encoder_weights(
    device: torch.device, execution: ExecutionConfig, model: ModelConfig, spec: ModelSpec
) -> tuple[WantedTensor | None, torch.dtype, tuple[str, ...]]:
    """Return how an encoder's linear layers are packed (None: by torch), its dtype, and notes. Raises ConfigError.

    On a CPU "auto" is float32: an encoder is small, and its vectors are compared with those of other programs.
    """
    if model.imatrix is not None:
        raise ConfigError(f"imatrix is {model.imatrix!r}; an encoder has none, leave it out")
    if execution.decoder == "transformers":
        raise ConfigError("decoder is 'transformers', which does not run encoders; give auto, native or torch")
    obstacle = "decoder is 'torch'" if execution.decoder == "torch" else _no_kernels(device, model)
    quantization = choose_quantization(model.quantization, model.dtype, spec)
    is_float32 = model.dtype == "auto" and device.type == "cpu"
    dtype = torch.float32 if is_float32 else choose_dtype(model.dtype, spec.dtype, device)
    if obstacle is None:
        return wanted_tensors(quantization, dtype), dtype, ()
    for setting, value, needing in (
        ("decoder", execution.decoder, ("native",)),
        ("numerics", execution.numerics, ("invariant",)),
        ("quantization", model.quantization, ("int8", "int4")),
    ):
        if value in needing:
            reason = f"which needs the C++ kernels, and they cannot be used: {obstacle}"
            raise ConfigError(f"{setting} is {value!r}, {reason}; give auto")
    return None, dtype, (f"layers are computed by torch: {obstacle}",) if device.type == "cpu" else ()


def _no_kernels(device: torch.device, model: ModelConfig) -> str | None:
    """Return why no layer can have packed weights, or None if layers can."""
    if device.type != "cpu":
        return f"the device is {device.type}"
    if not cpu.status().is_loaded:
        return f"the C++ kernels are {cpu.status().reason}"
    return "dtype is 'float16'" if model.dtype == "float16" else None


def _is_transformers(files: ModelFiles, spec: ModelSpec, execution: ExecutionConfig, parallel: Parallel | None) -> bool:
    """Return True if the model runs through transformers. Raises ConfigError if the configuration excludes that."""
    if spec.path != "transformers" and execution.decoder != "transformers":
        return False
    reason = spec.path_reason or "decoder is 'transformers'"
    if parallel is not None:
        raise ConfigError(
            f"{reason}; the transformers decoder cannot be divided among ranks; give --tensor-parallel-size 1 and "
            "--pipeline-parallel-size 1"
        )
    if execution.decoder in ("native", "torch"):
        raise ConfigError(f"decoder is {execution.decoder!r}, but {reason}; give auto or transformers")
    if spec.quantization is not None and files.kind == "hf":
        raise ConfigError(f"decoder is 'transformers', and the files have {spec.quantization} codes; give auto")
    if files.kind != "hf":
        raise ConfigError(
            f"decoder is 'transformers', which reads folders of safetensors; {files.name} is none; give auto"
        )
    return True


def _obstacle(device: torch.device, execution: ExecutionConfig, model: ModelConfig, spec: ModelSpec) -> str | None:
    """Return why the native decoder cannot be used, or None if it can."""
    if spec.path == "transformers" or execution.decoder == "transformers":
        return "the model runs through transformers" + _AS_IT_IS * (device.type != "cpu")
    if device.type != "cpu":
        return f"the device is {device.type}"
    if execution.decoder == "torch":
        return "decoder is 'torch'"
    if execution.attention != "auto":
        return f"attention is {execution.attention!r}"
    return native_decoder.unsupported_reason(spec, model.dtype)


def cache_dtype(name: str, model: torch.dtype) -> torch.dtype:
    """Return the type of cached keys and values: "auto" means the model's. Raises ConfigError."""
    return model if name == "auto" else dtype_named(name, "kv_cache_dtype", KV_DTYPES)
