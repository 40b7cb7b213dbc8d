"""A Llama-like decoder whose whole step is one call into the C++ kernels.

Owns: the C structures that describe a model and a step (csrc/decoder_step.h), and the buffers they point to.
Does not: own KV memory, pack weights (native_weights does), plan or sample.
Invariants: a token's result depends on its own row alone, bit for bit. Activations are float32 for weights of any kind.
This object, or the attention backend last passed to `forward`, keeps alive everything that C reads.
Shapes: T tokens of the step, N rows that sample, E hidden size, D head size, V vocabulary. Decoder is the slow twin.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_double, c_int32, c_int64, c_void_p
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from octavo.artifacts.families import FAMILIES
from octavo.artifacts.model_spec import ModelSpec
from octavo.models.native_weights import NativeLayer, NativeWeights, Vector
from octavo.nn.layers import RopeTable
from octavo.nn.packed_weight import PackedWeight, WeightDescriptor, most_frequent_code
from octavo.ops import cpu
from octavo.ops.attention import AttentionBackend, GroupedAttention
from octavo.ops.attention_kernel import AttentionLayer, KernelAttention

MAX_HEAD_DIM = 256  # kMaxSize of csrc/attention.h
_ACTIVATIONS = {"silu": 0, "gelu": 1}  # enum Activation of csrc/rows.h


class _Multiplication(Structure):
    _fields_ = (("parts", POINTER(WeightDescriptor)), ("num_parts", c_int64))


class _Layer(Structure):
    _fields_ = (
        *((name, _Multiplication) for name in ("qkv", "output", "gate_up", "down")),
        *((name, c_void_p) for name in ("attention_norm", "mlp_norm", "after_attention", "after_mlp")),
        *((name, c_void_p) for name in ("query_norm", "key_norm", "rope_table")),
        ("group", c_int64),
        ("attention", AttentionLayer),
    )


class _Model(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim")),
        *((name, c_int64) for name in ("intermediate_size", "activation")),
        ("norm_eps", c_double),
        ("embedding_scale", c_double),
        ("layers", POINTER(_Layer)),
        ("embedding", _Multiplication),
        ("head", _Multiplication),
        ("final_norm", c_void_p),
    )


class _StepGroup(Structure):
    _fields_ = (("attention", c_void_p), ("slot_mapping", c_void_p))


class _Step(Structure):
    _fields_ = (
        ("num_tokens", c_int64),
        *((name, c_void_p) for name in ("token_ids", "positions", "groups", "hidden", "workspace")),
    )


class NativeDecoder:
    """A decoder over packed weights. `forward` and `logits` return buffers that the next call overwrites."""

    def __init__(self, spec: ModelSpec, weights: NativeWeights, max_model_len: int | None = None) -> None:
        self.spec = spec
        self.max_model_len = min(spec.max_model_len, max_model_len or spec.max_model_len)
        self._weights = weights
        self._tables = _rope_tables(spec, weights, self.max_model_len)
        self._kept: list[object] = []  # arrays of descriptors
        self._layers = (_Layer * spec.num_layers)(*map(self._layer, range(spec.num_layers), weights.layers))
        self._model = self._describe()
        self._step = _Step()
        self._backend: AttentionBackend | None = None
        self._backends: tuple[KernelAttention, ...] = ()
        self._groups = (_StepGroup * 1)()
        self._hidden = torch.empty(0)
        self._logits = torch.empty(0)
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._run_step = _function("octavo_decoder_step", c_void_p, c_void_p, c_int32)
        self._run_logits = _function(
            "octavo_decoder_logits", c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int32
        )
        self._workspace_bytes = _function("octavo_decoder_workspace", c_void_p, c_int64, c_int64, result=c_int64)

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, backend: AttentionBackend) -> Tensor:
        """Return the hidden states after the final norm, float32 [T, E]. `backend.begin` was called for this step."""
        if backend is not self._backend:
            self._bind(backend)
        backends = self._backends
        num_tokens, threads = token_ids_T.shape[0], self._threads()
        hidden_TE = self._buffer("_hidden", num_tokens, self.spec.hidden_size)
        for group, attention in zip(self._groups, backends, strict=True):
            group.attention, group.slot_mapping = attention.step_address, attention.slot_mapping_address
        step = self._step
        step.num_tokens = num_tokens
        step.token_ids, step.positions = token_ids_T.data_ptr(), positions_T.data_ptr()
        step.groups = ctypes.addressof(self._groups)
        step.hidden, step.workspace = hidden_TE.data_ptr(), self._work(num_tokens, threads)
        self._run_step(ctypes.addressof(self._model), ctypes.addressof(step), threads)
        return hidden_TE

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """Return float32 logits [N, V] of gathered rows of `forward`'s result; 4 * N * V bytes."""
        count, threads = hidden_NE.shape[0], self._threads()
        logits_NV = self._buffer("_logits", count, self.spec.vocab_size)
        hidden_NE = hidden_NE.contiguous()
        self._run_logits(
            ctypes.addressof(self._model), hidden_NE.data_ptr(), count, logits_NV.data_ptr(), self.spec.vocab_size,
            self._work(count, threads), threads,
        )  # fmt: skip
        return logits_NV

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads: the linear layers and the head, not the embedding's table."""
        return sum(part.nbytes for part in self._multiplied())

    @property
    def linear_flops_per_token(self) -> int:
        """Floating-point operations of one sampled token outside attention."""
        return sum(2 * part.outputs * part.inputs for part in self._multiplied())

    @property
    def quantization(self) -> str:
        """The code of most weights, or "none" if most weights are floats."""
        return most_frequent_code(self._multiplied())

    def _multiplied(self) -> list[PackedWeight]:
        layers = self._weights.layers
        return [
            self._weights.head,
            *(
                part
                for layer in layers
                for list_ in (layer.qkv, layer.output, layer.gate_up, layer.down)
                for part in list_
            ),
        ]

    def _describe(self) -> _Model:
        spec, family = self.spec, FAMILIES[self.spec.family]
        return _Model(
            num_layers=spec.num_layers,
            hidden_size=spec.hidden_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            intermediate_size=spec.intermediate_size,
            activation=_ACTIVATIONS[family.activation],
            norm_eps=spec.rms_norm_eps,
            embedding_scale=spec.hidden_size**0.5 if family.scales_embedding else 1.0,
            layers=self._layers,
            embedding=self._multiplication((self._weights.embedding,)),
            head=self._multiplication((self._weights.head,)),
            final_norm=_address(self._weights.final_norm),
        )

    def _layer(self, index: int, layer: NativeLayer) -> _Layer:
        is_sliding = self.spec.sliding_rope_theta is not None and self.spec.window_of(index) is not None
        return _Layer(
            qkv=self._multiplication(layer.qkv),
            output=self._multiplication(layer.output),
            gate_up=self._multiplication(layer.gate_up),
            down=self._multiplication(layer.down),
            attention_norm=_address(layer.attention_norm),
            mlp_norm=_address(layer.mlp_norm),
            after_attention=_address(layer.after_attention),
            after_mlp=_address(layer.after_mlp),
            query_norm=_address(layer.q_norm),
            key_norm=_address(layer.k_norm),
            rope_table=self._tables[int(is_sliding)].data_ptr(),
        )

    def _multiplication(self, parts: Sequence[PackedWeight]) -> _Multiplication:
        descriptors = (WeightDescriptor * len(parts))(*(part.descriptor() for part in parts))
        self._kept.append(descriptors)
        return _Multiplication(ctypes.cast(descriptors, POINTER(WeightDescriptor)), len(parts))

    def _bind(self, backend: AttentionBackend) -> None:
        """Point each layer at its KV pool: the backend's only pool, or the pool of the layer's cache group."""
        pools = [(backend, layer) for layer in range(self.spec.num_layers)]
        if isinstance(backend, GroupedAttention):
            pools = [backend.places[layer] for layer in range(self.spec.num_layers)]
        backends: list[KernelAttention] = []
        for layer, (group, index) in zip(self._layers, pools, strict=True):
            assert isinstance(group, KernelAttention), "the native decoder needs KernelAttention"
            if group not in backends:
                backends.append(group)
            layer.group = backends.index(group)
            layer.attention = group.layers[index]
        self._backend, self._backends = backend, tuple(backends)
        self._groups = (_StepGroup * len(backends))()

    def _buffer(self, name: str, rows: int, columns: int) -> Tensor:
        """Return rows of a reused buffer, which grows as needed: page faults of a new one cost more than the work."""
        held: Tensor = getattr(self, name)
        if held.shape[0] < rows:
            held = torch.empty(rows, columns)
            setattr(self, name, held)
        return held[:rows]

    def _work(self, rows: int, threads: int) -> int:
        needed = self._workspace_bytes(ctypes.addressof(self._model), rows, threads) + 64
        if self._workspace.numel() < needed:
            self._workspace = torch.empty(needed, dtype=torch.uint8)
        return -(-self._workspace.data_ptr() // 64) * 64

    def _threads(self) -> int:
        return torch.get_num_threads() if cpu.status().is_parallel else 1


def unsupported_reason(spec: ModelSpec, dtype: str) -> str | None:
    """Return why this model cannot run natively here, or None if it can. `dtype` is the setting's value."""
    if not cpu.status().is_loaded:
        return f"the C++ kernels are {cpu.status().reason}"
    if dtype == "float16":
        return "dtype is 'float16', which cannot be packed; give bfloat16 or float32"
    if spec.head_dim % 8 or spec.head_dim > MAX_HEAD_DIM:
        return f"head_dim is {spec.head_dim}; the kernels support multiples of 8 up to {MAX_HEAD_DIM}"
    return None


def _rope_tables(spec: ModelSpec, weights: NativeWeights, max_len: int) -> tuple[Tensor, ...]:
    """Return float32 tables of cosines and signed sines, [P, 2, D]; the second is for layers with a window, if any."""
    factors = None if weights.rope_factors is None else torch.from_numpy(weights.rope_factors)
    device = torch.device("cpu")
    ropes = [RopeTable(spec, max_len, torch.float32, device, factors)]
    if spec.sliding_rope_theta is not None:
        sliding = replace(spec, rope_theta=spec.sliding_rope_theta, rope_scaling=None)
        ropes.append(RopeTable(sliding, max_len, torch.float32, device))
    return tuple(rope.table_P2D for rope in ropes)


def _address(vector: Vector | None) -> int | None:
    return None if vector is None else vector.ctypes.data


def _function(name: str, *argument_types: Any, result: Any = None) -> Callable[..., Any]:
    function = cpu.function(name, *argument_types, result=result)
    assert function is not None, "the native decoder needs the kernels; see unsupported_reason"
    return function
