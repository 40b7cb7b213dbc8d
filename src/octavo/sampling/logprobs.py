"""Log-probabilities of the model's own distribution: before penalties, bias and temperature.

Owns: the columns and their conversion to TokenLogprobs. Does not: sample.
Rank 1 is the best; equal logits rank by ascending id, so ranks are unique and the greedy token has rank 1.
Shapes: R rows, V vocabulary, K best requested.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.core.plan import TokenLogprobs
from octavo.sampling.columns import Ints
from octavo.sampling.selection import sorted_candidates

_RANKED_TOGETHER = 1 << 18  # logits; their sum as int64 takes 2 MiB


@dataclass(slots=True)
class RawDistribution:
    """Log-probabilities of some rows, kept while their logits are edited. `num_top`: how many best each row needs."""

    log_probs_RV: Tensor
    num_top: Ints

    def columns(self, token_ids_R: Tensor) -> SampledLogprobs:
        """Return the log-probabilities and ranks of these tokens and of the best ones; stays on the device."""
        own_R1 = self.log_probs_RV.gather(1, token_ids_R[:, None])
        ranks_R = _ranks(self.log_probs_RV, own_R1, token_ids_R)
        most = int(self.num_top.max(initial=0))
        if most:
            values_RK, best_RK = sorted_candidates(self.log_probs_RV, min(most, self.log_probs_RV.shape[1]))
        else:
            values_RK, best_RK = own_R1[:, :0], token_ids_R[:, None][:, :0]
        return SampledLogprobs(token_ids_R, own_R1[:, 0], ranks_R, best_RK[:, :most], values_RK[:, :most], self.num_top)


def _ranks(log_probs_RV: Tensor, own_R1: Tensor, token_ids_R: Tensor) -> Tensor:
    """Return the rank of each row's id. On a CPU a few rows at a time, to bound the memory of the int64 sums."""
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
