"""Weights reach a device through two buffers, each filled again only when its last copy is done."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.nn import staging
from octavo.nn.staging import Stage
from octavo.nn.weights import open_weights
from tests.executors.conformance import open_files
from tests.executors.emulated_device import NAME, EmulatedTensor, Emulator, register, running
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
    happened: list[tuple[str, int]] = []

    class Event:
        def __init__(self) -> None:
            self.number = sum(kind == "copied" for kind, _ in happened)
            happened.append(("copied", self.number))

        def synchronize(self) -> None:
            happened.append(("waited", self.number))

    monkeypatch.setattr(Stage, "_mark", lambda self: Event())
    out = torch.zeros(10, 2)  # five pieces of two rows

    def read(first: int, rows: torch.Tensor) -> None:
        happened.append(("read", first // 2))
        rows.fill_(first)

    Stage(CPU).fill(out, read)
    assert torch.equal(out[:, 0], torch.arange(10) // 2 * 2.0)
    for number in range(2, 5):
        assert happened.index(("copied", number - 2)) < happened.index(("waited", number - 2))
        assert happened.index(("waited", number - 2)) < happened.index(("read", number))


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
