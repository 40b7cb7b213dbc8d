"""Sample one token per row: raw log-probabilities, edits, then greedy choice or a draw.

Owns: the order of these and the split of a step's rows by their parameters.
Does not: hold per-slot state (columns and processors do) or wait for the device.
Invariants: a row's token depends on its own logits, parameters, history and (seed, choice, position) only.
Shapes: R rows that sample, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.ops import sample_kernel
from octavo.ops.sample_kernel import SampleColumns, SampleKernel
from octavo.sampling.columns import NO_LOGPROBS, Ints, SamplingColumns, SamplingRows
from octavo.sampling.draws import uniforms
from octavo.sampling.logprobs import RawDistribution, SampledLogprobs
from octavo.sampling.processors import LogitsProcessors
from octavo.sampling.selection import Cuts, draw, sorted_candidates
from octavo.sampling.token_masks import TokenMasks
from octavo.sampling.upload import upload

_NO_ROWS: Ints = np.zeros(0, dtype=np.int64)


@dataclass(slots=True)
class Sampled:
    """The result of a step: ids of all rows; each row's best raw logit; log-probabilities of some rows.

    A row whose best is not finite is unusable: -inf = every id is banned, else the model's logits were not finite.
    """

    ids_R: Tensor
    best_R: Tensor
    logprob_rows: Ints
    logprobs: SampledLogprobs | None


class Sampler:
    """Sampler of a step's rows with the parameters of their slots: the C++ kernel on CPUs, else its torch twin."""

    def __init__(self, columns: SamplingColumns, processors: LogitsProcessors) -> None:
        self._columns = columns
        self._processors = processors
        self._log_probs = torch.empty((0, 0))
        self._kernel: SampleKernel | None = None
        if sample_kernel.has_kernel():
            of_slots = columns.inverse_temperature, columns.floor, columns.top_p, columns.top_k
            self._kernel = SampleKernel(SampleColumns(*of_slots, columns.seed, columns.choice))

    def sample(self, logits_RV: Tensor, rows: SamplingRows, masks: TokenMasks | None = None) -> Sampled:
        """Sample one id per row. `logits_RV` (float32) is edited in place, after log-probabilities are taken."""
        wants_more = bool(self._columns.wants_more[rows.slots].any())
        if not wants_more and masks is None:
            ids_R, best_R = self._choose(logits_RV, rows, may_be_typical=False)
            return Sampled(ids_R, best_R, _NO_ROWS, None)
        wanted = np.flatnonzero(self._columns.logprobs[rows.slots] != NO_LOGPROBS) if wants_more else _NO_ROWS
        raw = None
        if len(wanted):
            some_RV = _take(logits_RV, wanted)
            raw = self.distribution(some_RV, self._columns.logprobs[rows.slots[wanted]])
        has_edits = wants_more and self._processors.needs(rows)
        raw_best_R = logits_RV.amax(dim=1) if has_edits else None
        if masks is not None:
            masks.apply(logits_RV)
        if has_edits:
            self._processors.apply(logits_RV, rows)
        ids_R, best_R = self._choose(logits_RV, rows, may_be_typical=wants_more)
        if raw_best_R is not None:
            best_R = torch.where(best_R == float("-inf"), best_R, raw_best_R)
        if wants_more:
            self._processors.record(ids_R, rows)
        if raw is None:
            return Sampled(ids_R, best_R, wanted, None)
        return Sampled(ids_R, best_R, wanted, raw.columns(ids_R[upload(ids_R.device, wanted)[0]]))

    def distribution(self, logits_RV: Tensor, num_top: Ints) -> RawDistribution:
        """Return the distribution of raw logits, which the next call overwrites. `num_top`: best ids needed per row."""
        return RawDistribution(self._log_softmax(logits_RV), num_top)

    def _log_softmax(self, logits_RV: Tensor) -> Tensor:
        """Compute, on a CPU into a kept buffer: new pages would cost more than the work on them."""
        if not logits_RV.is_cpu or logits_RV.dtype is not torch.float32:
            return torch.log_softmax(logits_RV, dim=1)
        num_rows, size = logits_RV.shape
        if self._log_probs.shape[0] < num_rows or self._log_probs.shape[1] != size:
            self._log_probs = torch.empty(num_rows, size)
        return torch.log_softmax(logits_RV, dim=1, out=self._log_probs[:num_rows])

    def candidates(self, logits_RV: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
        """Return the best continuations of beams: ids and log-probabilities [R, C], best first, ties to the lower id.

        As in transformers' beam search: log-softmax, then the processors; no temperature and no top-k or top-p. C is
        that of the widest search among the rows; a narrower one may read fewer. Nothing is counted or written to slots.
        A row whose first log-probability is not finite is unusable: NaN = the logits were NaN, -inf = no id may follow.
        """
        log_probs_RV = self._log_softmax(logits_RV.float())
        if self._processors.needs(rows):
            self._processors.apply_to_beams(log_probs_RV, rows)
        most = min(int(self._columns.num_candidates[rows.slots].max()), log_probs_RV.shape[1])
        values_RC, ids_RC = sorted_candidates(log_probs_RV, most)
        return ids_RC[:, :most], values_RC[:, :most]

    def _choose(self, logits_RV: Tensor, rows: SamplingRows, may_be_typical: bool = True) -> tuple[Tensor, Tensor]:
        """Return an id per row, drawn or the lowest of the best, and the best logit, which is NaN if any logit is.

        If the best is not finite, the id is the first that has it.
        """
        columns, is_drawn = self._columns, None
        if self._kernel is not None and sample_kernel.fits(logits_RV):
            ids, best = self._kernel.sample(logits_RV, rows.slots, rows.positions)
            ids_R, best_R = torch.from_numpy(ids), torch.from_numpy(best)
            if not may_be_typical:
                return ids_R, best_R
            is_drawn = columns.typical_p[rows.slots] < 1  # the kernel does not support it
        else:
            best_R, ids_R = logits_RV.max(dim=1)  # NaN wins a maximum, ties go to the lowest id
        is_warm = columns.inverse_temperature[rows.slots] > 0
        drawn = np.flatnonzero(is_warm if is_drawn is None else is_warm & is_drawn)
        if len(drawn):
            at = upload(logits_RV.device, drawn)[0]
            new_R = draw(_take(logits_RV, drawn), self._cuts(rows.slots[drawn], rows.positions[drawn]))
            ids_R = ids_R.index_copy(0, at, torch.where(best_R[at].isfinite(), new_R, ids_R[at]))
        return ids_R, best_R

    def _cuts(self, slots: Ints, positions: Ints) -> Cuts:
        columns = self._columns
        return Cuts(
            columns.inverse_temperature[slots],
            columns.floor[slots],
            columns.top_k[slots],
            columns.top_p[slots],
            columns.typical_p[slots],
            uniforms(columns.seed[slots], columns.choice[slots], positions),
        )


def _take(logits_RV: Tensor, rows: Ints) -> Tensor:
    """Return these rows: the tensor itself if they are all of them, else a copy."""
    if len(rows) == logits_RV.shape[0]:
        return logits_RV
    return logits_RV.index_select(0, upload(logits_RV.device, rows)[0])
