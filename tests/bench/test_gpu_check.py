"""The tool for owners of a GPU: it says that there is none, and its parts run on any device."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from tests.tiny_models import make_tiny_model
from tools import gpu_check
from tools.gpu_check import Check, Sizes, make_prompts, run_checks, table

from octavo.executors.device_choice import CudaFacts

CPU = torch.device("cpu")


def test_without_a_device_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu_check, "look_for_cuda", lambda: CudaFacts("torch sees no CUDA device (see nvidia-smi)"))
    assert gpu_check.main([]) == gpu_check.NO_DEVICE == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err == (
        "nothing was checked: torch sees no CUDA device (see nvidia-smi); this tool needs a CUDA device\n"
    )


def test_every_part_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_model("llama3", tmp_path / "model")
    monkeypatch.setattr(gpu_check, "check_conformance", lambda device: {"tests": "left out here"})
    monkeypatch.setattr(gpu_check, "make_prompts", lambda count, length: [[3 + n] * length for n in range(count)])
    results = run_checks(str(folder), CPU, Sizes(1 << 16, (64, 128), (1, 2), 20, 6), minutes=5)
    assert {name: found["ok"] for name, found in results.items()} == {
        "device": True, "self-check": True, "conformance": True, "speed": True, "answers": True, "cpu": True,
        "serving": True, "vllm": None,
    }, results  # fmt: skip
    assert set(results["serving"]["batches"]) == {"1", "2"} and results["cpu"]["compared"] >= 4
    assert results["answers"] | {"seconds": 0} == {
        "ok": True, "captured_equals_eager": True, "alone_equals_batch": True, "seconds": 0,
    }  # fmt: skip
    lines = table(results)
    assert lines[0] == "| part | result | figures |" and any(line.startswith("| batch 2 |") for line in lines)
    assert json.loads(json.dumps(results, default=str))["vllm"]["why"] == "vllm is not installed"


def test_a_part_that_fails_or_has_no_time_is_reported() -> None:
    check = Check(CPU, time.monotonic() + 60)

    def fail() -> gpu_check.Facts:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    check.part("kernel", fail)
    check.ends_at = 0.0
    check.part("late", fail)
    assert check.results["kernel"]["why"] == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert check.results["late"] == {"ok": None, "why": "no time was left"}
    assert [line.split(" | ")[1] for line in table(check.results)[2:]] == ["FAILED", "not run"]


def test_prompts_share_no_prefix_of_a_block() -> None:
    prompts = make_prompts(256, 64)
    assert len({tuple(ids[:16]) for ids in prompts}) == 256 and all(100 <= id_ < 1000 for ids in prompts for id_ in ids)
