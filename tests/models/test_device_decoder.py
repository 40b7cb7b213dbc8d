"""Decoders whose operations are Triton's kernels: interpreted on the CPU, and as shapes alone to count launches.

A GPU is not needed: `available.uses_kernels` says True for CPU tensors here, and Triton's interpreter runs the kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import resolve_model
from octavo.models.decoder import Decoder
from octavo.models.loader import Loader
from octavo.models.native_weights import wanted_tensors
from octavo.models.shard_loader import ShardLoader
from octavo.nn.parallel import Parallel, ShardSpec
from octavo.nn.weights import Weights, open_weights
from octavo.ops.attention import AttentionBatch, GroupedAttention, KVPlace, KVPool, PoolShape, ReferenceAttention
from octavo.ops.triton import available
from tests.models.dense_backend import all_logits
from tests.models.zoo import ROWS
from tests.models.zoo_checks import random_model
from tests.tiny_gguf import make_tiny_gguf
from tests.tiny_models import make_tiny_model

pytestmark = [
    pytest.mark.skipif(not available.is_available(), reason="no triton"),
    pytest.mark.usefixtures("patched_once"),
]

FREE = {"empty", "empty_like", "new_empty", "empty_strided", "_unsafe_view", "detach", "lift_fresh", "_reshape_alias"}
ATTENTION_LAUNCHES = 2  # splits, and their join
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [3], [5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3]]
# Together: layer norms, biases, every activation, wide and narrow norms of heads, norms after layers, layers without
# rope, interleaved and partial rope, parallel layers, experts.
CHOSEN = {"qwen3", "gemma2", "olmo2", "smollm3", "starcoder2", "glm", "cohere", "nemotron", "gpt_oss", "qwen2_moe"}


def use_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "uses_kernels", lambda tensor: True)


def load(folder: Path, quantization: str = "none", path: str | None = None) -> Decoder:
    files = resolve_model(str(folder))
    spec, dtype = read_model_spec(files), torch.float32
    coded = None if quantization == "none" else wanted_tensors(quantization, dtype)
    return Decoder(Loader(spec, dtype, torch.device("cpu"), open_weights(files, spec), path, coded))


def assert_near(ours: list[Tensor], theirs: list[Tensor], tolerance: float = 5e-5) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", sorted(CHOSEN))
def test_logits_by_kernels_equal_those_by_torch(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = (row for row in ROWS if row.name == name)
    random_model(row, 0).save_pretrained(tmp_path)
    decoder = load(tmp_path)
    expected = all_logits(decoder, PROMPTS)
    use_kernels(monkeypatch)
    assert_near(all_logits(load(tmp_path), PROMPTS), expected)


def test_invariant_linears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_model("llama3", tmp_path)
    expected = all_logits(load(tmp_path), PROMPTS)
    use_kernels(monkeypatch)
    with Launches() as launches:
        assert_near(all_logits(load(tmp_path, path="invariant"), PROMPTS), expected)
    assert launches.counts["octavo.linear"] == 4 * 2 + 1
    assert not any("mm" in name for name in launches.counts if not name.startswith("octavo"))


def mixed(name: str) -> str:
    """The kind of a matrix in a file of several: those of one layer's q, k and v differ."""
    if "k_proj" in name:
        return "F16"
    return "Q8_0" if "v_proj" in name or "down" in name else "Q4_0"


