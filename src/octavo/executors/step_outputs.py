"""The outputs of one step on the device, and their conversion to a StepResult.

Owns: the ticket of a torch executor; scoring and pooling; fetching the results, which is the step's only wait.
Does not: run the model or sample.
Shapes: T tokens, E hidden size, R rows, C candidates.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor
from torch.nn import functional

from octavo.core.plan import StepResult, TokenLogprobs
from octavo.core.request import FinishError
from octavo.errors import ErrorKind
from octavo.executors.slots import Slots
from octavo.executors.step_buffers import BufferPair, Download
from octavo.executors.step_inputs import StepInputs
from octavo.sampling.columns import Ints, upload
from octavo.sampling.sampler import RawDistribution, Sampled, SampledLogprobs

SCORE_CHUNK = 64  # positions whose logits exist at once: 12 MiB at a vocabulary of 49152

NOT_FINITE = "the model's logits are not finite"
NOTHING_LEFT = FinishError(
    ErrorKind.INVALID_REQUEST,
    "no token may follow: grammar, allowed ids, bad words, biases and min_tokens together leave none; "
    "use fewer of them at once",
)
NO_STATE = "the model's hidden state is not finite"

Score = tuple[int, int, list[SampledLogprobs]]


@dataclass(slots=True)
class Candidates:
    """The best next tokens of beams. `rows` index the step's sampled positions; entry i has `counts[i]` candidates."""

    rows: Ints
    counts: Ints
    ids_RC: Tensor
    logprobs_RC: Tensor

    def entries(self) -> list[TokenLogprobs]:
        """Fetch the candidates; return one TokenLogprobs per row, whose token is the best candidate."""
        columns = zip(self.ids_RC.tolist(), self.logprobs_RC.tolist(), self.counts.tolist(), strict=True)
        return [
            TokenLogprobs(ids[0], values[0], 1, tuple(ids[:count]), tuple(values[:count]))
            for ids, values, count in columns
        ]


@dataclass(slots=True)
class StepOutputs:
    """The outputs of a started step; an accelerator may still be computing its tensors.

    `sampled` has the results of the sampled positions in `sampled_rows` (None: of all positions); `candidates` has
    those of the other positions. `is_finite_R` says, for each row that samples nothing, whether the hidden state of
    the row's last token is finite. `unsampled_RV` are the logits of a step that waits for its masks. On an
    accelerator, `pair` are the step's pinned buffers, and `download` fetches the results.
    """

    inputs: StepInputs | None = None
    faults: dict[int, str] = field(default_factory=dict)
    sampled: Sampled | None = None
    sampled_rows: Ints | None = None
    candidates: Candidates | None = None
    scores: list[Score] = field(default_factory=list)
    pooled_RE: Tensor | None = None
    is_finite_R: Tensor | None = None
    unsampled_RV: Tensor | None = None
    pair: BufferPair | None = None
    download: Download | None = None

    def start_download(self, pair: BufferPair) -> None:
        """Start to copy the results to the host; `result` then waits for them alone."""
        self.download = pair.start_download([getattr(owner, name) for owner, name in self._results()])

    def _results(self) -> list[tuple[object, str]]:
        """Return where all results on the device are: objects, and names of their attributes."""
        found: list[tuple[object, str]] = []
        owners = [self, self.sampled, self.candidates, *(part for _, _, parts in self.scores for part in parts)]
        if self.sampled is not None:
            owners.append(self.sampled.logprobs)
        for owner in owners:
            names = _RESULTS.get(type(owner), ())
            found += [(owner, name) for name in names if getattr(owner, name) is not None]
        return found

    def fetched(self, download: Download) -> StepResult:
        """Wait for the results, convert them, and free the step's buffers."""
        for (owner, name), tensor in zip(self._results(), download.fetch(), strict=True):
            setattr(owner, name, tensor)
        result = self.result()
        download.release()
        return result

    def result(self) -> StepResult:
        """Convert the results, which are on the host."""
        result = StepResult(array("i"))
        if self.inputs is None:
            return result
        errors: dict[int, str] = {}
        dead_ends: dict[int, FinishError] = {}
        if self.faults:
            slots = enumerate(self.inputs.slots_N.tolist())
            errors = {row: self.faults[slot] for row, slot in slots if slot in self.faults}
        if self.sampled is not None and self.sampled_rows is None:
            result.token_ids = array("i", self.sampled.ids_R.tolist())
        else:
            result.token_ids = array("i", bytes(4 * len(self.inputs.sample_rows)))
        if self.sampled is not None:
            self._fetch_sampled(self.sampled, result, errors, dead_ends)
        if self.candidates is not None:
            self._fetch_candidates(self.candidates, result, errors, dead_ends)
        scores = []
        for row, first, parts in self.scores:
            entries = tuple(entry for part in parts for entry in part.entries())
            if any(np.isnan(entry.logprob) for entry in entries):
                errors.setdefault(row, NOT_FINITE)
            else:
                scores.append((row, first, entries))
        result.scores = tuple(scores)
        self._fetch_states(result, errors)
        if errors or dead_ends:
            result.errors, result.dead_ends = tuple(sorted(errors.items())), tuple(sorted(dead_ends.items()))
        if self.inputs.drafts is not None:
            self.inputs.drafts.keep_accepted(result)
        return result

    def _fetch_sampled(
        self, sampled: Sampled, result: StepResult, errors: dict[int, str], dead_ends: dict[int, FinishError]
    ) -> None:
        assert self.inputs is not None and result.token_ids is not None
        are_all = self.sampled_rows is None
        if are_all and sampled.logprobs is None and all(map(math.isfinite, sampled.best_R.tolist())):
            return  # after few operations: their code is in no cache once a step has read all weights
        best_R = sampled.best_R.cpu().numpy()
        if self.sampled_rows is None:
            positions = np.arange(len(best_R))
        else:
            positions = self.sampled_rows
            for position, token in zip(positions.tolist(), sampled.ids_R.tolist(), strict=True):
                result.token_ids[position] = token
        is_bad_R = ~np.isfinite(best_R)
        if self.inputs.drafts is not None:  # positions after a rejected draft may be bad
            is_bad_R &= self.inputs.drafts.accepted(result.token_ids)[positions]
        if is_bad_R.any():
            bad = zip(self.inputs.sample_rows[positions[is_bad_R]].tolist(), best_R[is_bad_R].tolist(), strict=True)
            for row, best in bad:
                if best == -np.inf:
                    dead_ends[row] = NOTHING_LEFT
                else:
                    errors.setdefault(row, NOT_FINITE)
        if sampled.logprobs is not None:
            self._put_logprobs(result, positions[sampled.logprob_rows], sampled.logprobs.entries())

    def _fetch_candidates(
        self, candidates: Candidates, result: StepResult, errors: dict[int, str], dead_ends: dict[int, FinishError]
    ) -> None:
        assert self.inputs is not None and result.token_ids is not None
        entries = candidates.entries()
        for position, entry in zip(candidates.rows.tolist(), entries, strict=True):
            result.token_ids[position] = entry.token_id
            if not np.isfinite(entry.logprob):
                row = int(self.inputs.sample_rows[position])
                if np.isnan(entry.logprob):
                    errors.setdefault(row, NOT_FINITE)
                else:
                    dead_ends[row] = NOTHING_LEFT
        self._put_logprobs(result, candidates.rows, entries)

    def _put_logprobs(self, result: StepResult, positions: Ints, entries: Sequence[TokenLogprobs]) -> None:
        assert result.token_ids is not None
        if result.logprobs is None:
            result.logprobs = [None] * len(result.token_ids)
        for position, entry in zip(positions.tolist(), entries, strict=True):
            result.logprobs[position] = entry

    def _fetch_states(self, result: StepResult, errors: dict[int, str]) -> None:
        """Fetch pooled states, and add errors for states that are not finite."""
        assert self.inputs is not None
        if self.is_finite_R is not None:
            is_bad_R = ~self.is_finite_R.cpu().numpy()
            errors.update((row, NO_STATE) for row in self.inputs.silent_rows[is_bad_R].tolist() if row not in errors)
        if self.pooled_RE is None:
            return
        pooled = []
        for row, vector in zip(self.inputs.pool_rows.tolist(), self.pooled_RE.cpu().numpy(), strict=True):
            if np.isfinite(vector).all():
                pooled.append((row, vector.tobytes()))
            else:
                errors.setdefault(row, NO_STATE)
        result.pooled = tuple(pooled)


