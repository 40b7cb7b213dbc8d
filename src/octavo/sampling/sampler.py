"""Sample one token per row: raw log-probabilities, edits, then greedy choice or a draw.

Owns: the order of these three, the split of a step's rows by their parameters, and log-probabilities of the model's
own distribution (before penalties, bias and temperature). Does not: wait for the device.
Invariants: a row's token depends on its own logits, parameters, history and (seed, choice, position) only. Rank 1 is
the best. Equal logits rank by ascending id, so ranks are unique and the greedy token has rank 1.
Shapes: R rows that sample, V vocabulary, K requested number of best ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.core.plan import TokenLogprobs
from octavo.core.proposals import may_reject
from octavo.core.request import SamplingParams
from octavo.ops import sample_kernel
from octavo.ops.sample_kernel import SampleColumns, SampleKernel
from octavo.ops.triton.available import uses_kernels
from octavo.sampling.columns import NO_IDS, NO_LOGPROBS, Ints, SamplingColumns, SamplingRows, SequenceIds, upload
from octavo.sampling.mirostat import Mirostat
from octavo.sampling.processors import LogitsProcessors, TokenMasks
from octavo.sampling.rejection import Rejection
from octavo.sampling.selection import SelectionColumns, distribution, draw, is_rare, sorted_candidates

_RANKED_TOGETHER = 1 << 18  # logits per pass; their sum as int64 takes 2 MiB


@dataclass(slots=True)
class RawDistribution:
    """Log-probabilities of some rows, from before the edits. `num_top`: how many of the best ids each row returns."""

    log_probs_RV: Tensor
    num_top: Ints

    def columns(self, token_ids_R: Tensor) -> SampledLogprobs:
        """Return the log-probabilities and ranks of these ids and of the best ids, without leaving the device."""
        own_R1 = self.log_probs_RV.gather(1, token_ids_R[:, None])
        ranks_R = _ranks(self.log_probs_RV, own_R1, token_ids_R)
        num_best = int(self.num_top.max(initial=0))
        if num_best:
            values_RK, best_RK = sorted_candidates(self.log_probs_RV, min(num_best, self.log_probs_RV.shape[1]))
        else:
            values_RK, best_RK = own_R1[:, :0], token_ids_R[:, None][:, :0]
        return SampledLogprobs(
            token_ids_R, own_R1[:, 0], ranks_R, best_RK[:, :num_best], values_RK[:, :num_best], self.num_top
        )


def _ranks(log_probs_RV: Tensor, own_R1: Tensor, token_ids_R: Tensor) -> Tensor:
    """Return the rank of each row's id. On a CPU, rank a few rows at a time to bound the memory of the int64 sums."""
    num_rows, size = log_probs_RV.shape
    ids_V = torch.arange(size, device=token_ids_R.device)
    together = max(1, _RANKED_TOGETHER // size) if log_probs_RV.is_cpu else max(1, num_rows)
    counts = []
    for begin in range(0, num_rows, together):
        part = slice(begin, begin + together)
        some_RV, own = log_probs_RV[part], own_R1[part]
        ahead_RV = (some_RV > own) | ((some_RV == own) & (ids_V < token_ids_R[part, None]))
        counts.append(ahead_RV.sum(dim=1))
    return torch.cat(counts) + 1 if counts else token_ids_R.long()


@dataclass(slots=True)
class SampledLogprobs:
    """Log-probabilities, one entry per row, on the device until `entries` fetches them."""

    token_ids_R: Tensor
    logprobs_R: Tensor
    ranks_R: Tensor
    top_ids_RK: Tensor
    top_logprobs_RK: Tensor
    num_top: Ints

    def entries(self) -> list[TokenLogprobs]:
        """Fetch the columns; return one TokenLogprobs per row."""
        rows = zip(
            self.token_ids_R.tolist(),
            self.logprobs_R.tolist(),
            self.ranks_R.tolist(),
            self.top_ids_RK.tolist(),
            self.top_logprobs_RK.tolist(),
            self.num_top.tolist(),
            strict=True,
        )
        return [
            TokenLogprobs(token, own, rank, tuple(ids[:count]), tuple(values[:count]))
            for token, own, rank, ids, values, count in rows
        ]


@dataclass(slots=True)
class Sampled:
    """The result of a step: ids of all rows; each row's best raw logit; log-probabilities of some rows.

    A row whose best logit is not finite is unusable: -inf means that every id is banned; any other value means that the
    model's logits were not finite. `probs_RV`: the distributions that the ids were drawn from, if they are kept.
    """

    ids_R: Tensor
    best_R: Tensor
    logprob_rows: Ints
    logprobs: SampledLogprobs | None
    probs_RV: Tensor | None = None


class Sampler:
    """Samples a step's rows with the parameters of their slots: by the C++ kernel on CPUs, by Triton's kernels on other
    devices, or else by their torch twin.

    `ids_SW` is the executor's buffer of known ids, one row per slot. With `rejection`, drafts are verified by
    rejection sampling. If `num_proposed` is not 0, the sampler is a draft model's: it draws ids below
    this number, and keeps the distributions that it draws from.
    """

    rejection: Rejection | None = None
    num_proposed = 0

    def __init__(self, num_slots: int, ids_SW: Tensor, vocab_size: int) -> None:
        self.columns = SamplingColumns(num_slots)
        self.selection = SelectionColumns.of_size(num_slots)
        self.processors = LogitsProcessors(num_slots, ids_SW, vocab_size)
        self.mirostat = Mirostat(num_slots, ids_SW.device)
        self._log_probs = torch.empty((0, 0))
        self._kernel: SampleKernel | None = None
        if sample_kernel.has_kernel():
            columns = self.selection
            by_slot = columns.inverse_temperature, columns.floor, columns.top_p, columns.top_k
            self._kernel = SampleKernel(SampleColumns(*by_slot, columns.seed, columns.choice))

    def put(self, slot: int, params: SamplingParams, ids: SequenceIds, choice: int = 0) -> None:
        """Set up a slot for a sequence with these known ids."""
        self.selection.put(slot, params, choice)
        self.mirostat.put(slot, params, ids, choice)
        self.columns.put(slot, params, ids, self.processors.put(slot, params, ids), is_rare(params))
        self.columns.may_reject[slot] = may_reject(params)

    def release(self, slot: int) -> None:
        """Drop a slot's state. Idempotent."""
        self.processors.release(slot)
        self.mirostat.release(slot)

    def wants_best(self, rows: SamplingRows) -> bool:
        """Return True if `sample` needs only the best id of each row and its logit, no other logits."""
        wants_logits = self.columns.wants_logits
        is_wanted = np.count_nonzero(wants_logits) and np.count_nonzero(wants_logits[rows.slots])
        return not self.num_proposed and not is_wanted

    def sample(self, logits_RV: Tensor, rows: SamplingRows, masks: TokenMasks | None = None) -> Sampled:
        """Sample one id per row. `logits_RV` (float32) is edited in place after log-probabilities are taken."""
        wants_more = bool(np.count_nonzero(self.columns.wants_more[rows.slots]))
        if self.num_proposed:
            logits_RV[:, self.num_proposed :] = float("-inf")
        if not wants_more and masks is None:
            ids_R, best_R = self._choose(logits_RV, rows, may_be_rare=False)
            return Sampled(ids_R, best_R, NO_IDS, None, self._probs(logits_RV, rows))
        wanted = np.flatnonzero(self.columns.logprobs[rows.slots] != NO_LOGPROBS) if wants_more else NO_IDS
        raw = None
        if len(wanted):
            some_RV = _take(logits_RV, wanted)
            raw = self.distribution(some_RV, self.columns.logprobs[rows.slots[wanted]])
        edits = self.processors.edits(rows) if wants_more else []
        raw_best_R = logits_RV.amax(dim=1) if edits else None
        if masks is not None:
            masks.apply(logits_RV)
        for processor, edited in edits:
            processor.apply(logits_RV, rows, edited)
        ids_R, best_R = self._choose(logits_RV, rows, may_be_rare=wants_more)
        if raw_best_R is not None:
            best_R = torch.where(best_R == float("-inf"), best_R, raw_best_R)
        if wants_more:
            self.processors.record(ids_R, rows)
        probs_RV = self._probs(logits_RV, rows)
        if raw is None:
            return Sampled(ids_R, best_R, wanted, None, probs_RV)
        return Sampled(ids_R, best_R, wanted, raw.columns(ids_R[upload(ids_R.device, wanted)[0]]), probs_RV)

    def is_plain(self, rows: SamplingRows) -> bool:
        """Return True if the rows need nothing but `sample_packed`: no edits, masks, log-probabilities or verdicts."""
        columns, slots = self.columns, rows.slots
        needs_more = columns.wants_more[slots] | columns.has_grammar[slots] | (columns.num_candidates[slots] > 0)
        return not (self.num_proposed or (self.rejection is not None and rows.drafts is not None) or needs_more.any())

    def sample_packed(self, logits_RV: Tensor, packed_KR: Tensor) -> tuple[Tensor, Tensor]:
        """Return an id (int32) and the best logit of each plain row, from what `Draws.pack` returns of the rows.

        All is read on the device, so that a graph can capture it. `uses_kernels` must hold.
        """
        ids_R, best_R = torch.ops.octavo.sample(logits_RV, packed_KR)
        return ids_R, best_R

    def distribution(self, logits_RV: Tensor, num_top: Ints) -> RawDistribution:
        """Return the raw logits' distribution; the next call overwrites it. `num_top`: best ids needed per row."""
        return RawDistribution(self._log_softmax(logits_RV), num_top)

    def _log_softmax(self, logits_RV: Tensor) -> Tensor:
        """Return log-softmax; on a CPU in a reused buffer, since page faults of a new one cost more than the work."""
        if uses_kernels(logits_RV) and sample_kernel.fits(logits_RV):
            log_probs_RV: Tensor = torch.ops.octavo.log_softmax(logits_RV)
            return log_probs_RV
        if not logits_RV.is_cpu or logits_RV.dtype is not torch.float32:
            return torch.log_softmax(logits_RV, dim=1)
        num_rows, size = logits_RV.shape
        if self._log_probs.shape[0] < num_rows or self._log_probs.shape[1] != size:
            self._log_probs = torch.empty(num_rows, size)
        return torch.log_softmax(logits_RV, dim=1, out=self._log_probs[:num_rows])

    def candidates(self, logits_RV: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
        """Return the best next ids of beams: ids and log-probabilities [R, C], best first, the lower id first at ties.

        As in transformers' beam search, log-softmax precedes the processors, without temperature, top-k or top-p. C is
        the number that the widest search among the rows needs; a narrower search may read fewer. Nothing is counted or
        written to slots. A row whose first log-probability is not finite is unusable: NaN means that the logits were
        NaN, -inf that no id may follow.
        """
        log_probs_RV = self._log_softmax(logits_RV.float())
        for processor, edited in self.processors.beam_edits(rows):
            processor.apply(log_probs_RV, rows, edited)
        count = min(int(self.columns.num_candidates[rows.slots].max()), log_probs_RV.shape[1])
        values_RC, ids_RC = sorted_candidates(log_probs_RV, count)
        return ids_RC[:, :count], values_RC[:, :count]

    def _choose(self, logits_RV: Tensor, rows: SamplingRows, may_be_rare: bool = True) -> tuple[Tensor, Tensor]:
        """Return an id per row (drawn, or the lowest of the best ids) and the best logit, which is NaN if any logit is.

        If the best logit is not finite, the id is the lowest id with that logit.
        """
        columns = self.selection
        chosen = self._choose_by_kernel(logits_RV, rows)
        if chosen is not None:
            ids_R, best_R = chosen
            if not may_be_rare:
                return self._verify(logits_RV, rows, ids_R, best_R), best_R
            is_drawn = (columns.inverse_temperature > 0)[rows.slots] & columns.is_rare[rows.slots]  # others are drawn
        else:
            best_R, ids_R = logits_RV.max(dim=1)  # NaN wins a maximum, ties go to the lowest id
            is_drawn = columns.inverse_temperature[rows.slots] > 0
        is_mirostat = self.mirostat.is_on[rows.slots]
        for drawn, is_kind_mirostat in (
            (np.flatnonzero(is_drawn & ~is_mirostat), False),
            (np.flatnonzero(is_drawn & is_mirostat), True),
        ):
            if len(drawn):
                some = rows.take(drawn)
                some_RV, draws = _take(logits_RV, drawn), columns.draws(some.slots, some.positions)
                new_R = self.mirostat.draw(some_RV, some, draws) if is_kind_mirostat else draw(some_RV, draws)
                at = upload(logits_RV.device, drawn)[0]
                ids_R = ids_R.index_copy(0, at, torch.where(best_R[at].isfinite(), new_R, ids_R[at]))
        return self._verify(logits_RV, rows, ids_R, best_R), best_R

    def _choose_by_kernel(self, logits_RV: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor] | None:
        """Return `_choose`'s result without the rare parameters; None if no kernel can read the logits."""
        if not sample_kernel.fits(logits_RV):
            return None
        if uses_kernels(logits_RV):
            packed_KR = upload(logits_RV.device, self.selection.draws(rows.slots, rows.positions).pack())[0]
            ids_R, best_R = self.sample_packed(logits_RV, packed_KR)
            return ids_R.long(), best_R
        if self._kernel is None or not logits_RV.is_cpu:
            return None
        ids, best = self._kernel.sample(logits_RV, rows.slots, rows.positions)
        return torch.from_numpy(ids), torch.from_numpy(best)

    def _verify(self, logits_RV: Tensor, rows: SamplingRows, ids_R: Tensor, best_R: Tensor) -> Tensor:
        """Return the ids; with rejection sampling, those of rows with a draft are replaced."""
        if self.rejection is None or rows.drafts is None:
            return ids_R
        verified = np.flatnonzero((rows.drafts >= 0) & self.columns.may_reject[rows.slots])
        if not len(verified):
            return ids_R
        new_R = self.rejection.verify(_take(logits_RV, verified), rows.take(verified), self.selection)
        at = upload(logits_RV.device, verified)[0]
        return ids_R.index_copy(0, at, torch.where(best_R[at].isfinite(), new_R, ids_R[at]))

    def _probs(self, logits_RV: Tensor, rows: SamplingRows) -> Tensor | None:
        """Return the distributions that the rows were drawn from, if they are kept."""
        if not self.num_proposed:
            return None
        return distribution(logits_RV, self.selection.draws(rows.slots, rows.positions))


def _take(logits_RV: Tensor, rows: Ints) -> Tensor:
    """Return these rows: the tensor itself if they are all rows, else a copy."""
    if len(rows) == logits_RV.shape[0]:
        return logits_RV
    return logits_RV.index_select(0, upload(logits_RV.device, rows)[0])
