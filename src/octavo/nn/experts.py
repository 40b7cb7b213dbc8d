"""Mixtures of experts in torch: the choice of each token's experts, and the weighted sum of their outputs.

Owns: the arithmetic of the router's scores, on any device; the layer that has the weights. Twin of csrc/experts.cpp.
Does not: load.
Invariants: a token's result depends on its row alone, and is the sum over its experts in ascending order. Of equal
scores, the lower index is chosen.
Shapes: T tokens, E hidden size, X experts, C chosen experts of a token.

Source: Shazeer et al., "Outrageously Large Neural Networks", 2017; groups of experts and the bias of the choice:
DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.artifacts.model_spec import MixtureSpec
from octavo.nn.coded_linear import CodedLinear
from octavo.nn.layers import Linear


@dataclass(frozen=True, slots=True)
class Expert:
    """One expert: an MLP whose gate and up are one weight."""

    gate_up: Linear | CodedLinear
    down: Linear | CodedLinear

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self.gate_up.nbytes + self.down.nbytes

    @property
    def num_weights(self) -> int:
        """Number of weights."""
        return self.gate_up.num_weights + self.down.num_weights


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of experts. `router` is float32; its last row may be the shared expert's gate."""

    spec: MixtureSpec
    router: Linear | CodedLinear
    experts: Sequence[Expert]
    shared: Expert | None
    choice_bias_X: Tensor | None
    activation: Callable[[Tensor], Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return self.router.nbytes + sum(expert.nbytes for expert in (*self.experts, *self._shared))

    @property
    def num_weights(self) -> int:
        """Number of weights that a token is multiplied by: of chosen experts only."""
        chosen = self.experts[: self.spec.top_k]
        return self.router.num_weights + sum(expert.num_weights for expert in (*chosen, *self._shared))

    @property
    def idle_bytes(self) -> int:
        """Bytes of experts that one token does not choose."""
        return sum(expert.nbytes for expert in self.experts[self.spec.top_k :])

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Return a new tensor [T, E]."""
        logits_TX = self.router(x_TE.to(torch.float32))
        chosen_TC, weights_TC = choose_experts(logits_TX[:, : self.spec.num_experts], self.spec, self.choice_bias_X)
        out_TE = mix_experts(x_TE, chosen_TC, weights_TC, lambda expert, rows: self._run(self.experts[expert], rows))
        if self.shared is None:
            return out_TE
        shared_TE = self._run(self.shared, x_TE)
        if self.spec.has_shared_gate:
            shared_TE = shared_TE * logits_TX[:, self.spec.num_experts :].sigmoid().to(x_TE.dtype)
        return out_TE.add_(shared_TE)

    @property
    def _shared(self) -> tuple[Expert, ...]:
        return () if self.shared is None else (self.shared,)

    def _run(self, expert: Expert, x_NE: Tensor) -> Tensor:
        return expert.down(self.activation(expert.gate_up(x_NE)))


def choose_experts(logits_TX: Tensor, mixture: MixtureSpec, choice_bias_X: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the indices of each token's experts and their weights, [T, C], by descending score."""
    scores_TX = logits_TX.to(torch.float32)
    if mixture.scoring == "softmax":
        scores_TX = scores_TX.softmax(-1)
    elif mixture.scoring == "sigmoid":
        scores_TX = scores_TX.sigmoid()
    choices_TX = scores_TX if choice_bias_X is None else scores_TX + choice_bias_X
    if mixture.num_groups > mixture.top_groups:
        choices_TX = _only_best_groups(choices_TX, mixture)
    chosen_TC = _top(choices_TX, mixture.top_k)
    weights_TC = scores_TX.gather(-1, chosen_TC)
    if mixture.scoring == "softmax_of_chosen":
        weights_TC = weights_TC.softmax(-1)
    if mixture.is_normalised:
        weights_TC = weights_TC / weights_TC.sum(-1, keepdim=True).clamp_min(mixture.least_sum)
    return chosen_TC, weights_TC * mixture.scale


def mix_experts(
    x_TE: Tensor, chosen_TC: Tensor, weights_TC: Tensor, compute: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """Return each token's weighted sum of its experts' outputs; `compute(expert, rows)` is called for chosen ones.

    On a device, the host waits once, for the numbers of tokens of the experts.
    """
    chosen_P = chosen_TC.flatten()  # pairs of a token and an expert
    order_P = chosen_P.argsort(stable=True)
    tokens_P, weights_P1 = order_P // chosen_TC.shape[1], weights_TC.flatten()[order_P, None].to(x_TE.dtype)
    out_TE, first = torch.zeros_like(x_TE), 0
    for expert, count in sorted(Counter(chosen_P.tolist()).items()):
        tokens_N, weights_N1 = tokens_P[first : first + count], weights_P1[first : first + count]
        part_NE = compute(expert, x_TE.index_select(0, tokens_N)) * weights_N1
        out_TE.index_add_(0, tokens_N, part_NE.to(x_TE.dtype))  # a token occurs once, so there is one order
        first += count
    return out_TE


def _top(scores_TX: Tensor, count: int) -> Tensor:
    """Return the indices of the highest scores; torch.topk leaves the choice among equal ones open."""
    return scores_TX.sort(dim=-1, descending=True, stable=True)[1][:, :count]


def _only_best_groups(choices_TX: Tensor, mixture: MixtureSpec) -> Tensor:
    """Return the scores with -infinity outside the groups whose two best scores have the highest sums."""
    grouped_TGS = choices_TX.view(len(choices_TX), mixture.num_groups, -1)
    sums_TG = grouped_TGS.topk(min(2, grouped_TGS.shape[-1]), -1)[0].sum(-1)
    is_chosen_TG = torch.zeros_like(sums_TG, dtype=torch.bool).scatter_(-1, _top(sums_TG, mixture.top_groups), True)
    return grouped_TGS.masked_fill(~is_chosen_TG[..., None], -torch.inf).view_as(choices_TX)
