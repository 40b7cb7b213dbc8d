"""The C++ sampler against its torch twin: equal ids, whatever the parameters, the instruction set and the threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.core.request import SamplingParams
from octavo.ops import sample_kernel
from octavo.sampling.columns import SamplingRows, SequenceIds
from octavo.sampling.sampler import Sampler
from tests.ops.instruction_sets import isa
from tests.sampling.test_sampling import EOS

pytestmark = [
    pytest.mark.skipif(not sample_kernel.has_kernel(), reason="the kernels are not built"),
    pytest.mark.usefixtures("isa"),
]
__all__ = ["isa"]

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-30, 0.01, 0.3, 0.8, 1.0, 2.5, 30.0, 100.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 50, 64, 150, 300, 10**6]),
    top_p=st.sampled_from([1.0, 1.0, 0.999999, 0.95, 0.8, 0.3, 1e-6]),
    min_p=st.sampled_from([0.0, 0.0, 1e-9, 0.01, 0.2, 1.0]),
    seed=st.integers(0, 2**63),
)
SHAPES = ("wide", "narrow", "equal", "tied", "steep", "clustered", "banned", "huge")


def logits_of(shape: str, size: int, seed: int) -> Tensor:
    noise = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    if shape == "banned":
        return torch.where(noise > 2.0, noise, float("-inf")) if size > 200 else noise
    if shape == "clustered":  # the likely ids side by side
        return torch.where(torch.arange(size) < size // 5, noise + 20, noise)
    return {
        "wide": noise * 4,
        "narrow": noise * 1e-4 + 3,
        "equal": torch.full((size,), -1.5),
        "tied": (noise * 2).round(),
        "steep": noise * 300,
        "huge": noise * 1e37,
    }[shape]


def sampler_of(params: list[SamplingParams], vocab_size: int) -> Sampler:
    sampler = Sampler(len(params), torch.zeros((len(params), 9), dtype=torch.int32), vocab_size)
    for slot, one in enumerate(params):
        sampler.put(slot, one, SequenceIds(np.zeros(5, np.int64), eos=EOS), choice=slot)
    return sampler


def both(params: list[SamplingParams], logits: Tensor) -> tuple[Tensor, Tensor]:
    """Ids of kernel and twin, whose best logits are compared here."""
    rows = SamplingRows(np.arange(len(params)), np.arange(len(params)) + 6)
    sampler = sampler_of(params, logits.shape[1])
    by_kernel = sampler.sample(logits.clone(), rows)
    sampler._kernel = None
    by_twin = sampler.sample(logits.clone(), rows)
    assert torch.equal(by_kernel.best_R.nan_to_num(nan=7e7), by_twin.best_R.nan_to_num(nan=7e7))
    return by_kernel.ids_R, by_twin.ids_R


@settings(max_examples=60, deadline=None)
@given(
    params=st.lists(PARAMS, min_size=1, max_size=6),
    size=st.sampled_from([1, 2, 15, 16, 17, 255, 256, 257, 1000, 5003]),
    shape=st.sampled_from(SHAPES),
    seed=st.integers(0, 1000),
)
def test_P01_kernel_and_twin_give_equal_ids(params: list[SamplingParams], size: int, shape: str, seed: int) -> None:
    logits = torch.stack([logits_of(shape, size, seed + row) for row in range(len(params))])
    by_kernel, by_twin = both(params, logits)
    assert by_kernel.tolist() == by_twin.tolist()


@pytest.mark.parametrize("shape", SHAPES)
def test_P01_kernel_and_twin_agree_over_a_whole_vocabulary(shape: str) -> None:
    options = [
        {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.95}, {"temperature": 0.8, "top_k": 50},
        {"temperature": 1.0, "top_p": 0.6, "min_p": 0.001}, {"temperature": 1.3, "top_k": 30_000, "top_p": 0.99},
        {"temperature": 1.0, "min_p": 0.05}, {"temperature": 0.0},
    ]  # fmt: skip
    params = [SamplingParams(seed=seed, **one) for seed in range(3) for one in options]
    logits = torch.stack([logits_of(shape, 49_152, seed) for seed in range(len(params))])
    by_kernel, by_twin = both(params, logits)
    assert by_kernel.tolist() == by_twin.tolist()


@pytest.mark.parametrize("num_rows", [1, 3, 8])
def test_P02_threads_and_company_change_nothing(num_rows: int) -> None:
    params = [SamplingParams(temperature=0.9, top_p=0.9 if row % 2 else 1.0, seed=row) for row in range(num_rows)]
    logits = torch.stack([logits_of("wide", 70_000, row) for row in range(num_rows)])
    rows = SamplingRows(np.arange(num_rows), np.full(num_rows, 9))
    sampler = sampler_of(params, 70_000)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(sampler.sample(logits, rows).ids_R.tolist())
    finally:
        torch.set_num_threads(before)
    alone = [
        sampler.sample(logits[row : row + 1], SamplingRows(rows.slots[row : row + 1], rows.positions[row : row + 1]))
        for row in range(num_rows)
    ]
    assert found[0] == found[1] == found[2] == [one.ids_R.item() for one in alone]


def test_P05_rows_that_are_not_finite_say_so_and_give_an_id() -> None:
    logits = torch.randn(6, 600, generator=torch.Generator().manual_seed(0))
    logits[0, 17], logits[0, 400] = float("nan"), float("nan")
    logits[1, 599], logits[1, 3] = float("nan"), float("inf")
    logits[2, 300] = float("inf")
    logits[3] = float("-inf")
    logits[4] = float("-inf")
    logits[4, 599] = -1e30
    for params in ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 5}):
        by_kernel, by_twin = both([SamplingParams(seed=1, **params)] * 6, logits)
        assert by_kernel.tolist() == by_twin.tolist() and by_kernel[:5].tolist() == [17, 599, 300, 0, 599]


def test_rows_of_a_wider_tensor_and_slots_in_any_order_are_read_in_place() -> None:
    params = [SamplingParams(temperature=0.9, seed=slot) for slot in range(4)]
    sampler, wide = sampler_of(params, 1000), torch.randn(3, 1500, generator=torch.Generator().manual_seed(1))
    rows = SamplingRows(np.array([3, 0, 3, 1])[::2][:2], np.array([6, 7]))
    got = sampler.sample(wide[:2, 100:1100], rows).ids_R.tolist()
    assert got == sampler.sample(wide[:2, 100:1100].contiguous(), rows).ids_R.tolist()
    assert sampler.sample(torch.zeros(0, 1000), SamplingRows(rows.slots[:0], rows.positions[:0])).ids_R.tolist() == []
