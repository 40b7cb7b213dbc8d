"""Load the library of C++ kernels, after torch, and report its status.

Owns: loading, the check of the ABI, the check for a second OpenMP pool, and the choice of the thread count.
Does not: compute; each operation's file declares and calls its own functions.
Invariants: torch is loaded first, so that the library binds to torch's libgomp. If a second libgomp is
mapped, every kernel runs on one thread, because two pools would compete for the cores.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from octavo.errors import ConfigError

ABI = 13
ISA_NAMES = ("portable", "avx2", "avx512", "amx")  # each has all before it
MAX_ISA = os.environ.get("OCTAVO_ISA") or ISA_NAMES[-1]  # the best one to use where the machine has it
LIBRARY_PATH = Path(os.environ.get("OCTAVO_KERNELS") or Path(__file__).with_name("libkernels.so"))  # for developers
CACHE_LINE = 64  # bytes
MIN_ELEMENTS_PER_THREAD = 32_768  # with fewer, waking a second thread costs more than it saves


@dataclass(frozen=True, slots=True)
class KernelStatus:
    """The library's status. `reason` says why the kernels are absent or serial; "" if they are loaded and parallel."""

    is_loaded: bool
    is_parallel: bool
    isa: str
    reason: str


@cache
def _load() -> tuple[ctypes.CDLL | None, KernelStatus]:
    if not LIBRARY_PATH.exists():
        return None, KernelStatus(False, False, "", "not built (no C++ compiler at install time); torch twins are used")
    try:
        library = ctypes.CDLL(str(LIBRARY_PATH))
        abi = library.octavo_kernels_abi()
    except (OSError, AttributeError) as error:
        return None, _warned(KernelStatus(False, False, "", f"{LIBRARY_PATH.name} cannot be loaded: {error}"))
    if abi != ABI:
        reason = f"{LIBRARY_PATH.name} has ABI {abi}, this code needs {ABI}; reinstall"
        return None, _warned(KernelStatus(False, False, "", reason))
    if MAX_ISA not in ISA_NAMES:
        raise ConfigError(f"OCTAVO_ISA must be one of {', '.join(ISA_NAMES)}, got {MAX_ISA!r}")
    isa = ISA_NAMES[library.octavo_kernels_use_isa(ISA_NAMES.index(MAX_ISA))]
    if not library.octavo_kernels_has_openmp():
        return library, KernelStatus(True, False, isa, "built without OpenMP")
    pools = mapped_openmp_pools()
    if len(pools) > 1:
        reason = f"{len(pools)} OpenMP libraries are mapped ({', '.join(pools)}); kernels run on one thread"
        return library, _warned(KernelStatus(True, False, isa, reason))
    return library, KernelStatus(True, True, isa, "")


def _warned(status: KernelStatus) -> KernelStatus:
    warnings.warn(f"octavo kernels: {status.reason}", RuntimeWarning, stacklevel=4)
    return status


def mapped_openmp_pools() -> tuple[str, ...]:
    """Return the paths of the libgomp copies mapped in this process, sorted; () if the system has no /proc."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return ()
    return tuple(sorted({line[line.index("/") :] for line in lines if "/libgomp" in line}))


def status() -> KernelStatus:
    """Return the library's status, loading it on first use."""
    return _load()[1]


def function(name: str, *argument_types: Any, result: Any = None, is_short: bool = False) -> Callable[..., Any] | None:
    """Return a kernel, or None without the library. `result` is its C type. Look a kernel up once, not per call.

    A short kernel keeps the interpreter's lock, which another thread could hold for longer than the call takes.
    """
    library, _ = _load()
    if library is None:
        return None
    kernel = getattr(ctypes.PyDLL(None, handle=library._handle) if is_short else library, name)
    kernel.argtypes = argument_types
    kernel.restype = result
    return kernel  # type: ignore[no-any-return]


def num_threads(num_elements: int) -> int:
    """Return the number of threads for a kernel over `num_elements`: torch's number if that is faster, else one.

    Never a number in between: changing the size of OpenMP's pool between calls rebuilds it.
    """
    count = torch.get_num_threads()
    if count > 1 and num_elements >= count * MIN_ELEMENTS_PER_THREAD and _load()[1].is_parallel:
        return count
    return 1


def team_size() -> int:
    """Return the number of threads of a parallel region that computes work of any size, as a whole step: all."""
    return torch.get_num_threads() if status().is_parallel else 1


class Workspace:
    """Memory for the intermediate values of one kernel at a time, which grows as needed."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def address(self, num_bytes: int) -> int:
        """Return the address of this many bytes, aligned to cache lines."""
        if self._memory.numel() < num_bytes + CACHE_LINE:
            self._memory = torch.empty(num_bytes + CACHE_LINE, dtype=torch.uint8)
        return -(-self._memory.data_ptr() // CACHE_LINE) * CACHE_LINE


def use_isa(name: str) -> str:
    """Restrict the kernels to an instruction set, at most the machine's best; return the one in use. For tests."""
    library, _ = _load()
    if library is None:
        return ""
    return ISA_NAMES[library.octavo_kernels_use_isa(ISA_NAMES.index(name))]
