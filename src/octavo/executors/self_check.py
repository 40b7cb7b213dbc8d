"""The check of a device before it is used: results against a CPU's, and whether a row's bits depend on the batch.

Owns: the trials, one for each kind of kernel, and the report. Does not: choose a device (device_choice).
A trial calls what a model's layers call, on random inputs of typical sizes, so it checks the kernels that will run. The
same rows are computed whole and in parts: alone, in tiles of other heights, a prompt's last token as a decode. A
difference beyond rounding is a fault, and the device is not used; a difference of bits only excludes
`--numerics invariant`. Linear layers are tried twice, because by default they are cuBLAS's, which chooses its
algorithm by the number of rows.
Shapes: T tokens, E width, H query heads, K KV heads, D size of a head, R rows, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from octavo.artifacts.model_spec import MixtureSpec
from octavo.core.request import SamplingParams
from octavo.executors.device import reason_of
from octavo.nn.coded_linear import CodedLinear, DeviceCodes
from octavo.nn.experts import Expert, Mixture, StackedLinear
from octavo.nn.layers import Linear
from octavo.nn.packed_weight import Codes, WeightKind, WeightShape
from octavo.nn.staging import Stage
from octavo.ops.attention import (
    AttentionBackend,
    AttentionBatch,
    HostTables,
    KVPlace,
    KVPool,
    LayerAttention,
    PoolShape,
    ReferenceAttention,
)
from octavo.ops.attention_batched import BatchedAttention
from octavo.ops.attention_triton import SPLIT, TritonAttention
from octavo.ops.gated_mul import activation_of
from octavo.ops.rms_norm import add_rms_norm
from octavo.ops.rope import Rotation
from octavo.ops.triton import available
from octavo.sampling.columns import SamplingRows, SequenceIds
from octavo.sampling.sampler import Sampler

NEAR = 0.02  # of bfloat16 results about 1 in size: some five roundings
BLOCK = 16
PARTS = ((0, 1), (5, 6), (3, 20), (1, 34))  # beside all rows, and the last one
SHORT, LONG = 40, 700  # tokens of the trials' sequence: interpreted kernels are slow, and a device has splits to join
Compute = Callable[[torch.device, int, int], Tensor]  # rows [begin, end) of the trial, as a CPU tensor


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What a check found: kernels whose results are wrong, and kernels whose rows' bits depend on the batch."""

    num_trials: int
    seconds: float
    faults: tuple[str, ...] = ()
    differing: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The report in words, for the user."""
        if self.faults:
            return f"the self-check failed: {'; '.join(self.faults)}"
        bits = "an answer can have the same bits in any batch (--numerics invariant)"
        if self.differing:
            bits = f"--numerics is fast, since bits depend on the batch in {', '.join(self.differing)}"
        return f"the self-check of {self.num_trials} kernels passed in {self.seconds:.1f} s; {bits}"


@dataclass(frozen=True, slots=True)
class Trial:
    """One kind of kernel on rows [0, `num_rows`); `error` is the largest deviation from the CPU's result allowed.

    `has_bits` is False if a row's bits may depend on the batch.
    """

    name: str
    compute: Compute
    num_rows: int
    error: float = NEAR
    has_bits: bool = True

    def run(self, device: torch.device) -> tuple[str | None, str | None]:
        """Return the fault, and where bits depend on the batch; None if there is none."""
        want = self.compute(torch.device("cpu"), 0, self.num_rows).float()
        whole = self.compute(device, 0, self.num_rows)
        off = float(((whole.float() - want).abs() / want.abs().clamp(min=1.0)).max())
        if not off <= self.error:  # NaN is a fault
            return f"{self.name} differs from the reference by {off:.2g}, at most {self.error:g} is rounding", None
        for begin, end in (*PARTS, (self.num_rows - 1, self.num_rows)):
            if self.has_bits and not torch.equal(self.compute(device, begin, end), whole[begin:end]):
                return None, f"{self.name} (rows {begin} to {end} alone)"
        return None, None


def check_device(device: torch.device, trials: Sequence[Trial] = ()) -> CheckReport:
    """Run these trials, or all. A trial that raises is a fault; after a lost context, so are those that follow."""
    started_at = time.perf_counter()
    faults, differing = [], []
    trials = trials or make_trials(device.type != "cuda")
    for trial in trials:
        try:
            with torch.inference_mode():
                fault, depends = trial.run(device)
        except Exception as error:  # the shell: whatever a compiler or a device raises
            fault, depends = f"{trial.name}: {reason_of(error)}", None
        faults += [] if fault is None else [fault]
        differing += [] if depends is None else [depends]
    return CheckReport(len(trials), time.perf_counter() - started_at, tuple(faults), tuple(differing))


def make_trials(is_interpreted: bool) -> list[Trial]:
    """Return the trials: shorter ones for interpreted kernels, whose products numpy sums in an order of its own."""
    num_tokens, has_bits = (SHORT, False) if is_interpreted else (LONG, True)
    plain = LayerAttention(8, 2, 64, 64, 0.125)
    odd = replace(plain, window=33, soft_cap=20.0, sinks_H=torch.linspace(-1.0, 1.0, 8))
    return [
        Trial("norm", _norm(), 40),
        Trial("rotation and write", _rotation(), 40),
        Trial("activation", _activation(), 40),
        Trial("linear", _linear(Linear), 150, has_bits=False),
        Trial("invariant linear", _linear(_invariant_linear), 150, has_bits=has_bits),
        Trial("4-bit linear", _coded_linear(), 150, has_bits=has_bits),
        Trial("experts", _experts(), 40, has_bits=has_bits),
        Trial("attention", _attention(plain, torch.bfloat16, num_tokens), num_tokens),
        Trial("attention with window, cap and sinks", _attention(odd, torch.bfloat16, num_tokens), num_tokens),
        Trial("attention of a shared prefix", _shared_prefix(plain, SPLIT), 40, has_bits=has_bits),
        Trial("attention over int8", _attention(plain, torch.int8, SHORT), SHORT),
        Trial("attention over fp8", _attention(plain, torch.float8_e4m3fn, SHORT), SHORT),
        Trial("sampler", _sampler(), 40, error=0.0),
        Trial("log-probabilities", _log_probabilities(), 40, error=1e-5),
    ]


def _random(seed: int, *size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _norm() -> Compute:
    x_TE, residual_TE, weight_E = _random(1, 40, 512), _random(2, 40, 512), _random(3, 512)

    def compute(device: torch.device, begin: int, end: int) -> Tensor:
        rows = slice(begin, end)
        parts = add_rms_norm(x_TE[rows].to(device), residual_TE[rows].to(device), weight_E.to(device), 1e-5)
        return torch.cat([part.cpu() for part in parts], dim=1)

    return compute


def _rotation() -> Compute:
    """Norm and rotation of four query and two key heads, and the write of keys and values into a pool."""
    qk_TJD, v_TKD, norm_JD = _random(4, 40, 6, 64), _random(20, 40, 2, 64), _random(21, 6, 64)
    angle_T1R = torch.randn(40, 1, 64, generator=torch.Generator().manual_seed(5))
    cos_T1R, sin_T1R = angle_T1R.cos().bfloat16(), angle_T1R.sin().bfloat16()

    def compute(device: torch.device, begin: int, end: int) -> Tensor:
        qk, v, cos, sin = (part[begin:end].to(device) for part in (qk_TJD, v_TKD, cos_T1R, sin_T1R))
        rotation = Rotation(norm_JD.to(device), 1e-5, (cos, sin), is_interleaved=False)
        pool, slots = KVPool(PoolShape(1, 3, BLOCK, 2, 64, 64, qk.dtype), device), torch.arange(len(qk)).to(device)
        if available.uses_kernels(qk):
            q = rotation.apply_and_write(qk, v, KVPlace(pool.keys[0], pool.values[0], qk.dtype, slots))
        else:
            rotated = rotation.apply(qk)
            q = rotated[:, :4]
            pool.write(0, slots, rotated[:, 4:], v)
        written = (plane[0].flatten(0, 1)[: len(qk)] for plane in (pool.keys, pool.values))
        return torch.cat((q, *written), dim=1).cpu().clone()

    return compute


def _activation() -> Compute:
    gate_up_TG, activate = _random(6, 40, 1024), activation_of("silu", True)
    return lambda device, begin, end: activate(gate_up_TG[begin:end].to(device)).cpu().clone()


def _linear(make: Callable[[Tensor], Callable[[Tensor], Tensor]]) -> Compute:
    x_TE, weight_FE = _random(7, 150, 512), _random(8, 384, 512) / 512**0.5
    return lambda device, begin, end: make(weight_FE.to(device))(x_TE[begin:end].to(device)).cpu().clone()


def _invariant_linear(weight_FE: Tensor) -> Linear:
    return Linear(weight_FE, path="plain" if not available.uses_kernels(weight_FE) else "invariant")


def _coded_linear() -> Compute:
    """The layer's reference is the product with the codes' own values."""
    random = np.random.default_rng(10)
    shape = WeightShape(WeightKind.INT4, 384, 512, 32)
    codes = Codes(
        WeightKind.INT4,
        32,
        random.integers(0, 16, (384, 512), dtype=np.uint8),
        random.uniform(0.005, 0.01, (384, 16)).astype(np.float16),
        random.uniform(-0.08, -0.04, (384, 16)).astype(np.float16),
    )
    x_TE = _random(11, 150, 512)

    def compute(device: torch.device, begin: int, end: int) -> Tensor:
        stage = Stage(device)
        weight = DeviceCodes.empty(shape, stage)
        weight.put(0, codes, stage)
        return CodedLinear([weight])(x_TE[begin:end].to(device)).cpu().clone()

    return compute


def _experts() -> Compute:
    """A mixture of 8 experts, of which a token has 2."""
    spec = MixtureSpec(8, 2, 128, (0,), is_normalised=True)
    x_TE, router_XE = _random(13, 40, 256), _random(14, 8, 256, dtype=torch.float32) / 4.0
    weights = _random(15, 8 * 256, 256) / 16.0, _random(16, 8 * 256, 128) / 128**0.5

    def compute(device: torch.device, begin: int, end: int) -> Tensor:
        gate_up, down = (weight.to(device) for weight in weights)
        pairs = zip(gate_up.chunk(8), down.chunk(8), strict=True)
        experts = [Expert(*(Linear(weight, path="plain") for weight in pair)) for pair in pairs]
        stacked = StackedLinear(8, [gate_up], None), StackedLinear(8, [down], None)
        router, has_kernels = _invariant_linear(router_XE.to(device)), available.uses_kernels(gate_up)
        parts = (router, experts, None, None, activation_of("silu", True), stacked if has_kernels else None)
        return Mixture(spec, *parts)(x_TE[begin:end].to(device)).cpu().clone()

    return compute


def _attention(layer: LayerAttention, dtype: torch.dtype, num_tokens: int) -> Compute:
    heads = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
    q_THD, k_TKD, v_TKD = (_random(9 + part, num_tokens, count, layer.head_dim) for part, count in enumerate(heads))
    num_blocks = -(-num_tokens // BLOCK) + 1  # the last one is another sequence's
    shape = PoolShape(1, num_blocks, BLOCK, layer.num_kv_heads, layer.head_dim, layer.value_dim, dtype)

    def compute(device: torch.device, begin: int, end: int) -> Tensor:
        pool = KVPool(shape, device)
        backend = _backend(pool, layer)
        for first, last in ((0, begin), (begin, end)) if begin else ((0, end),):
            tokens = torch.arange(first, last)
            backend.begin(_batch(pool, first, last))
            moved = (part[tokens].to(device) for part in (q_THD, k_TKD, v_TKD))
            output_THV = backend.attend(0, *moved)
        return output_THV.cpu().clone()

    return compute


def _backend(pool: KVPool, layer: LayerAttention) -> AttentionBackend:
    """Return what attends on the pool's device; the reference on a CPU."""
    own = layer if layer.sinks_H is None else replace(layer, sinks_H=layer.sinks_H.to(pool.device))
    if pool.device.type == "cpu":
        return ReferenceAttention(pool, [own])
    return TritonAttention(pool, [own]) if available.is_available() else BatchedAttention(pool, [own])


