"""Apply masks of allowed ids to logits.

Owns: applying them, in place. Does not: compute them, or hold state.
Shapes: R rows that sample, M of them masked, V vocabulary; a mask is ceil(V / 32) words, bit i % 32 of word i // 32
is id i.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.sampling.columns import Ints
from octavo.sampling.upload import upload


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Masks of the ids that the rows at `rows` (ascending) may sample; other rows are free. `bits_MW` is int32."""

    rows: Ints
    bits_MW: NDArray[np.int32]

    def among(self, rows: Ints) -> TokenMasks | None:
        """Return the masks of a subset of the rows (ascending), re-indexed to it; None if it has none."""
        at = np.searchsorted(rows, self.rows)
        is_in = rows[np.minimum(at, len(rows) - 1)] == self.rows if len(rows) else np.zeros(len(at), dtype=np.bool_)
        return TokenMasks(at[is_in], self.bits_MW[is_in]) if is_in.any() else None

    def apply(self, logits_RV: Tensor) -> None:
        """Set the logits of ids that are not allowed to -inf, in place; those of allowed ids keep their bits, even NaN.

        The addends of eight ids at a time are looked up in a table: twenty times as fast as unpacking words.
        """
        device, (num_rows, size) = logits_RV.device, logits_RV.shape
        octets = upload(device, self.bits_MW.view(np.uint8).reshape(-1))[0]
        added_MV = _addends(device).index_select(0, octets.int()).view(len(self.rows), -1)[:, :size]
        if len(self.rows) == num_rows:
            logits_RV.add_(added_MV)
        else:
            logits_RV.index_add_(0, upload(device, self.rows)[0], added_MV)


@cache
def _addends(device: torch.device) -> Tensor:
    """Return, for each value of eight bits, the addends of its ids: 0 or -inf."""
    is_set = (torch.arange(256)[:, None] >> torch.arange(8)) & 1 > 0
    return torch.where(is_set, 0.0, float("-inf")).to(device)
