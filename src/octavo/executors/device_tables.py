"""The known ids and block tables of all slots on a device, in one int32 tensor that a step edits by one scatter.

Owns: that tensor, and the edits that no step has sent yet. Does not: decide about edits (slots.py does, and has the
host's tables). Invariants: of several edits of one place the last one counts. Table entries are sent as they are in the
host's tables when the step is sent. Word `spare` is written by padded rows and means nothing.
Shapes: S slots, W = max_model_len + 1 positions, M blocks of the longest table.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.sampling.columns import NO_IDS, Ints

MAX_WORDS = 1 << 31  # places are int32


class DeviceTables:
    """See the module. `tables` are the host's."""

    def __init__(self, ids_shape: tuple[int, int], tables: Sequence[Ints], device: torch.device) -> None:
        sizes = [ids_shape[0] * ids_shape[1], *(table.size for table in tables)]
        self._first = np.cumsum([0, *sizes]).tolist()
        self.spare = int(self._first[-1])
        assert self.spare < MAX_WORDS, "the slots' ids and tables have more words than an int32 can number"
        self._host_tables = tables
        self.words = torch.zeros(self.spare + 1, dtype=torch.int32, device=device)
        parts = torch.split(self.words[: self.spare], sizes)
        self.ids_SW: Tensor = parts[0].view(ids_shape)
        self.tables = [part.view(table.shape) for part, table in zip(parts[1:], tables, strict=True)]
        for own_SM, table_SM in zip(self.tables, tables, strict=True):
            own_SM.fill_(int(table_SM[0, 0]))  # the null block
        self._places: list[Ints] = []
        self._values: list[Ints] = []

    def put_ids(self, places: Ints, ids: Ints) -> None:
        """Write ids at flat places of `ids_SW`."""
        self._places.append(places)
        self._values.append(ids)

    def touch(self, group: int, places: Ints) -> None:
        """Send these flat places of a group's host table, with what they have when the step is sent."""
        self._places.append(places + self._first[group + 1])
        self._values.append(NO_IDS)

    def take_edits(self) -> NDArray[np.int32]:
        """Return the pending edits, [2, edits]: places and values, each place once. They are no longer pending."""
        if not self._places:
            return np.zeros((2, 0), dtype=np.int32)
        values = [
            given if len(given) == len(places) else self._current(places)
            for places, given in zip(self._places, self._values, strict=True)
        ]
        places, last = np.concatenate(self._places), np.concatenate(values)
        self._places, self._values = [], []
        found, first = np.unique(places[::-1], return_index=True)
        return np.stack((found, last[::-1][first])).astype(np.int32)

    def _current(self, places: Ints) -> Ints:
        """Return what the host's tables have at places of one group."""
        group = int(np.searchsorted(self._first, places[0], side="right")) - 2
        current: Ints = self._host_tables[group].reshape(-1)[places - self._first[group + 1]]
        return current

    def apply(self, edits_CE: Tensor) -> None:
        """Write edits, which are on the device."""
        if edits_CE.shape[1]:
            self.words.index_copy_(0, edits_CE[0].long(), edits_CE[1])
