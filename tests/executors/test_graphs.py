"""Captured decode steps: a replayed tape gives what eager steps give, at every size, padded or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from octavo.core.plan import ROW_CARRY, ROW_SAMPLE, StepPlan, StepResult
from octavo.core.request import SamplingParams
from octavo.executors import graphs, torch_executor
from octavo.executors.device import CudaDevice, CudaGraph
from octavo.executors.graphs import capture_sizes
from octavo.executors.torch_executor import TorchExecutor
from octavo.ops import attention_triton
from octavo.ops.attention_triton import AttentionWork, WorkPlanner
from octavo.sampling.sampler import Sampler
from tests.executors.captured_twins import TwinAttention, sample_best
from tests.executors.conformance import SPEC, Dense, Driver, make_prompt
from tests.executors.emulated_device import Happened, OnEmulated
from tests.executors.test_torch_executor import make
from tests.models.zoo import MIXTURES
from tests.models.zoo_checks import random_model
from tests.quick import one_in

PLAIN = SamplingParams(temperature=0.0)


def test_sizes_reach_the_rows_there_may_be() -> None:
    assert capture_sizes(0) == [] and capture_sizes(1) == [1]
    assert capture_sizes(5) == [8, 4, 2, 1]
    assert capture_sizes(64)[:2] == [64, 56]
    assert capture_sizes(65)[0] == 80
    assert len(capture_sizes(256)) == len(capture_sizes(1000)) == 23


@contextmanager
def opened(folder: Path, rows: int, captured: int, has_kernels: bool = False) -> Iterator[Driver]:
    """An executor with room for `rows`, whose steps of up to `captured` rows are captured."""
    backends = patch.dict(torch_executor.ATTENTION, {} if has_kernels else {"auto": TwinAttention})
    sampler = patch.object(Sampler, "sample_packed", lambda self, *given: sample_best(*given))
    size = patch.object(TorchExecutor, "max_captured_rows", captured)
    with backends, size, patch.object(Sampler, "num_proposed", 0) if has_kernels else sampler:
        executor = OnEmulated(lambda: make(folder, "auto"), has_kernels)
        yield Driver(executor, executor.open(replace(SPEC, max_sequences=rows)))
        executor.close()


def steps(driver: Driver, rows: int, count: int, params: SamplingParams = PLAIN) -> list[StepResult]:
    """Decode `count` steps of `rows` prompts of several lengths, two plans in flight."""
    lengths = [3 + 5 * slot for slot in range(rows)]
    for slot, length in enumerate(lengths):
        driver.add(slot, make_prompt(length, seed=slot), replace(params, seed=slot))
        driver.row(slot, 0, length)
    results, tickets = [], [driver.executor.submit(driver.plan())]
    for step in range(count):
        for slot, length in enumerate(lengths):
            driver.row(slot, length + step, 1, ROW_SAMPLE | ROW_CARRY)
        plan: StepPlan = driver.plan()
        plan.is_fast_path = True
        tickets.append(driver.executor.submit(plan))
        results.append(driver.executor.collect(tickets.pop(0)))
    return [*results, driver.executor.collect(tickets.pop())]


@pytest.mark.parametrize("rows", one_in(3, [1, 2, 3, 7]))
def test_fifty_replayed_steps_equal_eager_ones(tiny_folder: Path, dense: Dense, rows: int) -> None:
    with opened(tiny_folder, 8, 8) as driver:
        assert driver.executor.real._graphs.sizes == [1, 2, 4, 8]  # type: ignore[attr-defined]
        emulator = driver.executor.emulator  # type: ignore[attr-defined]
        emulator.clear()
        replayed = steps(driver, rows, 50)
        submit, collect = emulator.phases["submit"], emulator.phases.get("collect", Happened())
        assert submit.launches["graph"] == 50 and not submit.waits
        assert submit.uploads == submit.downloads == 51 and collect == Happened()
    with opened(tiny_folder, 8, 0) as driver:
        assert driver.executor.real._graphs is None  # type: ignore[attr-defined]
        eager = steps(driver, rows, 50)
    assert [result.token_ids for result in replayed] == [result.token_ids for result in eager]
    for slot in range(rows):
        ids = [result.token_ids[slot] for result in replayed if result.token_ids is not None]
        prompt = make_prompt(3 + 5 * slot, seed=slot)
        assert len(ids) == 51 and ids == dense.best_ids([*prompt, *ids[:-1]])[len(prompt) - 1 :]


@pytest.mark.usefixtures("patched_once")
@pytest.mark.parametrize("params", [PLAIN, SamplingParams(temperature=1.2, top_p=0.9, top_k=40)])
def test_replayed_kernels_equal_eager_ones_and_the_cpu(tiny_folder: Path, params: SamplingParams) -> None:
    """All of Triton's kernels on a tape of 2 rows; the draws of the CPU's sampler."""
    found = []
    for captured in (2, 0):
        with opened(tiny_folder, 2, captured, has_kernels=True) as driver:
            found.append([result.token_ids for result in steps(driver, 2, 5, params)])
            launches = driver.executor.emulator.phases["submit"].launches  # type: ignore[attr-defined]
            assert launches["graph"] == 5 * bool(captured)
    executor = make(tiny_folder, "auto")
    found.append([result.token_ids for result in steps(Driver(executor, executor.open(SPEC)), 2, 5, params)])
    assert found[0] == found[1] == found[2]


@pytest.mark.usefixtures("patched_once")
def test_K08_captured_rows_of_one_prefix_attend_it_together(tiny_folder: Path, dense: Dense) -> None:
    """Two rows whose tables begin with the same blocks, beside one of its own; the lists are as long as without."""
    shared: list[int] = []
    list_work = WorkPlanner.work

    def watched(self: WorkPlanner, *given: Any, **more: Any) -> AttentionWork:
        work = list_work(self, *given, **more)
        shared.append(int((work.items_I4[: work.num_work_3[0], 3] == -2).sum()))
        return work

    prompts = [make_prompt(45, seed=1), make_prompt(33, seed=1) + make_prompt(9, seed=2), make_prompt(40, seed=3)]
    prompts[1][:33] = prompts[0][:33]
    found = []
    one_size, splits = patch.object(graphs, "SIZES", (4,)), patch.object(attention_triton, "SPLIT", 16)
    for captured in (4, 0):
        with (
            one_size,
            splits,
            patch.object(WorkPlanner, "work", watched),
            opened(tiny_folder, 4, captured, True) as driver,
        ):
            driver.add(0, prompts[0], PLAIN)
            tokens = [[*(driver.prefill(0, 45).token_ids or ())]]
            driver.add(1, prompts[1], PLAIN, blocks=driver.tables[0][:8])  # 32 positions, which are two splits
            tokens.append([*(driver.prefill(1, 42, start=32).token_ids or ())])
            driver.add(2, prompts[2], PLAIN)
            tokens.append([*(driver.prefill(2, 40).token_ids or ())])
            shared.clear()
            for step in range(2):
                for slot, prompt in enumerate(prompts):
                    driver.row(slot, len(prompt) + step, 1, ROW_SAMPLE | ROW_CARRY)
                plan = driver.plan()
                plan.is_fast_path = True
                result = driver.executor.collect(driver.executor.submit(plan))
                for own, token in zip(tokens, result.token_ids or (), strict=True):
                    own.append(token)
            assert shared == [2] * 2
            launches = driver.executor.emulator.phases["submit"].launches  # type: ignore[attr-defined]
            assert launches["graph"] == (2 if captured else 0)
            found.append(tokens)
    assert found[0] == found[1] == [dense.greedy(prompt, 3) for prompt in prompts]


@pytest.mark.usefixtures("patched_once")
def test_replayed_experts_equal_eager_ones_and_the_cpu(tmp_path: Path) -> None:
    """A mixture with a shared expert and its gate: no step waits, and its decode steps are captured."""
    (row,) = (row for row in MIXTURES if row.name == "qwen2_moe")
    random_model(row, 0).save_pretrained(tmp_path)
    found = []
    for captured in (2, 0):
        with opened(tmp_path, 2, captured, has_kernels=True) as driver:
            emulator = driver.executor.emulator  # type: ignore[attr-defined]
            emulator.clear()
            found.append([result.token_ids for result in steps(driver, 2, 3)])
            submit = emulator.phases["submit"]
            assert submit.launches["graph"] == 3 * bool(captured) and not submit.waits
            assert submit.launches["octavo.choose_experts.default"] >= (not captured)
    executor = make(tmp_path, "auto")
    found.append([result.token_ids for result in steps(Driver(executor, executor.open(SPEC)), 2, 3)])
    assert found[0] == found[1] == found[2]


def test_graphs_share_a_pool_and_later_ones_have_another() -> None:
    """torch fails if a graph is captured into a pool whose graphs are all gone, as after the measured step."""
    device, handles = CudaDevice(torch.device("cuda")), iter(range(9))
    device._cuda = SimpleNamespace(graph_pool_handle=lambda: next(handles), CUDAGraph=object, Stream=object)
    first, second = device.graph(), device.graph()
    assert isinstance(first, CudaGraph) and isinstance(second, CudaGraph)
    assert (first._pool.handle, second._pool.handle) == (0, 0)
    del first
    assert device.graph()._pool.handle == 0  # type: ignore[attr-defined]
    del second
    assert device.graph()._pool.handle == 1  # type: ignore[attr-defined]


def test_captures_prepare_and_record_on_one_stream() -> None:
    """cuBLAS keeps a work space for each stream that it was called on, so 23 streams would take 0.7 GB of an H100."""
    happened: list[Any] = []

    class Stream(SimpleNamespace):
        def wait_stream(self, other: Any) -> None:
            happened.append((self.name, "waits for", other.name))

    @contextmanager
    def on(name: str, stream: Any, **how: Any) -> Iterator[None]:
        happened.append((name, stream.name))
        yield

    streams = (Stream(name=f"stream {number}") for number in range(9))
    device, current = CudaDevice(torch.device("cuda")), Stream(name="current")
    device._cuda = SimpleNamespace(
        graph_pool_handle=object, CUDAGraph=object, Stream=lambda: next(streams), current_stream=lambda: current,
        stream=lambda stream: on("prepare", stream), graph=lambda graph, **how: on("record", **how),
    )  # fmt: skip
    for _ in range(2):
        device.graph().capture(lambda: happened.append("run"))
    once = [("stream 0", "waits for", "current"), ("prepare", "stream 0"), "run",
            ("current", "waits for", "stream 0"), ("record", "stream 0"), "run"]  # fmt: skip
    assert happened == once * 2


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_closed_executor_gives_its_memory_back(tiny_folder: Path, is_lost: bool) -> None:
    with opened(tiny_folder, 2, 0) as driver, patch.object(torch_executor, "free_memory") as free:
        free.side_effect = torch.AcceleratorError("CUDA error: unspecified launch failure") if is_lost else None
        driver.executor.close()
        assert free.call_count == 1
        driver.executor.close()
        assert free.call_count == 1


def test_nothing_is_captured_if_the_user_wants_that(tiny_folder: Path) -> None:
    executor = OnEmulated(lambda: make(tiny_folder, "auto"), has_kernels=True)
    executor.real._execution = replace(executor.real._execution, enforce_eager=True)
    executor.open(SPEC)
    assert executor.real._graphs is None and not executor.emulator.phases["open"].launches["graph"]
    executor.close()


def test_other_steps_run_eagerly_between_replayed_ones(tiny_folder: Path, dense: Dense) -> None:
    """A step with log-probabilities, and edits too many for a captured step's room."""
    with opened(tiny_folder, 4, 4) as driver, patch.object(graphs, "EDIT_WORDS", 2):
        prompt, tokens = make_prompt(9), list[int]()
        emulator = driver.executor.emulator  # type: ignore[attr-defined]
        driver.add(0, prompt, PLAIN)
        tokens += driver.prefill(0, 9).token_ids or ()
        for step in range(12):
            if step == 4:
                driver.add(1, make_prompt(4, seed=1))  # its parameters ask for log-probabilities
                driver.row(1, 0, 4, 0)
            if step == 8:
                driver.free_slot(1)
            driver.row(0, 9 + step, 1, ROW_SAMPLE | ROW_CARRY)
            if 4 < step < 8:
                driver.row(1, step - 1, 1, ROW_SAMPLE)
            plan = driver.plan()
            plan.is_fast_path = step != 4
            result = driver.executor.collect(driver.executor.submit(plan))
            assert (result.logprobs is not None) == (4 < step < 8)
            tokens.append((result.token_ids or [-1])[0])
        assert tokens == dense.greedy(prompt, 13)
        assert emulator.phases["submit"].launches["graph"] == 8 and not emulator.phases["submit"].waits
