"""Ban ids from sampling: bad words, stop ids below min_tokens, all that are not in allowed_token_ids.

Owns: the masks, from columns prepared when a slot was filled. Does not: hold state; the end of a context is read
from the device's ids, so a last id that only the device knows is included.
Each ban edits only the rows that have it. Shapes: R rows, V vocabulary, B entries (row, id), L longest prefix.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.sampling.columns import Ints, SamplingColumns, SamplingRows, Words
from octavo.sampling.upload import upload


@dataclass(frozen=True, slots=True)
class Bans:
    """The bans of all slots. `ids_SW` is the executor's buffer of known ids."""

    columns: SamplingColumns
    ids_SW: Tensor

    def apply(self, logits_RV: Tensor, rows: SamplingRows) -> None:
        """Set the logits of banned ids to -inf, in place."""
        self._ban_words(logits_RV, rows)
        self._bar_stops(logits_RV, rows)
        self._keep_allowed(logits_RV, rows)

    def _ban_words(self, logits_RV: Tensor, rows: SamplingRows) -> None:
        """Ban the last id of each word whose other ids end the row's context."""
        chosen = np.flatnonzero(self.columns.has_words[rows.slots])
        if not len(chosen):
            return
        words = [self.columns.words[slot] for slot in rows.slots[chosen].tolist()]
        row_B = np.repeat(chosen, [len(one.last_ids) for one in words])
        size_B = np.concatenate([one.prefix_sizes for one in words])
        widest = max(one.prefixes.shape[1] for one in words)
        prefix_BL = np.concatenate([_widened(one, widest) for one in words])
        fits_B = size_B <= rows.positions[row_B]
        row_B, last_B, prefix_BL = (
            row_B[fits_B],
            np.concatenate([one.last_ids for one in words])[fits_B],
            prefix_BL[fits_B],
        )
        ends_B1 = rows.positions[row_B][:, None]
        at_BL = np.maximum(ends_B1 - widest + np.arange(widest), 0) + rows.slots[row_B][:, None] * self.ids_SW.shape[1]
        row, last, prefix, at = upload(logits_RV.device, row_B, last_B, prefix_BL, at_BL)
        is_met_B = ((self.ids_SW.view(-1)[at] == prefix) | (prefix < 0)).all(dim=1)
        # added, so that a word that does not match keeps the bans of other words
        logits_RV.index_put_((row, last), torch.where(is_met_B, float("-inf"), 0.0), accumulate=True)

    def _bar_stops(self, logits_RV: Tensor, rows: SamplingRows) -> None:
        chosen = np.flatnonzero(self.columns.bars(rows))
        if len(chosen):
            row_B, id_B = _entries(logits_RV, rows, chosen, self.columns.barred)
            logits_RV.index_put_((row_B, id_B), logits_RV.new_full((), float("-inf")))

    def _keep_allowed(self, logits_RV: Tensor, rows: SamplingRows) -> None:
        chosen = np.flatnonzero(self.columns.has_allowed[rows.slots])
        if len(chosen):
            row_B, id_B = _entries(logits_RV, rows, chosen, self.columns.allowed)
            kept_B = logits_RV[row_B, id_B]
            logits_RV.index_fill_(0, upload(logits_RV.device, chosen)[0], float("-inf"))
            logits_RV[row_B, id_B] = kept_B


def _widened(words: Words, width: int) -> Ints:
    """Return the prefixes, right-aligned in `width` columns and padded with -1."""
    before = width - words.prefixes.shape[1]
    return np.pad(words.prefixes, ((0, 0), (before, 0)), constant_values=-1)


def _entries(logits_RV: Tensor, rows: SamplingRows, chosen: Ints, ids: dict[int, Ints]) -> list[Tensor]:
    """Return (row, id) of all ids of the chosen rows' slots."""
    parts = [ids[slot] for slot in rows.slots[chosen].tolist()]
    return upload(logits_RV.device, np.repeat(chosen, [len(part) for part in parts]), np.concatenate(parts))