def _shared_prefix(layer: LayerAttention, num_shared: int) -> Compute:
    """Decodes whose contexts begin with the same blocks, so that some are one tile there; each has a block more."""
    num_rows, first_own = 40, num_shared // BLOCK
    shape = PoolShape(
        1, first_own + num_rows, BLOCK, layer.num_kv_heads, layer.head_dim, layer.value_dim, torch.bfloat16
    )
    q_NHD = _random(17, num_rows, layer.num_heads, layer.head_dim)
    k_TKD, v_TKD = (_random(seed, shape.num_blocks * BLOCK, layer.num_kv_heads, layer.head_dim) for seed in (18, 19))
    table_NM = np.tile(np.arange(first_own + 1), (num_rows, 1))
    table_NM[:, -1] += np.arange(num_rows)

    def compute(device: torch.device, begin: int, end: int) -> Tensor:
        pool, rows, count = KVPool(shape, device), np.arange(begin, end), end - begin
        pool.write(0, torch.arange(len(k_TKD)).to(device), k_TKD.to(device), v_TKD.to(device))
        slots = torch.from_numpy(table_NM[rows, -1] * BLOCK + BLOCK - 1)
        backend, ones = _backend(pool, layer), np.ones(count, dtype=np.int64)
        backend.begin(
            AttentionBatch(
                num_tokens=count,
                num_rows=count,
                num_decodes=count,
                positions_T=torch.full((count,), num_shared + BLOCK - 1).to(device),
                slot_mapping_T=slots.to(device),
                block_table_NM=torch.from_numpy(table_NM[rows]).to(device),
                counts=ones,
                contexts=ones * (num_shared + BLOCK),
                host_tables=HostTables(table_NM, rows, BLOCK),
            )
        )
        moved = (part.to(device) for part in (q_NHD[begin:end], k_TKD[slots], v_TKD[slots]))
        return backend.attend(0, *moved).cpu().clone()

    return compute


