"""Copy host columns to a device without waiting for it.

Owns: how columns are copied. Does not: copy on a CPU, where the tensor shares the array's memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(device: torch.device, *columns: NDArray[Any]) -> list[Tensor]:
    """Return each column as a tensor on `device`; columns of one call share a dtype and one transfer.

    The pinned staging memory comes from torch's caching host allocator, which reuses it only after the
    copy is done; so several steps may be in flight.
    """
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(column)) for column in columns]
    sizes = [column.size for column in columns]
    staging = torch.empty(sum(sizes), dtype=torch.from_numpy(columns[0]).dtype, pin_memory=True)
    np.concatenate([column.reshape(-1) for column in columns], out=staging.numpy())
    parts = torch.split(staging.to(device, non_blocking=True), sizes)
    return [part.view(column.shape) for part, column in zip(parts, columns, strict=True)]
