"""The best id of each row without its logits, against the largest of its logits: equal bits on every path."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import resolve_model
from octavo.config import ExecutionConfig, ModelConfig
from octavo.core.plan import ROW_SAMPLE, StepResult
from octavo.core.request import SamplingParams
from octavo.executors.protocol import ExecutorSpec
from octavo.executors.torch_executor import TorchExecutor
from octavo.models.native_decoder import NativeDecoder
from octavo.nn.packed_weight import Codes, PackedWeight, WeightKind
from octavo.ops import cpu
from tests.executors.driver import Driver, make_prompt
from tests.ops.instruction_sets import isa
from tests.tiny_models import make_tiny_model

__all__ = ["isa"]
pytestmark = pytest.mark.skipif(not cpu.LIBRARY_PATH.exists(), reason="the kernels are not built")

SIZE, INPUTS = 36_009, 64  # of the vocabulary: more than a block of one row's columns, and no whole number of panels
SPEC = ExecutorSpec(max_sequences=40, max_batch_tokens=512, num_blocks=200, block_size=16, max_model_len=64)
GREEDY = SamplingParams(temperature=0.0)
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama2", tmp_path_factory.mktemp("best"), vocab_size=SIZE)


def open_executor(folder: Path, **model: str) -> TorchExecutor:
    files = resolve_model(str(folder))
    config = ModelConfig(model=str(folder), **model)  # type: ignore[arg-type]
    return TorchExecutor(files, read_model_spec(files), ExecutionConfig(decoder="native", threads=1), config)


@pytest.fixture(scope="module")
def decoder(folder: Path) -> NativeDecoder:
    executor = open_executor(folder)
    executor.open(SPEC)
    assert isinstance(executor._decoder, NativeDecoder)
    return executor._decoder


def put_head(decoder: NativeDecoder, parts: Sequence[PackedWeight], scale: float = 1.0, cap: float = 0.0) -> None:
    assert sum(part.outputs for part in parts) == SIZE
    decoder._model.head = decoder._multiplication(parts)
    decoder._model.logits_scale, decoder._model.logits_cap = scale, cap
    decoder._sizes.clear()  # of the workspace: it depends on the head
    decoder._kept.append(parts)


def random_part(kind: WeightKind, outputs: int, bias: bool = False) -> PackedWeight:
    random = np.random.default_rng(outputs)
    bias_F = random.standard_normal(outputs).astype(np.float32) if bias else None
    if kind == WeightKind.FLOAT32:
        return PackedWeight.pack(Codes(kind, 0, random.standard_normal((outputs, INPUTS)).astype(np.float32)), bias_F)
    if kind == WeightKind.BFLOAT16:
        values = random.standard_normal((outputs, INPUTS)).astype(np.float32)
        return PackedWeight.pack(Codes(kind, 0, (values.view(np.uint32) >> 16).astype(np.uint16)), bias_F)
    low, high, dtype = (-128, 128, np.int8) if kind == WeightKind.INT8 else (0, 16, np.uint8)
    codes = random.integers(low, high, (outputs, INPUTS)).astype(dtype)
    scales = random.uniform(0.001, 0.01, (outputs, INPUTS // 32)).astype(np.float16)
    minima = random.uniform(-0.1, 0, scales.shape).astype(np.float16) if kind == WeightKind.INT4 else None
    return PackedWeight.pack(Codes(kind, 32, codes, scales, minima), bias_F)


def assert_best(decoder: NativeDecoder, hidden_NE: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Compare with the logits, on 1, 2 and 3 threads; return the ids."""
    best_N, ids_N = decoder.logits(hidden_NE).max(dim=1)  # NaN wins a maximum, ties go to the lowest id
    for threads in (1, 2, 3):
        monkeypatch.setattr(cpu, "team_size", lambda threads=threads: threads)
        found_ids_N, found_N = decoder.best(hidden_NE)
        assert found_ids_N.tolist() == ids_N.tolist(), threads
        assert torch.equal(found_N.nan_to_num(nan=7e7), best_N.nan_to_num(nan=7e7)), threads
    return ids_N


HEADS = (
    [WeightKind.FLOAT32], [WeightKind.BFLOAT16], [WeightKind.INT8], [WeightKind.INT4],
    [WeightKind.INT8, WeightKind.FLOAT32, WeightKind.INT4],
)  # fmt: skip