@pytest.mark.parametrize(
    "kind, is_tied",
    [("Q4_0", False), ("Q4_1", False), ("Q8_0", True), ("Q5_0", False), ("IQ4_NL", False), ("mixed", True)],
)
def test_codes_stay_codes(kind: str, is_tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Coded weights have the logits of the floats that they stand for, by the kernel and by its twin."""
    path = tmp_path / "tiny.gguf"
    make_tiny_gguf("llama2", path, mixed if kind == "mixed" else kind, tie_word_embeddings=is_tied)
    floats, coded = load(path), load(path, "auto")
    expected = all_logits(floats, PROMPTS)
    assert coded.weight_bytes < 0.5 * floats.weight_bytes
    assert_near(all_logits(coded, PROMPTS), expected)
    use_kernels(monkeypatch)
    assert_near(all_logits(coded, PROMPTS), expected)


def test_types_without_a_kernel_are_coded_anew_and_the_user_is_told(tmp_path: Path) -> None:
    make_tiny_gguf("llama2", tmp_path / "tiny.gguf", "Q5_1")
    decoder = load(tmp_path / "tiny.gguf", "auto")
    assert any("tensors in Q5_1 become int8" in note for note in decoder.notes)


class Collected:
    """A collective that keeps what a rank gives."""

    def __init__(self) -> None:
        self.given: list[Tensor] = []

    def all_gather(self, x: Tensor) -> Tensor:
        self.given.append(x)
        return torch.stack([x, torch.zeros_like(x)])


@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_ranks_have_the_bits_of_one_rank(quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs that are divided are the same, and inputs that are divided are added by the same tree."""
    sizes = {"hidden_size": 64, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
    files = resolve_model(str(make_tiny_model("llama3", tmp_path, **sizes)))
    spec, place = read_model_spec(files), (torch.float32, torch.device("cpu"))
    wanted, collectives = wanted_tensors(quantization, torch.float32), [Collected(), Collected()]
    parallels: list[Any] = [Parallel(), *(Parallel(ShardSpec.of(rank, 2), collectives[rank]) for rank in (0, 1))]
    use_kernels(monkeypatch)

    def product(a: np.ndarray, b: np.ndarray, dtype: Any = None) -> np.ndarray:
        columns = [(a * column[None, :]).sum(axis=1, dtype=np.float32) for column in np.ascontiguousarray(b.T)]
        return np.stack(columns, axis=1).astype(dtype or a.dtype)

    monkeypatch.setattr("triton.runtime.interpreter.np.matmul", product)
    loaders = [ShardLoader(spec, place, open_weights(files, spec), one, None, wanted) for one in parallels]
    x_TE, wide_TI = torch.randn(3, 64), torch.randn(3, 512)
    whole, *halves = (loader.linear("qkv", 0)(x_TE) for loader in loaders)
    parts = [half.split([4 * spec.head_dim, 2 * spec.head_dim, 2 * spec.head_dim], dim=1) for half in halves]
    assert torch.equal(whole, torch.cat([part for pair in zip(*parts, strict=True) for part in pair], dim=1))
    whole, *halves = (loader.linear("gate_up", 0)(x_TE) for loader in loaders)
    pairs = zip(*(half.chunk(2, dim=1) for half in halves), strict=True)
    assert torch.equal(whole, torch.cat([part for pair in pairs for part in pair], dim=1))
    down, *of_ranks = (loader.linear("down", 0) for loader in loaders)
    for of_rank, own in zip(of_ranks, wide_TI.chunk(2, dim=1), strict=True):
        of_rank(own)
    assert torch.equal(down(wide_TI), collectives[0].given[-1] + collectives[1].given[-1])
    assert (down.nbytes < 512 * 64 * 4 / 4) == (quantization == "int4")


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_experts_stay_codes(quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = (row for row in ROWS if row.name == "qwen3_moe")
    random_model(row, 0).save_pretrained(tmp_path)
    decoder = load(tmp_path, quantization)
    assert decoder.waits_for_device
    expected = all_logits(decoder, PROMPTS)
    use_kernels(monkeypatch)
    decoder = load(tmp_path, quantization)
    assert not decoder.waits_for_device
    assert_near(all_logits(decoder, PROMPTS), expected)


class Placed(ReferenceAttention):
    """Finds this step's keys and values in the pool, where the rotation wrote them."""

    def __init__(self, pool: KVPool, decoder: Decoder) -> None:
        super().__init__(pool, decoder.attention)
        self.pool, self.num_placed = pool, 0

    def place(self, layer: int) -> KVPlace | None:
        return KVPlace(self.pool.keys[layer], self.pool.values[layer], self.pool.shape.dtype, self._slots)

    def attend_placed(self, layer: int, q_THD: Tensor) -> Tensor:
        self.num_placed += 1
        keys, values = (planes[layer].flatten(0, 1)[self._slots] for planes in (self.pool.keys, self.pool.values))
        return self.attend(layer, q_THD, keys, values)

    @property
    def _slots(self) -> Tensor:
        assert self._batch is not None
        return self._batch.slot_mapping_T


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_the_rotation_writes_keys_and_values(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = load(make_tiny_model(family, tmp_path))
    use_kernels(monkeypatch)
    spec, ids = decoder.spec, torch.tensor(PROMPTS[0])
    shape = PoolShape(spec.num_layers, 4, 4, spec.num_kv_heads, spec.head_dim, spec.head_dim, torch.float32)
    where, count = torch.arange(len(ids)), np.array([len(ids)])
    batch = AttentionBatch(len(ids), 1, 0, where, where, torch.arange(4)[None], count, count)
    found = []
    for cls in (ReferenceAttention, Placed):
        pool = KVPool(shape, torch.device("cpu"))
        backend = Placed(pool, decoder) if cls is Placed else ReferenceAttention(pool, decoder.attention)
        backend.begin(batch)
        grouped = GroupedAttention({layer: (backend, layer) for layer in range(spec.num_layers)})
        found.append((decoder.forward(ids, where, grouped), *pool.keys, *pool.values))
        if isinstance(backend, Placed):
            assert backend.num_placed == spec.num_layers
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


class Launches(TorchDispatchMode):
    """Counts operations that are neither views nor allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = str(func).removesuffix(".default")
        if not func.is_view and name.split(".")[1] not in FREE:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


class Shapes(Weights):
    """Tensors of any shape asked for, without values."""

    def __init__(self) -> None:
        self._source = type("Nothing", (), {"notes": (), "shapes": {}})()

    def read(self, rows: Mapping[str, int], *inputs: int, **options: Any) -> Tensor:
        return torch.empty(sum(rows.values()), *inputs, **options)

    def check_all_read(self, ignored: frozenset[str] = frozenset()) -> None:
        pass


class PlacedShapes:
    """Attention of a device, of which only the launches are known."""

    reads_unwritten = False

    def __init__(self) -> None:
        planes = torch.empty(9, 16, 2, 16, dtype=torch.bfloat16, device="meta")
        self._place = KVPlace(planes, planes, torch.bfloat16, torch.empty(8, dtype=torch.int32, device="meta"))
        self.launches = 0

    def begin(self, batch: AttentionBatch) -> None:
        pass

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKV: Tensor) -> Tensor:
        raise AssertionError("the rotation writes keys and values")

    def place(self, layer: int) -> KVPlace:
        return self._place

    def attend_placed(self, layer: int, q_THD: Tensor) -> Tensor:
        self.launches += ATTENTION_LAUNCHES
        return q_THD


@pytest.mark.parametrize("path", [None, "invariant"])
@pytest.mark.parametrize("family, most", [("llama3", 10), ("qwen3", 10), ("gemma3", 12)])
def test_a_decode_step_launches_few_kernels(family: str, most: int, path: str | None, tmp_path: Path) -> None:
    """Of 32 layers, whatever the context: at most 11 a layer for Llama's layers, and 400 in all; gemma3 norms twice."""
    spec = read_model_spec(resolve_model(str(make_tiny_model(family, tmp_path, num_hidden_layers=32))))
    with torch.no_grad():
        decoder = Decoder(Loader(spec, torch.bfloat16, torch.device("meta"), Shapes(), path))
        where, backend = torch.empty(8, dtype=torch.int64, device="meta"), PlacedShapes()
        with Launches() as launches:
            decoder.logits(decoder.forward(where, where, backend))
    total = sum(launches.counts.values()) + backend.launches
    print(family, total, dict(launches.counts))
    assert spec.num_layers * (most - 1) < total <= spec.num_layers * most + 12
    assert total <= 400 or most > 11


def test_reduced_precision_sums_are_off_on_a_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    for name in names:
        setattr(settings, name, True)
    spec = read_model_spec(resolve_model(str(make_tiny_model("llama3", tmp_path))))
    Decoder(Loader(spec, torch.bfloat16, torch.device("meta"), Shapes()))
    assert not any(getattr(settings, name) for name in names)
