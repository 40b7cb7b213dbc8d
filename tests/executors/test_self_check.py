"""The self-check passes on the emulated device, and finds every kind of wrong kernel that is put there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from octavo.executors import self_check
from octavo.executors.self_check import CheckReport, Trial, check_device, make_trials
from tests.executors.emulated_device import NAME, Emulator, register, running
from tests.quick import one_in

pytestmark = pytest.mark.usefixtures("patched_once")
register()
EMULATED = torch.device(NAME)
ATTEND = "TritonAttention.attend"


def check(*kinds: str) -> CheckReport:
    """Check with the trials whose names begin so; with all if there are none."""
    trials = [trial for trial in make_trials(True) if trial.name.startswith(kinds or ("",))]
    with running(Emulator()):
        return check_device(EMULATED, trials)


def spoil(monkeypatch: pytest.MonkeyPatch, path: str, change: Callable[..., Any]) -> None:
    """Replace a function: `change` gets its result, and its last tensor argument, if they are on the device."""
    owner: Any = self_check
    *names, last = path.split(".")
    for name in names:
        owner = getattr(owner, name)
    right = getattr(owner, last)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        result = right(*args, **kwargs)
        tensors = [one for one in args if isinstance(one, torch.Tensor)]
        return change(result, tensors[0]) if tensors and tensors[0].device.type == NAME else result

    monkeypatch.setattr(owner, last, wrong)


def test_right_kernels_pass_on_the_emulated_device() -> None:
    report = check()
    assert report.faults == () and report.num_trials == len(make_trials(True)) == 14
    assert report.differing == () and "passed in" in report.text and "same bits" in report.text


FAULTS = {
    "norm": ("add_rms_norm", lambda result, _: (result[0] * 1.1, result[1])),
    "norm of a missing residual": ("add_rms_norm", lambda result, x: (result[0], x)),
    "rotation": ("Rotation.apply_and_write", lambda result, x: 2 * x[:, :4] - result),
    "rotation that writes values over keys": ("KVPlace", lambda place, _: replace(place, values=place.keys)),
    "log-probabilities": (
        "Sampler.distribution",
        lambda result, _: replace(result, log_probs_RV=result.log_probs_RV * 1.1),
    ),
    "linear": ("Linear.__call__", lambda result, _: result * (torch.arange(384) != 17).to(EMULATED)),
    "experts": ("Mixture.mix", lambda result, _: result.roll(1, dims=1)),
    "attention": (ATTEND, lambda result, _: result.roll(1, dims=1)),
    "attention that is not a number": (ATTEND, lambda result, _: result / torch.zeros(1).to(EMULATED)),
}


@pytest.mark.parametrize("name", one_in(3, FAULTS))
def test_a_wrong_kernel_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, change = FAULTS[name]
    spoil(monkeypatch, path, change)
    report = check(name.split()[0], "activation")
    assert report.faults and all(fault.startswith(name.split()[0]) for fault in report.faults), report
    assert "differs from the reference by" in report.faults[0] and report.text.startswith("the self-check failed: ")


def test_a_draw_that_differs_in_one_row_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = self_check.Sampler.sample

    def wrong(self: Any, logits_RV: torch.Tensor, *rest: Any) -> Any:
        sampled = right(self, logits_RV, *rest)
        if logits_RV.device.type == NAME:
            sampled.ids_R = sampled.ids_R + (torch.arange(len(sampled.ids_R)) == 7).to(EMULATED)
        return sampled

    monkeypatch.setattr(self_check.Sampler, "sample", wrong)
    assert [fault.split()[0] for fault in check("sampler", "norm").faults] == ["sampler"]


def test_bits_that_depend_on_the_batch_exclude_invariance_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a tile of many rows were computed by another instruction: one rounding more."""

    def round_again(result: Any, x: torch.Tensor) -> Any:
        return (result[0] * (1 + 2**-7), result[1]) if len(x) > 16 else result

    spoil(monkeypatch, "add_rms_norm", round_again)
    report = check("norm", "rotation")
    assert report.faults == () and [name.split(" (")[0] for name in report.differing] == ["norm"]
    assert "--numerics is fast, since bits depend on the batch in norm (rows 0 to 1 alone)" in report.text


def test_a_decode_whose_bits_are_not_the_prefills_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, ATTEND, lambda result, q: result * (1 + 2**-7) if len(q) == 1 else result)
    report = check("attention")
    assert report.faults == () and len(report.differing) == 4
    assert all(name.startswith("attention") for name in report.differing)


def test_a_kernel_that_cannot_be_compiled_is_a_fault() -> None:
    def fail(device: torch.device, begin: int, end: int) -> torch.Tensor:
        if device.type != "cpu":
            raise RuntimeError("out of resource: shared memory\nRequired: 300000")
        return torch.zeros(end - begin)

    with running(Emulator()):
        report = check_device(EMULATED, [Trial("matrix", fail, 40)])
    assert report.faults == ("matrix: RuntimeError: out of resource: shared memory",)