@pytest.mark.parametrize("kinds", HEADS, ids=lambda kinds: "-".join(kind.name.lower() for kind in kinds))
def test_best_ids_equal_those_of_all_logits(
    kinds: list[WeightKind], isa: str, decoder: NativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [SIZE] if len(kinds) == 1 else [20_007, 16, SIZE - 20_023]
    parts = [random_part(kind, size, bias=size > 16) for kind, size in zip(kinds, sizes, strict=True)]
    generator = torch.Generator().manual_seed(3)
    for rows in (1, 4, 5, 33):
        hidden_NE = torch.randn(rows, INPUTS, generator=generator)
        hidden_NE[rows // 2, 5] = NAN if rows > 4 else 0.0
        for scale, cap in ((1.0, 0.0), (-0.25, 0.0), (3.0, 2.0)):  # a low cap makes ties
            put_head(decoder, parts, scale, cap)
            assert_best(decoder, hidden_NE, monkeypatch)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, 0),
        ({SIZE - 1: 1e-30}, SIZE - 1),
        ({35_000: 2.0, 20_000: 2.0, 3_333: 2.0, 35_001: 2.0}, 3_333),  # in blocks, threads and parts
        ({0: -0.0, 7: 0.0}, 0),
        ({17: INF, 30_000: INF}, 17),
        ({17: INF, 30_000: NAN, 30_001: NAN, 36_008: NAN}, 30_000),
        ({5: -1.0, **{index: -INF for index in range(SIZE) if index != 5}}, 5),
        ({index: -INF for index in range(SIZE)}, 0),
        ({36_000: -3e38, **{index: -INF for index in range(SIZE) if index != 36_000}}, 36_000),
    ],
    ids=range(9),
)
@pytest.mark.parametrize("cut", [SIZE, 20_000])
def test_ties_and_logits_that_are_not_finite(
    values: dict[int, float], expected: int, cut: int, isa: str, decoder: NativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states of zeros, so that the logits are the bias."""
    bias = np.zeros(SIZE, dtype=np.float32)
    bias[list(values)] = list(values.values())
    zeros = np.zeros((SIZE, INPUTS), dtype=np.float32)
    pieces = [piece for piece in (slice(0, cut), slice(cut, SIZE)) if piece.start < SIZE]
    parts = [PackedWeight.pack(Codes(WeightKind.FLOAT32, 0, zeros[piece]), bias[piece].copy()) for piece in pieces]
    put_head(decoder, parts)
    for rows in (1, 5):
        assert assert_best(decoder, torch.zeros(rows, INPUTS), monkeypatch).tolist() == [expected] * rows


class Recorder(Driver):
    """A driver whose decoder counts the steps that computed logits. A step's last drafts make its rows longer."""

    def __init__(self, folder: Path, keeps_logits: bool) -> None:
        executor = open_executor(folder, quantization="int8")
        super().__init__(executor, executor.open(SPEC))
        decoder: Any = executor._decoder
        compute, executor.keeps_logits, self.num_logits = decoder.logits, keeps_logits, 0

        def counted(hidden_NE: Tensor) -> Tensor:
            self.num_logits += 1
            found: Tensor = compute(hidden_NE)
            return found

        decoder.logits = counted

    def prompt_and_drafts(self, params: SamplingParams) -> list[StepResult]:
        """A step of three prompts, then one in which two of the rows have drafts, wrong and right."""
        for slot in range(3):
            self.add(slot, make_prompt(9 + slot, slot), params)
            self.row(slot, 0, 9 + slot)
        results = [self.run()]
        first = list(results[0].token_ids or ())
        for slot in range(3):
            self.choose(slot, 9 + slot, first[slot])
            self.row(slot, 9 + slot, (3, 1, 2)[slot])
        plan = self.plan()
        plan.num_drafts, plan.draft_token_ids = array("i", [2, 0, 1]), array("i", [7, 8, 9])
        results.append(self.executor.collect(self.executor.submit(plan)))
        return results


def facts(results: Sequence[StepResult]) -> list[tuple[object, ...]]:
    return [(result.token_ids, result.num_token_ids, result.errors, result.dead_ends) for result in results]


def test_steps_of_greedy_rows_compute_no_logits_and_give_equal_results(folder: Path) -> None:
    without, twin = Recorder(folder, False), Recorder(folder, True)
    assert facts(without.prompt_and_drafts(GREEDY)) == facts(twin.prompt_and_drafts(GREEDY))
    assert (without.num_logits, twin.num_logits) == (0, 2)


def test_a_row_that_is_not_finite_is_reported_without_logits(folder: Path) -> None:
    found = []
    for keeps_logits in (False, True):
        driver = Recorder(folder, keeps_logits)
        pools = driver.executor._cache.pools  # type: ignore[attr-defined]
        driver.add(0, make_prompt(20), GREEDY)
        driver.prefill(0, 19)
        pools[0].keys[0][driver.tables[0][0]].fill_(NAN)
        driver.add(1, make_prompt(5), GREEDY)
        driver.row(0, 19, 1)
        driver.row(1, 0, 5)
        found.append(driver.run())
    assert facts(found[:1]) == facts(found[1:]) and [row for row, _ in found[0].errors] == [0]


@pytest.mark.parametrize(
    "params",
    [{"temperature": 0.7, "seed": 1}, {"logprobs": 0}, {"repetition_penalty": 1.2}, {"logit_bias": ((5, 9.0),)},
     {"min_tokens": 3}, {"allowed_token_ids": (4, 5)}, {"bad_words_ids": ((4,),)}, {"no_repeat_ngram_size": 2}],
)  # fmt: skip
def test_rows_that_need_more_than_the_best_id_compute_logits(params: dict[str, Any], folder: Path) -> None:
    driver = Recorder(folder, False)
    num_greedy = 2
    for slot in range(num_greedy):
        driver.add(slot, make_prompt(9, slot), GREEDY)
        driver.row(slot, 0, 9)
    driver.add(num_greedy, make_prompt(9, 9), SamplingParams(**{"temperature": 0.0, **params}))
    driver.row(num_greedy, 0, 9)
    driver.run()
    assert driver.num_logits == 1
    for slot in range(num_greedy):
        driver.row(slot, 9, 1, ROW_SAMPLE)
    driver.run()
    assert driver.num_logits == 1, "the other rows need none"
