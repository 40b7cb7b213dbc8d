"""Mirostat 2.0: keeps the surprise of the drawn ids near a target, by a bound that each draw moves.

Owns: the bound `mu` of each sequence, in bits, and draws with it. A row draws among the ids whose surprise is at most
mu (at least the best); then mu -= eta * (surprise of the drawn id among these - tau). The first mu is 2 * tau.
Does not: apply other truncations, as in llama.cpp. Nothing waits for the device, or sorts. Ids are equal on every
device: weights are integers (selection.kept_units), and the logarithm is made of additions and multiplications.
Source: Basu, Ramachandran, Keskar, Varshney, "Mirostat", ICLR 2021; version 2 as in llama.cpp.
Invariants: mu depends on the logits of all earlier draws, so ids do not determine it. It is kept by request and choice
until the request ends, so a preempted sequence resumes with its own. The last KEPT values are kept by position, because
a failed step may be repeated. An engine without it gets the request from its first token (frontend/open_request.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.request import SamplingParams
from octavo.sampling.columns import Floats, SamplingRows, SequenceIds, upload
from octavo.sampling.selection import UNITS, Draws, draw_ranked, rank_keys, scale, weigh_units

KEPT = 64  # more positions than steps are in flight
_LOG2 = math.log(2)
_TERMS = 11  # of the logarithm's series, for the precision of float64


class Mirostat:
    """The state of all sequences that draw with mirostat; other sequences have none."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.is_on: NDArray[np.bool_] = np.zeros(num_slots, dtype=np.bool_)
        self._tau: Floats = np.zeros(num_slots)
        self._eta: Floats = np.zeros(num_slots)
        self._device = device
        self._bounds: dict[str, dict[int, Tensor]] = {}  # request -> choice -> mu at position % KEPT
        self._of_slot: dict[int, Tensor] = {}

    def put(self, slot: int, params: SamplingParams, ids: SequenceIds, choice: int) -> None:
        """Set up a slot. One without outputs begins with 2 * tau; one with outputs goes on with its own bound."""
        self.is_on[slot] = is_on = params.mirostat == 2 and params.temperature > 0
        if not is_on:
            return
        self._tau[slot], self._eta[slot] = params.mirostat_tau, params.mirostat_eta
        by_choice = self._bounds.setdefault(ids.request_id, {})
        if choice not in by_choice or not len(ids.output):
            by_choice[choice] = torch.full((KEPT,), 2 * params.mirostat_tau, dtype=torch.float64, device=self._device)
        self._of_slot[slot] = by_choice[choice]

    def release(self, slot: int) -> None:
        """Empty a slot; its request's bound is kept. Idempotent."""
        self.is_on[slot] = False
        self._of_slot.pop(slot, None)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop the bounds of requests that ended."""
        for request_id in request_ids:
            self._bounds.pop(request_id, None)

    def draw(self, logits_RV: Tensor, rows: SamplingRows, draws: Draws) -> Tensor:
        """Draw one id per row, and move the rows' bounds. The id is arbitrary if a row's best logit is not finite."""
        states = [self._of_slot[slot] for slot in rows.slots.tolist()]
        at = (rows.positions % KEPT).tolist()
        mu_R1 = torch.stack([state[index] for state, index in zip(states, at, strict=True)])[:, None]
        ids_R, surprise_R1 = draw_below(logits_RV, mu_R1, draws)
        tau_R1, eta_R1 = upload(logits_RV.device, self._tau[rows.slots][:, None], self._eta[rows.slots][:, None])
        mu_R = (mu_R1 - eta_R1 * (surprise_R1 - tau_R1))[:, 0]
        for row, (state, index) in enumerate(zip(states, at, strict=True)):
            state[(index + 1) % KEPT] = mu_R[row]
        return ids_R


def draw_below(logits_RV: Tensor, mu_R1: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """Draw among the best id and the ids whose surprise is at most mu; also return the drawn ids' surprise, in bits."""
    scaled_RV, keys_RV = scale(logits_RV, draws), rank_keys(logits_RV)
    units_RV = weigh_units(scaled_RV)
    least_R1 = _logarithm(units_RV.sum(dim=1, keepdim=True)) - UNITS * _LOG2 - mu_R1 * _LOG2
    is_best_RV = keys_RV == keys_RV.amin(dim=1, keepdim=True)
    is_first_RV = is_best_RV & (is_best_RV.cumsum(dim=1) == 1)
    units_RV.masked_fill_((scaled_RV < least_R1) & ~is_first_RV, 0)
    ids_R = draw_ranked(keys_RV, units_RV, upload(logits_RV.device, draws.uniform[:, None])[0])
    drawn_R1 = units_RV.gather(1, ids_R[:, None])
    surprise_R1 = (_logarithm(units_RV.sum(dim=1, keepdim=True)) - _logarithm(drawn_R1)) / _LOG2
    return ids_R, surprise_R1


def _logarithm(x: Tensor) -> Tensor:
    """Return the natural logarithm of positive integers, float64: with z = (m - 1) / (m + 1), log m is 2 artanh z."""
    mantissa, exponent = torch.frexp(x.double())
    is_small = mantissa < math.sqrt(0.5)
    mantissa = torch.where(is_small, mantissa * 2.0, mantissa)
    z = (mantissa - 1.0) / (mantissa + 1.0)
    square = z * z
    series = torch.full_like(z, 1.0 / (2 * _TERMS + 1))
    for term in range(_TERMS - 1, -1, -1):
        series = series * square
        series = series + 1.0 / (2 * term + 1)
    return (exponent - is_small.int()).double() * _LOG2 + 2.0 * z * series
