"""Tensors on their way from files to a device, through two buffers of pinned host memory.

Owns: the buffers, and the thread that fills one of them while the other is copied. Does not: read files.
Invariants: a buffer is filled again only after its last copy is done. Values are converted on the host, so a device
holds no more than the tensor itself.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

STAGE_BYTES = 32 << 20  # of each buffer


class Stage:
    """The two buffers for one device."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._buffers = [torch.empty(STAGE_BYTES, dtype=torch.uint8, pin_memory=self._is_cuda) for _ in range(2)]
        self._copied: list[Any] = [None, None]  # an event after each buffer's last copy

    def fill(self, out: Tensor, read: Callable[[int, Tensor], object]) -> None:
        """Fill a tensor on the device; `read(first_row, rows)` writes consecutive rows to host memory, in a thread."""
        if not out.numel():
            return
        rows = max(1, STAGE_BYTES // max(1, out[:1].nbytes))
        pieces = [(first, out[first : first + rows]) for first in range(0, len(out), rows)]
        with ThreadPoolExecutor(1, "octavo-weights", torch.set_num_threads, (1,)) as reader:
            ready = reader.submit(self._read, 0, read, *pieces[0])
            for index, (_, piece) in enumerate(pieces):
                host = ready.result()
                if index + 1 < len(pieces):
                    ready = reader.submit(self._read, index + 1, read, *pieces[index + 1])
                piece.copy_(host, non_blocking=self._is_cuda)
                self._copied[index % 2] = self._mark()

    def _read(self, index: int, read: Callable[[int, Tensor], object], first: int, piece: Tensor) -> Tensor:
        if (copied := self._copied[index % 2]) is not None:
            copied.synchronize()
        if piece.nbytes > STAGE_BYTES:  # a row is larger than the buffer
            host = torch.empty(piece.shape, dtype=piece.dtype)
        else:
            host = self._buffers[index % 2][: piece.nbytes].view(piece.dtype).view(piece.shape)
        read(first, host)
        return host

    def _mark(self) -> Any:
        """Return an event after the copy, None if the copy is done."""
        if not self._is_cuda:
            return None
        cuda: Any = torch.cuda  # its events have no types
        event = cuda.Event()
        event.record()
        return event
