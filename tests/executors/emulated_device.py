"""An emulated accelerator on a CPU-only torch: real numbers on a device of its own, and a record of what it did.

Tensors on "emu" hold a CPU tensor, and each operation runs on that. Counted by phase: launches, copies in both
directions, and everything that would make the host wait. Tensors of two devices in one operation raise, as on CUDA.
A copy to pinned memory arrives only when the host waits for an event behind it (until then the memory has garbage),
and pinned memory that is written before its copy is done is found at the next wait. A tape stands for a CUDA graph.
"""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch.utils import _pytree as pytree
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.executors import device, loading
from octavo.nn import staging
from octavo.ops.triton import available

NAME = "emu"
aten = torch.ops.aten
# Operations whose result has a shape or a value that the host must know.
ASKS = {
    aten._local_scalar_dense.default, aten.item.default, aten.nonzero.default, aten.is_nonzero.default,
    aten.equal.default, aten.masked_select.default, aten._unique2.default, aten.unique_dim.default,
    aten.repeat_interleave.Tensor,
}  # fmt: skip
INDEXED = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
FREE = {  # no kernel: views, and allocations
    "alias", "contiguous", "detach", "empty", "empty_like", "empty_strided", "expand", "flatten", "lift_fresh",
    "new_empty", "new_empty_strided", "reshape", "_reshape_alias", "split", "split_with_sizes", "squeeze", "to",
    "transpose", "unbind", "unsqueeze", "_unsafe_view", "view", "is_same_size", "resize_", "set_",
}  # fmt: skip
GARBAGE = 0xA5


