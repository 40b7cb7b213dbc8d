"""Mixtures of experts: the choice of each token's experts, and the weighted sum of their outputs.

Owns: the layer that has the weights; the arithmetic of the router's scores and of the sum in torch, which is the twin
of csrc/experts.cpp and of ops/triton/experts.py; the choice of the latter on a device. Does not: load.
Invariants: a token's result depends on its row alone. It is the sum over its experts in ascending order, in float32,
rounded once. Of equal scores, the lower index is chosen.
Shapes: T tokens, E hidden size, X experts, C chosen experts of a token, P = T * C pairs of a token and an expert, F
outputs and I intermediate size of an expert, N tiles of B pairs of one expert.

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
from octavo.nn.coded_linear import CodedLinear, DeviceCodes, Part, outputs_of
from octavo.nn.layers import Linear

_SCORINGS = ("softmax", "softmax_of_chosen", "sigmoid")  # by their numbers in ops/triton/experts.py


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
class StackedLinear:
    """A linear layer of each of several experts: parts of their outputs, in order, each [X * F, E], and biases [X, F].

    The experts' own layers are windows of it, so it has no memory of its own.
    """

    num_experts: int
    parts: Sequence[Part]
    bias_XF: Tensor | None

    def of_expert(self, expert: int) -> tuple[list[Part], Tensor | None]:
        """Return one expert's parts and bias, without a copy."""
        windows: list[Part] = []
        for part in self.parts:
            size = outputs_of(part) // self.num_experts
            rows = range(expert * size, (expert + 1) * size)
            windows.append(part.window(rows) if isinstance(part, DeviceCodes) else part[rows.start : rows.stop])
        return windows, None if self.bias_XF is None else self.bias_XF[expert]

    def __call__(self, x_NE: Tensor, pairs_NB: Tensor, tiles: Tensor, num_pairs: int) -> Tensor:
        """Return each pair's product [P, F], by Triton's kernels; x has a row for each pair, or for each token."""
        sizes = [outputs_of(part) // self.num_experts for part in self.parts]
        out_PF, first, shared = x_NE.new_empty((num_pairs, sum(sizes))), 0, num_pairs // max(1, len(x_NE))
        for part, size in zip(self.parts, sizes, strict=True):
            bias_XF = None if self.bias_XF is None else self.bias_XF[:, first : first + size]
            where = (bias_XF, pairs_NB, tiles, shared, out_PF[:, first : first + size])
            if isinstance(part, DeviceCodes):
                weight = (part.codes_CF32, part.scales_GF, part.minima_GF, part.table)
                torch.ops.octavo.expert_coded_linear(x_NE, *weight, *where)
            else:
                torch.ops.octavo.expert_linear(x_NE, part, *where)
            first += size
        return out_PF


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of experts. `router` is float32; its last row may be the shared expert's gate.

    `stacked` has the experts' gate and up, and down, where Triton's kernels compute them; without it, the host asks the
    device which experts were chosen, once a call.
    """

    spec: MixtureSpec
    router: Linear | CodedLinear
    experts: Sequence[Expert]
    shared: Expert | None
    choice_bias_X: Tensor | None
    activation: Callable[[Tensor], Tensor]
    stacked: tuple[StackedLinear, StackedLinear] | None = None

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
        return self.mix(x_TE, self.router(x_TE.to(torch.float32)))

    def mix(self, x_TE: Tensor, logits_TX: Tensor) -> Tensor:
        """Return the mixtures of tokens whose router's logits these are, as a new tensor [T, E]."""
        spec, count = self.spec, self.spec.num_experts
        shared_TE = None if self.shared is None else self._run(self.shared, x_TE)
        gates_T1 = logits_TX[:, count:] if spec.has_shared_gate else None
        if self.stacked is not None:
            return self._mix_stacked(self.stacked, x_TE, logits_TX[:, :count], shared_TE, gates_T1)
        chosen_TC, weights_TC = choose_experts(logits_TX[:, :count], spec, self.choice_bias_X)
        out_TE = mix_experts(x_TE, chosen_TC, weights_TC, lambda expert, rows: self._run(self.experts[expert], rows))
        if shared_TE is not None:
            out_TE += shared_TE if gates_T1 is None else shared_TE * gates_T1.sigmoid()
        return out_TE.to(x_TE.dtype)

    def _mix_stacked(
        self,
        stacked: tuple[StackedLinear, StackedLinear],
        x_TE: Tensor,
        logits_TX: Tensor,
        shared_TE: Tensor | None,
        gates_T1: Tensor | None,
    ) -> Tensor:
        spec, ops = self.spec, torch.ops.octavo
        how = (_SCORINGS.index(spec.scoring), spec.is_normalised, spec.least_sum, spec.scale)
        groups = (spec.num_groups, spec.top_groups)
        chosen_TC, weights_TC = ops.choose_experts(logits_TX, self.choice_bias_X, spec.top_k, *how, *groups)
        order = (*ops.arrange_pairs(chosen_TC, spec.num_experts, x_TE.dtype), chosen_TC.numel())
        gate_up, down = stacked
        parts_PE = down(self.activation(gate_up(x_TE, *order)), *order)
        out_TE: Tensor = ops.sum_experts(parts_PE, weights_TC, shared_TE, gates_T1)
        return out_TE

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
    """Return each token's weighted sum of its experts' outputs, float32; `compute(expert, rows)` is of chosen ones.

    On a device, the host waits once, for the numbers of tokens of the experts.
    """
    chosen_P = chosen_TC.flatten()  # pairs of a token and an expert
    order_P = chosen_P.argsort(stable=True)
    tokens_P, weights_P1 = order_P // chosen_TC.shape[1], weights_TC.flatten()[order_P, None].float()
    out_TE, first = torch.zeros_like(x_TE, dtype=torch.float32), 0
    for expert, count in sorted(Counter(chosen_P.tolist()).items()):
        tokens_N, weights_N1 = tokens_P[first : first + count], weights_P1[first : first + count]
        part_NE = compute(expert, x_TE.index_select(0, tokens_N)) * weights_N1
        out_TE.index_add_(0, tokens_N, part_NE)  # a token occurs once, so there is one order
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
