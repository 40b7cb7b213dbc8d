"""Weights reach a device through two buffers, each filled again only when its last copy is done."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.models.native_weights import wanted_tensors
from octavo.nn import staging
from octavo.nn.coded_linear import DeviceCodes, read_parts
from octavo.nn.staging import Stage
from octavo.nn.weights import open_weights
from tests.executors.conformance import open_files
from tests.executors.emulated_device import NAME, EmulatedTensor, Emulator, register, running
from tests.tiny_gguf import make_tiny_gguf
from tests.tiny_models import make_tiny_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [(40, 8), (7, 3), (1, 900), (5,), (33, 2, 2), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_row_arrives_once(shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "STAGE_BYTES", 100)
    source = torch.randn(shape).to(dtype)
    stage, out, calls = Stage(CPU), torch.full(shape, -1.0).to(dtype), []

    def read(first: int, rows: torch.Tensor) -> None:
        assert threading.current_thread() is not threading.main_thread()
        calls.append((first, len(rows)))
        rows.copy_(source[first : first + len(rows)])

    for _ in range(2):
        stage.fill(out, read)
        assert torch.equal(out, source)
    assert sum(count for _, count in calls) == 2 * shape[0]


def test_a_buffer_waits_for_its_last_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "STAGE_BYTES", 16)
    monkeypatch.setattr("torch.empty", partial(without_pin, torch.empty))
    happened: list[tuple[str, int]] = []

    def mark() -> Any:
        number = sum(kind == "copied" for kind, _ in happened)
        happened.append(("copied", number))
        return lambda: happened.append(("waited", number))

    monkeypatch.setitem(staging.WAITS, "cpu", mark)
    stage, out = Stage(CPU), torch.zeros(10, 2)  # five pieces of two rows

    def read(first: int, rows: torch.Tensor) -> None:
        happened.append(("read", first // 2))
        rows.fill_(first)

    stage.fill(out, read)
    assert torch.equal(out[:, 0], torch.arange(10) // 2 * 2.0)
    for number in range(2, 5):
        assert happened.index(("copied", number - 2)) < happened.index(("waited", number - 2))
        assert happened.index(("waited", number - 2)) < happened.index(("read", number))
    stage.send(np.zeros(3))
    assert happened[-2:] == [("waited", 3), ("copied", 5)]  # the turns go on from one tensor to the next


def without_pin(empty: Any, *size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
    """torch.empty on a machine that can pin no memory."""
    return empty(*size, **options)


def test_arrays_are_sent_in_one_copy_each_with_its_type_and_shape() -> None:
    register()
    arrays = [np.arange(7, dtype=np.int8), np.ones((3, 5), np.float16) / 3, np.arange(12, dtype=np.uint8).reshape(4, 3)]
    arrays.append(arrays[2][:, ::2])
    with running(Emulator()) as emulator:
        stage = Stage(torch.device(NAME))
        for _ in range(5):  # buffers are used again
            moved: list[Any] = stage.send(*arrays)
            for one, array in zip(moved, arrays, strict=True):
                assert isinstance(one, EmulatedTensor) and np.array_equal(one.held.numpy(), array)
                assert one.held.numpy().dtype == array.dtype
        emulator.wait_until(emulator.clock)
    happened = emulator.phases["other"]
    assert happened.uploads == 5 and not happened.waits and not happened.downloads


@pytest.mark.parametrize("kind", ["int4", "int8", "auto"])
def test_codes_reach_a_device_from_pinned_memory_alone(kind: str, tmp_path: Path) -> None:
    """Of floats that are quantised, and of a GGUF file's own blocks: a copy for each piece, and no wait."""
    register()
    path = tmp_path / "tiny.gguf"
    if kind == "auto":
        make_tiny_gguf("llama2", path, "Q4_0")
    files, spec = open_files(path if kind == "auto" else make_tiny_model("llama3", tmp_path / "model"))
    weights, wanted, num_coded = open_weights(files, spec), wanted_tensors(kind, torch.bfloat16), 0
    emulator = Emulator()
    for name in (name for name in weights.names if len(weights.shape(name)) == 2):
        rows, inputs = weights.shape(name)
        of_matrix = weights, {name: rows}, inputs, wanted
        (want,), _ = read_parts(*of_matrix, (torch.bfloat16, CPU))
        emulator.clear()
        with running(emulator):
            (there,), _ = read_parts(*of_matrix, (torch.bfloat16, torch.device(NAME)))
            emulator.wait_until(emulator.clock)
        happened = emulator.phases["other"]
        assert not happened.waits and not happened.downloads
        if isinstance(want, DeviceCodes):
            assert isinstance(there, DeviceCodes) and happened.uploads == 1 + (want.table is not None)
            pairs = [(getattr(want, part), getattr(there, part)) for part in CODED]
            num_coded += 1
        else:
            pairs = [(want, there)]
        for one, other in pairs:
            assert other is one is None or torch.equal(other.held, one), name
    assert num_coded > 10


CODED = ("codes_CF32", "scales_GF", "minima_GF", "table")


def test_an_error_of_reading_reaches_the_caller() -> None:
    def read(first: int, rows: torch.Tensor) -> None:
        raise OSError("the file is gone")

    with pytest.raises(OSError, match="the file is gone"):
        Stage(CPU).fill(torch.zeros(3, 3), read)


def test_a_models_tensors_are_the_same_on_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "STAGE_BYTES", 4096)
    register()
    files, spec = open_files(make_tiny_model("llama3", tmp_path / "model"))
    weights = open_weights(files, spec)
    for name in weights.names:
        first, *others = weights.shape(name)
        want = weights.read({name: first}, *others, dtype=torch.bfloat16)
        with running(Emulator()):
            there: Any = weights.read({name: first}, *others, dtype=torch.bfloat16, device=torch.device(NAME))
        assert isinstance(there, EmulatedTensor) and torch.equal(there.held, want), name
