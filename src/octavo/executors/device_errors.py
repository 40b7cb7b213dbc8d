"""What a RuntimeError of a step means: too little memory, a device that is lost, or a fault of the step alone.

Owns: telling these apart, and freeing the failed step's memory. Does not: retry, or restart an engine (the engine loop
and the supervisor do). torch has one exception for errors of a device, and Triton raises RuntimeError.
A CUDA error is sticky if the context is lost: every later call of this process fails with it, whichever request runs.
The engine then ends, its supervisor starts another process, and the ledger resumes the requests. Errors that CUDA
reports without a loss of the context are named here; any other error of the device ends the engine.
"""

from __future__ import annotations

import ctypes
import gc
import re

import torch

from octavo.errors import EngineDeadError

# Parts of torch's out-of-memory messages; "could not create a" is oneDNN's if it cannot allocate memory for its code or
# scratch.
_NO_MEMORY = (
    "DefaultCPUAllocator", "bad_alloc", "Cannot allocate memory", "out of memory", "could not create a",
    "CUBLAS_STATUS_ALLOC_FAILED",
)  # fmt: skip
_OF_DEVICE = re.compile(r"(CUDA|HIP|NCCL|CUBLAS|CUDNN)\w* error|Triton Error \[\w+\]|(CUBLAS|CUDNN)_STATUS_", re.I)
# Calls that CUDA refuses without running anything (CUDA Runtime API, "cudaError"): the next step may succeed.
_REFUSED = (
    "invalid argument", "invalid configuration argument", "too many resources requested for launch",
    "operation not supported", "invalid device function", "no kernel image is available", "invalid resource handle",
    "STATUS_INVALID_VALUE", "STATUS_NOT_SUPPORTED", "STATUS_BAD_PARAM",
)  # fmt: skip


def raise_typed(error: RuntimeError, device: torch.device) -> None:
    """Raise MemoryError or EngineDeadError if the step's `error` means that; return for any other error.

    After MemoryError the engine makes smaller steps. EngineDeadError ends the engine.
    """
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or any(word in text for word in _NO_MEMORY):
        free_memory(device)
        raise MemoryError(text.splitlines()[0]) from None
    if is_sticky(error):
        raise EngineDeadError(f"the device {device} cannot be used any more: {text.splitlines()[0]}") from error


def is_sticky(error: RuntimeError) -> bool:
    """Return True if every later call of this process on the device would fail too."""
    text = str(error)
    is_of_device = isinstance(error, torch.AcceleratorError) or _OF_DEVICE.search(text) is not None
    return is_of_device and not any(word in text for word in _REFUSED)


def free_memory(device: torch.device) -> None:
    """Free the failed step's memory; otherwise the smaller step would fail too."""
    gc.collect()  # reference cycles hold the failed step; an engine process has few objects to scan (process_side)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc keeps freed memory
        trim(0)
