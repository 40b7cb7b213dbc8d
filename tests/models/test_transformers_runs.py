"""Runs of kernels in recorded programs: the bits of their operations called one by one, and what is in a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo.models.transformers_fusion import Operation, Register
from octavo.models.transformers_layers import KernelNorm
from octavo.models.transformers_probe import PagedStep, running
from octavo.models.transformers_program import Program
from octavo.models.transformers_runs import KernelRun, with_runs
from octavo.ops import cpu
from octavo.ops.attention import KVPool, LayerAttention, PoolShape
from octavo.ops.attention_kernel import KernelAttention, PoolLayers
from tests.models.zoo import ROWS
from tests.models.zoo_checks import PROMPTS, ServedModel, TinyModel
from tests.models.zoo_transformers import TRANSFORMERS

pytestmark = pytest.mark.skipif(not cpu.status().is_loaded, reason="the kernels are not built")

CUTS = (0.3, 0.6, 0.95)


def _served(name: str, folder: Path, quantization: str = "auto") -> ServedModel:
    row = next(row for row in (*ROWS, *TRANSFORMERS) if row.name == name)
    return ServedModel(TinyModel(row, folder, has_text=False), "transformers", quantization=quantization)


@pytest.mark.parametrize(
    ("name", "quantization", "threads"),
    [
        ("llama", "none", 1),
        ("llama", "int8", 2),
        ("llama with biases", "int4", 1),
        ("granite", "none", 2),  # scales
        ("bitnet", "none", 1),  # norms of attended heads
        ("cwm", "none", 1),  # two cache groups
        ("qwen3", "none", 1),  # runs between attention by torch's calls
        ("smollm3", "int8", 1),
        ("olmo3", "none", 1),
        ("gemma2", "int8", 1),
    ],
)
def test_runs_give_the_bits_of_their_operations(name: str, quantization: str, threads: int, tmp_path: Path) -> None:
    served = _served(name, tmp_path, quantization)
    program = served._decoder._program
    assert any(isinstance(step[0], KernelRun) for step in program.steps_with_runs)
    torch.set_num_threads(threads)
    try:
        found = served.logits(PROMPTS, CUTS)
        program.steps_with_runs = program.steps
        for ours, theirs in zip(found, served.logits(PROMPTS, CUTS), strict=True):
            torch.testing.assert_close(ours, theirs, atol=0, rtol=0)
    finally:
        torch.set_num_threads(1)
    served.close()


@pytest.mark.parametrize("name", ["llama", "qwen2 with windows", "granite", "internlm3", "hyperclovax", "seed_oss"])
def test_all_layers_are_one_run(name: str, tmp_path: Path) -> None:
    served = _served(name, tmp_path)
    *before, last = (step[0] for step in served._decoder._program.steps_with_runs)
    assert isinstance(last, KernelRun) and not any(isinstance(call, KernelRun) for call in before)
    served.close()


def _norm() -> KernelNorm:
    return KernelNorm(torch.linspace(0.5, 1.5, 16), 1e-6)


def _attending() -> PagedStep:
    """A step whose kernels attend in no layer."""
    layers = (LayerAttention(num_heads=1, num_kv_heads=1, head_dim=8, value_dim=8, scale=1.0),)
    backend = KernelAttention(KVPool(PoolShape(1, 1, 4, 1, 8, 8, torch.float32), torch.device("cpu")), layers)
    return PagedStep(backend, PoolLayers.begin(backend, 0, None))


def _calls(operations: list[Operation], num_registers: int) -> list[str]:
    """Compare a program with its runs on random rows; return the names of the calls with runs."""
    result = operations[-1].results[0]
    joined = with_runs(operations, dict.fromkeys(range(num_registers), (16,)), result)
    program = Program(operations, joined, num_registers, result)
    x, y = torch.randn(2, 1, 7, 16)
    running.step = None
    expected = program.run(x, y)
    running.step = _attending()
    try:
        torch.testing.assert_close(program.run(x, y), expected, atol=0, rtol=0)
    finally:
        running.step = None
    return [one.name or type(one.call).__name__ for one in joined]


def test_an_operation_that_needs_no_result_of_the_run_is_called_before_it() -> None:
    norm = _norm()
    operations = [
        Operation(norm, (Register(0),), {}, (2,)),
        Operation(torch.neg, (Register(1),), {}, (3,)),
        Operation(norm.add_norm, (Register(2), Register(3)), {}, (4, 5), True),
        Operation(torch.add, (Register(4), Register(4)), {}, (6,)),
    ]
    assert _calls(operations, 7) == ["neg", "KernelRun"]


def test_what_torch_reads_between_two_runs_is_a_result() -> None:
    norm = _norm()
    operations = [
        Operation(norm.add_norm, (Register(0), Register(1)), {}, (2, 3), True),
        Operation(torch.mul, (Register(2), 0.3), {}, (4,)),
        Operation(torch.Tensor.reshape, (Register(4), (1, -1, 16)), {}, (5,)),
        Operation(torch.neg, (Register(5),), {}, (6,)),
        Operation(norm, (Register(6),), {}, (7,)),
        Operation(norm.add_norm, (Register(7), Register(3)), {}, (8, 9), True),
        Operation(torch.add, (Register(9), Register(4)), {}, (10,)),
    ]
    assert _calls(operations, 11) == ["KernelRun", "neg", "KernelRun"]


def test_one_operation_alone_is_no_run() -> None:
    operations = [Operation(_norm(), (Register(0),), {}, (2,)), Operation(torch.neg, (Register(2),), {}, (3,))]
    assert _calls(operations, 4) == ["KernelNorm", "neg"]


def test_additions_and_factors_begin_no_run() -> None:
    operations = [
        Operation(torch.add, (Register(0), Register(1)), {}, (2,)),
        Operation(torch.mul, (Register(2), 2.0), {}, (3,)),
    ]
    assert _calls(operations, 4) == ["add", "mul"]


def test_nothing_is_joined_where_an_operation_writes() -> None:
    norm = _norm()
    operations = [Operation(norm, (Register(0),), {}, (2,)), Operation(norm, (Register(2),), {}, (3,))]
    written = [*operations, Operation(torch.Tensor.add_, (Register(3), 1), {}, (3,))]
    tails = dict.fromkeys(range(4), (16,))
    assert with_runs(written, tails, 3) is written and len(with_runs(operations, tails, 3)) == 1


def test_the_workspace_does_not_grow_with_the_number_of_operations() -> None:
    norm, sizes = _norm(), []
    running.step = _attending()
    try:
        for count in (10, 200):
            operations = [Operation(norm, (Register(at),), {}, (at + 1,)) for at in range(count)]
            (run,) = with_runs(operations, dict.fromkeys(range(300), (16,)), count)
            run.call(torch.randn(1, 1000, 16))
            sizes.append(run.call._workspace._memory.numel())
    finally:
        running.step = None
    assert sizes[0] == sizes[1] < 3 * 1000 * 16 * 4
