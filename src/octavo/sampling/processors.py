"""Edits of logits before selection: penalties, DRY, biases, banned words, n-grams, min_tokens, allowed ids, masks.

Owns: the processors and their order. Does not: select. To add a sampling parameter that edits logits, add a class here
(or in its own module, like DRY) and a line in `PROCESSORS`; one that changes the draw is a column of selection.py.
An edit changes no bit of a row without it. Nothing waits for the device: the device itself reads ids that only it
knows.
Shapes: R rows that sample, V vocabulary, P rows with a penalty, C their longest context, B entries (row, id), L
longest prefix, M masked rows, S slots, W positions of a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.request import SamplingParams
from octavo.sampling.columns import Floats, Ints, SamplingRows, SequenceIds, SlotState, distinct, upload
from octavo.sampling.dry import ALWAYS, OFF, DryPenalty


class LogitsProcessor(Protocol):
    """An edit by sampling parameters. Arguments: (number of slots, the executor's known ids [S, W], vocabulary)."""

    def put(self, slot: int, params: SamplingParams, ids: SequenceIds) -> int:
        """Read a slot's parameters. Return the position before which its rows are edited: OFF for none, ALWAYS for all.

        The slot was released before. A slot whose parameters are neutral holds no state and costs nothing.
        """

    def release(self, slot: int) -> None:
        """Drop a slot's state. Idempotent."""

    def apply(self, logits_RV: Tensor, rows: SamplingRows, chosen: Ints) -> None:
        """Edit the chosen rows in place. A banned id gets -inf."""


class Penalties:
    """`repetition_penalty`, `frequency_penalty`, `presence_penalty`; counts[row of slot, id] counts generated tokens.

    Repetition is as in CTRL (Keskar et al. 2019), over prompt and outputs. The other two are as in the OpenAI API, over
    outputs.
    """

    def __init__(self, num_slots: int, ids_SW: Tensor, vocab_size: int) -> None:
        self._ids_SW = ids_SW
        self._vocab_size = vocab_size
        self._repetition: Floats = np.ones(num_slots)
        self._frequency: Floats = np.zeros(num_slots)
        self._presence: Floats = np.zeros(num_slots)
        counts_PV = torch.zeros((0, vocab_size), dtype=torch.int32, device=ids_SW.device)
        self._state = SlotState(num_slots, counts_PV)

    def put(self, slot: int, params: SamplingParams, ids: SequenceIds) -> int:
        """Count the sequence's outputs."""
        if params.repetition_penalty == 1 and not (params.frequency_penalty or params.presence_penalty):
            return OFF
        self._repetition[slot] = params.repetition_penalty
        self._frequency[slot], self._presence[slot] = params.frequency_penalty, params.presence_penalty
        row = self._state.reserve(slot)
        counts_V = self._state.tensors[0][row].zero_()
        if len(ids.output):
            known, counts = upload(self._ids_SW.device, *np.unique(ids.output, return_counts=True))
            counts_V.index_copy_(0, known, counts.int())
        return ALWAYS

    def release(self, slot: int) -> None:
        """Drop the slot's counts."""
        self._state.release(slot)

    def apply(self, logits_RV: Tensor, rows: SamplingRows, chosen: Ints) -> None:
        """Edit the logits of ids in the sequences. The work is O(C), not O(V)."""
        slots, lengths = rows.slots[chosen], rows.positions[chosen]
        # A shorter row repeats its last position. An id that occurs twice is written twice with the same value.
        where_PC = (
            np.minimum(np.arange(lengths.max())[None], lengths[:, None] - 1) + slots[:, None] * self._ids_SW.shape[1]
        )
        row_P, state_P, where = upload(logits_RV.device, chosen, self._state.rows[slots], where_PC)
        factors = np.stack([self._repetition[slots], self._frequency[slots], self._presence[slots]])
        repetition, frequency, presence = upload(logits_RV.device, factors.astype(np.float32))[0][:, :, None].unbind()
        ids_PC = self._ids_SW.view(-1)[where].long()
        count_PC = self._state.tensors[0][state_P[:, None], ids_PC].float()
        old_PC = logits_RV[row_P[:, None], ids_PC]
        new_PC = torch.where(old_PC > 0, old_PC / repetition, old_PC * repetition)
        new_PC = new_PC - frequency * count_PC - presence * (count_PC > 0)
        logits_RV[row_P[:, None], ids_PC] = new_PC

    def record(self, sampled_R: Tensor, rows: SamplingRows) -> None:
        """Count the ids just sampled."""
        counted = np.flatnonzero(self._state.rows[rows.slots] >= 0)
        if len(counted):
            chosen, states = upload(sampled_R.device, counted, self._state.rows[rows.slots[counted]])
            self._count(states, sampled_R[chosen].long())

    def append(self, slots: Ints, token_ids: Ints) -> None:
        """Count ids that the host chose; each is its slot's next output. The caller writes them to the id buffer."""
        counted = np.flatnonzero(self._state.rows[slots] >= 0)
        if len(counted):
            rows = self._state.rows[slots[counted]]
            self._count(*upload(self._ids_SW.device, rows, token_ids[counted]))

    def _count(self, states: Tensor, ids: Tensor) -> None:
        counts_PV = self._state.tensors[0]
        counts_PV.index_put_((states, ids), counts_PV.new_ones(()), accumulate=True)


class LogitBias:
    """`logit_bias`: numbers added to the logits of some ids."""

    def __init__(self, num_slots: int, ids_SW: Tensor, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._entries: dict[int, tuple[Ints, Floats]] = {}

    def put(self, slot: int, params: SamplingParams, ids: SequenceIds) -> int:
        """Keep the slot's (id, bias) pairs."""
        if not params.logit_bias:
            return OFF
        pairs = [(token, bias) for token, bias in params.logit_bias if token < self._vocab_size]
        tokens = np.asarray([token for token, _ in pairs], dtype=np.int64)
        self._entries[slot] = tokens, np.asarray([bias for _, bias in pairs], dtype=np.float64)
        return ALWAYS

    def release(self, slot: int) -> None:
        """Drop the slot's pairs."""
        self._entries.pop(slot, None)

    def apply(self, logits_RV: Tensor, rows: SamplingRows, chosen: Ints) -> None:
        """Add the biases."""
        entries = [self._entries[slot] for slot in rows.slots[chosen].tolist()]
        row = np.repeat(chosen, [len(tokens) for tokens, _ in entries])
        row_B, id_B = upload(logits_RV.device, row, np.concatenate([tokens for tokens, _ in entries]))
        value_B = upload(logits_RV.device, np.concatenate([values for _, values in entries]).astype(np.float32))[0]
        logits_RV.index_put_((row_B, id_B), value_B, accumulate=True)


@dataclass(slots=True)
class _Words:
    """Banned id sequences: each one's last id, the size of the prefix before it, and the prefix, padded with -1."""

    last_ids: Ints
    prefix_sizes: Ints
    prefixes: Ints

    @classmethod
    def of(cls, words: Sequence[Sequence[int]]) -> _Words:
        """Lay out non-empty sequences."""
        sizes = np.asarray([len(word) - 1 for word in words], dtype=np.int64)
        prefixes = np.full((len(words), int(sizes.max(initial=0))), -1, dtype=np.int64)
        for line, word in zip(prefixes, words, strict=True):
            line[len(line) - len(word) + 1 :] = word[:-1]
        return cls(np.asarray([word[-1] for word in words], dtype=np.int64), sizes, prefixes)

    def padded(self, width: int) -> Ints:
        """Return the prefixes, right-aligned in `width` columns and padded with -1."""
        return np.pad(self.prefixes, ((0, 0), (width - self.prefixes.shape[1], 0)), constant_values=-1)


class BannedWords:
    """`bad_words_ids`: ban a sequence's last id in each row whose context ends with the sequence's other ids."""

    def __init__(self, num_slots: int, ids_SW: Tensor, vocab_size: int) -> None:
        self._ids_SW = ids_SW
        self._vocab_size = vocab_size
        self._words: dict[int, _Words] = {}

    def put(self, slot: int, params: SamplingParams, ids: SequenceIds) -> int:
        """Keep the slot's sequences, without those that have an id outside the vocabulary."""
        if not params.bad_words_ids:
            return OFF
        self._words[slot] = _Words.of([word for word in params.bad_words_ids if max(word) < self._vocab_size])
        return ALWAYS

    def release(self, slot: int) -> None:
        """Drop the slot's sequences."""
        self._words.pop(slot, None)

    def apply(self, logits_RV: Tensor, rows: SamplingRows, chosen: Ints) -> None:
        """Compare the prefixes with the ends of the contexts, on the device."""
        words = [self._words[slot] for slot in rows.slots[chosen].tolist()]
        row_B = np.repeat(chosen, [len(entry.last_ids) for entry in words])
        size_B = np.concatenate([entry.prefix_sizes for entry in words])
        width = max(entry.prefixes.shape[1] for entry in words)
        last_B = np.concatenate([entry.last_ids for entry in words])
        prefix_BL = np.concatenate([entry.padded(width) for entry in words])
        fits_B = size_B <= rows.positions[row_B]
        row_B, last_B, prefix_BL = row_B[fits_B], last_B[fits_B], prefix_BL[fits_B]
        ends_B1 = rows.positions[row_B][:, None]
        at_BL = np.maximum(ends_B1 - width + np.arange(width), 0) + rows.slots[row_B][:, None] * self._ids_SW.shape[1]
        row, last, prefix, at = upload(logits_RV.device, row_B, last_B, prefix_BL, at_BL)
        is_match_B = ((self._ids_SW.view(-1)[at] == prefix) | (prefix < 0)).all(dim=1)
        # the ban is added, so that a word that does not match leaves other words' bans unchanged
        logits_RV.index_put_((row, last), torch.where(is_match_B, float("-inf"), 0.0), accumulate=True)


class NoRepeatedNgrams:
    """`no_repeat_ngram_size`: ban each id that would repeat a sequence of this many ids, of the prompt or the outputs.

    As in transformers (Paulus et al. 2017). The work of a row is O(C * size).
    """

    def __init__(self, num_slots: int, ids_SW: Tensor, vocab_size: int) -> None:
        self._ids_SW = ids_SW
        self._sizes: Ints = np.zeros(num_slots, dtype=np.int64)

    def put(self, slot: int, params: SamplingParams, ids: SequenceIds) -> int:
        """Keep the size."""
        self._sizes[slot] = params.no_repeat_ngram_size
        return ALWAYS if params.no_repeat_ngram_size else OFF

    def release(self, slot: int) -> None:
        """Keep nothing."""

    def apply(self, logits_RV: Tensor, rows: SamplingRows, chosen: Ints) -> None:
        """Ban the ids that followed the last size - 1 ids earlier in the context, on the device."""
        for size in np.unique(self._sizes[rows.slots[chosen]]).tolist():
            some = chosen[(self._sizes[rows.slots[chosen]] == size) & (rows.positions[chosen] >= size)]
            if len(some):
                self._ban(logits_RV, size, *upload(logits_RV.device, some, rows.slots[some], rows.positions[some]))

    def _ban(self, logits_RV: Tensor, size: int, row_P: Tensor, slot_P: Tensor, length_P: Tensor) -> None:
        """Compare all sequences of `size` ids with the ends of the contexts."""
        ids_PW, num_ends = self._ids_SW.index_select(0, slot_P), self._ids_SW.shape[1] - size + 1
        last_PC = ids_PW[:, size - 1 :].long()  # column c: the last id of the sequence that begins at c
        starts_C = torch.arange(num_ends, device=logits_RV.device)
        is_match_PC = starts_C + size <= length_P[:, None]
        for index in range(size - 1):
            wanted_P1 = ids_PW.gather(1, (length_P - (size - 1) + index)[:, None])
            is_match_PC &= ids_PW[:, index : index + num_ends] == wanted_P1
        added_PC = torch.where(is_match_PC, float("-inf"), 0.0)
        logits_RV.index_put_((row_P[:, None].expand_as(last_PC), last_PC), added_PC, accumulate=True)


class _IdLists:
    """A list of ids for each slot that has one."""

    def __init__(self, num_slots: int, ids_SW: Tensor, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._ids: dict[int, Ints] = {}

    def release(self, slot: int) -> None:
        """Drop the slot's ids."""
        self._ids.pop(slot, None)

    def _keep(self, slot: int, ids: Sequence[int]) -> None:
        self._ids[slot] = distinct(ids, self._vocab_size)

    def _entries(self, logits_RV: Tensor, rows: SamplingRows, chosen: Ints) -> list[Tensor]:
        """Return the rows and the ids of all (row, id) pairs of the chosen rows."""
        parts = [self._ids[slot] for slot in rows.slots[chosen].tolist()]
        return upload(logits_RV.device, np.repeat(chosen, [len(part) for part in parts]), np.concatenate(parts))


class MinTokens(_IdLists):
    """`min_tokens`: ban the ids that end the sequence until it has this number of outputs."""

    def put(self, slot: int, params: SamplingParams, ids: SequenceIds) -> int:
        """Keep the ids that end the sequence."""
        if not params.min_tokens:
            return OFF
        self._keep(slot, ids.stops(params))
        return len(ids.prompt) + params.min_tokens

    def apply(self, logits_RV: Tensor, rows: SamplingRows, chosen: Ints) -> None:
        """Ban the slots' ids."""
        row_B, id_B = self._entries(logits_RV, rows, chosen)
        logits_RV.index_put_((row_B, id_B), logits_RV.new_full((), float("-inf")))


class AllowedIds(_IdLists):
    """`allowed_token_ids`: ban all other ids."""

    def put(self, slot: int, params: SamplingParams, ids: SequenceIds) -> int:
        """Keep the ids."""
        if not params.allowed_token_ids:
            return OFF
        self._keep(slot, params.allowed_token_ids)
        return ALWAYS

    def apply(self, logits_RV: Tensor, rows: SamplingRows, chosen: Ints) -> None:
        """Ban all ids, then restore the logits of those that are allowed."""
        row_B, id_B = self._entries(logits_RV, rows, chosen)
        kept_B = logits_RV[row_B, id_B]
        logits_RV.index_fill_(0, upload(logits_RV.device, chosen)[0], float("-inf"))
        logits_RV[row_B, id_B] = kept_B


# In the order in which they edit a row. For beams, biases are first, as in transformers' beam search.
PROCESSORS: tuple[Callable[[int, Tensor, int], LogitsProcessor], ...] = (
    Penalties, DryPenalty, LogitBias, BannedWords, NoRepeatedNgrams, MinTokens, AllowedIds,
)  # fmt: skip


class LogitsProcessors:
    """All processors, and the positions up to which each one edits each slot."""

    def __init__(self, num_slots: int, ids_SW: Tensor, vocab_size: int) -> None:
        self._processors = tuple(make(num_slots, ids_SW, vocab_size) for make in PROCESSORS)
        self._ends: Ints = np.full((len(PROCESSORS), num_slots), OFF, dtype=np.int64)
        (self._penalties,) = (one for one in self._processors if isinstance(one, Penalties))
        self.record, self.append = self._penalties.record, self._penalties.append

    def put(self, slot: int, params: SamplingParams, ids: SequenceIds) -> bool:
        """Set up a slot; return True if any of its rows is edited."""
        self.release(slot)
        self._ends[:, slot] = [processor.put(slot, params, ids) for processor in self._processors]
        return bool(self._ends[:, slot].any())

    def release(self, slot: int) -> None:
        """Drop a slot's state. Idempotent."""
        for processor in self._processors:
            processor.release(slot)

    def edits(self, rows: SamplingRows) -> list[tuple[LogitsProcessor, Ints]]:
        """Return the processors that edit rows of the step, in order, each with the indices of its rows."""
        is_edited = rows.positions < self._ends[:, rows.slots]
        return [
            (self._processors[index], np.flatnonzero(is_edited[index])) for index in np.flatnonzero(is_edited.any(1))
        ]

    def beam_edits(self, rows: SamplingRows) -> list[tuple[LogitsProcessor, Ints]]:
        """Return the edits of beams, in the order of transformers."""
        return sorted(self.edits(rows), key=lambda edit: not isinstance(edit[0], LogitBias))


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Masks of ids that the rows `rows` (ascending) may sample; other rows may sample all. `bits_MW` is int32."""

    rows: Ints
    bits_MW: NDArray[np.int32]

    def among(self, rows: Ints) -> TokenMasks | None:
        """Return the masks of a subset of the rows (ascending), re-indexed to the subset; None if it has no mask."""
        at = np.searchsorted(rows, self.rows)
        is_in = rows[np.minimum(at, len(rows) - 1)] == self.rows if len(rows) else np.zeros(len(at), dtype=np.bool_)
        return TokenMasks(at[is_in], self.bits_MW[is_in]) if is_in.any() else None

    def apply(self, logits_RV: Tensor) -> None:
        """Set the logits of forbidden ids to -inf, in place. Logits of allowed ids keep their bits, even NaN.

        A table gives the addends of eight ids at a time, which is twenty times as fast as unpacking words.
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
    """Return, for each value of eight bits, the addends of the eight ids: 0 if allowed, -inf if not."""
    is_set = (torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)) & 1 > 0
    return torch.where(is_set, 0.0, float("-inf"))
