"""The progress of loading: nothing for a second, then a bar on a terminal or lines in the log."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import resolve_model
from octavo.config import ExecutionConfig, ModelConfig
from octavo.executors import loading_progress
from octavo.executors.loading import DecoderChoice
from octavo.executors.loading_progress import LoadingProgress
from octavo.models.native_weights import load_native_weights
from octavo.nn.weights import ReadOptions
from octavo.ops import cpu
from tests.models.dense_backend import load_model
from tests.tiny_models import make_tiny_model


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_log_has_a_line_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    progress = LoadingProgress(4 << 30, None, clock)
    with caplog.at_level(logging.INFO):
        for _ in range(25):
            clock.now += 1.0
            progress.advance(1, 40)
    progress.close()
    assert [record.getMessage() for record in caplog.records] == [
        "loading weights: 1.00 of 4.00 GiB, 30 s left",
        "loading weights: 2.00 of 4.00 GiB, 20 s left",
    ]


def test_a_terminal_has_a_bar_after_a_second() -> None:
    clock, text = Clock(), io.StringIO()
    consoles: list[Console] = []

    def console() -> Console:
        consoles.append(Console(file=text, force_terminal=True, width=100))
        return consoles[0]

    progress = LoadingProgress(4 << 30, console, clock)
    progress.advance(10, 40)
    assert not consoles
    clock.now += 1.5
    progress.advance(10, 40)
    progress.advance(10, 40)
    progress.close()
    assert len(consoles) == 1 and "loading weights" in text.getvalue() and "4.0 GiB" in text.getvalue()


def test_a_quick_load_shows_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def console() -> Console:
        raise AssertionError("no bar")

    with caplog.at_level(logging.INFO):
        for made in (None, console):
            progress = LoadingProgress(100, made, Clock())
            progress.advance(40, 40)
            progress.close()
    assert not caplog.records


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_every_value_is_counted_once(quantization: str, tmp_path: Path) -> None:
    files = resolve_model(str(make_tiny_model("qwen2", tmp_path)))
    spec = read_model_spec(files)
    counted: list[tuple[int, int]] = []
    options = ReadOptions(on_read=lambda count, total: counted.append((count, total)))
    if quantization == "none":
        load_model(files, spec, torch.float32, options)
    elif cpu.status().is_loaded:
        load_native_weights(files, spec, quantization, torch.float32, None, options)
    assert {total for _, total in counted} in ({sum(count for count, _ in counted)}, set())


def test_a_loading_model_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loading_progress, "_LOG_S", 0.0)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    folder = make_tiny_model("llama2", tmp_path)
    files = resolve_model(str(folder))
    model = ModelConfig(model=str(folder), weight_cache_bytes=0)
    with caplog.at_level(logging.INFO):
        DecoderChoice(files, read_model_spec(files), ExecutionConfig(), model).load(None)
    assert caplog.records[-1].getMessage().startswith("loading weights: 0.00 of 0.00 GiB, 0 s left")
