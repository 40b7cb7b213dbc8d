"""A Llama-like decoder whose whole step is one call into the C++ kernels.

Owns: the C structures that describe a model and a step (csrc/decoder_step.h), and the buffers they point to.
Does not: own KV memory, pack weights (native_weights does), plan or sample.
Invariants: a token's result depends on its own row alone, bit for bit. Activations are float32 for weights of any kind.
This object, or the attention backend last passed to `forward`, keeps alive everything that C reads.
Shapes: T tokens of the step, N rows that sample, E hidden size, D head size, V vocabulary. Decoder is the slow twin.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from ctypes import POINTER, Structure, c_double, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from octavo.artifacts.families import FAMILIES
from octavo.artifacts.model_spec import MixtureSpec, ModelSpec
from octavo.models.layer_attention import layer_attention
from octavo.models.loader import rope_tables
from octavo.models.native_adapters import NativeAdapters
from octavo.models.native_mixture import PANEL, MixtureDescriptor, NativeMixture
from octavo.models.native_weights import NativeLayer, NativeWeights, Vector
from octavo.models.step_extras import StepExtras
from octavo.nn.lora import Adapter
from octavo.nn.packed_weight import MultiplicationDescriptor, PackedWeight, WeightDescriptor, most_frequent_code
from octavo.ops import cpu
from octavo.ops.attention import AttentionBackend
from octavo.ops.attention_kernel import MAX_HEAD_DIM, AttentionLayer, PoolLayers
from octavo.ops.gated_mul import ACTIVATION_KINDS

_NORM_KINDS = {"rms": 0, "layer": 1}  # enum NormKind of csrc/rows.h
_NORMS = ("attention_norm", "mlp_norm", "after_attention", "after_mlp", "q_norm", "k_norm")


class _Norm(Structure):
    _fields_ = (("weight", c_void_p), ("bias", c_void_p))


class _Layer(Structure):
    _fields_ = (
        *((name, MultiplicationDescriptor) for name in ("qkv", "output", "gate_up", "down")),
        *((name, _Norm) for name in _NORMS),
        ("rope_table", c_void_p),
        ("mixture", POINTER(MixtureDescriptor)),
        ("group", c_int64),
        ("attention", AttentionLayer),
    )


class _Model(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim")),
        *((name, c_int64) for name in ("rope_dim", "rope_is_interleaved", "rope_height", "rope_width")),
        *((name, c_int64) for name in ("qk_norm_is_wide", "norm_kind")),
        *((name, c_int64) for name in ("intermediate_size", "activation", "is_gated", "is_parallel")),
        *((name, c_double) for name in ("norm_eps", "stream_eps", "embedding_scale", "logits_scale", "logits_cap")),
        ("layers", POINTER(_Layer)),
        ("embedding", MultiplicationDescriptor),
        ("head", MultiplicationDescriptor),
        ("final_norm", _Norm),
    )


class _Step(Structure):
    _fields_ = (
        ("num_tokens", c_int64),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("num_media", c_int64),
        *((name, c_void_p) for name in ("media_rows", "media", "rope_positions", "groups", "hidden", "workspace")),
        ("expert_bytes", c_int64),
        ("lora", c_void_p),
    )


class NativeDecoder:
    """A decoder over packed weights. `forward` and `logits` return buffers that the next call overwrites."""

    def __init__(self, spec: ModelSpec, weights: NativeWeights, max_model_len: int | None = None) -> None:
        self.spec = spec
        self.max_model_len = min(spec.max_model_len, max_model_len or spec.max_model_len)
        sinks = [torch.from_numpy(layer.vectors["sinks"]) for layer in weights.layers if "sinks" in layer.vectors]
        self.attention = layer_attention(spec, sinks=sinks)
        self._weights = weights
        self._tables = _rope_tables(spec, weights, self.max_model_len)
        self._kept: list[object] = []  # arrays of descriptors
        self._layers = (_Layer * spec.num_layers)(*map(self._layer, range(spec.num_layers), weights.layers))
        self._model = self._describe()
        self._step = _Step()
        self._adapters = NativeAdapters(spec)
        self._pool_layers: PoolLayers | None = None
        self._hidden = torch.empty(0)
        self._logits = torch.empty(0)
        self._views: dict[str, Tensor] = {}  # of the last calls, in both
        self._workspace = cpu.Workspace()
        self._sizes: dict[tuple[int, int], int] = {}  # bytes of workspace by rows and threads
        self._run_step = _function("octavo_decoder_step", c_void_p, c_void_p, c_int32)
        self._run_logits = _function(
            "octavo_decoder_logits", c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int32
        )
        self._run_best = _function(
            "octavo_decoder_best", c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int32
        )
        self._workspace_bytes = _function("octavo_decoder_workspace", c_void_p, c_int64, c_int64, result=c_int64)

    def put_adapter(self, number: int, adapter: Adapter, dtype: torch.dtype) -> None:
        """Add an adapter, which a step's extras name by its number."""
        self._adapters.put(number, adapter, dtype == torch.bfloat16)

    def drop_adapter(self, number: int) -> None:
        """Remove an adapter."""
        self._adapters.drop(number)

    def forward(
        self, token_ids_T: Tensor, positions_T: Tensor, backend: AttentionBackend, extras: StepExtras | None = None
    ) -> Tensor:
        """Return the hidden states after the final norm, float32 [T, E]. `backend.begin` was called for this step."""
        pool_layers = PoolLayers.begin(backend, self.spec.num_layers, self._pool_layers)
        assert pool_layers is not None, "the native decoder needs KernelAttention"
        if pool_layers is not self._pool_layers:
            self._pool_layers = pool_layers
            for layer, (group, structure) in zip(self._layers, pool_layers.places, strict=True):
                layer.group, layer.attention = group, structure
        num_tokens, threads = token_ids_T.shape[0], cpu.team_size()
        hidden_TE = self._buffer("_hidden", num_tokens, self.spec.hidden_size)
        step = self._step
        step.num_tokens = num_tokens
        step.token_ids, step.positions = token_ids_T.data_ptr(), positions_T.data_ptr()
        step.groups = pool_layers.groups_address
        step.hidden, step.workspace = hidden_TE.data_ptr(), self._work(num_tokens, threads)
        step.expert_bytes = 0
        kept = self._add_extras(extras)
        adapters_T = None if extras is None else extras.adapters_T
        step.lora = None if adapters_T is None else self._adapters.begin(adapters_T)
        self._run_step(ctypes.addressof(self._model), ctypes.addressof(step), threads)
        del kept
        return hidden_TE

    def _add_extras(self, extras: StepExtras | None) -> object:
        """Describe what some rows have in the step's structure; return what must live until the step has run."""
        step = self._step
        step.num_media, step.media_rows, step.media, step.rope_positions = 0, None, None, None
        if extras is None:
            return None
        media_ME = None
        if extras.media_rows_M is not None and extras.media_ME is not None:
            media_ME = extras.media_ME.float().contiguous()
            if self.spec.residual_multiplier != 1.0:
                media_ME = media_ME / self.spec.residual_multiplier
            step.num_media, step.media_rows = len(media_ME), extras.media_rows_M.data_ptr()
            step.media = media_ME.data_ptr()
        if extras.rope_positions_DT is not None:
            step.rope_positions = extras.rope_positions_DT.data_ptr()
        return extras, media_ME

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """Return float32 logits [N, V] of gathered rows of `forward`'s result; 4 * N * V bytes."""
        count, threads = hidden_NE.shape[0], cpu.team_size()
        logits_NV = self._buffer("_logits", count, self.spec.vocab_size)
        hidden_NE = hidden_NE.contiguous()
        self._run_logits(
            ctypes.addressof(self._model), hidden_NE.data_ptr(), count, logits_NV.data_ptr(), self.spec.vocab_size,
            self._work(count, threads), threads,
        )  # fmt: skip
        return logits_NV

    def best(self, hidden_NE: Tensor, found: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Return the first id of each row's best logit, int64, and that logit: NaN if any is. Logits are not kept.

        `found` is written and returned if it is given.
        """
        count, threads = hidden_NE.shape[0], cpu.team_size()
        ids_N, best_N = found or (torch.empty(count, dtype=torch.int64), torch.empty(count))
        hidden_NE = hidden_NE.contiguous()
        self._run_best(
            ctypes.addressof(self._model), hidden_NE.data_ptr(), count, best_N.data_ptr(), ids_N.data_ptr(),
            self._work(count, threads), threads,
        )  # fmt: skip
        return ids_N, best_N

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step of many tokens reads: linear layers and the head, not the embedding's table."""
        return sum(part.nbytes for part in self._multiplied())

    @property
    def linear_flops_per_token(self) -> int:
        """Floating-point operations of one sampled token outside attention; of experts, those that it chooses."""
        idle = sum(mixture.idle(spec)[1] for mixture, spec in self._mixtures())
        return 2 * (sum(part.outputs * part.inputs for part in self._multiplied()) - idle)

    @property
    def idle_expert_bytes(self) -> int:
        """Bytes of experts' weights that a step of one token does not read."""
        return sum(mixture.idle(spec)[0] for mixture, spec in self._mixtures())

    @property
    def quantization(self) -> str:
        """The code of most weights, or "none" if most weights are floats."""
        return most_frequent_code(self._multiplied())

    def _multiplied(self) -> list[PackedWeight]:
        return [self._weights.head, *(part for layer in self._weights.layers for part in layer.parts)]

    def _mixtures(self) -> list[tuple[NativeMixture, MixtureSpec]]:
        spec = self.spec.mixture
        if spec is None:
            return []
        return [(layer.mixture, spec) for layer in self._weights.layers if layer.mixture is not None]

    def _describe(self) -> _Model:
        spec, family = self.spec, FAMILIES[self.spec.family]
        sections = spec.rope_sections or (spec.rope_dim // 2, 0, 0)
        return _Model(
            num_layers=spec.num_layers,
            hidden_size=spec.hidden_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            rope_dim=spec.rope_dim,
            rope_is_interleaved=spec.rope_is_interleaved,
            rope_height=sections[0],
            rope_width=sum(sections[:2]),
            qk_norm_is_wide=family.qk_norm_is_wide,
            norm_kind=_NORM_KINDS[family.norm],
            intermediate_size=spec.intermediate_size,
            activation=ACTIVATION_KINDS[spec.activation],
            is_gated=family.has("gate_proj"),
            is_parallel=family.is_parallel,
            norm_eps=spec.rms_norm_eps,
            stream_eps=spec.stream_eps,
            embedding_scale=spec.stream_scale,
            logits_scale=spec.logits_scale,
            logits_cap=spec.logits_soft_cap or 0.0,
            layers=self._layers,
            embedding=self._multiplication((self._weights.embedding,)),
            head=self._multiplication((self._weights.head,)),
            final_norm=_norm(self._weights.vectors, "final_norm"),
        )

    def _layer(self, index: int, layer: NativeLayer) -> _Layer:
        rope = self.spec.rope_index(index)
        return _Layer(
            qkv=self._multiplication(layer.qkv),
            output=self._multiplication(layer.output),
            gate_up=self._multiplication(layer.gate_up),
            down=self._multiplication(layer.down),
            rope_table=None if rope is None else self._tables[rope].data_ptr(),
            mixture=self._mixture(layer),
            **{role: _norm(layer.vectors, role) for role in _NORMS},
        )

    def _multiplication(self, parts: Sequence[PackedWeight]) -> MultiplicationDescriptor:
        descriptors = (WeightDescriptor * len(parts))(*(part.descriptor() for part in parts))
        self._kept.append(descriptors)
        return MultiplicationDescriptor(ctypes.cast(descriptors, POINTER(WeightDescriptor)), len(parts))

    def _mixture(self, layer: NativeLayer) -> Any:
        if layer.mixture is None or self.spec.mixture is None:
            return None
        descriptor = layer.mixture.describe(self.spec.mixture, ACTIVATION_KINDS[self.spec.activation])
        self._kept.append(descriptor)
        return ctypes.pointer(descriptor)

    def _buffer(self, name: str, rows: int, columns: int) -> Tensor:
        """Return rows of a reused buffer, which grows as needed: page faults of a new one cost more than the work."""
        held: Tensor = getattr(self, name)
        if held.shape[0] < rows:
            held = torch.empty(rows, columns)
            setattr(self, name, held)
            self._views.pop(name, None)
        view = self._views.get(name)
        if view is None or view.shape[0] != rows:
            view = self._views[name] = held[:rows]
        return view

    def _work(self, rows: int, threads: int) -> int:
        size = self._sizes.get((rows, threads))
        if size is None:
            size = self._sizes[rows, threads] = self._workspace_bytes(ctypes.addressof(self._model), rows, threads)
        return self._workspace.address(size)


def unsupported_reason(spec: ModelSpec, dtype: str) -> str | None:
    """Return why this model cannot run natively here, or None if it can. `dtype` is the setting's value."""
    if not cpu.status().is_loaded:
        return f"the C++ kernels are {cpu.status().reason}"
    if dtype == "float16":
        return "dtype is 'float16', which cannot be packed; give bfloat16 or float32"
    if spec.head_dim % 8 or spec.head_dim > MAX_HEAD_DIM:
        return f"head_dim is {spec.head_dim}; the kernels support multiples of 8 up to {MAX_HEAD_DIM}"
    mixture = spec.mixture
    if mixture is not None and any(
        size % PANEL for size in (spec.hidden_size, mixture.intermediate_size, mixture.shared_size)
    ):
        sizes = f"{spec.hidden_size}, {mixture.intermediate_size} and {mixture.shared_size}"
        return f"hidden, expert and shared expert sizes are {sizes}; the kernels support multiples of {PANEL}"
    return None


def _rope_tables(spec: ModelSpec, weights: NativeWeights, max_len: int) -> tuple[Tensor, ...]:
    """Return float32 tables of cosines and signed sines, [P, 2, rope_dim], by ModelSpec.rope_index."""
    factors = weights.vectors.get("rope_factors")
    factors_NF = None if factors is None else torch.from_numpy(factors).view(-1, spec.rope_dim // 2)
    ropes = rope_tables(spec, max_len, torch.float32, torch.device("cpu"), factors_NF)
    return tuple(rope.table_P2D for rope in ropes)


def _norm(vectors: Mapping[str, Vector], role: str) -> _Norm:
    """Describe a norm; one that the family lacks has no addresses."""
    return _Norm(_address(vectors.get(role)), _address(vectors.get(f"{role}.bias")))


def _address(vector: Vector | None) -> int | None:
    return None if vector is None else vector.ctypes.data


def _function(name: str, *argument_types: Any, result: Any = None) -> Callable[..., Any]:
    function = cpu.function(name, *argument_types, result=result)
    assert function is not None, "the native decoder needs the kernels; see unsupported_reason"
    return function