class EmulatedTensor(torch.Tensor):
    """A tensor on the device; `held` has its numbers."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> EmulatedTensor:
        made: EmulatedTensor = torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=torch.device(NAME, 0),
        )  # fmt: skip
        made.held = held
        return made

    def __repr__(self) -> str:
        return f"EmulatedTensor({tuple(self.shape)}, {self.dtype})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} on the emulated device outside `running`")


@dataclass(slots=True)
class Happened:
    """What happened in one phase."""

    launches: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    uploads: int = 0
    downloads: int = 0


@dataclass(slots=True)
class _Upload:
    at: int
    source: torch.Tensor
    content: torch.Tensor


@dataclass(slots=True)
class _Download:
    at: int
    target: torch.Tensor
    content: torch.Tensor


class Emulator(TorchDispatchMode):
    """The mode in which the device runs. `clock` counts its launches, and `waited_until` those the host waited for.

    Triton's kernels are interpreted, which is slow; without `has_kernels` their twins in torch run.
    """

    def __init__(self, has_kernels: bool = True) -> None:
        super().__init__()
        self.has_kernels = has_kernels
        self.phase = "other"
        self.phases: dict[str, Happened] = {}
        self.clock = 0
        self.waited_until = 0
        self.tape: list[tuple[Any, Any, Any, Any]] | None = None
        self._pinned: set[int] = set()
        self._kept: list[torch.Tensor] = []
        self._uploads: list[_Upload] = []
        self._downloads: list[_Download] = []

    @property
    def now(self) -> Happened:
        return self.phases.setdefault(self.phase, Happened())

    def clear(self) -> None:
        """Forget what was counted."""
        self.phases = {}

    def wait_until(self, at: int) -> None:
        """Do what is done once the device is at `at`."""
        self.waited_until = max(self.waited_until, at)
        for upload in [one for one in self._uploads if one.at <= at]:
            self._uploads.remove(upload)
            assert torch.equal(upload.source, upload.content), "pinned memory was written before its copy was done"
        for download in [one for one in self._downloads if one.at <= at]:
            self._downloads.remove(download)
            download.target.copy_(download.content)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Keep host memory as pinned memory."""
        self._kept.append(tensor)
        self._pinned.add(tensor.untyped_storage().data_ptr())
        return tensor

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def _wait(self, kind: str) -> None:
        """Record that the host waits for all work."""
        assert self.tape is None, f"the host waits while a graph is captured: {kind}"
        frames = [one for one in traceback.extract_stack() if "/octavo/" in one.filename]
        place = f"{frames[-1].filename.split('/octavo/')[-1]}:{frames[-1].lineno}" if frames else "?"
        self.now.waits[f"{kind} at {place}"] += 1
        self.wait_until(self.clock)

    def _launch(self, name: str) -> None:
        self.now.launches[name] += 1
        self.clock += 1

    def _upload(self, source: torch.Tensor, is_async: bool, name: str) -> None:
        self.now.uploads += 1
        assert self.tape is None, f"a graph would copy from where the host's memory was when it was captured: {name}"
        if self._is_pinned(source) and is_async:
            self._uploads.append(_Upload(self.clock, source, source.clone()))
        else:
            self._wait(f"upload from pageable memory: {name}")

    def _copy(self, target: torch.Tensor, source: torch.Tensor, is_async: bool) -> torch.Tensor:
        if isinstance(target, EmulatedTensor):
            self._launch("copy to the device")
            self._upload(source, is_async, "copy_")
            target.held.copy_(source)
            return target
        assert isinstance(source, EmulatedTensor)
        self._launch("copy to the host")
        self.now.downloads += 1
        if self._is_pinned(target) and is_async:
            content = torch.empty_like(target).copy_(source.held)
            self._downloads.append(_Download(self.clock, target, content))
            target.view(torch.uint8).fill_(GARBAGE)
        else:
            self._wait("download: copy_")
            target.copy_(source.held)
        return target

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        leaves = pytree.arg_tree_leaves(*args, **kwargs)
        own = [leaf for leaf in leaves if isinstance(leaf, EmulatedTensor)]
        hosts = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not isinstance(leaf, EmulatedTensor)]
        device_name = kwargs.get("device")
        goes_here = _is_here(device_name) if device_name is not None else bool(own)
        if kwargs.pop("pin_memory", None):
            return self.pin(func(*args, **kwargs))
        if not own and not goes_here:
            return func(*args, **kwargs)
        if func is aten.copy_.default and own and hosts:
            return self._copy(args[0], args[1], bool(len(args) > 2 and args[2]))
        return self._run(func, (args, kwargs), own, hosts)

    def _run(self, func: Any, call: tuple[Any, Any], own: list[EmulatedTensor], hosts: list[torch.Tensor]) -> Any:
        args, kwargs = call
        name = str(func)
        stays = "device" not in kwargs or kwargs["device"] is None or _is_here(kwargs["device"])
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        if own and any(host.dim() for host in hosts):
            raise RuntimeError(f"{name}: tensors on the device and on the host")
        if own and (func in ASKS or (func in INDEXED and any(map(_is_mask, pytree.arg_tree_leaves(args[1]))))):
            self._wait(f"asks for a value or a shape: {name}")
        if own and not stays:
            self.now.downloads += 1
            self._wait(f"download: {name}")
        if not own and hosts:
            is_async = bool(kwargs.get("non_blocking"))
            for host in hosts:
                self._upload(host, is_async, name)
        held_args, held_kwargs = pytree.tree_map(_held, (args, kwargs))
        out = func(*held_args, **held_kwargs)
        if not func.is_view and name.split(".")[1] not in FREE:
            self._launch(name)
        if self.tape is not None and not func.is_view:
            self.tape.append((func, held_args, held_kwargs, out))
        if not stays or (func in ASKS and not isinstance(out, torch.Tensor)):
            return out
        back = {id(one.held): one for one in own}
        return pytree.tree_map(lambda leaf: back[id(leaf)] if id(leaf) in back else _made(leaf), out)


def _is_here(name: Any) -> bool:
    return torch.device(name).type == NAME


def _is_mask(leaf: Any) -> bool:
    return isinstance(leaf, EmulatedTensor) and leaf.dtype is torch.bool and leaf.dim() > 0


def _held(leaf: Any) -> Any:
    return leaf.held if isinstance(leaf, EmulatedTensor) else leaf


def _made(leaf: Any) -> Any:
    return EmulatedTensor(leaf) if isinstance(leaf, torch.Tensor) else leaf