def _batch(pool: KVPool, first: int, last: int) -> AttentionBatch:
    """Return a batch of one row, whose table has the pool's blocks from the last but one to the first."""
    table = np.arange(pool.shape.num_blocks - 2, -1, -1)[None, : -(-last // BLOCK)]
    positions = np.arange(first, last)
    slots = table[0][positions // BLOCK] * BLOCK + positions % BLOCK
    return AttentionBatch(
        num_tokens=last - first,
        num_rows=1,
        num_decodes=int(last - first == 1),
        positions_T=torch.from_numpy(positions).to(pool.device),
        slot_mapping_T=torch.from_numpy(slots).to(pool.device),
        block_table_NM=torch.from_numpy(table.copy()).to(pool.device),
        counts=np.array([last - first]),
        contexts=np.array([last]),
    )


def _sampler() -> Compute:
    num_rows, vocab_size = 40, 5000
    logits_RV = 4 * _random(12, num_rows, vocab_size, dtype=torch.float32)
    kinds = (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, seed=1),
        SamplingParams(temperature=1.0, top_p=0.9, seed=2),
        SamplingParams(temperature=1.3, top_k=50, min_p=0.02, seed=3),
    )

    def compute(device: torch.device, begin: int, end: int) -> Tensor:
        sampler = Sampler(num_rows, torch.zeros((num_rows, 8), dtype=torch.int32, device=device), vocab_size)
        for slot in range(num_rows):
            sampler.put(slot, kinds[slot % len(kinds)], SequenceIds(np.zeros(1, dtype=np.int64)))
        slots = np.arange(begin, end)
        sampled = sampler.sample(logits_RV[begin:end].to(device, copy=True), SamplingRows(slots, slots % 7))
        return torch.stack([sampled.ids_R.cpu().double(), sampled.best_R.cpu().double()], dim=1)

    return compute


def _log_probabilities() -> Compute:
    logits_RV = 4 * _random(22, 40, 5000, dtype=torch.float32)

    def compute(device: torch.device, begin: int, end: int) -> Tensor:
        sampler = Sampler(1, torch.zeros((1, 8), dtype=torch.int32, device=device), logits_RV.shape[1])
        found = sampler.distribution(logits_RV[begin:end].to(device), np.zeros(end - begin, dtype=np.int64))
        return found.log_probs_RV.cpu().clone()

    return compute
