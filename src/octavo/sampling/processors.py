"""Changes to logits before selection: penalties, then bias, then the bar on stopping early.

Owns: the counts of generated tokens, kept on the device for the slots that need them, and the edits.
Does not: select. Every edit touches only the rows that asked for it, so no other row changes by a bit.
Shapes: R rows that sample, V vocabulary, P rows with a penalty, C longest context of these.
Invariants: counts[place[slot], id] = times that id was generated in the slot's sequence.
Definitions: repetition as in CTRL (Keskar et al. 2019), over prompt and outputs; presence and frequency
as in the OpenAI API, over outputs.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo.sampling.columns import Ints, SamplingColumns, SamplingRows
from octavo.sampling.upload import upload


class LogitsProcessors:
    """Edits raw logits in place. `ids_SW` is the executor's buffer of known ids, one row per slot."""

    def __init__(self, columns: SamplingColumns, ids_SW: Tensor, vocab_size: int) -> None:
        self._columns = columns
        self._ids_SW = ids_SW
        self._vocab_size = vocab_size
        self._counts_PV = torch.zeros((0, vocab_size), dtype=torch.int32, device=ids_SW.device)
        self._place = np.full(len(columns.temperature), -1, dtype=np.int64)
        self._free: list[int] = []

    def admit(self, slot: int, output_ids: Ints) -> None:
        """Rebuild the slot's counts from what it has generated so far; none are kept without a penalty."""
        self.release(slot)
        if not self._columns.has_penalty(np.asarray([slot]))[0]:
            return
        if not self._free:
            held = self._counts_PV.shape[0]
            more = max(4, held)
            self._counts_PV = torch.cat([self._counts_PV, self._counts_PV.new_zeros((more, self._vocab_size))])
            self._free.extend(range(held + more - 1, held - 1, -1))
        place = self._free.pop()
        self._place[slot] = place
        counts_V = np.bincount(output_ids, minlength=self._vocab_size).astype(np.int32)
        self._counts_PV[place].copy_(torch.from_numpy(counts_V))

    def release(self, slot: int) -> None:
        """Forget a slot's counts. Idempotent."""
        if self._place[slot] >= 0:
            self._free.append(int(self._place[slot]))
            self._place[slot] = -1

    def needs(self, rows: SamplingRows) -> bool:
        """Whether any row asks for an edit."""
        columns = self._columns
        return bool(
            (self._place[rows.slots] >= 0).any() or columns.has_bias[rows.slots].any() or columns.bars(rows).any()
        )

    def apply(self, logits_RV: Tensor, rows: SamplingRows) -> None:
        """Edit the logits of the rows that ask for it, in place."""
        self._penalise(logits_RV, rows)
        self._bias(logits_RV, rows)
        self._bar(logits_RV, rows)

    def apply_to_beams(self, log_probs_RV: Tensor, rows: SamplingRows) -> None:
        """Edit the log-probabilities of beams in place, in the order of transformers: biases come first."""
        self._bias(log_probs_RV, rows)
        self._penalise(log_probs_RV, rows)
        self._bar(log_probs_RV, rows)

    def record(self, sampled_R: Tensor, rows: SamplingRows) -> None:
        """Count the ids just sampled."""
        counted = np.flatnonzero(self._place[rows.slots] >= 0)
        if len(counted):
            chosen, places = upload(sampled_R.device, counted, self._place[rows.slots[counted]])
            ids = sampled_R[chosen].long()
            self._counts_PV.index_put_((places, ids), self._counts_PV.new_ones(()), accumulate=True)

    def append(self, slots: Ints, token_ids: Ints) -> None:
        """Count ids that the host chose, each one more output of its slot. The caller writes them to the id buffer."""
        counted = np.flatnonzero(self._place[slots] >= 0)
        if len(counted):
            places, ids = upload(self._counts_PV.device, self._place[slots[counted]], token_ids[counted])
            self._counts_PV.index_put_((places, ids), self._counts_PV.new_ones(()), accumulate=True)

    def _penalise(self, logits_RV: Tensor, rows: SamplingRows) -> None:
        columns = self._columns
        chosen = np.flatnonzero(self._place[rows.slots] >= 0)
        if not len(chosen):
            return
        slots, lengths = rows.slots[chosen], rows.positions[chosen]
        # Only ids in the sequence can change: work is O(C), not O(V). A shorter row repeats its last position, and
        # an id that occurs twice is written twice with the same value.
        where_PC = (
            np.minimum(np.arange(lengths.max())[None], lengths[:, None] - 1) + slots[:, None] * self._ids_SW.shape[1]
        )
        row_P, place_P, where = upload(logits_RV.device, chosen, self._place[slots], where_PC)
        factors = np.stack([columns.repetition[slots], columns.frequency[slots], columns.presence[slots]])
        repetition, frequency, presence = upload(logits_RV.device, factors.astype(np.float32))[0][:, :, None].unbind()
        ids_PC = self._ids_SW.view(-1)[where].long()
        count_PC = self._counts_PV[place_P[:, None], ids_PC].float()
        old_PC = logits_RV[row_P[:, None], ids_PC]
        new_PC = torch.where(old_PC > 0, old_PC / repetition, old_PC * repetition)
        new_PC = new_PC - frequency * count_PC - presence * (count_PC > 0)
        logits_RV[row_P[:, None], ids_PC] = new_PC

    def _bias(self, logits_RV: Tensor, rows: SamplingRows) -> None:
        columns = self._columns
        chosen = np.flatnonzero(columns.has_bias[rows.slots])
        if not len(chosen):
            return
        entries = [columns.bias[slot] for slot in rows.slots[chosen].tolist()]
        row = np.repeat(chosen, [len(ids) for ids, _ in entries])
        row_B, id_B = upload(logits_RV.device, row, np.concatenate([ids for ids, _ in entries]))
        value_B = upload(logits_RV.device, np.concatenate([values for _, values in entries]).astype(np.float32))[0]
        logits_RV.index_put_((row_B, id_B), value_B, accumulate=True)

    def _bar(self, logits_RV: Tensor, rows: SamplingRows) -> None:
        columns = self._columns
        chosen = np.flatnonzero(columns.bars(rows))
        if not len(chosen):
            return
        barred = [columns.barred[slot] for slot in rows.slots[chosen].tolist()]
        row = np.repeat(chosen, [len(ids) for ids in barred])
        row_B, id_B = upload(logits_RV.device, row, np.concatenate(barred))
        logits_RV.index_put_((row_B, id_B), logits_RV.new_full((), float("-inf")))