class EmulatedDevice:
    """See executors.device.Device."""

    is_host = False

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    def memory(self) -> tuple[int, int]:
        return 8 << 30, 6 << 30

    def reset_peak(self) -> None:
        pass

    def peak_bytes(self) -> int:
        return 0

    def pinned(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return _emulator().pin(torch.empty(size, dtype=dtype))

    def event(self) -> EmulatedEvent:
        return EmulatedEvent(_emulator())

    def graph(self) -> Tape:
        return Tape(_emulator())

    def wait(self) -> None:
        _emulator()._wait("for everything")


class EmulatedEvent:
    """See executors.device.DeviceEvent. Only the host's own time is measured."""

    def __init__(self, emulator: Emulator) -> None:
        assert emulator.tape is None, "an event with a time is recorded while a graph is captured"
        self._emulator = emulator
        self.at, self._time = emulator.clock, time.perf_counter()

    def wait(self) -> None:
        self._emulator.wait_until(self.at)

    def seconds_since(self, earlier: EmulatedEvent) -> float:
        self.wait()
        return self._time - earlier._time


class Tape:
    """See executors.device.DeviceGraph: operations with their tensors and numbers, as they were when captured."""

    def __init__(self, emulator: Emulator) -> None:
        self._emulator = emulator
        self._steps: list[tuple[Any, Any, Any, Any]] = []

    def capture(self, run: Callable[[], object]) -> None:
        run()
        self._emulator.tape = self._steps
        try:
            run()
        finally:
            self._emulator.tape = None

    def replay(self) -> None:
        self._emulator._launch("graph")
        with torch.utils._python_dispatch._disable_current_modes():
            for func, args, kwargs, out in self._steps:
                again = func(*args, **kwargs)
                for old, new in zip(pytree.tree_leaves(out), pytree.tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and new is not old:
                        old.copy_(new)  # a graph writes where it wrote when it was captured


_running: list[Emulator] = []


def _emulator() -> Emulator:
    assert _running, "the emulated device is used outside `running`"
    return _running[-1]


@contextmanager
def running(emulator: Emulator, phase: str = "other") -> Iterator[Emulator]:
    """Run the device's operations in this phase."""
    before, emulator.phase = emulator.phase, phase
    _running.append(emulator)
    # wrapper subclasses and views of inference mode do not mix
    is_plain = patch.multiple(torch.inference_mode, __enter__=lambda self: None, __exit__=lambda self, *_: None)
    has_kernels = emulator.has_kernels and available.is_available()
    try:
        with is_plain, patch.object(available, "is_available", lambda: has_kernels), torch.no_grad(), emulator:
            yield emulator
    finally:
        _running.pop()
        emulator.phase = before


class OnEmulated:
    """An executor whose calls run on the device, each in a phase of its name."""

    def __init__(self, make: Callable[[], Any], has_kernels: bool = False) -> None:
        self.emulator = Emulator(has_kernels)
        register()
        with patch.object(loading, "choose_device", lambda name: torch.device(NAME)), running(self.emulator):
            self.real = make()

    def _call(self, name: str, *args: Any) -> Any:
        with running(self.emulator, name):
            return getattr(self.real, name)(*args)

    def open(self, spec: Any) -> Any:
        return self._call("open", spec)

    def submit(self, plan: Any) -> Any:
        return self._call("submit", plan)

    def supply(self, ticket: Any, masks: Any) -> None:
        self._call("supply", ticket, masks)

    def collect(self, ticket: Any) -> Any:
        return self._call("collect", ticket)

    def close(self) -> None:
        self.real.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def register() -> None:
    """Name torch's spare device, and tell executors about it. Idempotent."""
    if NAME not in device.KINDS:
        backend_registration._setup_privateuseone_for_python_backend(NAME)
        device.KINDS[NAME] = EmulatedDevice
        staging.WAITS[NAME] = lambda: EmulatedEvent(_emulator()).wait


@contextmanager
def outside(executor: Any) -> Iterator[None]:
    """Use an executor's tensors from a test, wherever they are."""
    if not isinstance(executor, OnEmulated):
        yield
        return
    with running(executor.emulator):
        yield
