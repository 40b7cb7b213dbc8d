"""The sampler of CUDA devices, interpreted: ids equal to the C++ kernel's, probabilities to those of the torch twin."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.core.request import SamplingParams
from octavo.ops import sample_kernel
from octavo.ops.sample_kernel import SampleColumns, SampleKernel
from octavo.ops.triton import available
from octavo.sampling.columns import Ints
from octavo.sampling.selection import SelectionColumns, best_by_key, distribution

pytestmark = [
    pytest.mark.skipif(not available.is_available(), reason="triton is not installed"),
    pytest.mark.usefixtures("patched_once"),
    pytest.mark.skipif(not sample_kernel.has_kernel(), reason="the C++ kernels are not built"),
]

TEMPERATURES = 0.0, 1e-30, 0.01, 0.3, 0.8, 1.0, 2.5, 30.0, 100.0
TOP_K = 0, 0, 1, 2, 5, 50, 64, 150, 300, 10**6
TOP_P = 1.0, 1.0, 0.999999, 0.95, 0.8, 0.3, 1e-6
MIN_P = 0.0, 0.0, 1e-9, 0.01, 0.2, 1.0
SHAPES = (
    "wide", "narrow", "equal", "tied", "steep", "clustered", "outlier", "zeros", "masked", "banned",
    "huge", "nan", "inf",
)  # fmt: skip


@pytest.fixture(autouse=True)
def overflow() -> Iterator[None]:
    with np.errstate(all="ignore"):  # the interpreter's float32 overflows to infinity, as a device's does
        yield


def row_of(shape: str, size: int, rng: np.random.Generator) -> Tensor:
    noise = torch.from_numpy(rng.standard_normal(size, dtype=np.float32))
    if shape in ("nan", "inf"):
        noise[rng.integers(size, size=2)] = float(shape)
        return noise
    if shape == "masked":  # most ids are banned, and at least one is not
        noise[torch.from_numpy(rng.random(size) < 0.9)] = float("-inf")
        noise[rng.integers(size)] = 1.0
        return noise
    index = torch.arange(size)
    return {
        "wide": noise * 4,
        "narrow": noise * 1e-4 + 3,
        "equal": torch.full((size,), -1.5),
        "tied": (noise * 2).round(),
        "steep": noise * 300,
        "clustered": torch.where(index < size // 5, noise + 20, noise),
        "outlier": torch.where(index == 3, -17.0, noise * 1e-3),  # nearly all in one bin
        "zeros": torch.where(noise > 0, 0.0, -0.0),
        "banned": torch.full((size,), float("-inf")),
        "huge": noise * 1e37,
    }[shape]


def slots_of(num_rows: int, rng: np.random.Generator) -> SelectionColumns:
    columns = SelectionColumns.of_size(num_rows)
    for slot in range(num_rows):
        params = SamplingParams(
            temperature=float(rng.choice(TEMPERATURES)), top_k=int(rng.choice(TOP_K)), top_p=float(rng.choice(TOP_P)),
            min_p=float(rng.choice(MIN_P)), seed=int(rng.integers(2**63)),
        )  # fmt: skip
        columns.put(slot, params, int(rng.integers(5)))
    return columns


def by_kernel(columns: SelectionColumns, logits_RV: Tensor, positions: Ints) -> tuple[Tensor, Tensor]:
    by_slot = columns.inverse_temperature, columns.floor, columns.top_p, columns.top_k, columns.seed, columns.choice
    ids, best = SampleKernel(SampleColumns(*by_slot)).sample(logits_RV, np.arange(len(positions)), positions)
    return torch.from_numpy(ids).int(), torch.from_numpy(best)


def packed(columns: SelectionColumns, positions: Ints) -> Tensor:
    return torch.from_numpy(columns.draws(np.arange(len(positions)), positions).pack())


def compare(num_rows: int, size: int, seed: int) -> None:
    """Sample random rows of all shapes by both kernels."""
    rng = np.random.default_rng(seed)
    columns, positions = slots_of(num_rows, rng), rng.integers(1 << 20, size=num_rows)
    shapes = [SHAPES[row * len(SHAPES) // num_rows] for row in range(num_rows)]  # alike rows are fast in one program
    logits_RV = torch.stack([row_of(shape, size, rng) for shape in shapes])
    ids_R, best_R = torch.ops.octavo.sample(logits_RV, packed(columns, positions))
    wanted_R, wanted_best_R = by_kernel(columns, logits_RV, positions)
    wrong = np.flatnonzero((ids_R != wanted_R).numpy())
    assert not len(wrong), [(row, shapes[row], columns.draws(wrong, positions[wrong])) for row in wrong]
    assert torch.equal(best_R.nan_to_num(nan=7e7), wanted_best_R.nan_to_num(nan=7e7))


@pytest.mark.parametrize(
    ("num_rows", "size"), [(1344, 250), (384, 300), (192, 1000), (39, 2049), (26, 5003), (15, 20_481)]
)
def test_P01_2000_random_rows_get_the_ids_of_the_C_kernel(num_rows: int, size: int) -> None:
    compare(num_rows, size, seed=size)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(50))
def test_P01_100000_random_rows_get_the_ids_of_the_C_kernel(part: int) -> None:
    for size, num_rows in ((257, 1536), (999, 384), (4099, 64), (49_152, 16)):
        compare(num_rows, size, seed=part * 10**6 + size)


def test_a_column_of_zeros_is_greedy() -> None:
    logits_RV = torch.randn(3, 300, generator=torch.Generator().manual_seed(0))
    ids_R, best_R = torch.ops.octavo.sample(logits_RV, torch.zeros(7, 3, dtype=torch.int32))
    assert ids_R.tolist() == logits_RV.argmax(1).tolist() and torch.equal(best_R, logits_RV.amax(1))
    none_R, _ = torch.ops.octavo.sample(logits_RV[:0], torch.zeros(7, 0, dtype=torch.int32))
    assert none_R.shape == (0,)


@pytest.mark.parametrize("size", [1, 2, 257, 2500])
def test_P02_company_and_strides_change_no_bit(size: int) -> None:
    rng = np.random.default_rng(size)
    columns, positions = slots_of(40, rng), rng.integers(1000, size=40)
    wide = torch.stack([row_of(SHAPES[row % len(SHAPES)], size + 13, rng) for row in range(40)])
    rows_RV = wide[:, 6 : size + 6]
    together = torch.ops.octavo.sample(rows_RV, packed(columns, positions))
    logprobs_RV = torch.ops.octavo.log_softmax(rows_RV)
    for row in (0, 17, 39):
        alone_RV = rows_RV[row : row + 1].clone()
        ids_R, best_R = torch.ops.octavo.sample(alone_RV, packed(columns, positions)[:, row : row + 1].contiguous())
        assert ids_R == together[0][row]
        assert torch.equal(best_R.view(torch.int32), together[1][row : row + 1].view(torch.int32))
        same = torch.ops.octavo.log_softmax(alone_RV).view(torch.int32) == logprobs_RV[row].view(torch.int32)
        assert same.all()


@pytest.mark.parametrize("size", [257, 2100])
def test_P01_probabilities_equal_those_of_the_torch_twin(size: int) -> None:
    rng = np.random.default_rng(size)
    columns, positions = slots_of(64, rng), rng.integers(1000, size=64)
    columns.inverse_temperature[:] = np.maximum(columns.inverse_temperature, np.float32(0.01))  # greedy: no draws
    logits_RV = torch.stack([row_of(SHAPES[row % len(SHAPES)], size, rng) for row in range(64)])
    wanted_RV = distribution(logits_RV, columns.draws(np.arange(64), positions))
    got_RV = torch.ops.octavo.kept_probs(logits_RV, packed(columns, positions))
    assert torch.equal(got_RV.nan_to_num(nan=-1.0), wanted_RV.nan_to_num(nan=-1.0))


def test_log_probabilities_are_exact_to_a_float() -> None:
    rng = np.random.default_rng(5)
    logits_RV = torch.stack([row_of(shape, 2500, rng) for shape in SHAPES])
    got_RV = torch.ops.octavo.log_softmax(logits_RV)
    wanted_RV = torch.log_softmax(logits_RV.double(), dim=1)
    is_finite_R = logits_RV.amax(1).isfinite()
    assert got_RV[~is_finite_R].isnan().all() and is_finite_R.sum() == len(SHAPES) - 3
    got_RV, wanted_RV = got_RV[is_finite_R], wanted_RV[is_finite_R].float()
    assert torch.equal(got_RV.isinf(), wanted_RV.isinf())
    assert torch.allclose(got_RV, wanted_RV, rtol=3e-7, atol=3e-7)


def test_the_best_by_key_are_those_of_a_stable_sort() -> None:
    rng = np.random.default_rng(7)
    scores_RV = torch.stack([row_of(shape, 700, rng) for shape in SHAPES])
    scores_RV[0, 5] = -torch.tensor(float("nan"))
    values_RV, ids_RV = torch.sort(scores_RV, dim=1, descending=True, stable=True)
    for count in (1, 20, 700):
        got_RK, got_ids_RK = best_by_key(scores_RV, count)
        assert torch.equal(got_ids_RK, ids_RV[:, :count])
        assert torch.equal(got_RK.nan_to_num(nan=7e7), values_RV[:, :count].nan_to_num(nan=7e7))
