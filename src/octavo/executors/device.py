"""What an executor asks of its device beside tensors: memory, pinned memory, events, graphs.

Owns: Device and its forms for CPUs and CUDA. Does not: choose a device (loading.choose_device), or compute.
Invariants: everything runs on the device's current stream, in the order of the calls. A host computes during the call,
so it has no events and no graphs. Tests add an emulated accelerator to KINDS.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from octavo import machine


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
        self._graph_pool: Any = None

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
        if self._graph_pool is None:
            self._graph_pool = self._cuda.graph_pool_handle()
        return CudaGraph(self._cuda, self._graph_pool)

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


class CudaGraph:
    """A CUDA graph in the memory pool that all graphs of the device share."""

    def __init__(self, cuda: Any, pool: Any) -> None:
        self._cuda = cuda
        self._pool = pool
        self._graph = cuda.CUDAGraph()

    def capture(self, run: Callable[[], object]) -> None:
        """Call `run` on a stream of its own, which compiles kernels and allocates work spaces; then capture it."""
        stream = self._cuda.Stream()
        stream.wait_stream(self._cuda.current_stream())
        with self._cuda.stream(stream):
            run()
        self._cuda.current_stream().wait_stream(stream)
        with self._cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
            run()

    def replay(self) -> None:
        """Launch the graph."""
        self._graph.replay()


KINDS: dict[str, Callable[[torch.device], Device]] = {"cpu": HostDevice, "cuda": CudaDevice}


def device_of(torch_device: torch.device) -> Device:
    """Return the device that torch names so."""
    return KINDS[torch_device.type](torch_device)
