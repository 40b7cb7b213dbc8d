"""Which errors of a step end the engine, which make its steps smaller, and which are searched for a request."""

from __future__ import annotations

import pytest
import torch

from octavo.core.plan import StepPlan
from octavo.errors import EngineDeadError, ErrorKind
from octavo.executors.device import is_sticky, raise_typed, reason_of
from tests.engine.fakes import GatedExecutor, Harness, make_request

CUDA = torch.device("cuda")
# Messages as torch 2.13, Triton 3.7 and cuBLAS write them.
STICKY = (
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be"),
    torch.AcceleratorError("CUDA error: unspecified launch failure"),
    torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
    torch.AcceleratorError("CUDA error: device-side assert triggered"),
    torch.AcceleratorError("CUDA error: the launch timed out and was terminated"),
    RuntimeError("CUDA error: misaligned address"),
    RuntimeError("Triton Error [CUDA]: an illegal instruction was encountered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb)`"),
    RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:94, unhandled cuda error"),
)
MEMORY = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    torch.AcceleratorError("CUDA error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
)
OF_THE_STEP = (
    torch.AcceleratorError("CUDA error: invalid configuration argument"),
    torch.AcceleratorError("CUDA error: invalid argument"),
    RuntimeError("Triton Error [CUDA]: too many resources requested for launch"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmul`"),
    RuntimeError("shape '[2, 3]' is invalid for input of size 5"),
    RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
)


@pytest.mark.parametrize(("error", "reason"), [
    (RuntimeError("CUDA error: misaligned\nCUDA kernel errors might be"), "RuntimeError: CUDA error: misaligned"),
    (ValueError("at 12:8:\n    x = y +\n        ^\nname 'y' is not defined"), "ValueError: name 'y' is not defined"),
    (AssertionError(), "AssertionError: no message"),
])  # fmt: skip
def test_a_reason_is_one_line_of_an_error(error: Exception, reason: str) -> None:
    """The second is written as Triton's CompilationError, which begins with the place."""
    assert reason_of(error) == reason


@pytest.mark.parametrize("error", STICKY, ids=str)
def test_a_lost_context_ends_the_engine(error: RuntimeError) -> None:
    assert is_sticky(error)
    with pytest.raises(EngineDeadError, match="the device cuda cannot be used any more") as raised:
        raise_typed(error, CUDA)
    assert str(error).splitlines()[0] in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("error", MEMORY, ids=str)
def test_too_little_memory_makes_steps_smaller(error: RuntimeError) -> None:
    with pytest.raises(MemoryError):
        raise_typed(error, torch.device("cpu"))


@pytest.mark.parametrize("error", OF_THE_STEP, ids=str)
def test_any_other_error_is_the_steps(error: RuntimeError) -> None:
    assert not is_sticky(error)
    raise_typed(error, CUDA)


def test_the_loop_ends_at_once_and_searches_no_request() -> None:
    """Fault 15: a bisection would fail every request of the batch with the same error, one after another."""
    steps: list[list[str]] = []

    def fail(plan: StepPlan, owners: list[str]) -> Exception | None:
        steps.append(owners)
        try:
            raise_typed(STICKY[0], CUDA)
        except EngineDeadError as typed:
            return typed
        return None

    executor = GatedExecutor()
    executor.fail = fail
    with Harness(executor) as harness:
        harness.post(make_request("a", max_tokens=20))
        harness.post(make_request("b", max_tokens=20))
        ends = [harness.end(name) for name in ("a", "b")]
        assert harness.loop.join(60.0)
    assert [end.error.kind for end in ends if end.error is not None] == [ErrorKind.ENGINE_DEAD] * 2
    assert len(steps) == 1 and "illegal memory access" in (harness.loop.failure or "")
