"""Which device runs steps, with the reason: names, capabilities, builds of torch, and the self-check."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo.errors import ConfigError
from octavo.executors import device_choice
from octavo.executors.device_choice import CudaFacts, choose, choose_dtype, look_for_cuda
from octavo.executors.self_check import CheckReport

H100 = CudaFacts(None, "NVIDIA H100 80GB HBM3", (9, 0), 0, 1)
T4 = CudaFacts(None, "Tesla T4", (7, 5), 1, 2)
NONE = CudaFacts("torch sees no CUDA device (see nvidia-smi)")
GOOD = CheckReport(7, 4.2)
WRONG = CheckReport(7, 4.2, faults=("attention differs from its twin by 0.5 (at most 0.02)",))


def pick(name: str, facts: CudaFacts, report: CheckReport = GOOD) -> device_choice.ChosenDevice:
    checked: list[torch.device] = []

    def check(device: torch.device) -> CheckReport:
        checked.append(device)
        return report

    chosen = choose(name, lambda: facts, check)
    assert len(checked) == (1 if name != "cpu" and facts in (H100,) else 0)
    return chosen


def test_auto_takes_cuda_after_the_self_check_and_says_so() -> None:
    chosen = pick("auto", H100)
    assert chosen.device.type == "cuda" and chosen.check is GOOD
    assert chosen.note.startswith("steps run on NVIDIA H100 80GB HBM3 (sm_90): ") and GOOD.text in chosen.note


def test_auto_falls_back_to_the_cpu_with_the_reason() -> None:
    wrong = pick("auto", H100, WRONG)
    assert wrong.device.type == "cpu" and wrong.check is None
    assert "the self-check of NVIDIA H100 80GB HBM3 (sm_90) failed: attention differs" in wrong.note
    old = pick("auto", T4)
    assert old.device.type == "cpu"
    assert "Tesla T4 (sm_75, device 1 of 2) has compute capability 7.5, and 8.0 is needed" in old.note
    none = pick("auto", NONE)
    assert none.device.type == "cpu" and none.note == "", "a machine without a device has nothing to be told"


@pytest.mark.parametrize(
    ("facts", "report", "message"),
    [
        (H100, WRONG, r"device is 'cuda', but the self-check of NVIDIA H100.* by 0.5.*; give cpu or auto$"),
        (T4, GOOD, r"compute capability 7.5, and 8.0 is needed; give cpu or auto$"),
        (NONE, GOOD, r"torch sees no CUDA device \(see nvidia-smi\); give cpu or auto$"),
    ],
)
def test_cuda_by_name_is_refused_with_the_reason(facts: CudaFacts, report: CheckReport, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pick("cuda", facts, report)


def test_cuda_by_name_is_checked_too_and_the_cpu_asks_nobody() -> None:
    assert pick("cuda", H100).check is GOOD
    assert choose("cpu", pytest.fail, pytest.fail).device.type == "cpu"  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="device is 'mps'; give auto, cpu or cuda"):
        pick("mps", H100)


def test_invariance_is_refused_where_the_check_found_none(monkeypatch: pytest.MonkeyPatch) -> None:
    differing = CheckReport(7, 4.2, differing=("attention (rows 0 to 1 alone)",))
    monkeypatch.setattr(device_choice, "chosen_device", lambda name: pick("cuda", H100, differing))
    with pytest.raises(ConfigError, match=r"bits depend on the batch in attention \(rows 0 to 1 alone\): give auto"):
        device_choice.check_invariant("cuda")
    assert "--numerics is fast" in device_choice.device_notes("cuda")[0]
    monkeypatch.setattr(device_choice, "chosen_device", lambda name: pick("cuda", H100))
    device_choice.check_invariant("cuda")


def test_what_torch_says_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.version.cuda is None:
        assert "built without CUDA" in str(look_for_cuda().obstacle)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "AMD Instinct MI300X")
    rocm = look_for_cuda()
    assert "built for ROCm" in str(rocm.obstacle)
    assert pick("auto", rocm).note.startswith(
        "steps run on the CPU, not on AMD Instinct MI300X: this torch is built for"
    )
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert look_for_cuda().obstacle == "torch sees no CUDA device (CUDA_VISIBLE_DEVICES is '')"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert look_for_cuda() == T4
    monkeypatch.setattr(device_choice, "is_available", lambda: False)
    assert "triton 3.6 or newer" in str(look_for_cuda().obstacle)


def test_the_type_of_weights() -> None:
    cuda = torch.device("cuda")
    assert choose_dtype("auto", "bfloat16", cuda) is torch.bfloat16 is choose_dtype("auto", "float32", cuda)
    assert choose_dtype("auto", "float16", cuda) is torch.float16
    assert choose_dtype("float32", "float16", cuda) is torch.float32
    with pytest.raises(ConfigError, match="dtype is 'int3'"):
        choose_dtype("int3", "float16", cuda)


def test_no_other_module_asks_torch_whether_there_is_a_device() -> None:
    """One place decides; the doctor reports."""
    folder = Path(device_choice.__file__).parents[1]
    asking = {path.name for path in folder.rglob("*.py") if "cuda.is_available" in path.read_text()}
    assert asking <= {"device_choice.py", "doctor.py"}
