"""The copies of a step between host and device: one up before it computes, one down behind it.

Owns: the pinned memory of steps in flight, and packing. Does not: know what the columns mean.
Invariants: a pair of buffers belongs to one step until its results were fetched, so no copy under way is overwritten.
As many pairs exist as steps were in flight at once. The host waits only in `Download.fetch`, for this step alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.executors.device import Device, DeviceEvent

LEAST_WORDS = 4096


class StepBuffers:
    """Pairs of pinned buffers for the steps of one device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._free: list[BufferPair] = []

    def take(self) -> BufferPair:
        """Return a pair that no step uses."""
        return self._free.pop() if self._free else BufferPair(self)

    def give_back(self, pair: BufferPair) -> None:
        """Free a pair whose step has no copy under way."""
        self._free.append(pair)


class BufferPair:
    """The pinned memory of one step: int32 words up, bytes down."""

    def __init__(self, owner: StepBuffers) -> None:
        self._owner = owner
        self._words: Tensor | None = None
        self._bytes: Tensor | None = None

    def send(self, columns: Sequence[NDArray[Any]], target: Tensor | None = None) -> Tensor:
        """Start to copy columns of integers to the device as int32, one after the other; return the device's copy.

        `target` is where they are copied to, if not to new memory.
        """
        sizes = [rounded_words(column) for column in columns]
        if self._words is None or len(self._words) < sum(sizes):
            self._words = self._owner.device.pinned(max(LEAST_WORDS, 2 * sum(sizes)), torch.int32)
        words, at = self._words.numpy(), 0
        for column, size in zip(columns, sizes, strict=True):
            words[at : at + column.size] = column.reshape(-1)
            at += size
        if target is None:
            target = torch.empty(at, dtype=torch.int32, device=self._owner.device.torch_device)
        return target[:at].copy_(self._words[:at], non_blocking=True)

    def start_download(self, tensors: Sequence[Tensor]) -> Download:
        """Start to copy tensors to the host, behind the work that computes them."""
        order = sorted(range(len(tensors)), key=lambda index: -tensors[index].itemsize)  # keeps each one aligned
        flat = [tensors[index].contiguous().view(-1).view(torch.uint8) for index in order if tensors[index].numel()]
        packed = torch.cat(flat) if len(flat) > 1 else (flat[0] if flat else None)
        size = 0 if packed is None else len(packed)
        if self._bytes is None or len(self._bytes) < size:
            self._bytes = self._owner.device.pinned(max(4 * LEAST_WORDS, 2 * size), torch.uint8)
        if packed is not None:
            self._bytes[:size].copy_(packed, non_blocking=True)
        parts: list[Tensor] = list(tensors)
        at = 0
        for index in order:
            like = tensors[index]
            num_bytes = like.numel() * like.itemsize
            parts[index] = self._bytes[at : at + num_bytes].view(like.dtype).view(like.shape)
            at += num_bytes
        return Download(self, parts, self._owner.device.event())

    def release(self) -> None:
        """Free the pair for another step. The tensors that its download returned are invalid from now on."""
        self._owner.give_back(self)


class Download:
    """Results on their way to the host."""

    def __init__(self, pair: BufferPair, parts: list[Tensor], event: DeviceEvent) -> None:
        self._pair = pair
        self._parts = parts
        self._event = event

    def fetch(self) -> list[Tensor]:
        """Wait for the results; return them as CPU tensors, which are valid until `release`."""
        self._event.wait()
        return self._parts

    def release(self) -> None:
        """Free the buffers."""
        self._pair.release()


def rounded_words(column: NDArray[Any]) -> int:
    """Return the words that a column takes: kernels are compiled anew for addresses that 16 bytes do not divide."""
    return -(-column.size // 4) * 4


def split_words(words: Tensor, columns: Sequence[NDArray[Any]]) -> list[Tensor]:
    """Return the columns that were sent as views of the device's copy, in their shapes."""
    parts = torch.split(words, [rounded_words(column) for column in columns])
    return [part[: column.size].view(column.shape) for part, column in zip(parts, columns, strict=True)]
