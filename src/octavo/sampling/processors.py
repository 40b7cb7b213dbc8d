"""Changes to logits before selection, in this order: penalties, DRY, biases, then bans.

Owns: the order, the counts of generated tokens (kept on the device for the slots that need them), and the edits by
penalties and biases. Does not: select. Every edit changes only the rows that have it, and no bit of any other
row. For beams, biases are first, as in transformers' beam search.
Shapes: R rows that sample, V vocabulary, P rows with a penalty, C longest context of these.
Invariants: counts[place[slot], id] = times that id was generated in the slot's sequence.
Definitions: repetition as in CTRL (Keskar et al. 2019), over prompt and outputs; presence and frequency
as in the OpenAI API, over outputs; DRY and bans in their modules.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo.sampling.bans import Bans
from octavo.sampling.columns import Ints, SamplingColumns, SamplingRows
from octavo.sampling.dry import DryPenalty
from octavo.sampling.upload import upload

_NO_IDS: Ints = np.zeros(0, dtype=np.int64)


class LogitsProcessors:
    """Editor of raw logits, in place. `ids_SW` is the executor's buffer of known ids, one row per slot."""

    def __init__(self, columns: SamplingColumns, ids_SW: Tensor, vocab_size: int) -> None:
        self._columns = columns
        self._ids_SW = ids_SW
        self._vocab_size = vocab_size
        self._dry = DryPenalty(columns, ids_SW, vocab_size)
        self._bans = Bans(columns, ids_SW)
        self._counts_PV = torch.zeros((0, vocab_size), dtype=torch.int32, device=ids_SW.device)
        self._place = np.full(len(columns.temperature), -1, dtype=np.int64)
        self._free: list[int] = []

    def admit(self, slot: int, output_ids: Ints, prompt_ids: Ints = _NO_IDS) -> None:
        """Rebuild the slot's counts from its known ids; without a penalty nothing is kept.

        Only DRY uses `prompt_ids`. The slot's columns must be put before.
        """
        self.release(slot)
        if self._columns.dry_multiplier[slot]:
            assert len(prompt_ids) == self._columns.num_prompt[slot], "DRY needs the prompt"
            self._dry.admit(slot, np.concatenate([prompt_ids, output_ids]))
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
        """Drop a slot's state. Idempotent."""
        self._dry.release(slot)
        if self._place[slot] >= 0:
            self._free.append(int(self._place[slot]))
            self._place[slot] = -1

    def needs(self, rows: SamplingRows) -> bool:
        """Return True if any row has an edit."""
        columns = self._columns
        return bool(columns.has_edits[rows.slots].any() or columns.bars(rows).any())

    def apply(self, logits_RV: Tensor, rows: SamplingRows) -> None:
        """Edit the logits of the rows that have edits, in place. If all ids of a row are banned, it is all -inf."""
        self._penalise(logits_RV, rows)
        self._dry.apply(logits_RV, rows)
        self._bias(logits_RV, rows)
        self._bans.apply(logits_RV, rows)

    def apply_to_beams(self, log_probs_RV: Tensor, rows: SamplingRows) -> None:
        """Edit the log-probabilities of beams in place, in the order of transformers: biases first."""
        self._bias(log_probs_RV, rows)
        self._penalise(log_probs_RV, rows)
        self._dry.apply(log_probs_RV, rows)
        self._bans.apply(log_probs_RV, rows)

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
