"""The tool for owners of a GPU: it says that there is none, and its parts run on any device."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny_gguf import make_tiny_gguf
from tests.tiny_models import make_tiny_model
from tools import gpu_check
from tools.gpu_check import Check, Part, Sizes, make_prompts, run_checks, table

from octavo.executors.device_choice import CudaFacts
from octavo.simulator.costs.hardware import device_facts


def test_without_a_device_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu_check, "look_for_cuda", lambda: CudaFacts("torch sees no CUDA device (see nvidia-smi)"))
    monkeypatch.setattr(Part, "start", lambda self, limit_s: self.run())
    assert gpu_check.main([]) == gpu_check.NO_DEVICE == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.splitlines()[2] == (
        "nothing was checked: torch sees no CUDA device (see nvidia-smi); this tool needs a CUDA device"
    )


def test_every_part_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which saves the imports; the first one in a process of its own."""
    folder = make_tiny_model("llama3", tmp_path / "model")
    start, started = Part.start, list[str]()

    def run(self: Part, limit_s: float) -> gpu_check.Facts:
        started.append(self.name)
        if self.name == "device":
            return start(self, limit_s)
        found: gpu_check.Facts = json.loads(json.dumps(Part.read(self.describe()).run(), default=str))
        return found

    monkeypatch.setattr(Part, "start", run)
    monkeypatch.setattr(gpu_check, "check_conformance", lambda device: {"tests": "left out here"})
    monkeypatch.setattr(gpu_check, "make_prompts", lambda count, length: [[3 + n] * length for n in range(count)])
    results = run_checks(str(folder), "cpu", Sizes(1 << 16, (64, 128), (1, 2), 20, 6), minutes=5)
    assert {name: found["ok"] for name, found in results.items()} == {
        "device": True, "self-check": True, "conformance": True, "speed": True, "answers": True, "cpu": True,
        "serving": True, "vllm": None,
    }, results  # fmt: skip
    assert [*results] == [*started, "vllm"] == [*gpu_check.LIMITS_S]
    assert results["device"]["torch"] == torch.__version__
    assert set(results["serving"]["batches"]) == {"1", "2"} and results["cpu"]["compared"] >= 4
    assert results["answers"] | {"seconds": 0} == {
        "ok": True, "captured_equals_eager": True, "alone_equals_batch": True, "seconds": 0,
    }  # fmt: skip
    lines = table(results)
    assert lines[0] == "| part | result | figures |" and any(line.startswith("| serving, batch 2 |") for line in lines)
    assert json.loads(json.dumps(results))["vllm"]["why"].startswith("vllm is not installed (No module")


FAKE_PARTS = """
import json, os, sys, time
asked = json.loads(sys.argv[1])
name = asked["name"]
print("INFO: loading", flush=True)
if name == "self-check":  # as CUDA's runtime ends a process
    print("first\\nCUDA error: an illegal memory access was encountered\\n", file=sys.stderr, flush=True)
    os.abort()
if name == "conformance":
    os.fork() or time.sleep(99)
    print("waiting for the device", file=sys.stderr, flush=True)
    time.sleep(99)
if name == "speed":
    print("{'copy_gb_s': 1")
    sys.exit()
if name == "answers":
    raise MemoryError("no room")
print(json.dumps({"ok": True, "process": os.getpid(), "copy": asked["copy_gb_s"]}))
"""


def test_a_part_that_dies_or_hangs_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "CHILD", (sys.executable, "-c", FAKE_PARTS))
    monkeypatch.setitem(gpu_check.LIMITS_S, "conformance", 1.5)
    results = run_checks(str(tmp_path), "cpu", Sizes(), minutes=5)
    whys = {name: found["why"] for name, found in results.items() if found["ok"] is False}
    assert whys.pop("conformance").startswith("conformance took more than 1.5 s: ")
    assert whys == {
        "self-check": "self-check ended with status -6: CUDA error: an illegal memory access was encountered",
        "speed": "speed printed no result: {'copy_gb_s': 1",
        "answers": "answers ended with status 1: MemoryError: no room",
        "vllm": f"ModelFileError: {tmp_path}: holds neither config.json with .safetensors files nor a .gguf file",
    }
    good = [found for found in results.values() if found["ok"]]
    assert len({found["process"] for found in good}) == 3 and all(found["copy"] == 1.0 for found in good)
    assert "first" in results["self-check"]["trace"] and "line" in results["answers"]["trace"]
    printed = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    assert printed == [{name: found} for name, found in results.items()], "each at once"
    assert [line.split(" | ")[1] for line in table(results)[2:6]] == ["ok", "FAILED", "FAILED", "FAILED"]


FAKE = """
import json, os, sys, time
from types import SimpleNamespace
__version__ = "0.99"
HOW = os.environ["FAKE_VLLM"]
CLOCK = [0.0]
time.perf_counter = lambda: CLOCK[0]
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
        CLOCK[0] += 0.2 + 0.005 * num  # the prompts, and each token
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7] * num)]) for prompt in prompts]
"""


@pytest.mark.parametrize(("how", "ok", "why"), [
    ("good", None, None),
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
    found = gpu_check.measure_vllm(str(folder), sizes, 0.9, sys.executable, 2.0 if how == "hang" else 60.0)
    if why is not None:
        assert found["ok"] is ok and found["why"].startswith(why), found
        return
    assert found == {
        "version": "0.99",
        "batches": {"1": {"tokens_s": 200.0, "step_ms": 5.0}, "2": {"tokens_s": 400.0, "step_ms": 5.0}},
    }  # fmt: skip
    gpu_check.compare({"batches": {"1": {"tokens_s": 100.0}}}, found)
    assert found["batches"]["1"]["octavo_of_it"] == 0.5 and "octavo_of_it" not in found["batches"]["2"]


def test_vllm_is_not_asked_about_a_file_that_it_does_not_read(tmp_path: Path) -> None:
    make_tiny_gguf("llama2", tmp_path / "tiny.gguf", "Q4_0")
    found = gpu_check.measure_vllm(str(tmp_path / "tiny.gguf"), Sizes(), 0.9, sys.executable, 60.0)
    assert found["ok"] is None and "no folder of safetensors" in found["why"]


def test_a_part_that_fails_or_has_no_time_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> gpu_check.Facts:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(gpu_check, "check_kernels", fail)
    check, part, limits = Check(time.monotonic() + 60), Part("self-check", "", "cpu", Sizes()), list[float]()

    def run(limit_s: float) -> gpu_check.Facts:
        limits.append(limit_s)
        return part.run()

    check.part("self-check", run)
    assert "in fail" in check.results["self-check"].pop("trace") and "more" not in "".join(table(check.results))
    check.ends_at = time.monotonic() + 4
    check.part("cpu", run)
    assert len(limits) == 1 and 5 < limits[0] <= 60 < gpu_check.LIMITS_S["self-check"]
    assert check.results["self-check"]["why"] == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert check.results["cpu"] == {"ok": None, "why": "no time was left"}
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
    ("NVIDIA L40", None), ("NVIDIA GH200 480GB", None), ("NVIDIA A100 80GB PCIe", "a100-80g"),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000-server"),
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
