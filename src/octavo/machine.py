"""Reports the resources that this process may use: cores, memory, CPU features, caches. Standard library only.

Owns: reading the CPU affinity, the limits of the process and of cgroups v1 and v2, /proc and /sys on Linux, and sysctl
on macOS; the errors about missing torch or memory.
Does not: import torch, choose thread counts or pool sizes (assembly does), or measure speed (bench does).
Invariants: every result is at least 1 core and 1 byte. An unreadable fact is omitted; a size is never guessed high.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import CapacityError, ConfigError

ROOT = Path("/")
INSTALL_TORCH = "pip install 'octavo[torch]'"
NO_TORCH = (
    f"torch is not installed: {INSTALL_TORCH} (on Linux without a GPU, a smaller one: "
    "pip install torch --index-url https://download.pytorch.org/whl/cpu)"
)
_TORCH_BYTES = 900 << 20  # measured address space of Python, torch and torch's threads
# Parts of libraries' error messages when memory is too small for code, threads or arrays.
_NO_MEMORY = ("allocate memory", "failed to map segment", "can't start new thread", "bad_alloc")
_GIB = 2**30
# Features that the CPU kernels dispatch on, in /proc/cpuinfo's words (x86-64, then arm64).
_FEATURES = (
    "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx_vnni",
    "amx_tile", "amx_bf16", "amx_int8", "asimd", "asimddp", "asimdhp", "bf16", "i8mm", "sve", "sve2",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine's resources for this process. Bytes are total memory, memory free now, and the largest CPU cache."""

    system: str
    architecture: str
    cpu_name: str
    num_cores: int
    num_logical_cores: int
    features: tuple[str, ...]
    cache_bytes: int
    memory_bytes: int
    available_bytes: int


def look(root: Path = ROOT) -> Machine:
    """Read all facts. Takes about a millisecond on Linux."""
    name, features = _cpu(root)
    total, available = usable_memory(root)
    logical = _affinity()
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        architecture=platform.machine(),
        cpu_name=name,
        num_cores=usable_cores(root),
        num_logical_cores=len(logical),
        features=features,
        cache_bytes=_largest_cache(root),
        memory_bytes=total,
        available_bytes=available,
    )


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def usable_cores(root: Path = ROOT) -> int:
    """Return the physical cores within this process's affinity, capped by the cgroup's CPU quota; at least 1."""
    logical = _affinity()
    physical = {_text(root / f"sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list") or str(cpu) for cpu in logical}
    quota = _cpu_quota(root)
    cores = len(physical)
    if quota is not None:
        cores = min(cores, max(1, int(quota)))
    return max(1, cores)


def usable_memory(root: Path = ROOT) -> tuple[int, int]:
    """Return the total and free bytes of memory, capped by this process's cgroup and address-space limits."""
    if sys.platform == "darwin":
        total = int(_sysctl("hw.memsize") or 1)
        return total, total // 2
    lines = _text(root / "proc/meminfo").splitlines()
    table = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
    total = table.get("MemTotal", 1)
    available = table.get("MemAvailable", total)
    for folder in _cgroup_folders(root, "memory"):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
        if limit is not None and limit < total:
            total = limit
            cached = _statistic(folder / "memory.stat", "inactive_file")
            available = min(available, max(1, limit - used + cached))
    if (limit := _address_limit(root)) is not None:
        pages = _text(root / "proc/self/statm").split() or ["0"]
        total, available = min(total, limit), min(available, limit - int(pages[0]) * os.sysconf("SC_PAGE_SIZE"))
    return max(1, total), max(1, min(available, total))


@contextmanager
def needing_torch() -> Iterator[None]:
    """Raise ConfigError with the command that installs torch if an import in the block does not find it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigError(NO_TORCH) from None


@contextmanager
def needing_memory(name: str, weight_bytes: int) -> Iterator[None]:
    """Raise CapacityError, with sizes and a remedy, if opening a model in the block runs out of memory."""
    free = usable_memory()[1]
    try:
        yield
    except (MemoryError, OSError, ImportError, RuntimeError) as error:
        is_short = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
        if not is_short and not any(words in str(error) for words in _NO_MEMORY):
            raise
        needed = (weight_bytes + _TORCH_BYTES) / _GIB
        is_limited = _address_limit(ROOT) is not None
        remedy = "raise the limit (ulimit -v)" if is_limited else "end other programs, or raise the container's limit"
        raise CapacityError(
            f"{name} needs about {needed:.1f} GiB of memory and a KV cache, and {free / _GIB:.1f} GiB were free to "
            f"this process; {remedy}"
        ) from error


def _address_limit(root: Path) -> int | None:
    """Return this process's limit of address space in bytes (ulimit -v), None if there is no limit."""
    for line in _text(root / "proc/self/limits").splitlines():
        words = line.removeprefix("Max address space").split()
        if line.startswith("Max address space") and words[0].isdigit():
            return int(words[0])
    return None


def _affinity() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _cpu_quota(root: Path) -> float | None:
    quotas = []
    for folder in _cgroup_folders(root, "cpu"):
        words = _text(folder / "cpu.max").split()
        if len(words) == 2 and words[0] != "max":
            quotas.append(int(words[0]) / int(words[1]))
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota is not None and quota > 0 and period:
            quotas.append(quota / period)
    return min(quotas, default=None)


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """Return the folders of this process's cgroup and its parents, for one controller, v2 and v1."""
    folders: list[Path] = []
    base = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = base / controller if controllers else base
        here = top / path.lstrip("/")
        folders.extend(folder for folder in (here, *here.parents) if folder.is_relative_to(top))
    return folders


def _cpu(root: Path) -> tuple[str, tuple[str, ...]]:
    if sys.platform == "darwin":
        return _sysctl("machdep.cpu.brand_string") or platform.machine(), ()
    table: dict[str, str] = {}
    for line in _text(root / "proc/cpuinfo").split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        table[key.strip()] = value.strip()
    flags = set((table.get("flags") or table.get("Features") or "").split())
    return table.get("model name") or platform.machine(), tuple(name for name in _FEATURES if name in flags)


def listener_of(port: int) -> tuple[int, str] | None:
    """Return the pid and name of the process that listens on a TCP port, None if /proc does not show it."""
    sockets = set()
    for table in ("tcp", "tcp6"):
        for line in _text(ROOT / "proc/net" / table).splitlines()[1:]:
            cells = line.split()
            if len(cells) > 9 and cells[3] == "0A" and int(cells[1].rpartition(":")[2], 16) == port:
                sockets.add(f"socket:[{cells[9]}]")
    for process in (ROOT / "proc").iterdir() if sockets else ():
        try:
            if process.name.isdigit() and any(os.readlink(fd) in sockets for fd in (process / "fd").iterdir()):
                return int(process.name), _text(process / "comm")
        except OSError:  # the process is another user's, or has ended
            continue
    return None


def _largest_cache(root: Path) -> int:
    sizes = []
    for index in sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*")):
        size = _text(index / "size").strip()
        unit = {"K": 2**10, "M": 2**20, "G": 2**30}.get(size[-1:], 1)
        if size.rstrip("KMG").isdigit():
            sizes.append(int(size.rstrip("KMG")) * unit)
    return max(sizes, default=0)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.lstrip("-").isdigit() else None


def _statistic(path: Path, name: str) -> int:
    for line in _text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return 0


def _sysctl(name: str) -> str:
    try:
        return subprocess.run(
            ["sysctl", "-n", name], capture_output=True, text=True, check=True, timeout=5
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
