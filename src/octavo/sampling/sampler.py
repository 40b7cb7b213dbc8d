"""One token per row: raw log-probabilities, edits, then greedy choice or a draw.

Owns: the order of these and the split of a step's rows by what each asked for.
Does not: hold per-slot state (columns and processors do) or wait for the device.
Invariants: a row's token depends on its own logits, parameters, history and (seed, choice, position) only.
Shapes: R rows that sample, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.sampling.columns import NO_LOGPROBS, Ints, SamplingColumns, SamplingRows
from octavo.sampling.draws import uniforms
from octavo.sampling.logprobs import LogprobColumns, RawDistribution
from octavo.sampling.processors import LogitsProcessors
from octavo.sampling.selection import draw_from_best, draw_in_id_order, draw_typical, sorted_candidates
from octavo.sampling.upload import upload


@dataclass(slots=True)
class Sampled:
    """Ids of all rows; each row's best raw logit; log-probabilities of some rows.

    A row whose best is not finite is unusable: -inf = every id is banned, else the model's logits were not finite.
    """

    ids_R: Tensor
    best_R: Tensor
    logprob_rows: Ints
    logprobs: LogprobColumns | None


class Sampler:
    """Samples the rows of a step with the parameters of their slots."""

    def __init__(self, columns: SamplingColumns, processors: LogitsProcessors) -> None:
        self._columns = columns
        self._processors = processors

    def sample(self, logits_RV: Tensor, rows: SamplingRows) -> Sampled:
        """Sample one id per row. `logits_RV` (float32) is edited in place."""
        best_R, ids_R = logits_RV.max(dim=1)  # NaN wins a maximum, ties go to the lowest id
        wanted = np.flatnonzero(self._columns.logprobs[rows.slots] != NO_LOGPROBS)
        raw = None
        if len(wanted):
            some_RV = _take(logits_RV, wanted)
            raw = RawDistribution.of(some_RV, self._columns.logprobs[rows.slots[wanted]])
        if self._processors.needs(rows):
            self._processors.apply(logits_RV, rows)
            left_R, ids_R = logits_RV.max(dim=1)
            best_R = torch.where(left_R == float("-inf"), left_R, best_R)
        drawn = np.flatnonzero(self._columns.temperature[rows.slots] > 0)
        if len(drawn):
            ids_R = self._draw(logits_RV, ids_R, drawn, rows)
        self._processors.record(ids_R, rows)
        if raw is None:
            return Sampled(ids_R, best_R, wanted, None)
        return Sampled(ids_R, best_R, wanted, raw.columns(ids_R[upload(ids_R.device, wanted)[0]]))

    def candidates(self, logits_RV: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
        """Give the best continuations of beams: ids and log-probabilities [R, C], best first, ties to the lower id.

        As transformers' beam search: log-softmax, then the processors; no temperature and no cut. C is what the
        widest search among the rows needs; a narrower one may read fewer. Nothing is counted or made known.
        A row whose first log-probability is not finite is unusable: NaN = the logits were, -inf = no id may follow.
        """
        log_probs_RV = torch.log_softmax(logits_RV.float(), dim=1)
        if self._processors.needs(rows):
            self._processors.apply_to_beams(log_probs_RV, rows)
        most = min(int(self._columns.num_candidates[rows.slots].max()), log_probs_RV.shape[1])
        values_RC, ids_RC = sorted_candidates(log_probs_RV, most)
        return ids_RC[:, :most], values_RC[:, :most]

    def _draw(self, logits_RV: Tensor, ids_R: Tensor, drawn: Ints, rows: SamplingRows) -> Tensor:
        columns, slots = self._columns, rows.slots[drawn]
        uniform = uniforms(columns.seed[slots], columns.choice[slots], rows.positions[drawn])
        # one that rounds to 0 in float32 would divide 0 by 0
        temperature = np.maximum(columns.temperature[slots].astype(np.float32), np.finfo(np.float32).tiny)[:, None]
        is_typical = columns.typical_p[slots] < 1
        is_cut = ((columns.top_k[slots] > 0) | (columns.top_p[slots] < 1)) & ~is_typical
        for part in map(np.flatnonzero, (is_typical, is_cut, ~is_typical & ~is_cut)):
            if not len(part):
                continue
            some_RV = _take(logits_RV, drawn[part])
            scaled_RV = some_RV - some_RV.amax(dim=1, keepdim=True)
            scaled_RV /= upload(logits_RV.device, temperature[part])[0]
            of = slots[part]
            if is_typical[part[0]]:
                typical = columns.typical_p[of]
                new_R = draw_typical(
                    scaled_RV, columns.top_k[of], columns.top_p[of], columns.min_p[of], typical, uniform[part]
                )
            elif is_cut[part[0]]:
                new_R = draw_from_best(
                    scaled_RV, columns.top_k[of], columns.top_p[of], columns.min_p[of], uniform[part]
                )
            else:
                new_R = draw_in_id_order(torch.softmax(scaled_RV, dim=1), columns.min_p[of], uniform[part])
            ids_R = ids_R.index_copy(0, upload(ids_R.device, drawn[part])[0], new_R)
        return ids_R


def _take(logits_RV: Tensor, rows: Ints) -> Tensor:
    """Give these rows: the tensor itself when they are all of them, else a copy."""
    if len(rows) == logits_RV.shape[0]:
        return logits_RV
    return logits_RV.index_select(0, upload(logits_RV.device, rows)[0])
