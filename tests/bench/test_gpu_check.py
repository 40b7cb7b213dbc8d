"""The tool for owners of a GPU: it says that there is none, and its parts run on any device."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny_gguf import make_tiny_gguf
from tests.tiny_models import make_tiny_model
from tools import gpu_check
from tools.gpu_check import Check, Sizes, make_prompts, run_checks, table

from octavo.executors.device_choice import CudaFacts
from octavo.simulator.costs.hardware import device_facts

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
    assert lines[0] == "| part | result | figures |" and any(line.startswith("| serving, batch 2 |") for line in lines)
    assert json.loads(json.dumps(results, default=str))["vllm"]["why"].startswith("vllm is not installed (No module")


FAKE = """
import json, os, sys, time
from types import SimpleNamespace
__version__ = "0.99"
HOW = os.environ["FAKE_VLLM"]
if HOW == "no import":
    raise ImportError("libcudart.so.99: cannot open shared object file")

class SamplingParams:
    def __init__(self, *, temperature, max_tokens, ignore_eos, detokenize):
        assert (temperature, ignore_eos, detokenize) == (0.0, True, False)
        self.max_tokens = max_tokens

class LLM:
    def __init__(self, model, *, skip_tokenizer_init, max_model_len, max_num_seqs, gpu_memory_utilization,
                 enable_prefix_caching, seed):
        print("INFO: loading", model)
        assert skip_tokenizer_init and not enable_prefix_caching and os.path.exists(model + "/config.json")
        if HOW == "no memory":
            raise ValueError("Free memory on device is less than desired GPU memory utilization")
        self.max_len, self.max_seqs = max_model_len, max_num_seqs

    def generate(self, prompts, sampling_params, *, use_tqdm):
        assert not use_tqdm and len(prompts) <= self.max_seqs
        if HOW == "hang":
            os.fork() or time.sleep(99)
            time.sleep(99)
        num = sampling_params.max_tokens - (HOW == "short")
        assert all(len(prompt["prompt_token_ids"]) + num <= self.max_len for prompt in prompts)
        time.sleep(0.005 * num)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7] * num)]) for prompt in prompts]
"""


@pytest.mark.parametrize(("how", "ok", "why"), [
    ("good", True, None),
    ("no import", None, "vllm is not installed (libcudart.so.99: cannot open shared object file)"),
    ("no memory", False, "vLLM ended with status 1: ValueError: Free memory on device is less than desired GPU memory"),
    ("short", False, "vLLM ended with status 1: RuntimeError: 1 answers of [1] tokens, not 1 of 2"),
    ("hang", False, "vLLM took more than 2 s"),
])  # fmt: skip
def test_vllm_is_measured_or_its_failure_reported(
    how: str, ok: bool | None, why: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package with the names that are used of vLLM proves this side of the call; no real one was run."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FAKE_VLLM", how)
    folder = make_tiny_model("llama3", tmp_path / "model")
    sizes = Sizes(batches=(1, 2), context=20, outputs=6)
    started_at = time.monotonic()
    timeout = 2.0 if how == "hang" else 60.0
    check = Check(CPU, time.monotonic() + 60)
    found = check.part("vllm", lambda: gpu_check.measure_vllm(str(folder), sizes, 0.9, timeout_s=timeout))
    assert time.monotonic() - started_at < 60 and found["ok"] is ok
    if why is not None:
        assert found["why"].startswith(why), found
        return
    assert found["version"] == "0.99" and set(found["batches"]) == {"1", "2"}
    assert 4.5 < found["batches"]["1"]["step_ms"] < 50  # five for each token, whatever the prompts take
    gpu_check.compare({"batches": {"1": {"tokens_s": 100.0}}}, found)
    assert found["batches"]["1"]["octavo_of_it"] == round(100 / found["batches"]["1"]["tokens_s"], 3)
    assert "octavo_of_it" not in found["batches"]["2"]


def test_vllm_is_not_asked_about_a_file_that_it_does_not_read(tmp_path: Path) -> None:
    make_tiny_gguf("llama2", tmp_path / "tiny.gguf", "Q4_0")
    found = gpu_check.measure_vllm(str(tmp_path / "tiny.gguf"), Sizes(), 0.9)
    assert found["ok"] is None and "no folder of safetensors" in found["why"]


def test_a_part_that_fails_or_has_no_time_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    check = Check(CPU, time.monotonic() + 60)

    def fail() -> gpu_check.Facts:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    check.part("kernel", fail)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    assert json.loads(line) == check.results  # before the next part, which may end the process
    assert "in fail" in check.results["kernel"].pop("trace") and "more" not in "".join(table(check.results))
    check.ends_at = 0.0
    check.part("late", fail)
    assert check.results["kernel"]["why"] == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert check.results["late"] == {"ok": None, "why": "no time was left"}
    assert [line.split(" | ")[1] for line in table(check.results)[2:]] == ["FAILED", "not run"]


def test_the_tests_on_a_device_run_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/conftest.py has kernels interpreted, unless the tool says otherwise."""

    def run(words: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert "TestCUDA" in words
        asked = "import os, tests.conftest; print(os.environ['TRITON_INTERPRET'])"
        return done([*words[:1], "-c", asked], **options)

    done = subprocess.run
    monkeypatch.setattr(gpu_check.subprocess, "run", run)
    assert gpu_check.check_conformance(torch.device("cuda")) == {"ok": True, "tests": "0"}
    monkeypatch.setattr(gpu_check.importlib.util, "find_spec", lambda name: None)
    found = gpu_check.check_conformance(torch.device("cuda"))
    assert found["ok"] is None and found["why"].startswith("pytest and transformers not installed")


@pytest.mark.parametrize(("name", "sheet"), [
    ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie"), ("NVIDIA A100-SXM4-40GB", "a100-40g"),
    ("NVIDIA GB200", "gb200"), ("NVIDIA L40S", "l40s"), ("NVIDIA GeForce RTX 4090", "rtx4090"), ("NVIDIA T1", None),
])  # fmt: skip
def test_a_device_is_compared_with_the_facts_that_plans_use(name: str, sheet: str | None) -> None:
    speed: gpu_check.Facts = {"copy_gb_s": 1000.0, "plain_16_tflops": 3.0, "plain_4096_tflops": 50.0}
    gpu_check.compare_with_sheet(speed, {"name": name})
    assert speed.get("sheet") == sheet
    if sheet is not None:
        facts = device_facts(sheet)
        assert speed["copy_of_sheet"] == round(1e12 / facts.bandwidth, 3)
        assert speed["tflops_of_sheet"] == round(5e13 / facts.flops16, 3)


def test_prompts_share_no_prefix_of_a_block() -> None:
    prompts = make_prompts(256, 64)
    assert len({tuple(ids[:16]) for ids in prompts}) == 256 and all(100 <= id_ < 1000 for ids in prompts for id_ in ids)
