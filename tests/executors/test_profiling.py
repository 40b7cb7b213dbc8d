"""The largest step, what it takes on a device, and the wait for the memory of an engine that ended."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from octavo.core.plan import ROW_SAMPLE, StepPlan
from octavo.executors.profiling import CONTEXT, SETTLE_S, largest_step, measure_step, wait_for_memory
from octavo.executors.protocol import ExecutorSpec
from tests.executors.driver import SPEC
from tests.executors.emulated_device import EmulatedDevice, OnEmulated
from tests.executors.test_torch_executor import make
from tests.tiny_models import make_tiny_model

MIB = 2**20


@dataclass
class FakeDevice:
    """Tensors, and what an allocator holds for them beside; see executors.device.Device."""

    torch_device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    is_host: bool = False
    total: int = 1000 * MIB
    others: int = 0
    allocated: int = 0
    held: int = 0
    peak: int = 0
    num_waits: int = 0

    def memory(self) -> tuple[int, int]:
        return self.total, self.total - self.others - max(self.held, self.allocated)

    def take(self, size: int, held: int = 0) -> None:
        self.allocated += size
        self.peak = max(self.peak, self.allocated)
        self.held = max(self.held, held, self.allocated)

    def reset_peak(self) -> None:
        self.peak = self.allocated

    def peak_bytes(self) -> int:
        return self.peak

    def wait(self) -> None:
        self.num_waits += 1


@pytest.mark.parametrize("length", [8, 33, 128, 131_072])
@pytest.mark.parametrize(("sequences", "tokens"), [(1, 1), (1, 512), (4, 64), (40, 256), (256, 8192), (32, 8)])
def test_the_largest_step_is_as_large_as_a_plan_may_be(sequences: int, tokens: int, length: int) -> None:
    plan = largest_step(ExecutorSpec(sequences, tokens), length)
    assert plan.num_query_tokens == sum(plan.counts) == min(tokens, sequences * (length - 1))
    assert 1 <= plan.num_rows <= sequences and set(plan.flags) == {ROW_SAMPLE}
    ends = [start + count for start, count in zip(plan.starts, plan.counts, strict=True)]
    assert max(ends) < length and sorted(plan.slots) == list(range(plan.num_rows))
    assert [len(new.token_ids or ()) for new in plan.new_sequences] == ends
    is_decode = [count == 1 for count in plan.counts]
    assert is_decode == sorted(is_decode, reverse=True), "rows of one token are first"
    if (sequences, tokens, length) == (256, 8192, 131_072):
        assert plan.num_rows == 256 and plan.starts[0] == CONTEXT and plan.counts[-1] == 8192 - 255


def test_a_step_takes_its_peak_or_what_the_allocator_took_for_it() -> None:
    device = FakeDevice()
    device.take(200 * MIB)

    def step(peak: int, held: int) -> None:
        device.take(peak, held)
        device.allocated -= peak

    def run(peak: int, held: int) -> int:
        num_bytes = measure_step(device, lambda: step(peak, held))
        device.held = 0
        return num_bytes

    assert run(50 * MIB, 0) == 50 * MIB
    assert run(50 * MIB, 400 * MIB) == 50 * MIB  # this device keeps what it holds: nothing came back
    assert device.num_waits == 4


def test_an_ended_process_memory_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 16: after a kill, a driver may free the memory late."""
    device, clock = FakeDevice(others=900 * MIB), [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds
        if clock[0] > 3.0:
            device.others = 100 * MIB

    assert wait_for_memory(device, 500 * MIB, lambda: clock[0], sleep) == 900 * MIB and 3.0 < clock[0] < 3.5
    device.others, clock[0] = 900 * MIB, -100.0
    assert wait_for_memory(device, 500 * MIB, lambda: clock[0], sleep) == 100 * MIB
    assert SETTLE_S <= clock[0] + 100.0 < SETTLE_S + 1.0, "then the engine says what is missing"
    before = clock[0]
    assert wait_for_memory(device, 0, lambda: clock[0], sleep) == 100 * MIB and clock[0] == before


@pytest.mark.parametrize("has_windows", [False, True])
def test_an_engine_on_a_device_measures_its_step_first(
    tmp_path: Path, has_windows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 11: the pool has what is left of the device after weights and a real step."""
    monkeypatch.setattr(EmulatedDevice, "memory", lambda self: (64 * MIB, 60 * MIB))
    folder = make_tiny_model("gemma3" if has_windows else "llama3", tmp_path / "model")
    executor = OnEmulated(lambda: make(folder, "batched", "cpu"))
    steps: list[int] = []
    submit = executor.real.submit

    def watched(plan: StepPlan) -> object:
        steps.append(plan.num_query_tokens)
        return submit(plan)

    executor.real.submit = watched
    spec = replace(SPEC, num_blocks=None, memory_fraction=0.5, max_sequences=3, max_batch_tokens=16)
    capacity = executor.open(spec)
    assert steps == [16] and len(capacity.groups) == 1 + has_windows
    total, free = executor.real._device.memory()
    pool = sum(count * group.block_bytes for count, group in zip(capacity.num_blocks, capacity.groups, strict=True))
    assert total * 0.5 - MIB < pool <= total * 0.5 and pool < free
    executor.close()
    steps.clear()
    executor.open(replace(spec, memory_fraction=None, num_blocks=20))
    assert steps == [], "a given size is taken as it is"
    executor.close()
