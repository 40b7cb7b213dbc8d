"""Kernels are launched as a device would launch them: Triton binds the arguments, and a stub stands for the driver.

The interpreter takes any arguments and options. Here the launcher itself sees them, in a process without
TRITON_INTERPRET; nothing is compiled, and results are whatever memory has.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.executors.emulated_device import NAME, Emulator, register, running
from tests.source_tree import ROOT

from octavo.executors.self_check import make_trials
from octavo.ops.triton import attention, experts, gates, kv_write, linear, norms, rope, sample

pytest.importorskip("triton")

MODULES = (attention, experts, gates, kv_write, linear, norms, rope, sample)
GRID = 2**31 - 1, 65535, 65535  # CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"
UNTRIED = {"sample.keep_weights", "experts._multiply_coded"}  # of draft models; its products are a coded layer's


def name_of(kernel: Any) -> str:
    return f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"


def record_launches() -> list[dict[str, Any]]:
    """Run the self-check's trials on the emulated device; return what reached the launcher."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    launches: list[dict[str, Any]] = []

    def compile_nothing(
        self: Any, key: Any, signature: Any, device: int, constants: Any, options: Any, attrs: Any, warmup: bool
    ) -> Any:
        names = list(signature)
        launch = {
            "kernel": name_of(self),
            "types": {name: kind for name, kind in signature.items() if kind != "constexpr"},
            "constants": {names[place[0]]: value for place, value in constants.items()},
            "warps": options.num_warps, "stages": options.num_stages, "registers": options.maxnreg,
            "fuses": options.enable_fp_fusion,
        }  # fmt: skip

        def run(*given: Any) -> None:
            launches.append(launch | {"grid": given[:3]})

        return SimpleNamespace(run=run, function=0, packed_metadata=None, launch_metadata=lambda *_: None)

    JITFunction._do_compile = compile_nothing
    active: Any = SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )  # fmt: skip
    driver.set_active(active)
    register()
    with running(Emulator()), torch.inference_mode():
        for trial in make_trials(is_interpreted=False):
            trial.compute(torch.device(NAME), 0, trial.num_rows)
            trial.compute(torch.device(NAME), trial.num_rows - 1, trial.num_rows)
    return launches


def test_every_launch_is_one_that_a_device_takes() -> None:
    """Options that Triton knows, grids that CUDA allows, and types and constants that are compiled for every device."""
    surroundings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    words = [sys.executable, "-m", __name__]
    done = subprocess.run(words, cwd=ROOT, env=surroundings, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    launches = json.loads(done.stdout.splitlines()[-1])
    variants = {name_of(variant.kernel): variant for module in MODULES for variant in module.VARIANTS}
    assert set(variants) == {launch["kernel"] for launch in launches} | UNTRIED
    for launch in launches:
        variant, kernel = variants[launch["kernel"]], launch["kernel"]
        assert all(0 < size <= most for size, most in zip(launch["grid"], GRID, strict=True)), launch
        assert launch["fuses"] is False and launch["registers"] == variant.options.get("maxnreg"), launch
        # an integer of 1 becomes a constant of the compilation
        assert set(variant.constants) <= set(launch["constants"]), kernel
        ones = {name: value for name, value in launch["constants"].items() if name not in variant.constants}
        assert set(ones.values()) <= {1} and set(variant.signature) == set(launch["types"]) | set(ones), kernel
        for name, kind in launch["types"].items():
            assert kind.startswith("*") == variant.signature[name].startswith("*"), (kernel, name, kind)
            assert kind[0] == "*" or kind == variant.signature[name], (kernel, name, kind)


if __name__ == "__main__":
    print(json.dumps(record_launches()))
