"""Tensors on their way from files to a device, through two buffers of pinned host memory.

Owns: the buffers, and the thread that fills one of them while the other is copied. Does not: read files, or convert.
Invariants: a buffer is filled again only after its last copy is done. Floats are converted on the host, so a device
holds no more of them than the tensor itself; codes are sent as they are, a piece at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

STAGE_BYTES = 32 << 20  # of each buffer at most, unless one row is larger
ALIGNMENT = 16
Wait = Callable[[], object]


def _after_cuda() -> Wait:
    """Return what waits for the device's work so far."""
    cuda: Any = torch.cuda  # its events have no types
    event = cuda.Event()
    event.record()
    wait: Wait = event.synchronize
    return wait


# Kinds of devices that copy pinned memory while the host goes on, and what waits for a copy. Tests add theirs.
WAITS: dict[str, Callable[[], Wait]] = {"cuda": _after_cuda}


class Stage:
    """The two buffers for one device. On other devices than those of WAITS, a copy is done when it returns."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._mark = WAITS.get(device.type)
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]
        self._copied: list[Wait | None] = [None, None]  # what waits for each buffer's last copy
        self._turn = 0

    def send(self, *arrays: NDArray[Any]) -> list[Tensor]:
        """Start to copy arrays to the device, in one copy; return them there. The host may change them at once."""
        starts = np.cumsum([0, *(-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays)]).tolist()
        turn, host = self._take(starts[-1])
        self._wait(turn)
        for start, array in zip(starts[:-1], arrays, strict=True):
            host.numpy()[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        moved = torch.empty(starts[-1], dtype=torch.uint8, device=self.device)
        self._copy(turn, host, moved)
        return [
            moved[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
            for start, array in zip(starts[:-1], arrays, strict=True)
        ]

    def fill(self, out: Tensor, read: Callable[[int, Tensor], object]) -> None:
        """Fill a tensor on the device; `read(first_row, rows)` writes consecutive rows to host memory, in a thread."""
        if not out.numel():
            return
        rows = max(1, STAGE_BYTES // max(1, out[:1].nbytes))
        pieces = [(first, out[first : first + rows]) for first in range(0, len(out), rows)]
        with ThreadPoolExecutor(1, "octavo-weights", torch.set_num_threads, (1,)) as reader:
            ready = self._submit(reader, read, *pieces[0])
            for index, (_, piece) in enumerate(pieces):
                turn, host = ready.result()
                if index + 1 < len(pieces):
                    ready = self._submit(reader, read, *pieces[index + 1])
                self._copy(turn, host, piece)

    def _submit(
        self, reader: Executor, read: Callable[[int, Tensor], object], first: int, piece: Tensor
    ) -> Future[tuple[int, Tensor]]:
        """Let a thread read a piece into the next buffer. This thread allocates it and waits for its last copy, since
        CUDA takes another thread's device to be the first one, and would open a context there."""
        turn, host = self._take(piece.nbytes)
        host = host.view(piece.dtype).view(piece.shape)
        self._wait(turn)

        def run() -> tuple[int, Tensor]:
            read(first, host)
            return turn, host

        return reader.submit(run)

    def _take(self, num_bytes: int) -> tuple[int, Tensor]:
        """Return the next buffer's number and its first bytes, which may be under way yet."""
        turn, self._turn = self._turn, 1 - self._turn
        if len(self._buffers[turn]) < num_bytes:
            size = max(num_bytes, min(STAGE_BYTES, 2 * num_bytes))
            self._buffers[turn] = torch.empty(size, dtype=torch.uint8, pin_memory=self._mark is not None)
        return turn, self._buffers[turn][:num_bytes]

    def _wait(self, turn: int) -> None:
        if (wait := self._copied[turn]) is not None:
            wait()

    def _copy(self, turn: int, host: Tensor, target: Tensor) -> None:
        target.copy_(host, non_blocking=self._mark is not None)
        self._copied[turn] = None if self._mark is None else self._mark()