_RESULTS: dict[type, tuple[str, ...]] = {
    StepOutputs: ("pooled_RE", "is_finite_R"),
    Sampled: ("ids_R", "best_R"),
    SampledLogprobs: ("token_ids_R", "logprobs_R", "ranks_R", "top_ids_RK", "top_logprobs_RK"),
    Candidates: ("ids_RC", "logprobs_RC"),
}


def are_finite(inputs: StepInputs, rows: Ints, hidden_TE: Tensor) -> Tensor:
    """Return whether the state of each row's last token is finite; attending to a state that is not makes it not so."""
    last_R = inputs.silent_last_R
    if last_R is None:
        last_R = upload(hidden_TE.device, inputs.first_token_N[rows] + inputs.counts_N[rows] - 1)[0]
    return hidden_TE.index_select(0, last_R).isfinite().all(dim=1)


def score_rows(
    inputs: StepInputs,
    slots: Slots,
    hidden_TE: Tensor,
    logits: Callable[[Tensor], Tensor],
    distribution: Callable[[Tensor, Ints], RawDistribution],
) -> list[Score]:
    """Return log-probabilities of prompt tokens for each scoring row, as (row, first scored position, parts).

    Position p of a row scores the token at p + 1; the prompt's last token is scored last. At most SCORE_CHUNK positions
    have logits at once.
    """
    scores: list[Score] = []
    width = slots.ids_SW.shape[1]
    for row in inputs.score_rows.tolist():
        slot, start = int(inputs.slots_N[row]), int(inputs.starts_N[row])
        end = min(start + int(inputs.counts_N[row]), int(slots.sampler.columns.num_prompt[slot]) - 1)
        num_top = max(0, int(slots.sampler.columns.prompt_logprobs[slot]))
        first_token = int(inputs.first_token_N[row])
        parts = []
        for at in range(start, end, SCORE_CHUNK):
            until = min(at + SCORE_CHUNK, end)
            logits_RV = logits(hidden_TE[first_token + at - start : first_token + until - start])
            ids_R = slots.ids_SW.view(-1)[slot * width + at + 1 : slot * width + until + 1].long()
            parts.append(distribution(logits_RV, np.full(until - at, num_top)).columns(ids_R))
        scores.append((row, start + 1, parts))
    return scores


def pool_rows(inputs: StepInputs, hidden_TE: Tensor) -> Tensor:
    """Return the hidden state at each pooling row's last position, scaled to length 1, float32."""
    last_R = inputs.pool_last_R
    if last_R is None:
        last = inputs.first_token_N[inputs.pool_rows] + inputs.counts_N[inputs.pool_rows] - 1
        last_R = upload(hidden_TE.device, last)[0]
    pooled_RE = hidden_TE.index_select(0, last_R).float()
    return functional.normalize(pooled_RE, dim=1)
