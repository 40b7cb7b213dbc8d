"""What one step leaves on the device, and its way into a StepResult.

Owns: the ticket of a torch executor; scoring and pooling; the fetch of results, the step's one wait.
Does not: run the model or sample.
Shapes: T tokens, E hidden size, R rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor
from torch.nn import functional

from octavo.core.plan import StepResult, TokenLogprobs
from octavo.executors.batch_inputs import StepInputs
from octavo.executors.columns import to_packed
from octavo.executors.slots import Slots
from octavo.sampling.logprobs import LogprobColumns, RawDistribution
from octavo.sampling.sampler import Sampled
from octavo.sampling.upload import upload

SCORE_CHUNK = 64  # positions whose logits exist at once: 12 MiB at a vocabulary of 49152

Score = tuple[int, int, list[LogprobColumns]]


@dataclass(slots=True)
class StepOutputs:
    """A step that was started; `sampled`, `scores` and `pooled_RE` may still be computing on the device."""

    inputs: StepInputs | None = None
    faults: dict[int, str] = field(default_factory=dict)
    sampled: Sampled | None = None
    scores: list[Score] = field(default_factory=list)
    pooled_RE: Tensor | None = None

    def result(self) -> StepResult:
        """Fetch everything. Waits for the device."""
        result = StepResult(array("i"))
        if self.inputs is None:
            return result
        errors = {
            row: self.faults[slot] for row, slot in enumerate(self.inputs.slots_N.tolist()) if slot in self.faults
        }
        if self.sampled is not None:
            self._fetch_sampled(self.sampled, result, errors)
        scores = []
        for row, first, parts in self.scores:
            entries = tuple(entry for part in parts for entry in part.entries())
            if any(np.isnan(entry.logprob) for entry in entries):
                errors.setdefault(row, "the model's logits are not finite")
            else:
                scores.append((row, first, entries))
        result.scores = tuple(scores)
        if self.pooled_RE is not None:
            self._fetch_pooled(self.pooled_RE, result, errors)
        result.errors = tuple(sorted(errors.items()))
        return result

    def _fetch_sampled(self, sampled: Sampled, result: StepResult, errors: dict[int, str]) -> None:
        assert self.inputs is not None
        result.token_ids = to_packed(sampled.ids_R.cpu().numpy())
        is_bad_R = ~np.isfinite(sampled.best_R.cpu().numpy())
        for row in self.inputs.sample_rows[is_bad_R].tolist():
            errors.setdefault(row, "the model's logits are not finite")
        if sampled.logprobs is not None:
            logprobs: list[TokenLogprobs | None] = [None] * len(result.token_ids)
            for index, entry in zip(sampled.logprob_rows.tolist(), sampled.logprobs.entries(), strict=True):
                logprobs[index] = entry
            result.logprobs = logprobs

    def _fetch_pooled(self, pooled_RE: Tensor, result: StepResult, errors: dict[int, str]) -> None:
        assert self.inputs is not None
        pooled = []
        for row, vector in zip(self.inputs.pool_rows.tolist(), pooled_RE.cpu().numpy(), strict=True):
            if np.isfinite(vector).all():
                pooled.append((row, vector.tobytes()))
            else:
                errors.setdefault(row, "the model's hidden state is not finite")
        result.pooled = tuple(pooled)


def score_rows(inputs: StepInputs, slots: Slots, hidden_TE: Tensor, logits: Callable[[Tensor], Tensor]) -> list[Score]:
    """Log-probabilities of the prompt tokens behind each scoring row's positions: (row, first position, parts).

    Position p of a row scores the token at p + 1, up to the prompt's last. Logits exist for SCORE_CHUNK positions.
    """
    scores: list[Score] = []
    width = slots.ids_SW.shape[1]
    for row in inputs.score_rows.tolist():
        slot, start = int(inputs.slots_N[row]), int(inputs.starts_N[row])
        end = min(start + int(inputs.counts_N[row]), int(slots.columns.num_prompt[slot]) - 1)
        num_top = max(0, int(slots.columns.prompt_logprobs[slot]))
        first_token = int(inputs.first_token_N[row])
        parts = []
        for at in range(start, end, SCORE_CHUNK):
            until = min(at + SCORE_CHUNK, end)
            logits_RV = logits(hidden_TE[first_token + at - start : first_token + until - start])
            ids_R = slots.ids_SW.view(-1)[slot * width + at + 1 : slot * width + until + 1].long()
            parts.append(RawDistribution.of(logits_RV, np.full(until - at, num_top)).columns(ids_R))
        scores.append((row, start + 1, parts))
    return scores


def pool_rows(inputs: StepInputs, hidden_TE: Tensor) -> Tensor:
    """Give the hidden state at each pooling row's last position, scaled to length 1, float32."""
    last = inputs.first_token_N[inputs.pool_rows] + inputs.counts_N[inputs.pool_rows] - 1
    pooled_RE = hidden_TE.index_select(0, upload(hidden_TE.device, last)[0]).float()
    return functional.normalize(pooled_RE, dim=1)
