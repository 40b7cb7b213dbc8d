"""What an executor asks of its device beside tensors: memory, pinned memory, events, graphs.

Owns: Device and its forms for CPUs and CUDA; what a RuntimeError of a step means (too little memory, a device that is
lost, or a fault of the step alone). Does not: choose a device (loading.choose_device), compute, or retry.
Invariants: everything runs on the device's current stream, in the order of the calls. A host computes during the call,
so it has no events and no graphs. Tests add an emulated accelerator to KINDS.
"""

from __future__ import annotations

import ctypes
import gc
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from octavo import machine
from octavo.errors import EngineDeadError


class DeviceEvent(Protocol):
    """A place in the order of a device's work."""

    def wait(self) -> None:
        """Wait until the device has done all work before this place."""
        ...

    def seconds_since(self, earlier: Any) -> float:
        """Return the time between two events of one device, after waiting for both."""
        ...


class DeviceGraph(Protocol):
    """Work that is launched as a whole, on the tensors that it was captured with."""

    def capture(self, run: Callable[[], object]) -> None:
        """Call `run` once to prepare it, and once more to record its work. It must not wait for the device."""
        ...

    def replay(self) -> None:
        """Launch the recorded work."""
        ...


class Device(Protocol):
    """See the module. `torch_device` is torch's name of it; `is_host` is True if calls compute at once."""

    torch_device: torch.device
    is_host: bool

    def memory(self) -> tuple[int, int]:
        """Return the total and the free bytes."""
        ...

    def reset_peak(self) -> None:
        """Begin to measure the peak of allocated memory."""
        ...

    def peak_bytes(self) -> int:
        """Return the most bytes that tensors had at once since `reset_peak`; 0 if that is not measured."""
        ...

    def pinned(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return host memory from and to which copies do not wait."""
        ...

    def event(self) -> DeviceEvent:
        """Return an event at the end of the work so far."""
        ...

    def graph(self) -> DeviceGraph:
        """Return an empty graph. All graphs of a device share memory; capture those that need most first."""
        ...

    def wait(self) -> None:
        """Wait until all work is done."""
        ...


class HostDevice:
    """A CPU."""

    is_host = True

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    def memory(self) -> tuple[int, int]:
        """Return the bytes that this process may use, and those free of them."""
        return machine.usable_memory()

    def reset_peak(self) -> None:
        """Do nothing."""

    def peak_bytes(self) -> int:
        """Return 0."""
        return 0

    def pinned(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return plain memory."""
        return torch.empty(size, dtype=dtype)

    def event(self) -> DeviceEvent:
        """Raise AssertionError."""
        raise AssertionError("a host has no events: calls compute at once")

    def graph(self) -> DeviceGraph:
        """Raise AssertionError."""
        raise AssertionError("a host has no graphs")

    def wait(self) -> None:
        """Do nothing."""


class CudaDevice:
    """A CUDA device."""

    is_host = False

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self._cuda: Any = torch.cuda  # parts of it have no types
        self._pool: Callable[[], _GraphPool | None] = lambda: None
        self._stream: Any = None  # of all captures: cuBLAS keeps a work space, 32 MiB on sm_90, for each stream it saw

    def memory(self) -> tuple[int, int]:
        """Return the device's bytes, and those that no process uses."""
        free, total = self._cuda.mem_get_info(self.torch_device)
        return int(total), int(free)

    def reset_peak(self) -> None:
        """Begin to measure the peak of allocated memory."""
        self._cuda.reset_peak_memory_stats(self.torch_device)

    def peak_bytes(self) -> int:
        """Return the most bytes that tensors had at once since `reset_peak`."""
        return int(self._cuda.max_memory_allocated(self.torch_device))

    def pinned(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return page-locked memory; torch reuses it only after all copies of it are done."""
        return torch.empty(size, dtype=dtype, pin_memory=True)

    def event(self) -> DeviceEvent:
        """Return a recorded event."""
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return CudaEvent(event)

    def graph(self) -> DeviceGraph:
        """Return an empty graph."""
        pool = self._pool()
        if pool is None:
            pool = _GraphPool(self._cuda.graph_pool_handle())
            self._pool = weakref.ref(pool)
        self._stream = self._stream or self._cuda.Stream()
        return CudaGraph(self._cuda, pool, self._stream)

    def wait(self) -> None:
        """Wait until all work is done."""
        self._cuda.synchronize(self.torch_device)


class CudaEvent:
    """A recorded event of CUDA."""

    __slots__ = ("event",)

    def __init__(self, event: Any) -> None:
        self.event = event

    def wait(self) -> None:
        """Wait for it."""
        self.event.synchronize()

    def seconds_since(self, earlier: CudaEvent) -> float:
        """Return the seconds between the two events."""
        earlier.wait()
        self.wait()
        return float(earlier.event.elapsed_time(self.event)) / 1000.0


@dataclass(slots=True, weakref_slot=True)
class _GraphPool:
    """Memory of graphs. Its graphs keep it: after the last one, torch refuses captures into it (pytorch#198794)."""

    handle: Any


class CudaGraph:
    """A CUDA graph in the memory pool that all graphs of the device share."""

    def __init__(self, cuda: Any, pool: _GraphPool, stream: Any) -> None:
        self._cuda = cuda
        self._pool = pool
        self._stream = stream
        self._graph = cuda.CUDAGraph()

    def capture(self, run: Callable[[], object]) -> None:
        """Call `run` on the captures' stream, which compiles kernels and allocates work spaces; then capture it."""
        stream, how = self._stream, {"pool": self._pool.handle, "capture_error_mode": "thread_local"}
        stream.wait_stream(self._cuda.current_stream())
        with self._cuda.stream(stream):
            run()
        self._cuda.current_stream().wait_stream(stream)
        with self._cuda.graph(self._graph, stream=stream, **how):
            run()

    def replay(self) -> None:
        """Launch the graph."""
        self._graph.replay()


KINDS: dict[str, Callable[[torch.device], Device]] = {"cpu": HostDevice, "cuda": CudaDevice}


def device_of(torch_device: torch.device) -> Device:
    """Return the device that torch names so."""
    return KINDS[torch_device.type](torch_device)


# Parts of torch's out-of-memory messages; "could not create a" is oneDNN's if it cannot allocate memory for its code or
# scratch.
_NO_MEMORY = (
    "DefaultCPUAllocator", "bad_alloc", "Cannot allocate memory", "out of memory", "could not create a",
    "CUBLAS_STATUS_ALLOC_FAILED",
)  # fmt: skip
_OF_DEVICE = re.compile(r"(CUDA|HIP|NCCL|CUBLAS|CUDNN)\w* error|Triton Error \[\w+\]|(CUBLAS|CUDNN)_STATUS_", re.I)
_PLACE = re.compile(r"at \d+:\d+:")
# Calls that CUDA refuses without running anything (CUDA Runtime API, "cudaError"): the next step may succeed.
_REFUSED = (
    "invalid argument", "invalid configuration argument", "too many resources requested for launch",
    "operation not supported", "invalid device function", "no kernel image is available", "invalid resource handle",
    "STATUS_INVALID_VALUE", "STATUS_NOT_SUPPORTED", "STATUS_BAD_PARAM",
)  # fmt: skip


def raise_typed(error: RuntimeError, device: torch.device) -> None:
    """Raise MemoryError or EngineDeadError if the step's `error` means that; return for any other error.

    torch has one exception for errors of a device, and Triton raises RuntimeError. After MemoryError the engine makes
    smaller steps. EngineDeadError ends the engine; its supervisor starts another, and the ledger resumes the requests.
    """
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or any(word in text for word in _NO_MEMORY):
        free_memory(device)
        raise MemoryError(text.splitlines()[0]) from None
    if is_sticky(error):
        raise EngineDeadError(f"the device {device} cannot be used any more: {text.splitlines()[0]}") from error


def reason_of(error: BaseException) -> str:
    """Return the error's type and its first line; of a compiler that first shows where, the last line."""
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[-1 if _PLACE.fullmatch(lines[0]) else 0].strip()}"


def is_sticky(error: RuntimeError) -> bool:
    """Return True if every later call of this process on the device would fail too, because the context is lost.

    The errors that CUDA reports without that are named in _REFUSED; any other error of the device counts as sticky.
    """
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
