"""The device that runs steps, chosen from its name and from what this machine has, and the type of weights there.

Owns: the choice, its reason in one line for the user, and what a CUDA device must have. `auto` takes CUDA only after
the self-check passed. Does not: check kernels (self_check), or choose one of several devices: CUDA_VISIBLE_DEVICES
selects those that a process sees, and a rank takes its own (ranks.joined).
Invariant: a process looks and checks once; every later choice is the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch

from octavo import machine
from octavo.errors import ConfigError
from octavo.executors.device import device_of
from octavo.executors.self_check import CheckReport, check_device
from octavo.ops.triton.available import is_available

MIN_CAPABILITY = 8, 0  # bfloat16 products, and the least that Triton supports
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NO_TRITON = "triton 3.6 or newer, which comes with torch's CUDA wheels, is not installed (pip install triton)"
ABSENT: dict[str, int] = {}  # CUDA devices to plan for that this machine need not have: name -> bytes of memory
_BF16_FEATURES = {"avx512_bf16", "amx_bf16", "bf16"}


@dataclass(frozen=True, slots=True)
class CudaFacts:
    """What torch says of CUDA in this process; `obstacle` is why no kernel of ours can run, or None."""

    obstacle: str | None
    name: str = ""
    capability: tuple[int, int] = (0, 0)
    index: int = 0
    num_devices: int = 0

    @property
    def text(self) -> str:
        """The device in words."""
        beside = f", device {self.index} of {self.num_devices}" if self.num_devices > 1 else ""
        return f"{self.name} (sm_{self.capability[0]}{self.capability[1]}{beside})"


@dataclass(frozen=True, slots=True)
class ChosenDevice:
    """A device, one line for the user about it ("" if there is nothing to say), and what the self-check found.

    `check` is None on a CPU.
    """

    device: torch.device
    note: str = ""
    check: CheckReport | None = None


def choose_device(name: str) -> torch.device:
    """Return the device with this name; "auto" means CUDA if that passes the self-check. Raises ConfigError."""
    return torch.device("cuda") if name in ABSENT else chosen_device(name).device


def device_notes(name: str) -> tuple[str, ...]:
    """Return the notes for the user about the device with this name. Raises ConfigError."""
    note = "" if name in ABSENT else chosen_device(name).note
    return (note,) if note else ()


def check_invariant(name: str) -> None:
    """Raise ConfigError if a row's bits depend on the batch on the device with this name."""
    report = None if name in ABSENT else chosen_device(name).check
    if report is not None and report.differing:
        places = ", ".join(report.differing)
        raise ConfigError(f"numerics is 'invariant', but here bits depend on the batch in {places}: give auto")


def memory_of(name: str) -> tuple[int, int]:
    """Return the total and the free bytes of the device with this name. Raises ConfigError."""
    return (ABSENT[name], ABSENT[name]) if name in ABSENT else device_of(choose_device(name)).memory()


@cache
def chosen_device(name: str) -> ChosenDevice:
    """Return the choice for this name; the first call that finds a CUDA device checks it. Raises ConfigError."""
    return choose(name, look_for_cuda, check_device)


def choose(name: str, look: Callable[[], CudaFacts], check: Callable[[torch.device], CheckReport]) -> ChosenDevice:
    """Choose from what `look` finds; a usable CUDA device must pass `check`. Raises ConfigError."""
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device is {name!r}; give auto, cpu or cuda")
    if name == "cpu":
        return ChosenDevice(torch.device("cpu"))
    facts = look()
    obstacle = facts.obstacle or _too_old(facts)
    report: CheckReport | None = None
    if obstacle is None:
        report = check(torch.device("cuda"))
        if report.faults:
            obstacle = f"the self-check of {facts.text} failed: {'; '.join(report.faults)}"
    if obstacle is None:
        assert report is not None
        return ChosenDevice(torch.device("cuda"), f"steps run on {facts.text}: {report.text}", report)
    if name == "cuda":
        raise ConfigError(f"device is 'cuda', but {obstacle}; give cpu or auto")
    note = f"steps run on the CPU, not on {facts.name}: {obstacle}" if facts.name else ""
    return ChosenDevice(torch.device("cpu"), note)


def look_for_cuda() -> CudaFacts:
    """Ask torch about CUDA. Of a build for ROCm, whose devices torch calls "cuda" too, return why it cannot be used."""
    if torch.version.hip is not None:
        has_device = torch.cuda.is_available()
        obstacle = "this torch is built for ROCm, and the kernels are built and checked for CUDA alone"
        return CudaFacts(obstacle, torch.cuda.get_device_name() if has_device else "")
    if torch.version.cuda is None:
        return CudaFacts(f"torch {torch.__version__} is built without CUDA (pip install torch installs one with it)")
    if not torch.cuda.is_available():
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "see nvidia-smi" if shown is None else f"CUDA_VISIBLE_DEVICES is {shown!r}"
        return CudaFacts(f"torch sees no CUDA device ({why})")
    index = torch.cuda.current_device()
    capability = torch.cuda.get_device_capability(index)
    facts = (torch.cuda.get_device_name(index), capability, index, torch.cuda.device_count())
    return CudaFacts(None if is_available() else _NO_TRITON, *facts)


def _too_old(facts: CudaFacts) -> str | None:
    if facts.capability >= MIN_CAPABILITY:
        return None
    least = ".".join(map(str, MIN_CAPABILITY))
    return f"{facts.text} has compute capability {'.'.join(map(str, facts.capability))}, and {least} is needed"


def choose_dtype(name: str, checkpoint: str, device: torch.device, is_native: bool = False) -> torch.dtype:
    """Return the dtype of weights and cache. Raises ConfigError.

    On a CPU, "auto" is bfloat16 if the decoder is native or the CPU supports bfloat16, else float32. On CUDA, "auto" is
    float16 if the checkpoint is float16, else bfloat16.
    """
    if name != "auto":
        return dtype_named(name, "dtype")
    if device.type == "cpu":
        return torch.bfloat16 if is_native or _BF16_FEATURES & set(machine.look().features) else torch.float32
    return torch.float16 if checkpoint == "float16" else torch.bfloat16


def dtype_named(name: str, setting: str, dtypes: Mapping[str, torch.dtype] = DTYPES) -> torch.dtype:
    """Return the dtype with this name. Raises ConfigError, whose message names `setting`."""
    if name not in dtypes:
        raise ConfigError(f"{setting} is {name!r}; give auto, {', '.join(dtypes)}")
    return dtypes[name]
